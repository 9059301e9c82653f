"""What a person meets in a browser: forms to fill in, curves that are near, pages that stay local."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow.tracking import MlflowClient

from rlhf_tasks.project.processes import free_port
from rlhf_tasks.tracking import view
from rlhf_tasks.tracking.store import embedded_uri
from tests.browser import forms
from tests.browser.conftest import NAMES, PATIENCE, SUMMARY, TEXT, Reader, printed
from tests.flows import toy
from tests.flows.toy import Service
from tests.report import test_comparison, test_page, workspace
from tests.tracking.toy import served as served_mlflow

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
RUNS = "rlhf-pipeline/pipeline"
TYPED: dict[str, dict[str, Any]] = {
    RUNS: {
        "preset": "smoke",
        "seed": 7,
        "overrides": {"judge.num_examples": 50},
        "where": "checkout",
        "revision": "HEAD",
        "name": "typed",
        "max_hours": 2,
    },
    "rlhf-sweep/sweep": {
        "grid": {"ppo.kl_coef": [0.1, 0.2]},
        "seeds": [4],
        "preset": "smoke",
        "name": "typed",
        "revision": "HEAD",
        "metrics": ["ppo/selected_kl"],
        "parallel": 3,
        "deployment": "rlhf-pipeline/scheduled",
    },
    "rlhf-data-watch/watch": {"preset": "smoke", "deployment": "rlhf-pipeline/scheduled"},
}
DEFAULTS: dict[str, list[Any]] = {"seeds": [1, 2, 3]}


@pytest.mark.parametrize("interface", forms.INTERFACES)
@pytest.mark.parametrize("deployment", TYPED)
def test_every_field_can_be_set(running: Service, reader: Reader, interface: str, deployment: str) -> None:
    pool = f"{running.url('prefect')}/api/work_pools/rlhf"
    paused = {"is_paused": True}  # the runs are not to start
    toy.until(lambda: httpx.patch(pool, json=paused, timeout=60).is_success, "the pause")
    made = running.call("GET", f"/deployments/name/{deployment}")
    fields = made["parameter_openapi_schema"]["properties"]
    switched = {
        name: not field["default"] for name, field in fields.items() if field.get("type") == "boolean"
    }
    typed = TYPED[deployment] | switched
    assert set(fields) - {"common"} == set(typed)
    reader.open(f"{running.url('prefect')}{interface}/deployments/deployment/{made['id']}/run")
    for name, value in typed.items():
        forms.fill(reader.page, interface, name, value)
    common = {"kl_coef": 0.5} if "common" in fields else {}
    for name, value in common.items():
        forms.fill(reader.page, interface, f"ppo.{name}", value)
    before = runs_of(running, made["id"])
    reader.page.get_by_role("button", name="Submit").click()
    new = toy.until(lambda: [run for run in runs_of(running, made["id"]) if run not in before], "the run")
    expected = {
        name: DEFAULTS.get(name, []) + value if isinstance(value, list) else value
        for name, value in typed.items()
    }
    given = running.run(new[0])["parameters"]
    assert given.pop("common", {}) == common
    assert given == expected


@pytest.mark.parametrize("interface", forms.INTERFACES)
def test_a_form_that_is_left_as_it_is_starts_a_run(running: Service, reader: Reader, interface: str) -> None:
    """The fields that may be empty are left out; an empty text or a null would be refused."""
    made = running.call("GET", f"/deployments/name/{RUNS}")
    reader.open(f"{running.url('prefect')}{interface}/deployments/deployment/{made['id']}/run")
    before = runs_of(running, made["id"])
    reader.page.get_by_role("button", name="Submit").click()
    new = toy.until(lambda: [run for run in runs_of(running, made["id"]) if run not in before], "the run")
    given = running.run(new[0])["parameters"]
    assert {name: given.get(name) for name in ("seed", "revision", "name")} == dict.fromkeys(
        ("seed", "revision", "name")
    )


def runs_of(service: Service, deployment: str) -> list[str]:
    body = {"deployments": {"id": {"any_": [deployment]}}}
    return [run["id"] for run in service.call("POST", "/flow_runs/filter", body)]


def has_curves(reader: Reader, chart: int, runs: int) -> bool:
    """Whether one of the page's charts has curves in this many colors: one for each run."""
    curves = reader.page.locator(".js-plotly-plot").nth(chart).locator(".scatterlayer path.js-line")
    return len(set(curves.evaluate_all("paths => paths.map(path => path.style.stroke)"))) == runs


def test_mlflow_s_printed_address_overlays_the_curves_of_the_last_runs(
    running: Service, reader: Reader
) -> None:
    """And nothing else: no section below that of PPO."""
    reader.open(printed(running, "MLflow"))
    for name in NAMES:
        reader.page.get_by_role("link", name=name, exact=True).first.wait_for()
    titles = reader.page.get_by_text(re.compile(r"^(objective|policy)/\w+$"))
    titles.nth(2).wait_for()
    assert titles.all_inner_texts()[:3] == ["objective/kl", "objective/rlhf_reward", "policy/clipfrac_avg"]
    for chart in range(3):
        toy.until(functools.partial(has_curves, reader, chart, 3), "a curve of its own color per run")
    assert reader.clicks == 0


