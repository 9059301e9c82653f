"""Stage ppo with a language model as reward, and with responses that no loss reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.models import contracts
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.protocol import ScorerError
from tests import small
from tests.judging import endpoint
from tests.judging.endpoint import KEY, MODEL, Body, Handler, completion
from tests.loopback import serving
from tests.ppo.toy import without_critic
from tests.stages.test_ppo import run

NUM_REPLIES = 20  # before the server goes away


def test_a_stage_that_a_failure_ended_asks_nothing_twice_and_names_its_model(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_KEY", KEY)
    advantages = {f"ppo.{key}": value for key, value in without_critic("group").items()}
    without = {key: value for key, value in small.WITHOUT_REWARD.items() if "critic" not in key}

    def away(handler: Handler, body: Body, attempt: int) -> None:
        if handler.number > NUM_REPLIES:
            handler.send(500, {"error": {"message": "down"}})
        else:
            handler.reply(body)

    with serving(endpoint.Server()) as server:
        server.reply = lambda body: completion(f"{len(body['messages'][0]['content']) % 10}")
        server.behaviour = away
        llm: dict[str, Any] = {"kind": "llm", "base_url": server.url, "model": MODEL, "max_retries": 0}
        changes = without | advantages | {"ppo.micro_batch_tokens": 4096, "ppo.skip_truncated": True}
        changes |= {"ppo.skip_equal_groups": True, "ppo.scorers": [llm | {"key_variable": "SCORER_KEY"}]}
        with pytest.raises(ScorerError, match=r"^ppo\.scorers: llm: a response has no score.*status 500"):
            run(**changes)
        server.behaviour = lambda handler, body, attempt: handler.reply(body)
        metrics, history = run(**changes)
    assert set(server.paid.values()) == {1}
    assert len(server.paid) > NUM_REPLIES
    assert 0 <= metrics["val/read_share"] <= 1
    assert all("val/equal_group_share" in row for row in history if "val/read_share" in row)
    assert contracts.optimized_chat_models(Paths().policy) == {MODEL}
