"""Our fold and the brokers agree on every partition of a tier that went through something: what a fetch from an offset finds, what a
timestamp finds, where log and tier begin and end; after moved leaders, copies cut short, deleted records, retention, a deleted topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain as joined
from pathlib import Path

import pytest

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers import chain
from compactor.adapters.brokers.cache import FoldedMetadataStore, RemoteLogMetadataCache
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient
from compactor.adapters.kafka_client import KafkaConnection
from compactor.constants import LeaderEpoch, Offset
from compactor.local.cache import RocksDatabase
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord, uuid_bytes
from compactor.model.segment import SegmentState
from tests.plain_format import Batch, Record, read_batches
from tests.support.broker_lookups import earliest_offset, latest_tiered, segment_by_timestamp, segment_for
from tests.support.kafka_admin import ClusterAdmin, FoundOffset, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import BrokerRecord, WrittenPartition, consume, read_from, reader
from tests.support.lookup_holes import lookup_holes

TIMEOUT_S = 120.0
LOOKS = 40
VERSIONS = ["4.4.0", pytest.param("3.9.2", marks=pytest.mark.slow_broker)]


@contextmanager
def followed(cluster: KafkaCluster, state: Path) -> Iterator[FoldingMetadataTopicReader]:
    topic, store = ConfluentKafkaMetadataTopicClient(KafkaConnection(cluster.bootstrap)), RocksDatabase(state)
    try:
        yield FoldingMetadataTopicReader(topic, FoldedMetadataStore(store), clock_ms=lambda: 0)
    finally:
        topic.close()
        store.close()


class TierView:
    """One partition by our fold and the files of the tier alone."""

    def __init__(self, admin: ClusterAdmin, cache: RemoteLogMetadataCache, topic: str, partition: int) -> None:
        self._files = {path.name: path for path in admin.tier_files(topic, partition)}
        self.cache = cache
        self.finished = [one for one in cache.list_segments() if one.state is SegmentState.COPY_SEGMENT_FINISHED]
        newest = max(self.finished, key=lambda one: one.end_offset)
        lines = self.file(newest, ".leader_epoch_checkpoint").read_text().splitlines()[2:]
        self.lineage = tuple(EpochEntry(LeaderEpoch(int(epoch)), Offset(int(start))) for epoch, start in map(str.split, lines))

    def file(self, segment: RemoteLogSegmentMetadataRecord, suffix: str) -> Path:
        return self._files[f"{segment.start_offset:020}-{segment.id}{suffix}"]

    def batches(self, segment: RemoteLogSegmentMetadataRecord) -> list[Batch]:
        return list(read_batches(self.file(segment, ".log").read_bytes()))

    def fetched(self, offset: int) -> BrokerRecord | None:
        """The first record of a fetch from there; None where the rest of the tier has none."""
        segment = segment_for(self.cache, self.lineage, offset)
        assert segment is not None
        while segment is not None:
            for batch in self.batches(segment):
                found = next((one for one in batch.records if one.offset >= offset and not batch.control), None)
                if found is not None:
                    return told_as(found, batch.leader_epoch)
            segment = segment_for(self.cache, self.lineage, segment.end_offset + 1)
        return None

    def by_timestamp(self, timestamp: int, log_start: int, log_end: int) -> FoundOffset | None:
        """None where the tier has none and the broker goes on in its own log."""
        segment = segment_by_timestamp(self.cache, self.lineage, log_end, timestamp, log_start)
        for batch in self.batches(segment) if segment else ():
            for record in batch.records:
                if record.timestamp >= timestamp and record.offset >= log_start:
                    return FoundOffset(record.offset, record.timestamp, batch.leader_epoch)
        return None


def told_as(record: Record, leader_epoch: int) -> BrokerRecord:
    headers = tuple((name.decode(), value) for name, value in record.headers)
    return BrokerRecord(record.offset, record.timestamp, record.key, record.value, headers, leader_epoch)


def assert_agreed(admin: ClusterAdmin, cache: RemoteLogMetadataCache, topic: str, partition: int, model: WrittenPartition) -> None:
    view = TierView(admin, cache, topic, partition)
    offsets = admin.offsets(topic, partition)
    links = chain.segment_read_ranges(cache, view.lineage)
    assert chain.offset_gaps(links) == []
    assert links[0].first <= offsets.earliest
    assert links[-1].last == offsets.latest_tiered == offsets.earliest_local - 1
    assert latest_tiered(cache, view.lineage, offsets.latest)[0] == offsets.latest_tiered
    assert earliest_offset(cache, view.lineage) == links[0].segment.start_offset

    tiered = [record for record in model.from_offset(offsets.earliest).uncommitted() if record.offset <= offsets.latest_tiered]
    assert len(tiered) > LOOKS
    with reader(admin.cluster) as consumer:
        for offset in {link.first for link in links} | set(range(offsets.earliest, offsets.latest_tiered, max(1, len(tiered) // LOOKS))):
            ours = view.fetched(offset) if offset >= offsets.earliest else None
            if ours is not None:
                [theirs] = read_from(consumer, topic, partition, start=offset, limit=1)
                assert (theirs, theirs.leader_epoch) == (ours, ours.leader_epoch)

    for timestamp in (record.timestamp + extra for record in tiered[:: max(1, len(tiered) // LOOKS)] for extra in (0, 1)):
        found, predicted = (
            admin.offset_by_timestamp(topic, partition, timestamp),
            view.by_timestamp(timestamp, offsets.earliest, offsets.latest),
        )
        if predicted is None:
            assert found.offset == -1 or found.offset > offsets.latest_tiered
        else:
            assert found == predicted


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.timeout(900)
def test_the_fold_and_the_brokers_agree(new_cluster: Callable[..., KafkaCluster], version: str, tmp_path: Path) -> None:
    cluster = new_cluster(version=version, brokers=2)
    with ClusterAdmin(cluster) as admin, followed(cluster, tmp_path / "state") as incremental:
        moved = TopicStory(cluster, admin, "moved", partitions={0: WrittenPartition(), 1: WrittenPartition()}).create()
        cut, short, gone = (TopicStory(cluster, admin, name, seed=at).create() for at, name in enumerate(("cut", "short", "gone"), 2))
        moved.tell(2, calm=False)
        for story in (cut, short, gone):
            story.plain(count=200)
        assert incremental.fold_to_end(TIMEOUT_S).unread == {}

        leader = admin.leadership("moved").leader
        cluster.restart(leader, kill=True)
        wait_until(lambda: all(len(admin.leadership(name).in_sync) == 2 for name in ("moved", "cut", "short", "gone")), "all to be in sync")
        moved.tell()
        cut.tell()
        stories = (moved, cut, short, gone)
        for story in stories:
            story.tiered()
        gone_id = uuid_bytes(admin.topic_id("gone"))
        first, last = admin.offsets("short").earliest, admin.offsets("cut").latest_tiered
        admin.delete_records("cut", 0, last // 3)
        admin.set_config("short", {"retention.bytes": str(3 * short.segment_bytes)})
        admin.delete_topic("gone")
        wait_until(lambda: admin.offsets("short").earliest > first, "retention to bite")
        wait_until(lambda: not admin.tier_files("gone"), "the topic to leave the tier")
        admin.set_config("short", {"retention.bytes": "-1"})
        short.plain(count=100)
        short.tiered()

        with followed(cluster, tmp_path / "another state") as anew:
            for ours in (incremental, anew):
                wait_until(partial(settled, ours, admin, ("moved", "cut", "short"), gone_id), "deletions to be finished")
                for story in (moved, cut, short):
                    for partition, model in story.partitions.items():
                        assert_agreed(admin, folded(ours, admin, story.topic, partition), story.topic, partition, model)
        assert consume(cluster, "moved", 1) == moved.partitions[1].uncommitted()


def folded(ours: FoldingMetadataTopicReader, admin: ClusterAdmin, topic: str, partition: int) -> RemoteLogMetadataCache:
    found = ours.partition_metadata_from_records(uuid_bytes(admin.topic_id(topic)), partition)
    assert found is not None
    assert (found.findings, list(lookup_holes(found.cache))) == ([], [])
    return found.cache


def settled(ours: FoldingMetadataTopicReader, admin: ClusterAdmin, topics: tuple[str, ...], gone_id: bytes) -> bool:
    """Nothing is in mid-deletion. For a deleted topic brokers write a segment's events only, none of the partition."""
    progress = ours.fold_to_end(TIMEOUT_S)
    gone = ours.partition_metadata_from_records(gone_id, 0)
    if progress.unread or gone is None or gone.cache.segments:
        return False
    partitions = [one.partition for one in ours.tiered_partitions() if one.partition.topic in topics]
    states = joined.from_iterable(folded(ours, admin, one.topic, one.partition).list_segments() for one in partitions)
    return SegmentState.DELETE_SEGMENT_STARTED not in {one.state for one in states}
