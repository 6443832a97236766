"""`status`: the verdict on a tier, and its exit codes."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from compactor.access.tier import Tier
from compactor.cli.commands import status
from compactor.cli.main import entry
from compactor.cli.shared_arguments import WATCH_SECONDS
from compactor.daemon import status as daemon_status
from compactor.daemon.status import DaemonStatus
from compactor.errors import Unavailable
from tests.support.deployment import Deployment, GrowingLog
from tests.support.terminal import on_terminal


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    made = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}})
    made.bring(GrowingLog("orders", 0, tmp_path, random.Random(3)).write_part())
    return made


def test_status_of_a_healthy_tier_says_what_is_due_and_what_waits(deployment: Deployment) -> None:
    found = deployment.do("status")
    assert (found["verdict"]["level"], found["totals"]["due_partitions"]) == ("ok", 1)
    deployment.do("pause", "orders")
    paused = deployment.do("status")
    assert (paused["totals"]["due_partitions"], paused["partitions"]["rows"][0]["condition"]) == (0, "paused")
    deployment.do("resume", "orders")
    deployment.do("run", "--force")
    cleaned = deployment.do("status")
    assert cleaned["partitions"]["rows"][0]["condition"] == "waiting"
    shown = deployment.ask("status", output="table")
    assert shown.code == 0
    assert "All well" in shown.document
    assert re.search(r"Clean, [\d.]+ KiB in grace until .*\d\d:\d\d(:\d\d)? UTC", shown.document)
    assert "saved, not deleted yet" in shown.document


@pytest.mark.damages
def test_status_exits_with_3_and_names_the_command_when_a_partition_needs_help(deployment: Deployment) -> None:
    log = next(path for path in deployment.tier.rglob("*.log") if path.stat().st_size > 1000)
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.chmod(0o644)
    log.write_bytes(bytes(data))
    assert deployment.ask("run", "--force").code == 3
    before = deployment.digest()
    answer = deployment.ask("status", output="table")
    assert answer.code == 3
    assert "1 partition needs you" in answer.document
    assert "tiered-compactor explain orders-0" in answer.document
    assert deployment.ask("status").document["needs_attention"][0]["kind"] == "quarantined"
    assert deployment.digest() == before


def test_status_watch_draws_the_screen_anew_until_it_is_interrupted(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    codes: list[int] = []
    read_daemon_status_from_control_logs = daemon_status.read_daemon_status_from_control_logs

    def inspect_or_fail(opened: Tier, on_partition: Callable[[], None]) -> DaemonStatus:
        if len(pauses) == 1:
            raise Unavailable("the store does not answer")
        return read_daemon_status_from_control_logs(opened, on_partition)

    real_sleep, watching = time.sleep, list[int]()

    def sleep(seconds: float) -> None:
        if threading.get_ident() not in watching:  # Spark's client, which an earlier test has started here, sleeps in a thread of its own
            return real_sleep(seconds)
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt
        return None

    def watch(terminal: IO[str]) -> None:
        watching.append(threading.get_ident())
        with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
            codes.append(entry(["status", "--watch", "--config", str(deployment.config)]))

    monkeypatch.setattr(status, "read_daemon_status_from_control_logs", inspect_or_fail)
    monkeypatch.setattr(time, "sleep", sleep)
    shown = on_terminal(80, watch)
    assert (codes, pauses) == ([130], [WATCH_SECONDS] * 3)
    assert shown.count(status.CLEAR_SCREEN) == shown.count("All well") == 2
    assert shown.count("the store does not answer. It is tried again") == 1
    assert "again every 5 s; Ctrl-C ends" in shown
