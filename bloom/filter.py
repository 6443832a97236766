"""KeyFilter: pybloom-live's BloomFilter over key hashes, with its positions made by us and a bulk way in and out.

The library hashes ``str(key)``, at 2 to 9 microseconds a key. Here a key comes as the hash that the cleaner has made anyway
(bloom.siphash), and every slice's position is made from 64 freshly mixed bits: plain double hashing modulo the slice shows too many false
positives at 2e-9. The bulk kernels write the very bits that ``add`` writes and give the very answers that ``in`` gives, whole slices at a
time, so that one slice stays in the processor's cache.

A file of such a filter read by the plain class would give false negatives. Only bloom.sidecar writes and reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from pybloom_live import BloomFilter

from bloom.jit import kernel, leaf, multiply_high
from bloom.siphash import tag_of

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = 2**64 - 1

Hashes = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.uint8]


def position_in_slice(h0: int, h1: int, slice_number: int, bits_per_slice: int) -> int:
    """Where slice ``slice_number`` has the key's bit: the finalizer of splitmix64 over a step of its own for every key."""
    tag = (h0 & 0xFFFFFFFF) or 1
    x = (h1 + (slice_number + 1) * (tag * GOLDEN | 1)) & MASK
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    x ^= x >> 31
    return (x * bits_per_slice) >> 64


class KeyFilter(BloomFilter):  # type: ignore[misc]
    """The keys of ``add`` and ``in`` are the 16 bytes of a hash (``row.tobytes()``)."""

    def _setup(self, error_rate: float, num_slices: int, bits_per_slice: int, capacity: int, count: int) -> None:
        super()._setup(error_rate, num_slices, bits_per_slice, capacity, count)
        self.make_hashes = self._positions

    def _positions(self, key: bytes) -> Iterator[int]:
        if len(key) != 16:
            raise ValueError("a key hash has 16 bytes")
        h0, h1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        return (position_in_slice(h0, h1, number, self.bits_per_slice) for number in range(self.num_slices))

    def add_all(self, hashes: Hashes) -> None:
        """``add`` for every row of shape (n, 2), ``count`` included. Raises IndexError as ``add`` does, before any bit is set."""
        if self.count > self.capacity:
            raise IndexError("BloomFilter is at capacity")
        fresh = np.zeros(len(hashes), dtype=np.bool_)
        _add(self._bits(), self.num_slices, self.bits_per_slice, hashes, fresh)
        self.count += int(np.count_nonzero(fresh))

    def contains_all(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """``in`` for every row of shape (n, 2)."""
        answer = np.zeros(len(hashes), dtype=np.bool_)
        _contains(self._bits(), self.num_slices, self.bits_per_slice, hashes, np.arange(len(hashes)), answer)
        return answer

    def copy(self) -> KeyFilter:
        """The library's would return the plain class, which looks elsewhere for its bits. Union and intersection are made from it."""
        twin = type(self)(self.capacity, self.error_rate)
        twin.bitarray = self.bitarray.copy()
        twin.count = self.count
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.make_hashes = self._positions

    def _bits(self) -> Bits:
        return np.frombuffer(self.bitarray, dtype=np.uint8)


@leaf
def _bit(h0: np.uint64, h1: np.uint64, slice_number: int, bits_per_slice: int) -> np.uint64:
    """The same as ``position_in_slice``, counted from the first slice. Unsigned: an index that may be negative costs a test."""
    x = h1 + np.uint64(slice_number + 1) * (np.uint64(tag_of(h0)) * np.uint64(GOLDEN) | np.uint64(1))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    x ^= x >> np.uint64(31)
    bit: np.uint64 = np.uint64(slice_number * bits_per_slice) + multiply_high(x, np.uint64(bits_per_slice))
    return bit


@kernel
def _add(bits: Bits, slices: int, bits_per_slice: int, hashes: Hashes, fresh: npt.NDArray[np.bool_]) -> None:
    for number in range(slices):
        for row in range(len(hashes)):
            bit = _bit(hashes[row, 0], hashes[row, 1], number, bits_per_slice)
            before = bits[bit >> np.uint64(3)]
            mask = np.uint8(np.uint64(1) << (bit & np.uint64(7)))
            bits[bit >> np.uint64(3)] = before | mask
            fresh[row] |= (before & mask) == 0


@kernel
def _contains(
    bits: Bits, slices: int, bits_per_slice: int, hashes: Hashes, left: npt.NDArray[np.int64], answer: npt.NDArray[np.bool_]
) -> None:
    """``left``: the numbers of the rows; after each slice only those that it could not rule out."""
    rows = len(left)
    for number in range(slices):
        kept = 0
        for i in range(rows):
            row = left[i]
            bit = _bit(hashes[row, 0], hashes[row, 1], number, bits_per_slice)
            left[kept] = row
            kept += (bits[bit >> np.uint64(3)] >> np.uint8(bit & np.uint64(7))) & 1
        rows = kept
    for i in range(rows):
        answer[left[i]] = True
