"""What a stage reads beside the deps of dvc.yaml: parameters, and what params.yaml names. No torch here.

The first stage, `rlhf inputs`, writes a file for each other stage, which depends on it:

    inputs/STAGE.json
      values      the parameters that the stage reads, defaults included; what `auto` stands for is resolved
      files       the md5 of the files and folders that they name, and of the code of the functions
      packages    the versions of the packages on whose code the results depend, and that functions import;
                  and what `reads()` beside a source of data names

So DVC runs a stage again after a change of any of them, and after no other. The bytes depend on nothing else.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from rlhf_tasks import config, console
from rlhf_tasks.config import VIEWS, Config, ModelView, Stage
from rlhf_tasks.config.scorers import HELDOUT, OPTIMIZED
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, dvc_cli, dvc_files, git, hashing, imports, packaged
from rlhf_tasks.project.dvc_files import INPUTS, is_code, is_in
from rlhf_tasks.project.paths import Paths

FILES: Mapping[str, tuple[str, ...]] = {
    "data.path": (),
    "data.shapes": (),
    "data.mix.path": (),
    "model.base": ("scratch",),
    "sft.from": (),
    "reward.from": (),
    "ppo.scorers.path": (),
    "ppo.scorers.prompt": ("rubric", "reference"),
    "ppo.ptx.text": (),
    "ppo.select_by.judge.path": (),
    "ppo.select_by.judge.prompt": ("tldr", "hhh"),
    "judge.judges.path": (OPTIMIZED, HELDOUT),
    "judge.judges.prompt": ("tldr", "hhh"),
    "judge.labels": (),
    "judge.retention.general": ("english",),
    "judge.retention.questions": ("english",),
    "judge.retention.tasks.folder": (),
}
"""The parameters that name a file, or the folder of a model or of tasks; and their values that name none."""
FUNCTIONS = (
    "data.source",
    "data.format",
    "data.mix.format",
    "preferences.function",
    "dpo.loss",
    "ppo.loss",
    "ppo.advantages.function",
    "ppo.scorers.function",
    "ppo.select_by.judge.function",
    "judge.judges.function",
)
"""The parameters that name a function, as `module:function`; other values name a built-in one."""
FUNCTION = re.compile(r"[\w.]+:\w+")
HASH = re.compile(r"[0-9a-f]{32}(\.dir)?")
LIST_INDEX = re.compile(r"\.\d+(?=\.)")
READS_NO_FILES: tuple[Stage, ...] = ("verdict", "report")
"""Stages that read what the stages before them wrote, and not what params.yaml names."""
TOKENIZER_PACKAGES = ("tokenizers", "transformers")
MODEL_PACKAGES = ("peft", "torch", *TOKENIZER_PACKAGES)
MODEL_STAGES = [name for name, view in VIEWS.items() if issubclass(view, ModelView)]
NO_RESULT = (
    *(f"rlhf_tasks/{name}" for name in ("config", "cli", "project", "tracking", "console.py", "errors.py")),
    "rlhf_tasks/stages/runner.py",
)
"""Code on which no result depends: it decides where a stage runs, and what it prints and records. The values
that `config` gives a stage are in its inputs file."""
SHOWN_DIFFERENCES = 8
COMMAND = "cmd"
"""The name of a stage's command among its deps."""


@dataclass(frozen=True)
class Fingerprint:
    """What decides what a stage writes: what inputs/STAGE.json holds, and what DVC compares itself."""

    values: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    deps: Mapping[str, str] = field(default_factory=dict)
    """The command, and the md5 of the deps of dvc.yaml, in `lineage.fingerprint` only."""

    def flat(self) -> dict[str, Any]:
        """All of it by name: parameters, paths, packages."""
        packages = {f"package {name}": version for name, version in self.packages.items()}
        return {**self.values, **self.files, **packages, **self.deps}

    def data(self) -> dict[str, str]:
        """The md5 of the data that the stage reads, and of the code of functions."""
        is_data = {path: md5 for path, md5 in self.deps.items() if path != COMMAND and not is_code(path)}
        return {**is_data, **self.files}


