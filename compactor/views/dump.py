"""Listing of a partition's segments, and of the batches and records of one segment."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from compactor.access.rounds import open_given_reader
from compactor.access.tier import Tier
from compactor.cleaner.retention import find_txn_outcomes
from compactor.cleaner.source import SourceSegment
from compactor.control.mirror import segment_from_broker_record
from compactor.control.state import PartitionState
from compactor.errors import UsageError
from compactor.kernels.common import Flags
from compactor.kernels.memory import read_varint
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from compactor.records import codecs
from compactor.records.batches import ABORT, COMMIT, HORIZON, LOG_APPEND, NOT_CONTROL
from compactor.records.rows import LEGACY, BatchChunk, RecordRowBuffers, RecordRows, parse_records

SHOWN_BYTES = 60
"""Bytes of a key or value after which it is cut."""
SegmentDocument = dict[str, Any]
"""Fields of a JSON object."""


def list_segments(
    state: PartitionState, sidecar_bytes_by_segment_id: Mapping[str, int], rows_of_broker_only_segments: Sequence[SegmentDocument] = ()
) -> list[SegmentDocument]:
    """A row for each segment that is live or still has objects."""
    found = [_segment_row(segment, SegmentState.COPY_SEGMENT_FINISHED) for segment in state.live]
    for waiting in state.waiting:
        found += [_segment_row(s, SegmentState.COPY_SEGMENT_FINISHED, waiting.replaced_by.get(s.id)) for s in waiting.segments]
    found += [_segment_row(segment, SegmentState.DELETE_SEGMENT_STARTED) for segment in state.retiring]
    for receipt in state.intent.receipts if state.intent else ():
        found.append(_segment_row(receipt.segment, SegmentState.COPY_SEGMENT_STARTED))
    found += rows_of_broker_only_segments
    for row in found:
        row["sidecar"] = {"bytes": sidecar_bytes_by_segment_id[row["id"]]} if row["id"] in sidecar_bytes_by_segment_id else None
    return found


def unused_broker_segments(tier: Tier, state: PartitionState) -> list[SegmentDocument]:
    """Unfinished, half-deleted or superseded segments of the brokers' metadata."""
    shown = {segment.id for segment in state.live}
    shown.update(segment.id for group in state.waiting for segment in group.segments)
    shown.update(segment.id for segment in state.retiring)
    return [
        _segment_row(segment_from_broker_record(record), record.state)
        for record in tier.metadata.broker_segment_records(state.topic_partition)
        if record.id not in shown
    ]


def _segment_row(segment: RemoteLogSegmentMetadata, state: SegmentState, replaced_by: str | None = None) -> SegmentDocument:
    return {
        "id": segment.id,
        "state": state.value,
        "start_offset": segment.start_offset,
        "end_offset": segment.end_offset,
        "bytes": segment.size_bytes,
        "leader_epochs": [{"epoch": entry.epoch, "start_offset": entry.start_offset} for entry in segment.leader_epochs],
        "replaced_by": replaced_by,
        "records": segment.records,
        "max_timestamp_ms": segment.max_timestamp_ms,
        "due_ms": segment.due_ms,
    }


def dump_segment(
    tier: Tier, partition: TopicPartition, segment_id: str, max_inflated_bytes: int, *, show_everything: bool = False
) -> SegmentDocument:
    """Keys and values are text if they are printable UTF-8, else ``base64:...``. They are cut after SHOWN_BYTES, unless
    ``show_everything``.

    :param segment_id: the id, or its first characters.
    :raises UsageError: if no segment, or more than one, has an id that begins so.
    :raises BadData: if the segment is damaged, or a decompressed batch is larger than ``max_inflated_bytes``.
    :raises StoreError: if the store fails.
    """
    state = tier.open_partition_log(partition).refresh()
    known = [*state.live, *(segment for waiting in state.waiting for segment in waiting.segments)]
    matching = [segment for segment in known if segment.id.startswith(segment_id)]
    if len(matching) != 1:
        raise UsageError(
            f"{partition} has {len(matching)} segments whose id begins with {segment_id!r}", hint=f"See `segments list {partition}`"
        )
    (segment,) = matching
    with (
        open_given_reader(tier, partition, [segment], "dump") as reading,
        reading.open_segment(0, include_txn_index=False) as source,
    ):
        batches = [
            batch
            for first, last in source.split_by_kind()
            for batch in _batch_documents(source, first, last, max_inflated_bytes, show_everything=show_everything)
        ]
    return {"id": segment.id, "start_offset": segment.start_offset, "end_offset": segment.end_offset, "batches": batches}


