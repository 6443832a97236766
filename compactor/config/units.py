"""Sizes, durations and counts as people write and read them: ``64 MiB``, ``10m``, ``1 partition``."""

from __future__ import annotations

import re

from compactor.constants import NEVER_MS

UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_STEPS = (("d", 86_400), ("h", 3_600), ("min", 60))


def parse_duration_ms(text: str) -> int | None:
    """Return a duration such as ``10m``, ``90 s`` or ``1d`` in milliseconds; None for any other text."""
    found = re.fullmatch(r"(\d{1,18}) ?([a-z]+)", text.strip())
    return int(found[1]) * UNIT_MS[found[2]] if found and found[2] in UNIT_MS else None


def parse_size_bytes(text: str) -> int | None:
    """Return a size such as ``64 MiB`` or ``4GB`` in bytes; None for any other text. ``KiB`` has 1024 bytes, ``KB`` 1000."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        return None


def parse_unit_text(key: str, value: object) -> object:
    """Return a setting's value, with a text that is a duration or a size replaced by its number. The key's ending tells the kind:
    ``_ms``, ``_bytes`` or ``_bytes_per_s``.
    """
    if not isinstance(value, str):
        return value
    found = (
        parse_duration_ms(value) if key.endswith("_ms") else parse_size_bytes(value) if key.endswith(("_bytes", "_bytes_per_s")) else None
    )
    return value if found is None else found


def format_size(size_bytes: int | None) -> str:
    """Return a number of bytes such as ``1.4 GiB``; an empty string for None."""
    if size_bytes is None:
        return ""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value, units = size_bytes / 1024, ["PiB", "TiB", "GiB", "MiB", "KiB"]
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


def count_noun(count: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun, such as ``1 partition`` or ``2 partitions``."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def format_setting(key: str, value: object) -> str:
    """Return a setting's value as text; a size or duration with the same value in larger units, in parentheses."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return str(value).lower() if isinstance(value, bool) else str(value)
    is_size = key.endswith(("_bytes", "_bytes_per_s"))
    words = "no limit" if value >= NEVER_MS else format_size(value) if is_size else format_duration(value) if key.endswith("_ms") else ""
    return f"{value} ({words})" if words else str(value)
