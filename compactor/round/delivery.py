"""Upload of a finished segment: builds its metadata and creates its objects under the announced id."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compactor.cleaner.passes.describe import (
    earliest_delete_horizon_ms,
    read_earliest_delete_horizon_ms,
    summarize_timestamps_and_record_count,
)
from compactor.cleaner.passes.source import SourceSegment
from compactor.constants import TimestampMs
from compactor.model.balance import CountAndDigestSum
from compactor.model.base import ReasonOrEmpty
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.records.batches import BatchTable
from compactor.records.headers import copy_batch_headers, sha256_of_batch_headers
from compactor.round.partial.rewrite import ComposedSegment
from compactor.storage.port import ComposeSource
from compactor.tier.contents import file_sha256
from compactor.tier.ports import SegmentLayout, SegmentPublisher

LayoutAndPublisher = tuple[SegmentLayout, SegmentPublisher]
"""Layout that stores a segment, and publisher that is informed about it."""
MetadataAndRefusalReason = tuple[RemoteLogSegmentMetadata, ReasonOrEmpty]
"""Metadata of a segment, and the reason why the layout refused the upload."""


@dataclass(frozen=True)
class RewrittenSegment:
    """New segment that is ready for upload.

    table: the batches of the segment.
    log: size and digests of its log.
    contents: file or bytes of each kind of object; the log is missing if the store composes it.
    due_ms: earliest delete horizon in the segment, in milliseconds.
    pieces: ranges of existing objects, and new bytes, from which the store composes the log; empty if the log is uploaded.
    """

    table: BatchTable
    log: SegmentFile
    contents: Mapping[str, Path | bytes]
    due_ms: int
    pieces: Sequence[ComposeSource] = ()

    @staticmethod
    def from_local_files(
        output: SourceSegment, contents_by_kind: Mapping[str, Path | bytes], max_inflated_bytes: int, *, should_record_batch_digests: bool
    ) -> RewrittenSegment:
        """Return a new segment whose files are all on this machine.

        :param output: the segment's log, opened.
        :param contents_by_kind: file or bytes of each kind, the log included.
        :param max_inflated_bytes: bytes that one batch may inflate to.
        :param should_record_batch_digests: whether to record the digest of the batch headers, too.
        """
        log = log_file_size_and_digests(output) if should_record_batch_digests else segment_file_size_and_sha256(contents_by_kind["log"])
        return RewrittenSegment(output.table, log, contents_by_kind, read_earliest_delete_horizon_ms(output, max_inflated_bytes))

    @staticmethod
    def from_composed_pieces(
        composed: ComposedSegment, sources: Sequence[ComposeSource], contents_by_kind: Mapping[str, Path | bytes]
    ) -> RewrittenSegment:
        """Return a new segment whose log the store composes from ranges of existing objects and new bytes.

        :param composed: key directory and batches of the composed log.
        :param sources: the ranges and new bytes, in the order in which the log consists of them.
        :param contents_by_kind: file or bytes of each kind except the log.
        """
        size, due = int(composed.table.size.sum()), earliest_delete_horizon_ms(composed.table, composed.due)
        log = SegmentFile(size=size, batches=sha256_of_batch_headers(composed.directory.headers))
        return RewrittenSegment(composed.table, log, contents_by_kind, due, sources)


def upload_segment(
    destination: LayoutAndPublisher,
    partition: TopicPartition,
    task: CompactionTask,
    segment: RewrittenSegment,
    *,
    open_txn_offset: int,
    sum_of_batches: CountAndDigestSum,
    negative_timestamp_count: int,
    broker_log_start: int,
) -> MetadataAndRefusalReason:
    """Upload a new segment under its announced id, after informing the publisher. Return the segment's metadata, and the reason why the
    layout refused the upload, or an empty string.

    :param destination: layout that stores the segment, and publisher to inform.
    :param open_txn_offset: first offset of the earliest transaction that is open at the segment's end; -1 if there is none.
    :param sum_of_batches: count and digest sum of the segment's batches, for the balance.
    :param negative_timestamp_count: number of records with a negative timestamp that is not -1.
    :param broker_log_start: of the plan. Records below it do not count for the largest timestamp.
    :raises StoreError: if the store fails.
    :raises CannotCopy: if the store cannot compose the log from pieces.
    """
    layout, publisher = destination
    about = summarize_timestamps_and_record_count(segment.table, broker_log_start)
    metadata = RemoteLogSegmentMetadata(
        id=task.new_segment_id,
        start_offset=task.start_offset,
        end_offset=task.end_offset,
        size_bytes=segment.log.size,
        max_timestamp_ms=TimestampMs(about.max_timestamp_ms),
        mtime_ms=task.mtime_ms,
        leader_epochs=task.leader_epochs,
        files={"log": segment.log} | {kind: segment_file_size_and_sha256(data) for kind, data in segment.contents.items() if kind != "log"},
        first_timestamp_ms=about.first_timestamp_ms,
        due_ms=segment.due_ms,
        open_txn_offset=open_txn_offset,
        records=about.records,
        content=sum_of_batches,
        negative_timestamps=negative_timestamp_count,
    )
    reported = layout.custom_metadata(partition, metadata, segment.contents)
    metadata = metadata.model_copy(update={"custom_metadata": reported}) if reported else metadata
    publisher.announce_segment(partition, metadata)
    if segment.pieces:
        return metadata, layout.compose_segment(partition, metadata, segment.pieces, segment.contents)
    return metadata, layout.upload_segment(partition, metadata, segment.contents)


def segment_file_size_and_sha256(content: Path | bytes) -> SegmentFile:
    """Return size and SHA-256 of an object, as segment metadata records them."""
    if isinstance(content, bytes):
        return SegmentFile(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    return SegmentFile(size=content.stat().st_size, sha256=file_sha256(content))


def log_file_size_and_digests(source: SourceSegment) -> SegmentFile:
    """Return size and SHA-256 of a new log, and the digest of its batch headers unless it has batches of v0 or v1.

    :param source: a log whose CRCs are known to be valid.
    """
    sha256 = hashlib.sha256(source.buf.data).hexdigest()
    batches = sha256_of_batch_headers(copy_batch_headers(source.buf, source.table.position)) if (source.table.magic == 2).all() else ""
    return SegmentFile(size=source.size, sha256=sha256, batches=batches)
