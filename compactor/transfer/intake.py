"""Order of steps by which segments enter the tier: ids registered < objects created < sources checked again < segments tiered.

An interrupted import is resumed: its id is derived from what it brings, and the ids of its segments are in the control log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from checkpoint.lineage import Lineage
from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.control.importing import (
    find_closed_import,
    record_prepended_segments,
    record_tail_truncation,
    record_tiered_segments,
    register_import,
)
from compactor.control.logs import PartitionLog
from compactor.control.ports import EnvironmentPorts
from compactor.control.records import LastImportedBatch, TailTruncated
from compactor.control.state import PartitionState
from compactor.errors import StoreError
from compactor.model.ids import encode_segment_id
from compactor.model.segment import RemoteLogSegmentMetadata

MOST_ATTEMPTS = 1000


class IncomingSegment(Protocol):
    """A segment that an import adds to the tier: its content, its upload, and the check that its source is unchanged."""

    @property
    def content_identity(self) -> str:
        """Return a text that identifies the segment's content: equal for two segments if and only if their offsets and bytes are equal."""

    def upload_under_id(self, segment_id: str) -> RemoteLogSegmentMetadata | None:
        """Create the segment's objects under this id and return the segment's metadata; None if objects with other content have the id
        already.
        """

    def check_source_unchanged(self) -> None:
        """Raise BadData if the source has changed since ``upload_under_id`` read it."""


@dataclass(frozen=True)
class SegmentAddition:
    """Data that is recorded together with new segments, and callbacks for adding them.

    tail: the last batches of the segments, by which the next import recognises the log.
    before: whether the segments are added before the log's start rather than at its end.
    at_once: number of segments uploaded at the same time.
    topic_id: id of the broker's topic; empty if unknown.
    fits: called with the tier's state when the import is registered; raises an error if the segments do not continue that state.
    listed: called before anything is created, so that the catalog lists the partition and a sweep finds what a killed import leaves behind.
    noted: called when the control log has a new record.
    log_start: log start offset of an incoming log, for the first segments of a partition; 0 if the log begins with them.
    source_cleaned_to: the offset up to which a log cleaner had compacted the log; 0 if it shows no sign of one.
    accept_loss: a person has accepted that tombstones and transaction markers are missing after the tier's end.
    cut: record of the truncation, if the segments replace the tier's end; None to append them. A segment that begins before the cut is the
        rest of the segment that was cut.
    """

    lineage: Lineage
    tail: tuple[LastImportedBatch, ...] = ()
    before: bool = False
    at_once: int = 1
    topic_id: TopicId = EMPTY_TOPIC_ID
    fits: Callable[[PartitionState], None] = lambda state: None
    listed: Callable[[], None] = lambda: None
    noted: Callable[[], None] = lambda: None
    log_start: int = 0
    source_cleaned_to: int = 0
    accept_loss: bool = False
    cut: TailTruncated | None = None


def add_segments_to_tier_unless_present(
    ports: EnvironmentPorts, log: PartitionLog, incoming: Sequence[IncomingSegment], addition: SegmentAddition
) -> bool:
    """Add segments to the tier: all of them become readable, or none.

    :return: True if this call added them; False if the same import was complete already, also if another process has completed it
        meanwhile.
    :raises BadData: if a source changed meanwhile, or the segments no longer fit the tier because another process has changed it.
    :raises Fenced: if the import was voided because it paused too long.
    :raises StoreError: if the store fails. The next attempt finds created objects again, or a sweep deletes them.
    """
    for import_id in _import_ids_by_attempt(incoming, addition.cut):
        if find_closed_import(log.state, import_id) is None and _try_import_under_import_id(ports, log, import_id, incoming, addition):
            return True
        closed = find_closed_import(log.state, import_id)
        if closed is not None and not closed.voided and closed.tiered_end <= log.state.end_offset:
            return False
    raise StoreError("this import was voided too often", hint="See why with `explain`, or raise publish.orphan_age_ms")


