"""The equivalence gate: a second, simpler implementation compares what went into a group with what came out, before it is uploaded.

    Gate.over(sources, terms)  once per round: what became of the transactions, from the batch tables
    read(source)               each segment of the dirty range, in any order: the last committed record of every key, in a table of its own
    check(group, cleaned)      each group: GateReport, or GateFailed with key, offset and segment

In the dirty range an output record passes if it is its key's last one, unchanged and there once; then the counts must agree. Elsewhere each
source batch says how many records must be left of it and what their digests come to, one after the other, and its output batch must say the
same. Batches are compared by their headers: order, offsets, producers, transactions, horizons, checksums, coverage. Where the table had to
narrow (gate_table), keys that it does not speak for are not looked up.

The cleaner may show the gate the chunks that it has inflated (``Witness``), so that nothing is inflated twice; the gate reads them itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from bloom.siphash import key_halves
from compactor.cleaner.gate import reading as col
from compactor.cleaner.gate.balance import ResultTally
from compactor.cleaner.gate.batches import (
    Fates,
    Flags,
    Group,
    SourceBatches,
    copy_problems,
    counts_from_zero,
    fates_of,
    header_problems,
    headers_of,
    index_problems,
    marker_gone,
    misread,
    must_stay,
    pair,
    record_dependent_problems,
    to_be_dated,
)
from compactor.cleaner.gate.reading import (
    KEYLESS,
    NULL_VALUE,
    Headers,
    RecordReader,
    Records,
    TooMuch,
    Unreadable,
    chains,
    chunks_of,
    header_blocks,
    read_headers,
    wrong_crc,
)
from compactor.cleaner.gate.table import ABSENT, DUE, UNKNOWN, KeyTable
from compactor.cleaner.passes.lanes import Lane
from compactor.cleaner.passes.retention import RoundRules
from compactor.cleaner.passes.source import SourceSegment
from compactor.errors import CompactorError
from compactor.records.batches import HORIZON, NOT_CONTROL, Bytes, Int64s, map_file
from compactor.records.rows import Chunk

_GO, _STAY, _EITHER = 0, 1, 2
_NOT_TOLD: Final = -1
Mapped = Callable[[SourceSegment], AbstractContextManager[None]]


class GateFailed(CompactorError):
    """The cleaner wrote something else than the gate expects: a bug in one of the two. Nothing was uploaded."""

    def __init__(self, cause: str, *, segment: str, offset: int = -1, key: bytes | None = None) -> None:
        where = segment + (f", offset {offset}" if offset >= 0 else "") + (f", key {key[:100]!r}" if key is not None else "")
        super().__init__(
            f"the gate refuses the cleaned segment of {where}: {cause}",
            hint="Nothing was published and the sources are untouched. This is a bug; please report it with this message",
        )
        self.cause = cause
        self.segment = segment
        self.offset = offset
        self.key = key


@dataclass(frozen=True, slots=True)
class GateReport:
    """``batches`` and ``records`` of the output that were compared; ``coverage``: the share of all keys that was looked up exactly."""

    batches: int
    records: int
    keys: int
    coverage: float


@dataclass(frozen=True, slots=True)
class KeysSeen:
    """Hashes of shape (n, 2), offsets and digests of the records in so many batches that may be their keys' last."""

    batches: int
    hashes: npt.NDArray[np.uint64]
    offsets: Int64s
    digests: npt.NDArray[np.uint64]

    def detached(self) -> KeysSeen:
        return KeysSeen(self.batches, self.hashes.copy(), self.offsets.copy(), self.digests.copy())


