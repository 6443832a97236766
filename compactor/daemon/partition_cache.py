"""Cache of partition summaries for the daemon, and the change feed that tells which partitions have changed.

The cache keeps, across restarts, a summary of each control log and its position. The full state is rebuilt from local state when a log has
new records.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.control.logs import (
    PartitionLog,
    collect_queued_hints,
    open_partition_log,
    pause_reason,
)
from compactor.control.state import CatalogState, CompactorEpochAndEnding, CompactorLeader, PartitionState, RunHistoryEntry
from compactor.control.summary import PartitionSummary, SegmentSummary, summarize_state
from compactor.daemon.scheduling import Due, due
from compactor.errors import UsageError
from compactor.local.cache import ControlLogReadProgress
from compactor.model.ids import TopicPartition
from compactor.model.segment import StrictFrozenModel
from compactor.upkeep.retire import grace_starts_ms
from compactor.views.overview import is_fresh
from compactor.views.verdict import Block, TransactionAtEnd, blocks_of_topics, known_bootstrap_servers, read_open_transaction

if TYPE_CHECKING:
    from compactor.adapters.brokers.view import BrokerMetadata, PartitionMetadataVersion

INBOX_POLL_MS = 60_000
"""How often change hints are collected that could not be appended to the catalog. Costs one LIST."""
REQUEST_EXPIRY_MS = 600_000
"""Requests for a round that are older are ignored by a daemon that has just started."""
POLICY_STEP = 1 << 48
"""Added to a hint for each change of the topic's settings. Larger than any offset, so that no hint repeats an earlier one."""


@dataclass(frozen=True)
class PartitionChangeReport:
    """Report of the change feed about all partitions of a tier.

    hints: change hint of every partition: a number that changes whenever its log has new records.
    suspended: why rounds of a topic are forbidden. paused: who paused a partition and why.
    requested: slot of the catalog record in which a person last requested a round.
    """

    hints: Mapping[TopicPartition, int]
    recreated: frozenset[TopicPartition] = frozenset()
    suspended: Mapping[str, Block] = field(default_factory=dict)
    paused: Mapping[TopicPartition, str] = field(default_factory=dict)
    requested: Mapping[TopicPartition, int] = field(default_factory=dict)


class ChangeFeed(Protocol):
    """Source from which the daemon learns which partitions have changed."""

    def poll_changes(self, tier: Tier) -> PartitionChangeReport | None:
        """Report, or None if nothing has changed. Raises StoreError, UsageError."""


class CatalogChangeFeed:
    """Change feed of a compactor-managed tier: the hints in its catalog."""

    def __init__(self) -> None:
        self._reported = False
        self._inbox_ms = 0

    def poll_changes(self, tier: Tier) -> PartitionChangeReport | None:
        now = tier.ports.clock_ms()
        taken = 0
        if self._reported and now - self._inbox_ms >= INBOX_POLL_MS:
            self._inbox_ms = now
            taken = collect_queued_hints(tier.catalog)
        if self._reported and not taken and not tier.catalog.has_new_records():
            return None
        state = tier.identity.read_catalog()
        hints = {name: state.partitions[str(name)] for name in state.topic_partitions}
        self._reported = True
        return PartitionChangeReport(hints, paused=pause_reasons(state, hints), requested=round_request_slots(state, now))


def pause_reasons(catalog: CatalogState, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, str]:
    if not catalog.paused:
        return {}
    return {name: reason for name in partitions if (reason := pause_reason(catalog, name))}


def round_request_slots(catalog: CatalogState, now_ms: int) -> dict[TopicPartition, int]:
    """Slots of rounds requested in the last REQUEST_EXPIRY_MS."""
    requests = catalog.wanted.items()
    return {
        TopicPartition.parse_partition_store_prefix(text): request.slot
        for text, request in requests
        if now_ms - request.at_ms < REQUEST_EXPIRY_MS
    }


class BrokerChangeFeed:
    """Change feed of a broker-managed tier. A hint is the offset of the partition's last metadata record, plus POLICY_STEP for each change
    of its topic's settings.
    """

    def __init__(self, brokers: BrokerMetadata) -> None:
        self._brokers = brokers
        self._versions: Mapping[TopicPartition, PartitionMetadataVersion] = {}
        self._chosen: dict[str, Mapping[str, str]] = {}
        self._policies: dict[str, int] = {}

    def poll_changes(self, tier: Tier) -> PartitionChangeReport | None:
        if not self._versions or tier.catalog.has_new_records():
            tier.identity.read_catalog()
        brokers = self._brokers
        brokers.refresh(max_age_s=0.0)
        before, self._versions = self._versions, brokers.partition_metadata_versions()
        topics = {name.topic for name in self._versions}
        suspended = blocks_of_topics(tier, topics)
        for topic in topics:
            try:
                now = brokers.topic_status(topic)
            except UsageError:
                continue  # the topic was deleted a moment ago
            if self._chosen.setdefault(topic, now.chosen) != now.chosen:
                self._chosen[topic] = now.chosen
                self._policies[topic] = self._policies.get(topic, 0) + 1
        recreated = {name for name, one in self._versions.items() if name in before and before[name].topic_id != one.topic_id}
        hints = {name: self._compute_change_hint(name, one) for name, one in self._versions.items()}
        state = tier.catalog.state
        requested = round_request_slots(state, tier.ports.clock_ms())
        return PartitionChangeReport(hints, frozenset(recreated), suspended, pause_reasons(state, hints), requested)

    def _compute_change_hint(self, partition: TopicPartition, version: PartitionMetadataVersion) -> int:
        return version.applied + self._policies.get(partition.topic, 0) * POLICY_STEP