def _try_import_under_import_id(
    ports: EnvironmentPorts, log: PartitionLog, import_id: str, incoming: Sequence[IncomingSegment], addition: SegmentAddition
) -> bool:
    """Try to add the segments under one import id.

    Return True if they are added; False if the id is closed, or an attempt with other settings left other objects. The caller then tries
    again with new ids.
    """
    segments: list[RemoteLogSegmentMetadata] | None = []
    if incoming:
        state = register_import(ports, log, import_id, [ports.new_id() for _ in incoming], addition.fits)
        addition.listed()
        entry = state.registrations.get(import_id)
        if entry is None or len(entry.ids) != len(incoming):
            return False
        segments = _upload_segments(incoming, entry.ids, addition.at_once)
    if segments is None:
        return False
    if addition.cut is not None:
        record_tail_truncation(ports, log, _complete_truncation_record(addition.cut, import_id, segments, addition))
    elif addition.before:
        record_prepended_segments(ports, log, import_id, segments, addition.lineage, addition.topic_id)
    else:
        start = min(addition.log_start, segments[-1].end_offset + 1)
        log_start = start if start > segments[0].start_offset else None
        record_tiered_segments(
            ports,
            log,
            import_id,
            segments,
            addition.lineage,
            addition.tail,
            addition.topic_id,
            log_start,
            addition.source_cleaned_to,
            addition.accept_loss,
        )
    addition.noted()
    return True


def _complete_truncation_record(
    truncation: TailTruncated, cut_id: str, segments: Sequence[RemoteLogSegmentMetadata], addition: SegmentAddition
) -> TailTruncated:
    """Return ``truncation``, the record that cuts the tier's end, completed with the segments that it adds. ``cut_id``: the import's id."""
    head = segments[0] if segments and segments[0].start_offset < truncation.offset else None
    new = tuple(segments if head is None else segments[1:])
    known = {"lineage": addition.lineage, "tail": addition.tail, "topic_id": addition.topic_id}
    return truncation.model_copy(update={"cut_id": cut_id, "head": head, "segments": new, **known})


def _upload_segments(incoming: Sequence[IncomingSegment], ids: Sequence[str], max_parallel: int) -> list[RemoteLogSegmentMetadata] | None:
    """Upload segments under these ids and return their metadata, in order; None if objects with other content have one of the ids. After an
    error no further upload is begun.
    """

    def upload_one(segment: IncomingSegment, segment_id: str) -> RemoteLogSegmentMetadata | None:
        metadata = segment.upload_under_id(segment_id)
        if metadata is not None:
            require_source_unchanged(segment)
        return metadata

    found = []
    for metadata in _upload_and_yield_in_order(upload_one, incoming, ids, max_parallel):
        if metadata is None:
            return None
        found.append(metadata)
    return found


def _upload_and_yield_in_order(
    upload: Callable[[IncomingSegment, str], RemoteLogSegmentMetadata | None],
    incoming: Sequence[IncomingSegment],
    ids: Sequence[str],
    max_parallel: int,
) -> Iterator[RemoteLogSegmentMetadata | None]:
    """Upload segments, ``max_parallel`` at a time, and yield the result of ``upload`` for each one, in order. A single segment is uploaded
    in the caller's thread.
    """
    if min(max_parallel, len(incoming)) < 2:
        yield from map(upload, incoming, ids)
        return
    pool = ThreadPoolExecutor(max_parallel, "upload")
    try:
        yield from pool.map(upload, incoming, ids)
    finally:
        pool.shutdown(cancel_futures=True)


def require_source_unchanged(segment: IncomingSegment) -> None:
    """Check after the upload that a segment's source is unchanged. Raises BadData otherwise, because then the created objects must not
    become readable.
    """
    segment.check_source_unchanged()


def _import_ids_by_attempt(incoming: Sequence[IncomingSegment], truncation: TailTruncated | None) -> Iterator[str]:
    """Yield the ids of the first, second, ...

    attempt at one import. They are derived from the offsets, the bytes and the segments that the import replaces.
    """
    replaced = () if truncation is None else (f"cut {truncation.offset}", *truncation.voided)
    identity = "\n".join([*replaced, *(one.content_identity for one in incoming)]).encode()
    for attempt in range(MOST_ATTEMPTS):
        yield encode_segment_id(hashlib.sha256(identity + attempt.to_bytes(4, "big")).digest()[:16])
