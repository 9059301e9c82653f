"""Metrics of stage judge: win rates, retention, reward diagnostics."""

from __future__ import annotations

from functools import partial

from rlhf_tasks.tracking.metrics.kinds import Metric, Panel

_final = partial(Metric, stage="judge")
_COMPARES = "a judge that compares (`llm`, `local`, `pair_rm`)"

METRICS = (
    # comparisons
    _final(
        name="JUDGE/A_vs_B/win_rate", label="A against B by JUDGE: win rate", unit="share", headline=True,
        formula="(wins of A + ½ ties) / judged prompts",
        reading="0.5 is no difference. Read it with its interval.",
    ),
    _final(
        name="JUDGE/A_vs_B/low", label="A against B by JUDGE: low end of the win rate", unit="share",
        formula="lower end of the 95% interval of the win rate: percentile bootstrap over prompts, in closed "
        "form",
        reading="Above 0.5: A is better than B. The gate uses it.",
    ),
    _final(
        name="JUDGE/A_vs_B/high", label="A against B by JUDGE: high end of the win rate",
        unit="share", formula="upper end of that interval",
        reading="Below 0.5: B is better than A.",
    ),
    _final(
        name="JUDGE/A_vs_B/decisive", label="A against B by JUDGE: win rate without ties",
        unit="share", interval=True,
        formula="wins of A / (wins + losses); Wilson's interval",
    ),
    _final(
        name="JUDGE/A_vs_B/p_value", label="A against B by JUDGE: sign test", unit="probability",
        formula="two-sided exact sign test on wins and losses",
        reading="A small value: the difference is unlikely to be chance.",
    ),
    _final(
        name="JUDGE/A_vs_B/length_controlled", label="A against B by JUDGE: win rate at equal length",
        unit="share", interval=True,
        formula="win rate at equal length in characters: σ(θ) of the logistic regression "
        "P(A wins) = σ(θ + φ·tanh(d / s)), d the length difference and s its standard deviation",
        reading="If it is far below the win rate, A wins by length. AlpacaEval 2 (arXiv 2404.04475) "
        "without its terms for other models and for instructions.",
    ),
    _final(
        name="JUDGE/A_vs_B/matched_length_gain",
        label="A against B by JUDGE: score gained at equal length",
        unit="score", interval=True,
        formula="intercept of the least-squares fit of score_A − score_B on length_A − length_B, in tokens",
        reading="Score gained at equal length.",
        when="A is `policy`, B is `sft`, and the judge gives scores",
    ),
    _final(
        name="JUDGE/A_vs_B/examples", label="A against B by JUDGE: judged prompts",
        unit="prompts", formula="prompts that were judged, ties included",
    ),
    _final(
        name="JUDGE/A_vs_B/ties", label="A against B by JUDGE: ties",
        unit="prompts", formula="prompts whose comparison is a tie",
    ),
    _final(
        name="JUDGE/A_vs_B/failures", label="A against B by JUDGE: failures", unit="prompts",
        formula="prompts for which the judge gave no usable reply",
        reading="They count neither as win nor as loss. `judge.max_failure_share` bounds them.",
    ),
    _final(
        name="JUDGE/A_vs_B/position_bias",
        label="A against B by JUDGE: outcomes that change with the order",
        unit="share", when=_COMPARES, shipped=False,
        formula="pairs whose outcome changes with the order of the two responses / all pairs",
        reading="Such a pair is a tie. A high value means a judge that cannot distinguish the responses.",
    ),
    _final(
        name="JUDGE/A_vs_B/first_share", label="A against B by JUDGE: outcomes for the first response",
        unit="share", when=_COMPARES, shipped=False,
        formula="outcomes for the response shown first / all outcomes, over both orders",
        reading="0.5 is no bias.",
    ),
    _final(
        name="JUDGE/A_vs_B/cost/replies", label="A against B by JUDGE: replies",
        unit="replies", when=_COMPARES, shipped=False,
        formula="replies behind all comparisons, whether paid in this run or before",
    ),
    _final(
        name="JUDGE/A_vs_B/cost/tokens", label="A against B by JUDGE: tokens",
        unit="tokens", when=_COMPARES, shipped=False,
        formula="prompt and completion tokens of those replies, as the server counts them",
    ),
    _final(
        name="JUDGE/is_optimised_reward", label="JUDGE is the optimised reward", formula="1", shipped=False,
        when="the judge is the reward model that PPO optimised",
        reading="A win by this judge is no evidence that the policy got better.",
    ),
    _final(
        name="JUDGE/ANSWERER/score", label="Mean score by JUDGE: ANSWERER",
        unit="score", when="a judge that gives scores",
        formula="mean score of the responses",
    ),
    _final(
        name="JUDGE/ANSWERER/coverage", label="Facts named, by JUDGE: ANSWERER",
        unit="share", when="the gold judge",
        formula="facts of the post that the summary names / facts of the post, as a mean",
    ),
    _final(
        name="JUDGE/ANSWERER/faithfulness", label="Facts not invented, by JUDGE: ANSWERER",
        unit="share", when="the gold judge",
        formula="1 − invented facts of the summary / facts of the post, as a mean",
    ),
    _final(
        name="JUDGE/ANSWERER/brevity", label="Brevity, by JUDGE: ANSWERER",
        unit="share", when="the gold judge",
        formula="1 − a penalty for each word above the length budget, as a mean",
    ),
    # agreement of judges
    _final(
        name="kappa/JUDGE_and_OTHER", label="Cohen’s κ of JUDGE and OTHER",
        interval=True, when="several judges",
        formula="Cohen's κ of two judges over all comparisons that both made",
        reading="1 is full agreement, 0 is chance. It falls when nearly all comparisons are wins.",
    ),
    _final(
        name="human/labels", label="Pairs that people decided",
        unit="labels", when="`rlhf label` was used", shipped=False,
        formula="pairs that people decided",
    ),
    _final(
        name="human/JUDGE/kappa", label="Cohen’s κ of JUDGE and people",
        interval=True, when="`rlhf label` was used", shipped=False,
        formula="Cohen's κ of the judge and the human labels",
    ),
    _final(
        name="human/JUDGE/agreement", label="Decisions of people that JUDGE shares",
        unit="share", interval=True, shipped=False,
        when="`rlhf label` was used",
        formula="human decisions that the judge shares / human decisions; a tie of the judge counts half",
    ),
    # the responses
    _final(
        name="rouge_l/ANSWERER", label="ROUGE-L against the references: ANSWERER", unit="share",
        formula="mean ROUGE-L F-measure of the responses against the references (Lin 2004)",
    ),
    _final(
        name="length/ANSWERER", label="Mean length of a response: ANSWERER",
        unit="tokens", formula="mean length of a response",
    ),
    _final(
        name="length/policy_over_sft", label="Length of policy’s responses over SFT’s",
        headline=True, formula="`length/policy` / `length/sft`",
        reading="Far above 1: PPO made the responses longer.",
    ),
    _final(
        name="ended/ANSWERER", label="Responses that ended: ANSWERER",
        unit="share", formula="responses that end with the stop token / all",
    ),
    _final(
        name="distinct_1/ANSWERER", label="Distinct tokens: ANSWERER", unit="share",
        formula="distinct tokens / tokens of a response, as a mean",
    ),
    _final(
        name="distinct_2/ANSWERER", label="Distinct bigrams: ANSWERER", unit="share",
        formula="distinct bigrams / bigrams of a response, as a mean",
    ),
    _final(
        name="repetition/ANSWERER", label="Repeated trigrams: ANSWERER", unit="share",
        formula="1 − distinct trigrams / trigrams of a response, as a mean",
    ),
    # retention
    _final(
        name="perplexity/TEXT/MODEL", label="Perplexity on TEXT: MODEL",
        headline=True, when="`judge.retention`",
        formula="exp of the mean −log p of a token: of test completions given their prompts (`sft_text`), or "
        "of other text (`general`)",
        reading="The policy's value / the SFT model's is what RLHF cost. `promotion."
        "max_perplexity_growth` bounds it.",
    ),
    _final(
        name="choice/MODEL", label="Multiple-choice accuracy: MODEL",
        unit="share", interval=True, headline=True, when="`judge.retention`",
        formula="multiple-choice accuracy: questions whose right ending has the highest log p per character "
        "/ all questions",
        reading="`promotion.max_choice_drop` bounds what the policy loses.",
    ),
    # reward diagnostics
    _final(
        name="agreement/REWARD/ORIGIN", label="Agreement of REWARD with the gold judge: ORIGIN",
        unit="share", interval=True, when="`data.source: synthetic`",
        formula="pairs of samples that the reward model orders as the gold judge does / pairs; equal scores "
        "count half",
        reading="Agreement on `policy_samples` can fall while accuracy on given pairs stays: PPO moved away "
        "from the reward model's training data.",
    ),
    _final(
        name="calibration/REWARD/ORIGIN", label="Calibration error of REWARD: ORIGIN", unit="share",
        formula="expected calibration error of σ(score difference) over equal-count bins of the pairs",
        reading="0 is perfect. The report draws the bins.",
    ),
    _final(
        name="reward_gap/win_rate_by_reward", label="Policy against SFT by the optimised reward: win rate",
        unit="share", when="PPO optimised models/reward",
        formula="win rate of the policy over the SFT model by models/reward",
    ),
    _final(
        name="reward_gap/JUDGE", label="Win rate by the optimised reward less that by JUDGE",
        unit="share", when="PPO optimised models/reward",
        formula="`reward_gap/win_rate_by_reward` − `JUDGE/policy_vs_sft/win_rate`",
        reading="A growing gap is over-optimisation.",
    ),
    # curves
    Metric(
        name="JUDGE/win_rate", label="Win rate by JUDGE",
        stage="judge", curve=True, unit="share", panel="Win rate while PPO trained",
        formula="win rate over the references on the selection prompts, by episode of PPO",
        reading="These prompts also selected the checkpoint, so the value is optimistic.",
        when="a judge that gives scores",
    ),
    Metric(
        name="JUDGE/low", label="Win rate by JUDGE: low end", stage="judge", curve=True, unit="share",
        formula="lower end of the 95% interval of `JUDGE/win_rate`",
    ),
    Metric(
        name="JUDGE/high", label="Win rate by JUDGE: high end", stage="judge", curve=True, unit="share",
        formula="upper end of the 95% interval of `JUDGE/win_rate`",
    ),
)  # fmt: skip

PANELS = (
    Panel(
        title="Win rate while PPO trained", stage="judge", guide=0.5,
        note="Over the references, on the validation prompts by which the checkpoint was chosen. The "
        "value is optimistic for the judge that chose it.",
    ),
)  # fmt: skip
