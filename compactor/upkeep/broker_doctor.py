"""Health of tiered partitions: uploads and deletions that do not end, segments that are never tiered, leaked and lost objects. For every
cluster with KIP-405, compacted or not. Read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np

from compactor.access.tier import Tier
from compactor.adapters.brokers.admin import (
    BrokerDescription,
    ClusterDescription,
    MissingPermission,
    OffsetAndTimestampMs,
    TopicAndNumber,
    TopicDescription,
    kafka_tool_command,
    metadata_topic_problem,
    topic_settings_command,
)
from compactor.adapters.brokers.chain import broker_view, offset_gaps
from compactor.adapters.brokers.cluster import (
    NOTHING_CONFIRMED,
    REQUIRED_TOPIC_SETTINGS,
    ClusterConfirmations,
    ClusterDescriptionQueries,
    broker_problem,
    cluster_settings_acl_command,
    topic_setting_refusal_reason,
    topic_settings_correction,
)
from compactor.config.units import count_noun, format_duration, format_size
from compactor.control.mirror import segment_from_broker_record
from compactor.errors import BadData, CompactorError, NotFound, Refused, StoreError
from compactor.model.finding import Finding
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord
from compactor.model.segment import SegmentState
from compactor.records.batches import parse_batch_headers
from compactor.records.indexes import OFFSET_ENTRY
from compactor.upkeep.broker_verify import end_hole, list_partition_objects
from compactor.views.forecast import PriceTable

# Known harm that Kafka's tiered storage does, by broker version and settings.


LAST_TIERED_SETTING = "follower.fetch.last.tiered.offset.enable"
"""KIP-1023, from version 4.3 on."""
COPY_LAG_SETTINGS = ("remote.copy.lag.ms", "remote.copy.lag.bytes")
"""KIP-1241, from version 4.4 on: 0 and -1 by default."""
FIRST_WITH_SIZE_FIX = (4, 4)
"""First version of which every release has the fix of KAFKA-20732. 4.3.2 has it too, but brokers do not report their patch version."""
MANY_METADATA_RECORDS = 500_000
"""Records of one partition of the metadata topic, from which on a broker's start takes noticeably longer."""


def describe_topics(admin: ClusterDescriptionQueries, topics: Sequence[str]) -> dict[str, TopicDescription]:
    found: dict[str, TopicDescription] = {}
    for name in topics:
        try:
            found |= admin.describe_topics([name])
        except (Refused, NotFound):
            continue  # `config check` reports it
    return found


def known_problem_findings(brokers: Sequence[BrokerDescription], topics: Mapping[str, TopicDescription]) -> list[Finding]:
    return [
        *_size_retention_findings(brokers, topics.values()),
        *_last_tiered_findings(brokers),
        *_delayed_upload_findings(topics.values()),
        *cleanup_policy_findings(topics.values(), brokers[0].address if brokers else ""),
    ]


def unsuitable_broker_findings(brokers: Sequence[BrokerDescription], confirmed: ClusterConfirmations) -> list[Finding]:
    problem = broker_problem(brokers, confirmed)
    if problem is None:
        return []
    is_another_manager = problem.cause == "metadata-manager" and any(one.metadata_manager for one in brokers)
    means = (
        "brokers find their segments by other records: what is compacted here does not reach their readers, and what is deleted here fails"
        if is_another_manager
        else "no round begins and nothing is deleted; readers are not affected"
    )
    severity = "error" if is_another_manager or problem.cause == "metadata-topic" else "warning"
    return [Finding(severity, problem.cause, "brokers", problem.message, problem.hint, means=means)]


def metadata_growth_findings(metadata_topic: TopicDescription, segment_count: int) -> list[Finding]:
    sizes = {number: one.log_end - max(0, one.log_start) for number, one in metadata_topic.partitions.items() if one.log_end >= 0}
    largest = max(sizes, key=lambda number: sizes[number], default=-1)
    if largest < 0 or sizes[largest] < MANY_METADATA_RECORDS:
        return []
    total = sum(sizes.values())
    detail = (
        f"it has {total:,} records for {segment_count:,} segments that still exist; partition {largest} alone has {sizes[largest]:,}. "
        "Nothing ever removes a record"
    )
    means = "a broker that starts reads all of them first; until then consumers' reads from the tier fail and are retried (KAFKA-19599)"
    todo = (
        "Restart brokers one at a time and wait for their metadata; use larger segments; when compacting, limit records with "
        "[publish] metadata_records_per_hour"
    )
    return [Finding("warning", "metadata-growth", metadata_topic.topic, detail, todo, means=means)]


