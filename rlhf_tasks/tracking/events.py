"""The lines of a run's local record. No torch or MLflow here.

A record starts with a `run` line and ends with an `end` line. A process that resumes the run adds another
`run` line to the same record. Every line has its `time`, in milliseconds since 1970: MLflow receives the
same points, however often they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from rlhf_tasks.config import Stage

PIPELINE = "pipeline"  # the `stage` of a pipeline's own run
REPORT_PAGE = "{report}"  # in a tag: the address of the run's report, which MLflow knows by the run's id


class Header(TypedDict):
    """The first line of a process: everything known about the run when it starts."""

    kind: Literal["run"]
    time: int
    key: str
    """The run's name, MLflow's tag `rlhf.run`."""
    stage: str
    """A stage of dvc.yaml, or `pipeline` for the run of a flow."""
    last: bool
    """Whether the pipeline ends with this stage."""
    home: str
    """The `.rlhf` folder, with MLflow's store if `uri` is None."""
    uri: str | None
    experiment: str
    process: str
    """HOST:PID:START, see `context.process_name`."""
    parent: dict[str, str]
    """The pipeline's run, see `context.parent`."""
    parameters: Mapping[str, Any]
    inputs: Mapping[str, str]
    tags: Mapping[str, str]


class Metrics(TypedDict):
    kind: Literal["metrics"]
    time: int
    step: int
    values: Mapping[str, float]


class Headlines(TypedDict):
    """Points and results that the pipeline's run shows too."""

    kind: Literal["headlines"]
    time: int
    step: int | None
    """None for a result, which is no point of a curve."""
    values: Mapping[str, float]


class Notice(TypedDict):
    """Something that a person should see, such as a guard that tripped."""

    kind: Literal["event"]
    time: int
    name: str
    text: str
    step: int


class Assessment(TypedDict):
    """What a judge or a person says of a traced reply, in MLflow's terms."""

    name: str
    """The judge's name, also of what people say of its reply."""
    kind: Literal["feedback", "expectation"]
    source: Literal["LLM_JUDGE", "HUMAN"]
    by: str
    """The judge's model, or the person."""
    time: int
    """In milliseconds since 1970."""
    value: str | None
    """None, with the reason in `error`, for a reply without a preference."""
    error: str
    rationale: str
    metadata: Mapping[str, str]


class Trace(TypedDict):
    """One call of a model; `start` and `end` in milliseconds since 1970."""

    kind: Literal["trace"]
    time: int
    name: str
    number: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    start: int
    end: int
    assessments: NotRequired[Sequence[Assessment]]
    """Records of earlier versions do not have them."""


class Artifact(TypedDict):
    """A copy of a file in the run's folder; `table` marks a sample table."""

    kind: Literal["artifact"]
    time: int
    file: str
    folder: str | None
    table: bool


class Figure(TypedDict):
    """A figure that is drawn on delivery, from the CSV file `table` of the run's folder."""

    kind: Literal["figure"]
    time: int
    file: str
    table: str
    stage: Stage


class Tags(TypedDict):
    kind: Literal["tags"]
    time: int
    values: Mapping[str, str]


class End(TypedDict):
    kind: Literal["end"]
    time: int
    status: Literal["FINISHED", "FAILED", "KILLED"]
    reason: str
    """Why the run failed or was killed; empty if it finished."""
    device: str
    outs: Mapping[str, str]
    """`{path: md5}` of what the stage wrote."""


def ending(error: BaseException | None, *, device: str = "", outs: Mapping[str, str] | None = None) -> End:
    """The last line of a run that finished, or ended by `error`: an error is a failure, a signal a kill."""
    if error is None:
        return End(kind="end", time=now(), status="FINISHED", reason="", device=device, outs=outs or {})
    if isinstance(error, Exception | SystemExit):
        words = f"the process ended with exit status {error}"
        reason = words if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        return End(kind="end", time=now(), status="FAILED", reason=reason, device=device, outs={})
    reason = str(error) or "interrupted"
    return End(kind="end", time=now(), status="KILLED", reason=reason, device=device, outs={})


Event = Header | Metrics | Headlines | Notice | Trace | Artifact | Figure | Tags | End


def now() -> int:
    """Milliseconds since 1970."""
    return round(time.time() * 1000)
