"""Formatting of times for people; sizes, durations and counts are formatted in ``config.units``."""

from __future__ import annotations

from datetime import UTC, datetime

from compactor.config.units import count_noun as count_noun, format_duration as format_duration, format_size as format_size


def format_ago(at_ms: int, now_ms: int) -> str:
    """Return the time between ``at_ms`` and the later ``now_ms`` as text, such as ``12 min ago``. Both are in milliseconds."""
    return "just now" if now_ms - at_ms < 1000 else f"{format_duration(now_ms - at_ms)} ago"


def format_until(at_ms: int, now_ms: int) -> str:
    """Return the time between ``now_ms`` and the later ``at_ms`` as text, such as ``in 12 min``. Both are in milliseconds."""
    return "now" if at_ms - now_ms < 1000 else f"in {format_duration(at_ms - now_ms)}"


def format_utc_time(at_ms: int) -> str:
    """Return a time such as ``2026-11-22 13:20:05 UTC``, or a number of milliseconds if it is beyond the calendar."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"


def format_clock_time(at_ms: int, now_ms: int) -> str:
    """Return a time as ``18:51 UTC`` if it is on the same UTC day as ``now_ms``, else with its date. Both times are in milliseconds."""
    day, _, clock = format_utc_time(at_ms).partition(" ")
    today = day == format_utc_time(now_ms).partition(" ")[0]
    return f"{clock[:5]} UTC" if today else f"{day} {clock[:5]} UTC"


def format_iso_time(at_ms: int, timespec: str = "seconds") -> str:
    """Return a time in milliseconds as ISO 8601 in UTC, or as a number of milliseconds if it is beyond the calendar.

    :param timespec: ``seconds`` or ``milliseconds``.
    """
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
