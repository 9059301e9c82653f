"""Versions and aliases in a real MLflow store: once each, in order, and again after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from mlflow.tracking import MlflowClient

from rlhf_tasks.config import Tracking
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.processes import free_port
from rlhf_tasks.promotion.registry import (
    BEFORE,
    CHALLENGER,
    CHAMPION,
    LEFT,
    Registry,
    Unreachable,
    Version,
    reaching,
)
from rlhf_tasks.tracking.dashboard import server_command, server_environment
from rlhf_tasks.tracking.store import embedded_uri
from tests.flows import toy

NAME = "rlhf-policy"


def tracking(uri: str | None = None, *, enabled: bool = True) -> Tracking:
    return Tracking(enabled=enabled, uri=uri, experiment="rlhf")


@pytest.fixture
def registry(home: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Registry.open(tracking(), home, NAME)


def aliases(registry: Registry) -> dict[str, str]:
    return {k: str(v) for k, v in registry.client.get_registered_model(NAME).aliases.items()}


def made(registry: Registry, md5: str) -> Version:
    return registry.register(md5, "models/policy", {"dvc.path": "models/policy"}, None)


def promote(registry: Registry, md5: str) -> Version:
    version = made(registry, md5)
    registry.challenge(version)
    registry.crown(version, registry.champion())
    return version


def test_nothing_is_there_at_first(registry: Registry) -> None:
    assert registry.champion() is None
    assert registry.of_md5("a.dir") is None
    with pytest.raises(UserError, match="has no champion"):
        registry.give_back("now")


def test_the_same_bytes_are_registered_once(registry: Registry) -> None:
    first = registry.register("a.dir", "models/policy", {"dvc.exp": "one"}, None)
    again = registry.register("a.dir", "models/policy", {"dvc.exp": "two"}, None)
    other = registry.register("b.dir", "models/policy", {}, None)
    assert (first.number, again.number, other.number) == ("1", "1", "2")
    found = registry.client.get_model_version(NAME, "1")
    assert found.source == "dvc:/models/policy/a.dir"
    assert (found.tags["dvc.md5"], found.tags["dvc.exp"]) == ("a.dir", "two")


def test_a_version_belongs_to_the_run_that_made_it(registry: Registry, home: Path) -> None:
    client = MlflowClient(embedded_uri(home))
    experiment = client.get_experiment_by_name("rlhf")
    assert experiment is not None
    run = client.create_run(experiment.experiment_id, tags={"rlhf.run": "ppo-1"}).info.run_id
    assert registry.run_of("ppo-1", "rlhf") == run
    assert registry.run_of("ppo-2", "rlhf") is None
    assert registry.run_of("ppo-1", "another experiment") is None
    registry.register("a.dir", "models/policy", {}, run)
    assert client.get_model_version(NAME, "1").run_id == run


def test_the_challenger_becomes_champion_and_is_challenger_no_more(registry: Registry) -> None:
    first = made(registry, "a.dir")
    registry.challenge(first)
    assert aliases(registry) == {CHALLENGER: "1"}
    registry.crown(first, None)
    assert aliases(registry) == {CHAMPION: "1"}
    second = made(registry, "b.dir")
    registry.challenge(second)
    assert aliases(registry) == {CHAMPION: "1", CHALLENGER: "2"}
    registry.crown(second, registry.champion())
    assert aliases(registry) == {CHAMPION: "2"}


def test_rolling_back_goes_down_the_line_of_champions(registry: Registry) -> None:
    """a, b, c, b: back to c, to b as it stood on a, to a, and no further."""
    for md5 in ("a.dir", "b.dir", "c.dir", "b.dir"):
        promote(registry, md5)
    assert aliases(registry) == {CHAMPION: "2"}
    walked = []
    for _ in range(3):
        left, now = registry.give_back("at noon")
        assert aliases(registry)[CHAMPION] == now.number
        assert registry.client.get_model_version(NAME, left.number).tags[LEFT] == "at noon"
        walked.append((left.number, now.number))
    assert walked == [("2", "3"), ("3", "2"), ("2", "1")]
    with pytest.raises(UserError, match="version 1 of rlhf-policy is the first champion"):
        registry.give_back("now")
    assert aliases(registry) == {CHAMPION: "1"}


def test_a_champion_that_was_deleted_is_passed_over(registry: Registry) -> None:
    for md5 in ("a.dir", "b.dir", "c.dir"):
        promote(registry, md5)
    registry.client.delete_model_version(NAME, "2")
    assert registry.give_back("now")[1].number == "1"


def test_promoted_again_a_version_is_no_longer_one_that_was_rolled_back(registry: Registry) -> None:
    promote(registry, "a.dir")
    promote(registry, "b.dir")
    registry.give_back("now")
    promote(registry, "b.dir")
    tags = registry.client.get_model_version(NAME, "2").tags
    assert LEFT not in tags
    assert tags[BEFORE] == "1"


def test_one_that_was_judged_against_another_champion_is_not_crowned(registry: Registry) -> None:
    promote(registry, "a.dir")
    late = made(registry, "b.dir")
    seen = registry.champion()
    promote(registry, "c.dir")
    with pytest.raises(UserError, match="version 3 has become champion while version 2"):
        registry.crown(late, seen)
    assert aliases(registry) == {CHAMPION: "3"}


def test_a_verdict_replaces_the_one_before_it(registry: Registry) -> None:
    version = made(registry, "a.dir")
    registry.record(version, {"": "refused", "kl": "11 <= 10: failed", "old": "x"}, "text")
    again = made(registry, "a.dir")
    registry.record(again, {"": "promoted", "criteria": "kl: 1.5"}, "other text")
    found = registry.client.get_model_version(NAME, "1")
    told = {k: v for k, v in found.tags.items() if k.startswith("verdict")}
    assert told == {"verdict": "promoted", "verdict.criteria": "kl: 1.5"}
    assert found.description == "other text"
    assert found.tags["dvc.path"] == "models/policy"


@pytest.mark.slow
@pytest.mark.e2e
def test_a_server_takes_what_the_embedded_store_takes(home: Path) -> None:
    """It looks at where a version says that its weights are, which the store does not."""
    port = free_port(28400)
    url = f"http://127.0.0.1:{port}"
    environment = server_environment(os.environ)
    with subprocess.Popen(server_command(home, port), env=environment, start_new_session=True) as server:
        try:
            toy.until(lambda: answers(url), "MLflow")
            registry = Registry.open(tracking(url), home, NAME)
            promote(registry, "a.dir")
            promote(registry, "b.dir")
            registry.record(made(registry, "b.dir"), {"": "promoted"}, "text")
            assert aliases(registry) == {CHAMPION: "2"}
            assert registry.give_back("now")[1].number == "1"
            with pytest.raises(UserError, match="MLflow refused"), reaching():
                registry.client.set_registered_model_alias(NAME, "not an alias!", "1")
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_server_that_is_away_is_told_from_a_mistake(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    nobody = "http://127.0.0.1:9"
    with pytest.raises(Unreachable):
        Registry.open(tracking(nobody), home, NAME)
    with pytest.raises(UserError, match=r"tracking\.enabled is false"):
        Registry.open(tracking(enabled=False), home, NAME)
