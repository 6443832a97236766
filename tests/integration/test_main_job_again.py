"""The main job over time: rounds for delete horizons, readers while the view moves on, budgets that are raised, odd logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.storage.local import LocalStore
from tests.builders import LZ4, LogBuilder, log_of
from tests.support.tier_cli import TierCli, batches_of, latest, visible

pytestmark = pytest.mark.quick

DAY = 86_400_000
NOW = 1_700_000_000_000
SETTINGS = {"publish": {"grace_ms": 0}}


def keys(folder: Path) -> list[str]:
    """What is there: keys in order, ``-`` before a tombstone, markers as C and A."""
    words = []
    for batch in batches_of(folder):
        for record in batch.records:
            if batch.control:
                words.append("C" if (record.key or b"")[3] else "A")
            else:
                words.append(("" if record.value is not None else "-") + (record.key or b"").decode())
    return words


def test_a_new_segment_knows_the_transaction_that_is_open_at_its_end(cli: TierCli, tmp_path: Path) -> None:
    """A truncation may make it the newest one, and nothing is cleaned from the first offset of an open transaction on."""
    cli.set(cleaner={"segment_bytes": 14})  # a group for each segment
    log = log_of("a=1; a=2; 7t: t=1; /; b=1 b=2; /; 7 commits; 8t: u=1; /; 8 commits; c=1")
    cli.bring(log.write(tmp_path / "log"))
    before = [segment.open_txn_offset for segment in live(cli)]
    assert before == [2, 2, 6, -1]
    assert cli.run("--now", NOW)["status"] == "cleaned"
    assert [segment.open_txn_offset for segment in live(cli)] == before


def live(cli: TierCli) -> tuple[RemoteLogSegmentMetadata, ...]:
    opened = cli.open()
    opened.identity.read_catalog()
    return opened.open_partition_log(TopicPartition("orders", 0)).refresh().live


def test_deletes_go_when_their_time_has_come(cli: TierCli, tmp_path: Path) -> None:
    log = log_of("a=1 b=1 c=1; a d=1; 7t: b=2; 7 commits; /; b=3")
    log.put("c", codec=LZ4)
    cli.bring(log.write(tmp_path / "log"))
    assert cli.run("--now", NOW)["status"] == "cleaned"
    assert keys(cli.export(tmp_path / "first")) == ["-a", "d", "C", "b", "-c"]
    (segment,) = cli.do("segments", "list", "orders-0")["segments"][:1]
    assert segment["due_ms"] == NOW + DAY

    (plan,) = cli.do("plan", "--now", NOW + DAY - 1)["partitions"]
    assert not plan["due"]
    assert cli.run("--now", NOW + DAY - 1)["status"] == "nothing_to_do"
    (plan,) = cli.do("plan", "--now", NOW + DAY)["partitions"]
    assert (plan["due"], "horizon" in plan["reason"]) == (True, True)
    (row,) = cli.do("run", "--now", NOW + DAY)["partitions"]  # nobody forces it
    assert (row["status"], row["first_dirty_offset"], row["next_dirty_offset"]) == ("cleaned", 9, 9)
    # The marker's data went in the first round, so the second one gave it its horizon, as Kafka's does.
    assert keys(cli.export(tmp_path / "second")) == ["d", "C", "b"]
    assert cli.do("run", "--now", NOW + 2 * DAY)["partitions"][0]["status"] == "cleaned"
    third = cli.export(tmp_path / "third")
    assert keys(third) == ["d", "b"]
    assert latest(third) == {b"d": b"1", b"b": b"3"}
    assert cli.run("--now", NOW + 10 * DAY)["status"] == "nothing_to_do"


def test_readers_follow_the_view(cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an export is about to read is replaced and deleted: it begins anew, with the compacted view."""
    log = log_of("a=1 a=2")
    cli.bring(log.write(tmp_path / "log"))
    download, moved = LocalStore.download, list[bool]()

    def slow(store: LocalStore, *arguments: Any) -> int:
        if not moved:
            moved.append(True)
            assert cli.run()["status"] == "cleaned"
            assert cli.do("retire")["deleted"]
        return download(store, *arguments)

    monkeypatch.setattr(LocalStore, "download", slow)
    assert keys(cli.export(tmp_path / "out")) == ["a"]
    assert not [path.name for path in tmp_path.iterdir() if "partial" in path.name]


