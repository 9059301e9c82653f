"""The section `ppo.engine`: a server that samples PPO's rollouts, and the rules on what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from rlhf_tasks.config.types import NumProcesses, PositiveFloat, PositiveInt, Section

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOWEST_TEMPERATURE = 0.01  # vLLM samples at this temperature where a lower one is given


def _loopback_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_local = parts.scheme == "http" and parts.hostname in LOOPBACK and parts.port is not None
    except ValueError:
        is_local = False
    if not is_local or parts.path.strip("/") or parts.query:
        raise ValueError(
            f"{value!r} is not the address of a server on this machine, such as http://127.0.0.1:8000; "
            "whoever reaches the server can replace its weights, so that PPO uses loopback only"
        )
    return value.rstrip("/")


LoopbackUrl = Annotated[str, AfterValidator(_loopback_url)]


class Engine(Section):
    """A server that samples all responses of the stage from token ids: rollouts and evaluations. With several
    processes the first one starts it and talks to it."""

    kind: Literal["vllm"]
    """Kind of the server: vLLM, version 0.32 or newer, with its development mode on."""
    url: LoopbackUrl | None
    """Address of a running server on this machine; null: the stage starts the server and ends it."""
    command: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None
    """Words that start the server in its own environment, such as `[/opt/vllm/bin/vllm, serve]`; the stage
    adds the folder of the weights and its options; null: there is a `url`."""
    weights_folder: str | None
    """Folder, on a disk that the server reads too, in which the stage writes the weights of each version;
    null: .rlhf/engine."""
    transfer: Literal["folder", "ipc"]
    """How new weights reach the server: `folder`, in files in `weights_folder`; `ipc`, from the memory of the
    GPU that training and server share, by vLLM's weight transfer. The first weights are always in files."""
    ahead: Literal[0, 1]
    """Number of rollouts that are sampled ahead: 0, or 1 to sample the next rollout while the policy learns
    from this one, from weights that are one update older (arXiv 2410.18252)."""
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None
    """Cap of the importance weights π_old/π_engine by which each token's policy loss is multiplied; null: no
    weights."""
    max_logprob_diff: PositiveFloat
    """Largest mean |log π_old − log π_engine| of a rollout, in nats per token, if both have the same weights;
    above it the stage ends."""
    start_seconds: PositiveFloat
    """Longest wait for the start of the server, in seconds."""
    timeout_seconds: PositiveFloat
    """Longest wait for one rollout or evaluation, or for the server to load weights, in seconds."""

    @model_validator(mode="after")
    def _is_started_or_found(self) -> Engine:
        if (self.url is None) == (self.command is None):
            raise ValueError(
                "engine: give either `url`, of a server that runs, or `command`, which starts one, and null "
                "for the other"
            )
        return self


class Settings(Protocol):
    """What the rules read of the section `ppo`."""

    @property
    def engine(self) -> Engine | None: ...
    @property
    def sampling_batch_size(self) -> int | None: ...
    @property
    def lora(self) -> object | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def ratio_from(self) -> str: ...
    @property
    def total_episodes(self) -> PositiveInt: ...
    @property
    def rollout_batch_size(self) -> int: ...


def engine_conflicts(ppo: Settings) -> Iterator[str]:
    """Settings of `ppo` that an engine cannot follow, or that would have no effect beside it."""
    if ppo.engine is None:
        return
    if ppo.sampling_batch_size is not None:
        yield "engine: the server decides what it samples together; set sampling_batch_size to null"
    if ppo.temperature < LOWEST_TEMPERATURE:
        yield (
            f"engine: vLLM samples at a temperature of at least {LOWEST_TEMPERATURE}, and temperature="
            f"{ppo.temperature:g}; raise it, or set engine to null"
        )
    if ppo.ratio_from == "reference":
        yield (
            "engine: its importance weights correct ratios to the policy of the rollout; set ratio_from to "
            "rollout, or engine to null"
        )
    if ppo.engine.transfer == "ipc" and ppo.lora is not None:
        yield (
            "engine.transfer=ipc needs the policy's weights on the GPU, and lora's are merged beside it; set "
            "engine.transfer to folder, or lora to null"
        )
    if ppo.engine.ahead and ppo.total_episodes // ppo.rollout_batch_size < 2:
        yield "engine.ahead=1 needs a next rollout, and there is one update only; set engine.ahead to 0"


def process_conflicts(engine: Engine | None, num_processes: NumProcesses, layout: str) -> Iterator[str]:
    """The section `launch` beside an engine: a handle of memory needs whole weights in one process."""
    if engine is not None and engine.transfer == "ipc" and (num_processes > 1 or layout != "ddp"):
        yield (
            f"ppo.engine.transfer=ipc needs PPO in one process with whole weights, and launch has "
            f"num_processes={num_processes} and layout={layout}; set ppo.engine.transfer to folder, or "
            "launch.num_processes to 1 and launch.layout to ddp"
        )
