"""HyperLogLog over key hashes: estimates the number of distinct keys in several segments together, from 4 KiB per segment.

The estimator is that of Ertl, "New cardinality estimation algorithms for HyperLogLog sketches" (2017), which needs no bias tables. Its
standard error is 1.04 / sqrt(registers), which is 1.6 %. Sketches of segments are merged by taking the maximum of each register.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from compactor.kernels.jit import kernel

PRECISION = 12
REGISTERS = 1 << PRECISION
LONGEST = 64 - PRECISION + 1

Registers = npt.NDArray[np.uint8]


def empty_sketch() -> Registers:
    """Return a HyperLogLog sketch without keys."""
    return np.zeros(REGISTERS, dtype=np.uint8)


@kernel
def add_to_sketch(sketch: Registers, hashes: npt.NDArray[np.uint64]) -> None:
    """Add key hashes of shape (n, 2) to a HyperLogLog sketch. Keys that were added before change nothing."""
    for row in range(len(hashes)):
        h1 = hashes[row, 1]
        rest = h1 << np.uint64(PRECISION)
        run = 1
        while run < LONGEST and rest >> np.uint64(63) == 0:
            rest <<= np.uint64(1)
            run += 1
        register = h1 >> np.uint64(64 - PRECISION)
        sketch[register] = max(sketch[register], np.uint8(run))


def merge_sketches(sketches: Iterable[Registers]) -> Registers:
    """Return the HyperLogLog sketch of all keys of several sketches."""
    merged = empty_sketch()
    for sketch in sketches:
        np.maximum(merged, sketch, out=merged)
    return merged


def estimate_distinct_keys(sketch: Registers) -> int:
    """Return the estimated number of distinct keys in a HyperLogLog sketch."""
    counts = np.bincount(sketch, minlength=LONGEST + 1)
    if counts[0] == REGISTERS:
        return 0
    z = REGISTERS * _tau_correction(1 - counts[LONGEST] / REGISTERS)
    for run in range(LONGEST - 1, 0, -1):
        z = 0.5 * (z + counts[run])
    z += REGISTERS * _sigma_correction(counts[0] / REGISTERS)
    return round(REGISTERS**2 / (2 * math.log(2) * z))


def _sigma_correction(x: float) -> float:
    """Return Ertl's sigma(x), the correction for registers that no key has reached. ``x``, the share of such registers, is less than 1."""
    power, total = 1.0, x
    while True:
        x *= x
        before = total
        total += x * power
        power += power
        if total == before:
            return total


def _tau_correction(x: float) -> float:
    """Return Ertl's tau(x), the correction for registers at their maximum. ``x`` is the share of the other registers."""
    if x in (0.0, 1.0):
        return 0.0
    power, total = 1.0, 1 - x
    while True:
        x = math.sqrt(x)
        before = total
        power *= 0.5
        total -= (1 - x) ** 2 * power
        if total == before:
            return total / 3
