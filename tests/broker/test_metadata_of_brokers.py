"""The metadata topic of real brokers, read and folded: we say of a tier what its broker says; and what users without rights are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers import chain
from compactor.adapters.brokers.admin import KafkaAdmin, metadata_topic_problem
from compactor.adapters.brokers.cache import FoldedMetadataStore, FoldedPartitionMetadata
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient
from compactor.adapters.kafka_client import KafkaConnection
from compactor.constants import LeaderEpoch, Offset
from compactor.errors import Refused, Unavailable
from compactor.local.cache import RocksDatabase
from tests.support.broker_lookups import latest_tiered, segment_by_timestamp
from tests.support.kafka_admin import METADATA_TOPIC, ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.lookup_holes import lookup_holes

TIMEOUT_S = 60.0
PASSWORD = "reader-secret"
Follower = Callable[[], FoldingMetadataTopicReader]


@pytest.fixture
def follower(broker: KafkaCluster, tmp_path: Path) -> Iterator[Follower]:
    """A new process's view, each time; what the one before it kept lies in the same folder."""
    opened: list[tuple[ConfluentKafkaMetadataTopicClient, RocksDatabase]] = []

    def start() -> FoldingMetadataTopicReader:
        for topic, store in opened:
            topic.close()
            store.close()
        opened.append((ConfluentKafkaMetadataTopicClient(KafkaConnection(broker.bootstrap)), RocksDatabase(tmp_path / "state")))
        return FoldingMetadataTopicReader(opened[-1][0], FoldedMetadataStore(opened[-1][1]), clock_ms=lambda: 0)

    yield start
    for topic, store in opened:
        topic.close()
        store.close()


def folded(followed: FoldingMetadataTopicReader, admin: KafkaAdmin, topic: str, partition: int) -> FoldedPartitionMetadata:
    progress = followed.fold_to_end(TIMEOUT_S)
    assert progress.unread == {}
    found = followed.partition_metadata_from_records(admin.describe_topics([topic])[topic].topic_id, partition)
    assert found is not None
    return found


def lineage_in(tier: list[Path]) -> tuple[EpochEntry, ...]:
    """Of the newest segment: it knows all epochs before it."""
    newest = max((path for path in tier if path.suffix == ".leader_epoch_checkpoint"), key=lambda path: path.name[:20])
    return tuple(
        EpochEntry(LeaderEpoch(int(epoch)), Offset(int(start))) for epoch, start in map(str.split, newest.read_text().splitlines()[2:])
    )


