"""Models of a few thousand random weights, and rows of token ids to try laws on.

B batch · Q query · R response · V vocabulary · H hidden.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate.state import AcceleratorState
from ruamel.yaml import YAML
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlhf_tasks import config
from rlhf_tasks.config import Launch, Optimization, Ppo, Scratch
from rlhf_tasks.data import tokenizer as tokenizers
from rlhf_tasks.data.batches import Batch, collate
from rlhf_tasks.data.synthetic import generate
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.models import contracts
from rlhf_tasks.models.heads import TokenScores
from rlhf_tasks.models.load import add_score_head, from_scratch, save_checkpoint
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training.distributed import Distributed
from tests import families

ROOT = Path(__file__).parents[1]
Family = Literal["gpt_neox", "llama", "qwen2", "gpt2"]
FAMILIES: tuple[Family, ...] = ("gpt_neox", "llama", "qwen2", "gpt2")
WORDS = [f"w{i}" for i in range(20)]
PAD, EOS = 0, 1
HIDDEN = 16
VOCAB = 3 + len(WORDS)
NEOX_LINEAR = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
GOLD = {"kind": "gold", "name": "gold"}
HELDOUT = {"kind": "reward_model", "name": "reward_model", "path": "models/reward_heldout"}
WITHOUT_REWARD: Mapping[str, Any] = {
    "reward.train": False,
    "ppo.scorers": [{"kind": "dummy"}],
    "ppo.advantages.critic": {"kind": "separate", "init": "sft"},
    "judge.judges": [GOLD],
}
"""Changes to params.yaml that leave nobody who would ask for a reward model."""


def shape(family: Family = "llama") -> Scratch:
    return Scratch(
        family=family, hidden_size=HIDDEN, num_layers=2, num_heads=2, vocab_size=1024, tokenizer="words"
    )


@functools.cache
def tokenizer() -> Tokenizer:
    """<pad> 0, <eos> 1, <unk> 2, and twenty words."""
    return tokenizers.train(shape(), [" ".join(WORDS)], max_length=64)


def causal(family: Family = "llama", seed: int = 0, words: Tokenizer | None = None) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = from_scratch(shape(family), words or tokenizer(), max_positions=128)
    model.eval()
    return model


OTHERS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "opt": {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "llama4_text": {"floor_scale": 8192, "attention_chunk_size": 8192},
    **{name: {} for name in ("minicpm3", "modernbert-decoder", "olmoe", "codegen", "xglm", "ctrl")},
}
"""Families whose head, classifier or width is not as llama's, and what makes it so; OPT as OPT-350m, whose
head reads states of another width than the layers'."""
CHANGING = ("gemma2", "cohere", "granite", "minicpm3", "modernbert-decoder")
"""Those that change the states before the head, or the logits after it."""


