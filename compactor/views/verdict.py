"""The verdict on a partition: clean, due, waiting, blocked or paused, decided here only.

    stored state and settings ----> stored_block, held_until_ms --+
    settings of the topic ---------> blocks_of_topics ------------+--> partition_verdict --> status, pages, metrics, `plan`, `config check`
    this process's failed jobs ----> Block -----------------------+

*Waiting* ends by itself. *Blocked* does not: a person has to act.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from compactor.access.tier import Tier
from compactor.config.settings import CleanerSettings
from compactor.config.times import format_iso_time
from compactor.config.units import count_noun, format_duration, format_size
from compactor.constants import DAY_MS, NEVER_MS
from compactor.control.state import PartitionState
from compactor.control.summary import PartitionSummary, SegmentMetadataOrSummary, SegmentSummary
from compactor.errors import BlockedCause, CompactorError, UsageError
from compactor.local.staging import rewrite_disk_bytes
from compactor.round.plan import RoundAssessment, known_refused_keyless, retention_timestamp_ms

TRANSACTION_TIMEOUT_MS = 900_000
"""Kafka's transaction.max.timeout.ms: a coordinator aborts each transaction after this time, unless it has lost it."""


class VerdictKind(StrEnum):
    """WAITING ends by itself (a lag, a rate limit, an open transaction), BLOCKED only when a person acts."""

    CLEAN = "clean"
    DUE = "due"
    WAITING = "waiting"
    BLOCKED = "blocked"
    PAUSED = "paused"


@dataclass(frozen=True)
class Block:
    """Reason why no round can clean a partition.

    since_ms: when it was first noticed; 0 if unknown.
    next_step: what a person does about it; empty if ``reason`` says all.
    """

    cause: BlockedCause
    reason: str
    since_ms: int = 0
    next_step: str = ""


@dataclass(frozen=True)
class PartitionVerdict:
    """Verdict on a partition at one moment.

    until_ms: when a wait ends at the latest; 0 if unknown.
    waiting_bytes: of segments that hold dirty offsets.
    cause, since_ms, next_step: as in ``Block``; empty unless blocked.
    """

    kind: VerdictKind
    reason: str = ""
    until_ms: int = 0
    waiting_bytes: int = 0
    cause: str = ""
    since_ms: int = 0
    next_step: str = ""

    @property
    def is_blocked(self) -> bool:
        return self.kind is VerdictKind.BLOCKED

    def document(self) -> dict[str, Any]:
        """Unknown times are None."""
        times = {"until_ms": self.until_ms or None, "since_ms": self.since_ms or None}
        return asdict(self) | {"kind": self.kind.value} | times


def partition_verdict(
    *,
    due: bool,
    reason: str,
    blocks: Iterable[Block | None],
    paused: str = "",
    held_until_ms: int = 0,
    postponed: str = "",
    waiting_bytes: int = 0,
) -> PartitionVerdict:
    """:param blocks: the most important first.
    :param paused: by whom, or empty.
    :param held_until_ms: as ``held_until_ms`` returns.
    :param postponed: why the latest round was not begun although nothing is wrong; empty if it was.
    """
    block = next((each for each in blocks if each is not None), None)
    if block is not None:
        return PartitionVerdict(VerdictKind.BLOCKED, block.reason, 0, waiting_bytes, block.cause.value, block.since_ms, block.next_step)
    if paused:
        return PartitionVerdict(VerdictKind.PAUSED, paused, waiting_bytes=waiting_bytes)
    until_ms = held_until_ms if held_until_ms < NEVER_MS else 0
    if due and not postponed:
        return PartitionVerdict(VerdictKind.DUE, reason, waiting_bytes=waiting_bytes)
    if due or held_until_ms:
        return PartitionVerdict(VerdictKind.WAITING, postponed or reason, until_ms, waiting_bytes)
    return PartitionVerdict(VerdictKind.CLEAN, reason, waiting_bytes=waiting_bytes)


# --- what is stored ---


@dataclass(frozen=True)
class TransactionAtEnd:
    """The oldest transaction open at the tier's end.

    producer_id, epoch: -1 if unknown.
    timestamp_ms: latest time at which its producer wrote, never before its first record; -1 if unknown.
    """

    first_offset: int
    producer_id: int = -1
    epoch: int = -1
    timestamp_ms: int = -1

    @property
    def expected_end_ms(self) -> int:
        """Time by which its coordinator has ended it; NEVER_MS if unknown."""
        return self.timestamp_ms + TRANSACTION_TIMEOUT_MS if self.timestamp_ms >= 0 else NEVER_MS


