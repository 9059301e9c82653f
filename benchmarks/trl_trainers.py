"""TRL's trainers, with the values that `benchmarks.quality` asks for; runs in an environment with trl 1.12.0.

One argument, a file of JSON. models/sft and models/reward lie beside its folder. The policy is written to
`out`. It imports nothing of rlhf_tasks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

Values = dict[str, Any]


def main() -> None:
    file = Path(sys.argv[1])
    asked: Values = json.loads(file.read_text(encoding="utf-8"))
    models = file.parents[1] / "models"
    tokenizer = AutoTokenizer.from_pretrained(models / "sft", padding_side="left")
    trainer = {"gae": ppo, "rloo": rloo, "dpo": dpo}[asked["method"]](asked, models, tokenizer)
    trainer.train()
    trained = trainer.accelerator.unwrap_model(trainer.model)
    getattr(trained, "policy", trained).save_pretrained(asked["out"])
    tokenizer.save_pretrained(asked["out"])


def policy(models: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(models / "sft")


def reward(models: Path) -> Any:
    """models/reward, whose scores have the mean `score_mean` taken off, as our scorer takes it off."""
    model = AutoModelForSequenceClassification.from_pretrained(models / "reward", num_labels=1)
    head = torch.nn.Linear(model.score.in_features, 1)
    head.weight.data.copy_(model.score.weight.data)
    head.bias.data.fill_(-model.config.score_mean)
    model.score = head
    return model


def common(asked: Values, settings: Values) -> Values:
    return {
        "output_dir": f"{asked['out']}.trainer",
        "seed": asked["seed"],
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": settings["schedule"],
        "max_grad_norm": settings["max_grad_norm"],
    }


def of_rollouts(asked: Values) -> Values:
    settings = asked["ppo"]
    return common(asked, settings) | {
        "adam_beta1": settings["adam_betas"][0],
        "adam_beta2": settings["adam_betas"][1],
        "adam_epsilon": 1e-5,
        "temperature": settings["temperature"],
    }


def ppo(asked: Values, models: Path, tokenizer: Any) -> Any:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    settings = asked["ppo"]
    advantages, critic = settings["advantages"], settings["advantages"]["critic"]
    args = PPOConfig(
        **of_rollouts(asked),
        per_device_train_batch_size=settings["rollout_batch_size"],
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=settings["rollout_batch_size"],
        num_mini_batches=settings["num_mini_batches"],
        num_ppo_epochs=settings["num_ppo_epochs"],
        total_episodes=settings["total_episodes"],
        num_sample_generations=0,
        response_length=settings["response_length"],
        stop_token="eos",
        missing_eos_penalty=-settings["truncation"]["missing_eos_score"],
        kl_coef=settings["kl_coef"],
        cliprange=settings["cliprange"],
        vf_coef=critic["vf_coef"],
        cliprange_value=critic["cliprange_value"],
        gamma=advantages["gamma"],
        lam=advantages["lam"],
        whiten_rewards=advantages["whiten_rewards"],
    )
    data = Dataset.from_dict({"input_ids": [tokenizer(prompt)["input_ids"] for prompt in asked["prompts"]]})
    return PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy(models),
        ref_model=policy(models),
        reward_model=reward(models),
        value_model=reward(models),
        train_dataset=data,
        eval_dataset=data.select(range(64)),
    )


def rloo(asked: Values, models: Path, tokenizer: Any) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    settings = asked["ppo"]
    rows, parts = settings["rollout_batch_size"], settings["num_mini_batches"]
    scorer, missing = reward(models).eval(), settings["truncation"]["missing_eos_score"]

    @torch.no_grad()
    def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Of models/reward; a response without EOS gets what our truncation rule gives it."""
        pairs = list(zip(prompts, completion_ids, strict=True))
        tokens = [torch.tensor(tokenizer(prompt)["input_ids"] + ids) for prompt, ids in pairs]
        batch = torch.nn.utils.rnn.pad_sequence(
            tokens, batch_first=True, padding_value=tokenizer.pad_token_id
        )
        mask = torch.arange(batch.shape[1]) < torch.tensor([[len(one)] for one in tokens])
        scores = scorer(input_ids=batch, attention_mask=mask.long()).logits[:, 0].tolist()
        ended = [ids[-1:] == [tokenizer.eos_token_id] for ids in completion_ids]
        return [score if whole else missing for score, whole in zip(scores, ended, strict=True)]

    args = RLOOConfig(
        **of_rollouts(asked),
        per_device_train_batch_size=rows // parts,
        steps_per_generation=parts,
        num_iterations=settings["num_ppo_epochs"],
        max_steps=settings["total_episodes"] // rows * parts * settings["num_ppo_epochs"],
        num_generations=settings["advantages"]["samples_per_prompt"],
        max_completion_length=settings["response_length"],
        beta=settings["kl_coef"],
        epsilon=settings["cliprange"],
    )
    data = Dataset.from_dict({"prompt": asked["prompts"]})
    return RLOOTrainer(
        args=args, processing_class=tokenizer, model=policy(models), reward_funcs=[score], train_dataset=data
    )


def dpo(asked: Values, models: Path, tokenizer: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    settings = asked["dpo"]
    args = DPOConfig(
        **common(asked, settings),
        per_device_train_batch_size=settings["batch_size"],
        num_train_epochs=settings["num_epochs"],
        warmup_steps=settings["warmup_fraction"],  # a share, below 1
        weight_decay=settings["weight_decay"],
        adam_beta2=0.98,
        adam_epsilon=settings["adam_eps"],
        beta=settings["beta"],
        loss_type=settings["loss"],
    )
    data = Dataset.from_list(asked["pairs"])
    return DPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy(models),
        ref_model=policy(models),
        train_dataset=data,
    )


if __name__ == "__main__":
    main()
