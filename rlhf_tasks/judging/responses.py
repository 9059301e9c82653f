"""The responses that stage judge compares, kept so that another judge needs no new samples.

The files are in .rlhf/responses, named by a digest of everything that decides a sample: the weights, the
tokenizer, the prompts, the settings, and the code, library versions and threads. Responses of a checkpoint
whose weights are not safetensors are not kept.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from rouge_score.rouge_scorer import RougeScorer
from transformers import GenerationConfig

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView
from rlhf_tasks.data import batches, columns
from rlhf_tasks.data.batches import read_table, sets_of
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.data.tokenizer import Ids, encode, load_tokenizer, response_texts
from rlhf_tasks.judging.results import BestOfN, ResponseStatistics
from rlhf_tasks.judging.statistics import best_of_n_kl
from rlhf_tasks.models import contracts, load, sampling, stop_tokens
from rlhf_tasks.models.load import fetch_tokenizer, load_causal, load_config, place
from rlhf_tasks.models.sampling import sample_responses
from rlhf_tasks.models.stop_tokens import StopTokens, close_responses, ends_of, has_ended
from rlhf_tasks.models.tensors import distinct
from rlhf_tasks.project import atomic, hashing, ready_models
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring import reward_model
from rlhf_tasks.scoring.protocol import NonFiniteScore, Responses

DECISIVE_FILES = ("*.json", "*.txt", "*.jinja", "*.model")  # besides the weights, these decide a sample
CODE = [str(module.__file__) for module in (sampling, stop_tokens, batches, load)]
SAMPLED = ("sft", "policy")
START = -1  # stands before a response's first token, so that responses of one token have a 2-gram too
BASE = "base"  # sampled too where it is the bar of the gate
BEST_OF_N = "best_of_n"  # of a model's, where `judge.best_of_n` is set

Source = tuple[str | Path, str | None]
"""A checkpoint's folder or hub id, and its revision."""


@dataclass(frozen=True)
class SampledResponses:
    """Token ids as they were sampled, and with EOS where they have ended; texts without EOS."""

    sampled: list[Ids]
    ids: list[Ids]
    texts: list[str]
    ended: list[bool]
    seconds: float = field(default=0.0, compare=False)
    """Of sampling, when the responses were sampled."""


def share_ends(sources: Iterable[Source]) -> list[StopTokens]:
    """For each of these checkpoints the ends of all of them in its own ids.

    An end that a tokenizer does not have as one token cannot end its responses.
    """
    vocabularies, tokens = list[dict[str, int]](), list[str]()
    for source, revision in sources:
        folder = fetch_tokenizer(str(source), revision)
        tokenizer = load_tokenizer(folder)
        try:
            config = GenerationConfig.from_pretrained(folder)
        except OSError:  # as `from_pretrained` of the model makes it
            config = GenerationConfig.from_model_config(load_config(source, revision))
        vocabularies.append(tokenizer.get_vocab())
        tokens += filter(None, tokenizer.convert_ids_to_tokens(list(ends_of(config, tokenizer))))
    return [tuple(dict.fromkeys(known[one] for one in tokens if one in known)) for known in vocabularies]


