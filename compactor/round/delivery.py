"""A finished segment on its way to the tier: what its metadata says, and its objects under the announced id."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compactor.cleaner.passes.describe import content_of, due_as_seen, due_ms
from compactor.cleaner.passes.source import SourceSegment
from compactor.model.balance import Sum
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.records.batches import BatchTable
from compactor.records.headers import digest_of_headers, headers_of
from compactor.round.splicing import PutTogether
from compactor.storage.port import Piece
from compactor.tier.ports import SegmentLayout, SegmentPublisher
from compactor.tier.recorded import digest


@dataclass(frozen=True)
class Made:
    """A new segment but for its place. ``contents``: of its files; ``log``: what its log is put together from, where it is not in there."""

    table: BatchTable
    log: SegmentFile
    contents: Mapping[str, Path | bytes]
    due_ms: int
    pieces: Sequence[Piece] = ()

    @staticmethod
    def whole(output: SourceSegment, contents: Mapping[str, Path | bytes], limit: int, *, digests: bool) -> Made:
        """All of it is on this machine. ``digests``: whether the log's second digest is worth recording (SegmentLayout.keeps_digests)."""
        log = described_log(output) if digests else described(contents["log"])
        return Made(output.table, log, contents, due_ms(output, limit))

    @staticmethod
    def of_pieces(made: PutTogether, pieces: Sequence[Piece], contents: Mapping[str, Path | bytes]) -> Made:
        """``contents``: of what is beside the log."""
        size, due = int(made.table.size.sum()), due_as_seen(made.table, made.due)
        log = SegmentFile(size=size, batches=digest_of_headers(made.directory.headers))
        return Made(made.table, log, contents, due, pieces)


def deliver(
    where: tuple[SegmentLayout, SegmentPublisher],
    name: TopicPartition,
    task: CompactionTask,
    made: Made,
    *,
    open_txn_offset: int,
    content: Sum,
    negative_timestamps: int,
) -> tuple[RemoteLogSegmentMetadata, str]:
    """A new segment under its announced id: introduced first, then uploaded. Its metadata, and what the layout has against it.

    Raises StoreError; CannotCopy, where there are pieces.
    """
    layout, publisher = where
    about = content_of(made.table)
    metadata = RemoteLogSegmentMetadata(
        id=task.new_segment_id,
        start_offset=task.start_offset,
        end_offset=task.end_offset,
        size_bytes=made.log.size,
        max_timestamp_ms=about.max_timestamp_ms,
        mtime_ms=task.mtime_ms,
        leader_epochs=task.leader_epochs,
        files={"log": made.log} | {kind: described(data) for kind, data in made.contents.items() if kind != "log"},
        first_timestamp_ms=about.first_timestamp_ms,
        due_ms=made.due_ms,
        open_txn_offset=open_txn_offset,
        records=about.records,
        content=content,
        negative_timestamps=negative_timestamps,
    )
    told = layout.custom_metadata(name, metadata, made.contents)
    metadata = metadata.model_copy(update={"custom_metadata": told}) if told else metadata
    publisher.begin(name, metadata)
    if made.pieces:
        return metadata, layout.compose(name, metadata, made.pieces, made.contents)
    return metadata, layout.upload(name, metadata, made.contents)


def described(content: Path | bytes) -> SegmentFile:
    """What is recorded of an object."""
    if isinstance(content, bytes):
        return SegmentFile(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    return SegmentFile(size=content.stat().st_size, sha256=digest(content))


def described_log(source: SourceSegment) -> SegmentFile:
    """What is recorded of a new log, whose CRCs all fit: with the digest of its batches' headers, unless there are older messages."""
    sha256 = hashlib.sha256(source.buf.data).hexdigest()
    batches = digest_of_headers(headers_of(source.buf, source.table.position)) if (source.table.magic == 2).all() else ""
    return SegmentFile(size=source.size, sha256=sha256, batches=batches)
