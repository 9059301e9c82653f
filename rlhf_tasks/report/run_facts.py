"""Which run a page is about, and what came out of it. Each page and the console say it in these words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_tasks import config, console, presets
from rlhf_tasks.config import STAGES, Data, Model, ReportView
from rlhf_tasks.config.judge import Judge
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document
from rlhf_tasks.tracking import catalogue

SHOWN_HASH = 10  # characters
OPPONENTS = {"sft": "the SFT model", "reference": "the references", "best_of_n": "best of n"}
_TIME = re.compile(r"-(\d{8}T\d{6})-")  # in a run key; UTC
Lineage = Mapping[str, Mapping[str, Any]]  # models/lineage/STAGE.json by stage


def facts(view: ReportView, lineage: Lineage, name: str, root: Path) -> dict[str, str]:
    """What a reader wants to know of the run, by title; what is not known is left out.

    Date, commit and, without a `name`, the name are those of the stage that ran last.
    """
    keys = {stage: _TIME.search(tree.get("rlhf.run") or "") for stage, tree in lineage.items()}
    times = {stage: datetime.strptime(at[1], "%Y%m%dT%H%M%S") for stage, at in keys.items() if at}
    last = max(times, key=lambda stage: times[stage], default="")
    tree = lineage.get(last, {})
    commit = tree.get("git.rev") or ""
    known = {
        "Date": f"{times[last].day} {times[last]:%B %Y, %H:%M} UTC" if last else "",
        "Run": name or tree.get("rlhf.run", ""),
        "Preset": view.preset or "none",
        "Seed": str(view.seed),
        "Data": view.data.in_words,
        "Base model": base_model(view.model),
        "Commit": commit[:SHOWN_HASH] + " with uncommitted changes" * bool(tree.get("git.dirty")),
        "Changes": _changes(root, commit) if commit else "",
    }
    return {title: text for title, text in known.items() if text}


def outcome(paths: Paths, judges: Iterable[Judge]) -> dict[str, str]:
    """What came out, by title, of the checkpoint that was kept; what is not known is left out."""
    results = EvaluationResults()
    with suppress(UserError):
        results = EvaluationResults.read(paths.evaluation_results)
    judge, ppo, gate = results.first_judge, read_json(paths.metrics("ppo")), read_json(paths.verdict)
    rates = [
        f"{document.share(one.win_rate)} over {text}"
        for other, text in OPPONENTS.items()
        if (one := results.comparison(judge, "policy", other)) is not None
    ]
    by = catalogue.placeholder_in_words(judge, catalogue.words_of(judges))
    by += ", which chose the checkpoint" * (judge in results.selecting_judges)
    if judge in results.accuracies:
        right = {who: document.share(x) for who, x in results.accuracies[judge].right.items()}
        rates.append(f"right are {right['policy']} of the responses, of SFT's {right['sft']}")
    kl, error = ppo.get("selected_kl"), ppo.get("selected_kl_standard_error")
    known = {
        "Verdict": f"{'passed' if gate['passed'] else 'refused'}: {gate['summary']}" if gate else "",
        "Win rate": f"{'; '.join(rates)}; by {by}" if rates else "",
        "KL": "" if kl is None else f"{document.number(kl, error)} nats from SFT",
        "Time": duration(read_lineage(paths)),
    }
    return {title: text for title, text in known.items() if text}


def duration(lineage: Lineage) -> str:
    """How long all stages before the report took when they made these results; "" if one is not known."""
    seconds = [lineage.get(stage, {}).get("seconds") for stage in STAGES[:-1]]
    return "" if None in seconds else f"{console.duration(sum(filter(None, seconds)))} for all stages"


def read_lineage(paths: Paths) -> Lineage:
    return {stage: read_json(paths.lineage(stage)) for stage in STAGES[:-1]}


def read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def task(data: Data) -> str:
    """What the data is; that of a preset's function in the words of the preset."""
    described = (
        f"{data.source}, of preset {name}: {presets.summary(name)}"
        for name in presets.names()
        if presets.read(name).get("data", {}).get("source") == data.source
    )
    return next(described, data.in_words) if ":" in data.source else data.in_words


def base_model(model: Model) -> str:
    if (shape := model.scratch) is None:
        return f"{model.base} {(model.revision or '')[:SHOWN_HASH]}".rstrip()
    return f"{shape.family} from random weights, {shape.num_layers} layers of width {shape.hidden_size}"


def _changes(root: Path, commit: str) -> str:
    """The values in which params.yaml differs from the commit's; "" if one of them is not readable."""
    try:
        texts = git.show(root, commit, "params.yaml"), config.read_text(root / "params.yaml")
        configs = [config.validate(config.parse(text, "params.yaml"), "params.yaml") for text in texts]
    except UserError:
        return ""
    return "; ".join(config.differences(*(ReportView.of(one).declared for one in configs)))
