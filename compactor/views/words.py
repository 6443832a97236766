"""Formatting of sizes, durations and times for people."""

from __future__ import annotations

from datetime import UTC, datetime

_STEPS = (("d", 86_400), ("h", 3_600), ("min", 60))


def format_size(count: int | None) -> str:
    """Return a number of bytes such as ``1.4 GiB``; an empty string for None."""
    if count is None:
        return ""
    if abs(count) < 1024:
        return f"{count} B"
    value, units = count / 1024, ["PiB", "TiB", "GiB", "MiB", "KiB"]
    while abs(value) >= 1023.95 and len(units) > 1:  # 1023.95 would be printed as 1024.0
        value /= 1024
        units.pop()
    return f"{value:.1f} {units[-1]}"


def format_duration(milliseconds: float) -> str:
    """Return a duration such as ``3 d 4 h``, ``12 min`` or ``0.4 s``: at most two units."""
    seconds = max(0.0, milliseconds / 1000)
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds % 1 >= 0.05 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for place, (unit, length) in enumerate(_STEPS):
        if whole >= length:
            rest = whole % length
            smaller, part = _STEPS[place + 1] if place + 1 < len(_STEPS) else ("s", 1)
            # Minutes stand alone from ten on, days from ten on.
            shown = rest // part if whole < 10 * length else 0
            return f"{whole // length} {unit}" + (f" {shown} {smaller}" if shown else "")
    return f"{whole} s"


def format_ago(at_ms: int, now_ms: int) -> str:
    """Return the time between ``at_ms`` and the later ``now_ms`` as text, such as ``12 min ago``. Both are in milliseconds."""
    return "just now" if now_ms - at_ms < 1000 else f"{format_duration(now_ms - at_ms)} ago"


def format_until(at_ms: int, now_ms: int) -> str:
    """Return the time between ``now_ms`` and the later ``at_ms`` as text, such as ``in 12 min``. Both are in milliseconds."""
    return "now" if at_ms - now_ms < 1000 else f"in {format_duration(at_ms - now_ms)}"


def format_moment(at_ms: int) -> str:
    """Return a time such as ``2026-11-22 13:20:05 UTC``, or a number of milliseconds if it is beyond the calendar."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"


def format_clock_time(at_ms: int, now_ms: int) -> str:
    """Return a time of the same day in UTC such as ``18:51 UTC``, any other with its date. Both times are in milliseconds."""
    day, _, clock = format_moment(at_ms).partition(" ")
    today = day == format_moment(now_ms).partition(" ")[0]
    return f"{clock[:5]} UTC" if today else f"{day} {clock[:5]} UTC"


def format_iso_time(at_ms: int, timespec: str = "seconds") -> str:
    """Return a time in milliseconds as ISO 8601 in UTC, or as a number of milliseconds if it is beyond the calendar.

    :param timespec: ``seconds`` or ``milliseconds``.
    """
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"


def count_noun(count: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun in singular or plural, such as ``1 partition`` or ``2 partitions``."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