def sample(
    source: str | Path,
    prompts: Sequence[str],
    *,
    paths: Paths,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: torch.device,
    precision: str = "fp32",
    revision: str | None = None,
    ends: Iterable[int] = (),
) -> SampledResponses:
    """One response to each prompt. Models that are sampled with one seed can be compared fairly.

    A response ends with the checkpoint's own ends and with `ends`, those of all models that are compared.

    Raises:
        ContractError: if the checkpoint cannot be read.
    """
    folder = fetch_tokenizer(str(source), revision)
    tokenizer = load_tokenizer(folder)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    settings["precision"] = precision
    key = _key(folder, revision, prompts, settings | {"ends": sorted(ends)}, device)
    kept = None if key is None else paths.home / "responses" / f"{key}.json"
    if kept is not None and kept.exists():
        samples = json.loads(kept.read_text(encoding="utf-8"))
    else:
        model = place(load_causal(source, revision), device).eval()
        contracts.check_fits(model, tokenizer, str(source))
        all_ends = ends_of(model, tokenizer, ends)
        began_at = time.monotonic()
        ids = sample_responses(model, tokenizer, prompts, ends=all_ends, **settings)
        samples = {
            "seconds": time.monotonic() - began_at,
            "sampled": ids,
            "ids": close_responses(tokenizer, ids, all_ends),
            "ended": [has_ended(row, all_ends) for row in ids],
        }
        if kept is not None:
            atomic.write_text(kept, json.dumps(samples))
    texts = response_texts(tokenizer, encode(tokenizer, prompts), samples["ids"])
    return SampledResponses(**samples, texts=texts)


def _key(
    folder: Path, revision: str | None, prompts: Sequence[str], settings: dict[str, Any], device: torch.device
) -> str | None:
    """The digest of what decides these responses; None where the weights have no fingerprint."""
    if revision is None and not (ready_models.read(folder) or any(folder.glob("*.safetensors"))):
        return None
    known = sorted(file for kind in DECISIVE_FILES for file in folder.glob(kind))
    files = [file for file in known if file.name not in (contracts.IDENTITY, ready_models.FILE)]
    return hashing.json_sha256(
        {
            "weights": revision or contracts.fingerprint(folder),
            "files": {file.name: hashing.file_hash(file) for file in files},
            "prompts": list(prompts),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": torch.get_num_threads(),
            "versions": [module.__version__ for module in (torch, transformers, tokenizers)],
            "code": [hashing.file_hash(Path(file)) for file in (__file__, *CODE)],
            **settings,
        }
    )


@dataclass(frozen=True)
class ModelResponses:
    """The responses of all models to the same test prompts."""

    prompts: list[str]
    texts: dict[str, list[str]]
    """By model, the references included where the data has them."""
    sampled: dict[str, SampledResponses]
    columns: Columns
    """The kept columns of the prompts' rows."""
    sets: list[str]
    """The name of each prompt's set in a mixture; empty otherwise."""
    best_of_n: BestOfN | None = None


def sample_models(config: JudgeView, paths: Paths, device: torch.device) -> ModelResponses:
    rows = read_table(paths, "prompts", "test")[: config.judge.num_examples]
    prompts = [row["prompt"] for row in rows]
    names = (*SAMPLED, *([BASE] if config.judge.bar == BASE else []))
    sampled, measured = sample_alike(config, paths, prompts, device, names=names), None
    if (n := config.judge.best_of_n) is not None:
        sampled[BEST_OF_N], measured = _sample_best(config, paths, prompts, n, device)
    texts = {name: responses.texts for name, responses in sampled.items()}
    if rows[0]["reference"] is not None:  # of prompts alone, no row has one
        texts = {"reference": [row["reference"] for row in rows]} | texts
    return ModelResponses(prompts, texts, sampled, columns.of_rows(rows), sets_of(rows), measured)