# ----------------------------------------------------------------------------------- written and read


@console.part("collecting the inputs")
def write(paths: Paths, settings: Config, sizes: Set[str] = frozenset()) -> None:
    """Write inputs/STAGE.json for every stage of dvc.yaml that has parameters; none of them is `auto`.

    Of `sizes`, the parameters that only cut the work to this machine, a stage keeps what it had in its last
    run, unless something else has changed too: another GPU must not train anew.

    Raises:
        UserError: naming everything that does not exist.
    """
    stages = [name for name in VIEWS if name in dvc_files.graph(paths.root)]
    collected = {stage: _collect(paths, stage, VIEWS[stage].of(settings).declared) for stage in stages}
    if problems := dict.fromkeys(problem for _, several in collected.values() for problem in several):
        raise UserError("; ".join(problems))
    for stage, (inputs, _) in collected.items():
        known = used(paths.root, stage) if sizes & inputs.values.keys() else inputs
        kept = {**inputs.values, **{key: known.values[key] for key in sizes & known.values.keys()}}
        if replace(inputs, values=kept) == known:
            inputs = known
        tree = {key: value for key, value in vars(inputs).items() if key != "deps"}
        atomic.write_text(paths.inputs(stage), json.dumps(tree, indent=2, sort_keys=True) + "\n")


def read_record(paths: Paths, stage: str) -> Fingerprint | None:
    """What inputs/STAGE.json holds; None without the file."""
    path = paths.inputs(stage)
    return Fingerprint(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def used(root: Path, stage: str) -> Fingerprint:
    """What inputs/STAGE.json held in the last run of a stage, by dvc.lock; empty if it is lost."""
    file = Paths(root).inputs(stage)
    md5 = dvc_files.locked_by(root, stage).get(f"{INPUTS}/{stage}.json")
    is_here = md5 is not None and file.exists() and hashing.dvc_md5(file) == md5
    tree = json.loads(file.read_text(encoding="utf-8")) if is_here else dvc_cli.cached_json(root, md5)
    return Fingerprint(**tree)


def find_changes(root: Path, folder: Path, stage: str) -> list[str]:
    """What a stage reads in `folder` otherwise than in its last run by dvc.lock of `root`.

    The outs of other stages are left to those stages.
    """
    graph, before = dvc_files.graph(folder), dvc_files.locked_by(root, stage)
    record = f"{INPUTS}/{stage}.json"
    outs = {out for node in graph.values() for out in node.outs} - {record}
    read = [dep for dep in graph[stage].deps if dep not in outs and (folder / dep).exists()]
    changed = [dep for dep in read if hashing.dvc_md5(folder / dep) != before.get(dep)]
    code, texts = [dep for dep in changed if is_code(dep)], list[str]()
    if record in changed and (now := read_record(Paths(folder), stage)) is not None:
        old = used(root, stage).flat()
        texts.append(differences(old, now.flat()) if old else "its parameters")
    if code:
        texts.append(f"the code of {', '.join(code)}")
    return texts + [dep for dep in changed if dep != record and dep not in code]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What differs between two sets of inputs: `sft.patience (1 → 2), data/sft`; hashes are not shown."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    texts = [
        name
        if HASH.fullmatch(str(old.get(name) or new.get(name)))
        else f"{name} ({old.get(name)!r} → {new.get(name)!r})"
        for name in names[:SHOWN_DIFFERENCES]
    ]
    return ", ".join([*texts, *([f"{len(names) - len(texts)} more"] if len(names) > len(texts) else [])])


# ----------------------------------------------------------------------------------------- collected


def collect(paths: Paths, stage: str, values: Mapping[str, Any]) -> Fingerprint:
    """What the stage reads, given its parameters by dotted key."""
    collected, problems = _collect(paths, stage, values)
    if problems:
        raise UserError("; ".join(problems))
    return collected


