"""Metrics of stage verdict: every criterion of the gate as a measured value, a bound and a margin."""

from __future__ import annotations

from functools import partial

from rlhf_tasks.tracking.metrics.kinds import Metric

_criterion = partial(Metric, stage="verdict")
METRICS = (
    _criterion(
        name="gate/passed", label="Gate passed", headline=True, formula="1 if every criterion is met, else 0",
        reading="With 1 the policy may be promoted.",
    ),
    _criterion(
        name="over_sft/JUDGE/PART", label="Win rate over SFT by JUDGE, 95% low: PART", unit="share",
        formula="lower end of the 95% interval of the win rate over the SFT model > `promotion.over_sft`",
    ),
    _criterion(
        name="over_champion/JUDGE/PART", label="Win rate over the champion by JUDGE, 95% low: PART",
        unit="share", shipped=False,
        when="`rlhf promote`, if there is a champion",
        formula="lower end of the 95% interval of the win rate over the champion > `promotion.over_champion`",
    ),
    _criterion(
        name="kl/PART", label="KL: PART", unit="nats per response", when="`promotion.max_kl`",
        formula="`selected_kl` of stage ppo ≤ `promotion.max_kl`",
    ),
    _criterion(
        name="perplexity/TEXT/PART", label="Perplexity on TEXT over SFT’s: PART",
        when="`promotion.max_perplexity_growth`",
        formula="perplexity of the policy / perplexity of the SFT model ≤ `promotion.max_perplexity_growth`",
    ),
    _criterion(
        name="choice_change/PART", label="Multiple-choice accuracy, change from SFT: PART",
        unit="share", when="`promotion.max_choice_drop`",
        formula="`choice/policy` − `choice/sft` ≥ −`promotion.max_choice_drop`",
    ),
    _criterion(
        name="failure_share/PART", label="Share of failed comparisons: PART",
        unit="share", when="`promotion.max_failure_share`",
        formula="largest share of failed comparisons of the gate's judges ≤ `promotion.max_failure_share`",
    ),
    _criterion(
        name="examples/PART", label="Judged prompts: PART", unit="prompts",
        formula="smallest number of judged prompts of the gate's judges ≥ `promotion.min_examples`",
    ),
    _criterion(
        name="optimised_judges/PART", label="Judges that are the optimised reward: PART", unit="judges",
        formula="judges of the gate that are the reward that PPO optimised ≤ 0",
    ),
    _criterion(
        name="withheld/PART", label="Withheld for another reason: PART", shipped=False,
        when="`rlhf promote` refuses the policy for another reason, such as an earlier rollback",
        formula="1 ≤ 0, which never holds",
    ),
)  # fmt: skip
