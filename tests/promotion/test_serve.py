"""An exported policy behind `transformers serve`: what it completes is the policy's own response."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from rlhf_tasks.data.batches import read_table
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.processes import free_port
from rlhf_tasks.promotion import export
from tests.conftest import CHAT
from tests.flows.toy import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PROGRAM = Path(sys.executable).with_name("transformers")
NUM_TOKENS = 8


@pytest.fixture
def exported(models_here: Path) -> Path:
    """The exported policy, with a chat template that shows a message as it is."""
    if not is_serve_available() or not PROGRAM.exists():
        pytest.skip("needs `pip install 'transformers[serving]'`")
    if shutil.which("git") is None:
        pytest.skip("needs git")
    subprocess.run(["git", "init", "--quiet"], check=True)
    tokenizer = AutoTokenizer.from_pretrained("models/policy")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained("models/policy")
    export.export(Paths(), "models/policy", Path("out"))
    return Path("out").resolve()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """`transformers serve` on loopback; yields its address."""
    port = free_port(8400)
    command = [
        str(PROGRAM),
        "serve",
        str(folder),
        "--device",
        "cpu",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            until(lambda: server.poll() is not None or answers(port), "transformers serve")
            assert server.poll() is None, "the server has ended"
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


def greedy(folder: Path, text: str) -> str:
    """The likeliest tokens after a text, one at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    made = model.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS)[0][ids.shape[1] :]
    return str(tokenizer.decode(made, skip_special_tokens=True))


def test_transformers_serves_the_completions_and_chats_of_an_exported_policy(exported: Path) -> None:
    prompt = read_table(Paths(), "prompts", "test")[0]["prompt"]
    chat = [{"role": "user", "content": "my boss stole my lamp"}]
    shown = AutoTokenizer.from_pretrained(exported).apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    )
    options = {"model": str(exported), "temperature": 0, "max_tokens": NUM_TOKENS}
    with served(exported) as url:
        completed = httpx.post(f"{url}/completions", json={"prompt": prompt, **options}, timeout=300)
        talked = httpx.post(f"{url}/chat/completions", json={"messages": chat, **options}, timeout=300)
    assert completed.is_success, completed.text
    assert completed.json()["choices"][0]["text"] == greedy(exported, prompt)
    assert talked.is_success, talked.text
    assert talked.json()["choices"][0]["message"]["content"] == greedy(exported, str(shown))
