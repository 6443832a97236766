"""Pass 2: one group of source segments becomes one new segment with its indexes (Kafka: Cleaner.cleanSegments)."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from compactor.cleaner.keys.survivors import KeptCounts, Survivors, Witness
from compactor.cleaner.passes.chunks import CleanChunk, FinishedChunks, clean_chunk
from compactor.cleaner.passes.lanes import DRAINED, Drain, Lane, Lanes
from compactor.cleaner.passes.retention import BatchFates, RoundRules, decide_batches
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Flags, Verdicts
from compactor.errors import BadData
from compactor.model.balance import Sum
from compactor.records.balance import Sums, content_sum, no_sums
from compactor.records.batches import HEADER, HORIZON, NOT_CONTROL, BatchTable, Int64s
from compactor.records.encode import COPY, DROP, EMPTY, FILTER, MAX_SEGMENT, Encoded, empty_batch
from compactor.records.indexes import build
from compactor.records.rows import Chunk, parse
from compactor.stages import WorkStage, measured


@dataclass(frozen=True, slots=True)
class CleanedSegment:
    """A new segment: ``<20 digits>.log`` with ``.index``, ``.timeindex`` and, where anything is in it, ``.txnindex``.

    ``anew``: which of its batches are no copies; ``sources``, ``sums``: of its sources' batches, and of what became of those that do not
    stay as they are.
    """

    base: int
    paths: dict[str, Path]
    size: int
    batches: int
    max_timestamp: int
    records_read: int
    records_kept: int
    anew: Flags
    sources: Sum
    sums: Sums


@dataclass(slots=True)
class _Progress:
    sizes: list[Int64s] = field(default_factory=list)
    last_offsets: list[Int64s] = field(default_factory=list)
    max_timestamps: list[Int64s] = field(default_factory=list)
    anew: list[Flags] = field(default_factory=lambda: [np.empty(0, np.bool_)])
    written: int = 0
    records_read: int = 0
    records_kept: int = 0
    sources: Sum = field(default_factory=Sum)
    sums: Sums = field(default_factory=no_sums)
    leader_epoch: int = -1
    end_epoch: int = -1
    mtime_ms: int = 0
    txnindex: bytes = b""

    def add(self, encoded: Encoded) -> None:
        self.anew.append(encoded.anew)
        self.sizes.append(encoded.size)
        self.last_offsets.append(encoded.last_offset)
        self.max_timestamps.append(encoded.max_timestamp)
        self.written += int(encoded.size.sum())


Member = Callable[[], AbstractContextManager[tuple[SourceSegment, Verdicts]]]


@dataclass(frozen=True, slots=True)
class AtHand:
    """A member that has its bytes, and keeps them: the next one is begun while its last chunks are under way."""

    source: SourceSegment
    verdicts: Verdicts

    def __call__(self) -> AbstractContextManager[tuple[SourceSegment, Verdicts]]:
        return nullcontext((self.source, self.verdicts))


@dataclass(frozen=True, slots=True)
class _Range:
    """Batches [first, last) of a source, and what their headers say of them."""

    source: SourceSegment
    first: int
    last: int
    fates: BatchFates


@dataclass(frozen=True, slots=True)
class RewritePass:
    """What all groups of a round share."""

    survivors: Survivors
    rules: RoundRules
    index_interval_bytes: int
    inflate_limit: int
    finished: FinishedChunks
    witness: Witness | None = None

    def rewrite(
        self,
        base: int,
        group: Sequence[Member],
        folder: Path,
        lanes: Lanes,
        *,
        end_offset: int | None = None,
        end_epoch: int = -1,
        room: Callable[[int], None] = lambda size: None,
    ) -> CleanedSegment:
        """Writes the group's new segment into ``folder``, under ``base``, its first source's base offset.

        :param group: sources and verdicts, entered one after the other; a source has its bytes while it is.
        :param room: asked for the bytes of each write before it is done; what it raises ends the pass.
        :param end_offset: a published segment must end here (inclusive; I1): where its last batch would end below, a filler
            batch is added. None: as Kafka's cleaner leaves it, be it empty.
        :param end_epoch: the leader epoch there: that of the filler where the last source, which may be cut, has no batch that tells it.
        :raises BadData: a source that cannot be cleaned; what was written so far stays for the caller to remove.
        """
        done = _Progress(end_epoch=end_epoch)
        log = folder / f"{base:020d}.log"
        with log.open("xb") as file:

            def append(cleaned: tuple[SourceSegment, list[CleanChunk]]) -> None:
                source, pieces = cleaned
                for piece in pieces:
                    _append(file, piece, source, done, room)

            # Whatever happens, no lane is at work any more when a source loses its bytes.
            with (
                closing(self._ranges(group, done)) as ranges,
                closing(lanes.run_in_steps(self._clean_range, append, lambda lane, _: None, ranges)) as written,
            ):
                for _ in written:
                    pass
            if end_offset is not None:
                _fill(file, done, base, end_offset, room)
        sizes, lasts, maxima = (
            np.concatenate(c) if c else np.empty(0, np.int64) for c in (done.sizes, done.last_offsets, done.max_timestamps)
        )
        index, timeindex = build(base, sizes, lasts, maxima, self.index_interval_bytes)
        paths = {"log": log}
        for kind, data in (("index", index), ("timeindex", timeindex), ("txnindex", done.txnindex)):
            if data or kind != "txnindex":
                paths[kind] = folder / f"{base:020d}.{kind}"
                room(len(data))
                paths[kind].write_bytes(data)
        for path in paths.values():
            os.utime(path, ns=(done.mtime_ms * 1_000_000,) * 2)
        return CleanedSegment(
            base, paths, done.written, len(sizes), int(np.max(maxima, initial=-1)), done.records_read, done.records_kept,
            np.concatenate(done.anew), done.sources, done.sums,
        )  # fmt: skip

    def _ranges(self, group: Sequence[Member], done: _Progress) -> Generator[_Range | Drain, None, None]:
        """Every range of every source, in order; a source is left when all its ranges were written."""
        for member in group:
            with member() as (source, verdicts):
                if self.witness is not None:
                    self.witness.begin(source)
                fates = decide_batches(source.table, verdicts, self.rules, source.name)
                counts = self.survivors.counts(source)
                if counts is not None:
                    _settle_known(source.table, fates, counts, self.rules.now_ms)
                if self.rules.balance_key is not None:
                    done.sources = done.sources.plus(content_sum(source.buf, self.rules.balance_key))
                done.leader_epoch = int(source.table.leader_epoch[-1]) if len(source.table) else done.end_epoch
                done.mtime_ms = source.mtime_ms
                done.txnindex += verdicts.txn_entries.tobytes()
                for first, last in source.ranges():
                    yield _Range(source, first, last, fates.part(slice(first, last)))
                if not isinstance(member, AtHand):
                    yield DRAINED

    def _clean_range(self, lane: Lane, job: _Range) -> tuple[SourceSegment, list[CleanChunk]]:
        return job.source, self._cleaned(lane, job.source, job.first, job.last, job.fates)

    def _cleaned(self, lane: Lane, source: SourceSegment, first: int, last: int, fates: BatchFates) -> list[CleanChunk]:
        """The chunks of one range: as pass 1 left it, from the batch headers alone, or read now."""
        action = fates.action
        finished = self.finished.take(source, first)
        if finished is not None:
            return [finished]
        # Markers are copied, but Kafka reads them all the same, and refuses one that does not parse.
        wanted = (action == FILTER) | ((action == COPY) & (source.table.control[first:last] != NOT_CONTROL))
        if not wanted.any():
            source.verify(first, last)
            nowhere = np.zeros(last - first, np.int64)
            chunk = Chunk(first, last, source.buf[:0], nowhere, nowhere, wanted)
            none = np.empty(0, np.bool_)
            return [clean_chunk(lane, source, chunk, lane.rows.take(0), np.zeros(last - first + 1, np.int64), none, fates, self.rules)]
        found = []
        for chunk in source.chunks(first, last, wanted, self.inflate_limit, lane.bodies):
            some = slice(chunk.first - first, chunk.last - first)
            rows, first_row = parse(source.table, chunk, lane.rows, source.name)
            if self.witness is not None:
                self.witness.expect(lane, source, chunk)
            superseded = self.survivors.superseded(source, chunk, rows, first_row)
            clean = clean_chunk(lane, source, chunk, rows, first_row, superseded, fates.part(some), self.rules)
            # The lane is used again for the next chunk of this range.
            found.append(clean if chunk.last == last else clean.detached())
        return found


def _append(file: BinaryIO, piece: CleanChunk, source: SourceSegment, done: _Progress, room: Callable[[int], None]) -> None:
    if done.written + len(piece.encoded.data) > MAX_SEGMENT:
        raise BadData(
            "the cleaned segment would exceed 2 GiB",
            segment=source.name,
            hint="Lower segment_bytes; recompression at the default level can make batches larger",
        )
    room(len(piece.encoded.data))
    _write(file, piece.encoded.data)
    done.add(piece.encoded)
    done.records_read += piece.records_read
    done.records_kept += piece.records_kept
    if piece.sums is not None:
        done.sums += piece.sums


def _fill(file: BinaryIO, done: _Progress, base: int, end_offset: int, room: Callable[[int], None]) -> None:
    last = max((int(lasts[-1]) for lasts in reversed(done.last_offsets) if len(lasts)), default=base - 1)
    if last >= end_offset:
        return
    filler = empty_batch(end_offset, end_offset, done.leader_epoch)
    room(len(filler))
    _write(file, memoryview(filler))
    size, last_offset, max_timestamp = (np.array([number], np.int64) for number in (HEADER, end_offset, -1))
    done.add(Encoded(memoryview(filler), size, last_offset, max_timestamp, np.ones(1, np.bool_)))


def _settle_known(table: BatchTable, fates: BatchFates, counts: KeptCounts, now_ms: int) -> None:
    """Batches whose fate pass 1 already tells: nothing survives, or everything and no tombstone is due. They are not read again."""
    action, retain_empty = fates.action, fates.retain_empty
    open_ = (action == FILTER) & (counts.kept >= 0)
    nothing = open_ & (counts.kept == 0)
    action[nothing & retain_empty] = EMPTY
    action[nothing & ~retain_empty] = DROP
    waiting = ((table.attributes & np.int16(HORIZON)) != 0) & (now_ms < table.base_timestamp)
    action[open_ & (counts.kept > 0) & (counts.kept == table.count) & (~counts.tombstones | waiting)] = COPY


@measured(WorkStage.WRITE, lambda file, data: len(data))
def _write(file: BinaryIO, data: memoryview) -> None:
    """All of it, past Python's buffer: chunks are large."""
    while data:
        data = data[os.write(file.fileno(), data) :]