@dataclass(frozen=True, slots=True)
class _MustBeLeft:
    """Per batch of a segment that is not wholly in the key table: how many records must be left, and what their digests come to."""

    count: Int64s
    chain: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Batches of one source that are left in the output: their numbers in the source, and their new headers."""

    source: SourceSegment
    origin: Int64s
    output: Headers

    @staticmethod
    def of(group: Group, source: SourceSegment, begin: int, chosen: Flags) -> _Pairs:
        """The ``chosen`` ones (a flag per source batch of the group); the source's first batch is the group's batch ``begin``."""
        mine = np.flatnonzero((group.origin >= begin) & (group.origin < begin + len(source.table)) & chosen[group.origin])
        return _Pairs(source, group.origin[mine] - begin, group.output[:, mine])


def gate_seed(first_dirty: int, end: int, now_ms: int) -> int:
    """Which keys are looked up where memory does not allow for all: other ones each round, the same before and after its plan has an id."""
    return int.from_bytes(hashlib.sha256(f"{first_dirty} {end} {now_ms}".encode()).digest()[:4], "big")


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

    def __init__(self, terms: GateTerms, table: KeyTable, fates: Mapping[int, Fates] | None = None) -> None:
        """
        :param table: takes the keys of the segments that are admitted.
        :param fates: what became of transactions, by ordinal, for as far as it is known; see ``refold``.
        """
        self._rules = terms.rules
        self._first_dirty = terms.first_dirty
        self._opened = terms.opened
        self._fates = dict(fates or {})
        self._dirty: dict[int, SourceSegment] = {}
        self._wanted: dict[int, Flags] = {}
        self._unread: dict[int, int] = {}
        self._crcs: dict[int, npt.NDArray[np.uint32]] = {}
        self._told: dict[int, _MustBeLeft] = {}
        self._key = (*terms.halves, terms.inflate_limit)
        self._reader = RecordReader(*self._key)
        self._other = RecordReader(*self._key)
        self._table = table
        self._live: dict[int, int] = {}

    @staticmethod
    def over(sources: Sequence[SourceSegment], terms: GateTerms, *, seed: int, budget_bytes: int) -> Gate:
        """A gate that looks up what fits ``budget_bytes``; with less, ``seed`` says which keys (``gate_seed``).

        :param sources: all live segments, the round's and those behind it, whose markers tell outcomes; only the tables are looked at here.
        """
        dirty = [source for source in sources if terms.is_dirty(source)]
        gate = Gate(terms, KeyTable(budget_bytes, sum(_most_records(source) for source in dirty), seed))
        gate.refold(sources)
        for source in dirty:
            gate.admit(source)
        return gate

    @property
    def dirty(self) -> tuple[SourceSegment, ...]:
        """The segments that ``read`` wants, ascending."""
        return tuple(self._dirty[ordinal] for ordinal in sorted(self._dirty))

    def admit(self, source: SourceSegment, fates: Fates | None = None, *, read: bool = False) -> None:
        """A segment of the dirty range, of known ``fates`` (else those that it has by now). ``read``: its keys are in the table already."""
        if fates is not None:
            self._fates[source.ordinal] = fates
        table = source.table
        wanted = (table.control == NOT_CONTROL) & ~self._fates[source.ordinal].aborted & (table.last_offset >= self._first_dirty)
        self._dirty[source.ordinal] = source
        self._wanted[source.ordinal] = wanted
        self._unread[source.ordinal] = 0 if read else int(np.count_nonzero(wanted))

    def refold(self, sources: Sequence[SourceSegment]) -> None:
        """What became of all transactions, by the fold over all segments, or what stands in for the batches of some."""
        self._fates = {source.ordinal: fates for source, fates in zip(sources, fates_of(sources, self._opened), strict=True)}

    def aborted(self, source: SourceSegment) -> Flags:
        """By the fates that are known now."""
        return self._fates[source.ordinal].aborted

    # ---- the keys of the dirty range

    def read(self, source: SourceSegment) -> None:
        """The keys of a dirty segment, whose bytes are there. Raises GateFailed where the cleaner's table of it is wrong."""
        self.begin(source)
        headers = headers_of(source.table)
        for some, records in self._walk(self._reader, source.buf, headers, self._wanted[source.ordinal], source.name):
            self.note(source, self._looked(records, headers[:, some], source))

    def begin(self, source: SourceSegment) -> None:
        """Reads a segment's headers, whose bytes are there, and compares them with the cleaner's table."""
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
        if not self.has_whole(source):
            self._told[source.ordinal] = _MustBeLeft(np.full(len(table), _NOT_TOLD, np.int64), np.zeros(len(table), np.uint64))

    def look(self, lane: Lane, source: SourceSegment, chunk: Chunk) -> KeysSeen:
        """What pass 1 inflated, read by the gate itself, for ``note``. It lives in the lane."""
        if not np.array_equal(chunk.wanted, self._wanted[source.ordinal][chunk.first : chunk.last]):
            offset = int(source.table.last_offset[chunk.first])
            raise GateFailed("gate and cleaner do not agree which batches were aborted", segment=source.name, offset=offset)
        headers, records = self._look(lane, source, chunk, chunk.wanted)
        return self._looked(records, headers, source)

    def note(self, source: SourceSegment, looked: KeysSeen) -> None:
        """Takes the keys; the segment is read when all its chunks were noted."""
        self._table.put(looked.hashes, looked.offsets, looked.digests)
        self._unread[source.ordinal] -= looked.batches

    def expect(self, lane: Lane, source: SourceSegment, chunk: Chunk) -> None:
        """What pass 2 inflated, of a segment that is not wholly in the key table: says what must be left of it."""
        if not self.has_whole(source):
            some = slice(chunk.first, chunk.last)
            mine = chunk.wanted & (source.table.control[some] == NOT_CONTROL) & ~self._fates[source.ordinal].aborted[some]
            headers, records = self._look(lane, source, chunk, mine)
            self._tell(source, chunk.first + np.flatnonzero(mine), headers, records)

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

    def _looked(self, records: Records, headers: Headers, source: SourceSegment) -> KeysSeen:
        batches, digests = headers.shape[1], records.digest
        due = self._due(records, headers, source)
        if due.any():
            digests = np.where(due, digests | DUE, digests)
        picked = (records.flags & KEYLESS == 0) & (records.offset >= self._first_dirty) & (records.offset <= self._rules.latest_offset)
        if picked.all():
            return KeysSeen(batches, records.hashes, records.offset, digests)
        return KeysSeen(batches, records.hashes[picked], records.offset[picked], digests[picked])

    def _due(self, records: Records, headers: Headers, source: SourceSegment) -> Flags:
        """Tombstones that this round removes."""
        tombstones = records.flags & NULL_VALUE != 0
        if not tombstones.any():
            return tombstones
        v2 = headers[col.MAGIC] == 2
        dated = v2 & (headers[col.ATTRIBUTES] & HORIZON != 0) & (headers[col.BASE_TIMESTAMP] <= self._rules.now_ms)
        due = dated | (~v2 & (source.mtime_ms <= self._rules.legacy_horizon_ms))
        return tombstones & np.repeat(due, np.diff(records.first_row))

    def _fate(self, records: Records, headers: Headers, source: SourceSegment) -> npt.NDArray[np.uint8]:
        """What the rules say of each record: _GO, _STAY, or _EITHER where the table does not speak for its key."""
        latest = self._table.latest(records.hashes)
        fate = np.where(latest == UNKNOWN, _EITHER, np.where(latest > records.offset, _GO, _STAY)).astype(np.uint8)
        fate[(records.flags & KEYLESS != 0) | self._due(records, headers, source)] = _GO
        fate[records.offset > self._rules.latest_offset] = _STAY
        return fate

    def _tell(self, source: SourceSegment, batches: Int64s, headers: Headers, records: Records) -> None:
        told = self._told[source.ordinal]
        stays = self._fate(records, headers, source) == _STAY
        told.count[batches], told.chain[batches] = chains(records, stays)

    def has_whole(self, source: SourceSegment) -> bool:
        """Whether the key table tells everything that may be left of a segment. Then ``look`` wants the batches that the map wants."""
        table = source.table
        if counts_from_zero(table) or source.base < self._first_dirty:
            return False
        return not len(table) or int(table.last_offset[-1]) <= self._rules.latest_offset

    # ---- one group

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
        if any(self._unread.values()):
            raise CompactorError("the gate was asked before it had read the dirty range", hint="This is a bug; please report it")
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
            self._compare_markers(_Pairs.of(group, source, begin, dated), output, mapped)
            compare = self._tick_off if self.has_whole(source) else self._compare
            records += compare(_Pairs.of(group, source, begin, data), output, mapped)
            begin += len(source.table)
        for cause, offset in copy_problems(group):
            raise GateFailed(cause, segment=name, offset=offset)
        return GateReport(headers.shape[1], records, self._table.keys, self._table.coverage)

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
        if end_offset is not None and _is_filler(output[:, -1], end_offset):
            # The header of a batch that must stay can look just like one.
            filler = not np.any(must_stay(source, self._rules) & (source[col.LAST] == end_offset))
            if filler and len(source) and output[col.LEADER_EPOCH, -1] != source[col.LEADER_EPOCH][-1]:
                raise GateFailed("a filler of another leader epoch than the last source batch", segment=name, offset=end_offset)
        output = output[:, : output.shape[1] - int(filler)]
        origin, problem = pair(source, output, reach)
        if problem:
            raise GateFailed(problem[0], segment=name, offset=problem[1])
        return Group(source, fates, output, origin, self._rules)

    def _tick_off(self, pairs: _Pairs, output: Bytes, mapped: Mapped) -> int:
        """A segment of the dirty range: its output records are their keys' last ones, and all of them are there."""
        source, seen, told = pairs.source, 0, 0
        for _, records in self._written(pairs, output):
            wrong, told_here = self._table.tick(records.hashes, records.offset, records.digest)
            if wrong >= 0:
                self._refuse(records, wrong, source.name)
            seen += len(records.offset)
            told += told_here
        if told != self._expected(source.ordinal):
            offset = self._table.missing(source.base, source.end)
            with mapped(source):
                key = self._key_at(source, offset)
            raise GateFailed("the last record of a key is gone", segment=source.name, offset=offset, key=key)
        return seen

    def _expected(self, ordinal: int) -> int:
        """How many records must be left of a segment of the dirty range, of keys that the table speaks for."""
        if not self._live:
            bounds = np.array([*(s.base for s in self.dirty), self.dirty[-1].end], np.int64)
            self._live = dict(zip((s.ordinal for s in self.dirty), self._table.live(bounds).tolist(), strict=True))
        return self._live[ordinal]

    def _compare(self, pairs: _Pairs, output: Bytes, mapped: Mapped) -> int:
        """Any other segment: each output batch has the records that its source batch said, and none is gone that must stay."""
        source = pairs.source
        told = self._told[source.ordinal]
        data = (source.table.control == NOT_CONTROL) & ~self._fates[source.ordinal].aborted
        if np.any(data & (told.count == _NOT_TOLD)):
            headers = headers_of(source.table)
            with mapped(source):
                for some, records in self._walk(self._reader, source.buf, headers, data & (told.count == _NOT_TOLD), source.name):
                    self._tell(source, some, headers[:, some], records)
        seen = 0
        for batches, written in self._written(pairs, output):
            counted = self._table.speaks(written.hashes) | (written.offset > self._rules.latest_offset)
            count, chain = chains(written, counted)
            wrong = (count != told.count[batches]) | (chain != told.chain[batches])
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                rows = range(int(written.first_row[at]), int(written.first_row[at + 1]))
                with mapped(source):
                    self._explain(source, int(batches[at]), written, rows)
            seen += len(written.offset)
        lost = data & (told.count > 0)
        lost[pairs.origin[pairs.output[col.COUNT] > 0]] = False
        if lost.any():
            with mapped(source):
                self._explain(source, int(np.flatnonzero(lost)[0]), None, range(0))
        return seen

    def _compare_markers(self, pairs: _Pairs, output: Bytes, mapped: Mapped) -> None:
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
        """Of the records of each batch: number, chain, whether one has attributes (Kafka writes none); the highest timestamp."""
        sums, highest = np.zeros((3, headers.shape[1]), np.uint64), np.zeros(headers.shape[1], np.int64)
        for some, records in self._walk(reader, buf, headers, headers[col.COUNT] > 0, segment):
            sums[:2, some] = chains(records, np.ones(len(records.offset), np.bool_))
            sums[2, some] = np.bitwise_or.reduceat(records.flags & col.ODD_ATTRIBUTES, records.first_row[:-1])
            highest[some] = np.maximum.reduceat(records.timestamp, records.first_row[:-1])
        return sums, highest

    # ---- output

    def _written(self, pairs: _Pairs, output: Bytes) -> Iterator[tuple[Int64s, Records]]:
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

    def _refuse(self, records: Records, row: int, segment: str) -> NoReturn:
        offset = int(records.offset[row])
        last, word = self._table.entry(records.hashes[row : row + 1])
        if last == ABSENT or last < offset:
            cause = "a record that no source has"
        elif last > offset:
            cause = f"superseded by the record at offset {last}"
        elif word & int(DUE):
            cause = "a tombstone whose horizon has passed"
        elif word & 0xFFFFFFFF != int(records.digest[row]):
            cause = _CHANGED
        else:
            cause = "it comes twice"
        raise GateFailed(cause, segment=segment, offset=offset, key=records.key(row))

    def _explain(self, source: SourceSegment, batch: int, written: Records | None, rows: range) -> NoReturn:
        """Says which record of a batch is wrong; ``rows`` are those of its output batch, if there is one."""
        headers, records = self._batch(source, batch)
        fate = self._fate(records, headers, source)
        known = {int(offset): row for row, offset in enumerate(records.offset)}
        if written is not None:
            for row in rows:
                self._explain_record(source.name, records, fate, known.get(int(written.offset[row])), written, row)
        left = set() if written is None else {int(written.offset[row]) for row in rows}
        lost = next(row for row in np.flatnonzero(fate == _STAY).tolist() if int(records.offset[row]) not in left)
        raise GateFailed("the last record of a key is gone", segment=source.name, offset=int(records.offset[lost]), key=records.key(lost))

    def _explain_record(
        self, segment: str, records: Records, fate: npt.NDArray[np.uint8], at: int | None, written: Records, row: int
    ) -> None:
        offset, key = int(written.offset[row]), written.key(row)
        if at is None:
            raise GateFailed("a record that no source has", segment=segment, offset=offset, key=key)
        if records.digest[at] != written.digest[row]:
            raise GateFailed(_CHANGED, segment=segment, offset=offset, key=key)
        if fate[at] == _GO:
            last = int(self._table.latest(written.hashes[row : row + 1])[0])
            cause = f"superseded by the record at offset {last}" if last > offset else "a tombstone whose horizon has passed"
            raise GateFailed(cause, segment=segment, offset=offset, key=key)

    def _key_at(self, source: SourceSegment, offset: int) -> bytes | None:
        _, records = self._batch(source, int(np.searchsorted(source.table.last_offset, offset)))
        return records.key(int(np.flatnonzero(records.offset == offset)[0]))


_CHANGED: Final = "key, timestamp, value or headers are not the source's"


def _most_records(source: SourceSegment) -> int:
    """An upper bound; wrappers do not say, but no message takes less than 14 bytes and codecs shrink about tenfold."""
    table = source.table
    return int(np.where(table.count > 0, np.minimum(table.count, 2 * table.size), table.size).sum())


def _is_filler(batch: Int64s, end_offset: int) -> bool:
    plain = {col.BASE: end_offset, col.LAST: end_offset, col.SIZE: 61, col.MAGIC: 2, col.COUNT: 0, col.ATTRIBUTES: 0,
             col.PRODUCER_ID: -1, col.PRODUCER_EPOCH: -1, col.BASE_SEQUENCE: -1}  # fmt: skip
    return all(int(batch[name]) == value for name, value in plain.items())