def _collect(paths: Paths, stage: str, values: Mapping[str, Any]) -> tuple[Fingerprint, list[str]]:
    """What the stage reads, and what is wrong with it."""
    graph = dvc_files.graph(paths.root) if paths.dvc_yaml.exists() else {}
    deps = graph[stage].deps if stage in graph else ()
    problems, files = list[str](), dict[str, str]()
    names = MODEL_PACKAGES if stage in MODEL_STAGES else TOKENIZER_PACKAGES if stage == "prepare" else ()
    harness = ("lm_eval",) if values.get("judge.retention.tasks.names") else ()
    packages = {name: _version(name) for name in (*names, *harness)}
    named: Mapping[str, Any] = {} if stage in READS_NO_FILES else values
    for key, path in files_named(named):
        if is_in(path, deps):
            continue  # DVC compares it
        try:
            place = paths.root / packaged.locate(path)
        except UserError as error:
            problems.append(f"{key}: {error}")
            continue
        if maker := next((name for name, node in graph.items() if is_in(path, node.outs)), None):
            problems.append(
                f"{key}={path} is made by stage {maker}, and is not among the deps of stage {stage} in "
                "dvc.yaml; add it there, or name another one"
            )
        elif paths.root.resolve().is_relative_to(place.resolve()):
            problems.append(
                f"{key}={path} is the project's folder, or holds it; give a folder or file of its own"
            )
        elif not place.exists():
            problems.append(f"{key}={path} does not exist below {paths.root.resolve()}; give one that does")
        else:
            files[path] = hashing.dvc_md5(place, paths.home / "hashes.json")
    for key, function in functions_named(named):
        if key == "data.source" and stage != "prepare":
            continue  # the others read its rows
        module, _, name = function.partition(":")
        if module.endswith(".py") and (paths.root / module).is_file():
            problems.append(f"{key}: write {module.removesuffix('.py')}:{name}, without .py")
            continue
        try:
            code, foreign = code_of(paths.root, module, (*deps, *NO_RESULT))
            packages |= _read_by(paths.root, module) if key == "data.source" else {}
        except UserError as error:
            problems.append(f"{key}: {str(error).removeprefix(f'{key}: ')}")
            continue
        files |= code
        packages |= {name: _version(name) for name in _distributions(foreign)}
        top = imports.installed_name(module).split(".")[0]
        is_there = imports.file_of(module, paths.root) is not None or _distributions({top})
        is_listed = top in sys.stdlib_module_names or importlib.util.find_spec(top) is None
        if not is_there and is_listed:  # else it is an editable package, which may list no module
            problems.append(
                f"{key}: the module of {function} is neither a file below {paths.root.resolve()} nor in an "
                f"installed package; write {top}.py, or install its package"
            )
    return Fingerprint(values, dict(sorted(files.items())), dict(sorted(packages.items()))), problems


