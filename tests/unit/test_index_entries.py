"""Offset index and time index of a cleaned segment, beyond what golden data shows."""

from __future__ import annotations

import numpy as np

from compactor.model.plan import MAX32
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY, encode_indexes


def test_a_filler_beyond_the_reach_of_an_entry_gets_none() -> None:
    """Offsets in an index are 32-bit distances from the base: a negative one would send readers astray."""
    base, size = 100, np.full(4, 61, np.int64)
    last = np.array([100, 101, base + MAX32, base + MAX32 + 1], np.int64)
    index, timeindex = encode_indexes(base, size, last, np.array([5, 6, 7, -1], np.int64), 0)
    offsets = np.frombuffer(index, OFFSET_ENTRY)
    assert offsets["offset"].tolist() == [1, MAX32]
    assert offsets["position"].tolist() == [61, 122]
    assert np.frombuffer(timeindex, TIME_ENTRY)["offset"].tolist() == [1, MAX32]