def test_the_list_of_runs_has_verdict_preset_and_changes(running: Service, reader: Reader) -> None:
    reader.open(printed(running, "MLflow"))
    reader.click(reader.page.locator("label", has=reader.page.locator("input[value=TABLE]")))
    for name in ("verdict", "preset", "changes"):
        cells = reader.page.locator(f"[role=gridcell][col-id='tags.`{name}`']")
        cells.nth(len(NAMES) - 1).wait_for()
        assert all(cell.is_visible() for cell in cells.all())
        texts = cells.all_inner_texts()
        assert texts == ["passed"] * 3 if name == "verdict" else "" not in texts
    assert reader.clicks == 1


def test_the_verdict_in_words_is_one_click_away_and_samples_and_curves_of_a_run_two(
    running: Service, reader: Reader
) -> None:
    """Samples are whole texts: the prompt, the responses and their scores."""
    address = printed(running, "MLflow")
    reader.open(address)
    reader.click(reader.page.get_by_role("link", name=NAMES[1], exact=True).first)
    reader.page.get_by_text("verdict: passed").first.wait_for()
    assert reader.clicks <= 1
    with reader.page.expect_popup() as samples:
        reader.click(reader.page.get_by_role("link", name="Samples", exact=True))
    for who in ("prompt", "reference", "sft", "policy"):
        samples.value.get_by_text(f"{who}: {who} number 0 {TEXT}").first.wait_for()
    assert reader.clicks <= 2
    reader.open(address)
    reader.click(reader.page.get_by_role("link", name=NAMES[1], exact=True).first)
    reader.click(reader.page.get_by_text("Show more").first)
    figure = reader.page.locator("img[src^='get-artifact']")
    figure.wait_for()
    toy.until(lambda: figure.evaluate("image => image.naturalWidth") > 500, "the figure")
    assert reader.clicks <= 2


def test_another_mlflow_server_shows_samples_and_figure_in_a_description(
    running: Service, chromium: Any
) -> None:
    home, port = running.root / ".rlhf", free_port(26900)
    run = MlflowClient(embedded_uri(home)).search_runs(["1"], view.PIPELINES)[0].info.run_id
    with served_mlflow(home, port, plain=True):
        page = chromium.new_page()
        page.goto(view.run_page(f"http://127.0.0.1:{port}", "1", run))
        figure = page.locator("img[src^='get-artifact']")
        figure.wait_for(state="attached", timeout=PATIENCE)
        toy.until(lambda: figure.evaluate("image => image.naturalWidth") > 500, "the figure")
        assert run in page.get_by_role("link", name="Samples", exact=True).get_attribute("href")
        page.close()


def test_a_run_with_another_kl_coef_is_five_clicks_from_prefect_s_root(
    running: Service, reader: Reader
) -> None:
    """Without JSON; the click into the field counts."""
    made = running.call("GET", f"/deployments/name/{RUNS}")
    before = runs_of(running, made["id"])
    reader.open(running.url("prefect"))
    reader.click(reader.page.get_by_role("link", name="Deployments"))
    row = reader.page.get_by_role("row").filter(has_text="pipeline").first
    reader.click(row.get_by_role("button").last)
    reader.click(reader.page.get_by_role("menuitem", name="Custom run"))
    label = reader.page.locator('label:text-is("ppo.kl_coef (Optional)")')
    reader.click(reader.page.locator("div.group", has=label).last.locator("input").last)
    reader.page.keyboard.type("0.25")
    reader.click(reader.page.get_by_role("button", name="Submit"))
    new = toy.until(lambda: [run for run in runs_of(running, made["id"]) if run not in before], "the run")
    assert running.run(new[0])["parameters"]["common"] == {"kl_coef": 0.25}
    assert reader.clicks <= 5


def test_verdict_and_win_rates_are_one_click_from_a_run_s_page(running: Service, reader: Reader) -> None:
    """They end its log, which reloads, as texts: Prefect opens no link of an artifact's card."""
    run = next(run for run in running.call("POST", "/flow_runs/filter", {}) if run["name"] == NAMES[0])
    reader.open(f"{running.url('prefect')}/v2/runs/flow-run/{run['id']}")
    reader.click(reader.page.get_by_role("tab", name="Logs"))
    rate = "Win rate 71% (68% to 74%) over the data's references"
    for text in (f"passed: {SUMMARY}", rate, "MLflow: http", f"passed: {SUMMARY}; {rate}"):
        reader.page.get_by_text(text).first.wait_for()
    assert reader.clicks == 1


def test_a_run_has_one_name_everywhere(running: Service, reader: Reader) -> None:
    names = {run["name"] for run in running.call("POST", "/flow_runs/filter", {})}
    assert set(NAMES) <= names & set(running.experiments())
    reader.open(printed(running, "Prefect"))
    reader.page.get_by_text("Flow Runs").first.wait_for()
    assert "/v2/" in reader.page.url


