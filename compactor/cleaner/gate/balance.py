"""The result's side of the balance: what a new segment holds, summed by the gate's readers and not by the cleaner that wrote it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel
from compactor.cleaner.gate.reading import (
    COUNT,
    MAGIC,
    POSITION,
    Headers,
    RecordReader,
    Records,
    TooMuch,
    Unreadable,
    chunks_of,
    read_headers,
    varint,
    wrong_crc,
)
from compactor.cleaner.passes.rewrite import CleanedSegment
from compactor.errors import BadData
from compactor.model.balance import Balance
from compactor.records.balance import (
    BATCHES_DROPPED,
    OPENED,
    RECORDS,
    RECORDS_DROPPED,
    BalanceKey,
    Sums,
    add_batch,
    as_sum,
    record_digest,
    second_half,
)
from compactor.records.batches import Bytes, Int64s, map_file
from compactor.stages import WorkStage, measured

Flags = npt.NDArray[np.bool_]


class ResultTally:
    """Sums up one new segment. ``add`` is shown records as the gate reads them; ``balance`` reads those that nobody has shown."""

    def __init__(self, cleaned: CleanedSegment, key: BalanceKey, inflate_limit: int) -> None:
        self._cleaned = cleaned
        self._key = key
        self._limit = inflate_limit
        self._begun: tuple[Bytes, Headers] | None = None
        self._anew = self._wanted = cleaned.anew
        self._records = np.zeros(3, np.uint64)

    def begin(self, buf: Bytes, headers: Headers) -> None:
        """The segment's bytes and all its batches, whose checksums are right."""
        if headers.shape[1] != len(self._anew):
            self._anew = np.zeros(headers.shape[1], np.bool_)  # nobody knows which is which, and nothing will add up
        self._begun = buf, headers
        self._wanted = self._anew & (headers[COUNT] > 0)

    def add(self, headers: Headers, records: Records) -> None:
        """Batches of the segment, by their headers, and their records; each counts once."""
        batches = np.searchsorted(self._read()[1][POSITION], headers[POSITION])
        _add_records(
            batches, self._wanted, records.buf, records.first_row, records.offset, records.key_start,
            records.key_length, *self._key.halves, self._records,
        )  # fmt: skip

    @measured(WorkStage.GATE)
    def balance(self) -> Balance:
        """Asked once, at the end. Raises BadData where what was written cannot be read."""
        buf, headers = self._read()
        self._read_rest(buf, headers)
        self._begun = None  # whoever still knows this tally must not keep the file's room on the disk
        cleaned, sums = self._cleaned, self._cleaned.sums
        left, result = np.zeros(3, np.uint64), np.zeros(3, np.uint64)
        _add_batches(buf, headers[POSITION], headers[MAGIC], self._anew, *self._key.halves, left, result)
        return Balance(
            sources=cleaned.sources,
            left=as_sum(left),
            opened=as_sum(sums[OPENED]),
            dropped={reason: as_sum(sums[row]) for reason, row in BATCHES_DROPPED.items() if sums[row, 0]},
            result=as_sum(result),
            records=as_sum(sums[RECORDS]),
            written=as_sum(self._records),
            records_dropped={reason: as_sum(sums[row]) for reason, row in RECORDS_DROPPED.items() if sums[row, 0]},
        )

    def _read(self) -> tuple[Bytes, Headers]:
        if self._begun is None:
            buf = map_file(self._cleaned.paths["log"])
            try:
                headers = read_headers(buf)
            except Unreadable as problem:
                raise self._bad(f"cannot be read: {problem}") from None
            if wrong_crc(buf, headers) >= 0:
                raise self._bad("has a batch with a wrong CRC")
            self.begin(buf, headers)
            return buf, headers
        return self._begun

    def _read_rest(self, buf: Bytes, headers: Headers) -> None:
        """What the gate did not read, or all of it where there is no gate."""
        waiting = list(chunks_of(headers, self._wanted))[::-1]
        if not waiting:
            return
        reader = RecordReader(np.uint64(0), np.uint64(0), self._limit)
        reader.shown_to = self.add
        while waiting:
            some = waiting.pop()
            try:
                reader.read(buf, headers[:, some])
            except TooMuch:
                waiting += np.array_split(some, 2)[::-1]
            except Unreadable as problem:
                raise self._bad(f"cannot be read: {problem}") from None

    def _bad(self, what: str) -> BadData:
        return BadData(f"the new segment {what}", segment=self._cleaned.paths["log"].name, hint="This is a bug; please report it")


@kernel
def _add_records(
    batches: Int64s,
    wanted: Flags,
    buf: Bytes,
    first_row: Int64s,
    offset: Int64s,
    key_start: Int64s,
    key_length: Int64s,
    k0: np.uint64,
    k1: np.uint64,
    out: Sums,
) -> None:
    """What is written anew is of v2: the value is behind the key, and its length before it."""
    for i in range(batches.size):
        if not wanted[batches[i]]:
            continue
        wanted[batches[i]] = False
        for row in range(first_row[i], first_row[i + 1]):
            value_length, value_start = varint(buf, key_start[row] + max(key_length[row], 0), buf.size)
            one = record_digest(buf, offset[row], key_start[row], key_length[row], value_start, max(value_length, -1), k0)
            out[0] += np.uint64(1)
            out[1] += one
            out[2] += second_half(one, k1)


@kernel
def _add_batches(buf: Bytes, position: Int64s, magic: Int64s, anew: Flags, k0: np.uint64, k1: np.uint64, left: Sums, result: Sums) -> None:
    for i in range(position.size):
        add_batch(buf, position[i], magic[i], k0, k1, result)
        if not anew[i]:
            add_batch(buf, position[i], magic[i], k0, k1, left)
