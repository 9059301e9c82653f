"""Stage ppo: models/policy, kept where models/reward_heldout likes its answers to validation prompts best.

The checkpoint is never chosen by the reward that is optimised, by the gold judge or on test data.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console, models
from rlhf_tasks.checkpoint import whole
from rlhf_tasks.config import Ppo, StageView
from rlhf_tasks.data.batches import encode, load_tokenizer, read_table
from rlhf_tasks.generation import answer, text_of
from rlhf_tasks.ppo.rewards import replace_missing_eos
from rlhf_tasks.ppo.rollout import ActorCritic
from rlhf_tasks.ppo.trainer import Scorer, Trainer
from rlhf_tasks.runtime import Runtime
from rlhf_tasks.scorers import RewardScorer
from rlhf_tasks.tracking import Tracker

SFT, REWARD, HELDOUT = Path("models/sft"), Path("models/reward"), Path("models/reward_heldout")
OUT, SAMPLES = Path("models/policy"), Path("evaluation/ppo")
NUM_SAMPLE_PROMPTS = 4


def run(config: StageView, tracker: Tracker) -> dict[str, float]:
    """Write models/policy and evaluation/ppo/samples.parquet.

    Metrics: the last update's, and which was kept.
    """
    _check_contracts()
    rt = Runtime(config.launch, config.seed)
    settings: Ppo = config.ppo
    tokenizer = load_tokenizer(SFT)
    policy = models.place(models.load_causal(SFT), rt.device)
    reference = models.place(models.load_causal(SFT), rt.device)
    rt.freeze(reference)
    reward = models.load_reward(REWARD).to(rt.device).requires_grad_(False)
    heldout = models.load_reward(HELDOUT).to(rt.device).requires_grad_(False)
    score = RewardScorer(reward, tokenizer, settings.micro_batch_tokens)
    watch = Watch(settings, policy, tokenizer, score, RewardScorer(heldout, tokenizer), config.seed)
    prompts = encode(tokenizer, [row["prompt"] for row in read_table("prompts", "train")])
    # the critic starts as the reward model it has to predict
    critic = copy.deepcopy(reward).requires_grad_(True)
    trainer = Trainer(
        rt, settings, ActorCritic(policy, critic), reference, score, tokenizer, prompts, config.seed
    )
    metrics = _train(rt, settings, trainer, watch, tracker)
    watch.restore()
    if rt.is_main:
        _save(config, policy, tokenizer, watch)
    rt.barrier()
    return metrics | {"selected_episode": watch.episode, "selected_heldout_score": watch.best}


def _check_contracts() -> None:
    for reward in (REWARD, HELDOUT):
        models.check_same_tokenizer(SFT, reward)
        models.check_parent(reward, "sft", SFT)


def _train(rt: Runtime, settings: Ppo, trainer: Trainer, watch: Watch, tracker: Tracker) -> dict[str, float]:
    selections = _spread(settings.num_selections, trainer.num_updates)
    shown = _spread(settings.num_sample_generations, trainer.num_updates)
    metrics: dict[str, float] = {}
    _look(rt, watch, tracker, episode=0, select=True, show=settings.num_sample_generations > 0)
    with console.progress("ppo", settings.total_episodes, unit="episodes") as bar:
        for update, metrics in enumerate(trainer.updates(), start=1):
            episode = int(metrics["episode"])
            metrics |= _look(rt, watch, tracker, episode, select=update in selections, show=update in shown)
            tracker.metrics(metrics, step=episode)
            bar.advance(
                settings.rollout_batch_size,
                score=metrics["objective/scores"], kl=metrics["objective/kl"],
                clipfrac=metrics["policy/clipfrac_avg"],
            )  # fmt: skip
    return metrics


def _spread(count: int, num_updates: int) -> set[int]:
    """`count` update numbers, evenly spaced, the last update among them."""
    return {max(1, round((i + 1) * num_updates / count)) for i in range(count)}


def _look(
    rt: Runtime, watch: Watch, tracker: Tracker, episode: int, *, select: bool, show: bool
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if select:
        metrics = watch.select(episode)
        if episode == 0:
            tracker.metrics(metrics, step=0)
    if show and rt.is_main:
        rows = watch.samples(episode)
        tracker.table("samples", rows)
        console.table(
            f"samples at episode {episode}", ["query", "response", "score"],
            [(row["prompt"], row["response"], f"{row['score']:.2f}") for row in rows],
        )  # fmt: skip
    return metrics


@dataclass
class Watch:
    """Looks at the policy's answers to fixed validation prompts, and keeps the best weights."""

    settings: Ppo
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reward: Scorer
    heldout: Scorer
    seed: int

    def __post_init__(self) -> None:
        rows = read_table("prompts", "validation")
        self._prompts = [row["prompt"] for row in rows[: self.settings.num_selection_prompts]]
        self.best, self.episode = -float("inf"), 0
        self._weights: dict[str, Tensor] = {}
        self.rows: list[dict[str, Any]] = []

    def select(self, episode: int) -> dict[str, float]:
        """Score answers by both reward models under the EOS rule.

        The weights that the held-out one likes best are remembered.
        """
        answers, scores, heldout = self._answered(self._prompts)
        if float(heldout.mean()) > self.best:
            self.best, self.episode = float(heldout.mean()), episode
            self._weights = {
                key: value.detach().cpu().clone() for key, value in self.policy.state_dict().items()
            }
        return {
            "eval/scores": float(scores.mean()),
            "eval/heldout_scores": float(heldout.mean()),
            "eval/response_length": sum(map(len, answers)) / len(answers),
        }

    def restore(self) -> None:
        self.policy.load_state_dict(self._weights)

    def samples(self, episode: int) -> list[dict[str, Any]]:
        """A few answers with their scores, kept for evaluation/ppo too."""
        prompts = self._prompts[:NUM_SAMPLE_PROMPTS]
        answers, scores, heldout = self._answered(prompts)
        rows = [
            {"episode": episode, "prompt": p, "response": text_of(self.tokenizer, a), "score": float(s),
             "reward_heldout": float(h)}
            for p, a, s, h in zip(prompts, answers, scores, heldout, strict=True)
        ]  # fmt: skip
        self.rows += rows
        return rows

    @torch.no_grad()
    def _answered(self, prompts: list[str]) -> tuple[list[list[int]], Tensor, Tensor]:
        training, self.policy = self.policy.training, self.policy.eval()
        answers = answer(
            self.policy, self.tokenizer, prompts, max_new_tokens=self.settings.response_length,
            temperature=self.settings.temperature, seed=self.seed,
        )  # fmt: skip
        self.policy.train(training)
        queries = encode(self.tokenizer, prompts)
        ended = torch.tensor([a[-1] == self.tokenizer.eos_token_id for a in answers])
        scores, heldout = self.reward(queries, answers), self.heldout(queries, answers)
        if self.settings.truncation == "eos_trick_replace":
            scores = replace_missing_eos(scores, ended, self.settings.missing_eos_score)
            heldout = replace_missing_eos(heldout, ended, self.settings.missing_eos_score)
        return answers, scores, heldout


def _save(
    config: StageView, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, watch: Watch
) -> None:
    parents = {"sft": models.fingerprint(SFT), "reward": models.fingerprint(REWARD)}
    with whole(SAMPLES) as folder:
        columns = ("episode", "prompt", "response", "score", "reward_heldout")
        pq.write_table(
            pa.table({c: [row[c] for row in watch.rows] for c in columns}), folder / "samples.parquet"
        )
    with whole(OUT) as folder:
        models.save(
            policy, tokenizer, folder,
            identity={"kind": "policy", "parents": parents},
            card=models.model_card(
                "PPO policy", task="ppo", parameters=config.declared(),
                inputs={"models/sft": parents["sft"], "models/reward": parents["reward"],
                        "data/prompts": models.file_hash(Path("data/prompts"))},
                how=f"PPO from the SFT policy; kept at episode {watch.episode}, the best by "
                "models/reward_heldout on validation prompts.",
            ),
        )  # fmt: skip