def create_change_feed(tier: Tier) -> ChangeFeed:
    return BrokerChangeFeed(tier.broker_metadata) if tier.kind.is_broker_managed else CatalogChangeFeed()


MOST_RUNS = 20
MOST_EPOCHS = 12
MAX_HISTORY_RANGES = 400
MOST_LINEAGE = 100


class ReplacedOffsetRange(StrictFrozenModel):
    """Adjacent segments that were replaced together and wait for deletion. Offsets are inclusive. run_id: empty for a truncation or a
    deleted partition.
    """

    start_offset: int
    end_offset: int
    segments: int
    bytes: int
    run_id: str
    undone: bool


class PartitionHistory(StrictFrozenModel):
    """A partition's past, newest last. fenced: control log records that were refused when the log was replayed."""

    slot: int
    leader: CompactorLeader | None
    runs: tuple[RunHistoryEntry, ...]
    epochs: tuple[CompactorEpochAndEnding, ...]
    lineage: tuple[EpochEntry, ...]
    replaced: tuple[ReplacedOffsetRange, ...]
    fenced: int


def partition_history(state: PartitionState) -> PartitionHistory:
    return PartitionHistory(
        slot=state.slot,
        leader=state.leader,
        runs=state.runs[-MOST_RUNS:],
        epochs=state.epochs[-MOST_EPOCHS:],
        lineage=state.lineage[-MOST_LINEAGE:],
        replaced=tuple(_replaced_ranges(state))[:MAX_HISTORY_RANGES],
        fenced=len(state.fenced),
    )


def serialize_history(history: PartitionHistory) -> bytes:
    """Compressed JSON, about 1 KB."""
    return zlib.compress(history.model_dump_json().encode(), 1)


def deserialize_history(data: bytes) -> PartitionHistory:
    return PartitionHistory.model_validate_json(zlib.decompress(data))


def _replaced_ranges(state: PartitionState) -> list[ReplacedOffsetRange]:
    found: list[ReplacedOffsetRange] = []
    for group in state.waiting:
        begun = len(found)
        for segment in sorted(group.segments, key=lambda each: each.start_offset):
            last = found[-1] if len(found) > begun else None
            if last is not None and segment.start_offset <= last.end_offset + 1:
                grown = {"end_offset": segment.end_offset, "segments": last.segments + 1, "bytes": last.bytes + segment.size_bytes}
                found[-1] = last.model_copy(update=grown)
            else:
                one = {"start_offset": segment.start_offset, "end_offset": segment.end_offset, "bytes": segment.size_bytes}
                found.append(ReplacedOffsetRange(**one, segments=1, run_id=group.run_id, undone=group.undone))
    return found


@dataclass(frozen=True)
class CachedPartitionSummary:
    """A partition's summary and the log position it was made from.

    position: None if the summary could not be matched with the log.
    slot_times_ms: store time, by slot, of each log record that starts a grace period or undo period.
    transaction: the oldest one that is open at the end of the tier.
    """

    summary: PartitionSummary
    position: ControlLogReadProgress | None
    slot_times_ms: Mapping[int, int]
    transaction: TransactionAtEnd | None = None


class PolledDue(NamedTuple):
    due: Due
    polled_ms: int


