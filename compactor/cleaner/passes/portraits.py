"""A segment's sidecar made from its batches, and a segment's stand-in made from its sidecar.

The stand-in goes through the transaction fold in the place of a segment that is not read: it has the runs and markers of the sidecar as its
batches. Whoever reads the segment after all takes the verdicts over with ``verdicts_for``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from bloom.directory import KEYLESS, TOMBSTONE, KeyDirectory, pieces_of
from bloom.producer_runs import events, runs_and_markers
from bloom.sidecar import NEVER_MS, Due, Portrait, Sidecar
from bloom.siphash import hash_keys, key_halves
from bloom.sizing import FilterDesign
from compactor.cleaner.passes.lanes import Lane, Lanes
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts, with_given
from compactor.records.batches import HORIZON, NOT_CONTROL, BatchTable, Int64s, read_only
from compactor.records.headers import headers_of
from compactor.records.rows import Chunk, Rows, parse

NOTHING = read_only(np.empty(0, np.uint8))


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What some batches have of keys, tombstones and records without a key; ``first``: of them.

    ``keys``, ``flags``: per batch, as in a KeyDirectory; empty where nobody wants one.
    """

    hashes: npt.NDArray[np.uint64]
    first: int
    keys: npt.NDArray[np.int32]
    flags: npt.NDArray[np.uint8]
    tombstones: int = 0
    undated: int = 0
    earliest_ms: int = NEVER_MS
    keyless: int = 0


class Sitting:
    """A segment whose sidecar is made while somebody reads it, for whatever reason: the batches come in any order, each once."""

    def __init__(
        self, source: SourceSegment, design: FilterDesign | None, hash_key: bytes, *, sketch: bool, directory: bool = False
    ) -> None:
        """:param design: of its filter, for at least as many keys as the segment has records; None: it gets none.

        :param sketch: whether its keys are to be counted. With neither filter, sketch nor directory no key is hashed.
        :param directory: whether ``directory`` will be asked for; then all batches are of v2.
        """
        self._source = source
        self._table = source.table
        self._data = source.table.control == NOT_CONTROL
        self._hashing = sketch or directory or design is not None
        self._seen: list[Glimpse] | None = [] if directory else None
        self._portrait = Portrait(design)
        self.hash_key = hash_key
        self._halves = key_halves(hash_key)
        self.due = Due()

    def look(self, chunk: Chunk, rows: Rows, first_row: Int64s) -> Glimpse:
        """At a chunk, while it is there; by any thread. Control records are passed over."""
        table = self._table
        keyed = rows.key_length >= 0
        records = len(rows)
        if not self._data[chunk.first : chunk.last].all():
            data = np.repeat(self._data[chunk.first : chunk.last], np.diff(first_row))
            keyed &= data
            records = int(np.count_nonzero(data))
        hashes = np.empty((len(rows) if self._hashing else 0, 2), np.uint64)
        if self._hashing:
            hash_keys(chunk.buf, rows.key_start, rows.key_length, *self._halves, hashes)
            hashes = hashes if keyed.all() else hashes[keyed]
        tombstones = np.flatnonzero(keyed & (rows.value_length < 0))
        batches = np.searchsorted(first_row, tombstones, side="right") - 1 + chunk.first
        dated = ((table.attributes[batches] & np.int16(HORIZON)) != 0) & (table.magic[batches] == 2)
        earliest = int(table.base_timestamp[batches][dated].min(initial=NEVER_MS))
        keyless = records - int(np.count_nonzero(keyed))
        keys, flags = self._by_batch(rows, first_row, chunk, keyed) if self._seen is not None else _NOBODY_ASKS
        return Glimpse(hashes, chunk.first, keys, flags, len(tombstones), len(tombstones) - int(np.count_nonzero(dated)), earliest, keyless)

    def _by_batch(
        self, rows: Rows, first_row: Int64s, chunk: Chunk, keyed: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        keys = _counted(keyed, first_row)
        keyless = self._data[chunk.first : chunk.last] & (keys < np.diff(first_row))
        buried = _counted(keyed & (rows.value_length < 0), first_row) > 0
        return keys.astype(np.int32), (keyless * np.uint8(KEYLESS) | buried * np.uint8(TOMBSTONE)).astype(np.uint8)

    def take(self, seen: Glimpse) -> None:
        """What was seen; by one thread at a time."""
        self._portrait.add(seen.hashes)
        if self._seen is not None:
            self._seen.append(seen)
        self.due = Due(
            self.due.tombstones + seen.tombstones,
            self.due.tombstones_without_horizon + seen.undated,
            min(self.due.earliest_tombstone_horizon_ms, seen.earliest_ms),
            self.due.keyless_records + seen.keyless,
        )

    def sidecar(self, segment_id: str) -> Sidecar:
        """When all batches with records were taken."""
        runs, markers = runs_and_markers(self._table)
        return self._portrait.sidecar(segment_id, int(self._table.count[self._data].sum()), self.due, runs, markers)

    def directory(self, segment_id: str) -> KeyDirectory:
        """When all batches with records were taken, and the segment's bytes are there."""
        table, seen = self._table, sorted(self._seen or (), key=lambda one: one.first)
        keys, flags = np.zeros(len(table), np.int32), np.zeros(len(table), np.uint8)
        for one in seen:
            keys[one.first : one.first + len(one.keys)] = one.keys
            flags[one.first : one.first + len(one.flags)] = one.flags
        pieces = [pieces_of(one.hashes) for one in seen]
        return KeyDirectory(
            segment_id, headers_of(self._source.buf, table.position), table.control, table.coordinator_epoch, flags, keys,
            np.concatenate(pieces) if pieces else np.empty(0, np.uint32),
        )  # fmt: skip


_NOBODY_ASKS = np.empty(0, np.int32), np.empty(0, np.uint8)


def _counted(chosen: npt.NDArray[np.bool_], first_row: Int64s) -> Int64s:
    """Of each batch, how many of its rows are chosen."""
    before: Int64s = np.concatenate((np.zeros(1, np.int64), np.cumsum(chosen, dtype=np.int64)))
    counted: Int64s = before[first_row[1:]] - before[first_row[:-1]]
    return counted


def portray(
    segment_id: str, source: SourceSegment, design: FilterDesign | None, hash_key: bytes, inflate_limit: int, lanes: Lanes, *, sketch: bool
) -> Sidecar:
    """Reads the whole segment; the parameters are those of Sitting.

    :raises BadData: it cannot be read.
    """
    return sat(Sitting(source, design, hash_key, sketch=sketch), source, inflate_limit, lanes).sidecar(segment_id)


def sat(sitting: Sitting, source: SourceSegment, inflate_limit: int, lanes: Lanes) -> Sitting:
    """The same when all of the segment was looked at. Raises BadData."""
    wanted = source.table.control == NOT_CONTROL

    def look(lane: Lane, job: tuple[int, int]) -> list[Glimpse]:
        first, last = job
        chunks = source.chunks(first, last, wanted[first:last], inflate_limit, lane.bodies)
        return [sitting.look(chunk, *parse(source.table, chunk, lane.rows, source.name)) for chunk in chunks]

    for found in lanes.run(look, [(first, last) for first, last in source.ranges() if wanted[first:last].any()]):
        for seen in found:
            sitting.take(seen)
    return sitting


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
