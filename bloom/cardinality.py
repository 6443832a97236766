"""How many distinct keys there are in several segments together, from 4 KiB of each: HyperLogLog over the key hashes.

The estimate is the one of Ertl, "New cardinality estimation algorithms for HyperLogLog sketches" (2017), which needs no bias tables:
standard error 1.04 / sqrt(registers), so 1.6 %. Sketches of segments are merged by the maximum of each register.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel

PRECISION = 12
REGISTERS = 1 << PRECISION
LONGEST = 64 - PRECISION + 1

Registers = npt.NDArray[np.uint8]


def empty_sketch() -> Registers:
    return np.zeros(REGISTERS, dtype=np.uint8)


@kernel
def observe(sketch: Registers, hashes: npt.NDArray[np.uint64]) -> None:
    """Adds the keys of shape (n, 2); repeated keys change nothing."""
    for row in range(len(hashes)):
        h1 = hashes[row, 1]
        rest = h1 << np.uint64(PRECISION)
        run = 1
        while run < LONGEST and rest >> np.uint64(63) == 0:
            rest <<= np.uint64(1)
            run += 1
        register = h1 >> np.uint64(64 - PRECISION)
        sketch[register] = max(sketch[register], np.uint8(run))


def union(sketches: Iterable[Registers]) -> Registers:
    """The sketch of all the keys together."""
    merged = empty_sketch()
    for sketch in sketches:
        np.maximum(merged, sketch, out=merged)
    return merged


def estimate(sketch: Registers) -> int:
    """Distinct keys observed."""
    counts = np.bincount(sketch, minlength=LONGEST + 1)
    if counts[0] == REGISTERS:
        return 0
    z = REGISTERS * _tau(1 - counts[LONGEST] / REGISTERS)
    for run in range(LONGEST - 1, 0, -1):
        z = 0.5 * (z + counts[run])
    z += REGISTERS * _sigma(counts[0] / REGISTERS)
    return round(REGISTERS**2 / (2 * math.log(2) * z))


def _sigma(x: float) -> float:
    """The part of the registers that nothing has reached. x < 1."""
    power, total = 1.0, x
    while True:
        x *= x
        before = total
        total += x * power
        power += power
        if total == before:
            return total


def _tau(x: float) -> float:
    """The part of the registers that cannot grow any more."""
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
