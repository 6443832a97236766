"""`status`: the verdict on a tier, and its exit codes."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from compactor.access.tier import Tier
from compactor.cli.command_parser import WATCH_SECONDS
from compactor.cli.commands import status
from compactor.cli.main import entry
from compactor.config.units import format_size
from compactor.constants import DAY_MS
from compactor.daemon import status as daemon_status
from compactor.daemon.status import DaemonStatus
from compactor.errors import CompactorError, OutOfBudget, Refused, Unavailable
from compactor.model.ids import TopicPartition
from compactor.tier.plain import ComposableLogLayout
from tests.builders import LogBuilder
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
    replaced = sum(entry["waiting_bytes"] for entry in cleaned["partitions"]["rows"])
    assert f"{format_size(replaced)} replaced, waiting for deletion" in shown.document


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
    read_daemon_status = daemon_status.read_daemon_status

    def inspect_or_fail(opened: Tier, on_partition: Callable[[], None]) -> DaemonStatus:
        if len(pauses) == 1:
            raise Unavailable("the store does not answer")
        return read_daemon_status(opened, on_partition)

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

    monkeypatch.setattr(status, "read_daemon_status", inspect_or_fail)
    monkeypatch.setattr(time, "sleep", sleep)
    shown = on_terminal(80, watch)
    assert (codes, pauses) == ([130], [WATCH_SECONDS] * 3)
    assert shown.count(status.CLEAR_SCREEN) == shown.count("All well") == 2
    assert shown.count("the store does not answer. It is tried again") == 1
    assert "again every 5 s; Ctrl-C ends" in shown


def verdict_and_plan(deployment: Deployment) -> tuple[dict[str, Any], str]:
    """The only partition's verdict, which `status` and `plan` have in common, and what `plan` prints."""
    answer = deployment.ask("status")
    assert answer.code == 3, answer
    assert answer.document["verdict"]["level"] == "attention"
    found = answer.document["partitions"]["rows"][0]["verdict"]
    (planned,) = deployment.do("plan", "--force")["partitions"]
    assert planned["verdict"] == found
    assert found["kind"] == "blocked"
    shown = deployment.ask("plan", "--force", output="table").document
    assert shown.index("cannot run: orders-0 is blocked by " + found["cause"]) >= 0
    return found, shown


def test_a_disk_budget_that_is_too_small_is_told_before_the_first_run_and_after_it(deployment: Deployment) -> None:
    deployment.set(cleaner={"disk_budget_bytes": 20_000})
    before, _ = verdict_and_plan(deployment)
    assert (before["cause"], before["since_ms"]) == ("budget", None)
    assert deployment.ask("run", "--force").code == 6
    after, shown = verdict_and_plan(deployment)
    assert after["cause"] == "budget"
    assert after["since_ms"] is not None
    assert "cannot run" in shown
    history = deployment.do("runs", "list", "orders-0")
    assert deployment.ask("run", "--force").code == 6
    assert deployment.do("runs", "list", "orders-0") == history, "what is known already is not recorded again"
    deployment.set(cleaner={"disk_budget_bytes": 1 << 30})
    deployment.do("run", "--force")
    assert deployment.ask("status").code == 0


def test_a_transaction_that_hangs_needs_a_person_and_one_that_may_end_does_not(tmp_path: Path) -> None:
    began_ms = int(time.time() * 1000) - 30 * DAY_MS
    log = LogBuilder(time=began_ms).add("a=1 a=2; /")
    began = log.put("a=3", pid=4711, txn=True)
    log.add("/; a=4 a=5")
    made = Deployment(tmp_path)
    made.bring(log.write(tmp_path / "log"))
    made.do("run", "--force")
    waiting = made.do("status")["partitions"]["rows"][0]
    assert (waiting["verdict"]["kind"], waiting["verdict"]["waiting_bytes"] > 0) == ("waiting", True)
    log.time = began_ms + 16 * 60_000
    log.put("a=6")
    made.bring(log.write(tmp_path / "log"))
    found, shown = verdict_and_plan(made)
    assert found["cause"] == "transaction"
    assert "producer 4711, epoch 0" in found["reason"]
    command = f"kafka-transactions.sh --bootstrap-server HOST:PORT abort --topic orders --partition 0 --start-offset {began}"
    assert found["next_step"] == f"End it: {command}"
    assert command in shown.replace("\n", " ")
    explained = made.do("explain", "orders-0")
    assert command in explained["answer"]
    assert explained["facts"][0]["cause"] == "transaction"
    log.abort(4711)
    made.bring(log.write(tmp_path / "log"))
    assert made.ask("status").code == 0


def test_times_in_microseconds_are_counted_and_shown_as_dates(tmp_path: Path) -> None:
    now_ms = int(time.time() * 1000)
    log = LogBuilder(time=now_ms - DAY_MS).add("a=1 a=2")
    log.put("b=1", "c=1", times=(1_795_900_229_511_001, 1_795_900_229_511_000))
    log.add("/; a=3")
    made = Deployment(tmp_path)
    answer = made.ask("import", log.write(tmp_path / "log"), "--topic", "orders", "--partition", "0")
    assert "2 records of orders-0 have times more than a day ahead" in answer.stderr
    notes = [problem for problem in made.do("verify")["problems"] if problem["kind"] == "future-timestamp"]
    assert [note["severity"] for note in notes] == ["note"]
    assert notes[0]["detail"].startswith("2 records are of times more than a day ahead, the latest 58879-10-24T06:51:51Z")
    assert any("58879-10-24" in fact["text"] for fact in made.do("explain", "orders-0")["facts"] if fact["kind"] == "future_timestamps")
    assert "58879-10-24" in made.ask("plan", output="table").document
    assert "1795900229511001 ms" not in made.ask("explain", "orders-0", output="table").document


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [(Refused("AccessDenied", hint="Allow PutObject"), 5, "rights"), (OutOfBudget("no space is left", hint="Free space"), 6, "budget")],
)
def test_what_stops_a_round_is_told_to_other_processes_until_a_round_succeeds(
    error: CompactorError, code: int, cause: str, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No setting shows it: it is known from the run history alone. The open round stays open."""

    def fail(*arguments: Any, **options: Any) -> NoReturn:
        raise error

    deployment.do("plan")  # this machine knows the partition as it was
    with monkeypatch.context() as patch:
        patch.setattr(ComposableLogLayout, "upload_segment", fail)
        assert deployment.ask("run", "--force").code == code
    assert deployment.opened().open_partition_log(TopicPartition("orders", 0)).refresh().intent is not None
    found, _ = verdict_and_plan(deployment)
    assert (found["cause"], found["reason"], found["next_step"]) == (cause, error.message, error.hint)
    assert deployment.do("run", "--force")["partitions"][0]["status"] == "resumed"
    assert deployment.ask("status").code == 0
