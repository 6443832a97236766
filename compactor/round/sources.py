"""The segments of one partition as the cleaner's sources: headers from here, bytes only while they are needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from compactor.cleaner.passes.portraits import NOTHING
from compactor.cleaner.passes.source import SourceSegment, cut_after, open_source
from compactor.config import Cleaner
from compactor.control.ports import Ports
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound
from compactor.local.budget import Budget, Grant
from compactor.local.spool import process_folder
from compactor.local.staging import Staging, Wanted
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import map_file
from compactor.records.indexes import TXN_ENTRY, TxnEntries, parse_txn_index
from compactor.records.producers import ProducerStates, parse_snapshot
from compactor.tier.ports import SegmentLayout
from compactor.tier.recorded import content


def reading_of(ports: Ports, cleaner: Cleaner, state_dir: Path, state: PartitionState, budget: Budget, purpose: str) -> Reading:
    """A partition's live segments, staged in a new folder of this process. Whoever asked for it closes ``staging``."""
    return reading_over(ports, cleaner, state_dir, state.name, state.live, budget, purpose)


@contextmanager
def closing(reading: Reading) -> Iterator[Reading]:
    """Whatever is staged goes when the block ends."""
    try:
        yield reading
    finally:
        reading.staging.close()


def reading_over(
    ports: Ports,
    cleaner: Cleaner,
    state_dir: Path,
    name: TopicPartition,
    segments: Sequence[RemoteLogSegmentMetadata],
    budget: Budget,
    purpose: str,
) -> Reading:
    """The same over any of its segments: replaced ones, too, as long as they are there."""
    staging = Staging(
        Path(tempfile.mkdtemp(prefix=f"{purpose}-", dir=process_folder(state_dir))),
        ports.layout,
        budget,
        sleep=ports.sleep,
        local_log_dirs=[Path(folder) for folder in cleaner.local_log_dirs],
    )
    return Reading(staging, name, segments, cleaner.max_decompressed_batch_bytes)


def producers_at_end(layout: SegmentLayout, state: PartitionState) -> ProducerStates:
    """What the tier knows of the producers at its end, whose transactions what comes there may end.

    Raises BadData where the snapshot of the last segment is missing or cannot be read.
    """
    return parsed_at_end(layout, state, snapshot_at_end(layout, state))


def parsed_at_end(layout: SegmentLayout, state: PartitionState, snapshot: bytes) -> ProducerStates:
    return parse_snapshot(snapshot, layout.where(state.name, state.live[-1], "snapshot")) if snapshot else ProducerStates.none()


def snapshot_at_end(layout: SegmentLayout, state: PartitionState) -> bytes:
    """The last segment's producer snapshot; empty where it has none. Raises BadData where it is missing or not what was recorded."""
    if not state.live:
        return b""
    last = state.live[-1]
    try:
        files = layout.files(state.name, last)
        if "snapshot" not in files:
            return b""
        return content(layout, state.name, last.model_copy(update={"files": dict(files)}), "snapshot")
    except NotFound:
        key = layout.where(state.name, last, "snapshot")
        raise BadData("a producer snapshot is missing in the store", segment=key, hint="Run `verify`; restore the object") from None


class Reading:
    """:param live: the partition's segments; a source's ordinal is its place in here.
    :param known: small files that somebody has read already, by segment id and kind.

    ``ranges``: of the log of segments that are read in part, by ordinal.
    """

    def __init__(
        self,
        staging: Staging,
        partition: TopicPartition,
        live: Sequence[RemoteLogSegmentMetadata],
        inflate_limit: int,
        known: Mapping[tuple[str, str], bytes] | None = None,
    ) -> None:
        self.staging = staging
        self.known = known or {}
        self.live = live
        self.inflate_limit = inflate_limit
        self.partition = partition
        self.ranges: dict[int, tuple[tuple[int, int], ...]] = {}

    @contextmanager
    def opened(self, ordinal: int, grant: Grant | None = None, *, txn_index: bool = True) -> Iterator[SourceSegment]:
        """A segment with its batch headers, and its bytes while the block runs. Raises BadData, StoreError, OutOfBudget.

        :param txn_index: False for one who does not ask what became of its transactions: the index is not fetched.
        """
        metadata = self.live[ordinal]
        with self.staging.opened(self.log(ordinal), grant) as path:
            source = open_source(
                ordinal, path, metadata.start_offset, metadata.copied_end + 1, metadata.mtime_ms, -1, self.inflate_limit,
                txn_entries=self.txn_entries(metadata) if txn_index else None,
            )  # fmt: skip
            source.name = self.name(ordinal)
            source = cut_after(source, metadata.end_offset) if metadata.is_cut else source
            try:
                yield source
            finally:
                source.buf = NOTHING

    @contextmanager
    def mapped(self, source: SourceSegment, grant: Grant | None = None) -> Iterator[None]:
        """The bytes of a source that was opened before, while the block runs."""
        with self.staging.opened(self.log(source.ordinal), grant) as path:
            table, buf = source.table, map_file(path)
            # Nobody accounts for what lies behind the end up to which it is read.
            is_cut = self.live[source.ordinal].is_cut
            source.buf = buf[: int(table.position[-1] + table.size[-1]) if len(table) else 0] if is_cut else buf
            try:
                yield
            finally:
                source.buf = NOTHING

    def name(self, ordinal: int) -> str:
        return self.where(self.live[ordinal], "log")

    def where(self, metadata: RemoteLogSegmentMetadata, kind: str) -> str:
        """The object of one of its files, for messages."""
        return self.staging.layout.where(self.partition, metadata, kind)

    def log(self, ordinal: int) -> Wanted:
        return replace(self.wanted(self.live[ordinal], "log"), ranges=self.ranges.get(ordinal))

    def wanted(self, metadata: RemoteLogSegmentMetadata, kind: str) -> Wanted:
        local = f"{self.partition}/{metadata.start_offset:020d}.log" if kind == "log" else ""
        return Wanted(self.partition, metadata, kind, local)

    def content(self, metadata: RemoteLogSegmentMetadata, kind: str) -> bytes:
        """A small object besides the log. Raises BadData, StoreError."""
        known = self.known.get((metadata.id, kind))
        return known if known is not None else self.staging.content(self.wanted(metadata, kind))

    def txn_entries(self, metadata: RemoteLogSegmentMetadata) -> TxnEntries:
        if "txnindex" not in metadata.files:
            return np.empty(0, TXN_ENTRY)
        return parse_txn_index(self.content(metadata, "txnindex"), self.where(metadata, "txnindex"))
