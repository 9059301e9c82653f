"""Install the locked requirements and this project, and say every few seconds how far that is.

`python infra/install.py`, by the Python of the environment. No package is imported: there may be none yet.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "infra/requirements.lock"
EVERY_SECONDS = 8.0
SHOWN_LINES = 30  # of pip's output, where it fails


def run(*words: str, what: str, total: int = 0, must: bool = True) -> None:
    """Run a module of Python and print what pip is at. What `must` succeed ends this program if it fails."""
    command = [sys.executable, "-m", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    print(what, flush=True)
    output, found, now, said = list[str](), 0, "at work", ""
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
                found, now = total, "unpacking, which takes a minute or two"
        except queue.Empty:
            pass
        if time.monotonic() - said_at >= EVERY_SECONDS:
            so_far = f", {time.monotonic() - began_at:.0f}s so far" if now == said else ""
            print(f"  {f'{min(found, total)}/{total} ' if total else ''}{now}{so_far}", flush=True)
            said, said_at = now, time.monotonic()
    if (status := process.wait()) and must:
        print("\n".join(output[-SHOWN_LINES:]), file=sys.stderr)
        sys.exit(status)


def main() -> None:
    # The lock names all packages, so that pip need not look for what they need. Compiling takes longer than
    # unpacking, and pip would do it on one core.
    locked = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if "==" in line]
    install = ("pip", "install", "--progress-bar", "off", "--no-deps")
    what = f"installing {len(locked)} packages of {LOCK.relative_to(ROOT)}"
    run(*install, "--no-compile", "-r", str(LOCK), what=what, total=len(locked))
    packages = sysconfig.get_path("purelib")
    # fails where a package holds a template with the suffix .py: pip leaves those too
    run("compileall", "-qq", "-j", "0", packages, what="compiling them on all cores", must=False)
    run(*install, "--no-build-isolation", "--editable", str(ROOT), what="installing this project")


if __name__ == "__main__":
    main()
