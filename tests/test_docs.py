"""The documentation: links exist, commands run, the reference is current, the words are plain."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest
from dvc.cli.parser import get_main_parser
from ruamel.yaml import YAML
from typer import Exit, TyperException

from docs.generator.__main__ import pages
from rlhf_tasks import config, presets
from rlhf_tasks.cli import main as cli
from rlhf_tasks.config import STAGES, Config
from rlhf_tasks.config.types import field_of, section_of
from rlhf_tasks.tracking import catalogue

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.name not in ("parameters.md", "metrics.md", "cli.md", "stages.md")]
PICTURES = ROOT / "docs" / "pictures"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PLACE = re.compile(r"(?:rlhf_tasks|flows|infra|tests|docs)/[\w./-]*")
PLACEHOLDERS = {
    f"rlhf_tasks/{name}" for name in ("presets/NAME.yaml", "stages/STAGE.py", "tracking/metrics/STAGE.toml")
}
ELSEWHERE = "pip|cp|docker|export|git|hf|mkdir|prefect|sbatch|source|transformers"
"""Programs of the shown commands that are not the project's own, nor DVC."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------ links and pictures


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Sphinx make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_and_their_anchors_exist(page: Path) -> None:
    dead = []
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert dead == []


def test_every_picture_is_shown_by_a_page() -> None:
    shown = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(text_of(page))}
    assert {file for file in PICTURES.iterdir() if file.resolve() not in shown} == set()


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    spans = SPAN.findall(FENCE.sub("", text_of(page)))
    named = {match[0].rstrip(".") for span in spans for match in [PLACE.match(span)] if match}
    assert {name for name in named if not (ROOT / name).exists()} - PLACEHOLDERS == set()


