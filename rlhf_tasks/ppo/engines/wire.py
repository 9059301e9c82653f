"""The requests to vLLM's server and the parts of its replies that PPO reads. No torch here.

`/v1/completions` with token ids and `return_token_ids` is in vLLM's documentation of its OpenAI-compatible
server; `/pause`, `/collective_rpc`, `/reset_prefix_cache`, `/resume`, `/update_weight_version` and
`/weight_info` are those of its development mode (vLLM 0.32). Weights in a GPU's memory: `ipc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_tasks.ppo.engines.protocol import EngineError, Ids
from rlhf_tasks.project.processes import HOST

PURE: Mapping[str, Any] = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "min_tokens": 0,
}  # fmt: skip
"""Nothing but the temperature changes the distribution; a server's own defaults do not count."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How PPO samples."""

    temperature: float
    max_tokens: int
    stop: int


def completion(query: Ids, n: int, seed: int, sampling: Sampling) -> dict[str, Any]:
    """The request for `n` responses to one query.

    One seed in a request would be that of all its queries, so that each query has a request of its own; vLLM
    adds the number of the sample to the seed. Only `sampling.stop` ends a response: with `ignore_eos` the
    model's own end tokens do not.
    """
    return {
        "prompt": query, "n": n, "seed": seed, "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature, "stop_token_ids": [sampling.stop], "ignore_eos": True,
        "logprobs": 0, "return_token_ids": True, "add_special_tokens": False, **PURE,
    }  # fmt: skip


def responses(reply: Any, query: Ids, n: int) -> list[tuple[Ids, list[float]]]:
    """The token ids and log-probs of the `n` responses to one query, in order.

    Raises:
        EngineError: if the reply has another form, number or prompt.
    """
    try:
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        numbers = [int(choice["index"]) for choice in choices]
        found = [(_ids(one["token_ids"]), _floats(one["logprobs"]["token_logprobs"])) for one in choices]
        prompts = [_ids(one.get("prompt_token_ids", query)) for one in choices]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"the engine's reply has another form than vLLM's ({type(error).__name__}: {error}); PPO needs "
            "token ids and log-probs: use vLLM 0.32 or newer"
        ) from None
    if numbers != list(range(n)):
        raise EngineError(f"the engine gave {len(choices)} responses to a prompt, and {n} are needed")
    if any(prompt != query for prompt in prompts):
        raise EngineError("the engine answered another prompt than the one sent: it changed its token ids")
    return found


def _ids(value: Any) -> Ids:
    if not all(type(token) is int for token in value):
        raise ValueError("token ids are whole numbers")
    return list(value)


def _floats(value: Any) -> list[float]:
    """JSON has no NaN: vLLM's server sends null in its place."""
    return [float("nan") if x is None else float(x) for x in value]


def reload_from(folder: Path) -> dict[str, Any]:
    """The body of `/collective_rpc` that loads weights from a folder."""
    return {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}


def options(folder: Path, port: int, *, max_tokens: int, is_float32: bool, by_ipc: bool) -> list[str]:
    """The words that follow the user's command: what to serve, where, and how log-probs are computed."""
    transfer = ["--weight-transfer-config", '{"backend": "ipc"}'] if by_ipc else []
    return [
        str(folder), "--host", HOST, "--port", str(port), "--dtype", "float32" if is_float32 else "bfloat16",
        "--max-model-len", str(max_tokens), "--logprobs-mode", "processed_logprobs",
        "--generation-config", "vllm", *transfer,
    ]  # fmt: skip