class PartitionSummaryCache:
    """Cache of summaries. Thread-safe for different partitions; a single one must be used by one thread at a time."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._known: dict[TopicPartition, CachedPartitionSummary] = {}
        self._confirmed: dict[TopicPartition, ControlLogReadProgress] = {}
        self._histories: dict[TopicPartition, bytes] = {}
        self._lock = threading.Lock()

    def load_unchanged(self, hints: Mapping[str, int], max_age_ms: int, now_ms: int) -> dict[TopicPartition, PolledDue]:
        """Judge summaries in local state that are not older than ``max_age_ms`` and still valid: the partition has not changed since,
        nothing waited for deletion, and no transaction was open.
        """
        kept = self._tier.local.cached_summaries() if self._tier.local else {}
        found: dict[TopicPartition, PolledDue] = {}
        for text, (seen, summary) in kept.items():
            fresh = text in hints and is_fresh(seen, summary, hints[text], now_ms, max_age_ms)
            if (
                fresh
                and not summary.waiting
                and not summary.has_open_transaction
                and self._tier.min_log_slot(summary.topic_partition) <= seen.slot
            ):  # the times of waiting groups and the producers of transactions have to be read from the store
                self._known[summary.topic_partition] = CachedPartitionSummary(summary, seen, {})
                found[summary.topic_partition] = PolledDue(self._judge(summary.topic_partition, now_ms), seen.checked_ms)
        return found

    def use_settings_of_tier(self, tier: Tier) -> None:
        self._tier = tier

    def forget_partition(self, partition: TopicPartition) -> None:
        self._known.pop(partition, None)
        self._histories.pop(partition, None)

    def judge(self, partition: TopicPartition, now_ms: int) -> Due | None:
        """By the present settings; None if there is no summary."""
        return self._judge(partition, now_ms) if partition in self._known else None

    def poll_partition(self, partition: TopicPartition, hint: int, last: Due | None, now_ms: int) -> Due:
        """Read new records of the control log; two requests if there are none. Raises StoreError, BadControlRecord."""
        known = self._known.get(partition)
        if last is not None and known is not None and not self._may_have_changed(known, hint):
            self._record_unchanged_partition(known, hint, now_ms)
            return last if now_ms < last.wake_ms else self._judge(partition, now_ms)
        log = self._tier.open_partition_log(partition)
        log.refresh()
        self.cache_summary_of_log(log, hint, now_ms)
        return self._judge(partition, now_ms)

    def cache_summary_of_log(self, log: PartitionLog, hint: int, now_ms: int) -> Due:
        """Cache the summary of a control log that was just read."""
        self._tier.change_notifier.cache_state(log, hint)
        # One request for each slot whose time the log does not hold.
        slot_times_ms = grace_starts_ms(self._tier.ports, log) if log.state.waiting or log.state.registrations else {}
        mark = log.state_identity()
        position = ControlLogReadProgress(slot=log.state.slot, hint=hint, checked_ms=now_ms, mark=mark) if mark else None
        self._histories[log.state.topic_partition] = serialize_history(partition_history(log.state))
        visible = self._tier.reader_state(log.state)
        self._known[log.state.topic_partition] = CachedPartitionSummary(
            summarize_state(visible), position, slot_times_ms, read_open_transaction(self._tier, visible)
        )
        return self._judge(log.state.topic_partition, now_ms)

    def live_segments(self, partition: TopicPartition) -> tuple[SegmentSummary, ...]:
        """Live segments as of the last poll. Thread-safe."""
        known = self._known.get(partition)
        return known.summary.model_copy().live if known else ()

    def cached_history(self, partition: TopicPartition) -> PartitionHistory | None:
        """History as of the last poll, None if only a summary is cached. Thread-safe."""
        if partition not in self._histories and self._tier.local is not None and self._tier.local.is_bound_to_tier:
            kept = self._tier.local.cached_partition_state(partition)
            if kept is not None:
                self._histories.setdefault(partition, serialize_history(partition_history(kept[0])))
        data = self._histories.get(partition)
        return deserialize_history(data) if data is not None else None

    def save_poll_times(self) -> None:
        """Save when unchanged partitions were polled, so that a restarted daemon need not poll them."""
        with self._lock:
            confirmed, self._confirmed = self._confirmed, {}
        if self._tier.local and confirmed:
            self._tier.local.save_read_progress(confirmed)

    def _may_have_changed(self, cached: CachedPartitionSummary, hint: int) -> bool:
        # Ask the store for new records. On broker-managed tiers a new change hint is enough, without a request.
        tier, name = self._tier, cached.summary.topic_partition
        if cached.position is None or (not tier.kind.is_compactor_managed and cached.position.hint != hint):
            return True
        log = open_partition_log(tier.ports, name, tier.min_log_slot(name), control_log_name=tier.control_log_name(name))
        return log.has_changed_since(cached.position.slot, cached.position.mark)

    def _record_unchanged_partition(self, cached: CachedPartitionSummary, hint: int, now_ms: int) -> None:
        if cached.position is not None:
            with self._lock:
                self._confirmed[cached.summary.topic_partition] = cached.position.model_copy(update={"hint": hint, "checked_ms": now_ms})

    def _judge(self, partition: TopicPartition, now_ms: int) -> Due:
        known = self._known[partition]
        return due(
            known.summary,
            self._tier.cleaner_settings_for_topic(partition.topic),
            self._tier.retention,
            known.slot_times_ms,
            now_ms,
            transaction=known.transaction,
            bootstrap_servers=known_bootstrap_servers(self._tier),
        )