def _size_retention_findings(brokers: Sequence[BrokerDescription], topics: Iterable[TopicDescription]) -> Iterator[Finding]:
    """Kafka deletes too much after an election (KAFKA-20732)."""
    unfixed = sorted({one.version or "unknown" for one in brokers if version_tuple(one.version) < FIRST_WITH_SIZE_FIX})
    for topic in topics if unfixed else ():
        limit = topic.settings.get("retention.bytes")
        if limit is None or limit.value == "-1" or not _has_remote_storage_enabled(topic):
            continue
        detail = f"retention.bytes is {limit.value}, and brokers are of version {', '.join(unfixed)}"
        means = (
            "a new leader may count local segments twice and delete up to half of what should stay, in the tier and on all replicas; "
            "consumers are reset (KAFKA-20732)"
        )
        todo = (
            "Upgrade to 4.3.2, 4.4 or newer (older branches: see their release notes; brokers do not report their patch version), or "
            f"until then: {topic_settings_command(topic.topic, {'retention.bytes': '-1'}, brokers[0].address)}"
        )
        yield Finding("warning", "size-retention", "retention.bytes", detail, todo, where=TopicPartition(topic.topic, -1), means=means)


def _last_tiered_findings(brokers: Sequence[BrokerDescription]) -> Iterator[Finding]:
    """Brokers that build new replicas from the newest tiered segment (KIP-1023)."""
    enabled = [one.id for one in brokers if one.takes_last_tiered]
    if not enabled:
        return
    others = [one.id for one in brokers if not one.takes_last_tiered]
    detail = f"{LAST_TIERED_SETTING} is true on brokers {enabled}" + (f" and not on brokers {others}" if others else "")
    means = (
        "an empty replica is built from the newest tiered segment and has fewer local offsets than its leader"
        " until the leader's local retention passes; compaction never replaces that segment"
    )
    todo = "Set it alike on all brokers" if others else "Nothing; keep local.retention as large as what consumers at the end read"
    yield Finding("warning" if others else "note", "last-tiered", LAST_TIERED_SETTING, detail, todo, means=means)


def _delayed_upload_findings(topics: Iterable[TopicDescription]) -> Iterator[Finding]:
    """Settings that delay or prevent the upload of closed segments (KIP-1241)."""
    for topic in topics:
        settings = {name: setting.value for name, setting in topic.settings.items()}
        lags = copy_lag(settings, "ms"), copy_lag(settings, "bytes")
        if not _has_remote_storage_enabled(topic) or 0 in lags:
            continue
        detail = ", ".join(f"{name} is {settings[name]}" for name in COPY_LAG_SETTINGS if name in settings)
        if lags == (None, None):
            severity, detail = "warning", f"{detail}, and local retention is unlimited"
            means = "no segment is ever tiered: all of it stays on the brokers' disks, which fill, and compaction never sees it"
            todo = topic_settings_command(topic.topic, {"remote.copy.lag.ms": "0"})
        else:
            severity = "note"
            means = "tiered records are older by that time: compaction, exports and readers of the tier alone see them later"
            todo = "Nothing if that is meant; otherwise remove the setting, or count it in when a maximum compaction lag is promised"
        yield Finding(severity, "copy-lag", "remote.copy.lag.ms", detail, todo, where=TopicPartition(topic.topic, -1), means=means)


def copy_lag(settings: Mapping[str, str], unit: str) -> int | None:
    """Age in milliseconds, or number of newer local bytes, from which on brokers upload a closed segment (KIP-1241;
    ``RLMCopyTask.isEligibleForUpload``). Either check suffices, and 0 of either means at once. None: this check never applies.

    :param settings: of the topic. -1 stands for local retention, whose -2 stands for the topic's.
    :param unit: ms or bytes.
    """
    lag = int(settings.get(f"remote.copy.lag.{unit}", "0" if unit == "ms" else "-1"))
    if lag == -1:
        lag = int(settings.get(f"local.retention.{unit}", "-2"))
    if lag == -2:
        lag = int(settings.get(f"retention.{unit}", "-1"))
    return None if lag < 0 else lag


