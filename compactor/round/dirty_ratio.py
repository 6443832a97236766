"""The dirty ratio above which a round is due: as set, or the cheapest one where ``min_cleanable_dirty_ratio`` is "auto". Pure.

Superseded records cost storage until a round removes them, and a round costs requests. The more is dirty when a round begins, the fewer
rounds and the more storage. The choice goes by Kafka's rule: a round over a clean part of L bytes begins at D dirty bytes, reads both and
leaves about L. Between rounds half of D is stored in vain on average, and what a round replaces stays for grace and undo window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from typing_extensions import override

from compactor.config.settings import CleanerSettings
from compactor.control.summary import SegmentMetadataOrSummary
from compactor.storage.schemes import GIB

KAFKA_RATIO = 0.5
"""Kafka's default, which holds as long as nothing can be computed."""
CHOICES = tuple(step / 100 for step in range(60, 5, -5))
"""Ratios to choose from, 0.6 to 0.1. Of equally cheap ones the first is taken, which has the fewest rounds."""
MONTH_MS = 30 * 86_400_000


@dataclass(frozen=True)
class DirtyRatioThreshold:
    """Dirty ratio above which a round is due.

    why: how the threshold was chosen, or why Kafka's default is used; empty if a setting states it.
    saved_usd_month: monthly saving in comparison with Kafka's default of 0.5; None if the threshold was not chosen by cost.
    """

    ratio: float
    why: str = ""
    saved_usd_month: float | None = None

    @override
    def __str__(self) -> str:
        return f"{self.ratio:g}" + (" (auto)" if self.why else "")


def dirty_ratio_threshold(
    cleaner: CleanerSettings,
    clean_segments: Sequence[SegmentMetadataOrSummary],
    dirty_segments: Sequence[SegmentMetadataOrSummary],
    bytes_saved_per_dirty_byte: float | None,
) -> DirtyRatioThreshold:
    """Return the dirty ratio above which a round over the partition is due.

    :param clean_segments: clean live segments below the round's end.
    :param dirty_segments: the other live segments below the round's end.
    :param bytes_saved_per_dirty_byte: bytes that the last round saved for each dirty byte; None if unknown, which is treated as 1.
    """
    if cleaner.min_cleanable_dirty_ratio != "auto":
        return DirtyRatioThreshold(cleaner.min_cleanable_dirty_ratio)
    costs = cleaner.segment_replacement_costs
    if costs is None or not costs.prices.stored_gib_month_usd:
        return DirtyRatioThreshold(KAFKA_RATIO, "storage costs nothing here")
    stamps = [stamp for segment in dirty_segments for stamp in (segment.first_timestamp_ms, segment.max_timestamp_ms) if stamp > 0]
    span_ms = max(stamps) - min(stamps) if stamps else 0
    if not clean_segments or span_ms <= 0:
        return DirtyRatioThreshold(
            KAFKA_RATIO, "nothing was cleaned yet" if not clean_segments else "the timestamps do not show how fast it grows"
        )
    live, written = (sum(segment.size_bytes for segment in some) for some in (clean_segments, dirty_segments))
    written_month = written / span_ms * MONTH_MS
    segment_bytes = live / len(clean_segments)
    in_vain = min(1.0, bytes_saved_per_dirty_byte) if bytes_saved_per_dirty_byte is not None else 1.0

    def ratio_dependent_monthly_cost_usd(dirty_ratio: float) -> float:
        """Return the part of the monthly costs of requests and storage that depends on the ratio."""
        dirty_bytes = live * dirty_ratio / (1 - dirty_ratio)
        rounds = written_month / dirty_bytes
        stored = in_vain * dirty_bytes / 2 + rounds * (live + dirty_bytes) * costs.replaced_ms / MONTH_MS
        requests = costs.prices.price_of_round_requests_usd(ceil((live + dirty_bytes) / segment_bytes), len(clean_segments))
        return stored / GIB * costs.prices.stored_gib_month_usd + rounds * requests

    ratio = min(CHOICES, key=ratio_dependent_monthly_cost_usd)
    turnovers = f"{written_month / live:.1f} times its clean size are written a month"
    return DirtyRatioThreshold(
        ratio,
        f"the cheapest, as {turnovers}",
        round(ratio_dependent_monthly_cost_usd(KAFKA_RATIO) - ratio_dependent_monthly_cost_usd(ratio), 6),
    )