def _sample_best(
    config: JudgeView, paths: Paths, prompts: Sequence[str], n: int, device: torch.device
) -> tuple[SampledResponses, BestOfN]:
    """Of n responses to each of N prompts the first that models/reward scores highest; its cost."""
    repeated = [prompt for prompt in prompts for _ in range(n)]
    seed = config.seed + 2  # other draws than those of the models' own responses, and of pairs of samples
    who = config.judge.best_of_n_model
    drawn = sample_alike(config, paths, repeated, device, names=[who], seed=seed)[who]
    model, rows = reward_model.load(paths.reward, device), list(zip(repeated, drawn.texts, strict=True))
    began_at, distinct = time.monotonic(), list(dict.fromkeys(rows))  # equal responses get one score
    with console.part(f"{len(distinct)} responses by models/reward"):
        values = model(Responses.of_texts([p for p, _ in distinct], [r for _, r in distinct])).tolist()
    seconds = drawn.seconds + time.monotonic() - began_at
    score_of = dict(zip(distinct, values, strict=True))
    scores = np.array([score_of[row] for row in rows]).reshape(-1, n)  # (N, n)
    if not np.isfinite(scores).all():
        raise NonFiniteScore(f"models/reward gave a response of models/{who} NaN or infinity")
    best = [n * i + int(k) for i, k in enumerate(scores.argmax(axis=1))]
    lists: tuple[Any, ...] = (drawn.sampled, drawn.ids, drawn.texts, drawn.ended)
    sampled, ids, texts, ended = ([values[i] for i in best] for values in lists)
    return SampledResponses(sampled, ids, texts, ended), BestOfN(
        model=who,
        n=n,
        kl=best_of_n_kl(scores),
        kl_bound=float(np.log(n)) - (n - 1) / n,
        tokens=sum(map(len, drawn.ids)) / len(prompts),
        seconds=seconds / len(prompts),
    )


def sample_alike(
    config: JudgeView,
    paths: Paths,
    prompts: Sequence[str],
    device: torch.device,
    *,
    sources: Mapping[str, Source] | None = None,
    names: Sequence[str] = (),
    seed: int | None = None,
) -> dict[str, SampledResponses]:
    """The responses of models, by default of the run's, or of those called `names`, as stage judge samples.

    They have one seed, and a response ends where any of the `sources` would end it.
    """
    if sources is None:
        sources = {name: (paths.models / name, None) for name in (*SAMPLED, BASE)}
    sampled = dict[str, SampledResponses]()
    ends = dict(zip(sources, share_ends(sources.values()), strict=True))
    with console.progress("judge", len(names or sources), unit="models") as bar:
        for name in names or sources:
            source, revision = sources[name]
            sampled[name] = sample(
                source,
                prompts,
                paths=paths,
                max_new_tokens=config.max_completion_tokens,
                temperature=config.judge.temperature,
                seed=config.seed if seed is None else seed,
                device=device,
                precision=config.launch.precision,
                revision=revision,
                ends=ends[name],
            )
            bar.advance()
    return sampled


class RougeTokenizer:
    """Words for ROUGE, whose own tokenizer reads Latin letters without accents alone."""

    def tokenize(self, text: str) -> list[str]:
        """Words in small letters; of Chinese, Japanese and Thai, which write none apart, the characters.

        Vowel signs, as Hindi has them, divide a word.
        """
        characters = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff"
        return re.findall(rf"[{characters}]|[^\W_{characters}]+", text.lower())


def response_statistics(
    responses: SampledResponses, references: Sequence[str] | None, sft_perplexity: float
) -> ResponseStatistics:
    """ROUGE-L against the references (Lin 2004, F measure), lengths in tokens, and repetition."""
    scorer, rouge_l = RougeScorer(["rougeL"], tokenizer=RougeTokenizer()), None
    grams = Counter(pair for ids in responses.ids for pair in pairwise([START, *ids]))
    if references is not None:
        pairs = zip(references, responses.texts, strict=True)
        rouge = [scorer.score(reference, text)["rougeL"].fmeasure for reference, text in pairs]
        rouge_l = sum(rouge) / len(rouge)
    return ResponseStatistics(
        rouge_l=rouge_l,
        length=sum(map(len, responses.ids)) / len(responses.ids),
        ended=sum(responses.ended) / len(responses.ended),
        distinct_1=float(distinct(responses.ids, 1).mean()),
        distinct_2=float(distinct(responses.ids, 2).mean()),
        repetition=1 - float(distinct(responses.ids, 3).mean()),
        corpus_distinct_2=len(grams) / grams.total(),
        sft_perplexity=sft_perplexity,
    )
