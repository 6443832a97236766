"""The equivalence gate where no process sees all keys: each task checks its part against a sample of the keys of all the others.

    pass 1      each dirty segment is read for the gate too: the last record in it of every key of the sample
    gathering   one task makes one table of them: the last record of each key
    pass 2      a group is compared with its sources and with that table before it is uploaded

A key is in the sample if its hash under the gate's own key ends in certain bits, other ones each round. Everything else of the gate is as
on one machine: what became of transactions (folded here a second time, from the batches that decide), headers, order, checksums, coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.cleaner.gate.batches import Fates
from compactor.cleaner.gate.judge import Gate, GateTerms, gate_seed
from compactor.cleaner.gate.table import CELL_BYTES, DIGEST, DUE, KeyTable
from compactor.cleaner.passes.source import SourceSegment
from compactor.model.plan import CompactionPlan
from compactor.records.batches import Int64s
from compactor.round.rewrite import rules_of
from compactor.spark.round.exchange import Arrays

MOST_TABLE_BYTES: Final = 16 << 20
"""Each task of pass 2 fetches the table."""

FEWEST_BITS: Final = 3
"""An eighth of the keys at most, so that cleaner and gate together exchange less than 24 bytes a record."""

_SLACK: Final = 2
"""The sample is not exactly its share, and a table is at most 0.7 full; two thirds of its budget are its cells."""


def sample_bits(records: int, budget_bytes: int) -> int:
    """How many bits of a hash choose the keys that are looked up: as few as fit the table of so many records."""
    most = min(MOST_TABLE_BYTES, budget_bytes // 4)
    return max(FEWEST_BITS, (records * CELL_BYTES // max(most, 1)).bit_length())


def seed_of(plan: CompactionPlan) -> int:
    return gate_seed(plan.first_dirty_offset, plan.end_offset, plan.now_ms)


class Sample(KeyTable):
    """A key table that speaks for the sample only, and travels."""

    def __init__(self, records: int, seed: int, bits: int) -> None:
        """``records``: of which the sample is taken."""
        share = (records >> bits) + 64
        super().__init__(_SLACK * share * CELL_BYTES * 3 // 2, _SLACK * share, seed, bits)

    def arrays(self) -> Arrays:
        return {"gate_keys": self.taken(), "gate_bits": np.array([self.bits], np.int64)}

    def take(self, cells: npt.NDArray[np.uint64]) -> None:
        """Puts what ``arrays`` gave of another one; keys that this one does not speak for are left out."""
        hashes = np.stack((cells[:, 0], cells[:, 2] >> np.uint64(32)), axis=1)
        self.put(hashes, cells[:, 1].astype(np.int64), cells[:, 2] & (DIGEST | DUE))

    @staticmethod
    def of(parts: Sequence[Arrays], seed: int, bits: int) -> Sample:
        """One table of all parts. Where a part had to narrow, so does the whole."""
        narrowest = max((int(part["gate_bits"][0]) for part in parts), default=bits)
        rows = sum(len(part["gate_keys"]) for part in parts)
        whole = Sample(rows << narrowest, seed, narrowest)
        for part in parts:
            whole.take(part["gate_keys"])
        return whole


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


def part_gate(
    plan: CompactionPlan, hash_key: bytes, sources: Sequence[SourceSegment], fates: Sequence[Fates], sample: Sample, *, full: bool
) -> Gate:
    """The gate over some segments of a log, whose fates and keys come from elsewhere.

    ``hash_key``: the cleaner's; ``full``: the sample has the keys of the whole dirty range, and nothing is to be read for it.
    """
    terms = GateTerms(rules_of(plan), plan.first_dirty_offset, hash_key, plan.policy.max_decompressed_batch_bytes)
    gate = Gate(terms, sample, {source.ordinal: known for source, known in zip(sources, fates, strict=True)})
    for source in sources:
        if terms.is_dirty(source):
            gate.admit(source, read=full)
    return gate
