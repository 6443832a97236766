"""The daemon over tiers that brokers write, without brokers: one consumer for all partitions, several rounds, ends of every kind."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.adapters.brokers import publisher as kafka, view as brokers
from compactor.adapters.brokers.cluster import ClusterProblem
from compactor.adapters.brokers.codec import decode_record
from compactor.adapters.brokers.follow import metadata_partition
from compactor.constants import NEVER_MS
from compactor.daemon.daemon import Daemon
from compactor.daemon.metrics import daemon_metrics
from compactor.daemon.partition_cache import BrokerChangeFeed
from compactor.daemon.scheduling import ROUND_HOLD_MS, PartitionSchedule
from compactor.daemon.status import read_daemon_status
from compactor.errors import Refused
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.remote_log import RemoteLogSegmentMetadataUpdateRecord
from compactor.model.segment import SegmentState
from compactor.service import RETRY_MS
from compactor.upkeep.export import export_partition
from compactor.upkeep.orphans import undo_by_copies
from compactor.views.overview import undo_refusal
from compactor.views.verdict import VerdictKind
from compactor.web.console import PartitionListQuery
from compactor.web.pages import DaemonPages
from tests.builders import LogBuilder
from tests.simulation.memory_topic import Loss, MemoryMetadataTopic
from tests.support.deployment import GrowingLog
from tests.support.memory_brokers import MemoryBrokers

SETTINGS: dict[str, dict[str, Any]] = {
    "cleaner": {"segment_bytes": 16_384, "min_cleanable_dirty_ratio": 0.1},
    "publish": {"grace_ms": 0},
    "lease": {"ttl_ms": 300},
    "daemon": {"threads": 2},
}
ORDERS, OTHER = TopicPartition("orders", 0), TopicPartition("payments", 0)


class World:
    """Partitions of topics under brokers, and a daemon over them that is driven by hand."""

    def __init__(self, folder: Path) -> None:
        self.brokers = MemoryBrokers(folder / "brokers", SETTINGS)
        self.folder = folder
        self.logs: dict[TopicPartition, GrowingLog] = {}
        self.told: list[str] = []

    def write(self, name: TopicPartition, segments: int = 3) -> None:
        """There is something to clean in all but the newest segment."""
        if name.topic not in self.brokers.cluster.known:
            self.brokers.topic(name.topic)
        made = self.logs.setdefault(name, GrowingLog(*name, self.folder, random.Random(name.partition)))
        self.brokers.tier(name, made.write_part(segments))

    def metadata_partition(self, name: TopicPartition) -> int:
        return metadata_partition(self.brokers.cluster.known[name.topic].topic_id, name.partition, len(self.brokers.log.logs))

    def daemon(self, opened: Tier | None = None) -> Daemon:
        return Daemon(opened or self.brokers.opened(), seed=1, log=self.tell)

    def tell(self, text: str, *, level: int = 0, **fields: str) -> None:
        self.told.append(f"{fields['partition']}: {text}" if "partition" in fields else text)

    def settle(self, daemon: Daemon, *, retired: bool = False) -> None:
        """Scans and works until there is nothing more to do."""
        until = time.monotonic() + 60
        while True:
            daemon.scan()
            daemon.start_due_jobs()
            status = daemon.status()
            waiting = retired and any(schedule.due and schedule.due.retire_at_ms < NEVER_MS for schedule in status.schedules)
            if not status.running_jobs and not waiting:
                return
            daemon.process_ended_jobs(0.2)
            assert time.monotonic() < until, status

    def assert_clean(self, *names: TopicPartition) -> None:
        opened = self.brokers.opened()
        for name in names or self.logs:
            state = opened.open_partition_log(name).refresh()
            assert state.first_dirty_offset == state.live[-1].start_offset, name
            out = self.folder / f"out-{random.randrange(1 << 40)}"
            export_partition(opened, name, out)
            assert self.logs[name].wrong_in(out, clean=False) == []


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def jobs(daemon: Daemon) -> dict[tuple[str, str], int]:
    return dict(daemon.status().totals.jobs)


def hint_of_orders(hearing: BrokerChangeFeed, opened: Tier) -> int:
    heard = hearing.poll_changes(opened)
    assert heard is not None
    return heard.hints[ORDERS]


def failing_after(world: World, appends: int) -> tuple[Daemon, list[int]]:
    """A daemon whose first round fails, as no broker takes more records than ``appends``; and how many more are taken."""
    left = [appends]

    def fate() -> Loss:
        left[0] -= 1
        return Loss(before=left[0] < 0)

    daemon = world.daemon(world.brokers.opened(appending=MemoryMetadataTopic(world.brokers.log, fate=fate)))
    world.settle(daemon)
    assert jobs(daemon) == {("round", "failed"): 1}
    return daemon, left


def schedule(daemon: Daemon, name: TopicPartition) -> PartitionSchedule:
    return next(one for one in daemon.status().schedules if one.partition == name)


def test_all_partitions_are_compacted_over_one_consumer_and_what_comes_is_seen_at_the_next_scan(world: World) -> None:
    for partition in range(3):
        world.write(TopicPartition("orders", partition))
    world.write(OTHER)
    daemon = world.daemon()
    world.settle(daemon)
    assert jobs(daemon)["round", "cleaned"] == 4
    assert len(world.brokers.readers) == 1
    world.assert_clean()
    world.write(TopicPartition("orders", 1))
    world.write(TopicPartition("late", 0))
    world.settle(daemon, retired=True)
    assert jobs(daemon)["round", "cleaned"] == 6
    world.assert_clean()
    assert {status for _, status in jobs(daemon)} == {"cleaned", "retired"}
    assert [one.blocked_reason for one in daemon.status().schedules] == [""] * 5
    opened = world.brokers.opened()
    live = {segment.id for name in world.logs for segment in opened.open_partition_log(name).refresh().live}
    assert {path.name[21:43] for path in (world.brokers.folder / "objects").rglob("*.log")} == live
    again = world.daemon()
    world.settle(again)
    assert jobs(again) == {}


def test_brokers_that_go_away_in_mid_protocol_are_waited_for_and_the_round_is_finished(world: World) -> None:
    world.write(ORDERS)
    daemon, left = failing_after(world, 2)
    assert "no broker answers" in schedule(daemon, ORDERS).blocked_reason
    assert any(line.startswith("orders-0: round failed") and "no broker answers" in line for line in world.told)
    left[0] = 1000
    world.settle(daemon)
    assert jobs(daemon) == {("round", "failed"): 1}  # not before its time
    world.brokers.hurried_ms += RETRY_MS
    world.settle(daemon)
    assert jobs(daemon)["round", "resumed"] == 1
    assert schedule(daemon, ORDERS).blocked_reason == ""
    world.assert_clean()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_another_daemon_left_is_finished_by_the_next_one(world: World, after: int) -> None:
    world.write(ORDERS)
    failing_after(world, after)
    daemon = world.daemon()
    world.settle(daemon)
    assert jobs(daemon)["round", "resumed"] == 1
    world.assert_clean()


def test_a_metadata_consumer_that_falls_behind_switches_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "READ_BACK_TIMEOUT_S", 0.01)
    world.write(ORDERS)
    lag = [0]
    daemon = world.daemon(world.brokers.opened(lag=lambda _: lag[0]))
    daemon.scan()
    lag[0] = 1
    daemon.start_due_jobs()
    while daemon.status().running_jobs:
        daemon.process_ended_jobs(1)
    assert jobs(daemon) == {("round", "failed"): 1}
    assert "was appended and is not read" in schedule(daemon, ORDERS).blocked_reason
    lag[0] = 0
    world.brokers.hurried_ms += RETRY_MS
    world.settle(daemon)
    assert schedule(daemon, ORDERS).blocked_reason == ""
    world.assert_clean()


@pytest.mark.parametrize("wrong", [{"retention.ms": "604800000"}, {"cleanup.policy": "compact"}])
def test_a_topic_that_must_not_be_compacted_is_suspended_until_it_may_be_and_the_others_go_on(world: World, wrong: dict[str, str]) -> None:
    for name in (ORDERS, OTHER):
        world.write(name)
    world.brokers.topic("orders", wrong)
    [(setting, value)] = wrong.items()
    said = f"{setting} of orders is {value}, it must be"
    daemon = world.daemon()
    world.settle(daemon)
    assert jobs(daemon) == {("round", "cleaned"): 1}
    world.assert_clean(OTHER)
    assert said in schedule(daemon, ORDERS).blocked_reason
    assert schedule(daemon, OTHER).blocked_reason == ""
    assert [line for line in world.told if said in line] == [line for line in world.told if line.startswith("no round begins for topic")]
    assert daemon.status().ready
    world.brokers.topic("orders")
    world.settle(daemon)
    assert "topic orders is compacted again" in world.told
    world.assert_clean()


def test_a_wrong_metadata_topic_suspends_all_topics_in_one_line_until_it_is_right(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "TOPICS_MAX_AGE_S", 0.0)
    for name in (ORDERS, OTHER):
        world.write(name)
    said = "retention.ms of __remote_log_metadata is 604800000, it must be -1"
    world.brokers.cluster.problem = ClusterProblem("metadata-topic", said, "")
    daemon = world.daemon()
    world.settle(daemon)
    assert jobs(daemon) == {}
    assert [schedule(daemon, name).blocked_reason for name in (ORDERS, OTHER)] == [said, said]
    assert [line for line in world.told if said in line] == [f"no round begins for 2 topics (orders among them): {said}"]
    assert daemon.status().ready
    world.brokers.cluster.problem = None
    world.settle(daemon)
    assert "2 topics (orders among them) are compacted again" in world.told
    for name in (ORDERS, OTHER):
        world.assert_clean(name)


def test_a_round_whose_topic_changes_in_between_is_left_and_finished_later(world: World) -> None:
    world.write(ORDERS)
    count = [0]

    def fate() -> Loss:
        count[0] += 1
        if count[0] == 1:
            world.brokers.topic("orders", {"retention.bytes": "1"})
        return Loss()

    daemon = world.daemon(world.brokers.opened(appending=MemoryMetadataTopic(world.brokers.log, fate=fate)))
    world.settle(daemon)
    assert jobs(daemon) == {("round", "failed"): 1}
    assert "retention.bytes of orders is 1" in schedule(daemon, ORDERS).blocked_reason
    world.brokers.topic("orders")
    world.settle(daemon)  # no waiting for the next try: what was wrong is right again
    assert jobs(daemon)["round", "resumed"] == 1
    world.assert_clean()


def test_a_topics_own_settings_are_obeyed_as_they_change(world: World) -> None:
    world.brokers.topic("orders", {"min.cleanable.dirty.ratio": "1.0"})
    world.write(ORDERS)
    daemon = world.daemon()
    world.settle(daemon)
    assert jobs(daemon) == {}
    world.brokers.topic("orders", {"min.cleanable.dirty.ratio": "1.0", "max.compaction.lag.ms": "1000"})
    world.settle(daemon)
    assert jobs(daemon) == {("round", "cleaned"): 1}
    world.assert_clean()


def test_a_metadata_partition_without_a_leader_holds_up_what_it_tells_of_only(world: World, caplog: pytest.LogCaptureFixture) -> None:
    daemon = world.daemon()
    for name in (ORDERS, OTHER):
        world.write(name)
    of = {name: world.metadata_partition(name) for name in (ORDERS, OTHER)}
    assert of[ORDERS] != of[OTHER]
    world.brokers.log.leaderless = {of[OTHER]}
    world.settle(daemon)
    assert jobs(daemon)["round", "cleaned"] == 1
    world.assert_clean(ORDERS)
    world.brokers.log.leaderless = set()
    world.brokers.hurried_ms += RETRY_MS
    world.settle(daemon)
    assert jobs(daemon)["round", "cleaned"] == 2
    world.brokers.log.leaderless = {of[OTHER]}
    for name in (ORDERS, OTHER):
        world.write(name)
    world.settle(daemon)
    assert jobs(daemon)["round", "cleaned"] == 3
    assert "has no leader" in caplog.text
    world.brokers.log.leaderless = set()
    world.brokers.hurried_ms += RETRY_MS
    world.settle(daemon)
    assert jobs(daemon)["round", "cleaned"] == 4
    world.assert_clean()


def test_no_later_hint_is_the_one_of_an_earlier_process_with_another_policy(world: World) -> None:
    world.write(ORDERS)
    opened = world.brokers.opened()
    hearing = BrokerChangeFeed(opened.broker_metadata)
    assert hint_of_orders(hearing, opened) == opened.broker_metadata.partition_metadata_versions()[ORDERS].applied
    world.brokers.topic("orders", {"segment.bytes": "20000"})
    kept = hint_of_orders(hearing, opened)
    again = world.brokers.opened()
    later = BrokerChangeFeed(again.broker_metadata)
    here = opened.broker_metadata.partition_metadata_from_records(ORDERS).cache
    first = next(iter(here.segments.values()))
    world.brokers.write(RemoteLogSegmentMetadataUpdateRecord(here.partition, first.segment_id, 1, 5, SegmentState.COPY_SEGMENT_FINISHED))
    assert hint_of_orders(later, again) not in (kept, here.applied)


def test_a_topic_that_is_made_anew_is_another_one_and_one_that_is_deleted_is_gone(world: World) -> None:
    for name in (ORDERS, OTHER):
        world.write(name)
    daemon = world.daemon()
    world.settle(daemon)
    del world.logs[ORDERS]
    del world.brokers.cluster.known["payments"]
    world.brokers.topic("orders", number=1)
    world.brokers.restart(ORDERS)
    world.write(ORDERS)
    del world.logs[OTHER]
    world.settle(daemon)
    assert [one.partition for one in daemon.status().schedules] == [ORDERS]
    assert jobs(daemon)["round", "cleaned"] == 3
    world.assert_clean()


def test_rounds_wait_for_the_budget_of_metadata_records_and_a_restart_does_not_reset_it(world: World) -> None:
    names = [TopicPartition("orders", number) for number in range(3)]
    for name in names:
        world.write(name)
    opened = world.brokers.opened(publish={"metadata_records_per_hour": 13})
    daemon = world.daemon(opened)
    world.settle(daemon)  # each round says six records, and for two of them there is room
    assert jobs(daemon)["round", "cleaned"] == 2
    [late] = [one for one in daemon.status().schedules if one.waiting_reason]
    assert "metadata_records_per_hour is 13: a round of about 6 records has to wait" in late.waiting_reason
    assert late.blocked_reason == ""
    before = jobs(daemon)["round", "waiting"]
    world.settle(daemon)
    assert jobs(daemon)["round", "waiting"] == before  # it is not asked again before its time
    again = world.daemon(world.brokers.opened(publish={"metadata_records_per_hour": 13}))
    world.settle(again)
    assert jobs(again)["round", "waiting"] == 1
    world.brokers.hurried_ms += 61 * 60_000
    world.settle(again)
    assert jobs(again)["round", "cleaned"] == 1
    world.assert_clean()


def test_a_round_that_is_larger_than_the_budget_has_its_turn_though_smaller_ones_come(world: World) -> None:
    daemon = world.daemon(world.brokers.opened(publish={"metadata_records_per_hour": 6}))
    world.write(OTHER)
    world.settle(daemon)
    world.write(ORDERS, segments=8)
    world.write(TopicPartition("orders", 1))
    world.settle(daemon)
    world.brokers.hurried_ms += ROUND_HOLD_MS
    world.settle(daemon)
    assert jobs(daemon)["round", "cleaned"] == 1
    assert (
        "a round of about 16 records has to wait, for an hour that has none: it is larger than that"
        in schedule(daemon, ORDERS).waiting_reason
    )
    assert all(one.waiting_reason for one in daemon.status().schedules if one.partition != OTHER)
    for cleaned in (2, 3):
        world.brokers.hurried_ms += 61 * 60_000
        world.settle(daemon)
        assert jobs(daemon)["round", "cleaned"] == cleaned
    assert [one.waiting_reason for one in daemon.status().schedules] == [""] * 3
    world.assert_clean()


def test_a_round_says_as_much_as_its_plan_had_reserved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write(ORDERS, segments=5)
    opened = world.brokers.opened(publish={"metadata_records_per_hour": 1_000})
    admit, reserved = opened.ports.publisher.reserve_metadata_records, []

    def noted(name: TopicPartition, records: int, per_hour: int) -> object:
        reserved.append(records)
        return admit(name, records, per_hour)

    monkeypatch.setattr(opened.ports.publisher, "reserve_metadata_records", noted)
    world.settle(world.daemon(opened), retired=True)
    values = [record.value for log in world.brokers.log.logs for record in log if record is not None]
    said = [one for one in map(decode_record, values) if one.broker_id == COMPACTOR_BROKER_ID]
    assert len(said) == reserved[-1]
    assert reserved[0] <= reserved[-1], "what is asked for before the plan is known is the least"


def test_a_round_that_comes_to_nothing_takes_no_budget_from_the_others(world: World) -> None:
    world.write(ORDERS)
    for path in (world.brokers.folder / "objects").rglob("*.log"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    daemon = world.daemon(world.brokers.opened(publish={"metadata_records_per_hour": 6}))
    world.settle(daemon)
    assert schedule(daemon, ORDERS).blocked_reason
    world.write(OTHER)
    world.settle(daemon)
    assert schedule(daemon, OTHER).waiting_reason == ""
    assert jobs(daemon)["round", "cleaned"] == 1
    world.assert_clean(OTHER)


def test_no_segment_without_a_record_is_made_where_a_neighbour_has_one(world: World) -> None:
    """Consumers of librdkafka take a fetch without a record for one that was too small."""
    log = LogBuilder(time=1_700_000_000_000)
    for number in range(8):
        for _ in range(20):
            log.put(f"key={'x' * 100}{number}")
        log.roll()
    log.segments.pop()
    world.brokers.topic("orders")
    world.brokers.tier(ORDERS, log.write(world.folder / "log"))
    daemon = world.daemon(world.brokers.opened(cleaner={"segment_bytes": 4_000}))
    before = world.brokers.opened().open_partition_log(ORDERS).refresh()
    assert all(segment.size_bytes > 2_000 for segment in before.live)
    world.settle(daemon)
    opened = world.brokers.opened()
    state = opened.open_partition_log(ORDERS).refresh()
    assert (len(state.live), state.live[0].records) == (2, 1)
    assert undo_refusal(state, state.published[-1]) == ""
    undo_by_copies(opened, opened.open_partition_log(ORDERS, caller_runs_round=True), state.published[-1])
    assert opened.open_partition_log(ORDERS).refresh().live[0].records == 140


def test_a_topic_that_its_settings_block_is_never_shown_as_well(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "TOPICS_MAX_AGE_S", 0.0)
    for name in (ORDERS, OTHER):
        world.write(name)
    world.brokers.topic("orders", {"retention.ms": "604800000", "retention.bytes": "1"})
    daemon = world.daemon()
    world.settle(daemon)
    world.assert_clean(OTHER)
    blocked = schedule(daemon, ORDERS).verdict
    assert blocked is not None
    assert (blocked.kind, blocked.cause, blocked.since_ms > 0, blocked.waiting_bytes > 0) == (VerdictKind.BLOCKED, "settings", True, True)
    assert "retention.bytes of orders is 1" in blocked.reason
    assert "retention.ms of orders is 604800000" in blocked.reason
    assert blocked.next_step.endswith("--alter --topic orders --add-config retention.bytes=-1,retention.ms=-1")
    assert "--bootstrap-server" in blocked.next_step
    with pytest.raises(Refused, match="retention.bytes of orders is 1"):
        compact(world.brokers.opened(), ORDERS, int(time.time() * 1000), force=True)
    for status in (daemon.status(), read_daemon_status(world.brokers.opened())):
        pages = DaemonPages(lambda: status, lambda name: None)  # noqa: B023, called at once
        document = pages.status_page_document(PartitionListQuery())
        assert (document.verdict.level, document.totals.attention_partitions) == ("attention", 1)
        (told,) = document.needs_attention
        assert (told.partition, told.kind, told.cause, told.next_step) == ("orders-0", "blocked", "settings", blocked.next_step)
        assert document.totals.blocked_bytes == told.waiting_bytes == blocked.waiting_bytes
        figures = {family.name: family for family in daemon_metrics(status)}
        assert figures["uncleanable_partitions_count"].samples[0].value == 1
        assert figures["uncleanable_bytes"].samples[0].value == blocked.waiting_bytes
        causes = {one.labels["cause"]: one.value for one in figures["tiered_compactor_blocked_partitions"].samples}
        assert {cause for cause, count in causes.items() if count} == {"settings"}
    world.brokers.topic("orders")
    world.settle(daemon)
    world.assert_clean(ORDERS)
    assert read_daemon_status(world.brokers.opened()).schedules_with_blocked_rounds == ()
