"""Bloom filter over key hashes: pybloom-live's BloomFilter with positions computed from the cleaner's hash. A position in each slice comes
from 64 freshly mixed bits: double hashing modulo the slice size gives too many false positives at rates near 2e-9. pybloom-live's own class
must not read such a filter, because it would report false negatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from pybloom_live import BloomFilter

from compactor.kernels.common import Hashes
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import high_product_word, load_u64

# SipHash-2-4-128 (Aumasson and Bernstein, with the 128-bit output of their reference code) of record keys in a byte array.
#
# Of each hash, 96 bits are used: the second half and the lower 32 bits of the first. Key sets, hash ranges and Bloom filters all use
# exactly these bits, so that entries of one can be passed to another. Record keys may come from an attacker, so the hash uses the tier's
# secret key: without it, nobody can construct two record keys with equal hashes. The probability of a collision by chance is 2e-14 among 50
# million keys and 6e-12 among a thousand million.
#
# Hashing takes about 15, 18, 24 and 45 ns for keys of 8, 20, 36 and 100 bytes.


@inline_kernel
def _sip_round(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    v0 += v1
    v1 = (v1 << np.uint64(13)) | (v1 >> np.uint64(51))
    v1 ^= v0
    v0 = (v0 << np.uint64(32)) | (v0 >> np.uint64(32))
    v2 += v3
    v3 = (v3 << np.uint64(16)) | (v3 >> np.uint64(48))
    v3 ^= v2
    v0 += v3
    v3 = (v3 << np.uint64(21)) | (v3 >> np.uint64(43))
    v3 ^= v0
    v2 += v1
    v1 = (v1 << np.uint64(17)) | (v1 >> np.uint64(47))
    v1 ^= v2
    v2 = (v2 << np.uint64(32)) | (v2 >> np.uint64(32))
    return v0, v1, v2, v3


@inline_kernel
def _tail_word(buf: npt.NDArray[np.uint8], end: int, length: int) -> np.uint64:
    rest = length & 7
    if rest == 0:
        return np.uint64(0)
    if length >= 8:
        last: np.uint64 = load_u64(buf, end - 8)
        return last >> np.uint64(8 * (8 - rest))
    word = np.uint64(0)
    for i in range(rest):
        word |= np.uint64(buf[end - rest + i]) << np.uint64(8 * i)
    return word


@inline_kernel
def siphash128(buf: npt.NDArray[np.uint8], start: int, length: int, k0: np.uint64, k1: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Bounds are not checked. Returns SipHash-2-4-128, the low half first."""
    v0 = k0 ^ np.uint64(0x736F6D6570736575)
    v1 = k1 ^ np.uint64(0x646F72616E646F6D ^ 0xEE)
    v2 = k0 ^ np.uint64(0x6C7967656E657261)
    v3 = k1 ^ np.uint64(0x7465646279746573)
    end = start + length
    for position in range(start, end - 7, 8):
        word: np.uint64 = load_u64(buf, position)
        v3 ^= word
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        v0 ^= word
    word = _tail_word(buf, end, length) | (np.uint64(length) << np.uint64(56))
    v3 ^= word
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0 ^= word
    v2 ^= np.uint64(0xEE)
    for _ in range(4):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    low = v0 ^ v1 ^ v2 ^ v3
    v1 ^= np.uint64(0xDD)
    for _ in range(4):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return low, v0 ^ v1 ^ v2 ^ v3


@inline_kernel
def key_hash_tag(h0: np.uint64) -> np.uint32:
    """The lower 32 bits of a hash's first half; 1 for 0, because 0 marks empty cells."""
    tag = np.uint32(h0 & np.uint64(0xFFFFFFFF))
    return tag if tag != 0 else np.uint32(1)


@kernel
def hash_keys(
    buf: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    k0: np.uint64,
    k1: np.uint64,
    out: npt.NDArray[np.uint64],
) -> None:
    """Write the hashes of n keys to ``out``, shape (n, 2): two zeros for a negative length, a record without a key."""
    for i in range(starts.size):
        if lengths[i] < 0:
            out[i, 0] = np.uint64(0)
            out[i, 1] = np.uint64(0)
        else:
            out[i, 0], out[i, 1] = siphash128(buf, int(starts[i]), int(lengths[i]), k0, k1)


def siphash_key_halves(secret: bytes) -> tuple[np.uint64, np.uint64]:
    """Raises ValueError unless the key has 16 bytes. The halves are little-endian."""
    if len(secret) != 16:
        raise ValueError("a hash key has 16 bytes")
    return np.uint64(int.from_bytes(secret[:8], "little")), np.uint64(int.from_bytes(secret[8:], "little"))


GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = 2**64 - 1

BloomFilterBits = npt.NDArray[np.uint8]


def bit_position_in_slice(h0: int, h1: int, slice_number: int, bits_per_slice: int) -> int:
    """A key's bit in one slice, from 0 to ``bits_per_slice`` - 1, mixed as in splitmix64."""
    tag = (h0 & 0xFFFFFFFF) or 1
    x = (h1 + (slice_number + 1) * (tag * GOLDEN | 1)) & MASK
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    x ^= x >> 31
    return (x * bits_per_slice) >> 64


class KeyFilter(BloomFilter):  # type: ignore[misc]
    """Bloom filter over key hashes. ``add`` and ``in`` take the 16 bytes of a hash (``row.tobytes()``)."""

    def _setup(self, error_rate: float, num_slices: int, bits_per_slice: int, capacity: int, count: int) -> None:
        super()._setup(error_rate, num_slices, bits_per_slice, capacity, count)
        self.make_hashes = self._bit_positions

    def _bit_positions(self, key: bytes) -> Iterator[int]:
        if len(key) != 16:
            raise ValueError("a key hash has 16 bytes")
        h0, h1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        return (bit_position_in_slice(h0, h1, number, self.bits_per_slice) for number in range(self.num_slices))

    def add_record_key_hashes(self, hashes: Hashes) -> None:
        """Hashes have shape (n, 2). Raises IndexError, before any bit is set, if the filter is over its capacity."""
        if self.count > self.capacity:
            raise IndexError("BloomFilter is at capacity")
        fresh = np.zeros(len(hashes), dtype=np.bool_)
        _add_hashes_to_filter(self._bit_array(), self.num_slices, self.bits_per_slice, hashes, fresh)
        self.count += int(np.count_nonzero(fresh))

    def flag_possible_keys(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Flag the key hashes, shape (n, 2), that may be in the filter."""
        answer = np.zeros(len(hashes), dtype=np.bool_)
        _flag_possible_keys(self._bit_array(), self.num_slices, self.bits_per_slice, hashes, np.arange(len(hashes)), answer)
        return answer

    def copy(self) -> KeyFilter:
        """The inherited method would return pybloom-live's class, which computes other positions."""
        twin = type(self)(self.capacity, self.error_rate)
        twin.bitarray = self.bitarray.copy()
        twin.count = self.count
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.make_hashes = self._bit_positions

    def _bit_array(self) -> BloomFilterBits:
        return np.frombuffer(self.bitarray, dtype=np.uint8)


@inline_kernel
def _bit_position_in_filter(h0: np.uint64, h1: np.uint64, slice_number: int, bits_per_slice: int) -> np.uint64:
    """Unsigned, because indexes that may be negative cost an extra test in kernels."""
    x = h1 + np.uint64(slice_number + 1) * (np.uint64(key_hash_tag(h0)) * np.uint64(GOLDEN) | np.uint64(1))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    x ^= x >> np.uint64(31)
    bit: np.uint64 = np.uint64(slice_number * bits_per_slice) + high_product_word(x, np.uint64(bits_per_slice))
    return bit


@kernel
def _add_hashes_to_filter(
    bits: BloomFilterBits, slice_count: int, bits_per_slice: int, hashes: Hashes, out_is_new: npt.NDArray[np.bool_]
) -> None:
    """Set bits, and ``out_is_new`` of each key of which at least one bit was not set before."""
    for number in range(slice_count):
        for row in range(len(hashes)):
            bit = _bit_position_in_filter(hashes[row, 0], hashes[row, 1], number, bits_per_slice)
            before = bits[bit >> np.uint64(3)]
            mask = np.uint8(np.uint64(1) << (bit & np.uint64(7)))
            bits[bit >> np.uint64(3)] = before | mask
            out_is_new[row] |= (before & mask) == 0


@kernel
def _flag_possible_keys(
    bits: BloomFilterBits,
    slices: int,
    bits_per_slice: int,
    hashes: Hashes,
    candidate_rows: npt.NDArray[np.int64],
    out_flags: npt.NDArray[np.bool_],
) -> None:
    """Set ``out_flags`` of possible keys; other flags stay."""
    rows = len(candidate_rows)
    for number in range(slices):
        kept = 0
        for i in range(rows):
            row = candidate_rows[i]
            bit = _bit_position_in_filter(hashes[row, 0], hashes[row, 1], number, bits_per_slice)
            candidate_rows[kept] = row
            kept += (bits[bit >> np.uint64(3)] >> np.uint8(bit & np.uint64(7))) & 1
        rows = kept
    for i in range(rows):
        out_flags[candidate_rows[i]] = True
