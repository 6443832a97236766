"""Records without a key in a tier: refused before anything is written, dropped, or kept, as the topic's setting says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compactor.access.rounds import compact
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.control.leadership import hold_leadership
from compactor.control.ports import LeaseDurations
from compactor.control.publication import raise_log_start
from compactor.model.ids import TopicPartition
from compactor.round import compaction
from tests.builders import GZIP, LZ4, NONE, LogBuilder, entry, wrapper
from tests.support.deployment import Deployment
from tests.support.memory_brokers import MemoryBrokers

NAME = TopicPartition("orders", 0)
HOUR = 3_600_000


def mixed() -> LogBuilder:
    """Six records without a key, one of them without a value too, among ten; a key twice, a tombstone."""
    log = LogBuilder()
    log.put("=x1", "=x2", "=x3", codec=LZ4)
    log.put("a=1", "=x4", "b=1")
    log.put("a=2", "=x5", codec=GZIP)
    log.roll()
    log.put("", "t")
    log.roll()
    return log


def made(folder: Path, policy: str, log: LogBuilder, **cleaner: Any) -> Deployment:
    deployment = Deployment(folder, {"cleaner": {"keyless_records": policy, "delete_retention_ms": HOUR} | cleaner})
    deployment.bring(log.write(folder / "log"))
    return deployment


def state(deployment: Deployment) -> Any:
    with open_tier(load_settings(str(deployment.config), {})) as tier:
        return tier.open_partition_log(NAME).refresh()


def values(deployment: Deployment) -> list[tuple[int, str | None, str | None]]:
    lines = deployment.ask("cat", "orders-0", output="table").document.splitlines()
    return [(line["offset"], line["key"], line["value"]) for line in map(json.loads, lines)]


class TestRefused:
    @pytest.mark.parametrize("engine", ["memory", "partitioned"])
    def test_nothing_is_written_and_the_reason_names_number_share_and_setting(self, engine: str, tmp_path: Path) -> None:
        deployment = made(tmp_path, "refuse", mixed(), map_engine=engine)
        before = state(deployment)
        answer = deployment.ask("run", "--force")
        assert answer.code == 3
        (row,) = answer.document["partitions"]
        assert row["status"] == "quarantined"
        assert row["reason"].startswith("6 of 10 records (60 %) have no key, up to offset 8")
        assert 'keyless_records is "refuse": set it to "keep" or "drop" under [topics."orders"]' in row["reason"]
        after = state(deployment)
        assert (after.live, after.vector, after.intent) == (before.live, before.vector, None)
        assert after.quarantine.keyless.model_dump() == {"count": 6, "records": 10, "last_offset": 8}
        assert [run.status for run in after.runs] == ["quarantined"]

    def test_a_blocked_partition_is_not_read_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        deployment = made(tmp_path, "refuse", mixed())
        first = deployment.ask("run", "--force").document["partitions"][0]
        monkeypatch.setattr(compaction, "scan_for_survivors", lambda *_: pytest.fail("it is read"))
        assert deployment.ask("run", "--force").document["partitions"][0]["reason"] == first["reason"]

    def test_another_setting_lets_the_next_round_through(self, tmp_path: Path) -> None:
        deployment = made(tmp_path, "refuse", mixed())
        assert deployment.ask("run", "--force").code == 3
        deployment.set(**{'topics."orders"': {"keyless_records": "drop"}})
        assert deployment.run()["status"] == "cleaned"
        assert state(deployment).quarantine is None

    def test_a_tier_that_has_dropped_such_records_before_is_blocked_by_new_ones(self, tmp_path: Path) -> None:
        log = mixed()
        deployment = made(tmp_path, "drop", log)
        deployment.run()
        log.put("=new", "a=3")
        deployment.bring(log.write(tmp_path / "more"))
        deployment.set(cleaner={"keyless_records": "refuse"})
        assert "1 of 2 records (50 %) have no key" in deployment.ask("run", "--force").document["partitions"][0]["reason"]


class TestNotRefused:
    """What no reader gets as a record without a key counts as none."""

    def test_aborted_records_and_markers(self, tmp_path: Path) -> None:
        log = LogBuilder()
        log.put("=gone", "a=1", pid=7, txn=True)
        log.roll()
        log.abort(7)
        log.put("a=2")
        log.roll()
        assert made(tmp_path, "refuse", log).run()["records_kept"] == 2  # and the marker

    def test_an_empty_key_is_a_key(self, tmp_path: Path) -> None:
        log = LogBuilder()
        log.put("@=1", "@=2", "a=")
        assert made(tmp_path, "refuse", log).run()["records_kept"] == 2

    def test_records_below_the_log_start(self, tmp_path: Path) -> None:
        deployment = made(tmp_path, "refuse", mixed())
        with open_tier(load_settings(str(deployment.config), {})) as tier:
            log = tier.open_partition_log(NAME)
            log.refresh()
            with hold_leadership(tier.ports, log, LeaseDurations(10_000, 10_000)) as leadership:
                raise_log_start(leadership, lambda state: 9)
        assert deployment.run()["status"] == "cleaned"

    def test_records_after_the_range(self, tmp_path: Path) -> None:
        log = LogBuilder()
        log.put("a=1", "a=2")
        log.roll()
        log.put("=open", pid=7, txn=True)
        assert made(tmp_path, "refuse", log).run()["records_kept"] == 1

    def test_what_an_earlier_round_has_kept(self, tmp_path: Path) -> None:
        log = mixed()
        deployment = made(tmp_path, "keep", log)
        deployment.run()
        kept = values(deployment)
        log.put("a=3")
        deployment.bring(log.write(tmp_path / "more"))
        deployment.set(cleaner={"keyless_records": "refuse"})
        deployment.run()
        assert values(deployment) == [each for each in kept if each[1] != "a"] + [(10, "a", "3")]


class TestDropped:
    def test_the_balance_and_the_run_history_book_them(self, tmp_path: Path) -> None:
        deployment = made(tmp_path, "drop", mixed())
        deployment.run()
        (run,) = state(deployment).runs
        assert run.balance.records_dropped["keyless"].count == 6
        assert "superseded" not in {reason for reason, gone in run.balance.dropped.items() if gone.count}
        assert (run.stats["keyless_records"], run.stats["records_dirty"]) == (6, 10)

    def test_kept_ones_go_once_the_setting_says_drop(self, tmp_path: Path) -> None:
        log = mixed()
        deployment = made(tmp_path, "keep", log)
        deployment.run()
        log.put("new=1")
        deployment.bring(log.write(tmp_path / "more"))
        deployment.set(cleaner={"keyless_records": "drop"})
        deployment.run()
        assert [key for _, key, _ in values(deployment)] == ["b", "a", "t", "new"]


class TestKept:
    @pytest.mark.parametrize("engine", ["memory", "partitioned"])
    def test_each_stays_through_all_rounds_and_keys_are_cleaned(self, engine: str, tmp_path: Path) -> None:
        log = mixed()
        deployment = made(tmp_path, "keep", log, map_engine=engine)
        row = deployment.run("--now", 10 * HOUR)
        assert (row["records_read"], row["records_kept"]) == (10, 9)
        log.put("a=3", "=x6")
        deployment.bring(log.write(tmp_path / "more"))
        deployment.run("--now", 20 * HOUR)
        keyless = [(0, "x1"), (1, "x2"), (2, "x3"), (4, "x4"), (7, "x5"), (8, None), (11, "x6")]
        assert values(deployment) == sorted([*((offset, None, value) for offset, value in keyless), (5, "b", "1"), (10, "a", "3")])

    def test_old_formats_too(self, tmp_path: Path) -> None:
        log = LogBuilder()
        log.raw(entry(1, 0, "=plain"), 0)
        log.raw(wrapper(1, 3, [entry(1, 0, "k=1"), entry(1, 1, "=inside"), entry(1, 2, "k=2")], LZ4), 3)
        deployment = made(tmp_path, "keep", log)
        deployment.run()
        assert values(deployment) == [(0, None, "plain"), (2, None, "inside"), (3, "k", "2")]

    def test_a_segment_of_nothing_else_is_not_read_again(self, tmp_path: Path) -> None:
        log = LogBuilder()
        log.put("=1", "=2", codec=NONE)
        log.roll()
        deployment = made(tmp_path, "keep", log, segment_bytes=100)
        deployment.run()
        log.put("a=1")
        deployment.bring(log.write(tmp_path / "more"))
        assert deployment.run()["segments_skipped"] == 1


class TestInternalTopics:
    """Topics such as __remote_log_metadata hold nothing but records without a key."""

    def test_an_import_of_a_log_directory_leaves_them_out_unless_they_are_named_or_held(self, tmp_path: Path) -> None:
        deployment = Deployment(tmp_path, {})
        for name in ("orders-0", "__remote_log_metadata-2"):
            log = LogBuilder()
            log.put("a=1")
            log.write(tmp_path / "root" / name)

        def imported(*words: str) -> tuple[list[str], list[str]]:
            answer = deployment.ask("import", tmp_path / "root", *words)
            assert answer.code == 0
            return [row["topic"] for row in answer.document["partitions"]], [line for line in answer.remarks if "goes on" in line]

        assert imported() == (["orders"], [])
        assert imported("--topics", ".*remote.*") == ([], [])
        assert imported("--topics", "__remote.*") == (["__remote_log_metadata"], [])
        topics, remarks = imported()
        assert topics == ["__remote_log_metadata", "orders"]
        assert "__remote_log_metadata goes on because the tier holds it" in remarks[0]


def test_brokers_get_no_record_about_a_round_that_would_drop_them(tmp_path: Path) -> None:
    """Refused before the first COPY_SEGMENT_STARTED: nothing is in the metadata topic that somebody would have to undo."""
    brokers = MemoryBrokers(tmp_path / "brokers", {"cleaner": {"min_cleanable_dirty_ratio": 0.0}})
    brokers.topic("orders")
    brokers.tier(NAME, mixed().write(tmp_path / "log"))
    before = [len(log) for log in brokers.log.logs]
    now_ms = brokers.clock_ms()
    refused = compact(brokers.opened(), NAME, now_ms)
    assert (refused.status, "have no key" in refused.reason) == ("quarantined", True)
    assert [len(log) for log in brokers.log.logs] == before
    assert compact(brokers.opened(cleaner={"keyless_records": "keep"}), NAME, now_ms).status == "cleaned"
    assert [len(log) for log in brokers.log.logs] != before
