"""Stage sft: supervised fine-tuning on completion tokens only, to the validation minimum."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rlhf_tasks import console, models
from rlhf_tasks.checkpoint import whole
from rlhf_tasks.config import Split, StageView
from rlhf_tasks.data.batches import encode, encode_answers, load_tokenizer, read_table
from rlhf_tasks.runtime import Runtime
from rlhf_tasks.supervised import Best, LanguageModelling, evaluate, fit
from rlhf_tasks.tracking import Tracker

BASE = Path("models/base")
OUT = Path("models/sft")


def run(config: StageView, tracker: Tracker) -> dict[str, float]:
    """Write models/sft. Metrics: loss, perplexity, token_accuracy on validation; steps trained and kept."""
    rt = Runtime(config.launch, config.seed)
    settings = config.sft
    if settings.source is not None:
        model, tokenizer = models.fetch(settings.source, settings.revision)
        models.check_fits(model, tokenizer, f"sft.from={settings.source}")
        model.to(rt.device)
        parents: dict[str, Any] = {}
        steps = {}
    else:
        model, tokenizer = models.load_causal(BASE).to(rt.device), load_tokenizer(BASE)
        parents = {"base": models.fingerprint(BASE)}
        steps = _train(rt, config, model, tokenizer, tracker)
    result = evaluate(rt, model, demonstrations(tokenizer, "validation"), settings.micro_batch_tokens)
    if rt.is_main:
        with whole(OUT) as folder:
            models.save(
                model, tokenizer, folder,
                identity={"kind": "policy", "parents": parents},
                card=models.model_card(
                    "SFT policy", task="sft", parameters=config.declared(),
                    inputs={"data/sft": models.file_hash(Path("data/sft")), **({"models/base": parents["base"]} if parents else {"foreign checkpoint": "lineage unknown"})},
                    how="Fine-tuned on demonstrations, completion tokens only, at its validation minimum.",
                ),
            )  # fmt: skip
    rt.barrier()
    loss = result["loss"]
    return {"loss": loss, "perplexity": math.exp(loss), "token_accuracy": result["token_accuracy"], **steps}


def demonstrations(tokenizer: models.PreTrainedTokenizerBase, split: Split) -> LanguageModelling:
    rows = read_table("sft", split)
    return LanguageModelling(
        encode(tokenizer, [row["prompt"] for row in rows]),
        encode_answers(tokenizer, [row["completion"] for row in rows]),
        tokenizer.pad_token_id,
    )


def _train(
    rt: Runtime,
    config: StageView,
    model: models.PreTrainedModel,
    tokenizer: models.PreTrainedTokenizerBase,
    tracker: Tracker,
) -> dict[str, float]:
    """Train in place and go back to the validation minimum."""
    settings = config.sft
    train, validation = demonstrations(tokenizer, "train"), demonstrations(tokenizer, "validation")
    best, last = Best(settings.patience), 0
    with console.progress("sft", settings.num_epochs, unit="epoch") as bar:
        for step in fit(rt, model, train, settings, config.seed):
            tracker.metrics(step.metrics, step=step.number)
            bar.advance(settings.num_epochs / step.num_steps, loss=step.metrics["train/loss"], best=best.loss)
            last = step.number
            every = max(1, round(step.num_steps / (settings.num_epochs * settings.evals_per_epoch)))
            if step.number % every == 0 or step.number == step.num_steps:
                found = evaluate(rt, model, validation, settings.micro_batch_tokens)
                tracker.metrics({f"eval/{key}": value for key, value in found.items()}, step=step.number)
                best.offer(model, found["loss"], step.number)
                if best.exhausted:
                    break
    best.restore(model)
    return {"steps_trained": last, "step_kept": best.step}