def other(family: str, seed: int = 0) -> PreTrainedModel:
    """A causal LM of another family, random, without dropout."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.5, "bos_token_id": EOS}
    return families.causal(family, seed, **sizes | {**OTHERS[family]})


def in_float64(family: str) -> PreTrainedModel:
    """`other`, in float64 where its code runs in that."""
    model = other(family)
    return model if family in ("xglm", "olmoe") else model.double()


def scores(family: Family = "llama", seed: int = 0) -> TokenScores:
    """A reward (or value) model with a random head."""
    made = copy.deepcopy(causal(family).config)
    made.num_labels = 1
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(made, dtype=torch.float32)
    return TokenScores(model.eval()).eval()


def rows(count: int, seed: int = 0, longest: int = 9) -> tuple[list[Ids], list[Ids]]:
    """Queries, and responses of which every other one ends with EOS; of all lengths."""
    rng = random.Random(seed)

    def ids() -> Ids:
        return [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))]

    queries = [ids() for _ in range(count)]
    return queries, [ids() + [EOS] * (i % 2) for i in range(count)]


@torch.no_grad()
def logits_alone(model: PreTrainedModel, query: Ids, response: Ids) -> Tensor:
    """(R, V) logits before each response token of one row: no padding, no mask, no positions given."""
    logits: Tensor = model(torch.tensor([query + response])).logits[0]
    return logits[len(query) - 1 : -1]


def response_logits(model: nn.Module, batch: Batch) -> Tensor:
    """(B, R, V) logits that predict the response tokens of a padded batch."""
    out = model(
        input_ids=batch.query_response,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.num_response_columns + 1,
    )
    logits: Tensor = out.logits
    return logits[:, :-1]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within the block torch has so many threads; with two, a stage's process has two workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def distributed(precision: Literal["fp32", "bf16"] = "fp32") -> Distributed:
    """One process. Those of another precision end: accelerate allows one at a time."""
    wanted = "no" if precision == "fp32" else "bf16"
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != wanted:
        AcceleratorState._reset_state()
    return Distributed(Launch(precision=precision), seed=1)


def optimization(**changes: Any) -> Optimization:
    given = {"learning_rate": 1e-2, "warmup_fraction": 0.0, "weight_decay": 0.0, "batch_size": 8}
    return Optimization.model_validate(given | {"micro_batch_tokens": 16384} | changes)


def ppo(**changes: Any) -> Ppo:
    """The shipped section in small, without what ends or shows a run; `a__b` is the key `a.b`."""
    sizes = {
        "total_episodes": 64,
        "rollout_batch_size": 16,
        "num_mini_batches": 2,
        "learning_rate": 1e-3,
        "schedule": "constant",
        "micro_batch_tokens": 4096,
        "response_length": 8,
        "temperature": 0.8,
        "kl_coef": 0.05,
        "guards": None,
        "num_sample_generations": 1,
        "num_selections": 1,
        "num_selection_prompts": 8,
    }
    given = {f"ppo.{key.replace('__', '.')}": value for key, value in (sizes | changes).items()}
    return Ppo.model_validate(params(given)["ppo"])


# -------------------------------------------------------------------------- parameters, workspaces


def params(changes: Mapping[str, Any] | None = None, *, gate: bool = False) -> dict[str, Any]:
    """All values of the shipped params.yaml with `{"ppo.kl_coef": 0.1, …}` changed; its gate on demand."""
    tree = config.load(ROOT / "params.yaml").model_dump(mode="json", by_alias=True)
    if not gate and not any(key.startswith("promotion") for key in changes or {}):
        tree["promotion"] = None
    config.merge(tree, together(changes or {}))
    return tree


def write_params(folder: Path, changes: Mapping[str, Any] | None = None, *, gate: bool = False) -> None:
    """That as the params.yaml of a folder."""
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(params(changes, gate=gate), file)


def together(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes by dotted key as one tree."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        config.merge(tree, config.nested(key, value), None)
    return tree


def view(stage: config.Stage, changes: Mapping[str, Any] | None = None) -> Any:
    return config.VIEWS[stage].of(config.validate(params(changes), "test"))


def run(
    stage: config.Stage,
    settings: config.Config | Mapping[str, Any] | None = None,
    tracker: NullTracker | None = None,
) -> dict[str, float]:
    """The metrics, all finite, of a stage in the working folder, by a config or by changes of params.yaml."""
    if not isinstance(settings, config.Config):
        settings = config.validate(params(settings), "test")
    module, its_view = importlib.import_module(runner.module_of(stage)), config.VIEWS[stage].of(settings)
    metrics: dict[str, float] = module.run(its_view, Paths(), tracker or NullTracker(stage))
    assert all(map(math.isfinite, metrics.values())), stage
    return metrics


def write_rows(root: Path, role: str, split: str, rows: Sequence[Mapping[str, str]]) -> None:
    folder = root / "data" / role
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), folder / f"{split}.parquet")


def workspace(root: Path) -> Path:
    """Synthetic data in small, and random models of all roles that fit each other."""
    tables = generate(1, num_prompts=40, num_sft=40, num_preferences=40, num_validation=12, num_test=12)
    for role, splits in tables.items():
        for split, found in splits.items():
            write_rows(root, role, split, found)
            if role == "preferences":
                write_rows(root, "comparisons", split, [row | {"origin": "given"} for row in found])
    looks = [
        row | {"episode": episode, "response": answer or row["reference"]}
        for episode, answer in ((0, " my stuff"), (16, None))
        for row in tables["prompts"]["validation"]
    ]
    (root / "evaluation/ppo").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(looks), root / "evaluation/ppo/answers.parquet")
    texts = [row["prompt"] + row["completion"] for row in tables["sft"]["train"]]
    words = tokenizers.train(shape(), texts, max_length=128)
    tokenizers.save(words, root / "data/tokenizer")
    for number, name in enumerate(("base", "sft", "policy")):
        _save(root, name, causal("gpt_neox", number, words), words, {})
    sft = {"parents": {"sft": contracts.fingerprint(root / "models/sft")}}
    for number, name in enumerate(("reward", "reward_heldout")):
        made = add_score_head(root / "models/sft", torch.Generator().manual_seed(number))
        _save(root, name, made.model, words, sft)
    for name in ("dpo", "value"):
        (root / "models" / name).mkdir()
        (root / f"models/{name}/README.md").write_text("no model", encoding="utf-8")
    return root


def _save(
    root: Path, name: str, model: PreTrainedModel, words: Tokenizer, identity: Mapping[str, Any]
) -> None:
    folder = root / "models" / name
    folder.mkdir(parents=True)
    save_checkpoint(model, words, folder, identity=identity, card="a card")


def last_scores_alone(scores: TokenScores, queries: Sequence[Ids], answers: Sequence[Ids]) -> Tensor:
    """(B,) the score after each row's last token, every row in a batch of its own."""
    with torch.no_grad():
        found = [scores(collate([q], [a], PAD))[0, -1] for q, a in zip(queries, answers, strict=True)]
    return torch.stack(found)