class Resources(HTMLParser):
    """The addresses from which a page loads scripts, styles, fonts and pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "img", "link", "iframe", "source"):
            self.found += [value for key, value in attrs if key in ("src", "href") and value]


def test_the_site_builds_without_warnings_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    words = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--builder", "html"]
    places = ["-d", str(tmp_path / "trees"), str(ROOT / "docs"), str(tmp_path / "site")]
    build = subprocess.run([sys.executable, *words, *places], capture_output=True, text=True, check=False)
    assert (build.returncode, build.stderr) == (0, "")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES) - 2  # and the search page
    outside = {url for page in pages for url in Resources(text_of(page)).found if "//" in url}
    styles = {
        url
        for file in (tmp_path / "site").rglob("*.css")
        for url in re.findall(r"url\(['\"]?(https?:)?//", text_of(file))
    }
    assert (outside, styles) == (set(), set())


# ------------------------------------------------------------------------------------------ commands


class Shown(NamedTuple):
    page: str
    words: list[str]


def commands() -> Iterator[Shown]:
    """Every command of a shell block, and every `rlhf …` and `make …` in a sentence or table."""
    for page in WRITTEN:
        text = text_of(page)
        for language, block in FENCE.findall(text):
            if language in ("sh", "bash"):
                for line in block.replace("\\\n", " ").splitlines():
                    for part in line.split("&&"):
                        if words := shlex.split(part, comments=True):
                            yield Shown(name_of(page), words)
        for span in SPAN.findall(FENCE.sub("", text)):
            if re.match(r"(rlhf|make|dvc|python -m) [a-z-]", span) and "…" not in span:
                words = shlex.split(span)
                is_name_only = len(words) == 2 and words[0] in ("rlhf", "dvc")
                yield Shown(name_of(page), [*words, "--help"] if is_name_only else words)


COMMANDS = list(commands())


def check_rlhf(words: list[str], params: Path) -> None:
    name, *rest = words
    if name == "--help":
        return
    with cli.parser().commands[name].make_context(name, rest) as context:
        given = context.params
    if name == "preset":
        words = [*(given["names"] or []), *(given["values"] or [])]
        presets.apply([w for w in words if "=" not in w], params, [w for w in words if "=" in w])


@pytest.mark.parametrize("shown", COMMANDS, ids=lambda shown: " ".join(shown.words))
def test_a_command_that_a_page_shows_is_accepted(shown: Shown, tmp_path: Path) -> None:
    program, *words = shown.words
    params = tmp_path / "params.yaml"
    params.write_text(text_of(ROOT / "params.yaml"), encoding="utf-8")
    try:
        if program == "rlhf":
            check_rlhf(words, params)
        elif program == "make":
            targets = re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
            assert {word for word in words if "=" not in word} <= set(targets)
        elif program == "dvc":
            get_main_parser().parse_args(words)
        elif program == "python":
            assert words[0] == "-m"
            assert importlib.util.find_spec(words[1]) is not None
        elif not re.fullmatch(ELSEWHERE, program):
            assert (ROOT / program).is_file(), f"{shown.page}: {program} is unknown"
    except (SystemExit, Exit, TyperException) as error:
        if getattr(error, "exit_code", getattr(error, "code", 0)):  # 0: its help was printed
            pytest.fail(f"{shown.page}: `{' '.join(shown.words)}` is not accepted: {error}")


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_parameters_that_a_page_names_exist(page: Path) -> None:
    unknown = []
    for span in SPAN.findall(FENCE.sub("", text_of(page))):
        match = re.match(r"([a-z]+)\.([a-z_]+)(?![\w./])", span)
        owner = section_of(Config, match[1], {}) if match else None
        if match and owner and match[2] not in ("jsonl", "md", "safetensors"):
            unknown += [] if field_of(owner, match[2]) else [match[0]]
    assert unknown == []


def test_metrics_that_pages_name_are_in_the_catalogue() -> None:
    names = {metric.name for stage in STAGES for metric in catalogue.metrics(stage)}
    groups = {name.split("/")[0] for name in names if "/" in name}
    spans = {span for page in WRITTEN for span in SPAN.findall(FENCE.sub("", text_of(page)))}
    used = {span for span in spans if re.fullmatch(r"\w+(/\w+)+", span) and span.split("/")[0] in groups}
    unknown = {span for span in used if not any(catalogue.find(stage, span) for stage in STAGES)}
    assert unknown - names == set()


def test_parts_of_params_yaml_that_a_page_shows_have_known_keys() -> None:
    yaml, known = YAML(typ="safe"), config.load(ROOT / "params.yaml").model_dump(by_alias=True)
    for page in WRITTEN:
        for language, block in FENCE.findall(text_of(page)):
            tree = yaml.load(block) if language == "yaml" else None
            for section, values in tree.items() if isinstance(tree, dict) else ():
                if "cmd" not in values:  # a stage of dvc.yaml
                    assert set(values) <= set(known[section]), f"{name_of(page)}: {section}"


def test_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    quoted = re.findall(
        r'^\| [^|]*?"([^"|]+)"', text_of(ROOT / "docs/how-to/troubleshooting.md"), re.MULTILINE
    )
    files = [ROOT / "Makefile", *(ROOT / "rlhf_tasks").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]
    code = "".join(map(text_of, files))
    assert quoted
    assert [message for message in quoted if message not in code] == []


# ------------------------------------------------------------------------------- what the pages hold


def test_the_generated_reference_is_current() -> None:
    """`python -m docs.generator` writes it."""
    made = pages()
    assert [file.name for file, text in made.items() if text_of(file) != text] == []
    assert not [file.name for file, text in made.items() if str(ROOT) in text], "a path of this machine"


def test_readme_and_changelog_are_short() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 60
    assert len(text_of(ROOT / "CHANGELOG.md").splitlines()) <= 100


def test_the_tree_of_the_project_names_every_room() -> None:
    page = text_of(ROOT / "docs/how-to/change-the-code.md")
    tree = next(block for _, block in FENCE.findall(page) if "rlhf_tasks/" in block)
    rooms = {path.parent.name for path in (ROOT / "rlhf_tasks").glob("*/__init__.py")}
    named = {word.rstrip("/") for word in re.findall(r"^ *(\w+/)", tree, re.MULTILINE)}
    assert rooms | {"rlhf_tasks", "flows", "infra", "docs", "tests", "benchmarks", "examples"} == named
