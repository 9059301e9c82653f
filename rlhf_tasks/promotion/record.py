"""A verdict as it is kept: in a file, and in MLflow as tags and text of the version. No torch here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_tasks.project import atomic
from rlhf_tasks.promotion.gate import Verdict
from rlhf_tasks.promotion.registry import Registry, Version


@dataclass(frozen=True)
class Record:
    """A verdict with its circumstances."""

    verdict: Verdict
    label: str
    """The policy's name in messages."""
    against: str
    """The champion that it was judged against."""
    time: str

    def write(self, file: Path, model: str, version: Version) -> None:
        """Write the verdict's file."""
        known = {"model": model, "version": version.number, "against": self.against, "time": self.time}
        atomic.write_json(file, self.verdict.tree() | known)

    def publish(self, registry: Registry, version: Version) -> None:
        """Write the verdict to MLflow."""
        registry.record(version, self._tags(), self._page())

    def _tags(self) -> dict[str, str]:
        return {
            "": "passed" if self.verdict.passed else "refused",
            "summary": self.verdict.summary,
            "against": self.against,
            "time": self.time,
            "criteria": self._criteria(),
        }

    def _criteria(self) -> str:
        """A line per criterion. A tag per criterion would crowd the list of versions in MLflow."""
        lines = []
        for criterion, row in zip(self.verdict.criteria, self.verdict.rows(), strict=True):
            margin = f"margin {row['margin']}" if row["margin"] else criterion.lacking
            result = "passed" if criterion.passed else "failed"
            lines.append(f"{criterion.key}: {row['value']} {row['required']}, {margin}, {result}")
        return "\n".join(lines)

    def _page(self) -> str:
        """The description of the version, in Markdown."""
        rows, tags = self.verdict.rows(), self._tags()
        names = list(rows[0])
        lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        circumstances = f"`{self.label}` against {self.against}, {self.time}"
        return f"{tags['']}: {tags['summary']}\n\n{circumstances}\n\n{table}\n"


def verdict_file(home: Path, md5: str) -> Path:
    """The file of the last verdict on the policy with these bytes."""
    return home / "verdicts" / f"{md5}.json"


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
