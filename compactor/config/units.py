"""Sizes and durations as people write them: ``64 MiB``, ``10m``."""

from __future__ import annotations

import re

UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def parse_duration_ms(text: str) -> int | None:
    """Return a duration such as ``10m``, ``90 s`` or ``1d`` in milliseconds; None for any other text."""
    found = re.fullmatch(r"(\d{1,18}) ?([a-z]+)", text.strip())
    return int(found[1]) * UNIT_MS[found[2]] if found and found[2] in UNIT_MS else None


def parse_size(text: str) -> int | None:
    """Return a size such as ``64 MiB`` or ``4GB`` in bytes; None for any other text. ``KiB`` has 1024 bytes, ``KB`` 1000."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        return None


def parse_setting_value(key: str, value: object) -> object:
    """Return a setting's value with a text that is a duration or a size replaced by its number; any other value unchanged.

    :param key: name of the setting. Its ending says what the value is: ``_ms``, ``_bytes`` or ``_bytes_per_s``.
    """
    if not isinstance(value, str):
        return value
    found = parse_duration_ms(value) if key.endswith("_ms") else parse_size(value) if key.endswith(("_bytes", "_bytes_per_s")) else None
    return value if found is None else found
