"""Stage sft: supervised fine-tuning on completion tokens only, until the validation loss is lowest."""

from __future__ import annotations

import math

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config import Sft, SftView, Split
from rlhf_tasks.data.batches import TokenBudget, load_tokenizer
from rlhf_tasks.modeling import contracts
from rlhf_tasks.modeling.load import fetch_tokenizer, load_causal, save_checkpoint
from rlhf_tasks.project import hashing
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import checkpoint, sharding
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import demonstrations, evaluate, train

SPLITS: tuple[Split, ...] = ("train", "validation")


def run(config: SftView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/sft. Metrics: loss, perplexity, token_accuracy on validation; steps trained and kept."""
    rt = Runtime(config.launch, config.seed)
    settings = config.sft
    if settings.source is not None:
        model, tokenizer, parents = _fetched(paths, settings)
        rt.put(model)
        origin, steps = {f"sft.from={settings.source}": "lineage unknown"}, {}
    else:
        model, tokenizer = rt.place(load_causal(paths.base)), load_tokenizer(paths.base)
        parents = {"base": contracts.fingerprint(paths.base)}
        origin = {"models/base": parents["base"]}
        steps = _train(rt, paths, config, model, tokenizer, tracker)
    validation = demonstrations(paths, tokenizer, "validation")
    result = evaluate(rt, model, validation, TokenBudget(settings.micro_batch_tokens))
    with sharding.to_save(model) as plain:
        if rt.is_main:
            with whole(paths.sft) as folder:
                save_checkpoint(
                    plain, tokenizer, folder,
                    identity=contracts.identity("policy", parents),
                    card=contracts.model_card(
                        "SFT policy", task="sft", parameters=config.declared,
                        inputs={"data/sft": hashing.file_hash(paths.rows("sft")), **origin},
                        how="Trained on demonstrations, completion tokens only, to the validation minimum.",
                    ),
                )  # fmt: skip
    rt.barrier()
    loss = result["loss"]
    return {"loss": loss, "perplexity": math.exp(loss), "token_accuracy": result["token_accuracy"], **steps}


def _fetched(paths: Paths, settings: Sft) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, str]]:
    """An existing SFT model, its tokenizer and known parents, checked against the data and the base."""
    assert settings.source is not None
    where, name = fetch_tokenizer(settings.source, settings.revision), f"sft.from={settings.source}"
    contracts.check_same_tokenizer(paths.tokenizer, where)
    contracts.check_parent(where, "base", paths.base)
    model, tokenizer = load_causal(settings.source, settings.revision), load_tokenizer(where)
    contracts.check_same_shape(model, name, paths.base)
    contracts.check_fits(model, tokenizer, name)
    return model, tokenizer, contracts.read_parents(where)


def _train(
    rt: Runtime,
    paths: Paths,
    config: SftView,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tracker: Tracker,
) -> dict[str, float]:
    """Train in place, and restore the weights with the lowest validation loss."""
    settings = config.sft
    with checkpoint.open(rt, paths, config, "sft") as snapshots:
        state = train(
            rt,
            model,
            demonstrations(paths, tokenizer, "train"),
            settings,
            seed=config.seed,
            name="sft",
            tracker=tracker,
            snapshots=snapshots,
            validation=demonstrations(paths, tokenizer, "validation"),
            num_evaluations=settings.num_epochs * settings.evals_per_epoch,
            patience=settings.patience,
        )
    return {"steps_trained": state.step, "step_kept": state.best_step}
