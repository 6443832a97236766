"""A topic with finite retention is compacted while its brokers expire segments: readers miss nothing from the log start on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.broker.test_compaction import BrokerTierCli, latest
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import READ_COMMITTED, READ_UNCOMMITTED, BrokerRecord, TrafficFailed, consume

DAY_MS = 86_400_000
TEN_YEARS_MS = 3650 * DAY_MS
PAUSED_ONCE_BEGUN = """
import pathlib, time
from compactor.adapters.brokers.publisher import MetadataTopicSegmentPublisher
plain = MetadataTopicSegmentPublisher._prepare_range
def stopped(self, name, replacements):
    plain(self, name, replacements)
    pathlib.Path({begun!r}).touch()
    while not pathlib.Path({go_on!r}).exists():
        time.sleep(0.1)
MetadataTopicSegmentPublisher._prepare_range = stopped
"""


class Reader:
    """Consumes the topic from its log start to its end again and again, in both isolation levels."""

    def __init__(self, story: TopicStory, kept_from: int) -> None:
        self.passes = 0
        self._story = story
        self._kept_from = kept_from
        self._over = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(90)
        assert not self._failed, self._failed
        assert self.passes

    def _read(self) -> None:
        try:
            with ClusterAdmin(self._story.cluster) as admin:
                while not self._over.is_set():
                    self._read_once(admin)
        except BaseException as error:  # noqa: BLE001 - told when the block ends
            self._failed.append(error)

    def _read_once(self, admin: ClusterAdmin) -> None:
        start = admin.offsets(self._story.topic).earliest
        try:
            assert_nothing_lost(self._story, start, kept_from=self._kept_from)
        except TrafficFailed:
            if admin.offsets(self._story.topic).earliest == start:
                raise
        self.passes += 1


def assert_nothing_lost(story: TopicStory, start: int, *, kept_from: int | None = None) -> None:
    """What consumers get from the log start on was written, and has the last value of each key that was written from ``kept_from`` on."""
    kept_from = start if kept_from is None else kept_from
    model = story.partitions[0]
    written = {record.offset: record for record in model.uncommitted()}
    newest: dict[bytes, BrokerRecord] = {record.key: record for record in model.committed() if record.key is not None}
    wanted = {key: record for key, record in newest.items() if record.offset >= kept_from and record.value is not None}
    for isolation in (READ_UNCOMMITTED, READ_COMMITTED):
        found = consume(story.cluster, story.topic, isolation=isolation, start=start)
        assert [written.get(record.offset) for record in found] == found
        values = latest(found, model)
        assert {key: record for key, record in values.items() if record.offset >= kept_from} == wanted
        assert all(newest[key] == record for key, record in values.items()), "a deleted or replaced value is read"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", ["4.4.0", pytest.param("3.9.2", marks=pytest.mark.slow_broker)])
def test_segments_that_expire_in_mid_round_hold_up_nothing(version: str, new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    cluster = new_cluster(version)
    with ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, "orders", first_ms=int(time.time() * 1000) - 10 * DAY_MS)
        story.create({"retention.ms": str(TEN_YEARS_MS)})
        story.plain()
        old = story.partitions[0].uncommitted()[-1].offset
        story.later(9 * DAY_MS)
        story.plain()
        story.transactions()
        story.tiered()
        ours = BrokerTierCli(cluster, tmp_path / "compactor", ["orders"], {"cleaner": {"segment_bytes": 40_000}})
        refused = ours.refused("run", code=5)
        assert f"retention.ms of orders is {TEN_YEARS_MS}, it must be -1" in refused
        ours.settings = {"cleaner": {"segment_bytes": 40_000, "cleanup_policy": "compact,delete"}}
        begun, go_on = tmp_path / "begun", tmp_path / "go on"
        answers: list[Any] = []

        def run() -> None:
            before = PAUSED_ONCE_BEGUN.format(begun=str(begun), go_on=str(go_on))
            answers.append(ours.process("run", before=before))

        worker = threading.Thread(target=run, daemon=True)
        with Reader(story, kept_from=old + 1):
            worker.start()
            wait_until(begun.exists, "publication to begin", seconds=120)
            states = {one["state"] for one in ours.process("segments", "list", "orders-0")["segments"]}
            assert "COPY_SEGMENT_STARTED" in states
            admin.set_config("orders", {"retention.ms": str(5 * DAY_MS), "remote.storage.enable": "true"})
            wait_until(lambda: admin.offsets("orders").earliest > 0, "the brokers to expire segments", seconds=90)
            start = admin.offsets("orders").earliest
            wait_until(lambda: first_tiered_offset(ours) >= start, "expired segments to be deleted", seconds=90)
            go_on.touch()
            worker.join(150)
        [done] = answers[0]["partitions"]
        assert (done["status"], done["reason"]) == ("cleaned", "")
        assert done["next_dirty_offset"] > old >= start - 1 > 0
        assert_nothing_lost(story, start)
        ours.process("retire")
        assert_nothing_lost(story, start)
        assert ours.process("verify")["ok"]
        # What was compacted expires like the rest, as far as no record of a broker's clock is in it.
        admin.set_config("orders", {"retention.ms": str(DAY_MS // 2), "remote.storage.enable": "true"})
        wait_until(lambda: admin.offsets("orders").earliest > start, "the brokers to expire what was compacted", seconds=90)
        [again] = ours.process("run")["partitions"]
        assert again["status"] != "quarantined", again
        assert_nothing_lost(story, admin.offsets("orders").earliest)
        assert [line for line in cluster.errors() if "RemoteLogMetadata" in line] == []


def first_tiered_offset(ours: BrokerTierCli) -> int:
    """Start of the first segment that brokers have not begun to delete."""
    segments = ours.process("segments", "list", "orders-0")["segments"]
    return min(int(one["start_offset"]) for one in segments if one["state"] == "COPY_SEGMENT_FINISHED")
