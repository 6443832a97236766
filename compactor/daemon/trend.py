"""Seven days of stored, dirty and reclaimed bytes, by the hour, of the whole tier and of its largest topics. For pages only.

The figures are one object of the control store, which any daemon overwrites once an hour. Daemons that write at the same time may lose each
other's latest hour.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from pydantic import ValidationError

from compactor.constants import HOUR_MS
from compactor.daemon.scheduling import PartitionStatus
from compactor.errors import NotFound
from compactor.model.base import StrictFrozenModel
from compactor.storage.port import ObjectStore

TREND_KEY: Final = "trend/week.json.z"
MOST_HOURS: Final = 7 * 24
MOST_TOPICS: Final = 100
"""Largest number of topics with figures of their own, so that the object stays below a few hundred KiB."""
RECLAIMED_KNOWN_MS: Final = 24 * HOUR_MS
"""How far back partitions report what deletions have freed."""


class HourlyStorageFigures(NamedTuple):
    """Stored and reclaimed bytes of a tier or topic in one hour.

    hour_ms: beginning of the hour, in milliseconds.
    stored: bytes in the tier, including replaced segments that wait for deletion.
    dirty: bytes of segments that are not clean.
    reclaimed: bytes deleted in this hour.
    """

    hour_ms: int
    stored: int
    dirty: int
    reclaimed: int


class TierStorageTrend(StrictFrozenModel):
    """Figures of a tier and of its largest topics, per hour, oldest first."""

    hours: tuple[HourlyStorageFigures, ...] = ()
    topics: dict[str, tuple[HourlyStorageFigures, ...]] = {}

    @property
    def start_of_latest_hour_ms(self) -> int:
        """Return the beginning of the latest hour in milliseconds; -1 if there is none."""
        return self.hours[-1].hour_ms if self.hours else -1


NO_TREND: Final = TierStorageTrend()
"""Trend of a tier of which no hour is known."""


def with_current_hour_figures(trend: TierStorageTrend, statuses: Iterable[PartitionStatus], now_ms: int) -> TierStorageTrend:
    """Return the trend with the figures of the current hour added, and with the bytes that were reclaimed in recent hours updated. Both are
    computed from ``statuses``. Only the largest MOST_TOPICS topics have figures of their own.
    """
    hour_ms = now_ms - now_ms % HOUR_MS
    by_topic: dict[str, list[PartitionStatus]] = defaultdict(list)
    for status in statuses:
        by_topic[status.partition.topic].append(status)
    figures = {topic: _storage_figures_of_hour(found, hour_ms) for topic, found in by_topic.items()}
    largest = sorted(figures, key=lambda topic: (-figures[topic].stored, topic))[:MOST_TOPICS]
    everything = [status for found in by_topic.values() for status in found]
    return TierStorageTrend(
        hours=_with_current_hour_added(trend.hours, _storage_figures_of_hour(everything, hour_ms), everything),
        topics={topic: _with_current_hour_added(trend.topics.get(topic, ()), figures[topic], by_topic[topic]) for topic in largest},
    )


def merged_storage_trend(older: TierStorageTrend, newer: TierStorageTrend) -> TierStorageTrend:
    """Return a trend with the hours of two trends. For an hour that both have, the figures of ``newer`` are used. The topics are those of
    ``newer``, or of ``older`` if ``newer`` has none.
    """
    topics = {topic: _merged_hourly_figures(older.topics.get(topic, ()), hours) for topic, hours in newer.topics.items()}
    return TierStorageTrend(hours=_merged_hourly_figures(older.hours, newer.hours), topics=topics or older.topics)


def read_storage_trend(control: ObjectStore) -> TierStorageTrend:
    """Return the stored trend; an empty one if there is none or it is damaged. Raises StoreError."""
    try:
        return TierStorageTrend.model_validate_json(zlib.decompress(control.get(TREND_KEY)))
    except (NotFound, ValidationError, zlib.error):
        return TierStorageTrend()


def write_storage_trend(control: ObjectStore, trend: TierStorageTrend) -> None:
    """Overwrite the stored trend. Raises StoreError."""
    control.put(TREND_KEY, zlib.compress(trend.model_dump_json().encode()))


def _storage_figures_of_hour(statuses: Iterable[PartitionStatus], hour_ms: int) -> HourlyStorageFigures:
    """Return the figures of one hour: the sums over these partitions."""
    found = list(statuses)
    stored, dirty = sum(status.bytes + status.waiting_bytes for status in found), sum(status.dirty_bytes for status in found)
    return HourlyStorageFigures(hour_ms, stored, dirty, 0)


def _with_current_hour_added(
    hours: tuple[HourlyStorageFigures, ...], current: HourlyStorageFigures, statuses: Iterable[PartitionStatus]
) -> tuple[HourlyStorageFigures, ...]:
    """Return the hours with the current one added. In recent hours, the reclaimed bytes are replaced by what deletions in these partitions
    have freed.
    """
    reclaimed = _reclaimed_bytes_by_hour(statuses)
    known_ms = current.hour_ms - RECLAIMED_KNOWN_MS
    return tuple(
        each if each.hour_ms <= known_ms else each._replace(reclaimed=reclaimed.get(each.hour_ms, 0))
        for each in _merged_hourly_figures(hours, (current,))
    )


def _reclaimed_bytes_by_hour(statuses: Iterable[PartitionStatus]) -> Mapping[int, int]:
    """Return the bytes that deletions have freed, by the beginning of the hour in milliseconds."""
    found: dict[int, int] = defaultdict(int)
    for status in statuses:
        for at_ms, size in status.freed:
            found[at_ms - at_ms % HOUR_MS] += size
    return found


def _merged_hourly_figures(
    older: tuple[HourlyStorageFigures, ...], newer: tuple[HourlyStorageFigures, ...]
) -> tuple[HourlyStorageFigures, ...]:
    """Return the hours of two lists, ascending, without those that are MOST_HOURS or more before the latest one.

    For an hour in both lists, that of ``newer`` is used.
    """
    found = {each.hour_ms: each for each in (*older, *newer)}
    latest = max(found, default=0)
    return tuple(found[hour] for hour in sorted(found) if hour > latest - MOST_HOURS * HOUR_MS)
