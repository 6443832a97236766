"""Input and result of the gate, the independent check of a round: what it is told about the round, and what it reports of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bloom.siphash import siphash_key_halves
from compactor.cleaner.passes.retention import RetentionRules
from compactor.cleaner.passes.source import SourceSegment
from compactor.kernels.common import HashKeyHalf

_STRIDE: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it, modulo 2^64, are spread evenly."""


@dataclass(frozen=True, slots=True)
class CleanedSegmentCheckReport:
    """Summary of the gate's check of a group.

    batches, records: number of batches and of records that were compared.
    keys: number of keys of the dirty range that were looked up.
    coverage: share of the dirty range's keys that were looked up, 1.0 for all.
    """

    batches: int
    records: int
    keys: int
    coverage: float


@dataclass(frozen=True, slots=True)
class CleanedSegmentCheckParameters:
    """Parameters of a round against which its cleaned segments are checked.

    rules: the cleaner's rules.
    first_dirty: first offset that the round cleans. Keys are checked for the offsets from it to rules.latest_offset, both inclusive.
    hash_key: the cleaner's hash key, 16 bytes.
    inflate_limit: most bytes that one batch may inflate to.
    opened: by producer id, the first offset of a transaction that was open at the start of the first source.
    """

    rules: RetentionRules
    first_dirty: int
    hash_key: bytes
    inflate_limit: int
    opened: Mapping[int, int] = field(default_factory=dict)

    @property
    def gate_hash_key_halves(self) -> tuple[HashKeyHalf, HashKeyHalf]:
        """Return the gate's own hash key as two numbers. Keys that collide in the cleaner's map do not collide under it."""
        return siphash_key_halves(hashlib.sha256(b"gate" + self.hash_key).digest()[:16])

    @property
    def hash_value_inside_checked_key_range(self) -> int:
        """Return a hash value that must lie in the range of key hashes that the gate checks if memory does not suffice for all keys. The
        value, from 0 to 2^64 - 1, depends on the first dirty offset, so that each round checks other keys.
        """
        return self.first_dirty * _STRIDE % 2**64

    def has_dirty_offsets(self, source: SourceSegment) -> bool:
        """Return whether a segment has offsets in the dirty range."""
        return self.first_dirty <= self.rules.latest_offset and source.end > self.first_dirty and source.base <= self.rules.latest_offset
