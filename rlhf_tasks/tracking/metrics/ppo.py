"""Metrics of stage ppo. An episode is one prompt with one sampled response.

π is the policy in training, π_old the policy of the rollout, π_ref the reference model.
"""

from __future__ import annotations

from functools import partial

from rlhf_tasks.tracking.metrics.kinds import Metric, Panel

_curve = partial(Metric, stage="ppo", curve=True)
_final = partial(Metric, stage="ppo")

METRICS = (
    # objective: the rollout, before the update
    _curve(
        name="objective/kl", unit="nats per response", panel="KL from the reference", headline=True,
        formula="mean over episodes of Σₜ kl[t] by `ppo.kl_estimator`, from π_ref",
        reading="0 to 10 is usual. Above, raise `ppo.kl_coef`. With `ppo.reference_sync`, the reference is "
        "not the SFT model.",
    ),
    _curve(
        name="eval/kl", unit="nats per response", panel="KL from the reference",
        formula="mean over the selection prompts of Σₜ (log π − log π_ref), for the evaluated weights",
        reading="`selected_kl` is its value for the weights that are kept.",
    ),
    _curve(
        name="objective/rlhf_reward", unit="score", panel="Reward", headline=True,
        formula="`objective/scores` + `objective/non_score_reward`",
        reading="PPO maximises it: it should rise.",
    ),
    _curve(
        name="objective/scores", unit="score", panel="Reward", headline=True,
        formula="mean score of a response, after score scaling and the truncation rule",
        reading="It should rise.",
    ),
    _curve(
        name="policy/clipfrac_avg", unit="share", panel="Clip fraction", headline=True,
        formula="tokens whose clipped policy loss is the larger one / all tokens",
        reading="A few percent is usual. Above 0.3 the steps are too big.",
    ),
    _curve(
        name="val/clipfrac_avg", unit="share", panel="Clip fraction of the value loss",
        formula="tokens whose clipped value loss is the larger one / all tokens",
        reading="0 with `ppo.cliprange_value: null`.",
    ),
    _curve(
        name="loss/policy_avg", panel="Policy loss",
        formula="mean over tokens of max(−A·ratio, −A·clip(ratio, 1 − cliprange, 1 + cliprange))",
        reading="Near 0, because advantages are whitened. Its trend has little meaning.",
    ),
    _curve(
        name="loss/value_avg", panel="Value loss",
        formula="mean over tokens of ½·max((V − G)², (V_clipped − G)²), G the return; without `vf_coef`",
        reading="It should fall, then level off.",
    ),
    _curve(
        name="policy/entropy_avg", unit="nats per token", panel="Entropy",
        formula="mean over tokens of the entropy of π's distribution, while the epochs run",
        reading="It falls slowly. Near 0 the policy has one response: raise `ppo.kl_coef` or "
        "`ppo.entropy_coef`.",
    ),
    _curve(
        name="val/ratio", panel="Probability ratio",
        formula="mean over tokens of ratio = π / π_old",
        reading="Near 1. If it drifts, lower `learning_rate`, `num_ppo_epochs` or `cliprange`, or set "
        "`target_kl`.",
    ),
    _curve(
        name="policy/approxkl_avg", unit="nats per token", panel="Approximate KL of the update",
        formula="mean over tokens of ½·(log π − log π_old)²",
        reading="How far the epochs of one update move the policy. `ppo.target_kl` bounds it.",
    ),
    _curve(
        name="eval/scores", unit="score", panel="Held-out reward",
        formula="mean over the selection prompts of the score that PPO optimises, with the truncation rule",
        reading="If it rises while `eval/heldout_scores` falls, PPO over-optimises.",
    ),
    _curve(
        name="eval/heldout_scores", unit="score", panel="Held-out reward", when="`reward.train: true`",
        formula="the same by models/reward_heldout, which PPO never optimises",
        reading="The checkpoint with the highest value is kept, unless `ppo.select_by` is set.",
    ),
    _curve(
        name="eval/win_rate", unit="share", panel="Win rate on the selection prompts",
        when="`ppo.select_by`", shipped=False,
        formula="win rate over the references by the judge of `ppo.select_by`; ties count half",
        reading="The checkpoint with the highest value is kept.",
    ),
    _curve(
        name="val/explained_variance", panel="Explained variance of the critic",
        formula="1 − Var(returns − values) / Var(returns) over tokens",
        reading="It should approach 1. Below 0 the critic does harm.",
    ),
    _curve(
        name="val/truncated_share", unit="share", panel="Truncated responses",
        formula="responses without the stop token / all responses",
        reading="If many do not end, raise `ppo.response_length` or lower `ppo.missing_eos_score`.",
    ),
    _curve(
        name="val/response_length", unit="tokens", panel="Response length",
        formula="mean length of a response, stop token included",
        reading="Steady growth with the reward suggests that the reward pays for length.",
    ),
    _curve(
        name="eval/response_length", unit="tokens", panel="Response length",
        formula="the same, on the selection prompts",
    ),
    _curve(
        name="val/repetition", unit="share", panel="Repetition",
        formula="1 − distinct trigrams / trigrams of a response, as a mean over responses",
        reading="If it rises with the reward, the policy has found a pattern that the reward likes.",
    ),
    _curve(
        name="lr", panel="Learning rate", formula="learning rate of the policy in this update",
        reading="It follows `ppo.schedule` and `ppo.warmup_fraction`.",
    ),
    # what no figure shows
    _curve(
        name="objective/kl_k1", unit="nats per response",
        formula="mean over episodes of Σₜ (log π_old − log π_ref), whatever `ppo.kl_estimator` is",
        reading="Compare runs by this one. Guards and `ppo.adaptive_kl` use it.",
    ),
    _curve(
        name="objective/kl_k1_standard_error", unit="nats per response",
        formula="standard deviation of the episodes' KL / √episodes; for a single episode its absolute KL",
        reading="Guards allow two standard errors.",
    ),
    _curve(
        name="objective/kl_coef", formula="weight of the KL penalty in this rollout",
        reading="Constant, unless `ppo.adaptive_kl` is set or a guard rolled back.",
    ),
    _curve(
        name="objective/non_score_reward", unit="score",
        formula="−kl_coef · `objective/kl`; 0 with `ppo.kl_in: loss`",
    ),
    _curve(
        name="objective/raw_scores", unit="score",
        formula="mean score of a response, before score scaling and the truncation rule",
    ),
    _curve(
        name="objective/scores/SCORER", unit="score", when="several `ppo.scorers`", shipped=False,
        formula="mean score of a response by one scorer, before its weight",
    ),
    _curve(
        name="objective/entropy", unit="nats per response",
        formula="mean over episodes of Σₜ −log π_old",
        reading="It falls slowly. A sudden fall is collapse.",
    ),
    _curve(
        name="objective/perplexity", formula="exp of the mean over tokens of −log π_old",
        reading="Near 1 while length or repetition rises: the policy collapsed to a pattern.",
    ),
    _curve(
        name="objective/ref_perplexity", formula="exp of the mean over tokens of −log π_ref",
        reading="If it alone rises, the reference finds the responses odd.",
    ),
    _curve(
        name="val/num_eos_tokens", unit="responses",
        formula="responses of the rollout that end with the stop token",
    ),
    _curve(
        name="val/distinct_1", unit="share",
        formula="distinct tokens / tokens of a response, as a mean over responses",
    ),
    _curve(
        name="val/distinct_2", unit="share",
        formula="distinct bigrams / bigrams of a response, as a mean over responses",
    ),
    _curve(
        name="val/ratio_var", formula="variance over tokens of π / π_old",
        reading="If it grows, the epochs go too far.",
    ),
    _curve(
        name="loss/kl_avg", unit="nats per token", when="`ppo.kl_in: loss`", shipped=False,
        formula="mean over tokens of `ppo.kl_estimator` between π and π_ref, while the epochs run",
    ),
    _curve(
        name="loss/ptx_avg", unit="nats per token", when="`ppo.ptx`", shipped=False,
        formula="mean −log p of a token of the PPO-ptx text",
        reading="It should not rise.",
    ),
    _curve(
        name="policy/penalty_kl_avg", unit="nats per token", when="`ppo.kl_penalty`", shipped=False,
        formula="mean over tokens of π/π_old − 1 − log(π/π_old), after the epochs",
        reading="It should stay near `ppo.kl_penalty.target`.",
    ),
    _curve(
        name="policy/penalty_beta", when="`ppo.kl_penalty`", shipped=False,
        formula="weight of KL(π_old ‖ π) in this update",
        reading="It doubles above 1.5 times the target and halves below the target / 1.5.",
    ),
    _curve(
        name="eval/reward_gap", unit="score", when="`reward.train: true`",
        formula="`eval/scores` − `eval/heldout_scores`",
        reading="A growing gap is over-optimisation. It is meaningful if the only scorer is `reward_model` "
        "with weight 1.",
    ),
    _curve(
        name="warmup/value_loss", when="`ppo.critic_warmup`", shipped=False,
        formula="`loss/value_avg` of one update of the critic's warm-up",
        reading="Its axis counts the warm-up's own episodes.",
    ),
    _curve(
        name="warmup/explained_variance", when="`ppo.critic_warmup`", shipped=False,
        formula="`val/explained_variance` of one update of the critic's warm-up",
    ),
    _curve(
        name="train/grad_norm",
        formula="mean over optimiser steps of the gradient's L2 norm, before clipping",
        reading="Always far above `ppo.max_grad_norm`: clipping sets the step size.",
    ),
    _curve(
        name="train/num_epochs", unit="epochs", formula="epochs taken on this rollout",
        reading="Fewer than `ppo.num_ppo_epochs` if `ppo.target_kl` ended them.",
    ),
    _curve(
        name="train/micro_batch_tokens", unit="tokens", when="the GPU was out of memory", shipped=False,
        formula="the bound on a micro-batch's padded tokens, once the GPU was out of memory",
    ),
    _curve(
        name="time/padding_share", unit="share",
        formula="padding / all tokens of the forward passes of the epochs",
    ),
    _curve(
        name="time/generate_seconds", unit="seconds", formula="time in which the responses were sampled"
    ),
    _curve(
        name="time/score_seconds", unit="seconds",
        formula="time of the scorers, the reference and the critic on the responses",
    ),
    _curve(name="time/train_seconds", unit="seconds", formula="time of the epochs on the rollout"),
    _curve(
        name="time/tokens_per_second", unit="tokens per second",
        formula="response tokens of the update / its time",
    ),
    _curve(
        name="eps", unit="episodes per second", formula="episodes of the update / its time",
    ),
    # the end
    _final(name="episode", unit="episodes", formula="episodes trained on when the last update ended"),
    _final(
        name="selected_episode", unit="episodes", headline=True,
        formula="`episode` at which the kept weights were evaluated",
        reading="Far before the end: later updates over-optimised.",
    ),
    _final(
        name="selected_kl", unit="nats per response", headline=True,
        formula="`eval/kl` of the kept weights",
        reading="The gate compares it with `promotion.max_kl`.",
    ),
    _final(
        name="selected_kl_standard_error", unit="nats per response",
        formula="standard deviation of the KL over the selection prompts / √prompts",
    ),
    _final(
        name="selected_heldout_score", unit="score", formula="`eval/heldout_scores` of the kept weights",
        when="`reward.train: true` and `ppo.select_by: null`",
    ),
    _final(
        name="selected_win_rate", unit="share", formula="`eval/win_rate` of the kept weights",
        when="`ppo.select_by`", shipped=False,
    ),
    _final(
        name="guards/trips", unit="trips", formula="how often a guard tripped",
        reading="The report names each guard and the likely cause.",
    ),
)  # fmt: skip

