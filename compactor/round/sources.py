"""Segments as sources of the cleaner: batch headers stay in memory, bytes are mapped only while needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from compactor.cleaner.rewrite import NO_BYTES
from compactor.cleaner.source import SourceSegment, open_source_segment, segment_cut_after_offset
from compactor.config.settings import CleanerSettings
from compactor.control.ports import EnvironmentPorts
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound
from compactor.local.budget import DiskBudget, DiskSpaceReservation, spool_folder
from compactor.local.staging import FileToStage, StagingFolder
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import memory_map_file
from compactor.records.indexes import TXN_ENTRY, TxnEntries, parse_txn_index
from compactor.records.producers import ProducerStates, parse_producer_snapshot_file
from compactor.tier.contents import read_verified_file
from compactor.tier.ports import SegmentLayout


def open_live_segment_reader(
    ports: EnvironmentPorts, cleaner: CleanerSettings, state_dir: Path, state: PartitionState, budget: DiskBudget, folder_prefix: str
) -> StagedSegmentReader:
    """The caller must close the reader's ``staging``."""
    return open_reader_of_segments(ports, cleaner, state_dir, state.topic_partition, state.live, budget, folder_prefix)


@contextmanager
def use_and_close_reader(reader: StagedSegmentReader) -> Iterator[StagedSegmentReader]:
    try:
        yield reader
    finally:
        reader.staging.close()


def open_reader_of_segments(
    ports: EnvironmentPorts,
    cleaner: CleanerSettings,
    state_dir: Path,
    partition: TopicPartition,
    segments: Sequence[RemoteLogSegmentMetadata],
    budget: DiskBudget,
    folder_prefix: str,
) -> StagedSegmentReader:
    """Segments may be live or replaced. The caller must close the reader's ``staging``."""
    staging = StagingFolder(
        Path(tempfile.mkdtemp(prefix=f"{folder_prefix}-", dir=spool_folder(state_dir))),
        ports.layout,
        budget,
        sleep=ports.sleep,
        local_log_dirs=[Path(folder) for folder in cleaner.local_log_dirs],
    )
    return StagedSegmentReader(staging, partition, segments, cleaner.max_decompressed_batch_bytes)


def read_end_states(layout: SegmentLayout, state: PartitionState) -> ProducerStates:
    """Raises BadData if the last segment's snapshot is missing or cannot be parsed."""
    return parse_end_snapshot(layout, state, read_end_snapshot(layout, state))


def parse_end_snapshot(layout: SegmentLayout, state: PartitionState, snapshot: bytes) -> ProducerStates:
    """Raises BadData."""
    return (
        parse_producer_snapshot_file(snapshot, layout.object_name(state.topic_partition, state.live[-1], "snapshot"))
        if snapshot
        else ProducerStates.empty_producer_states()
    )


def read_end_snapshot(layout: SegmentLayout, state: PartitionState) -> bytes:
    """Return nothing if the last segment has no producer snapshot. Raises BadData if the snapshot is missing or differs from its digest."""
    if not state.has_segments:
        return b""
    last = state.live[-1]
    try:
        files = layout.segment_files(state.topic_partition, last)
        if "snapshot" not in files:
            return b""
        return read_verified_file(layout, state.topic_partition, last.model_copy(update={"files": dict(files)}), "snapshot")
    except NotFound:
        key = layout.object_name(state.topic_partition, last, "snapshot")
        raise BadData("a producer snapshot is missing in the store", segment=key, hint="Run `verify`; restore the object") from None


class StagedSegmentReader:
    """Reader of a partition's segments by ordinal.

    live: by ordinal.
    inflate_limit: bytes that one batch may inflate to.
    known: small files that were already read, by segment id and kind.
    ranges: (position, length) by ordinal, for segments of which only a part is read.
    """

    def __init__(
        self,
        staging: StagingFolder,
        partition: TopicPartition,
        live_segments: Sequence[RemoteLogSegmentMetadata],
        inflate_limit: int,
        cached_files: Mapping[tuple[str, str], bytes] | None = None,
    ) -> None:
        self.staging = staging
        self.known = cached_files or {}
        self.live = live_segments
        self.inflate_limit = inflate_limit
        self.partition = partition
        self.ranges: dict[int, tuple[tuple[int, int], ...]] = {}

    @contextmanager
    def open_segment(
        self, ordinal: int, reservation: DiskSpaceReservation | None = None, *, include_txn_index: bool = True
    ) -> Iterator[SourceSegment]:
        """Bytes can be read while the block runs. Raises BadData, StoreError, OutOfBudget.

        :param include_txn_index: False if the caller does not need aborted transactions.
        """
        metadata = self.live[ordinal]
        with self.staging.local_copy(self.log_file_to_stage(ordinal), reservation) as path:
            source = open_source_segment(
                ordinal, path, metadata.start_offset, metadata.last_copied_offset + 1, metadata.mtime_ms, -1,
                self.inflate_limit,
                txn_entries=self.read_txn_index(metadata) if include_txn_index else None,
            )  # fmt: skip
            source.name = self.object_key_of_log(ordinal)
            source = segment_cut_after_offset(source, metadata.end_offset) if metadata.has_unread_tail else source
            try:
                yield source
            finally:
                source.buf = NO_BYTES

    @contextmanager
    def memory_map_segment(self, source: SourceSegment, reservation: DiskSpaceReservation | None = None) -> Iterator[None]:
        with self.staging.local_copy(self.log_file_to_stage(source.ordinal), reservation) as path:
            table, buf = source.table, memory_map_file(path)
            # No balance accounts for bytes after the end up to which the segment is read.
            has_unread_tail = self.live[source.ordinal].has_unread_tail
            source.buf = buf[: int(table.position[-1] + table.size[-1]) if len(table) else 0] if has_unread_tail else buf
            try:
                yield
            finally:
                source.buf = NO_BYTES

    def object_key_of_log(self, ordinal: int) -> str:
        return self.object_key(self.live[ordinal], "log")

    def object_key(self, metadata: RemoteLogSegmentMetadata, file_kind: str) -> str:
        return self.staging.layout.object_name(self.partition, metadata, file_kind)

    def log_file_to_stage(self, ordinal: int) -> FileToStage:
        return replace(self.segment_file_to_stage(self.live[ordinal], "log"), ranges=self.ranges.get(ordinal))

    def segment_file_to_stage(self, metadata: RemoteLogSegmentMetadata, file_kind: str) -> FileToStage:
        """A log may also be copied from the broker's directory."""
        local = f"{self.partition}/{metadata.start_offset:020d}.log" if file_kind == "log" else ""
        return FileToStage(self.partition, metadata, file_kind, local)

    def read_small_file(self, metadata: RemoteLogSegmentMetadata, file_kind: str) -> bytes:
        """Raises BadData, StoreError."""
        known = self.known.get((metadata.id, file_kind))
        return known if known is not None else self.staging.fetch_file_into_memory(self.segment_file_to_stage(metadata, file_kind))

    def read_txn_index(self, metadata: RemoteLogSegmentMetadata) -> TxnEntries:
        if "txnindex" not in metadata.files:
            return np.empty(0, TXN_ENTRY)
        return parse_txn_index(self.read_small_file(metadata, "txnindex"), self.object_key(metadata, "txnindex"))