def test_a_map_budget_that_is_too_small_and_then_is_not(cli: TierCli, tmp_path: Path) -> None:
    log = LogBuilder()
    for number in range(40):
        log.put(*(f"k{number}-{i}=1" for i in range(100)))
    log_dir = log.write(tmp_path / "log")
    cli.bring(log_dir)
    cli.set(cleaner={"map_budget_bytes": 4096, "map_engine": "memory"})
    before = cli.export(tmp_path / "before")
    answer = cli.ask("run")
    assert (answer.code, answer.document["partitions"][0]["status"]) == (6, "quarantined")
    assert "map_budget_bytes" in answer.stderr
    assert visible(cli.export(tmp_path / "during")) == visible(before)
    cli.set(cleaner={"map_budget_bytes": 1 << 20})
    assert cli.run()["status"] in ("cleaned", "resumed")
    assert latest(cli.export(tmp_path / "after")) == latest(log_dir)


@pytest.mark.parametrize("what", ["an aborted transaction", "markers", "no keys", "emptied batches"])
def test_logs_of_which_nothing_stays(what: str, cli: TierCli, tmp_path: Path) -> None:
    log = LogBuilder()
    if what == "an aborted transaction":
        log.add("7t: a=1 b=1; 7 aborts")
    elif what == "markers":
        log.add("7 commits; 8 aborts")
    elif what == "no keys":
        log.put("=1", "=2")
    else:
        log.put("a=1", "b=1", offsets=(0, 1), last_offset=5)
        log.put("a=2", "b=2")
    log.add("/; z=1")
    cli.set(cleaner={"delete_retention_ms": 0, "producer_id_expiration_ms": 1, "keyless_records": "drop"})
    cli.bring(log.write(tmp_path / "log"))
    for moment in range(3):
        cli.do("run", "--force", "--now", NOW + moment)
    after = cli.export(tmp_path / "after")
    assert latest(after) == latest(tmp_path / "log")
    assert cli.run("--now", NOW + 3)["status"] == "nothing_to_do"
    assert cli.do("topics")["partitions"][0]["end_offset"] == log.next_offset - 1
    assert cli.do("verify")["ok"]
    more = LogBuilder(log.next_offset).add("z=2")
    cli.bring(more.write(tmp_path / "more"))
    assert latest(cli.export(tmp_path / "end")) == latest(after) | {b"z": b"2"}


def test_many_first_imports_at_once(cli: TierCli, tmp_path: Path) -> None:
    """Four processes find no tier and make one: there is one, and it holds four partitions."""
    log = log_of("a=1 b=2")
    log_dir = log.write(tmp_path / "log")
    command = [sys.executable, "-m", "compactor", "import", str(log_dir), "--topic", "orders", "--config", str(cli.config), "--partition"]
    processes = [
        subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for number in range(4)
    ]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], said
    assert [p["partition"] for p in cli.do("topics")["partitions"]] == [0, 1, 2, 3]
    assert {row["status"] for row in cli.do("run")["partitions"]} == {"cleaned"}


def test_topics_with_dashes_and_dots(cli: TierCli, tmp_path: Path) -> None:
    log = log_of("a=1 a=2")
    log_dir = log.write(tmp_path / "log")
    for name in ("a-b-0", "a-0-7", "A.b_c-12"):
        cli.named = name
        cli.bring(log_dir)
        assert cli.run(name)["status"] == "cleaned"
        assert keys(cli.export(tmp_path / name)) == ["a"]
    assert len(cli.do("topics")["partitions"]) == 3
