"""Leaders change while a topic is tiered: segments overlap, or what was tiered is discarded. Consumers read the same after compaction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import pytest
from kafka import KafkaAdminClient

from compactor.adapters.brokers.admin import KafkaAdmin
from compactor.adapters.brokers.cache import FoldedMetadataStore
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient
from compactor.adapters.kafka_client import KafkaConnection
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord
from compactor.model.segment import SegmentState
from tests.broker.test_compaction import BrokerTierCli, Onlooker, assert_compacted, cli
from tests.support.kafka_admin import METADATA_TOPIC, ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_publishing import KeptNowhere
from tests.support.kafka_story import TopicStory

__all__ = ["cli"]
NOT_YET = {"remote.storage.enable": "false", "local.retention.bytes": "-2", "unclean.leader.election.enable": "true"}
UNCLEAN = 1


def tiers(admin: ClusterAdmin, topic: str) -> None:
    """Until all but the leader's active segment is in the tier; it stays on the brokers, too."""
    wait_until(lambda: admin.offsets(topic).latest_tiered == admin.active_base(topic) - 1, f"{topic} to be copied")


def latest(admin: ClusterAdmin, topic: str) -> int:
    """The log's end. A client that has not heard of each broker yet asks again."""
    found: list[int] = []

    def asked() -> bool:
        found.append(admin.offsets(topic).latest)
        return True

    wait_until(asked, f"the end of {topic}")
    return found[-1]


def leaves(admin: ClusterAdmin, topic: str) -> None:
    """What is in the tier leaves the brokers, so that consumers read it there."""
    admin.set_config(topic, {"local.retention.bytes": "1"})
    admin.wait_tiered(topic)


def segments(cluster: KafkaCluster, topic: str) -> list[tuple[int, int]]:
    """Where readable segments begin and end, as the metadata topic has them."""
    return sorted((one.start_offset, one.end_offset) for one in readable_segments(cluster, topic))


def readable_segments(cluster: KafkaCluster, topic: str) -> list[RemoteLogSegmentMetadataRecord]:
    """Return what the metadata topic says of the readable segments of a topic with one partition."""
    reading = ConfluentKafkaMetadataTopicClient(KafkaConnection(cluster.bootstrap))
    try:
        followed = FoldingMetadataTopicReader(reading, FoldedMetadataStore(KeptNowhere()), clock_ms=lambda: 0)
        assert followed.fold_to_end(60).unread == {}
        [where] = [one.partition for one in followed.tiered_partitions() if one.partition.topic == topic]
        found = followed.partition_metadata_from_records(where.topic_id, where.partition)
    finally:
        reading.close()
    assert found is not None
    return [one for one in found.cache.list_segments() if one.state is SegmentState.COPY_SEGMENT_FINISHED]


def problems(ours: BrokerTierCli) -> set[str]:
    """What verify finds. Replicas write transaction indexes that lack entries (KIP-405 as it is), with nothing compacted as well."""
    found = ours.process("verify", code=None)["problems"]
    return {problem["kind"] for problem in found if problem["severity"] == "error"}


def small(cluster: KafkaCluster, segment_bytes: int) -> dict[str, str]:
    return {("internal.segment.bytes" if cluster.version.startswith("4") else "segment.bytes"): str(segment_bytes)}


