"""Pass 2: one group of source segments becomes one new segment with its indexes (Kafka: Cleaner.cleanSegments)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from compactor.cleaner.lanes import Lane, Lanes
from compactor.cleaner.retention import RoundRules, decide_batches, filter_rows
from compactor.cleaner.source import InflateCache, SourceSegment
from compactor.cleaner.survivors import KeptCounts, Survivors
from compactor.cleaner.transactions import Flags, Verdicts
from compactor.errors import BadData
from compactor.records.batches import HEADER, HORIZON, BatchTable, Int64s
from compactor.records.encode import COPY, DROP, EMPTY, FILTER, MAX_SEGMENT, NO_HORIZON, Actions, Encoded, empty_batch, encode
from compactor.records.indexes import build
from compactor.records.rows import Chunk, Rows, parse

_MOST_PARTS: Final = 512  # below every system's IOV_MAX


@dataclass(frozen=True, slots=True)
class CleanedSegment:
    """A new segment: ``<20 digits>.log`` with ``.index``, ``.timeindex`` and, where anything is in it, ``.txnindex``."""

    base: int
    paths: dict[str, Path]
    size: int
    batches: int
    max_timestamp: int
    records_read: int
    records_kept: int


@dataclass(slots=True)
class _Progress:
    sizes: list[Int64s] = field(default_factory=list)
    last_offsets: list[Int64s] = field(default_factory=list)
    max_timestamps: list[Int64s] = field(default_factory=list)
    written: int = 0
    records_read: int = 0
    records_kept: int = 0

    def add(self, encoded: Encoded) -> None:
        self.sizes.append(encoded.size)
        self.last_offsets.append(encoded.last_offset)
        self.max_timestamps.append(encoded.max_timestamp)
        self.written += int(encoded.size.sum())


@dataclass(frozen=True, slots=True)
class RewritePass:
    """What all groups of a round share."""

    survivors: Survivors
    rules: RoundRules
    index_interval_bytes: int
    inflate_limit: int
    cache: InflateCache

    def rewrite(
        self, group: Sequence[tuple[SourceSegment, Verdicts]], folder: Path, lanes: Lanes, *, end_offset: int | None = None
    ) -> CleanedSegment:
        """Writes the group's new segment into ``folder``, under its first source's base offset.

        :param end_offset: a published segment must end here (inclusive; I1): where its last batch would end below, a filler
            batch is added. None: as Kafka's cleaner leaves it, be it empty.
        :raises BadData: a source that cannot be cleaned; what was written so far stays for the caller to remove.
        """
        base = group[0][0].base
        done = _Progress()
        log = folder / f"{base:020d}.log"
        with log.open("xb") as file:
            for source, verdicts in group:
                self._rewrite_source(source, verdicts, file, lanes, done)
            if end_offset is not None:
                self._fill(file, done, base, end_offset, group[-1][0].table)
        sizes, lasts, maxima = (np.concatenate(c) if c else np.empty(0, np.int64) for c in (done.sizes, done.last_offsets, done.max_timestamps))
        index, timeindex = build(base, sizes, lasts, maxima, self.index_interval_bytes)
        paths = {"log": log}
        txnindex = b"".join(verdicts.txn_entries.tobytes() for _, verdicts in group)
        for kind, data in (("index", index), ("timeindex", timeindex), ("txnindex", txnindex)):
            if data or kind != "txnindex":
                paths[kind] = folder / f"{base:020d}.{kind}"
                paths[kind].write_bytes(data)
        for path in paths.values():
            os.utime(path, ns=(group[-1][0].mtime_ms * 1_000_000,) * 2)
        return CleanedSegment(
            base, paths, done.written, len(sizes), int(maxima.max(initial=-1)), done.records_read, done.records_kept
        )

    def _rewrite_source(self, source: SourceSegment, verdicts: Verdicts, file: BinaryIO, lanes: Lanes, done: _Progress) -> None:
        action, retain_empty = decide_batches(source.table, verdicts, self.rules, source.name)
        counts = self.survivors.counts(source)
        if counts is not None:
            _settle_known(source.table, action, retain_empty, counts, self.rules.now_ms)
        jobs = [(source, first, last, action[first:last], retain_empty[first:last]) for first, last in source.ranges()]
        for pieces in lanes.run(self._clean_range, jobs):
            for encoded, read, kept in pieces:
                if done.written + int(encoded.size.sum()) > MAX_SEGMENT:
                    raise BadData(
                        "the cleaned segment would exceed 2 GiB",
                        segment=source.name,
                        hint="Lower segment_bytes; recompression at the default level can make batches larger",
                    )
                _write(file, encoded.parts)
                done.add(encoded)
                done.records_read += read
                done.records_kept += kept

    def _clean_range(
        self, lane: Lane, job: tuple[SourceSegment, int, int, Actions, Flags]
    ) -> list[tuple[Encoded, int, int]]:
        """(what was encoded, records read, records kept) for the chunks of one range."""
        source, first, last, action, retain_empty = job
        table = source.table
        wanted = action == FILTER
        if not wanted.any():
            source.verify(first, last)
            chunk = Chunk(first, last, source.buf[:0], np.zeros(last - first, np.int64), np.zeros(last - first, np.int64), wanted)
            rows, first_row = lane.rows.take(0), np.zeros(last - first + 1, np.int64)
            return [self._encode(lane, source, chunk, rows, first_row, np.empty(0, np.bool_), action, _old_horizons(table, chunk))]
        found = []
        for chunk in source.chunks(first, last, wanted, self.inflate_limit, self.cache):
            some = slice(chunk.first - first, chunk.last - first)
            rows, first_row = parse(table, chunk, lane.rows, source.name)
            if int(table.magic[chunk.first]) < 2:
                _check_wrapper_order(table, chunk, rows, first_row, source.name)
            superseded = self.survivors.superseded(source, chunk, rows, first_row)
            keep, horizon = filter_rows(
                table, chunk, rows, first_row, superseded, action[some], retain_empty[some], self.rules, source.mtime_ms
            )
            found.append(self._encode(lane, source, chunk, rows, first_row, keep, action[some], horizon))
            if chunk.last < last:
                # The output buffer is used again for the next chunk of this range.
                encoded = found[-1][0]
                found[-1] = (Encoded([bytes(p) for p in encoded.parts], encoded.size, encoded.last_offset, encoded.max_timestamp), *found[-1][1:])
        return found

    def _encode(
        self, lane: Lane, source: SourceSegment, chunk: Chunk, rows: Rows, first_row: Int64s, keep: Flags, action: Actions, horizon: Int64s
    ) -> tuple[Encoded, int, int]:
        table = source.table
        encoded = encode(source.buf, table, chunk, rows, first_row, keep, action, horizon, lane.output, source.name)
        counts = np.maximum(table.count[chunk.first : chunk.last].astype(np.int64), np.diff(first_row))
        copied_unread = (action == COPY) & ~chunk.wanted
        return encoded, int(counts.sum()), int(np.count_nonzero(keep)) + int(counts[copied_unread].sum())

    def _fill(self, file: BinaryIO, done: _Progress, base: int, end_offset: int, table: BatchTable) -> None:
        last = max((int(lasts[-1]) for lasts in reversed(done.last_offsets) if len(lasts)), default=base - 1)
        if last >= end_offset:
            return
        leader_epoch = int(table.leader_epoch[-1]) if len(table) else -1
        filler = empty_batch(end_offset, end_offset, leader_epoch)
        file.write(filler)
        done.add(Encoded([filler], np.array([HEADER], np.int64), np.array([end_offset], np.int64), np.array([-1], np.int64)))


def _settle_known(table: BatchTable, action: Actions, retain_empty: Flags, counts: KeptCounts, now_ms: int) -> None:
    """Batches whose fate pass 1 already tells: nothing survives, or everything and no tombstone is due. They are not read again."""
    open_ = (action == FILTER) & (counts.kept >= 0)
    nothing = open_ & (counts.kept == 0)
    action[nothing & retain_empty] = EMPTY
    action[nothing & ~retain_empty] = DROP
    waiting = ((table.attributes & np.int16(HORIZON)) != 0) & (now_ms < table.base_timestamp)
    action[open_ & (counts.kept > 0) & (counts.kept == table.count) & (~counts.tombstones | waiting)] = COPY


def _old_horizons(table: BatchTable, chunk: Chunk) -> Int64s:
    return np.full(chunk.last - chunk.first, NO_HORIZON, np.int64)


def _check_wrapper_order(table: BatchTable, chunk: Chunk, rows: Rows, first_row: Int64s, segment: str) -> None:
    """A v0/v1 wrapper tells its base offset only when inflated."""
    for i in np.flatnonzero(np.diff(first_row) > 0).tolist():
        batch = chunk.first + i
        if batch and rows.offset[first_row[i]] <= table.last_offset[batch - 1]:
            raise BadData(
                "the first inner offset is not above the last offset before the message",
                segment=segment,
                position=int(table.position[batch]),
                offset=int(rows.offset[first_row[i]]),
            )


def _write(file: BinaryIO, parts: list[memoryview | bytes]) -> None:
    """All bytes of all parts, in few system calls."""
    fd = file.fileno()
    for begin in range(0, len(parts), _MOST_PARTS):
        some = parts[begin : begin + _MOST_PARTS]
        left = sum(len(part) for part in some) - os.writev(fd, some)
        if left:
            # A short write is rare (a full disk, a signal); finish it the slow way.
            rest = b"".join(some)
            view = memoryview(rest)[len(rest) - left :]
            while view:
                view = view[os.write(fd, view) :]
