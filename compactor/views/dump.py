"""Listing of a partition's segments, and of the batches and records of one segment, as documents for people and JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from compactor.access.rounds import open_reader_of_given_segments
from compactor.access.tier import Tier
from compactor.cleaner.passes.source import SourceSegment
from compactor.control.mirror import segment_from_broker_record
from compactor.control.state import PartitionState
from compactor.errors import UsageError
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
    """Return a row for each live segment, and for each other segment that still has objects: replaced ones, half-deleted ones, and those
    that an open round has uploaded.

    :param sidecar_bytes_by_segment_id: size in bytes of each stored sidecar (file with a segment's Bloom filter).
    :param rows_of_broker_only_segments: further rows, for segments that are only in the brokers' metadata.
    """
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


def rows_of_broker_segments_unused_by_readers(tier: Tier, state: PartitionState) -> list[SegmentDocument]:
    """Return a row for each segment that is in the brokers' metadata and, according to ``state``, neither live, replaced nor being deleted.
    Readers
    do not use these: they are unfinished, half-deleted or superseded.
    """
    shown = {segment.id for segment in state.live}
    shown.update(segment.id for group in state.waiting for segment in group.segments)
    shown.update(segment.id for segment in state.retiring)
    return [
        _segment_row(segment_from_broker_record(record), record.state)
        for record in tier.metadata.segment_metadata_records_of_brokers(state.topic_partition)
        if record.id not in shown
    ]


def _segment_row(segment: RemoteLogSegmentMetadata, state: SegmentState, replaced_by: str | None = None) -> SegmentDocument:
    """Return a segment's row in the list of segments. ``replaced_by``: id of the segment that replaced it; None if none did."""
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
    """Return the batches and records of one segment as a document.

    Keys and values are text if they are printable UTF-8, else ``base64:...``. They are cut after SHOWN_BYTES.

    :param segment_id: the id, or its first characters.
    :param max_inflated_bytes: largest size of a decompressed batch, in bytes.
    :param show_everything: cut nothing, and include headers.
    :raises UsageError: if no segment, or more than one, has an id that begins so.
    :raises BadData: if the segment is damaged, or a decompressed batch is larger than ``max_inflated_bytes``.
    :raises StoreError: if the store fails.
    """
    state = tier.open_control_log_of_partition(partition).refresh()
    known = [*state.live, *(segment for waiting in state.waiting for segment in waiting.segments)]
    matching = [segment for segment in known if segment.id.startswith(segment_id)]
    if len(matching) != 1:
        raise UsageError(
            f"{partition} has {len(matching)} segments whose id begins with {segment_id!r}", hint=f"See `segments list {partition}`"
        )
    (segment,) = matching
    with (
        open_reader_of_given_segments(tier, partition, [segment], "dump") as reading,
        reading.open_segment(0, include_txn_index=False) as source,
    ):
        batches = [
            batch
            for first, last in source.split_batches_by_magic_and_compression()
            for batch in _batch_documents(source, first, last, max_inflated_bytes, show_everything=show_everything)
        ]
    return {"id": segment.id, "start_offset": segment.start_offset, "end_offset": segment.end_offset, "batches": batches}


def _batch_documents(
    source: SourceSegment, first_batch: int, end_batch: int, max_inflated_bytes: int, *, show_everything: bool
) -> list[SegmentDocument]:
    """Return the batches with numbers from ``first_batch`` to ``end_batch``, exclusive, each with its records. The other parameters are
    those of ``dump_segment``.
    """
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
    """Return one batch with its records as a document.

    :param batch_number: number of the batch in the segment.
    :param rows: parsed records of the chunk.
    :param record_row_indexes: indexes in ``rows`` of the batch's records.
    """
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
                "key": _chunk_bytes_as_text_or_base64(
                    chunk, int(rows.key_start[row]), int(rows.key_length[row]), show_everything=show_everything
                ),
                "value": _chunk_bytes_as_text_or_base64(
                    chunk, int(rows.value_start[row]), int(rows.value_length[row]), show_everything=show_everything
                ),
                "value_bytes": int(rows.value_length[row]),
                **({"headers": list(_record_header_documents(chunk, rows, row))} if show_everything else {}),
            }
            for row in record_row_indexes
        ],
    }


def _record_header_documents(chunk: BatchChunk, rows: RecordRows, row: int) -> Iterator[SegmentDocument]:
    """Yield a record's headers, which ``parse_records`` has validated. Records of magic 0 and 1 have none."""
    if int(rows.flags[row]) & LEGACY:
        return
    end = int(rows.end[row])
    count, at = read_varint(chunk.buf, int(rows.value_start[row]) + max(int(rows.value_length[row]), 0), end)
    for _ in range(count):
        parts = []
        for _ in ("name", "value"):
            length, at = read_varint(chunk.buf, at, end)
            parts.append(_chunk_bytes_as_text_or_base64(chunk, at, length, show_everything=True))
            at += max(length, 0)
        yield {"key": parts[0], "value": parts[1]}


def _chunk_bytes_as_text_or_base64(chunk: BatchChunk, start: int, length: int, *, show_everything: bool) -> str | None:
    """Return ``length`` bytes of a chunk as text if they are printable UTF-8, else as ``base64:...``; None if ``length`` is negative
    (null).

    Bytes after the first SHOWN_BYTES are left out, unless ``show_everything``.
    """
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