def cleanup_policy_findings(topics: Iterable[TopicDescription], bootstrap_servers: str = "") -> Iterator[Finding]:
    """Tiered topics whose cleanup.policy Kafka accepts although their tiered part suffers from it."""
    for topic in topics:
        policy = topic.settings.get("cleanup.policy")
        if policy is None or not _has_remote_storage_enabled(topic) or policy.value == "delete":
            continue
        place = "the topic" if policy.source == "topic" else "the brokers (log.cleanup.policy); the topic has no policy of its own"
        detail = f'cleanup.policy is "{policy.value}", set on {place}'
        if policy.value:
            means = "brokers compact what they have locally and do not find what is tiered: consumers of the tiered part get errors"
        else:
            means = "brokers expire tiered segments by retention.ms all the same, although Kafka documents that nothing is deleted"
        step = topic_settings_command(topic.topic, {"cleanup.policy": "delete"}, bootstrap_servers)
        todo = f"{step}, with the retention that is meant"
        severity = "error" if policy.value else "warning"
        yield Finding(severity, "cleanup-policy", "cleanup.policy", detail, todo, where=TopicPartition(topic.topic, -1), means=means)


def version_tuple(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _has_remote_storage_enabled(topic: TopicDescription) -> bool:
    setting = topic.settings.get("remote.storage.enable")
    return setting is not None and setting.value == "true"


# Facts from the cluster, the metadata topic and the store.


MAX_END_BYTES = 64 << 20
"""A log whose offset index says so little of its end that more would have to be read is not examined for a hole at its end."""


@dataclass(frozen=True)
class FirstUntieredRecord:
    """First record of a log that is not tiered yet.

    closed_ms: time by which brokers had closed its segment: the timestamp of the first later record that, by segment.ms, belongs to another
        segment. None if there is none: brokers close a segment only when they append.
    """

    offset: int
    timestamp_ms: int
    closed_ms: int | None = None


class ClusterHealthQueries(ClusterDescriptionQueries, Protocol):
    def offsets_at_times(self, timestamps_ms: Mapping[TopicAndNumber, int]) -> Mapping[TopicAndNumber, OffsetAndTimestampMs]:
        """First record at or after each timestamp; -1 and -1 if there is none."""


def find_health_problems(
    tier: Tier,
    admin: ClusterHealthQueries,
    partitions: Sequence[TopicPartition],
    prices: PriceTable,
    on_partition: Callable[[], None] = lambda: None,
    expected_topics: Sequence[str] = (),
    confirmed: ClusterConfirmations = NOTHING_CONFIRMED,
) -> list[Finding]:
    """All findings about these partitions and the cluster.

    :param expected_topics: examined even if the metadata topic names no segment of theirs.
    :raises StoreError: if the store or the brokers do not answer.
    """
    topics = describe_topics(admin, sorted({name.topic for name in partitions} | set(expected_topics)))
    brokers = admin.describe_cluster().brokers
    found = unsuitable_broker_findings(brokers, confirmed)
    metadata_topic = admin.describe_metadata_topic()
    if problem := metadata_topic_problem(metadata_topic, brokers[0].address if brokers else ""):
        means = "brokers forget segments when they start; consumers are reset, and the objects stay for ever"
        todo = "Set it before a broker starts again; `orphans find` lists what is lost already"
        found.append(Finding("error", "metadata-topic", metadata_topic.topic, problem, todo, means=means))
    found += known_problem_findings(brokers, topics)
    segments = 0
    for name in partitions:
        try:
            facts = _gather_facts(tier, admin, name, topics)
            segments += len(facts.segments)
            found += partition_health_findings(facts, tier.ports.clock_ms(), prices)
        except BadData as error:
            means = "brokers stop reading the metadata topic there, too: the partition's tiered part cannot be read"
            todo = "Ask who wrote it; see docs/broker-tiers.md"
            where = f"{error.segment} at offset {error.offset}"
            found.append(Finding("error", "unreadable-metadata", where, error.cause, todo, where=name, means=means))
        on_partition()
    for name in _partitions_without_segments([topics[topic] for topic in expected_topics if topic in topics], partitions):
        examined = PartitionHealthFacts(name, [], _setting_values(topics[name.topic]), *_first_untiered(admin, name, [], topics))
        found += partition_health_findings(examined, tier.ports.clock_ms(), prices)
    return [*found, *metadata_growth_findings(metadata_topic, segments)]


def _gather_facts(
    tier: Tier, admin: ClusterHealthQueries, partition: TopicPartition, topics: Mapping[str, TopicDescription]
) -> PartitionHealthFacts:
    seen = list_partition_objects(tier, partition)
    segments = list(seen.folded.cache.segments.values())
    missing = [
        tier.ports.layout.object_name(partition, segment_from_broker_record(one), part)
        for one in seen.readable
        for part in seen.missing_kinds(one, tier.ports.layout.required_kinds)
    ]
    oldest_ms = tier.ports.clock_ms() - tier.retention.orphan_age_ms
    orphans = [one.listed for one in seen.orphans if one.listed.modified_ms <= oldest_ms]
    return PartitionHealthFacts(
        partition,
        segments,
        _setting_values(topics[partition.topic]) if partition.topic in topics else {},
        *_first_untiered(admin, partition, seen.readable, topics),
        missing,
        offset_gaps(broker_view(seen.folded.cache, partition).links),
        len(orphans),
        sum(one.size for one in orphans),
        None if missing else _newest_end_hole(tier, partition, seen.readable),
    )


def _newest_end_hole(tier: Tier, partition: TopicPartition, readable: Sequence[RemoteLogSegmentMetadataRecord]) -> tuple[int, int] | None:
    """Reads the offset index, and the log from the last indexed batch on."""
    newest = max(readable, key=lambda one: one.end_offset, default=None)
    if newest is None:
        return None
    layout, segment = tier.ports.layout, segment_from_broker_record(newest)
    try:
        segment = segment.model_copy(update={"files": dict(layout.segment_files(partition, segment))})
        entries = np.frombuffer(layout.read_file(partition, segment, "index"), OFFSET_ENTRY)
        position = int(entries["position"][-1]) if len(entries) else 0
        if newest.size_bytes - position > MAX_END_BYTES:
            return None
        end = np.frombuffer(layout.read_file(partition, segment, "log", position), np.uint8)
        return end_hole(newest, parse_batch_headers(end, newest.id))
    except (BadData, NotFound, ValueError):
        return None


def _partitions_without_segments(topics: Iterable[TopicDescription], partitions: Sequence[TopicPartition]) -> Iterator[TopicPartition]:
    named = {(name.topic, name.partition) for name in partitions}
    for topic in topics:
        if _setting_values(topic).get("remote.storage.enable") == "true":
            yield from (TopicPartition(topic.topic, number) for number in sorted(topic.partitions) if (topic.topic, number) not in named)


def _setting_values(topic: TopicDescription) -> dict[str, str]:
    return {setting: found.value for setting, found in topic.settings.items()}


def _first_untiered(
    admin: ClusterHealthQueries,
    partition: TopicPartition,
    tiered: Sequence[RemoteLogSegmentMetadataRecord],
    topics: Mapping[str, TopicDescription],
) -> tuple[FirstUntieredRecord | None, str]:
    try:
        return _find_untiered_by_time(admin, partition, tiered, topics), ""
    except Refused as error:
        return None, error.message


def _find_untiered_by_time(
    admin: ClusterHealthQueries,
    partition: TopicPartition,
    tiered: Sequence[RemoteLogSegmentMetadataRecord],
    topics: Mapping[str, TopicDescription],
) -> FirstUntieredRecord | None:
    """Earliest record after all ``tiered`` segments. Raises Refused if the leader cannot look up timestamps.

    Timestamps need not ascend from segment to segment: control records have the broker's time and other records the producer's.
    """
    if partition.topic not in topics:
        return None
    after_ms = max((one.max_timestamp_ms + 1 for one in tiered), default=0)
    after = max((one.end_offset for one in tiered), default=-1)
    offset, timestamp_ms = _first_record_at(admin, partition, after_ms)
    if offset <= after or timestamp_ms < 0:
        return None
    limit = topics[partition.topic].settings.get("segment.ms")
    later, closed_ms = _first_record_at(admin, partition, timestamp_ms + int(limit.value) + 1) if limit is not None else (-1, -1)
    return FirstUntieredRecord(offset, timestamp_ms, closed_ms if later > offset else None)


def _first_record_at(admin: ClusterHealthQueries, partition: TopicPartition, at_ms: int) -> OffsetAndTimestampMs:
    where = (partition.topic, partition.partition)
    return admin.offsets_at_times({where: at_ms}).get(where, (-1, -1))


# Checks for ``config check``. Nothing is written as a test; each unsafe setting is reported with the command that corrects it.


def check_cluster(
    admin: ClusterDescriptionQueries,
    bootstrap_servers: str,
    *,
    reports_missing_append_permission: bool,
    confirmed: ClusterConfirmations = NOTHING_CONFIRMED,
) -> list[Finding]:
    found: list[Finding] = []
    try:
        cluster = admin.describe_cluster()
        found += _broker_findings(cluster, confirmed, bootstrap_servers, publishes=reports_missing_append_permission)
        if any(one.kind == "metadata-manager" and one.severity == "error" for one in found):
            return found  # brokers with another metadata manager need not have the topic
        topic = admin.describe_metadata_topic(reports_missing_append_permission=reports_missing_append_permission)
    except StoreError as error:
        return [*found, Finding("error", "brokers", bootstrap_servers, error.message, error.hint)]
    found += _missing_permission_findings(topic.missing_rights, bootstrap_servers)
    if problem := metadata_topic_problem(topic, bootstrap_servers):
        found.append(Finding("error", "metadata-topic", topic.topic, problem, "Segments whose records are lost are lost to brokers, too"))
    return found


def check_topics(
    admin: ClusterDescriptionQueries,
    topics: Sequence[str],
    cleanup_policy_of: Callable[[str], str] = lambda topic: "compact",
    bootstrap_servers: str = "",
) -> list[Finding]:
    found: list[Finding] = []
    for name in topics:
        try:
            topic = admin.describe_topics([name])[name]
        except StoreError as error:
            found.append(Finding("error", "topic", name, error.message, error.hint))
            continue
        found += _missing_permission_findings(topic.missing_rights, bootstrap_servers)
        found += _topic_setting_findings(topic, cleanup_policy_of(name), bootstrap_servers)
        led = [number for number, one in topic.partitions.items() if one.leader < 0]
        if led:
            found.append(Finding("warning", "topic", name, f"partitions {led} have no leader", "Check the brokers"))
    return found


def check_known_problems(admin: ClusterDescriptionQueries, topics: Sequence[str]) -> list[Finding]:
    descriptions = describe_topics(admin, topics)
    return [
        Finding(found.severity, found.kind, found.where.topic or found.object, f"{found.detail}: {found.means}", found.hint)
        for found in known_problem_findings(admin.describe_cluster().brokers, descriptions)
        if found.kind != "cleanup-policy"  # `_topic_setting_findings` reports it with the other settings of the topic
    ]


def _topic_setting_findings(description: TopicDescription, cleanup_policy: str, bootstrap_servers: str) -> Iterator[Finding]:
    topic, settings = description.topic, {key: one.value for key, one in description.settings.items()}
    harm = {found.object: f"{found.detail}: {found.means}" for found in cleanup_policy_findings([description])}
    step = topic_settings_correction(topic, settings, cleanup_policy, bootstrap_servers)
    for setting, (wanted, why) in REQUIRED_TOPIC_SETTINGS.items():
        if setting in settings and topic_setting_refusal_reason(topic, setting, settings[setting], cleanup_policy):
            detail = harm.get(setting, f"{setting} is {settings[setting]}, not {wanted}: {why}")
            yield Finding("error", "topic", topic, detail, step)


def check_object_access(tier: Tier, partitions: Sequence[TopicPartition]) -> list[Finding]:
    layout = tier.ports.layout
    url = tier.settings.tier_url
    for name in partitions:
        try:
            live = tier.open_partition_log(name).refresh().live
            if not live:
                continue
            if not any(one.segment_id for one in layout.list_objects(name)):
                detail = f"{name} has {len(live)} segments by its metadata, and nothing is listed in {layout.partition_folder(name)}"
                return [Finding("error", "tier", url, detail, "Correct url, layout or key_prefix under [tier]")]
            layout.read_file(name, live[-1], "log", 0, 1)
        except (StoreError, BadData) as error:
            return [Finding("error", "tier", url, error.message, error.hint)]
        return []
    return [Finding("note", "tier", url, "no partition has a segment yet, so that reading could not be tried", "")]


def check_metadata(tier: Tier) -> tuple[list[TopicPartition], list[Finding]]:
    """Tiered partitions (none if the metadata topic cannot be read), and problems."""
    try:
        tier.broker_metadata.refresh(max_age_s=0.0)
        names = tier.broker_metadata.list_topic_partitions()
    except CompactorError as error:
        return [], [Finding("error", "metadata", tier.broker_metadata.source_name, error.message, error.hint)]
    if tier.broker_metadata.is_metadata_incomplete():
        explanation = "records are missing: segments that they named cannot be seen"
        return names, [
            Finding("warning", "metadata", tier.broker_metadata.source_name, explanation, "`orphans purge` refuses to work with it")
        ]
    return names, []


def check_record_rate(tier: Tier, partitions: Sequence[TopicPartition]) -> list[Finding]:
    per_hour = tier.settings.publish.metadata_records_per_hour
    if not per_hour:
        return []
    sizes = []
    for name in partitions:
        try:
            sizes.append((len(tier.broker_metadata.partition_metadata_from_records(name).cache.segments), name))
        except CompactorError:
            continue  # `check_object_access` reports it
    tight = sorted(((count, name) for count, name in sizes if 2 * (count + 1) > per_hour), reverse=True)
    if not tight:
        return []
    count, name = tight[0]
    explanation = (
        f"it is {per_hour}, and a first round over {name} with its {count_noun(count, 'segment')} writes about {2 * (count + 1)} records: "
        f"it waits for an hour without records ({count_noun(len(tight), 'partition is', 'partitions are')} that large)"
    )
    hint = "Raise it, or keep it: later rounds are smaller"
    return [Finding("warning", "budget", "publish.metadata_records_per_hour", explanation, hint)]


def _broker_findings(
    cluster: ClusterDescription, confirmed: ClusterConfirmations, bootstrap_servers: str, *, publishes: bool
) -> Iterator[Finding]:
    for broker in cluster.brokers:
        problem = broker_problem([broker], confirmed)
        if problem is None:
            continue
        is_unknown = problem.cause == "metadata-manager" and not broker.metadata_manager
        is_error = problem.cause in ("metadata-manager", "metadata-topic") and (publishes or not is_unknown)
        severity = "error" if is_error else "warning"
        yield Finding(severity, problem.cause, f"broker {broker.id} ({broker.address})", problem.message, problem.hint)
    yield from _missing_permission_findings(cluster.missing_rights, bootstrap_servers)


def _missing_permission_findings(missing_permissions: Sequence[MissingPermission], bootstrap_servers: str) -> Iterator[Finding]:
    for right in missing_permissions:
        operation = "".join(part.capitalize() for part in right.operation.split("_"))
        if "cluster" in right.resource:
            mend = cluster_settings_acl_command(bootstrap_servers)
        else:
            where = f"--operation {operation} --topic {right.resource.removeprefix('topic ')}"
            mend = kafka_tool_command("kafka-acls", f"--add --allow-principal User:... {where}", bootstrap_servers)
        severity = "error" if right.operation == "READ" else "warning"
        yield Finding(severity, "acl", right.resource, str(right), mend)


SLACK_MS = 3_600_000
"""Time that brokers may need for an upload or a deletion after it is due."""
_FEW = 3


@dataclass(frozen=True)
class PartitionHealthFacts:
    """Answers of brokers and store about one partition.

    segments: in all states.
    pending: first record that is not tiered; None also because of ``lookup_problem``.
    lookup_problem: leader's error message if it cannot find a record by its time.
    missing: objects of readable segments that the store lacks.
    gaps: offsets (both inclusive) that no readable segment contains.
    orphans: objects that no metadata names and that are too old for a running upload.
    end_hole: first and last offset, both inclusive, that the newest tiered segment lacks at its end.
    """

    partition: TopicPartition
    segments: Sequence[RemoteLogSegmentMetadataRecord]
    settings: Mapping[str, str]
    pending: FirstUntieredRecord | None = None
    lookup_problem: str = ""
    missing: Sequence[str] = ()
    gaps: Sequence[tuple[int, int]] = ()
    orphans: int = 0
    orphan_bytes: int = 0
    end_hole: tuple[int, int] | None = None


def newest_tiered_segment(segments: Sequence[RemoteLogSegmentMetadataRecord]) -> RemoteLogSegmentMetadataRecord | None:
    finished = [one for one in segments if one.state is SegmentState.COPY_SEGMENT_FINISHED]
    return max(finished, key=lambda one: one.end_offset, default=None)


def partition_health_findings(examined: PartitionHealthFacts, now_ms: int, prices: PriceTable) -> list[Finding]:
    return [
        *_unfinished_copy_findings(examined, now_ms, prices),
        *_late_upload_findings(examined, now_ms),
        *_time_lookup_findings(examined),
        *_overdue_deletion_findings(examined, now_ms, prices),
        *_lost_object_findings(examined),
        *_end_hole_findings(examined),
        *_leaked_object_findings(examined, prices),
    ]


def _finding_about_partition(
    examined: PartitionHealthFacts,
    severity: str,
    finding_kind: str,
    evidence_consequence_and_action: tuple[str, str, str],
    stored_bytes: int = 0,
    usd_per_month: float = 0.0,
) -> Finding:
    detail, means, todo = evidence_consequence_and_action
    return Finding(
        severity,
        finding_kind,
        str(examined.partition),
        detail,
        todo,
        where=examined.partition,
        means=means,
        bytes=stored_bytes,
        usd_month=usd_per_month,
    )


def _unfinished_copy_findings(examined: PartitionHealthFacts, now_ms: int, prices: PriceTable) -> Iterator[Finding]:
    """Copies that brokers began long ago and never finished (Aiven#820)."""
    begun = [
        one
        for one in examined.segments
        if one.state is SegmentState.COPY_SEGMENT_STARTED
        and one.broker_id != COMPACTOR_BROKER_ID
        and now_ms - one.event_timestamp_ms > SLACK_MS
    ]
    if not begun:
        return
    newest, latest = newest_tiered_segment(examined.segments), max(begun, key=lambda one: one.end_offset)
    size = sum(one.size_bytes for one in begun)
    age = format_duration(now_ms - min(one.event_timestamp_ms for one in begun))
    ids = _join_first_few([one.id for one in begun])
    brokers = sorted({one.broker_id for one in begun})
    detail = f"{count_noun(len(begun), 'copy', 'copies')} of {format_size(size)} begun up to {age} ago by brokers {brokers}: {ids}"
    if newest is None or newest.end_offset < latest.end_offset:
        means = "nothing after it is tiered, and the leader's disk fills; if that disk is lost, so are these records"
        todo = "Find the upload in the leader's thread dump and log; restart that broker, or move the leader: the segment is copied again"
        yield _finding_about_partition(examined, "error", "copy-hangs", (detail, means, todo), size)
    else:
        means = "no effect on consumers: later segments are tiered. Objects of these copies may stay and cost money"
        todo = "`orphans find` lists such objects once the topic or the segments are deleted; brokers do not resume the copies"
        yield _finding_about_partition(examined, "warning", "copy-abandoned", (detail, means, todo), size, prices.monthly_storage_usd(size))


def _late_upload_findings(examined: PartitionHealthFacts, now_ms: int) -> Iterator[Finding]:
    """Records that should have been tiered long ago (Aiven#699), or copying that is off."""
    if examined.pending is None:
        return
    if examined.settings.get("remote.log.copy.disable") == "true":
        words = (
            f"remote.log.copy.disable is true; the earliest pending record has offset {examined.pending.offset}",
            "nothing more is tiered, and all of it stays on the brokers' disks",
            "Nothing if that is meant; otherwise set remote.log.copy.disable=false",
        )
        yield _finding_about_partition(examined, "note", "copy-disabled", words)
        return
    lag_ms = 0 if copy_lag(examined.settings, "bytes") == 0 else copy_lag(examined.settings, "ms")
    closed_ms = examined.pending.closed_ms
    if lag_ms is None or closed_ms is None or now_ms - closed_ms <= lag_ms + SLACK_MS:
        return
    age, closed = format_duration(now_ms - examined.pending.timestamp_ms), format_duration(now_ms - closed_ms)
    detail = (
        f"the earliest pending record, offset {examined.pending.offset}, is {age} old, and its segment was closed {closed} ago or earlier"
    )
    words = (
        f"{detail}; remote.copy.lag.ms allows {format_duration(lag_ms)}",
        "untiered records are only on the brokers' disks, which fill up; local retention does not delete them",
        "Check the leader's log for errors of RemoteLogManager's copy task, and remote.log.manager.copy.max.bytes.per.second",
    )
    yield _finding_about_partition(examined, "error", "not-tiered", words)


def _time_lookup_findings(examined: PartitionHealthFacts) -> Iterator[Finding]:
    """The leader reads time indexes in the tier to find records by their time."""
    if examined.lookup_problem:
        words = (
            examined.lookup_problem,
            "consumers that seek by time get errors; whether records wait for their upload is not known",
            "Look for errors of RemoteLogManager's reads in the leader's log; `verify` names objects that are missing or damaged",
        )
        yield _finding_about_partition(examined, "error", "time-lookup", words)


def _overdue_deletion_findings(examined: PartitionHealthFacts, now_ms: int, prices: PriceTable) -> Iterator[Finding]:
    begun = [
        one
        for one in examined.segments
        if one.state is SegmentState.DELETE_SEGMENT_STARTED
        and one.broker_id != COMPACTOR_BROKER_ID
        and now_ms - one.event_timestamp_ms > SLACK_MS
    ]
    if begun:
        size = sum(one.size_bytes for one in begun)
        age = format_duration(now_ms - min(one.event_timestamp_ms for one in begun))
        words = (
            f"{count_noun(len(begun), 'deletion')} of {format_size(size)} begun up to {age} ago and not finished",
            "no effect on consumers: readers do not find these segments; their objects cost money",
            "Check the leader's log for errors of the plug-in's deletions, such as missing permissions",
        )
        yield _finding_about_partition(examined, "warning", "delete-hangs", words, size, prices.monthly_storage_usd(size))
    limit_ms = int(examined.settings.get("retention.ms", "-1"))
    if limit_ms < 0:
        return
    finished = sorted(
        (one for one in examined.segments if one.state is SegmentState.COPY_SEGMENT_FINISHED),
        key=lambda one: (one.start_offset, one.end_offset),
    )
    # Brokers stop at the first segment that has not expired, so that older ones after it stay rightly.
    old = list(takewhile(lambda one: 0 <= one.max_timestamp_ms < now_ms - limit_ms - SLACK_MS, finished))
    if old:
        size = sum(one.size_bytes for one in old)
        age = format_duration(now_ms - min(one.max_timestamp_ms for one in old))
        words = (
            f"{count_noun(len(old), 'segment')} of {format_size(size)} up to {age} old, and retention.ms is {format_duration(limit_ms)}",
            "consumers still read records that should be deleted, and the objects cost money",
            "Check RLMExpirationTask in the leader's log: a segment that cannot be deleted delays all later ones",
        )
        yield _finding_about_partition(examined, "warning", "delete-overdue", words, size, prices.monthly_storage_usd(size))


def _join_first_few(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_FEW]) + " ..." * (len(texts) > _FEW)