def read_open_transaction(tier: Tier, state: PartitionState) -> TransactionAtEnd | None:
    """If the newest segment's producer snapshot cannot be read, the producer is unknown."""
    newest = state.live[-1] if state.has_segments else None
    if newest is None or newest.open_txn_offset < 0:
        return None
    from compactor.records.producers import parse_producer_snapshot_file
    from compactor.round.sources import read_end_snapshot

    first = newest.open_txn_offset
    try:
        entries = parse_producer_snapshot_file(read_end_snapshot(tier.ports.layout, state), newest.id).entries
    except CompactorError:
        return TransactionAtEnd(first)
    found = entries[entries["txn_first_offset"] == first]
    if not len(found):
        return TransactionAtEnd(first)
    # The segment that holds the first record bounds its time, too: the producer may have written for long.
    holder = next((segment.max_timestamp_ms for segment in state.live if segment.start_offset <= first <= segment.end_offset), -1)
    times = [each for each in (int(found[0]["timestamp"]), holder) if each >= 0]
    return TransactionAtEnd(first, int(found[0]["producer_id"]), int(found[0]["epoch"]), min(times, default=-1))


def is_beyond_now(timestamp_ms: int, now_ms: int) -> bool:
    """More than a day ahead: in another unit, or by a wrong clock."""
    return timestamp_ms > now_ms + DAY_MS


def is_transaction_hanging(transaction: TransactionAtEnd, live: Iterable[SegmentMetadataOrSummary], now_ms: int) -> bool:
    """True if the tier has records later than the time at which the coordinator would have ended the transaction. This machine's time does
    not count: with daily imports, the marker may be on its way.

    :param live: times beyond now say nothing about how far the tier reaches.
    """
    newest_ms = max((each.max_timestamp_ms for each in live if not is_beyond_now(each.max_timestamp_ms, now_ms)), default=-1)
    return newest_ms > transaction.expected_end_ms


def stored_block(
    summary: PartitionSummary,
    found: RoundAssessment[SegmentSummary],
    cleaner: CleanerSettings,
    transaction: TransactionAtEnd | None,
    now_ms: int,
    bootstrap_servers: str = "",
) -> Block | None:
    """:param bootstrap_servers: for the command that ends a transaction; empty if unknown."""
    why, cause = summary.quarantine, quarantine_cause(summary)
    # What brokers say is asked at each poll, so that a corrected setting counts at once. A block by rights or budgets may have ended
    # together with the need for a round.
    is_needed = cause is BlockedCause.DAMAGE or found.due or summary.open_run != ""
    if why is not None and why.keyless is not None:  # the setting may have been changed since
        is_needed = found.due and known_refused_keyless(summary, cleaner, found.end) is not None
    if why is not None and cause is not None and cause not in _ASKED_AT_EACH_POLL and is_needed:
        return Block(cause, why.reason, summary.quarantined_since_ms or why.at_ms, summary.quarantine_next_step)
    if found.due:
        return _disk_budget_block(summary, found, cleaner)
    if not _is_held(summary, found):
        return None
    if transaction is not None and found.end <= transaction.first_offset and is_transaction_hanging(transaction, summary.live, now_ms):
        return _hanging_transaction_block(summary, transaction, now_ms, bootstrap_servers)
    return _future_timestamp_block(summary, found, cleaner, now_ms)


_ASKED_AT_EACH_POLL = (BlockedCause.SETTINGS, BlockedCause.BROKERS)


def quarantine_cause(summary: PartitionSummary) -> BlockedCause | None:
    """The cause of the latest failed round, if the partition is quarantined."""
    if summary.quarantine is None:
        return None
    if summary.quarantine.keyless is not None:
        return BlockedCause.KEYLESS
    return BlockedCause(summary.quarantine_cause) if summary.quarantine_cause in set(BlockedCause) else BlockedCause.DAMAGE


def with_recorded_time(block: Block, summary: PartitionSummary) -> Block:
    """Add the time since which rounds have failed for this cause, if recorded."""
    return replace(block, since_ms=summary.quarantined_since_ms) if quarantine_cause(summary) is block.cause else block


def _is_held(summary: PartitionSummary, found: RoundAssessment[SegmentSummary]) -> bool:
    ours = summary.live[:-1] if summary.mirrored else summary.live
    return bool(ours) and ours[-1].end_offset >= max(found.end, found.first_dirty)


def held_until_ms(
    summary: PartitionSummary,
    found: RoundAssessment[SegmentSummary],
    cleaner: CleanerSettings,
    transaction: TransactionAtEnd | None,
    now_ms: int,
) -> int:
    """Latest time at which no dirty segment is held; 0 if none is, NEVER_MS if the time is unknown: a transaction has ended by then, but
    its marker may not have arrived.
    """
    if not _is_held(summary, found):
        return 0
    moments = [transaction.expected_end_ms] if transaction is not None else []
    if cleaner.min_compaction_lag_ms > 0:
        held = (segment for segment in summary.live if segment.start_offset >= found.end)
        moments += [retention_timestamp_ms(segment) + cleaner.min_compaction_lag_ms for segment in held]
    latest_ms = max(moments, default=NEVER_MS)
    return latest_ms if now_ms < latest_ms < NEVER_MS else NEVER_MS


def bytes_not_cleaned(summary: PartitionSummary) -> int:
    """Bytes of segments that hold dirty offsets."""
    ours = summary.live[:-1] if summary.mirrored else summary.live
    return sum(segment.size_bytes for segment in ours if segment.end_offset >= summary.first_dirty_offset)


