"""A segment's sidecar made from its batches, and a segment's stand-in made from its sidecar.

The stand-in goes through the transaction fold in the place of a segment that is not read: it has the runs and markers of the sidecar as its
batches. Whoever reads the segment after all takes the verdicts over with ``verdicts_for``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from bloom.producer_runs import events, runs_and_markers
from bloom.sidecar import NEVER_MS, Due, Portrait, Sidecar
from bloom.siphash import hash_keys, key_halves
from bloom.sizing import FilterDesign
from compactor.cleaner.passes.lanes import Lane, Lanes
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts, with_given
from compactor.records.batches import HORIZON, NOT_CONTROL, BatchTable, read_only
from compactor.records.rows import parse

NOTHING = read_only(np.empty(0, np.uint8))


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one range of batches has of keys, tombstones and records without a key."""

    hashes: npt.NDArray[np.uint64]
    tombstones: int
    undated: int
    earliest_ms: int
    keyless: int


def portray(
    segment_id: str, source: SourceSegment, design: FilterDesign | None, hash_key: bytes, inflate_limit: int, lanes: Lanes, *, sketch: bool
) -> Sidecar:
    """Reads the whole segment.

    :param design: of its filter, for at least as many keys as the segment has records; None: it gets none.
    :param sketch: whether its keys are to be counted. With neither filter nor sketch no key is hashed.
    :raises BadData: it cannot be read.
    """
    table = source.table
    hashing = sketch or design is not None
    portrait = Portrait(design)
    k0, k1 = key_halves(hash_key)

    def look(lane: Lane, job: tuple[int, int]) -> _Piece:
        first, last = job
        found = [_Piece(np.empty((0, 2), np.uint64), 0, 0, NEVER_MS, 0)]
        for chunk in source.chunks(first, last, wanted[first:last], inflate_limit, lane.bodies):
            rows, first_row = parse(table, chunk, lane.rows, source.name)
            keyed = rows.key_length >= 0
            hashes = np.empty((len(rows) if hashing else 0, 2), np.uint64)
            if hashing:
                hash_keys(chunk.buf, rows.key_start, rows.key_length, k0, k1, hashes)
                hashes = hashes[keyed]
            tombstones = np.flatnonzero(keyed & (rows.value_length < 0))
            batches = np.searchsorted(first_row, tombstones, side="right") - 1 + chunk.first
            dated = ((table.attributes[batches] & np.int16(HORIZON)) != 0) & (table.magic[batches] == 2)
            earliest = int(table.base_timestamp[batches][dated].min(initial=NEVER_MS))
            keyless = len(rows) - int(np.count_nonzero(keyed))
            found.append(_Piece(hashes, len(tombstones), len(tombstones) - int(np.count_nonzero(dated)), earliest, keyless))
        return _joined(found)

    wanted = table.control == NOT_CONTROL
    due = Due()
    for piece in lanes.run(look, [(first, last) for first, last in source.ranges() if wanted[first:last].any()]):
        portrait.add(piece.hashes)
        due = Due(
            due.tombstones + piece.tombstones,
            due.tombstones_without_horizon + piece.undated,
            min(due.earliest_tombstone_horizon_ms, piece.earliest_ms),
            due.keyless_records + piece.keyless,
        )
    runs, markers = runs_and_markers(table)
    return portrait.sidecar(segment_id, int(table.count[wanted].sum()), due, runs, markers)


def _joined(pieces: list[_Piece]) -> _Piece:
    return _Piece(
        np.concatenate([piece.hashes for piece in pieces]),
        sum(piece.tombstones for piece in pieces),
        sum(piece.undated for piece in pieces),
        min(piece.earliest_ms for piece in pieces),
        sum(piece.keyless for piece in pieces),
    )


def stand_in(ordinal: int, name: str, base: int, end: int, mtime_ms: int, sidecar: Sidecar) -> SourceSegment:
    """A source without bytes whose table has what the transaction fold asks of a segment: the sidecar's runs and markers."""
    happened = events(sidecar.producer_runs, sidecar.markers)
    table = BatchTable.empty(len(happened))
    for column in fields(BatchTable):
        getattr(table, column.name)[:] = getattr(happened, column.name, 0)
    table.magic[:] = 2
    return SourceSegment(ordinal, name, base, end, mtime_ms, NOTHING, table)


def verdicts_for(source: SourceSegment, stood_in: SourceSegment, verdicts: Verdicts) -> Verdicts:
    """The verdicts on a stand-in's events as verdicts on the batches of the segment itself.

    A marker is an event of its own; a data batch has the fate of its run, whose last batch is the next event of its producer.
    """
    producers = np.unique(stood_in.table.producer_id)
    offsets = np.unique(np.concatenate((stood_in.table.base_offset, source.table.base_offset)))

    def place(table: BatchTable) -> npt.NDArray[np.int64]:
        """One number per batch that sorts by producer and base offset."""
        return np.searchsorted(producers, table.producer_id) * len(offsets) + np.searchsorted(offsets, table.base_offset)

    events_at = place(stood_in.table)
    order = np.argsort(events_at, kind="stable")
    following = np.searchsorted(events_at[order], place(source.table))
    known = np.isin(source.table.producer_id, producers) & (following < len(order))
    event = order[following[known]]
    flags = {}
    for name in ("aborted", "discardable", "indexed"):
        flags[name] = np.zeros(len(source.table), np.bool_)
        flags[name][known] = getattr(verdicts, name)[event]
    return replace(verdicts, **flags, txn_entries=with_given(verdicts.txn_entries.copy(), source.txn_entries))
