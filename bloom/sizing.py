"""Size of a segment's Bloom filter.
With 1 % false positives per *key* and N dirty keys, a segment without any of them is skipped with probability 0.99 ** N: almost never above
458 keys. Therefore the guarantee is per segment: of the segments without a dirty key, at most the share USELESS_RATE is read.
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
    """Parameters of a Bloom filter.
    probes: distinct keys that a round is expected to look up.
    rate: probability of a false positive per key looked up.
    """

    keys: int
    probes: int
    rate: float
    bytes: int


def rate_per_key(probed_keys: int, useless_read_probability: float = USELESS_RATE) -> float:
    """False positive rate per key at which ``probed_keys`` absent keys give a false positive with the given probability."""
    return -math.expm1(math.log1p(-useless_read_probability) / max(1, probed_keys))


def useless_probability(rate_per_key: float, probed_keys: int) -> float:
    """Probability of a false positive among ``probed_keys`` absent keys."""
    return -math.expm1(probed_keys * math.log1p(-rate_per_key))


def filter_size_bytes(key_count: int, rate_per_key: float) -> int:
    """Size of a bit array, by pybloom-live's formula."""
    slices = math.ceil(math.log2(1 / rate_per_key))
    return (slices * math.ceil(key_count * abs(math.log(rate_per_key)) / (slices * math.log(2) ** 2)) + 7) // 8


def is_filter_worthwhile(
    filter_bytes: int, false_positive_rate: float, probed_keys: int, segment_bytes: int, segment_skip_rate: float = SKIP_RATE
) -> bool:
    """True if a filter saves more bytes in one round than writing and fetching it costs. Later rounds are not counted.
    :param false_positive_rate: per key.
    """
    return segment_bytes * segment_skip_rate * (1 - useless_probability(false_positive_rate, probed_keys)) > 2 * filter_bytes


def design_filter(
    key_count: int,
    probed_keys: int,
    segment_bytes: int,
    segment_skip_rate: float = SKIP_RATE,
    *,
    max_useless_read_rate: float = USELESS_RATE,
    max_bytes: int | None = None,
) -> FilterDesign | None:
    """Returns None if the filter would cost more than it saves or exceed ``max_bytes``.
    :param segment_skip_rate: expected share without any dirty key.
    :param max_useless_read_rate: share of these that may be downloaded in vain.
    """
    if key_count <= 0:
        return None
    rate = rate_per_key(probed_keys, max_useless_read_rate)
    size = filter_size_bytes(key_count, rate)
    fits = max_bytes is None or size <= max_bytes
    pays = is_filter_worthwhile(size, rate, probed_keys, segment_bytes, segment_skip_rate)
    return FilterDesign(key_count, max(1, probed_keys), rate, size) if fits and pays else None


def are_filters_worthwhile(filters_tried: int, filter_bytes_read: int, segment_bytes_saved: int) -> bool:
    """True for a partition's first TRIAL filters; afterwards if they have saved more bytes than were read of filters."""
    return filters_tried < TRIAL or segment_bytes_saved > filter_bytes_read
