"""Cache of partition summaries for the daemon.

For each partition it keeps a summary of the control log and the position up to which the log was read, across polls and restarts. It does
not keep the full state, which is rebuilt from local state (``Tier.open``) when a log has new records.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from compactor.access.tier import Tier
from compactor.control.logs import PartitionLog, open_control_log_of_partition
from compactor.control.summary import PartitionSummary, SegmentSummary, summarize_state
from compactor.daemon.partition_history import PartitionHistory, deserialize_history, partition_history, serialize_history
from compactor.daemon.scheduling import PartitionStatus, partition_status
from compactor.local.cache import ControlLogReadProgress
from compactor.model.ids import TopicPartition
from compactor.upkeep.retire import read_grace_start_ms_by_control_log_slot
from compactor.views.overview import is_cached_summary_fresh
from compactor.views.verdict import TransactionAtEnd, known_bootstrap_servers, read_open_transaction


@dataclass(frozen=True)
class CachedPartitionSummary:
    """A partition's summary and the log position it was made from.

    position: last log record included in the summary; None if the summary could not be matched with the log.
    slot_times_ms: store time, in milliseconds, of each log record that starts a grace period or undo period, by the record's slot (its
        number in the log).
    transaction: the oldest transaction that is open at the end of the tier; None if none is.
    """

    summary: PartitionSummary
    position: ControlLogReadProgress | None
    slot_times_ms: Mapping[int, int]
    transaction: TransactionAtEnd | None = None


class PolledPartitionStatus(NamedTuple):
    """A partition's status, and the time in milliseconds at which its control log was last polled."""

    status: PartitionStatus
    polled_ms: int


