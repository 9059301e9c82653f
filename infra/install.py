"""Install the locked requirements and this project, and say every few seconds how far that is.

`python infra/install.py`, by the Python of the environment. No package is imported: there may be none yet.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "infra/requirements.lock"
EVERY_SECONDS = 8.0
SHOWN_LINES = 30  # of pip's output, where it fails


def pip(*words: str, what: str, total: int = 0) -> None:
    """Run `pip install`, and print what it is at; ends this program where pip fails."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    print(f"installing {what}", flush=True)
    output, found, now, said = list[str](), 0, "starting", ""
    began_at = said_at = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=1.0)
            if line is None:
                break
            output.append(line)
            if line.startswith("Collecting "):
                found, now = found + 1, f"reading {line.split()[1]}"
            elif line.strip().startswith("Downloading "):
                now = f"downloading {line.split()[1].rsplit('/', 1)[-1]}"
            elif line.startswith("Installing collected packages"):
                found, now = total, "unpacking, which takes some minutes"
        except queue.Empty:
            pass
        if time.monotonic() - said_at >= EVERY_SECONDS:
            so_far = f", {time.monotonic() - began_at:.0f}s so far" if now == said else ""
            print(f"  {f'{min(found, total)}/{total} ' if total else ''}{now}{so_far}", flush=True)
            said, said_at = now, time.monotonic()
    if status := process.wait():
        print("\n".join(output[-SHOWN_LINES:]), file=sys.stderr)
        sys.exit(status)


def main() -> None:
    locked = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if "==" in line]
    pip("-r", str(LOCK), what=f"{len(locked)} packages of {LOCK.relative_to(ROOT)}", total=len(locked))
    pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT), what="this project")


if __name__ == "__main__":
    main()