@pytest.mark.slow
def test_a_leader_that_rolls_elsewhere_tiers_the_same_offsets_again(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]
) -> None:
    with new_cluster(brokers=2) as cluster, ExitStack() as stack:
        story = TopicStory(cluster, stack.enter_context(ClusterAdmin(cluster)), "moved").create(NOT_YET)
        cluster.nodes[2].stop()
        story.admin = stack.enter_context(ClusterAdmin(cluster))
        story.tell()
        story.admin.set_config("moved", small(cluster, 60_000))
        cluster.start()
        admin = story.admin = stack.enter_context(ClusterAdmin(cluster))
        wait_until(lambda: admin.leadership("moved").in_sync == (1, 2), "broker 2 to have followed")
        admin.set_config("moved", {"remote.storage.enable": "true"})
        tiers(admin, "moved")
        admin.set_config("moved", small(cluster, 16_384))
        admin.move_leader("moved", 0, 2)
        story.tell()
        tiers(admin, "moved")
        leaves(admin, "moved")
        ours = cli(cluster, "moved", cleaner={"segment_bytes": 40_000})
        found = segments(cluster, "moved")
        assert any(two[0] <= one[1] for one, two in pairwise(found)), found
        errors = len(cluster.errors())
        with Onlooker(story):
            [done] = ours.process("run")["partitions"]
            assert done["status"] == "cleaned", done
            assert_compacted(cluster, "moved", story.partitions[0], done["next_dirty_offset"])
            ours.process("retire")
            admin.move_leader("moved", 0, 1)
        assert_compacted(cluster, "moved", story.partitions[0], done["next_dirty_offset"])
        after = segments(cluster, "moved")
        assert all(two[0] == one[1] + 1 for one, two in pairwise(after)), after
        assert problems(ours) <= {"txnindex"}
        assert [line for line in cluster.errors()[errors:] if "RemoteLogMetadata" in line or "ConsumerTask" in line] == []
        assert admin.metadata_events()


@pytest.mark.slow_broker
def test_a_leader_that_tiers_again_what_was_compacted(new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]) -> None:
    """Its segments are larger: the first one that it copies begins in the midst of what was compacted."""
    with new_cluster(brokers=2) as cluster, ExitStack() as stack:
        story = TopicStory(cluster, stack.enter_context(ClusterAdmin(cluster)), "again").create(NOT_YET)
        cluster.nodes[2].stop()
        story.admin = stack.enter_context(ClusterAdmin(cluster))
        story.tell().tell()
        story.admin.set_config("again", small(cluster, 200_000))
        cluster.start()
        admin = story.admin = stack.enter_context(ClusterAdmin(cluster))
        wait_until(lambda: admin.leadership("again").in_sync == (1, 2), "broker 2 to have followed")
        admin.set_config("again", {"remote.storage.enable": "true"})
        tiers(admin, "again")
        ours = cli(cluster, "again", cleaner={"segment_bytes": 40_000})
        [before] = ours.process("run")["partitions"]
        assert before["status"] == "cleaned", before
        ours.process("retire")
        compacted = segments(cluster, "again")
        admin.set_config("again", small(cluster, 16_384))
        admin.move_leader("again", 0, 2)
        story.tell()
        tiers(admin, "again")
        after = segments(cluster, "again")
        late = [one for one in after if one not in compacted and one[0] < before["next_dirty_offset"]]
        assert late, (compacted, after)
        leaves(admin, "again")
        with Onlooker(story):
            [done] = ours.process("run")["partitions"]
            assert done["status"] == "cleaned", done
            assert done["first_dirty_offset"] == late[0][0]
            assert_compacted(cluster, "again", story.partitions[0], done["next_dirty_offset"])
            ours.process("retire")
        assert_compacted(cluster, "again", story.partitions[0], done["next_dirty_offset"])
        assert problems(ours) <= {"txnindex"}


