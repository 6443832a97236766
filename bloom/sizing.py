"""How large a segment's filter has to be, and when it is better to have none.

A filter that answers wrongly once in a hundred *keys* is of no use to a cleaner: asked about N dirty keys it lets a segment be skipped
only with probability 0.99 ** N, and beyond 458 keys hardly ever. So the promise is made per segment: at most USELESS_RATE of the segments
that share no key with the dirty ones are read for nothing. The rate per key follows from the number of keys that will be asked about: 1 %
at 5 million keys is 2e-9, about 42 bits a key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

USELESS_RATE = 0.01
"""Share of the segments without a dirty key that may be downloaded in vain."""

SKIP_RATE = 0.5
"""Share of the clean segments that meet no dirty key, where a partition has no measurement of its own yet."""

TRIAL = 50
"""Filters that are asked before a partition's own figures decide whether they pay."""


@dataclass(frozen=True)
class FilterDesign:
    """What a filter is made for: ``keys`` in it, ``probes`` distinct keys asked at a time, false positives per key ``rate``."""

    keys: int
    probes: int
    rate: float
    bytes: int


def rate_per_key(probes: int, useless_rate: float = USELESS_RATE) -> float:
    """The false positive rate per key with which ``probes`` questions stay free of false positives but for ``useless_rate``."""
    return -math.expm1(math.log1p(-useless_rate) / max(1, probes))


def useless_rate(rate: float, probes: int) -> float:
    """The probability of at least one false positive among so many questions."""
    return -math.expm1(probes * math.log1p(-rate))


def filter_bytes(keys: int, rate: float) -> int:
    """The size of pybloom-live's bit array, by its own formula."""
    slices = math.ceil(math.log2(1 / rate))
    return (slices * math.ceil(keys * abs(math.log(rate)) / (slices * math.log(2) ** 2)) + 7) // 8


def pays(filter_size: int, rate: float, probes: int, segment_bytes: int, skip_rate: float = SKIP_RATE) -> bool:
    """The rule: bytes expected to be saved in *one* round against the bytes of writing the filter once and fetching it once.

    Saved is the download of the segment, where it meets no dirty key (``skip_rate``) and the filter says so. That its rewriting is saved
    too, and that later rounds ask the same filter again, is left as the margin.
    """
    return segment_bytes * skip_rate * (1 - useless_rate(rate, probes)) > 2 * filter_size


def design(keys: int, probes: int, segment_bytes: int, skip_rate: float = SKIP_RATE) -> FilterDesign | None:
    """A filter for a segment of ``segment_bytes`` with ``keys`` distinct keys, or None where none pays."""
    if keys <= 0:
        return None
    rate = rate_per_key(probes)
    size = filter_bytes(keys, rate)
    return FilterDesign(keys, max(1, probes), rate, size) if pays(size, rate, probes, segment_bytes, skip_rate) else None


def still_pays(asked: int, filter_bytes_read: int, segment_bytes_saved: int) -> bool:
    """Whether a partition's filters go on: after TRIAL questions they must have saved more than they cost to read."""
    return asked < TRIAL or segment_bytes_saved > filter_bytes_read