_panel = partial(Panel, stage="ppo")
PANELS = (
    _panel(
        title="KL from the reference", band=(0.0, 10.0),
        note="Nats per response, from the SFT model unless `ppo.reference_sync` is set. Above the band the "
        "reward model scores responses that are unlike its training data.",
    ),
    _panel(
        title="Reward",
        note="Mean score of a response, and the same less the KL penalty. Both should rise.",
    ),
    _panel(
        title="Clip fraction",
        note="Share of tokens whose clipped policy loss is the larger one. A few percent is usual.",
    ),
    _panel(title="Policy loss", note="The clipped surrogate. It stays near 0."),
    _panel(title="Value loss", note="Half the clipped squared error. It should fall, then level off."),
    _panel(
        title="Entropy",
        note="Nats per token. It falls slowly. Near 0 the policy has one response to everything.",
    ),
    _panel(
        title="Probability ratio", guide=1.0,
        note="New policy over old policy. It is near 1 when updates are small.",
    ),
    _panel(
        title="Approximate KL of the update", note="How far the epochs of one update move the policy."
    ),
    _panel(
        title="Clip fraction of the value loss",
        note="Share of tokens whose clipped value loss is the larger one.",
    ),
    _panel(
        title="Held-out reward",
        note="On validation prompts: the reward that PPO optimises, and a second reward model that it never "
        "optimises. If only the first rises, PPO over-optimises.",
    ),
    _panel(
        title="Win rate on the selection prompts", guide=0.5,
        note="Over the references, by the judge of `ppo.select_by`.",
    ),
    _panel(
        title="Explained variance of the critic", note="It should approach 1. Below 0 the critic does harm."
    ),
    _panel(title="Truncated responses", note="Share of responses that did not end by themselves."),
    _panel(title="Response length", note="Mean number of tokens."),
    _panel(title="Repetition", note="Share of trigrams that a response repeats."),
    _panel(title="Learning rate", note="The policy's rate."),
)  # fmt: skip
