"""How many records of this program's own stand in the metadata topic, by minute. Pure.

Each broker folds every record, and reads all of them again at every start: [publish] metadata_records_per_hour bounds what is added. What
counts stands in the topic itself, whoever of our processes wrote it, so that no restart forgets it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

MINUTE_MS = 60_000
HOUR = 60
"""Minutes."""
KEPT = 2 * HOUR
"""So far back, from now, minutes are remembered."""

ByMinute = tuple[tuple[int, int], ...]
"""(minute since 1970, records in it), ascending."""


def counted(before: ByMinute, stamps_ms: Iterable[int], now_ms: int) -> ByMinute:
    """With records of these times, by their writers' clocks. What is stamped later than now was written now, when it is read."""
    now = now_ms // MINUTE_MS
    found = Counter(dict(before))
    found.update(min(stamp // MINUTE_MS, now) for stamp in stamps_ms)
    return tuple(sorted((minute, count) for minute, count in found.items() if minute > now - KEPT))


def last_hour(by_minute: Mapping[int, int], now_ms: int) -> dict[int, int]:
    """Of the last hour, ascending. Minutes to come are among them, as a clock may have been set back, but none that is an hour ahead."""
    now = now_ms // MINUTE_MS
    return {minute: by_minute[minute] for minute in sorted(by_minute) if now - HOUR < minute < now + HOUR}