def _lost_object_findings(examined: PartitionHealthFacts) -> Iterator[Finding]:
    if examined.missing:
        words = (
            f"{count_noun(len(examined.missing), 'object')} of readable segments are not in the store: {_join_first_few(examined.missing)}",
            "consumers that reach these offsets get errors again and again",
            "Restore them from the store's versions; remove lifecycle rules and scripts that delete below the tier's prefix",
        )
        yield _finding_about_partition(examined, "error", "deleted-too-early", words)
    if examined.gaps:
        ranges = [f"{first} to {last}" for first, last in examined.gaps]
        words = (
            f"no readable segment holds offsets {_join_first_few(ranges)}",
            "consumers that ask for them are reset (OFFSET_OUT_OF_RANGE)",
            "Compare with what the brokers still have locally before their local retention passes",
        )
        yield _finding_about_partition(examined, "error", "gap", words)


def _end_hole_findings(examined: PartitionHealthFacts) -> Iterator[Finding]:
    """Offsets that brokers compacted away before the topic was tiered."""
    if examined.end_hole:
        first, last = examined.end_hole
        detail = (
            f"the newest tiered segment ends before offset {first}: {first} to {last} were compacted away, and no tiered segment follows"
        )
        lag = {
            name: examined.settings[name]
            for name in ("segment.ms", "remote.copy.lag.ms", "remote.copy.lag.bytes")
            if name in examined.settings
        }
        kept = "".join(f", {name} is {value}" for name, value in lag.items())
        means = (
            f"consumers that reach offset {first} get nothing and no error, once their leader no longer has the segment locally,"
            f" until the next one is tiered{kept}"
        )
        todo = (
            f"Have the next segment tiered: {topic_settings_command(examined.partition.topic, {'remote.copy.lag.ms': '0'})}"
            f" (if it is still open, a smaller segment.ms and a new record close it); or let consumers seek to offset {last + 1}"
        )
        yield _finding_about_partition(examined, "warning", "end-hole", (detail, means, todo))


def _leaked_object_findings(examined: PartitionHealthFacts, prices: PriceTable) -> Iterator[Finding]:
    if examined.orphans:
        usd = prices.monthly_storage_usd(examined.orphan_bytes)
        words = (
            (
                f"{count_noun(examined.orphans, 'object')} of {format_size(examined.orphan_bytes)} that no metadata names,"
                f" {usd:.2f} USD a month"
            ),
            "no effect on consumers; the objects cost money for ever",
            "`orphans find --to FILE` lists them, `orphans purge FILE` deletes them after you have read the list",
        )
        yield _finding_about_partition(examined, "warning", "leaked", words, examined.orphan_bytes, usd)