class PartitionSummaryCache:
    """Cache of partition summaries. Thread-safe for different partitions; a single partition must be used by one thread at a time."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._known: dict[TopicPartition, CachedPartitionSummary] = {}
        self._confirmed: dict[TopicPartition, ControlLogReadProgress] = {}
        self._histories: dict[TopicPartition, bytes] = {}
        self._lock = threading.Lock()

    def load_statuses_of_unchanged_partitions(
        self, hints: Mapping[str, int], max_age_ms: int, now_ms: int
    ) -> dict[TopicPartition, PolledPartitionStatus]:
        """Load the summaries that are still valid from local state, and return the statuses of their partitions. Makes no request.

        A summary is valid if the partition has not changed since the summary was saved, no replaced segments of the partition waited for
        deletion, and no transaction was open.

        :param hints: the present change hint of each partition, by name. A change hint is a number that changes with every change.
        :param max_age_ms: summaries of partitions that were not polled for longer are ignored.
        """
        kept = self._tier.local.cached_summaries_by_partition_name() if self._tier.local else {}
        found: dict[TopicPartition, PolledPartitionStatus] = {}
        for text, (seen, summary) in kept.items():
            fresh = text in hints and is_cached_summary_fresh(seen, summary, hints[text], now_ms, max_age_ms)
            if (
                fresh
                and not summary.waiting
                and not summary.model_copy().has_open_transaction
                and self._tier.min_last_record_number_of_control_log(summary.topic_partition) <= seen.slot
            ):  # the times of waiting groups and the producers of transactions have to be read from the store
                self._known[summary.topic_partition] = CachedPartitionSummary(summary, seen, {})
                found[summary.topic_partition] = PolledPartitionStatus(
                    self._compute_status(summary.topic_partition, now_ms), seen.checked_ms
                )
        return found

    def use_settings_of_tier(self, tier: Tier) -> None:
        """Compute statuses with the settings of ``tier`` from now on."""
        self._tier = tier

    def forget_partition(self, partition: TopicPartition) -> None:
        """Remove a partition's cached summary and history, because its topic was deleted and created again."""
        self._known.pop(partition, None)
        self._histories.pop(partition, None)

    def recompute_status(self, partition: TopicPartition, now_ms: int) -> PartitionStatus | None:
        """Compute a partition's status from its cached summary, under the present settings; None if there is no summary.

        Makes no request.
        """
        return self._compute_status(partition, now_ms) if partition in self._known else None

    def poll_partition(self, partition: TopicPartition, hint: int, last_status: PartitionStatus | None, now_ms: int) -> PartitionStatus:
        """Return the partition's present status, after reading the new records of its control log. Takes two requests if nothing was
        written since ``last_status``.

        :param hint: the latest change hint of the partition: a number that changes with every change.
        :param last_status: the status after the previous poll; None if there is none.
        :raises StoreError: if the store fails.
        :raises BadControlRecord: if the control log is corrupt.
        """
        known = self._known.get(partition)
        if last_status is not None and known is not None and not self._may_partition_log_have_changed(known, hint):
            self._record_unchanged_partition(known, hint, now_ms)
            return last_status if now_ms < last_status.wake_ms else self._compute_status(partition, now_ms)
        log = self._tier.open_control_log_of_partition(partition)
        log.refresh()
        self.cache_summary_of_log(log, hint, now_ms)
        return self._compute_status(partition, now_ms)

    def cache_summary_of_log(self, log: PartitionLog, hint: int, now_ms: int) -> PartitionStatus:
        """Cache the summary of a control log that was just read, and return the partition's status."""
        self._tier.change_notifier.cache_control_log_state_locally(log, hint)
        # One request for each slot whose time the log does not hold.
        slot_times_ms = (
            read_grace_start_ms_by_control_log_slot(self._tier.ports, log) if log.state.waiting or log.state.registrations else {}
        )
        mark = log.state_identity()
        position = ControlLogReadProgress(slot=log.state.slot, hint=hint, checked_ms=now_ms, mark=mark) if mark else None
        self._histories[log.state.topic_partition] = serialize_history(partition_history(log.state))
        visible = self._tier.state_with_segments_readers_see(log.state)
        self._known[log.state.topic_partition] = CachedPartitionSummary(
            summarize_state(visible), position, slot_times_ms, read_open_transaction(self._tier, visible)
        )
        return self._compute_status(log.state.topic_partition, now_ms)

    def live_segments(self, partition: TopicPartition) -> tuple[SegmentSummary, ...]:
        """Return the partition's live segments as of the last poll; empty if the partition was not polled yet. Makes no request.
        Thread-safe.
        """
        known = self._known.get(partition)
        return known.summary.model_copy().live if known else ()

    def cached_history(self, partition: TopicPartition) -> PartitionHistory | None:
        """Return the partition's history (rounds, epochs) as of the last poll, or None if only a summary is cached.

        Makes no request. Thread-safe.
        """
        if partition not in self._histories and self._tier.local is not None and self._tier.local.is_bound_to_tier:
            kept = self._tier.local.cached_partition_state(partition)
            if kept is not None:
                self._histories.setdefault(partition, serialize_history(partition_history(kept[0])))
        data = self._histories.get(partition)
        return deserialize_history(data) if data is not None else None

    def save_poll_times_of_unchanged_partitions(self) -> None:
        """Save to local state which partitions had no new records at their last poll, and when they were polled. After a restart, the
        daemon uses the cached summaries of these partitions without polling them, unless the change feed reports a change.
        """
        with self._lock:
            confirmed, self._confirmed = self._confirmed, {}
        if self._tier.local and confirmed:
            self._tier.local.save_control_log_read_progress(confirmed)

    def _may_partition_log_have_changed(self, cached: CachedPartitionSummary, hint: int) -> bool:
        """Return whether the partition's log may have changed since its summary was made.

        Asks the store whether the log has new records. On broker-managed tiers a new change hint is enough, without a request.

        :param hint: the latest change hint of the partition: a number that changes with every change.
        """
        tier, name = self._tier, cached.summary.topic_partition
        if cached.position is None or (not tier.kind.is_content_determined_by_control_logs and cached.position.hint != hint):
            return True
        log = open_control_log_of_partition(
            tier.ports, name, tier.min_last_record_number_of_control_log(name), control_log_name=tier.control_log_name(name)
        )
        return log.has_changed_since(cached.position.slot, cached.position.mark)

    def _record_unchanged_partition(self, cached: CachedPartitionSummary, hint: int, now_ms: int) -> None:
        """Remember that a poll at ``now_ms`` found no new records of the partition. ``save_poll_times_of_unchanged_partitions`` later
        writes this to local state.
        """
        if cached.position is not None:
            with self._lock:
                self._confirmed[cached.summary.topic_partition] = cached.position.model_copy(update={"hint": hint, "checked_ms": now_ms})

    def _compute_status(self, partition: TopicPartition, now_ms: int) -> PartitionStatus:
        """Return the partition's status under the present settings, from its cached summary."""
        known = self._known[partition]
        # A copy, because a summary caches its decoded segments: 200,000 of them in a large tier.
        return partition_status(
            known.summary.model_copy(),
            self._tier.cleaner_settings_for_topic(partition.topic),
            self._tier.retention,
            known.slot_times_ms,
            now_ms,
            transaction=known.transaction,
            bootstrap_servers=known_bootstrap_servers(self._tier),
        )