@pytest.mark.parametrize("interface", forms.INTERFACES)
@pytest.mark.parametrize("path", ["dashboard", "runs", "flows", "deployments", "settings"])
def test_prefect_s_pages_ask_no_other_machine(
    running: Service, reader: Reader, interface: str, path: str
) -> None:
    reader.open(f"{running.url('prefect')}{interface}/{path}")
    assert len(reader.requests) > 3, "the page was loaded"


@pytest.mark.parametrize("path", ["overview", "runs", "traces", "models"])
def test_mlflow_s_pages_ask_no_other_machine(running: Service, reader: Reader, path: str) -> None:
    experiment = re.search(r"experiments/\d+", printed(running, "MLflow"))
    assert experiment is not None
    reader.open(f"{running.url('mlflow')}#/{experiment[0]}/{path}")
    assert len(reader.requests) > 3, "the page was loaded"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_the_documentation_asks_no_other_machine(tmp_path: Path, reader: Reader) -> None:
    words = ["-m", "sphinx", "--quiet", "--builder", "html", "-d", str(tmp_path / "trees")]
    subprocess.run([sys.executable, *words, str(ROOT / "docs"), str(tmp_path / "site")], check=True)
    with served(tmp_path / "site") as address:
        for name in ("index.html", "search.html?q=kl", "how-to/schedule-and-cancel.html"):
            reader.open(f"{address}/{name}")


def test_the_report_and_the_comparison_ask_no_other_machine(tmp_path: Path, reader: Reader) -> None:
    compared = test_comparison.written(test_comparison.RUNS)
    (tmp_path / "comparison.html").write_text(compared, encoding="utf-8")
    workspace.put_all(tmp_path)
    (tmp_path / "report.html").write_text(test_page.written(tmp_path), encoding="utf-8")
    for name in ("comparison.html", "report.html"):
        reader.open((tmp_path / name).as_uri())


def put_large_report(folder: Path) -> None:
    """A report with the criteria and comparisons of the default run, and longer texts."""
    workspace.put_all(folder)
    workspace.put_verdict(folder, num_criteria=12)
    pairs = [("policy", "sft"), ("policy", "reference"), ("policy", "base"), ("sft", "reference")]
    rate = workspace.interval(0.6, 0.5, 0.7)
    comparisons = tuple(
        workspace.comparison(j, a, b, rate) for j in ("gold", "reward_model") for a, b in pairs
    )
    results = workspace.RESULTS.model_copy(update={"comparisons": comparisons})
    results.write(folder / "evaluation/judge/results.json")
    workspace.put_responses(folder, "a sentence of seven words " * 60)
    (folder / "report.html").write_text(test_page.written(folder), encoding="utf-8")


@pytest.mark.parametrize(("width", "height", "screens"), [(1280, 800, 6), (390, 844, 12)])
@pytest.mark.parametrize("scripts", [True, False])
def test_the_report_is_a_few_screens_long_before_anything_is_unfolded(
    tmp_path: Path, chromium: Any, width: int, height: int, screens: int, scripts: bool
) -> None:
    put_large_report(tmp_path)
    viewport = {"width": width, "height": height}
    page = chromium.new_page(viewport=viewport, java_script_enabled=scripts)
    page.goto((tmp_path / "report.html").as_uri())
    body = page.locator("body").bounding_box()
    assert body["height"] <= screens * height
    assert body["width"] <= width
    assert page.locator("h2", has_text="Samples").bounding_box()["y"] < 2.5 * height
    page.locator("#reward > summary").click()
    assert page.locator("#reward .facts").first.is_visible(), "it unfolds without scripts too"
    page.close()


@pytest.mark.parametrize(
    "load", ["srcdoc = text", "src = URL.createObjectURL(new Blob([text], {type: 'text/html'}))"]
)
def test_the_links_of_the_report_work_in_a_sandboxed_frame(tmp_path: Path, chromium: Any, load: str) -> None:
    """MLflow shows an artifact as a blob in a frame with `sandbox="allow-scripts"`."""
    put_large_report(tmp_path)
    (tmp_path / "viewer.html").write_text(
        f"<iframe sandbox='allow-scripts' width=1200 height=700></iframe><script>"
        f"fetch('report.html').then(r => r.text()).then(text => document.querySelector('iframe').{load})"
        "</script>",
        encoding="utf-8",
    )
    with served(tmp_path) as address:
        page = chromium.new_page()
        page.goto(f"{address}/viewer.html")
        frame = page.frame_locator("iframe")
        links = frame.locator("nav a")
        links.first.wait_for()
        for link in links.all():
            name = link.get_attribute("href").removeprefix("#")
            link.click()
            part = frame.locator(f"[id='{name}']")
            assert part.evaluate("part => part.getBoundingClientRect().top < 700"), name
            assert part.evaluate("part => part.tagName != 'DETAILS' || part.open"), name
            frame.locator("body").evaluate("body => body.ownerDocument.defaultView.scrollTo(0, 0)")
        page.close()