def files_named(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, path) of each file and folder that the parameters name; a hub id is a value, and no folder."""
    flat = flatten(values)
    for key, value in flat.items():
        known = LIST_INDEX.sub("", key)
        is_hub_id = flat.get(f"{key.rpartition('.')[0]}.revision") is not None
        is_unread = known == "data.path" and values.get("data.source") != "files"
        is_path = isinstance(value, str) and value not in FILES.get(known, (value,))
        if is_path and not is_hub_id and not is_unread:
            yield key, Path(value).as_posix()


def functions_named(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, `module:function`) of each function that the parameters name."""
    for key, value in flatten(values).items():
        if LIST_INDEX.sub("", key) in FUNCTIONS and isinstance(value, str) and FUNCTION.fullmatch(value):
            yield key, value


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """All values by dotted key, those inside lists too: `ppo.scorers.0.path`."""
    if not isinstance(value, Mapping | list | tuple):
        return {key: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    prefix = f"{key}." if key else ""
    return {k: v for name, inner in items for k, v in flatten(inner, f"{prefix}{name}").items()}


def _version(package: str) -> str:
    """The version without its build (`+cu130`): a checkout may move between machines."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ----------------------------------------------------------------------------------------- functions


def code_of(root: Path, module: str, known: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """md5 of a module's file and of the project files that it imports, directly or not; no `known` ones.

    And the top-level modules outside of the project that these files, or the module's known one, import; that
    of the module itself if it has no file.

    Raises:
        UserError: if a file is not Python.
    """
    hashes, foreign = dict[str, str](), set[str]()
    todo, seen = [module], set[Path]()
    while todo:
        name = todo.pop()
        parts = name.split(".")
        places = [root.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
        files = [f for at in places for f in (at.with_suffix(".py"), at / "__init__.py") if f.is_file()]
        if not files and parts[0] not in sys.stdlib_module_names:
            foreign.add(imports.installed_name(parts[0]))
        for file in files:
            path = file.relative_to(root).as_posix()
            is_known = is_in(path, known)
            if file in seen or (is_known and name != module):
                continue  # DVC compares the known ones
            seen.add(file)
            if not is_known:
                hashes[path] = hashing.dvc_md5(file)
            try:
                tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError) as error:
                raise UserError(f"{path} is not readable as Python: {error}; correct it") from None
            todo += _imports(tree, file.relative_to(root).parent.parts)
    return hashes, foreign


def _read_by(root: Path, module: str) -> dict[str, str]:
    """What `reads()` beside a source of data returns: the versions or hashes of what its rows depend on."""
    file = imports.file_of(module, root)
    with suppress(ImportError):
        if file is None and (spec := importlib.util.find_spec(imports.installed_name(module))) is not None:
            file = Path(str(spec.origin))
    if file is None or not re.search(r"^def reads\(", file.read_text("utf-8"), re.MULTILINE):
        return {}
    reads = imports.load_function(f"{module}:reads", "data.source", root)
    versions = imports.call(f"data.source: {module}:reads", lambda: dict(reads()))
    return {str(name): str(version) for name, version in versions.items()}


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """The names of all modules that may be imported, lazily too; a name may also be that of a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = [*above, *([node.module] if node.module else [])]
            yield from (".".join([*base, name.name]) for name in node.names)


def _distributions(modules: Collection[str]) -> list[str]:
    """The normalized names of the installed packages that have these top-level modules.

    As `importlib.metadata.packages_distributions` finds them, which takes seconds: it looks at all modules.
    """
    if not modules:
        return []
    listed = re.compile(rf"^({'|'.join(map(re.escape, modules))})([/.]|$)", re.MULTILINE)
    packages = set()
    for package in importlib.metadata.distributions():
        files = (package.read_text("top_level.txt") or "").strip() or package.read_text("RECORD") or ""
        if listed.search(files) and package.name:  # one that was installed by half has no name
            packages.add(canonicalize_name(package.name))
    return sorted(packages)


def module_path(function: str) -> str:
    """The file of `module:function`, if the project holds it and it is no package."""
    return f"{function.partition(':')[0].replace('.', '/')}.py"


def check_committed(root: Path, settings: Config) -> None:
    """Check that each function stands in the commit of `root`, or in a package that its pyproject.toml names.

    A run form may name any function, and the run would import it.
    """
    from packaging.requirements import Requirement

    file = root / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.exists() else {}
    extras = project.get("optional-dependencies", {}).values()
    required = [*project.get("dependencies", ()), *(one for extra in extras for one in extra)]
    names = [project.get("name", ""), *(Requirement(text).name for text in required)]
    allowed, problems = {canonicalize_name(name) for name in names}, []
    for key, function in functions_named(config.in_force(settings)):
        path = module_path(function)
        is_committed = any(git.files(root, "HEAD", name) for name in (path, f"{path[:-3]}/__init__.py"))
        top = re.split("[.:]", imports.installed_name(function))[0]
        if not is_committed and not allowed.intersection(_distributions([top])):
            problems.append(
                f"{key}: {function} is neither in a file of the run's commit nor in a package that "
                f"pyproject.toml names; commit {path}, or add its package to pyproject.toml"
            )
    if problems:
        raise UserError("; ".join(problems))
