"""No server survives the run that started it, however the run ends.

``guard()`` starts a small process that waits until this one has ended, and then kills every process of this user whose environment carries
the run's mark: brokers, emulators, Spark, browsers, and what those have started. Only on Linux, which shows environments in /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "TESTS_STARTED_BY"  # not TIERED_COMPACTOR_...: the product refuses variables that it does not know


def guard() -> None:
    """Begin to watch over what this process starts from now on, and over what those processes start, such as xdist's workers."""
    if sys.platform != "linux" or MARK in os.environ:
        return
    reading, writing = os.pipe()  # its end tells that this process is gone, even if it was killed; children do not inherit it
    environment = dict(os.environ)
    os.environ[MARK] = uuid.uuid4().hex
    command = [sys.executable, "-S", "-E", str(Path(__file__)), os.environ[MARK]]
    silent = subprocess.DEVNULL
    guardian = subprocess.Popen(command, stdin=reading, stdout=silent, stderr=silent, env=environment, start_new_session=True)
    guardian.returncode = 0  # nobody waits for it: it ends after this process
    os.close(reading)
    _held.append(writing)


def marked(mark: str) -> list[int]:
    """Return the processes whose environment has the mark."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def kill(mark: str) -> None:
    """Kill all processes with the mark. Several passes: one may start another meanwhile."""
    for _ in range(20):
        left = marked(mark)
        if not left:
            return
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


_held: list[int] = []

if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill(sys.argv[1])
