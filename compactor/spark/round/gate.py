"""The equivalence gate where no process sees all keys: each range of the gate's own hash is judged by one task.

    pass 1      each segment is read for the gate too: rows of its records, sorted by range, an object for each bundle
    ranges      the last record of each key, and what must be left of each segment: a number and the sum of their marks
    gathering   the sums of all range tasks, 16 bytes a segment
    pass 2      a group is compared with its sources and with these sums before it is uploaded

Everything else of the gate is as on one machine: what became of transactions (folded here a second time, from the batches that decide),
headers, order, checksums, coverage. Of the cleaner's exchange the gate uses only what carries bytes.

    object      [range 0 | range 1 | ..] of dirty rows   [range 0 | ..] of rows outside the dirty range   [directory]
    directory   for each range, and behind the last: in both sections the first of its rows, 8 bytes each; the CRCs of both, 4 bytes each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, NoReturn

import numpy as np
import numpy.typing as npt

from compactor.cleaner.gate.batches import Fates
from compactor.cleaner.gate.judge import Gate, GateTerms
from compactor.cleaner.gate.ranges import LastRecords
from compactor.cleaner.gate.spool import RowSpool
from compactor.cleaner.gate.table import ROW_BYTES, WORDS, Rows, Sums, Words
from compactor.cleaner.passes.source import SourceSegment
from compactor.errors import BadData, CompactorError
from compactor.model.plan import CompactionPlan
from compactor.records.batches import Int64s
from compactor.round.rewrite import rules_of
from compactor.spark.round.exchange import Arrays, get_scratch
from compactor.storage.port import ObjectStore

ENTRY_BYTES: Final = 24

Bounds = Int64s
"""Where each segment whose rows are judged begins, ascending, and where the last one ends."""


# ---- rows of a bundle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateBundle:
    """Where the gate's rows of some segments lie. ``dirty_rows``: of them, those of the dirty range."""

    key: str
    size: int
    ranges: int
    dirty_rows: int
    rows_below: int

    row_bytes: ClassVar[int] = ROW_BYTES

    def directory(self, store: ObjectStore, first: int, last: int) -> npt.NDArray[np.int64]:
        """Where each of the ranges [first, last) begins, and where the last one ends: in both sections, and the CRCs of both."""
        total = self.dirty_rows + self.rows_below
        data = get_scratch(store, self.key, total * ROW_BYTES + first * ENTRY_BYTES, (last - first + 1) * ENTRY_BYTES)
        found = (
            np.frombuffer(data, np.int64).reshape(-1, 3) if len(data) == (last - first + 1) * ENTRY_BYTES else np.empty((0, 3), np.int64)
        )
        if not len(found) or (np.diff(found[:, :2], axis=0) < 0).any() or found[-1, 0] > self.dirty_rows or found[-1, 1] > total:
            self.damaged()
        return found

    def rows(self, store: ObjectStore, begin: int, end: int) -> Rows:
        data = get_scratch(store, self.key, begin * ROW_BYTES, (end - begin) * ROW_BYTES)
        if len(data) != (end - begin) * ROW_BYTES:
            self.damaged()
        return np.frombuffer(data, np.uint64).reshape(-1, WORDS)

    def damaged(self) -> NoReturn:
        raise BadData("the gate's rows in a scratch object are not what was written", segment=self.key, hint="Run it again")


def write_rows(spool: RowSpool, path: Path, key: str) -> GateBundle:
    """The file of a bundle, which is to be put there."""
    with path.open("wb") as file:
        begins, crcs = spool.write(file)
        entries = np.zeros((spool.ranges + 1, 3), np.int64)
        entries[:, :2] = begins.T
        entries[:-1, 2] = crcs.T.astype(np.uint32).copy().view(np.int64)[:, 0]
        file.write(entries.tobytes())
        dirty = int(begins[0, -1])
        return GateBundle(key, file.tell(), spool.ranges, dirty, int(begins[1, -1]) - dirty)


# ---- transactions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseFates:
    """What the gate's own fold says of a segment whose other batches are of no transaction."""

    batches: int
    places: Int64s
    fates: Fates

    def whole(self) -> Fates:
        aborted, idle = np.zeros(self.batches, np.bool_), np.zeros(self.batches, np.bool_)
        began = np.full(self.batches, -1, np.int64)
        aborted[self.places], idle[self.places], began[self.places] = self.fates.aborted, self.fates.idle, self.fates.began
        return Fates(aborted, idle, began)


def no_fates(batches: int) -> Fates:
    return Fates(np.zeros(batches, np.bool_), np.zeros(batches, np.bool_), np.full(batches, -1, np.int64))


def encode_fates(fates: Fates) -> Arrays:
    return {"gate_aborted": np.packbits(fates.aborted), "gate_idle": np.packbits(fates.idle), "gate_began": fates.began}


def decode_fates(arrays: Arrays, batches: int) -> Fates:
    aborted, idle = (np.unpackbits(arrays[name], count=batches).astype(np.bool_) for name in ("gate_aborted", "gate_idle"))
    return Fates(aborted, idle, arrays["gate_began"].astype(np.int64))


# ---- gates over some segments of a log --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """What must be left of each segment, by the offset where it begins, and the number of keys in the dirty range."""

    bounds: Bounds
    sums: Sums
    keys: int

    def arrays(self) -> Arrays:
        return {"gate_bounds": self.bounds, "gate_sums": self.sums, "gate_keys": np.array([self.keys], np.int64)}

    @staticmethod
    def of(arrays: Arrays) -> Judged:
        return Judged(arrays["gate_bounds"], arrays["gate_sums"], int(arrays["gate_keys"][0]))

    def left(self, source: SourceSegment) -> Words:
        place = int(np.searchsorted(self.bounds[:-1], source.base))
        if place >= len(self.sums) or int(self.bounds[place]) != source.base:
            raise CompactorError(f"the gate was not shown {source.name}", hint="This is a bug; please report it")
        return np.asarray(self.sums[place])


def showing(plan: CompactionPlan, hash_key: bytes, source: SourceSegment, fates: Fates, spool: RowSpool) -> Gate:
    """Takes the rows of one segment. ``hash_key``: the cleaner's."""
    gate = Gate(_terms(plan, hash_key), LastRecords(0, 0, lambda ranges, part, parts: spool, on_disk=True), {source.ordinal: fates})
    gate.begin(source)
    return gate


def judging(plan: CompactionPlan, hash_key: bytes, sources: Sequence[SourceSegment], fates: Sequence[Fates], judged: Judged | None) -> Gate:
    """Asked about groups. ``judged`` None: nothing is dirty, and nothing superseded."""
    keys = LastRecords(0, 0, _no_disk)
    known = {source.ordinal: fate for source, fate in zip(sources, fates, strict=True)}
    return Gate(_terms(plan, hash_key), keys, known, {} if judged is None else {source.ordinal: judged.left(source) for source in sources})


def _terms(plan: CompactionPlan, hash_key: bytes) -> GateTerms:
    return GateTerms(rules_of(plan), plan.first_dirty_offset, hash_key, plan.policy.max_decompressed_batch_bytes)


def _no_disk(ranges: int, part: int, parts: int) -> RowSpool:
    raise CompactorError("a gate that takes no keys was given some", hint="This is a bug; please report it")
