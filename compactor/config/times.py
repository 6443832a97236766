"""Times as people read them: ``12 min ago``, ``in 2 h``, ``2026-11-22 13:20:05 UTC``."""

from __future__ import annotations

from datetime import UTC, datetime

from compactor.config.units import format_duration
from compactor.constants import DAY_MS

_GREGORIAN_CYCLE_MS = 146_097 * DAY_MS


def format_ago(at_ms: int, now_ms: int) -> str:
    """Return the time from ``at_ms`` to the later ``now_ms``, such as ``12 min ago``."""
    return "just now" if now_ms - at_ms < 1000 else f"{format_duration(now_ms - at_ms)} ago"


def format_until(at_ms: int, now_ms: int) -> str:
    """Return the time from ``now_ms`` to the later ``at_ms``, such as ``in 12 min``."""
    return "now" if at_ms - now_ms < 1000 else f"in {format_duration(at_ms - now_ms)}"


def format_utc_time(at_ms: int) -> str:
    """Return a time such as ``2026-11-22 13:20:05 UTC``."""
    return format_iso_time(at_ms).replace("T", " ").replace("Z", " UTC")


def format_clock_time(at_ms: int, now_ms: int) -> str:
    """Return a time as ``18:51 UTC`` if it is on the same UTC day as ``now_ms``, else with its date."""
    day, _, clock = format_utc_time(at_ms).partition(" ")
    today = day == format_utc_time(now_ms).partition(" ")[0]
    return f"{clock[:5]} UTC" if today else f"{day} {clock[:5]} UTC"


def format_iso_time(at_ms: int, timespec: str = "seconds") -> str:
    """Return a time as ISO 8601 in UTC. Years beyond 9999 or before 1 are written in full: clients that count microseconds give times
    like ``58878-11-27T09:40:29Z``.
    """
    cycles, rest_ms = divmod(at_ms, _GREGORIAN_CYCLE_MS)  # the calendar repeats every 400 years, and so do its days of the week
    at = datetime.fromtimestamp(rest_ms // 1000, UTC).replace(tzinfo=None, microsecond=rest_ms % 1000 * 1000)
    year, text = at.year + 400 * cycles, at.isoformat(timespec=timespec) + "Z"
    return f"{year:04d}{text[4:]}"