def test_the_broker_and_our_fold_agree(broker: KafkaCluster, broker_admin: ClusterAdmin, told: TopicStory, follower: Follower) -> None:
    admin = KafkaAdmin(KafkaConnection(broker.bootstrap))
    facts = admin.describe_topics([told.topic])[told.topic]
    followed = follower()
    for partition in told.partitions:
        found = folded(followed, admin, told.topic, partition)
        tier = broker_admin.tier_files(told.topic, partition)
        lineage = lineage_in(tier)
        offsets = broker_admin.offsets(told.topic, partition)
        links = chain.segment_read_ranges(found.cache, lineage)
        assert {path.name.split(".")[0] for path in tier} == {f"{one.start_offset:020d}-{one.id}" for one in found.cache.list_segments()}
        assert (links[0].first, links[-1].last, chain.offset_gaps(links)) == (offsets.earliest, offsets.latest_tiered, [])
        assert latest_tiered(found.cache, lineage, offsets.latest)[0] == offsets.latest_tiered
        assert (list(lookup_holes(found.cache)), found.findings) == ([], [])
        for link in links[:: max(1, len(links) // 5)]:
            wanted = link.segment.max_timestamp_ms
            chosen = segment_by_timestamp(found.cache, lineage, offsets.latest, wanted, 0)
            assert chosen is not None
            theirs = broker_admin.offset_by_timestamp(told.topic, partition, wanted)
            assert chosen.start_offset <= theirs.offset <= chosen.end_offset
        leadership = broker_admin.leadership(told.topic, partition)
        mine = facts.partitions[partition]
        assert (mine.leader, mine.leader_epoch) == (leadership.leader, leadership.leader_epoch)
        assert (mine.log_start, mine.log_end, mine.last_stable) == (offsets.earliest, offsets.latest, offsets.latest)
    assert facts.settings["remote.storage.enable"].value == "true"
    assert facts.topic_level_settings()["retention.ms"] == "-1"
    assert "segment.index.bytes" not in facts.topic_level_settings()


def test_a_second_start_reads_on_while_the_broker_goes_on_tiering(
    broker: KafkaCluster, broker_admin: ClusterAdmin, follower: Follower
) -> None:
    admin = KafkaAdmin(KafkaConnection(broker.bootstrap))
    story = TopicStory(broker, broker_admin, "followed").create()
    story.plain(count=300)
    story.tiered()
    before = folded(follower(), admin, story.topic, 0).cache.list_segments()
    story.plain(count=300)
    story.tiered()
    again = follower()
    after = folded(again, admin, story.topic, 0).cache.list_segments()
    assert after[: len(before)] == before
    assert len(after) > len(before) > 1
    assert again.fold_to_end(TIMEOUT_S).refold_reason == ""
    assert story.topic in {one.partition.topic for one in again.tiered_partitions()}


def test_rights(new_cluster: Callable[..., KafkaCluster]) -> None:
    """Read and Describe on the topic are enough to read it; without more, facts are missing and said to be."""
    cluster = new_cluster(users={"reader": PASSWORD})
    settings = cluster.client_settings("reader")
    servers = settings.pop("bootstrap.servers")
    connection = KafkaConnection(servers, settings, timeout_s=10)
    topic, admin = ConfluentKafkaMetadataTopicClient(connection), KafkaAdmin(connection)
    with pytest.raises(Refused, match="not authorized"):
        topic.identity()
    with pytest.raises(Refused, match="not authorized"):
        topic.append(0, b"x")
    with ClusterAdmin(cluster) as rights:
        rights.allow("reader", ("TOPIC", METADATA_TOPIC, "READ"), ("TOPIC", METADATA_TOPIC, "DESCRIBE"))
    wait_allowed(topic)
    bounds = topic.bounds()
    assert set(bounds) == set(range(topic.identity().partitions))
    topic.seek({number: one.start for number, one in bounds.items()})
    for _ in range(5):
        topic.poll(10, 0.5)
    with pytest.raises(Refused, match="not authorized"):
        topic.append(0, b"x")
    assert topic.bounds() == bounds
    facts = admin.describe_metadata_topic(reports_missing_append_permission=True)
    assert {(one.resource, one.operation) for one in facts.missing_rights} == {
        (f"topic {METADATA_TOPIC}", "WRITE"), (f"topic {METADATA_TOPIC}", "DESCRIBE_CONFIGS")
    }  # fmt: skip
    assert "is unknown" in metadata_topic_problem(facts)
    [missing] = admin.describe_cluster().missing_rights
    assert missing.operation == "DESCRIBE_CONFIGS"
    topic.close()

    wrong = KafkaConnection(servers, settings | {"sasl.password": "wrong"}, timeout_s=10)
    with pytest.raises(Refused, match="refuses the login"):
        ConfluentKafkaMetadataTopicClient(wrong).identity()
    with pytest.raises(Refused, match="refuses the login"):
        ConfluentKafkaMetadataTopicClient(wrong).append(0, b"x")
    with pytest.raises(Unavailable, match=r"no broker answers.*SSL"):
        KafkaAdmin(KafkaConnection(cluster.bootstrap, {"security.protocol": "SSL"}, timeout_s=3)).describe_cluster()
    with pytest.raises(Refused, match="does not exist"):
        KafkaAdmin(KafkaConnection(cluster.bootstrap)).describe_topics(["no-such-topic"])


def test_the_cluster_and_its_metadata_topic(broker: KafkaCluster) -> None:
    admin = KafkaAdmin(KafkaConnection(broker.bootstrap))
    facts = admin.describe_cluster()
    assert ([one.id for one in facts.brokers], facts.brokers[0].version, facts.missing_rights) == ([1], "4.4", ())
    assert KafkaAdmin(KafkaConnection(broker.bootstrap)).cluster_id() == facts.cluster_id
    topic = admin.describe_metadata_topic(reports_missing_append_permission=True)
    assert (metadata_topic_problem(topic), topic.missing_rights) == ("", ())
    assert admin.describe_metadata_topic() is not None


def wait_allowed(topic: ConfluentKafkaMetadataTopicClient) -> None:
    """A controller's word takes a moment to reach the broker."""
    for _ in range(50):
        try:
            topic.identity()
        except Refused:
            continue
        return
    topic.identity()


@pytest.mark.slow_broker
def test_an_older_broker(new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    cluster = new_cluster("3.9.2")
    admin = KafkaAdmin(KafkaConnection(cluster.bootstrap))
    assert [one.version for one in admin.describe_cluster().brokers] == ["3.9"]
    assert metadata_topic_problem(admin.describe_metadata_topic(reports_missing_append_permission=True)) == ""
    with ClusterAdmin(cluster) as theirs:
        story = TopicStory(cluster, theirs, "older").create()
        story.plain(count=300)
        offsets = story.tiered()[0]
        topic, store = ConfluentKafkaMetadataTopicClient(KafkaConnection(cluster.bootstrap)), RocksDatabase(tmp_path / "state")
        found = folded(FoldingMetadataTopicReader(topic, FoldedMetadataStore(store), clock_ms=lambda: 0), admin, story.topic, 0)
        links = chain.segment_read_ranges(found.cache, lineage_in(theirs.tier_files(story.topic)))
        assert (links[0].first, links[-1].last, chain.offset_gaps(links)) == (0, offsets.latest_tiered, [])
        topic.close()
        store.close()
