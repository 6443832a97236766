"""A run of the tests that is killed leaves no server behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.leftovers import MARK
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal
from tests.support.s3_server import running_moto

with running_moto() as server:
    print(os.environ["{mark}"], server.endpoint, flush=True)
    signal.pause()
"""


def processes_of(mark: str) -> list[str]:
    """Command lines of the processes that have the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="environments of other processes are read from /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_server_behind(sent: signal.Signals) -> None:
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-c", KILLED.format(mark=MARK)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        mark = run.stdout.readline().split()[0]
        assert any("moto_server" in words for words in processes_of(mark))
        run.send_signal(sent)
        run.wait(60)
    wait_for(lambda: not processes_of(mark), 60)
