"""Reading for people: the segments of a partition, and the batches and records of one."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from compactor.bootstrap import Tier
from compactor.cleaner.passes.source import SourceSegment
from compactor.control.mirror import described
from compactor.control.state import PartitionState
from compactor.errors import UsageError
from compactor.kernels.memory import read_varint
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from compactor.records import codecs
from compactor.records.batches import ABORT, COMMIT, HORIZON, LOG_APPEND, NOT_CONTROL
from compactor.records.rows import LEGACY, Chunk, RowBuffers, Rows, parse

SHOWN_BYTES = 60


def list_segments(state: PartitionState, sidecars: Mapping[str, int], others: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Live segments and those that still have objects: replaced ones, half-deleted ones, ids of an open round or import.

    ``sidecars``: bytes by segment id. ``others``: more rows, of segments that brokers know.
    """
    found = [_row(segment, SegmentState.COPY_SEGMENT_FINISHED) for segment in state.live]
    for waiting in state.waiting:
        found += [_row(s, SegmentState.COPY_SEGMENT_FINISHED, waiting.replaced_by.get(s.id)) for s in waiting.segments]
    found += [_row(segment, SegmentState.DELETE_SEGMENT_STARTED) for segment in state.retiring]
    for receipt in state.intent.receipts if state.intent else ():
        found.append(_row(receipt.segment, SegmentState.COPY_SEGMENT_STARTED))
    found += others
    for row in found:
        row["sidecar"] = {"bytes": sidecars[row["id"]]} if row["id"] in sidecars else None
    return found


def segments_of_brokers(opened: Tier, state: PartitionState) -> list[dict[str, Any]]:
    """Those that metadata names and nobody reads: unfinished ones, half-deleted ones, and such that others have taken the place of."""
    if opened.brokers is None:
        return []
    shown = {segment.id for segment in state.live}
    shown.update(segment.id for group in state.waiting for segment in group.segments)
    shown.update(segment.id for segment in state.retiring)
    known = opened.brokers.folded(state.name).cache.list_all()
    return [_row(described(record), record.state) for record in known if record.id not in shown]


def _row(segment: RemoteLogSegmentMetadata, state: SegmentState, replaced_by: str | None = None) -> dict[str, Any]:
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


def dump_segment(opened: Tier, name: TopicPartition, segment_id: str, inflate_limit: int, *, whole: bool = False) -> dict[str, Any]:
    """Batches and records of one segment. Keys and values as text where they are UTF-8, else ``base64:...``; long ones are cut.

    ``whole``: nothing is cut, and headers are there.

    Raises UsageError for an unknown or ambiguous id, BadData, StoreError.
    """
    state = opened.open(name).refresh()
    known = [*state.live, *(segment for waiting in state.waiting for segment in waiting.segments)]
    matching = [segment for segment in known if segment.id.startswith(segment_id)]
    if len(matching) != 1:
        raise UsageError(f"{name} has {len(matching)} segments whose id begins with {segment_id!r}", hint=f"See `segments list {name}`")
    (segment,) = matching
    with opened.opening(name, [segment], "dump") as reading, reading.opened(0, txn_index=False) as source:
        batches = [batch for first, last in source.ranges() for batch in _batches(source, first, last, inflate_limit, whole=whole)]
    return {"id": segment.id, "start_offset": segment.start_offset, "end_offset": segment.end_offset, "batches": batches}


def _batches(source: SourceSegment, first: int, last: int, limit: int, *, whole: bool) -> list[dict[str, Any]]:
    found = []
    buffers = RowBuffers()
    for chunk in source.chunks(first, last, np.ones(last - first, np.bool_), limit, None):
        rows, first_row = parse(source.table, chunk, buffers, source.name)
        mine = [range(int(begin), int(end)) for begin, end in pairwise(first_row)]
        found += [_batch(source, chunk, batch, rows, some, whole=whole) for batch, some in enumerate(mine, chunk.first)]
    return found


def _batch(source: SourceSegment, chunk: Chunk, batch: int, rows: Rows, mine: range, *, whole: bool) -> dict[str, Any]:
    table = source.table
    attributes = int(table.attributes[batch])
    control = int(table.control[batch])
    return {
        "position": int(table.position[batch]),
        "size": int(table.size[batch]),
        "magic": int(table.magic[batch]),
        "base_offset": int(table.base_offset[batch]),
        "last_offset": int(table.last_offset[batch]),
        "leader_epoch": int(table.leader_epoch[batch]),
        "codec": codecs.NAMES[int(table.codec[batch])],
        "kind": "data" if control == NOT_CONTROL else {ABORT: "abort", COMMIT: "commit"}.get(control, "control"),
        "transactional": bool(table.is_transactional[batch]),
        "timestamp_type": "LogAppendTime" if attributes & LOG_APPEND else "CreateTime",
        "delete_horizon_ms": int(table.base_timestamp[batch]) if attributes & HORIZON else None,
        "max_timestamp": int(table.max_timestamp[batch]),
        "producer_id": int(table.producer_id[batch]),
        "producer_epoch": int(table.producer_epoch[batch]),
        "base_sequence": int(table.base_sequence[batch]),
        "records": [
            {
                "offset": int(rows.offset[row]),
                "timestamp": int(rows.timestamp[row]),
                "key": _text(chunk, int(rows.key_start[row]), int(rows.key_length[row]), whole=whole),
                "value": _text(chunk, int(rows.value_start[row]), int(rows.value_length[row]), whole=whole),
                "value_bytes": int(rows.value_length[row]),
                **({"headers": list(_headers(chunk, rows, row))} if whole else {}),
            }
            for row in mine
        ],
    }


def _headers(chunk: Chunk, rows: Rows, row: int) -> Iterator[dict[str, str | None]]:
    """``parse`` has checked them. Records of magic 0 and 1 have none."""
    if int(rows.flags[row]) & LEGACY:
        return
    end = int(rows.end[row])
    count, at = read_varint(chunk.buf, int(rows.value_start[row]) + max(int(rows.value_length[row]), 0), end)
    for _ in range(count):
        parts = []
        for _ in ("name", "value"):
            length, at = read_varint(chunk.buf, at, end)
            parts.append(_text(chunk, at, length, whole=True))
            at += max(length, 0)
        yield {"key": parts[0], "value": parts[1]}


def _text(chunk: Chunk, start: int, length: int, *, whole: bool) -> str | None:
    if length < 0:
        return None
    shown = length if whole else min(length, SHOWN_BYTES)
    data = chunk.buf[start : start + shown].tobytes()
    cut = "..." if length > shown else ""
    try:
        text = data.decode("utf-8", "strict" if not cut else "ignore")
        if text.isprintable():
            return text + cut
    except UnicodeDecodeError:
        pass
    return "base64:" + base64.b64encode(data).decode() + cut
