"""Metrics of the supervised stages: base, sft and reward."""

from __future__ import annotations

from functools import partial

from rlhf_tasks.config import Stage
from rlhf_tasks.tracking.metrics.kinds import Metric, Panel


def _optimizer(stage: Stage, *, heldout: bool = False) -> tuple[Metric, ...]:
    """What the shared training loop logs of each optimiser step."""
    return (
        Metric(
            name="train/grad_norm", stage=stage, curve=True, heldout=heldout,
            formula="L2 norm of the gradient of one optimiser step, before clipping",
            reading="A norm that is always far above `max_grad_norm` means that clipping sets the step size.",
        ),
        Metric(
            name="lr", stage=stage, curve=True, heldout=heldout, formula="learning rate of the step",
            reading="It follows `schedule` and `warmup_fraction`.",
        ),
        Metric(
            name="train/micro_batch_tokens", stage=stage, curve=True, heldout=heldout, unit="tokens",
            formula="the bound on a micro-batch's padded tokens, once the GPU was out of memory",
            when="the GPU was out of memory", shipped=False,
        ),
    )  # fmt: skip


_base = partial(Metric, stage="base")
BASE = (
    _base(
        name="train/loss", curve=True, unit="nats per token", panel="Base model loss",
        formula="mean −log p of a token, over the batch of the step", reading="It should fall.",
        when="`model.base: scratch`",
    ),
    _base(
        name="train/token_accuracy", curve=True, unit="share",
        formula="tokens to which the model gives the highest probability / all tokens of the batch",
        when="`model.base: scratch`",
    ),
    *_optimizer("base"),
    _base(
        name="loss", unit="nats per token",
        formula="mean −log p of a token, over all validation prompts",
    ),
    _base(name="perplexity", formula="exp(loss)", reading="1 is a model that is never surprised."),
    _base(name="parameters", unit="parameters", formula="number of the model's parameters"),
)  # fmt: skip

_sft = partial(Metric, stage="sft")
SFT = (
    _sft(
        name="train/loss", curve=True, unit="nats per token", panel="SFT loss",
        formula="mean −log p of a completion token, EOS included, over the batch of the step",
        reading="It should fall.",
    ),
    _sft(
        name="eval/loss", curve=True, unit="nats per token", panel="SFT loss",
        formula="the same, over all validation demonstrations",
        reading="Training keeps the weights at its minimum. A rise while `train/loss` falls is overfitting.",
    ),
    _sft(
        name="train/token_accuracy", curve=True, unit="share", panel="SFT token accuracy",
        formula="completion tokens to which the model gives the highest probability / all of the batch",
    ),
    _sft(
        name="eval/token_accuracy", curve=True, unit="share", panel="SFT token accuracy",
        formula="the same, over all validation demonstrations",
    ),
    *_optimizer("sft"),
    _sft(
        name="loss", unit="nats per token",
        formula="mean −log p of a completion token on the validation demonstrations, of the kept weights",
    ),
    _sft(name="perplexity", headline=True, formula="exp(loss)", reading="Lower is better."),
    _sft(
        name="token_accuracy", unit="share",
        formula="`eval/token_accuracy` of the kept weights",
    ),
    _sft(
        name="steps_trained", unit="steps", formula="optimiser steps taken", when="`sft.from: null`",
        reading="Fewer than planned if `sft.patience` ended training.",
    ),
    _sft(
        name="step_kept", unit="steps", formula="optimiser step with the lowest validation loss",
        reading="If it is the last step, more epochs may help.", when="`sft.from: null`",
    ),
)  # fmt: skip

_reward = partial(Metric, stage="reward", heldout=True, when="`reward.train: true`")
_LOSS = "−log σ(r_chosen − r_rejected − margin), plus the centring and language-model terms if they are set"
REWARD = (
    _reward(
        name="train/loss", curve=True, panel="Reward model loss",
        formula=f"mean over the pairs of the batch of {_LOSS}",
        reading="log 2 = 0.69 is chance. It should fall.",
    ),
    _reward(
        name="eval/loss", curve=True, panel="Reward model loss",
        formula="the same, over all validation pairs; halfway and at the end",
        reading="A rise while `train/loss` falls is overfitting.",
    ),
    _reward(
        name="train/accuracy", curve=True, unit="share", panel="Reward model accuracy",
        formula="pairs of the batch in which the chosen text scores higher / all pairs; "
        "equal scores count half",
        reading="0.5 is chance.",
    ),
    _reward(
        name="eval/accuracy", curve=True, unit="share", panel="Reward model accuracy",
        formula="the same, over all validation pairs",
    ),
    _reward(
        name="train/margin", curve=True, unit="score", panel="Reward model margin",
        formula="mean r_chosen − r_rejected over the pairs of the batch",
    ),
    _reward(
        name="eval/margin", curve=True, unit="score", panel="Reward model margin",
        formula="the same, over all validation pairs",
    ),
    *_optimizer("reward", heldout=True),
    _reward(
        name="accuracy", unit="share", headline=True, interval=True,
        formula="test pairs in which the chosen text scores higher / all test pairs; equal scores count half",
        reading="0.5 is chance. Label noise bounds it from above: with 5% flipped labels, 0.95.",
    ),
    _reward(
        name="accuracy/ORIGIN", unit="share", interval=True,
        formula="the same, for the test pairs of one origin",
        reading="PPO optimises against responses like `sft_samples`: this is the number that matters there.",
    ),
    _reward(
        name="margin", unit="score",
        formula="mean r_chosen − r_rejected over the test pairs",
    ),
    _reward(
        name="calibration", unit="share", headline=True,
        formula="expected calibration error of σ(score difference) over equal-count bins of the test pairs",
        reading="0 is perfect: of the pairs with confidence 80%, 80% are ordered as labelled.",
    ),
    _reward(
        name="length_correlation",
        formula="Pearson correlation of score and length in tokens, over all texts of the test pairs",
        reading="Near 0 is good. A high value means that length alone buys reward.",
    ),
    _reward(
        name="score_mean", unit="score",
        formula="mean raw score of the train demonstrations",
        reading="It is subtracted from every score, so that demonstrations score 0 on average.",
    ),
)  # fmt: skip

PANELS = (
    Panel(
        title="Base model loss", stage="base", note="Cross-entropy of all tokens. It should fall."
    ),
    Panel(
        title="SFT loss", stage="sft",
        note="Cross-entropy of completion tokens. The weights at the validation minimum are kept.",
    ),
    Panel(
        title="SFT token accuracy", stage="sft",
        note="Share of completion tokens to which the model gives the highest probability.",
    ),
    Panel(
        title="Reward model loss", stage="reward",
        note="−log σ(chosen − rejected). Chance is 0.69.",
    ),
    Panel(
        title="Reward model accuracy", stage="reward", guide=0.5,
        note="Share of pairs ordered as labelled. Chance is 0.5.",
    ),
    Panel(
        title="Reward model margin", stage="reward",
        note="Mean score of the chosen text less that of the rejected one.",
    ),
)  # fmt: skip
