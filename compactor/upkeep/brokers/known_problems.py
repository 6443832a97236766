"""Known harm that Kafka's tiered storage does, told before it happens: by broker version and settings, compacted or not.

Decisions over what the cluster answered. ``config check`` and ``doctor`` print the findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from compactor.brokers.conditions import ClusterConfirmations, ClusterDescriptionQueries, broker_problem
from compactor.brokers.metadata_topic.admin import BrokerDescription, TopicDescription, topic_settings_command
from compactor.errors import NotFound, Refused

LAST_TIERED_SETTING = "follower.fetch.last.tiered.offset.enable"
"""Of KIP-1023. A broker that has it is of version 4.3 or newer."""
COPY_LAG_SETTINGS = ("remote.copy.lag.ms", "remote.copy.lag.bytes")
"""Of KIP-1241. A topic has them from version 4.4 on: 0 and -1 by default."""
FIRST_WITH_SIZE_FIX = (4, 4)
"""First version of which every release has the fix of KAFKA-20732. 4.3.2 has it too, but brokers do not report their patch version."""
MANY_METADATA_RECORDS = 500_000
"""Records of one partition of the metadata topic, from which on a broker's start takes noticeably longer."""


@dataclass(frozen=True)
class TierHealthFinding:
    """Harm to tiered data that has happened or that a broker version or setting will cause.

    severity: error (data is or will be lost), warning (it costs, or becomes an error) or note.
    topic, partition: the partition concerned; an empty topic and -1 for the whole cluster.
    object: name of the broker, setting or segment.
    detail: the evidence.
    means: the consequence for consumers.
    bytes: number of stored bytes concerned; 0 if unknown or none.
    usd_month: price of these bytes per month.
    """

    severity: str
    kind: str
    topic: str
    partition: int
    object: str
    detail: str
    means: str
    todo: str
    bytes: int = 0
    usd_month: float = 0.0


def describe_topics(admin: ClusterDescriptionQueries, topics: Sequence[str]) -> dict[str, TopicDescription]:
    """Return the descriptions of topics by name. Topics that the cluster does not have, or does not describe to this user, are left out."""
    found: dict[str, TopicDescription] = {}
    for name in topics:
        try:
            found |= admin.describe_topics([name])
        except (Refused, NotFound):
            continue  # `config check` reports it
    return found


def known_kafka_problem_findings(brokers: Sequence[BrokerDescription], topics: Mapping[str, TopicDescription]) -> list[TierHealthFinding]:
    """Return findings about broker versions, broker settings and topic settings that will damage tiered data."""
    return [
        *_size_retention_findings(brokers, topics.values()),
        *_last_tiered_offset_fetch_findings(brokers),
        *_delayed_upload_findings(topics.values()),
        *cleanup_policy_findings(topics.values(), brokers[0].address if brokers else ""),
    ]


def unsuitable_broker_findings(brokers: Sequence[BrokerDescription], confirmed: ClusterConfirmations) -> list[TierHealthFinding]:
    """Return at most one finding: why nothing may be compacted under these brokers, so that nothing of the tier is replaced or deleted."""
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
    return [TierHealthFinding(severity, problem.cause, "", -1, "brokers", problem.message, means, problem.hint)]


def metadata_growth_findings(metadata_topic: TopicDescription, segment_count: int) -> list[TierHealthFinding]:
    """Return a finding if the metadata topic has grown so much that brokers start slowly, else an empty list.

    :param segment_count: number of segments that the metadata names now, in all states.
    """
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
    return [TierHealthFinding("warning", "metadata-growth", "", -1, metadata_topic.topic, detail, means, todo)]


def _size_retention_findings(brokers: Sequence[BrokerDescription], topics: Iterable[TopicDescription]) -> Iterator[TierHealthFinding]:
    """Yield a finding for each topic whose retention.bytes makes a newly elected leader delete too much (KAFKA-20732)."""
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
        yield TierHealthFinding("warning", "size-retention", topic.topic, -1, "retention.bytes", detail, means, todo)


def _last_tiered_offset_fetch_findings(brokers: Sequence[BrokerDescription]) -> Iterator[TierHealthFinding]:
    """Yield at most one finding. It lists the brokers that build new replicas from the newest tiered segment (KIP-1023)."""
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
    yield TierHealthFinding("warning" if others else "note", "last-tiered", "", -1, LAST_TIERED_SETTING, detail, means, todo)


def _delayed_upload_findings(topics: Iterable[TopicDescription]) -> Iterator[TierHealthFinding]:
    """Yield a finding for each topic whose settings delay the upload of closed segments, or prevent it (KIP-1241)."""
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
        yield TierHealthFinding(severity, "copy-lag", topic.topic, -1, "remote.copy.lag.ms", detail, means, todo)


def copy_lag(settings: Mapping[str, str], unit: str) -> int | None:
    """Return the age in milliseconds, or the number of newer local bytes, from which on brokers upload a closed segment (KIP-1241; Kafka's
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


def cleanup_policy_findings(topics: Iterable[TopicDescription], bootstrap_servers: str = "") -> Iterator[TierHealthFinding]:
    """Yield a finding for each tiered topic whose cleanup.policy Kafka lets pass although its tiered part suffers from it.

    :param bootstrap_servers: addresses of brokers, for the command that corrects a topic.
    """
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
        yield TierHealthFinding(severity, "cleanup-policy", topic.topic, -1, "cleanup.policy", detail, means, todo)


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the numbers of a version like ``4.3``, for comparisons. Text that is not a version becomes the empty tuple, which is lower
    than any version, because it is unknown which fixes it has.
    """
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _has_remote_storage_enabled(topic: TopicDescription) -> bool:
    setting = topic.settings.get("remote.storage.enable")
    return setting is not None and setting.value == "true"