def _batch_documents(
    source: SourceSegment, first_batch: int, end_batch: int, max_inflated_bytes: int, *, show_everything: bool
) -> list[SegmentDocument]:
    found = []
    buffers = RecordRowBuffers()
    for chunk in source.read_chunks(first_batch, end_batch, np.ones(end_batch - first_batch, np.bool_), max_inflated_bytes, None):
        rows, first_row = parse_records(source.table, chunk, buffers, source.name)
        mine = [range(int(begin), int(end)) for begin, end in pairwise(first_row)]
        found += [
            _batch_document(source, chunk, batch, rows, some, show_everything=show_everything)
            for batch, some in enumerate(mine, chunk.first)
        ]
    return found


def _batch_document(
    source: SourceSegment, chunk: BatchChunk, batch_number: int, rows: RecordRows, record_row_indexes: range, *, show_everything: bool
) -> SegmentDocument:
    table = source.table
    attributes = int(table.attributes[batch_number])
    control = int(table.control[batch_number])
    return {
        "position": int(table.position[batch_number]),
        "size": int(table.size[batch_number]),
        "magic": int(table.magic[batch_number]),
        "base_offset": int(table.base_offset[batch_number]),
        "last_offset": int(table.last_offset[batch_number]),
        "leader_epoch": int(table.leader_epoch[batch_number]),
        "codec": codecs.CODEC_NAMES[int(table.codec_ids[batch_number])],
        "kind": "data" if control == NOT_CONTROL else {ABORT: "abort", COMMIT: "commit"}.get(control, "control"),
        "transactional": bool(table.transactional_flags[batch_number]),
        "timestamp_type": "LogAppendTime" if attributes & LOG_APPEND else "CreateTime",
        "delete_horizon_ms": int(table.base_timestamp[batch_number]) if attributes & HORIZON else None,
        "max_timestamp": int(table.max_timestamp[batch_number]),
        "producer_id": int(table.producer_id[batch_number]),
        "producer_epoch": int(table.producer_epoch[batch_number]),
        "base_sequence": int(table.base_sequence[batch_number]),
        "records": [
            {
                "offset": int(rows.offset[row]),
                "timestamp": int(rows.timestamp[row]),
                "key": _bytes_as_text(chunk, int(rows.key_start[row]), int(rows.key_length[row]), show_everything=show_everything),
                "value": _bytes_as_text(chunk, int(rows.value_start[row]), int(rows.value_length[row]), show_everything=show_everything),
                "value_bytes": int(rows.value_length[row]),
                **({"headers": list(_record_header_documents(chunk, rows, row))} if show_everything else {}),
            }
            for row in record_row_indexes
        ],
    }


def _record_header_documents(chunk: BatchChunk, rows: RecordRows, row: int) -> Iterator[SegmentDocument]:
    """Headers were validated. Records of magic 0 and 1 have none."""
    if int(rows.flags[row]) & LEGACY:
        return
    end = int(rows.end[row])
    count, at = read_varint(chunk.buf, int(rows.value_start[row]) + max(int(rows.value_length[row]), 0), end)
    for _ in range(count):
        parts = []
        for _ in ("name", "value"):
            length, at = read_varint(chunk.buf, at, end)
            parts.append(_bytes_as_text(chunk, at, length, show_everything=True))
            at += max(length, 0)
        yield {"key": parts[0], "value": parts[1]}


def _bytes_as_text(chunk: BatchChunk, start: int, length: int, *, show_everything: bool) -> str | None:
    """Returns None if ``length`` is negative (null)."""
    if length < 0:
        return None
    shown = length if show_everything else min(length, SHOWN_BYTES)
    data = chunk.buf[start : start + shown].tobytes()
    cut = "..." if length > shown else ""
    try:
        text = data.decode("utf-8", "strict" if not cut else "ignore")
        if text.isprintable():
            return text + cut
    except UnicodeDecodeError:
        pass
    return "base64:" + base64.b64encode(data).decode() + cut


# Search for records, for `explain` and erasure.


_OUTCOMES = {ABORT: "abort", COMMIT: "commit"}


@dataclass(frozen=True)
class FoundRecord:
    """Record found. value_bytes: -1 for a null value.
    horizon_ms: delete horizon of its batch; None if not set yet.
    outcome: empty outside a transaction.
    control: abort, commit or control for a control record, else empty.
    """

    offset: int
    timestamp: int
    key: bytes | None
    value_bytes: int
    segment: RemoteLogSegmentMetadata
    producer_id: int
    horizon_ms: int | None
    outcome: str
    control: str

    @property
    def is_tombstone(self) -> bool:
        return self.value_bytes < 0 and not self.control

    @property
    def sets_value(self) -> bool:
        """True for a record with a key whose transaction, if any, is committed."""
        return not self.control and self.key is not None and self.outcome in ("", "commit")


