"""What came out of a run: its stages, its experiment, its verdict, and what the user must know. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed

VERDICTS = ("Promoted", "Not promoted", "Deferred")
"""The names of states in which the gate ends. Each is completed: the run has its results."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of a run in which no stage failed."""

    name: str
    """Of the experiment, or of the run if it has none."""
    how: Mapping[str, str]
    """Per stage: `ran` or `cached`."""
    revision: str
    experiment: str | None = None
    """Its commit."""
    changes: Sequence[str] = ()
    """Of the parameters, as the user requested them."""
    notes: Sequence[str] = ()
    verdict: str | None = None
    """The state of the promotion (one of VERDICTS), if there was something to promote."""
    reason: str = ""
    """Of the verdict."""
    criteria: Sequence[Mapping[str, Any]] = ()
    unpushed: str | None = None
    """What the DVC remote lacks although it was to be pushed."""

    @property
    def promotion(self) -> str:
        return f"{self.verdict}: {self.reason}"

    def tags(self) -> dict[str, str]:
        """The tags by which the run in MLflow, DVC and git refer to each other."""
        return {
            "git.rev": self.revision,
            **({"dvc.exp": self.name, "dvc.exp_rev": self.experiment} if self.experiment else {}),
        }

    def state(self) -> State[Any]:
        """The final state of the flow run."""
        ran = ", ".join(stage for stage, result in self.how.items() if result == "ran")
        parts = [self.promotion] if self.verdict else []
        parts += [f"ran {ran}" if ran else "nothing had to run"]
        parts += [f"experiment {self.name}"] if self.experiment else []
        parts += [f"not pushed: {self.unpushed}"] if self.unpushed else []
        name = "Unpushed" if self.unpushed and self.verdict in (None, "Promoted") else self.verdict
        return Completed(name=name or "Completed", message="; ".join(parts))
