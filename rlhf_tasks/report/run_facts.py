"""Which run a page is about, and what came out of it: in the words of each page and of the card of a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_tasks import config, console, presets
from rlhf_tasks.config import STAGES, Config, Data, Model, ReportView
from rlhf_tasks.config.judge import Judge
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document
from rlhf_tasks.tracking import catalogue, context

SHOWN_HASH = 10  # characters
MAX_CHANGES = 2  # of params.yaml, on the card
SHELL_PATH = "RLHF_SHELL_PATH"  # PATH of the shell that `make` was started in, which adds .venv to its own
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


def show_card(paths: Paths, settings: Config) -> None:
    """Print, in at most eight lines, what was trained, how good it is, and what to do next."""
    rows = dict(_card(paths, settings))
    width = max(map(len, rows), default=0) + 2
    console.say("\n".join(f"{title:{width}}{text}" for title, text in rows.items()))


def _card(paths: Paths, settings: Config) -> Iterator[tuple[str, str]]:
    episodes = read_json(paths.metrics("ppo")).get("episode")
    trained = f", preference pairs ({settings.dpo.loss})" if settings.dpo.train else ""
    trained += f", {episodes:,.0f} episodes of PPO" if episodes else ""
    data = settings.data.in_words
    if read_json(paths.metrics("prepare")).get("rows/as_turns"):
        data += ", as turns of the chat template"
    yield "Trained", f"{base_model(settings.model)}{trained}; data: {data}"
    known = facts(ReportView.of(settings), read_lineage(paths), "", paths.root)
    came_out = outcome(paths, settings.judge.judges)
    if "Commit" in known:
        changes = known["Changes"].split("; ") if "Changes" in known else []
        many = [f"{len(changes)} changes of params.yaml, in the report"]
        origin = [f"commit {known['Commit']}", f"preset {known['Preset']}"]
        origin += many if len(changes) > MAX_CHANGES else changes
        came_out["Time"] = "; ".join([came_out.get("Time", "not known"), *origin])
    for title, text in came_out.items():
        first, *more = text.split("; ") if title == "Verdict" else [text]
        yield title, f"{first}; and {len(more)} more, in the report" if more else first
    report = paths.reports / "index.html"
    if report.exists():
        yield "Report", report.resolve().as_uri()
    rlhf = command()
    curves = f"; {context.uri(settings.tracking) or f'{rlhf} mlflow'}   (curves)" * settings.tracking.enabled
    yield "Next", f"{rlhf} generate models/policy   (try it){curves}"
    if verdict := came_out.get("Verdict"):
        is_passed = verdict.startswith("passed")
        what = "make it the champion" if is_passed else "shows each criterion; it cannot become champion"
        yield "", f"{rlhf} promote   ({what})"


def command() -> str:
    """`rlhf`, or its path where the user's shell finds no such command, or another one."""
    program = Path(sys.executable).with_name("rlhf")
    in_shell = shutil.which("rlhf", path=os.environ.get(SHELL_PATH))
    if not program.exists() or (in_shell and program.samefile(in_shell)):
        return "rlhf"
    folder = Path.cwd()
    return shlex.quote(str(program.relative_to(folder) if program.is_relative_to(folder) else program))
