"""Health of tiered partitions: uploads and deletions that do not end, segments that are never tiered, leaked and lost objects.

Pure decisions over facts of one partition. They hold for every cluster with KIP-405, compacted or not; ``doctor`` collects the facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from compactor.brokers.metadata_topic.admin import topic_settings_command
from compactor.brokers.metadata_topic.codec import RemoteLogSegmentMetadataRecord
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.segment import SegmentState
from compactor.upkeep.brokers.known_problems import TierHealthFinding, copy_lag
from compactor.views.prices import PriceTable
from compactor.views.time_formats import count_noun, format_duration, format_size

SLACK_MS = 3_600_000
"""Time that brokers may need for an upload or a deletion after it is due."""
_FEW = 3


@dataclass(frozen=True)
class FirstUntieredRecord:
    """The first record of a log that is not tiered yet.

    closed_ms: time, in milliseconds, by which brokers had closed the record's segment: the timestamp of the first later record that, by
        segment.ms, belongs to another segment. None if there is no such record, since brokers close a segment only when they append.
    """

    offset: int
    timestamp_ms: int
    closed_ms: int | None = None


@dataclass(frozen=True)
class PartitionHealthFacts:
    """Answers of brokers and store about one partition.

    segments: segments that the metadata topic names, in all states.
    settings: settings of the topic.
    pending: the first record that is not tiered. None if everything is tiered, or if the record is not known because of ``lookup_problem``.
    lookup_problem: the leader's error message if it cannot find a record by its time; empty otherwise.
    missing: objects of readable segments that the store does not have.
    gaps: ranges of offsets (both inclusive) that no readable segment contains.
    orphans, orphan_bytes: number and size of objects that no metadata names and that are too old to belong to a running upload.
    end_hole: first and last offset, both inclusive, that the newest tiered segment lacks at its end; None if it lacks none.
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
    """Return the segment with the highest end offset among those that readers can use, or None if there is none."""
    finished = [one for one in segments if one.state is SegmentState.COPY_SEGMENT_FINISHED]
    return max(finished, key=lambda one: one.end_offset, default=None)


def partition_health_findings(examined: PartitionHealthFacts, now_ms: int, prices: PriceTable) -> list[TierHealthFinding]:
    """Return the findings about the tiered part of a partition. Empty if it has no problem."""
    return [
        *_unfinished_copy_findings(examined, now_ms, prices),
        *_late_upload_findings(examined, now_ms),
        *_failed_timestamp_lookup_findings(examined),
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
) -> TierHealthFinding:
    """Return a finding about a partition.

    :param evidence_consequence_and_action: three texts: the evidence, the consequence for consumers, and the recommended action.
    :param stored_bytes: number of stored bytes concerned.
    :param usd_per_month: price of these bytes.
    """
    detail, means, todo = evidence_consequence_and_action
    return TierHealthFinding(
        severity,
        finding_kind,
        examined.partition.topic,
        examined.partition.partition,
        str(examined.partition),
        detail,
        means,
        todo,
        stored_bytes,
        usd_per_month,
    )


def _unfinished_copy_findings(examined: PartitionHealthFacts, now_ms: int, prices: PriceTable) -> Iterator[TierHealthFinding]:
    """Yield at most one finding: that brokers began to copy segments to the tier long ago and never finished (Aiven#820)."""
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
        yield _finding_about_partition(
            examined, "warning", "copy-abandoned", (detail, means, todo), size, prices.price_of_storage_usd_per_month(size)
        )


def _late_upload_findings(examined: PartitionHealthFacts, now_ms: int) -> Iterator[TierHealthFinding]:
    """Yield at most one finding. It is about records that should have been tiered long ago (Aiven#699), or about copying being switched off
    for the topic.
    """
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


def _failed_timestamp_lookup_findings(examined: PartitionHealthFacts) -> Iterator[TierHealthFinding]:
    """Yield a finding if the leader fails to find records by their time. To find them it reads time indexes in the tier."""
    if examined.lookup_problem:
        words = (
            examined.lookup_problem,
            "consumers that seek by time get errors; whether records wait for their upload is not known",
            "Look for errors of RemoteLogManager's reads in the leader's log; `verify` names objects that are missing or damaged",
        )
        yield _finding_about_partition(examined, "error", "time-lookup", words)


def _overdue_deletion_findings(examined: PartitionHealthFacts, now_ms: int, prices: PriceTable) -> Iterator[TierHealthFinding]:
    """Yield findings for deletions that were begun and not finished, and for segments that retention.ms should have removed."""
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
        yield _finding_about_partition(examined, "warning", "delete-hangs", words, size, prices.price_of_storage_usd_per_month(size))
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
        yield _finding_about_partition(examined, "warning", "delete-overdue", words, size, prices.price_of_storage_usd_per_month(size))


def _join_first_few(texts: Sequence[str]) -> str:
    """Return the first few texts, separated by commas, with an ellipsis if there are more."""
    return ", ".join(texts[:_FEW]) + " ..." * (len(texts) > _FEW)


def _lost_object_findings(examined: PartitionHealthFacts) -> Iterator[TierHealthFinding]:
    """Yield findings for missing objects of readable segments and for offsets that no readable segment holds."""
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


def _end_hole_findings(examined: PartitionHealthFacts) -> Iterator[TierHealthFinding]:
    """Yield a finding if the newest tiered segment lacks its last offsets, as in a topic that brokers compacted before it was tiered."""
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


def _leaked_object_findings(examined: PartitionHealthFacts, prices: PriceTable) -> Iterator[TierHealthFinding]:
    """Yield a finding if the store has objects that no metadata names (orphans)."""
    if examined.orphans:
        usd = prices.price_of_storage_usd_per_month(examined.orphan_bytes)
        words = (
            (
                f"{count_noun(examined.orphans, 'object')} of {format_size(examined.orphan_bytes)} that no metadata names,"
                f" {usd:.2f} USD a month"
            ),
            "no effect on consumers; the objects cost money for ever",
            "`orphans find --to FILE` lists them, `orphans purge FILE` deletes them after you have read the list",
        )
        yield _finding_about_partition(examined, "warning", "leaked", words, examined.orphan_bytes, usd)
