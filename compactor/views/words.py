"""Numbers and times in words, for people."""

from __future__ import annotations

from datetime import UTC, datetime

_STEPS = (("d", 86_400), ("h", 3_600), ("min", 60))


def size(count: int | None) -> str:
    """Bytes: ``1.4 GiB``; empty for None."""
    if count is None:
        return ""
    if abs(count) < 1024:
        return f"{count} B"
    value, units = count / 1024, ["PiB", "TiB", "GiB", "MiB", "KiB"]
    while abs(value) >= 1023.95 and len(units) > 1:  # 1023.95 would be printed as 1024.0
        value /= 1024
        units.pop()
    return f"{value:.1f} {units[-1]}"


def duration(milliseconds: float) -> str:
    """``3 d 4 h``, ``12 min``, ``8 s``, ``0.4 s``: two units at most, and nothing that nobody needs."""
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


def ago(at_ms: int, now_ms: int) -> str:
    return "just now" if now_ms - at_ms < 1000 else f"{duration(now_ms - at_ms)} ago"


def until(at_ms: int, now_ms: int) -> str:
    return "now" if at_ms - now_ms < 1000 else f"in {duration(at_ms - now_ms)}"


def moment(at_ms: int) -> str:
    """``2026-11-22 13:20:05 UTC``; as it is where no calendar reaches."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"


def plural(count: int, one: str, many: str = "") -> str:
    """``1 partition``, ``2 partitions``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