@pytest.mark.slow_broker
def test_while_brokers_are_killed_one_after_the_other_whoever_lives_is_asked_and_the_tier_is_compacted(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]
) -> None:
    """A client goes on asking whom it has asked before: controller and leaders of its last look at the cluster, who may be dead."""
    with new_cluster(brokers=2) as cluster, ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, "rolled").create(NOT_YET | {"remote.storage.enable": "true"}).tell()
        tiers(admin, "rolled")
        ours = cli(cluster, "rolled", cleaner={"segment_bytes": 40_000})
        connection = KafkaConnection(cluster.bootstrap)
        topic, facts = ConfluentKafkaMetadataTopicClient(connection), KafkaAdmin(connection)
        before = (topic.identity(), facts.describe_cluster().cluster_id)
        numbers = set(range(before[0].partitions))
        for node in cluster.node_ids:
            whole = {number: bounds.end for number, bounds in topic.bounds().items()}
            wait_until(lambda: set(admin.leadership(METADATA_TOPIC).in_sync) == {1, 2}, "both to be in sync")
            cluster.nodes[node].kill()
            for _ in range(6):  # as long as the dead one is still said to be alive, who is asked for the controller is a matter of chance
                assert (topic.identity(), facts.describe_cluster().cluster_id) == before
                assert all(bounds.start >= 0 and bounds.end >= whole[number] for number, bounds in topic.bounds().items())
            wait_until(lambda: topic.bounds().keys() == numbers, "all partitions to be led by the one that lives")
            assert facts.describe_metadata_topic(reports_missing_append_permission=True).partitions.keys() == numbers
            assert ours.process("run")["partitions"][0]["status"] in ("cleaned", "nothing_to_do")
            cluster.start()
        topic.close()
        leaves(admin, "rolled")
        [done] = ours.process("run", "--force")["partitions"]
        assert_compacted(cluster, "rolled", story.partitions[0], done["next_dirty_offset"])


@pytest.mark.slow_broker
def test_what_an_unclean_election_discards_is_not_read_and_not_compacted(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]
) -> None:
    with new_cluster(brokers=2) as cluster, ExitStack() as stack:
        admin = stack.enter_context(ClusterAdmin(cluster))
        story = TopicStory(cluster, admin, "lost").create({**NOT_YET, "remote.storage.enable": "true"})
        story.tell()
        wait_until(lambda: admin.leadership("lost").in_sync == (1, 2), "both to be in sync")
        cluster.nodes[2].stop()
        admin = story.admin = stack.enter_context(ClusterAdmin(cluster))
        story.plain()
        tiers(admin, "lost")
        tiered = admin.offsets("lost").latest_tiered
        cluster.nodes[1].stop()
        cluster.nodes[2].launch()
        cluster.nodes[2].wait_started()
        elect_uncleanly(cluster, "lost")
        with ClusterAdmin(cluster) as there:
            story.admin = there
            end = latest(there, "lost")
            assert end <= tiered
            story.partitions[0].forget_from(end)
            story.forget_writers()
            story.plain()
            story.plain()
            cluster.start()  # with it comes the metadata topic, which nobody elects uncleanly
            wait_until(lambda: set(there.leadership("lost").in_sync) == {1, 2}, "broker 1 to be in sync again")
            tiers(there, "lost")
            leaves(there, "lost")
            ours = cli(cluster, "lost", cleaner={"segment_bytes": 40_000})
            with Onlooker(story):
                [done] = ours.process("run")["partitions"]
                assert done["status"] == "cleaned", done
                assert done["next_dirty_offset"] > end
                assert_compacted(cluster, "lost", story.partitions[0], done["next_dirty_offset"])
                ours.process("retire")
            assert_compacted(cluster, "lost", story.partitions[0], done["next_dirty_offset"])
            assert problems(ours) <= {"unread", "txnindex"}


def elect_uncleanly(cluster: KafkaCluster, topic: str) -> None:
    client = KafkaAdminClient(bootstrap_servers=cluster.client_settings()["bootstrap.servers"].split(","), request_timeout_ms=20_000)

    def led() -> bool:
        client.elect_leaders(UNCLEAN, {topic: [0]}, raise_errors=False)
        [described] = client.describe_topics([topic])
        return int(described["partitions"][0]["leader_id"]) == 2

    try:
        wait_until(led, f"{topic} to be led by what is there")
    finally:
        client.close()


@pytest.mark.slow_broker
def test_an_older_broker_that_tiers_the_same_offsets_again(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]
) -> None:
    test_a_leader_that_rolls_elsewhere_tiers_the_same_offsets_again(lambda **options: new_cluster("3.9.2", **options), cli)
