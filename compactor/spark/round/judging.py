"""The second stage for the gate: a task judges some ranges of the gate's hash, one adds up what all of them say."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compactor.cleaner.gate.ranges import judge_range, no_sums
from compactor.cleaner.gate.table import KeyTable, Rows, Sums
from compactor.control.records import ScratchObject
from compactor.spark.cluster.executor import Cost, Shared, note_memory, tier_of
from compactor.spark.round.exchange import create_once, pack_arrays
from compactor.spark.round.fetching import RangeRows, ranges_of
from compactor.spark.round.gate import Bounds, GateBundle, Judged
from compactor.storage.port import ObjectStore

JUDGED = "judged"
"""Name of what the gate says must be left, among a round's scratch objects."""


@dataclass(frozen=True)
class ToJudge:
    """What all range tasks look at for the gate: its rows, and the segments that they are of."""

    bundles: tuple[GateBundle, ...]
    bounds: Bounds


def judge(shared: Shared, ranges: range, to_judge: ToJudge, cost: Cost) -> bytes:
    """What some ranges of the gate's hash say must be left of each segment."""
    store = tier_of(shared).ports.control
    sums, keys = judge_ranges(store, to_judge.bundles, ranges, shared.ranges, shared.map_budget_bytes, to_judge.bounds)
    cost.gate_keys += keys
    note_memory(cost)
    return sums.tobytes() + keys.to_bytes(8, "little")


def gather_judged(shared: Shared, to_judge: ToJudge, answers: Iterable[bytes], cost: Cost) -> ScratchObject:
    """What all ranges together say, as one scratch object."""
    sums, keys = no_sums(len(to_judge.bounds) - 1), 0
    for answer in answers:
        sums += np.frombuffer(answer[:-8], np.uint64).reshape(-1, 2)
        keys += int.from_bytes(answer[-8:], "little")
        cost.exchanged_bytes += len(answer)
    judged = Judged(to_judge.bounds, sums, keys)
    written = create_once(tier_of(shared).ports.control, f"{shared.scratch}{JUDGED}", pack_arrays(judged.arrays(), dense=True))
    cost.exchanged_bytes += written.size
    note_memory(cost)
    return written


@dataclass(frozen=True)
class _OfBundles:
    """The rows of one range (cleaner.gate.ranges.RowsOfRange)."""

    bundles: Mapping[int, GateBundle]
    found: RangeRows

    def rows(self, section: int) -> int:
        return sum(int(directory[1, section] - directory[0, section]) for directory in self.found.directories.values())

    def read(self, section: int) -> Iterator[Rows]:
        for place, rows in self.found.section(list(self.bundles), section):
            crc = int(self.found.directories[place][:1, 2].copy().view(np.uint32)[section])
            if zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data) != crc:
                self.bundles[place].damaged()
            yield np.ascontiguousarray(rows)


def judge_ranges(
    store: ObjectStore, bundles: Sequence[GateBundle], ranges: range, all_ranges: int, budget_bytes: int, bounds: Bounds
) -> tuple[Sums, int]:
    """What neighbouring ranges say must be left of each segment, and how many keys they have. Raises StoreError, BadData, OutOfBudget."""
    by_place, sums, keys, table = dict(enumerate(bundles)), no_sums(len(bounds) - 1), 0, KeyTable(budget_bytes, 0)
    for number, found in ranges_of(store, by_place, ranges):
        keys += judge_range(_OfBundles(by_place, found), table, all_ranges, number, bounds, sums)
    return sums, keys
