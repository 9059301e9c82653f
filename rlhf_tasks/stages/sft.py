"""Stage sft: supervised fine-tuning on completion tokens only, until the validation loss is lowest."""

from __future__ import annotations

import math

from rlhf_tasks.config import SftView
from rlhf_tasks.data.chat import DATE, PLAIN
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import PROMPTS_ALONE, UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import fetch_tokenizer, load_causal
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.project import hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import checkpoint
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.supervised import evaluate, save, train
from rlhf_tasks.training.tasks import demonstrations


def run(config: SftView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/sft. Metrics: loss, perplexity, token_accuracy on validation; steps trained and kept.

    There are none for a ready model where the data has no demonstrations.
    """
    dist, settings = Distributed(config.launch, config.seed), config.sft
    metrics: dict[str, float] = {}
    if settings.source is not None:
        # 1a. A ready model, checked against the data and the base.
        where, name = fetch_tokenizer(settings.source, settings.revision), f"sft.from={settings.source}"
        contracts.check_same_tokenizer(paths.tokenizer, where)
        contracts.check_parent(where, "base", paths.base)
        model, tokenizer = load_causal(settings.source, settings.revision), load_tokenizer(where)
        contracts.check_same_shape(model, name, paths.base)
        contracts.check_fits(model, tokenizer, name)
        of_data = load_tokenizer(paths.tokenizer).init_kwargs
        tokenizer.init_kwargs |= {key: of_data[key] for key in (DATE, PLAIN) if key in of_data}
        dist.put(model)
        parents, origin = contracts.read_parents(where), {"sft.from": "lineage unknown"}
    else:
        # 1b. The base model, trained to the weights of the lowest validation loss.
        model, tokenizer = load_causal(paths.base), load_tokenizer(paths.base)
        demonstrated = demonstrations(paths, tokenizer, "train")
        if not demonstrated.sizes:
            raise UserError(f"sft.from is null, and there is no demonstration to train on. {PROMPTS_ALONE}")
        with checkpoint.open_snapshots(dist, paths, config, "sft") as snapshots:
            state = train(
                dist,
                model,
                demonstrated,
                settings,
                seed=config.seed,
                name="sft",
                tracker=tracker,
                snapshots=snapshots,
                validation=demonstrations(paths, tokenizer, "validation"),
                num_evaluations=settings.num_epochs * settings.evals_per_epoch,
                patience=settings.patience,
            )
        metrics = {"steps_trained": state.step, "step_kept": state.best_step}
        parents = {"base": contracts.fingerprint(paths.base)}
        origin = {"models/base": parents["base"]}
    # 2. The metrics of the weights, and the checkpoint.
    validation = demonstrations(paths, tokenizer, "validation")
    if validation.sizes:
        result = evaluate(dist, model, validation, TokenBudget(settings.micro_batch_tokens))
        metrics |= {**result, "perplexity": math.exp(result["loss"])}
    card = contracts.model_card(
        "SFT policy",
        task="sft",
        parameters=config.declared,
        inputs={"data/sft": hashing.file_hash(paths.rows("sft")), **origin},
        how="Trained on demonstrations, completion tokens only, to the validation minimum.",
    )
    save(dist, model, tokenizer, paths.sft, contracts.identity("policy", parents), card, config.reference)
    return metrics
