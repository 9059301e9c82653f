"""A service with three runs, and a Chromium in which every request must stay on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.flows import toy
from tests.flows.toy import Service
from tests.report import workspace

LOOPBACK = ("127.0.0.1", "localhost")
PATIENCE = 120_000  # milliseconds until an element is there, for a busy machine
SETTLE = 8_000  # milliseconds
NAMES = ("one", "two", "three")
SUMMARY = "all 9 criteria are met"
TEXT = "of seven words in a sentence"
CURVES = "episode,objective/kl,objective/rlhf_reward,policy/clipfrac_avg\n1,0.5,0.1,0.2\n2,0.7,0.3,0.1\n"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="needs `pip install -e '.[browser]'`")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium: install it, or name it by the variable CHROMIUM")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Reader:
    """A person at a browser: opens an address, then clicks."""

    page: Any
    clicks: int = 0
    requests: list[str] = field(default_factory=list)

    def open(self, address: str) -> None:
        self.page.goto("about:blank")  # or else a new fragment would load nothing
        self.page.goto(address)
        self.page.wait_for_timeout(SETTLE)  # pages ask for more after they were loaded, some of them for ever
        self.clicks = 0

    def click(self, element: Any) -> None:
        element.click()
        self.clicks += 1


@pytest.fixture
def reader(chromium: Any) -> Iterator[Reader]:
    """Fails the test if any page has asked another machine for anything."""
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(PATIENCE)
    made = Reader(context.new_page())
    context.on("request", lambda request: made.requests.append(request.url))
    yield made
    context.close()
    hosts = {urlsplit(url).hostname for url in made.requests if url.startswith(("http", "ws"))}
    assert hosts <= set(LOOPBACK), f"requests left this machine: {hosts}"


@pytest.fixture(scope="session")
def running(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose three pipelines have curves of PPO, samples and a verdict."""
    project = toy.make(tmp_path_factory.mktemp("browser") / "project")
    (project / "given/ppo.csv").write_text(CURVES, encoding="utf-8")
    (project / "given/verdict.json").write_text('{"gate/passed": 1}', encoding="utf-8")
    workspace.put_responses(project / "given", TEXT)
    workspace.RESULTS.write(project / "given/evaluation/judge/results.json")
    workspace.put_json(project / "given/evaluation/verdict.json", {"passed": True, "summary": SUMMARY})
    copied = ["mkdir -p metrics", "cp given/verdict.json metrics", "cp -r given/evaluation ."]
    toy.write_script(project, [*copied, toy.SECOND.rstrip()])
    with toy.service(project) as service:
        runs = [
            service.start(name=name, overrides={"ppo.kl_coef": 0.1 * number})
            for number, name in enumerate(NAMES, 1)
        ]
        for run in runs:
            assert service.end(run)["type"] == "COMPLETED", service.logs(run)
            toy.until(lambda run=run: service.mlflow(run)["info"]["status"] == "FINISHED", "MLflow")  # type: ignore[misc]
        yield service


def printed(service: Service, word: str) -> str:
    """The address that `rlhf up` prints on the line that begins with this word."""
    lines = (service.command("up").stdout).splitlines()
    return next(line.split()[-1] for line in lines if line.startswith(word))
