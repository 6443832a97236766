"""What `doctor` says of a partition and of the cluster, from the facts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from compactor.access.metadata import BrokerManagedTierMetadataSource
from compactor.access.tier import Tier
from compactor.adapters.brokers.admin import (
    BrokerDescription,
    ClusterDescription,
    KafkaSetting,
    PartitionLeaderAndOffsets,
    TopicDescription,
)
from compactor.adapters.brokers.cluster import KAFKA_METADATA_MANAGER, ClusterConfirmations
from compactor.adapters.brokers.codec import TOPIC
from compactor.config.settings import Settings, TierSettings
from compactor.constants import LeaderEpoch
from compactor.control.logs import open_catalog
from compactor.errors import Refused
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord
from compactor.model.segment import SegmentState
from compactor.storage.wrappers import RequestCounters
from compactor.upkeep.broker_doctor import (
    MANY_METADATA_RECORDS,
    SLACK_MS,
    FirstUntieredRecord,
    PartitionHealthFacts,
    check_known_problems,
    check_topics,
    find_health_problems,
    known_problem_findings,
    metadata_growth_findings,
    partition_health_findings,
)
from compactor.views.forecast import NO_PRICES, PriceTable
from tests.metadata_events import segment, update
from tests.support.broker_metadata import brokers_of
from tests.support.memory_store import Clock, MemoryStore, ports_on

DAY_MS = 86_400_000
NOW = 1_800_000_000_000
NAME = TopicPartition("orders", 7)
SETTINGS = {"remote.storage.enable": "true", "retention.ms": "-1", "retention.bytes": "-1", "segment.ms": str(DAY_MS)}
FIXED = BrokerDescription(1, "a:9092", "4.4")
S = SegmentState


def at(state: SegmentState, number: int, start: int, end: int, *, begun_ms: int = NOW, broker: int = 1) -> RemoteLogSegmentMetadataRecord:
    return segment(number, start, end, max_ms=begun_ms)._replace(state=state, event_timestamp_ms=begun_ms, broker_id=broker)


def kinds(facts: PartitionHealthFacts) -> list[tuple[str, str]]:
    return [(found.severity, found.kind) for found in partition_health_findings(facts, NOW, NO_PRICES)]


def facts(*segments: RemoteLogSegmentMetadataRecord, settings: Mapping[str, str] | None = None) -> PartitionHealthFacts:
    return PartitionHealthFacts(NAME, segments, SETTINGS | dict(settings or {}))


LONG_AGO = NOW - SLACK_MS - 1
FIRST = at(S.COPY_SEGMENT_FINISHED, 1, 0, 9)


def test_a_sound_partition_has_no_findings() -> None:
    young = at(S.COPY_SEGMENT_STARTED, 2, 10, 19, begun_ms=NOW - SLACK_MS)
    assert kinds(facts(FIRST, young)) == []


def test_a_copy_that_never_ends_is_an_error_only_while_nothing_after_it_is_tiered() -> None:
    hangs = at(S.COPY_SEGMENT_STARTED, 2, 10, 19, begun_ms=LONG_AGO)
    assert kinds(facts(FIRST, hangs)) == [("error", "copy-hangs")]
    assert kinds(facts(FIRST, hangs, at(S.COPY_SEGMENT_FINISHED, 3, 10, 29))) == [("warning", "copy-abandoned")]


def test_copies_and_deletions_of_a_compactor_are_not_the_brokers_fault() -> None:
    own = {"begun_ms": LONG_AGO, "broker": COMPACTOR_BROKER_ID}
    assert kinds(facts(FIRST, at(S.COPY_SEGMENT_STARTED, 2, 0, 9, **own), at(S.DELETE_SEGMENT_STARTED, 3, 0, 4, **own))) == []


def test_a_deletion_that_never_ends_is_a_warning_with_its_price() -> None:
    hangs = at(S.DELETE_SEGMENT_STARTED, 2, 0, 9, begun_ms=LONG_AGO)._replace(size_bytes=2**40)
    [found] = partition_health_findings(facts(FIRST, hangs), NOW, replace(NO_PRICES, stored_gib_month_usd=0.02))
    assert (found.severity, found.kind, found.bytes, found.usd_month) == ("warning", "delete-hangs", 2**40, 20.48)


@pytest.mark.parametrize(
    ("closed_ms", "settings", "expected"),
    [
        (NOW - SLACK_MS, {}, []),
        (LONG_AGO, {}, [("error", "not-tiered")]),
        (None, {}, []),  # an idle log's last segment stays open, however old it is
        (LONG_AGO, {"remote.copy.lag.ms": "1000"}, []),
        (LONG_AGO - 1000, {"remote.copy.lag.ms": "1000"}, [("error", "not-tiered")]),
        (NOW - 9 * DAY_MS, {"remote.copy.lag.ms": "-1", "local.retention.ms": "-2"}, []),
        (NOW - 9 * DAY_MS, {"remote.copy.lag.ms": "-1", "local.retention.ms": str(DAY_MS)}, [("error", "not-tiered")]),
        (LONG_AGO, {"remote.copy.lag.ms": "9999999999", "remote.copy.lag.bytes": "0"}, [("error", "not-tiered")]),  # 0 of either: at once
        (NOW - 9 * DAY_MS, {"remote.log.copy.disable": "true"}, [("note", "copy-disabled")]),
    ],
)
def test_a_closed_segment_that_is_not_tiered_in_time_is_an_error(
    closed_ms: int | None, settings: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    assert kinds(replace(facts(FIRST, settings=settings), pending=FirstUntieredRecord(10, NOW - 10 * DAY_MS, closed_ms))) == expected


def test_segments_that_retention_should_have_removed_are_told_up_to_the_first_that_stays() -> None:
    limit = {"retention.ms": str(DAY_MS)}
    old, young = NOW - DAY_MS - SLACK_MS - 1, NOW - DAY_MS
    log = [at(S.COPY_SEGMENT_FINISHED, number, number, number, begun_ms=ms) for number, ms in enumerate([old, old, young, old])]
    [found] = partition_health_findings(facts(*log, settings=limit), NOW, NO_PRICES)
    assert (found.kind, found.bytes) == ("delete-overdue", 200)
    assert kinds(facts(*log[2:], settings=limit)) == []


def test_lost_and_leaked_objects_are_counted() -> None:
    harmed = replace(facts(FIRST), missing=["a.log"], gaps=[(3, 4)], orphans=2, orphan_bytes=10)
    assert kinds(harmed) == [("error", "deleted-too-early"), ("error", "gap"), ("warning", "leaked")]


def test_a_hole_at_the_end_of_the_newest_segment_comes_with_its_offsets_and_the_way_out() -> None:
    lag = {"remote.copy.lag.ms": "7200000"}
    [found] = partition_health_findings(replace(facts(FIRST, settings=SETTINGS | lag), end_hole=(7, 9)), NOW, NO_PRICES)
    assert (found.severity, found.kind) == ("warning", "end-hole")
    assert "7 to 9 were compacted away" in found.detail
    assert "remote.copy.lag.ms is 7200000" in found.means
    assert "remote.copy.lag.ms=0" in found.hint
    assert "seek to offset 10" in found.hint


def topic(name: str = "orders", **settings: str) -> TopicDescription:
    chosen = SETTINGS | {each.replace("_", "."): value for each, value in settings.items()}
    return TopicDescription(
        name,
        bytes(16),
        {0: PartitionLeaderAndOffsets(1, LeaderEpoch(3), 0, 10, 10)},
        {each: KafkaSetting(value, "topic") for each, value in chosen.items()},
    )


@pytest.mark.parametrize(
    ("version", "limit", "told"),
    [("3.9", "1000", 1), ("4", "1000", 1), ("4.3", "1000", 1), ("", "1000", 1), ("4.4", "1000", 0), ("3.9", "-1", 0)],
)
def test_size_retention_is_dangerous_under_brokers_without_its_fix(version: str, limit: str, told: int) -> None:
    found = known_problem_findings([BrokerDescription(1, "a:9092", version), FIXED], {"orders": topic(retention_bytes=limit)})
    assert [(one.severity, one.kind, one.where.topic) for one in found] == [("warning", "size-retention", "orders")] * told


def test_replicas_from_the_newest_tiered_segment_are_a_warning_if_brokers_differ() -> None:
    both = [replace(FIXED, takes_last_tiered=True), replace(FIXED, id=2, takes_last_tiered=True)]
    assert [one.severity for one in known_problem_findings(both, {})] == ["note"]
    assert [one.severity for one in known_problem_findings([both[0], replace(FIXED, id=2)], {})] == ["warning"]


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ({}, ""),
        ({"ms": "0", "bytes": "-1"}, ""),
        ({"ms": "0", "bytes": "1000"}, ""),
        ({"ms": "3600000", "bytes": "0"}, ""),
        ({"ms": "3600000", "bytes": "-1"}, "note"),
        ({"ms": "-1", "bytes": "1000"}, "note"),
        ({"ms": "-1", "bytes": "-1"}, "warning"),
        ({"ms": "-1", "bytes": "-1", "local_retention_ms": "60000"}, "note"),
        ({"ms": "-1", "bytes": "-1", "local_retention_bytes": "60000"}, "note"),
        ({"ms": "-1", "bytes": "-1", "local_retention_ms": "-2", "retention_ms": "60000"}, "note"),
        ({"ms": "-1", "bytes": "-1", "local_retention_ms": "-1", "retention_ms": "60000"}, "warning"),
        ({"ms": "-1", "bytes": "-1", "remote_storage_enable": "false"}, ""),
    ],
)
def test_delayed_uploads_are_noted_and_those_that_never_begin_are_a_warning(settings: dict[str, str], severity: str) -> None:
    late = topic(**{f"remote_copy_lag_{name}" if name in ("ms", "bytes") else name: value for name, value in settings.items()})
    found = known_problem_findings([FIXED], {"orders": late})
    assert [(one.severity, one.kind) for one in found] == ([(severity, "copy-lag")] if severity else [])
    assert all("remote.copy.lag.ms=0" in one.hint for one in found if one.severity == "warning")


def test_a_metadata_topic_that_has_grown_is_told_with_its_largest_partition() -> None:
    def grown(records: int) -> TopicDescription:
        return replace(
            topic(TOPIC),
            partitions={
                0: PartitionLeaderAndOffsets(1, LeaderEpoch(0), 0, 5, 5),
                1: PartitionLeaderAndOffsets(1, LeaderEpoch(0), 0, records, records),
            },
        )

    assert metadata_growth_findings(grown(MANY_METADATA_RECORDS - 1), 3) == []
    [found] = metadata_growth_findings(grown(MANY_METADATA_RECORDS), 3)
    assert "500,005 records for 3 segments" in found.detail
    assert "partition 1 alone" in found.detail


@dataclass
class OneTopic:
    """ClusterDescriptionQueries: one topic."""

    known: TopicDescription

    def describe_cluster(self) -> ClusterDescription:
        return ClusterDescription("cluster", (FIXED,))

    def describe_metadata_topic(self, *, reports_missing_append_permission: bool = False) -> TopicDescription:
        return self.known

    def describe_topics(self, names: Sequence[str]) -> Mapping[str, TopicDescription]:
        return dict.fromkeys(names, self.known)


@pytest.mark.parametrize(
    ("value", "source", "told"),
    [
        ("delete", "topic", []),
        ("delete", "default", []),
        ("", "topic", [("warning", 'cleanup.policy is "", set on the topic')]),
        (
            "compact",
            "cluster",
            [("error", 'cleanup.policy is "compact", set on the brokers (log.cleanup.policy); the topic has')],
        ),
        ("compact,delete", "broker", [("error", 'cleanup.policy is "compact,delete", set on the brokers')]),
    ],
)
def test_policies_that_kafka_lets_pass_are_told_with_their_value(value: str, source: str, told: list[tuple[str, str]]) -> None:
    tiered = topic(remote_storage_enable="true")
    policy = {"cleanup.policy": KafkaSetting(value, source)}
    described = replace(tiered, settings={**tiered.settings, **policy})
    found = known_problem_findings([FIXED], {"orders": described})
    assert [(one.severity, one.kind) for one in found] == [(severity, "cleanup-policy") for severity, _ in told]
    assert all(one.detail.startswith(words) for one, (_, words) in zip(found, told, strict=True))
    plain = replace(tiered, settings={**tiered.settings, **policy, "remote.storage.enable": KafkaSetting("false", "topic")})
    assert known_problem_findings([FIXED], {"orders": plain}) == []
    checked = check_topics(OneTopic(described), ["orders"])
    assert [one.kind for one in checked] == ["topic"] * len(told)
    assert all(one.detail.startswith(words) for one, (_, words) in zip(checked, told, strict=True))


class Cluster:
    """ClusterHealthQueries: one topic, and records that are not tiered as (offset, timestamp); None if looking them up fails.
    tiered_ms: the latest timestamp of tiered records; lookups must ask for later ones."""

    def __init__(self, known: TopicDescription, pending: Sequence[tuple[int, int]] | None, tiered_ms: int = -1) -> None:
        self.known, self.pending, self.tiered_ms = known, pending, tiered_ms
        self.broker = BrokerDescription(1, "a:9092", "3.9", metadata_manager=KAFKA_METADATA_MANAGER)

    def describe_cluster(self) -> ClusterDescription:
        return ClusterDescription("cluster", (self.broker,))

    def describe_metadata_topic(self, *, reports_missing_append_permission: bool = False) -> TopicDescription:
        return replace(self.known, topic=TOPIC, settings={"cleanup.policy": KafkaSetting("compact", "topic")})

    def describe_topics(self, names: Sequence[str]) -> Mapping[str, TopicDescription]:
        return dict.fromkeys(names, self.known)

    def offsets_at_times(self, wanted: Mapping[tuple[str, int], int]) -> Mapping[tuple[str, int], tuple[int, int]]:
        [(partition, at_ms)] = wanted.items()
        if self.pending is None:
            raise Refused("list offsets by time: Unknown broker error")
        assert at_ms > self.tiered_ms
        found = next((one for one in self.pending if one[1] >= at_ms), None)
        return {partition: found} if found else {}


OTHER_SEGMENT = (30, 1003 + DAY_MS)


@pytest.mark.parametrize(
    ("pending", "told"),
    [
        ([(20, 1002), OTHER_SEGMENT], ["not-tiered"]),
        ([(20, 1002), (30, 1002 + DAY_MS)], []),
        ([(19, 1002), OTHER_SEGMENT], []),
        (None, ["time-lookup"]),
    ],
    ids=["after the tier", "in the open segment", "in the tier", "unknown"],
)
def test_doctor_examines_cluster_metadata_and_objects(
    tmp_path: Path, pending: Sequence[tuple[int, int]] | None, told: Sequence[str]
) -> None:
    copies = [segment(number, number * 10, number * 10 + 9, max_ms=1001 - number) for number in range(2)]
    brokers = brokers_of([event for one in copies for event in (one, update(one.segment_id[-1], S.COPY_SEGMENT_FINISHED))], tmp_path)
    ports = ports_on(MemoryStore(Clock(), RequestCounters()), Clock())
    settings = Settings(tier=TierSettings(kind="kafka", layout="kafka-local"))
    opened = Tier(settings, ports, open_catalog(ports), RequestCounters(), metadata=BrokerManagedTierMetadataSource(brokers))
    cluster = Cluster(topic(retention_bytes="1000"), pending, tiered_ms=1001)  # of a segment that is not the newest
    found = find_health_problems(opened, cluster, brokers.list_topic_partitions(), PriceTable("today", "a test", 0.02, 0.0, 0.0))
    expected = ["metadata-topic", "size-retention", *told, "deleted-too-early"]
    assert [one.kind for one in found] == expected
    assert [one.kind for one in check_known_problems(cluster, ["orders"])] == ["size-retention"]

    def told_of(broker: BrokerDescription, **confirmed: Any) -> list[tuple[str, str]]:
        cluster.broker = broker
        prices, names = PriceTable("today", "a test", 0.02, 0.0, 0.0), brokers.list_topic_partitions()
        found = find_health_problems(opened, cluster, names, prices, confirmed=ClusterConfirmations(**confirmed))
        return [(one.severity, one.kind) for one in found if one.kind not in expected]

    other, unknown, newer = (
        replace(cluster.broker, **facts) for facts in ({"metadata_manager": "x.Other"}, {"metadata_manager": ""}, {"metadata_version": 99})
    )
    assert told_of(other) == [("error", "metadata-manager")]
    assert told_of(unknown) == [("warning", "metadata-manager")]
    assert told_of(unknown, metadata_manager="x.Other") == []
    assert told_of(newer) == [("warning", "untested-brokers")]
    assert told_of(newer, untested_brokers=True) == []


@pytest.mark.parametrize(
    ("pending", "told"),
    [([(0, 5), (9, 6 + DAY_MS)], ["not-tiered"]), ([], []), (None, ["time-lookup"])],
    ids=["never tiered", "empty", "forgotten"],
)
def test_doctor_examines_a_topic_that_the_metadata_topic_does_not_name(
    tmp_path: Path, pending: Sequence[tuple[int, int]] | None, told: Sequence[str]
) -> None:
    brokers = brokers_of([], tmp_path)
    ports = ports_on(MemoryStore(Clock(), RequestCounters()), Clock())
    settings = Settings(tier=TierSettings(kind="kafka", layout="kafka-local"))
    opened = Tier(settings, ports, open_catalog(ports), RequestCounters(), metadata=BrokerManagedTierMetadataSource(brokers))
    cluster = Cluster(topic(remote_storage_enable="true"), pending)
    found = find_health_problems(opened, cluster, [], PriceTable("today", "a test", 0.02, 0.0, 0.0), expected_topics=["orders"])
    assert [one.kind for one in found if one.where.topic == "orders"] == told
