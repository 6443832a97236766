"""Token bucket for the metadata records that compaction rounds write. Pure functions and values.

``[publish] metadata_records_per_hour`` caps the records that compaction adds to ``__remote_log_metadata``, because each broker folds every
record and reads all of them again at every start. A round is admitted if its records fit the cap, together with the records of the last
hour and those that other admitted rounds still have to write. The records of the last hour are counted in the topic itself, so that
restarts and other processes are covered. A round larger than the cap is admitted when nothing else was written within the hour. A round
that does not fit has to wait. As long as it keeps asking, no later round is admitted, so that large rounds do not starve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from compactor.model.ids import TopicPartition
from compactor.tier.ports import MetadataRecordRateLimitDelay

MINUTE_MS = 60_000
MINUTES_PER_HOUR = 60
"""Minutes."""
_HOUR_MS = MINUTES_PER_HOUR * MINUTE_MS
COUNTED_MINUTES = 2 * MINUTES_PER_HOUR
"""Minutes for which records stay counted."""
MAX_SILENCE_MS = 15 * MINUTE_MS
"""A waiting round that has not asked again for so long after its time holds up no other: its partition may be paused."""
MAX_WAITING_MS = 24 * _HOUR_MS
"""A silent round loses its place after this time."""

RecordCountsByMinute = tuple[tuple[int, int], ...]
"""(minute since 1970, records in it), ascending."""


def record_counts_with_timestamps_added(counts: RecordCountsByMinute, timestamps_ms: Iterable[int], now_ms: int) -> RecordCountsByMinute:
    """Return the record counts by minute after adding one record for each timestamp. A timestamp later than ``now_ms`` counts as now,
    because it comes from the writer's clock.
    """
    now = now_ms // MINUTE_MS
    found = Counter(dict(counts))
    found.update(min(stamp // MINUTE_MS, now) for stamp in timestamps_ms)
    return tuple(sorted((minute, count) for minute, count in found.items() if minute > now - COUNTED_MINUTES))


def record_counts_of_last_hour(by_minute: Mapping[int, int], now_ms: int) -> dict[int, int]:
    """Return the record counts of the last hour by minute since 1970, ascending. Minutes up to one hour in the future are included, in case
    a clock was set back.
    """
    now = now_ms // MINUTE_MS
    return {minute: by_minute[minute] for minute in sorted(by_minute) if now - MINUTES_PER_HOUR < minute < now + MINUTES_PER_HOUR}


@dataclass(frozen=True)
class MetadataRecordReservation:
    """Reservation of metadata records that a partition still has to write. It ends an hour after ``counted_ms``, because another process
    may have taken over the round.

    round: number of records of the round, including those that begin the deletion of the replaced segments.
    deletions: number of records that report the end of deletions, for this round and earlier ones.
    counted_ms: when the reservation was made or changed last, in milliseconds.
    """

    round: int
    deletions: int
    counted_ms: int


@dataclass(frozen=True)
class RoundAwaitingAdmission:
    """A round that was not admitted yet.

    records: the largest number of metadata records that it has asked for.
    retry_at_ms: when it should ask again, in milliseconds.
    """

    records: int
    retry_at_ms: int


@dataclass(frozen=True)
class MetadataTokenBucket:
    """Token bucket that limits how many metadata records rounds write per hour. Holds the reservations of admitted rounds and the waiting
    rounds in order of arrival, both by partition. Immutable.
    """

    reserved: Mapping[TopicPartition, MetadataRecordReservation] = field(default_factory=dict)
    waiting: Mapping[TopicPartition, RoundAwaitingAdmission] = field(default_factory=dict)

    def bucket_after_admission_or_delay(
        self, written_by_minute: Mapping[int, int], partition: TopicPartition, record_count: int, max_records_per_hour: int, now_ms: int
    ) -> tuple[MetadataTokenBucket, MetadataRecordRateLimitDelay | None]:
        """Admit a round, or determine until when and why it has to wait. An admitted round may ask again for more records.

        :param written_by_minute: number of records that compactors wrote, by minute since 1970.
        :param record_count: number of records that the round will write.
        :param max_records_per_hour: the limit.
        :return: the new bucket, and the wait; None in place of the wait if the round is admitted.
        """
        reserved = {of: one for of, one in self.reserved.items() if now_ms < one.counted_ms + _HOUR_MS}
        waiting = {of: one for of, one in self.waiting.items() if now_ms < one.retry_at_ms + MAX_WAITING_MS}
        mine = reserved.get(partition, MetadataRecordReservation(0, 0, now_ms))
        wanted = max(record_count, waiting[partition].records) if partition in waiting else record_count
        used = record_counts_of_last_hour(written_by_minute, now_ms)
        others = sum(one.round + one.deletions for one in reserved.values()) - mine.round
        total = sum(used.values()) + others
        first = next((of for of, one in waiting.items() if of == partition or now_ms <= one.retry_at_ms + MAX_SILENCE_MS), partition)
        is_next = first == partition or mine.round > 0
        if is_next and (not total or total + wanted <= max_records_per_hour):
            waiting.pop(partition, None)
            return MetadataTokenBucket(reserved | {partition: replace(mine, round=wanted, counted_ms=now_ms)}, waiting), None
        until = _earliest_round_admission_time_ms(used, wanted, max_records_per_hour) if is_next else waiting[first].retry_at_ms
        waiting[partition] = RoundAwaitingAdmission(wanted, max(until, now_ms + MINUTE_MS))
        return MetadataTokenBucket(reserved, waiting)._bucket_keeping_only_deletion_records(partition), MetadataRecordRateLimitDelay(
            waiting[partition].retry_at_ms, wanted
        )

    def bucket_after_append(
        self, partition: TopicPartition, round_record_count: int, deletion_record_count: int, now_ms: int
    ) -> MetadataTokenBucket:
        """Return the bucket after a round has appended records. They are no longer reserved, because they are now counted in the topic.

        :param round_record_count: number of appended records of the round itself.
        :param deletion_record_count: number of appended records that report deletions.
        """
        return self._bucket_with_changed_reservation(partition, -round_record_count, -deletion_record_count, now_ms)

    def bucket_after_publication(self, partition: TopicPartition, deletion_record_count: int, now_ms: int) -> MetadataTokenBucket:
        """Return the bucket after a publication. It releases the records reserved for the partition's round, and reserves
        ``deletion_record_count`` records, which report the deletion of the replaced segments after the grace period (the time for which
        these remain).
        """
        known = self.reserved.get(partition)
        return self if known is None else self._bucket_with_changed_reservation(partition, -known.round, deletion_record_count, now_ms)

    def bucket_after_round_ended(self, partition: TopicPartition) -> MetadataTokenBucket:
        """Return the bucket after the round of a partition has ended or is no longer due. Of its reserved tokens, only those for
        the records that report deletions stay reserved.
        """
        return replace(
            self, waiting={of: one for of, one in self.waiting.items() if of != partition}
        )._bucket_keeping_only_deletion_records(partition)

    def _bucket_with_changed_reservation(
        self, partition: TopicPartition, records_change: int, deletions_change: int, now_ms: int
    ) -> MetadataTokenBucket:
        """Return the bucket after changing the numbers of records that a partition has reserved. A partition without a reservation gets
        none.

        :param records_change: change of the number of records of the round; may be negative.
        :param deletions_change: change of the number of records that report deletions; may be negative.
        """
        known = self.reserved.get(partition)
        if known is None:
            return self
        more = MetadataRecordReservation(max(0, known.round + records_change), max(0, known.deletions + deletions_change), now_ms)
        return replace(self, reserved={**self.reserved, partition: more})

    def _bucket_keeping_only_deletion_records(self, partition: TopicPartition) -> MetadataTokenBucket:
        """Return the bucket in which a partition's reservation contains only the records that report deletions."""
        left = {of: replace(one, round=0) if of == partition else one for of, one in self.reserved.items()}
        return replace(self, reserved={of: one for of, one in left.items() if one.round or one.deletions})


def _earliest_round_admission_time_ms(records_by_minute: Mapping[int, int], record_count: int, max_records_per_hour: int) -> int:
    """Return when a round of ``record_count`` records will fit the cap because older records have left the last hour, in milliseconds; 0 if
    it fits now.
    """
    left, at = sum(records_by_minute.values()), 0
    for minute, count in records_by_minute.items():
        if not left or left + record_count <= max_records_per_hour:
            break
        left -= count
        at = (minute + MINUTES_PER_HOUR) * MINUTE_MS
    return at
