"""Versions and aliases in a real MLflow store."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_tasks.config import Tracking
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.processes import free_port
from rlhf_tasks.promotion import registry as registries
from rlhf_tasks.promotion.registry import CHAMPION, Registry, Unreachable, Version
from tests.tracking.toy import served

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
    registry.promote(version, registry.champion())
    return version


def test_the_same_bytes_are_registered_once(registry: Registry) -> None:
    first = registry.register("a.dir", "models/policy", {"dvc.exp": "one"}, None)
    again = registry.register("a.dir", "models/policy", {"dvc.exp": "two"}, None)
    other = registry.register("b.dir", "models/policy", {}, None)
    assert (first.number, again.number, other.number) == ("1", "1", "2")
    version = registry.client.get_model_version(NAME, "1")
    assert version.source == "dvc:/models/policy/a.dir"
    assert (version.tags["dvc.md5"], version.tags["dvc.exp"]) == ("a.dir", "two")


def test_rollbacks_go_down_the_list_of_former_champions(registry: Registry) -> None:
    """Champions a, b, c, b: rollbacks go to c, b, a, and no further."""
    for md5 in ("a.dir", "b.dir", "c.dir", "b.dir"):
        promote(registry, md5)
    assert aliases(registry) == {CHAMPION: "2"}
    walked = []
    for _ in range(3):
        left, now = registry.rollback("at noon")
        assert aliases(registry)[CHAMPION] == now.number
        assert registry.client.get_model_version(NAME, left.number).tags[registries.ROLLED_BACK] == "at noon"
        walked.append((left.number, now.number))
    assert walked == [("2", "3"), ("3", "2"), ("2", "1")]
    with pytest.raises(UserError, match="version 1 of rlhf-policy is the first champion"):
        registry.rollback("now")
    assert aliases(registry) == {CHAMPION: "1"}
    promote(registry, "b.dir")
    promote(registry, "c.dir")
    registry.client.delete_model_version(NAME, "2")
    assert registry.rollback("now")[1].number == "1", "a deleted champion is passed over"


def test_a_version_that_was_judged_against_another_champion_is_not_promoted(registry: Registry) -> None:
    promote(registry, "a.dir")
    late = made(registry, "b.dir")
    seen = registry.champion()
    promote(registry, "c.dir")
    with pytest.raises(UserError, match="version 3 became champion while version 2"):
        registry.promote(late, seen)
    assert aliases(registry) == {CHAMPION: "3"}


def test_a_verdict_replaces_the_earlier_one(registry: Registry) -> None:
    version = made(registry, "a.dir")
    registry.record(version, {"verdict": "refused", "verdict.old": "x"}, "text")
    again = made(registry, "a.dir")
    registry.record(again, {"verdict": "promoted", "verdict.criteria": "kl: 1.5"}, "other text")
    stored = registry.client.get_model_version(NAME, "1")
    tags = {k: v for k, v in stored.tags.items() if k.startswith("verdict")}
    assert tags == {"verdict": "promoted", "verdict.criteria": "kl: 1.5"}
    assert stored.description == "other text"
    assert stored.tags["dvc.path"] == "models/policy"
    registry.record(again, {"verdict": "x" * 6000}, "page " * 2000)
    stored = registry.client.get_model_version(NAME, "1")
    lengths = len(stored.tags["verdict"]), len(str(stored.description))
    assert lengths == (registries.MAX_TEXT, registries.MAX_TEXT), "a PostgreSQL server refuses longer ones"


@pytest.mark.slow
@pytest.mark.e2e
def test_a_server_accepts_what_the_embedded_store_accepts(home: Path) -> None:
    """The server checks the source of a version, the store does not."""
    port = free_port(28400)
    url = f"http://127.0.0.1:{port}"
    with served(home, port):
        registry = Registry.open(tracking(url), home, NAME)
        promote(registry, "a.dir")
        promote(registry, "b.dir")
        registry.record(made(registry, "b.dir"), {"verdict": "promoted"}, "text")
        assert aliases(registry) == {CHAMPION: "2"}
        assert registry.rollback("now")[1].number == "1"
        with pytest.raises(UserError, match="MLflow refused"), registries.translate_errors():
            registry.client.set_registered_model_alias(NAME, "not an alias!", "1")


def test_an_unreachable_server_is_not_a_user_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    nobody = "http://127.0.0.1:9"
    with pytest.raises(Unreachable):
        Registry.open(tracking(nobody), home, NAME)
    with pytest.raises(UserError, match=r"tracking\.enabled is false"):
        Registry.open(tracking(enabled=False), home, NAME)