class RecordSearch:
    """Search in a partition's segments, from the log's end to its beginning.

    A transaction counts as open if the search has not read its marker.
    """

    def __init__(self, tier: Tier, partition: TopicPartition, on_bytes: Callable[[int], None], staging_purpose: str = "explain") -> None:
        self._tier = tier
        self._name = partition
        self._purpose = staging_purpose
        self._limit = tier.cleaner_settings_for_topic(partition.topic).max_decompressed_batch_bytes
        self._on_bytes = on_bytes
        self._known: dict[int, int] = {}

    def find_records(
        self, segments: Sequence[RemoteLogSegmentMetadata], *, key: bytes | None = None, keys: Collection[bytes] = (), offset: int = -1
    ) -> Iterator[FoundRecord]:
        """Records with a key (``key`` and ``keys``) and the record at ``offset`` (-1: none), latest first.

        :param segments: in ascending order.
        :raises NotFound: if an object is gone.
        :raises BadData: if an object differs from what was recorded.
        :raises OutOfBudget: if an object is too large.
        """
        wanted = frozenset(keys) if key is None else frozenset((*keys, key))
        with open_given_reader(self._tier, self._name, segments, self._purpose) as reading:
            for ordinal, segment in reversed(list(enumerate(segments))):
                with reading.open_segment(ordinal, include_txn_index=False) as source:
                    found = list(self._search_segment(source, segment, self._transaction_outcomes(source), wanted, offset))
                yield from reversed(found)
                self._on_bytes(segment.size_bytes)

    def _transaction_outcomes(self, source: SourceSegment) -> dict[int, str]:
        """Commit, abort or open of each transactional data batch."""
        table = source.table
        kinds = find_txn_outcomes(table, self._known)
        data = np.flatnonzero((table.control == NOT_CONTROL) & table.transactional_flags)
        return {batch: _OUTCOMES.get(int(kinds[batch]), "open") for batch in data.tolist()}

    def _search_segment(
        self,
        source: SourceSegment,
        segment: RemoteLogSegmentMetadata,
        outcome_by_batch: dict[int, str],
        keys: frozenset[bytes],
        offset: int,
    ) -> Iterator[FoundRecord]:
        """Yield in log order."""
        table = source.table
        wanted = table.control == NOT_CONTROL if keys else np.zeros(len(table), np.bool_)
        if segment.start_offset <= offset <= segment.end_offset:
            at = int(np.searchsorted(table.last_offset, offset))
            wanted[at : at + 1] = True
        buffers = RecordRowBuffers()
        for first, last in source.split_by_kind():
            if not wanted[first:last].any():
                continue
            for chunk in source.read_chunks(first, last, wanted[first:last], self._limit, None):
                rows, first_row = parse_records(table, chunk, buffers, source.name)
                batch_of = np.repeat(np.arange(chunk.first, chunk.last), np.diff(first_row))
                for row in np.flatnonzero(_flag_rows_with_keys(chunk, rows, keys) | (rows.offset == offset)).tolist():
                    batch = int(batch_of[row])
                    yield _found_record(source, segment, chunk, rows, row, batch, outcome_by_batch.get(batch, ""))


def _flag_rows_with_keys(chunk: BatchChunk, rows: RecordRows, keys: frozenset[bytes]) -> Flags:
    matches = np.zeros(len(rows), np.bool_)
    for length in {len(key) for key in keys}:
        same = np.flatnonzero(rows.key_length == length)
        found = chunk.buf[rows.key_start[same][:, None] + np.arange(length)]
        wanted = [key for key in keys if len(key) == length]
        if len(wanted) == 1:
            matches[same] = np.all(found == np.frombuffer(wanted[0], np.uint8), axis=1)
        else:
            data = found.tobytes()
            matches[same] = [data[at : at + length] in keys for at in range(0, len(data), length)]
    return matches


def _found_record(
    source: SourceSegment,
    segment: RemoteLogSegmentMetadata,
    chunk: BatchChunk,
    rows: RecordRows,
    row_index: int,
    batch_number: int,
    transaction_outcome: str,
) -> FoundRecord:
    table = source.table
    control = int(table.control[batch_number])
    start, length = int(rows.key_start[row_index]), int(rows.key_length[row_index])
    return FoundRecord(
        offset=int(rows.offset[row_index]),
        timestamp=int(rows.timestamp[row_index]),
        key=chunk.buf[start : start + length].tobytes() if length >= 0 else None,
        value_bytes=int(rows.value_length[row_index]),
        segment=segment,
        producer_id=int(table.producer_id[batch_number]),
        horizon_ms=int(table.base_timestamp[batch_number]) if int(table.attributes[batch_number]) & HORIZON else None,
        outcome=transaction_outcome,
        control="" if control == NOT_CONTROL else _OUTCOMES.get(control, "control"),
    )