def _disk_budget_block(summary: PartitionSummary, found: RoundAssessment[SegmentSummary], cleaner: CleanerSettings) -> Block | None:
    """A Spark round has budgets of its own."""
    budget = cleaner.disk_budget_bytes
    if not isinstance(budget, int) or cleaner.map_engine == "spark":
        return None
    late = set(found.horizon_due)
    rewritten = [*found.dirty, *(segment for segment in found.clean if segment.id in late)]
    largest = max(rewritten, key=lambda segment: segment.size_bytes, default=None)
    need = rewrite_disk_bytes([largest], cleaner.index_interval_bytes) if largest else 0
    if need <= budget:
        return None
    reason = f"the largest segment of {summary.topic_partition} needs {format_size(need)} of local disk, and the disk budget is "
    return Block(BlockedCause.BUDGET, reason + format_size(budget), next_step=f"Set disk_budget_bytes to at least {need}")


def _hanging_transaction_block(summary: PartitionSummary, transaction: TransactionAtEnd, now_ms: int, bootstrap_servers: str) -> Block:
    who = f"producer {transaction.producer_id}, epoch {transaction.epoch}"
    age = format_duration(max(0, now_ms - transaction.timestamp_ms))
    reason = (
        f"the transaction of {who} that begins at offset {transaction.first_offset} is hanging: it was last written to {age} ago, at "
        f"{format_iso_time(transaction.timestamp_ms)}, and the tier has records more than {format_duration(TRANSACTION_TIMEOUT_MS)} later"
    )
    arguments = f"abort --topic {summary.topic} --partition {summary.partition} --start-offset {transaction.first_offset}"
    from compactor.adapters.brokers.admin import kafka_tool_command

    command = kafka_tool_command("kafka-transactions.sh", arguments, bootstrap_servers)
    return Block(BlockedCause.TRANSACTION, reason, transaction.expected_end_ms, f"End it: {command}")


def _future_timestamp_block(
    summary: PartitionSummary, found: RoundAssessment[SegmentSummary], cleaner: CleanerSettings, now_ms: int
) -> Block | None:
    """A block if min_compaction_lag_ms counts from a time beyond now."""
    if cleaner.min_compaction_lag_ms <= 0:
        return None
    first = next((segment for segment in summary.live if segment.start_offset >= found.end), None)
    if first is None or not is_beyond_now(first.max_timestamp_ms, now_ms):
        return None
    reason = f"segment {first.id} holds a record of {format_iso_time(first.max_timestamp_ms)}, from which min_compaction_lag_ms counts"
    step = "Correct the producer's unit or clock, and set min_compaction_lag_ms = 0 for the topic"
    return Block(BlockedCause.TIMESTAMPS, reason, next_step=step)


def future_timestamps_text(live: Iterable[SegmentMetadataOrSummary], now_ms: int) -> str:
    """Segments whose largest timestamp is more than a day ahead; empty if there are none."""
    beyond = [segment.max_timestamp_ms for segment in live if is_beyond_now(segment.max_timestamp_ms, now_ms)]
    if not beyond:
        return ""
    return (
        f"{count_noun(len(beyond), 'segment has', 'segments have')} records of times more than a day ahead, the latest "
        f"{format_iso_time(max(beyond))}: until then neither retention.ms nor min.compaction.lag.ms passes for them, as in Kafka"
    )


def known_bootstrap_servers(tier: Tier) -> str:
    kafka = tier.settings.kafka
    return kafka.bootstrap_servers.strip() if tier.kind.is_broker_managed or kafka.has_configured_brokers else ""


# --- what brokers say ---


def blocks_of_topics(tier: Tier, topics: Iterable[str]) -> dict[str, Block]:
    """By topic: the brokers' versions or the topic's settings rule out compaction.

    Raises Unavailable or Refused if the brokers do not answer.
    """
    if not tier.kind.is_broker_managed:
        return {}
    from compactor.adapters.brokers.cluster import REQUIRED_TOPIC_SETTINGS, topic_settings_correction, topic_settings_refusal_reason

    brokers, servers = tier.broker_metadata, known_bootstrap_servers(tier)
    everywhere = brokers.cluster_problem()
    found = {}
    for topic in topics:
        if everywhere is not None:
            found[topic] = Block(BlockedCause.BROKERS, everywhere.message, next_step=everywhere.hint)
            continue
        try:
            settings = brokers.topic_status(topic).settings
        except UsageError:
            continue  # the topic was deleted a moment ago
        if brokers.taken_ms >= 0:  # a snapshot: nothing is compacted from it, and it may have no settings
            settings = {name: wanted for name, (wanted, _) in REQUIRED_TOPIC_SETTINGS.items()} | dict(settings)
        policy = tier.settings.cleaner_settings_for_topic(topic).cleanup_policy
        if reason := topic_settings_refusal_reason(topic, settings, policy):
            step = topic_settings_correction(topic, settings, policy, servers) or "`config check` names the missing right"
            found[topic] = Block(BlockedCause.SETTINGS, reason, next_step=step)
    return found
