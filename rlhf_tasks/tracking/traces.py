"""The traces of one run on their way to MLflow, with what judges and people say of them. Imports MLflow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import mlflow
from mlflow.entities import AssessmentError, AssessmentSource, Expectation, Feedback
from mlflow.exceptions import MlflowException
from mlflow.tracing.constant import AssessmentMetadataKey
from mlflow.tracing.trace_manager import InMemoryTraceManager
from mlflow.tracking import MlflowClient

from rlhf_tasks.tracking import rejections
from rlhf_tasks.tracking.events import Assessment, Trace

MAX_TAG = 5000  # characters
TRACE_TAG, MAX_TRACES = "rlhf.trace", 500  # a trace's number in its run; MLflow's limit for one page
REJECTED_TAG = "rlhf.rejected_traces"
NO_PREFERENCE = "NO_PREFERENCE"  # the code of the error of a reply that states no preference


@dataclass
class Traces:
    """The traces of one run. Each is sent once, whatever happens to its process."""

    client: MlflowClient
    run: str
    may_be_held: bool
    """True if traces may have been sent before: only those are sent that MLflow lacks."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Why MLflow will never accept a trace, by its number."""
    _known: dict[str, Trace] = field(default_factory=dict)
    _sent: set[str] = field(default_factory=set)
    """The numbers of the traces that were sent."""

    def note(self, traces: Iterable[Trace]) -> None:
        """Add traces that `send` is to send, or that were sent before."""
        self._known |= {trace["number"]: trace for trace in traces}

    def send(self) -> None:
        """Send each trace once. The exporter raises nothing if one is not accepted: see `check`."""
        if self._known.keys() <= self._sent | self.rejected.keys():
            return
        mlflow.set_tracking_uri(self.client.tracking_uri)  # the exporter uses the global address
        experiment = self._experiment()
        if self.may_be_held and not self._sent:
            self._sent = self._held(experiment)
        for number in [n for n in self._known if n not in self._sent and n not in self.rejected]:
            with rejections.logged_errors() as errors:
                self._send(self._known[number], experiment)
            self._sent.add(number)
            if reason := next(filter(None, map(rejections.reason, errors)), None):
                self.rejected[number] = reason

    def _send(self, trace: Trace, experiment: str) -> None:
        span = self.client.start_trace(
            trace["name"],
            span_type="LLM",
            inputs=dict(trace["inputs"]),
            tags={TRACE_TAG: trace["number"]},
            experiment_id=experiment,
            start_time_ns=trace["start"] * 1_000_000,
            run_id=self.run,
        )
        begun = InMemoryTraceManager.get_instance()  # type: ignore[no-untyped-call]
        with begun.get_trace(span.trace_id) as held:
            # They travel in the trace's own request: a killed process leaves both or neither.
            said = trace.get("assessments", ())
            if held is not None:  # it is where MLflow's own settings sample or disable traces
                held.info.assessments += [_assessment(one, span.trace_id, self.run) for one in said]
        self.client.end_trace(
            span.trace_id,
            outputs=dict(trace["outputs"]),
            status="ERROR" if trace["outputs"].get("failure") else "OK",
            end_time_ns=trace["end"] * 1_000_000,
        )

    def check(self) -> None:
        """Mark the run if MLflow has rejected traces.

        Raises:
            MlflowException: if MLflow lacks traces that it has not rejected.
        """
        if not self._known:
            return
        if self.rejected:
            reason = next(iter(self.rejected.values()))
            text = f"{len(self.rejected)} of {len(self._known)}, such as {reason}"
            self.client.set_tag(self.run, REJECTED_TAG, text[:MAX_TAG])
        lost = self._known.keys() - self._held(self._experiment()) - self.rejected.keys()
        if lost:
            raise MlflowException(f"MLflow has not accepted {len(lost)} of {len(self._known)} traces")

    def _experiment(self) -> str:
        return str(self.client.get_run(self.run).info.experiment_id)

    def _held(self, experiment: str) -> set[str]:
        """The numbers of the traces that MLflow has."""
        numbers, token = set[str](), None
        while True:
            page = self.client.search_traces(
                locations=[experiment],
                run_id=self.run,
                max_results=MAX_TRACES,
                include_spans=False,
                page_token=token,
            )
            numbers |= {trace.info.tags[TRACE_TAG] for trace in page if TRACE_TAG in trace.info.tags}
            token = page.token
            if not token:
                return numbers


def _assessment(one: Assessment, trace: str, run: str) -> Feedback | Expectation:
    common: dict[str, Any] = {
        "name": one["name"],
        "source": AssessmentSource(one["source"], one["by"]),
        "trace_id": trace,
        "metadata": {**one["metadata"], AssessmentMetadataKey.SOURCE_RUN_ID: run},
        "create_time_ms": one["time"],
        "last_update_time_ms": one["time"],
    }
    if one["kind"] == "expectation":
        return Expectation(value=one["value"], **common)
    error = AssessmentError(NO_PREFERENCE, one["error"]) if one["error"] else None
    return Feedback(value=one["value"], error=error, rationale=one["rationale"] or None, **common)
