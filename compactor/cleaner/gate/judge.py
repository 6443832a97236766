"""The equivalence gate: a second, simpler implementation compares what went into a group with what came out, before it is uploaded.

    Gate.over(sources, terms)  once per round: what became of the transactions, from the batch tables
    read(source)               each segment of the dirty range, in any order: the last committed record of every key (``ranges``)
    check(group, cleaned)      each group: GateReport, or GateFailed with key, offset and segment

Of each source segment the gate knows how many records must be left and what their marks come to, looked up by keys under its own hash; the
output must say the same. Records outside the dirty range are looked up while they are read for the output; where the keys are on the disk
(``on_disk``) they must be read before it, too. Batches are compared by their headers: order, offsets, producers, transactions, horizons,
checksums, coverage.

The cleaner may show the gate the chunks that it has inflated (``Witness``), so that nothing is inflated twice; the gate reads them itself.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from bloom.siphash import key_halves
from compactor.cleaner.gate import reading as col
from compactor.cleaner.gate.balance import ResultTally
from compactor.cleaner.gate.batches import (
    Fates,
    Flags,
    Group,
    Pairs,
    SourceBatches,
    copy_problems,
    counts_from_zero,
    fates_of,
    header_problems,
    headers_of,
    index_problems,
    is_filler,
    marker_gone,
    misread,
    must_stay,
    pair,
    record_dependent_problems,
    to_be_dated,
)
from compactor.cleaner.gate.ranges import LastRecords, OpenSpool, no_sums
from compactor.cleaner.gate.reading import (
    KEYLESS,
    NULL_VALUE,
    Headers,
    RecordReader,
    Records,
    TooMuch,
    Unreadable,
    chunks_of,
    header_blocks,
    read_headers,
    sums_of,
    wrong_crc,
)
from compactor.cleaner.gate.refusal import GateFailed as GateFailed
from compactor.cleaner.gate.refusal import Wanting, by_keys, by_sums, known
from compactor.cleaner.gate.table import DUE, Rows, Sums, Words, rows_of
from compactor.cleaner.passes.lanes import Lane
from compactor.cleaner.passes.retention import RoundRules
from compactor.cleaner.passes.source import SourceSegment
from compactor.errors import CompactorError
from compactor.records.batches import HORIZON, NOT_CONTROL, Bytes, Int64s, map_file
from compactor.records.rows import Chunk
from compactor.stages import WorkStage, measured

Mapped = Callable[[SourceSegment], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class GateReport:
    """``batches`` and ``records`` of the output that were compared; ``keys``: of the dirty range, whose last records were looked up."""

    batches: int
    records: int
    keys: int


@dataclass(frozen=True, slots=True)
class KeysSeen:
    """The rows of records in so many batches that may be left: of the dirty range, or (``below``) those outside of it.

    ``stays``: of those the number and the marks of what lies behind the range, which is left in any case.
    """

    batches: int
    rows: Rows
    below: bool
    stays: Words

    def detached(self) -> KeysSeen:
        return self


@dataclass(frozen=True, slots=True)
class _Told:
    """Per batch of a segment that is not wholly in the dirty range: what must be left of its records outside, once it is ``known``."""

    known: Flags
    sums: Sums


@dataclass(frozen=True, slots=True)
class GateTerms:
    """What a round's segments are held against.

    :param rules: as for the cleaner; the mapped range is [first_dirty, rules.latest_offset].
    :param hash_key: the cleaner's, 16 bytes.
    :param opened: transactions that were open where the first source begins: producer id -> first offset.
    """

    rules: RoundRules
    first_dirty: int
    hash_key: bytes
    inflate_limit: int
    opened: Mapping[int, int] = field(default_factory=dict)

    @property
    def halves(self) -> tuple[int, int]:
        """The gate's own key: what makes two keys meet in the cleaner's map does not here."""
        return key_halves(hashlib.sha256(b"gate" + self.hash_key).digest()[:16])

    def is_dirty(self, source: SourceSegment) -> bool:
        return self.first_dirty <= self.rules.latest_offset and source.end > self.first_dirty and source.base <= self.rules.latest_offset


class Gate:
    """One round's gate. ``read`` (or the cleaner's pass 1, see ``look``) wants every segment of ``dirty`` before the first ``check``.

    Not for two threads, but for ``look`` and ``expect``, which work in a lane.
    """

    def __init__(
        self, terms: GateTerms, keys: LastRecords, fates: Mapping[int, Fates] | None = None, left: Mapping[int, Words] | None = None
    ) -> None:
        """
        :param keys: takes the rows of the segments that are admitted.
        :param fates: what became of transactions, by ordinal, for as far as it is known; see ``refold``.
        :param left: what must be left of segments, by ordinal, where somebody has found it out: number and marks.
        """
        self._terms = terms
        self._rules = terms.rules
        self._first_dirty = terms.first_dirty
        self._opened = terms.opened
        self._fates = dict(fates or {})
        self._whole: dict[int, Fates] = {}
        self._seen: dict[int, SourceSegment] = {}
        self._dirty: dict[int, SourceSegment] = {}
        self._noted: Counter[tuple[int, bool]] = Counter()
        self._crcs: dict[int, npt.NDArray[np.uint32]] = {}
        self._told: dict[int, _Told] = {}
        self._key = (*terms.halves, terms.inflate_limit)
        self._reader = RecordReader(*self._key)
        self._other = RecordReader(*self._key)
        self._keys = keys
        self._left: dict[int, Words] = dict(left or {})
        self._settled = False

    @staticmethod
    def over(sources: Sequence[SourceSegment], terms: GateTerms, budget_bytes: int, open_spool: OpenSpool) -> Gate:
        """A gate that keeps its keys within ``budget_bytes``, and rows on the disk where they do not fit.

        :param sources: all live segments, the round's and those behind it, whose markers tell outcomes; only the tables are looked at here.
        """
        dirty = [source for source in sources if terms.is_dirty(source)]
        gate = Gate(terms, LastRecords(budget_bytes, sum(source.most_records for source in dirty), open_spool))
        gate.refold(sources)
        for source in dirty:
            gate.admit(source)
        return gate

    @property
    def dirty(self) -> tuple[SourceSegment, ...]:
        """The segments that ``read`` wants, ascending."""
        return tuple(self._dirty[ordinal] for ordinal in sorted(self._dirty))

    @property
    def keys(self) -> int:
        return self._keys.keys

    @property
    def disk_bytes(self) -> int:
        """The most of its rows that lay on the disk."""
        return self._keys.disk_bytes

    @property
    def on_disk(self) -> bool:
        """Keys cannot be looked up later: ``look`` wants what lies outside the dirty range, too, of every source, and then ``finish``."""
        return self._keys.on_disk

    @property
    def is_told(self) -> bool:
        """Whether all that was on the disk was looked at."""
        return self._settled and not self._keys.more

    @property
    def sees_again(self) -> bool:
        """Whether the same is to be shown once more, for another part of the keys."""
        return self._keys.more

    def close(self) -> None:
        """Gives the disk back. What is told stays."""
        self._keys.close()

    def forget(self) -> None:
        """Nobody asks it any more."""
        self._keys.forget()

    def admit(self, source: SourceSegment, fates: Fates | None = None) -> None:
        """A segment of the dirty range, of known ``fates`` (else those that it has by now)."""
        if fates is not None:
            self._fates[source.ordinal] = fates
        self._dirty[source.ordinal] = source

    def refold(self, sources: Sequence[SourceSegment]) -> None:
        """What became of all transactions, by the fold over all segments, or what stands in for the batches of some."""
        self._fates = {source.ordinal: fates for source, fates in zip(sources, fates_of(sources, self._opened), strict=True)}
        self._whole.clear()

    def narrow(self, source: SourceSegment, rows: Int64s) -> None:
        """A segment of which some batches alone are looked at: these rows of the one that was folded are ``source``."""
        whole = self._whole.setdefault(source.ordinal, self._fates[source.ordinal])
        self._fates[source.ordinal] = whole.at(rows)

    def aborted(self, source: SourceSegment) -> Flags:
        """By the fates that are known now."""
        return self._fates[source.ordinal].aborted

    # ---- what must be left

    @measured(WorkStage.GATE, lambda self, source: source.size)
    def read(self, source: SourceSegment) -> None:
        """The keys of a segment whose bytes are there. Raises GateFailed where the cleaner's table of it is wrong; OutOfBudget."""
        self.begin(source)
        self._read(source, below=False)

    def read_below(self, source: SourceSegment) -> None:
        """Of a segment whose bytes are there: what lies outside the dirty range, where keys are on the disk."""
        self.begin(source)
        self._read(source, below=True)

    def _read(self, source: SourceSegment, *, below: bool) -> None:
        headers = headers_of(source.table)
        for some, records in self._walk(self._reader, source.buf, headers, self._wanted(source, below), source.name):
            self.note(source, self._looked(records, headers[:, some], source, below))

    def outside(self, source: SourceSegment) -> Flags:
        """Batches that may hold records outside the dirty range: once keys are on the disk, they are to be shown as ``below``."""
        return self._wanted(source, below=True)

    def _wanted(self, source: SourceSegment, below: bool) -> Flags:
        """Batches that may hold records of the dirty range; ``below``: outside of it."""
        table = source.table
        data = (table.control == NOT_CONTROL) & ~self._fates[source.ordinal].aborted
        if not below:
            return data & (table.last_offset >= self._first_dirty) & self._terms.is_dirty(source)
        # A wrapper whose own offset was never set (old librdkafka) reaches beyond the range, and its header does not say so.
        outside = (table.last_offset > self._rules.latest_offset) | ((table.magic < 2) & (table.last_offset == 0))
        if source.base < self._first_dirty:
            outside |= table.base_offset < self._first_dirty
        return data & outside

    @measured(WorkStage.GATE)
    def begin(self, source: SourceSegment) -> None:
        """Reads a segment's headers, whose bytes are there, and compares them with the cleaner's table."""
        self._seen[source.ordinal] = source
        if source.ordinal in self._crcs:
            return
        table, read = source.table, 0
        crcs = np.empty(len(table), np.uint32)
        try:
            for headers in header_blocks(source.buf):
                problem = misread(headers, table, read)
                if problem:
                    raise GateFailed(problem[0], segment=source.name, offset=problem[1])
                crcs[read : read + headers.shape[1]] = headers[col.STORED_CRC]
                read += headers.shape[1]
        except Unreadable as unreadable:
            raise GateFailed(f"the gate cannot read it: {unreadable}", segment=source.name) from None
        if read != len(table):
            raise GateFailed(f"the cleaner saw {len(table)} batches, there are {read}", segment=source.name)
        self._crcs[source.ordinal] = crcs
        self._told[source.ordinal] = _Told(~self._wanted(source, below=True), no_sums(len(table)))

    @measured(WorkStage.GATE, lambda self, lane, source, chunk, below=False: chunk.body_bytes)
    def look(self, lane: Lane, source: SourceSegment, chunk: Chunk, *, below: bool = False) -> KeysSeen:
        """What pass 1 inflated, read by the gate itself, for ``note``. ``below``: what lies outside the dirty range."""
        some = slice(chunk.first, chunk.last)
        data = (source.table.control[some] == NOT_CONTROL) & ~self._fates[source.ordinal].aborted[some]
        mine = self._wanted(source, below)[some]
        if np.any(chunk.wanted & ~data) or np.any(mine & ~chunk.wanted):
            offset = int(source.table.last_offset[chunk.first])
            raise GateFailed("gate and cleaner do not agree which batches were aborted", segment=source.name, offset=offset)
        headers, records = self._look(lane, source, chunk, mine)
        return self._looked(records, headers, source, below)

    @measured(WorkStage.GATE)
    def note(self, source: SourceSegment, looked: KeysSeen) -> None:
        """Takes the keys; the segment is read when all its chunks were noted. Raises OutOfBudget, OSError."""
        (self._keys.put_below if looked.below else self._keys.put)(looked.rows)
        self._noted[source.ordinal, looked.below] += looked.batches
        if looked.stays.any() and not self._settled:
            self._left[source.ordinal] = self._left.get(source.ordinal, np.zeros(2, np.uint64)) + looked.stays

    def finish(self) -> None:
        """Where keys are on the disk: everything was shown. Raises OutOfBudget, OSError, StoreError."""
        sources = [self._seen[ordinal] for ordinal in sorted(self._seen)]
        self._require_read(sources, both=True)
        bounds = np.array([*(source.base for source in sources), *(source.end for source in sources[-1:])], np.int64)
        sums = no_sums(len(sources))
        self._keys.finish(bounds, sums)
        for source, left in zip(sources, sums, strict=True):
            self._left[source.ordinal] = self._left.get(source.ordinal, np.zeros(2, np.uint64)) + left
        self._noted.clear()
        self._settled = True

    @measured(WorkStage.GATE, lambda self, lane, source, chunk: chunk.body_bytes)
    def expect(self, lane: Lane, source: SourceSegment, chunk: Chunk) -> None:
        """What pass 2 inflated: says what must be left of what lies outside the dirty range."""
        if self.on_disk or source.ordinal in self._left:
            return
        some = slice(chunk.first, chunk.last)
        mine = chunk.wanted & self._wanted(source, below=True)[some]
        if mine.any():
            headers, records = self._look(lane, source, chunk, mine)
            self._tell(source, chunk.first + np.flatnonzero(mine), headers, records)

    def _require_read(self, sources: Iterable[SourceSegment], *, both: bool) -> None:
        for source in sources:
            for below in (False, True) if both else (False,):
                if self._noted[source.ordinal, below] != np.count_nonzero(self._wanted(source, below)):
                    raise CompactorError("the gate was asked before it had read the dirty range", hint="This is a bug; please report it")

    def _look(self, lane: Lane, source: SourceSegment, chunk: Chunk, mine: Flags) -> tuple[Headers, Records]:
        if lane.second_reader is None:
            lane.second_reader = RecordReader(*self._key)
        headers = headers_of(source.table, slice(chunk.first, chunk.last))[:, mine]
        body = np.stack((chunk.body_start[mine], chunk.body_end[mine]))
        try:
            return headers, lane.second_reader.walk(chunk.buf, headers, body)
        except Unreadable as problem:
            raise GateFailed(f"unreadable: {problem}", segment=source.name) from None

    def _walk(self, reader: RecordReader, buf: Bytes, headers: Headers, wanted: Flags, segment: str) -> Iterator[tuple[Int64s, Records]]:
        """The records of the wanted batches in chunks, with their batches' numbers; a chunk is valid until the next one is asked for."""
        waiting = list(chunks_of(headers, wanted))[::-1]
        while waiting:
            some = waiting.pop()
            try:
                records = reader.read(buf, headers[:, some])
            except TooMuch:
                waiting += np.array_split(some, 2)[::-1]
                continue
            except Unreadable as problem:
                raise GateFailed(f"unreadable: {problem}", segment=segment) from None
            yield some, records

    def _batch(self, source: SourceSegment, batch: int) -> tuple[Headers, Records]:
        """One batch of a source whose bytes are there."""
        headers = headers_of(source.table, slice(batch, batch + 1))
        _, records = next(self._walk(self._reader, source.buf, headers, np.ones(1, np.bool_), source.name))
        return headers, records

    def _looked(self, records: Records, headers: Headers, source: SourceSegment, below: bool) -> KeysSeen:
        batches, digests, stays = headers.shape[1], records.digest, np.zeros(2, np.uint64)
        due, keyed = self._due(records, headers, source), records.flags & KEYLESS == 0
        if below:
            stays = sums_of(records, records.offset > self._rules.latest_offset).sum(axis=0, dtype=np.uint64)
            picked = keyed & ~due & (records.offset < self._first_dirty) & (records.offset <= self._rules.latest_offset)
        else:
            digests = np.where(due, digests | DUE, digests) if due.any() else digests
            picked = keyed & (records.offset >= self._first_dirty) & (records.offset <= self._rules.latest_offset)
        if picked.all():
            return KeysSeen(batches, rows_of(records.hashes, records.offset, digests), below, stays)
        return KeysSeen(batches, rows_of(records.hashes[picked], records.offset[picked], digests[picked]), below, stays)

    def _due(self, records: Records, headers: Headers, source: SourceSegment) -> Flags:
        """Tombstones that this round removes."""
        tombstones = records.flags & NULL_VALUE != 0
        if not tombstones.any():
            return tombstones
        v2 = headers[col.MAGIC] == 2
        dated = v2 & (headers[col.ATTRIBUTES] & HORIZON != 0) & (headers[col.BASE_TIMESTAMP] <= self._rules.now_ms)
        due = dated | (~v2 & (source.mtime_ms <= self._rules.legacy_horizon_ms))
        return tombstones & np.repeat(due, np.diff(records.first_row))

    def _tell(self, source: SourceSegment, batches: Int64s, headers: Headers, records: Records) -> None:
        told, outside = self._told[source.ordinal], self._must_go(records, headers, source, self._keys.latest(records.hashes))
        stays = ~outside & ((records.offset < self._first_dirty) | (records.offset > self._rules.latest_offset))
        told.sums[batches] = sums_of(records, stays)
        told.known[batches] = True

    def _must_go(self, records: Records, headers: Headers, source: SourceSegment, latest: Int64s) -> Flags:
        """Which records must not be left, by the last offset of each key (ABSENT: the dirty range does not have it)."""
        gone = (latest > records.offset) | (records.flags & KEYLESS != 0) | self._due(records, headers, source)
        return gone & (records.offset <= self._rules.latest_offset)

    def _must_be_left(self, source: SourceSegment, mapped: Mapped) -> Words:
        """Number and marks of the records that must be left of a segment."""
        if self.on_disk or source.ordinal in self._left:
            return self._left[source.ordinal]
        told = self._told[source.ordinal]
        if not told.known.all():
            headers = headers_of(source.table)
            with mapped(source):
                for some, records in self._walk(self._reader, source.buf, headers, ~told.known, source.name):
                    self._tell(source, some, headers[:, some], records)
        below = told.sums.sum(axis=0, dtype=np.uint64)
        return below + self._of_dirty[source.ordinal] if source.ordinal in self._of_dirty else below

    @cached_property
    def _of_dirty(self) -> dict[int, Words]:
        """Number and marks of what must be left of the dirty range, by segment. Asked when all is read."""
        dirty = self.dirty
        sums = no_sums(len(dirty))
        if dirty:
            self._keys.left(np.array([*(source.base for source in dirty), dirty[-1].end], np.int64), sums)
        return {source.ordinal: sums[number] for number, source in enumerate(dirty)}

    # ---- one group

    @measured(WorkStage.GATE, lambda self, sources, paths, **_: paths["log"].stat().st_size)
    def check(
        self,
        sources: Sequence[SourceSegment],
        paths: Mapping[str, Path],
        *,
        end_offset: int | None,
        mapped: Mapped = lambda source: nullcontext(),
        tally: ResultTally | None = None,
    ) -> GateReport:
        """Compares a group's sources with its cleaned segment. ``tally``: is shown the output's records as they are read.

        :param paths: of the cleaned segment's files, by kind: log, index, timeindex, txnindex.
        :param end_offset: where the new segment must end (inclusive); None: as Kafka's cleaner leaves it.
        :param mapped: makes a source's bytes available while the block runs; called for sources that must be looked into.
        :raises GateFailed: they do not agree.
        """
        if self.on_disk:
            if not self._settled or any(source.ordinal not in self._left for source in sources):
                raise CompactorError("the gate was asked about a segment that it was not shown", hint="This is a bug; please report it")
        else:
            self._require_read(self.dirty, both=False)
        name, self._other.shown_to = sources[0].name, tally.add if tally else None
        output = map_file(paths["log"])
        headers = self._read_output(output, sources[0].base, end_offset, name)
        if tally:
            tally.begin(output, headers)
        for cause in index_problems(headers, sources[0].base, paths):
            raise GateFailed(cause, segment=name)
        group = self._paired(sources, headers, end_offset, self._reach(sources[0], mapped), name)
        for cause, offset in header_problems(group, paths):
            raise GateFailed(cause, segment=name, offset=offset)
        data = group.source[col.CONTROL_KIND] == NOT_CONTROL
        dated = to_be_dated(group.source, group.fates.idle, marker_gone(group.source, group.fates, self._rules.now_ms))
        begin = records = 0
        for source in sources:
            if source.ordinal not in self._crcs:
                with mapped(source):
                    self.begin(source)
            group.source.crc[begin : begin + len(source.table)] = self._crcs[source.ordinal]
            self._compare_markers(Pairs.of(group, source, begin, dated), output, mapped)
            records += self._compare(Pairs.of(group, source, begin, data), output, mapped)
            begin += len(source.table)
        for cause, offset in copy_problems(group):
            raise GateFailed(cause, segment=name, offset=offset)
        return GateReport(headers.shape[1], records, self._keys.keys)

    def _read_output(self, output: Bytes, base: int, end_offset: int | None, name: str) -> Headers:
        """Framing, checksums, order and coverage."""
        try:
            headers = read_headers(output)
        except Unreadable as problem:
            raise GateFailed(f"unreadable: {problem}", segment=name) from None
        wrong = wrong_crc(output, headers)
        if wrong >= 0:
            raise GateFailed("a wrong CRC", segment=name, offset=int(headers[col.BASE, wrong]))
        batches = headers.shape[1]
        descends = headers[col.BASE] <= np.concatenate((np.array([base - 1]), headers[col.LAST]))[:batches]
        if descends.any():
            raise GateFailed("offsets do not ascend", segment=name, offset=int(headers[col.BASE, descends][0]))
        if end_offset is not None and (not batches or int(headers[col.LAST, -1]) != end_offset):
            found = f"ends at offset {headers[col.LAST, -1]}" if batches else "is empty"
            raise GateFailed(f"it {found} and must end at {end_offset}", segment=name, offset=end_offset)
        return headers

    def _reach(self, source: SourceSegment, mapped: Mapped) -> int:
        """The last offset of a first batch that counts from zero; -1 where there is none."""
        if not counts_from_zero(source.table):
            return -1
        with mapped(source):
            return int(self._batch(source, 0)[1].offset[-1])

    def _paired(self, sources: Sequence[SourceSegment], output: Headers, end_offset: int | None, reach: int, name: str) -> Group:
        """The group without its filler, which stands where the last source batch is gone."""
        source = SourceBatches([s.table for s in sources])
        parts = [self._fates[s.ordinal] for s in sources]
        fates = Fates(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("aborted", "idle", "began")))
        filler = False
        if end_offset is not None and is_filler(output[:, -1], end_offset):
            # The header of a batch that must stay can look just like one.
            filler = not np.any(must_stay(source, self._rules) & (source[col.LAST] == end_offset))
            if filler and len(source) and output[col.LEADER_EPOCH, -1] != source[col.LEADER_EPOCH][-1]:
                raise GateFailed("a filler of another leader epoch than the last source batch", segment=name, offset=end_offset)
        output = output[:, : output.shape[1] - int(filler)]
        origin, problem = pair(source, output, reach)
        if problem:
            raise GateFailed(problem[0], segment=name, offset=problem[1])
        return Group(source, fates, output, origin, self._rules)

    def _compare(self, pairs: Pairs, output: Bytes, mapped: Mapped) -> int:
        """The records that are left of a segment are those that must be."""
        found = np.zeros(2, np.uint64)
        for _, records in self._written(pairs, output):
            found += sums_of(records, np.ones(len(records.offset), np.bool_)).sum(axis=0, dtype=np.uint64)
        left = self._must_be_left(pairs.source, mapped)
        if np.any(found != left):
            with mapped(pairs.source):
                self._explain(
                    pairs, output, Wanting(pairs.source.name, int(left[0]), int(found[0]), (int(found[1]) - int(left[1])) % 2**64)
                )
        return int(found[0])

    def _compare_markers(self, pairs: Pairs, output: Bytes, mapped: Mapped) -> None:
        """Markers that got their horizon in this round: the same records in a new header."""
        if not len(pairs.origin):
            return
        with mapped(pairs.source):
            was, _ = self._sums(self._reader, pairs.source.buf, SourceBatches([pairs.source.table]).take(pairs.origin), pairs.source.name)
        became, highest = self._sums(self._other, output, pairs.output, pairs.source.name)
        was[2] = 0  # what is written anew has none
        wrong = np.any(was != became, axis=0) | (pairs.output[col.MAX_TIMESTAMP] != highest)
        if wrong.any():
            offset = int(pairs.output[col.LAST, wrong][0])
            raise GateFailed("a marker that does not say what its source says", segment=pairs.source.name, offset=offset)

    def _sums(self, reader: RecordReader, buf: Bytes, headers: Headers, segment: str) -> tuple[npt.NDArray[np.uint64], Int64s]:
        """Of the records of each batch: number, marks, whether one has attributes (Kafka writes none); the highest timestamp."""
        sums, highest = np.zeros((3, headers.shape[1]), np.uint64), np.zeros(headers.shape[1], np.int64)
        for some, records in self._walk(reader, buf, headers, headers[col.COUNT] > 0, segment):
            sums[:2, some] = sums_of(records, np.ones(len(records.offset), np.bool_)).T
            sums[2, some] = np.bitwise_or.reduceat(records.flags & col.ODD_ATTRIBUTES, records.first_row[:-1])
            highest[some] = np.maximum.reduceat(records.timestamp, records.first_row[:-1])
        return sums, highest

    # ---- output

    def _written(self, pairs: Pairs, output: Bytes) -> Iterator[tuple[Int64s, Records]]:
        """The records of these output batches in chunks, found to fit their batches' headers, and the numbers of their source batches."""
        name, sources = pairs.source.name, SourceBatches([pairs.source.table])
        sources.crc = self._crcs[pairs.source.ordinal]
        for some, records in self._walk(self._other, output, pairs.output, pairs.output[col.COUNT] > 0, name):
            out, of = pairs.output[:, some], sources.take(pairs.origin[some])
            begin, end = records.first_row[:-1], records.first_row[1:] - 1
            for cause, offset in record_dependent_problems(of, out, records, self._rules):
                raise GateFailed(cause, segment=name, offset=offset)
            inside = (records.offset[begin] >= out[col.BASE]) & (records.offset[end] <= out[col.LAST])
            if not inside.all() or np.any(np.diff(records.offset) <= 0):
                raise GateFailed("records whose offsets do not ascend within their batches", segment=name, offset=int(out[col.BASE, 0]))
            keyless = (records.flags & KEYLESS != 0) & (records.offset <= self._rules.latest_offset)
            if keyless.any():
                offset = int(records.offset[keyless][0])
                raise GateFailed("a record without a key, which compaction removes", segment=name, offset=offset)
            yield pairs.origin[some], records

    # ---- what to say

    def _explain(self, pairs: Pairs, output: Bytes, wanting: Wanting) -> NoReturn:
        """Reads a segment and what is left of it once more, for the record that is wrong."""
        source, name = pairs.source, pairs.source.name
        headers = headers_of(source.table)
        data = (source.table.control == NOT_CONTROL) & ~self._fates[source.ordinal].aborted
        filled = pairs.output[col.COUNT] > 0
        for some, records in self._walk(self._reader, source.buf, headers, data, name):
            there = np.zeros(len(records.offset), np.bool_)
            for _, written in self._walk(self._other, output, pairs.output, filled & np.isin(pairs.origin, some), name):
                there[known(name, records, written)] = True
            due = self._due(records, headers[:, some], source) & (records.offset <= self._rules.latest_offset)
            if self.on_disk or source.ordinal in self._left:
                by_sums(name, records, there, due, wanting)
            else:
                latest = self._keys.latest(records.hashes)
                by_keys(name, records, there, due, latest, self._must_go(records, headers[:, some], source, latest))
        raise wanting.refused()
