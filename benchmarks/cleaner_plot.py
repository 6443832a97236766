"""The plot of the cleaner's speed beside Kafka's, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.cleaner import Measured

_WIDTH, _ROW, _LEFT, _TOP = 860, 22, 150, 60
_COLOURS = ("#b4531a", "#2563a8")


def draw_cleaner_speed(rows: Sequence[Measured]) -> str:
    """Bars of MB per CPU second, Kafka's above ours, each pair on a scale of its own: ours is as long as the ratio says."""
    most = max(row.ratio for row in rows)
    unit = (_WIDTH - _LEFT - 170) / max(most, 1.0)
    height = _TOP + len(rows) * _ROW * 2 + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">MB of segments per CPU second, one thread; Kafka is 1</text>',
        f'<text x="{_LEFT}" y="42" fill="{_COLOURS[0]}">Kafka 4.4.0</text><text x="{_LEFT + 90}" y="42" fill="{_COLOURS[1]}">ours</text>',
    ]
    for number, row in enumerate(rows):
        top = _TOP + number * _ROW * 2
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 19}" text-anchor="end">{escape(row.profile)}</text>')
        for shift, length, text, colour in (
            (0, 1.0, f"{row.kafka:,.0f}", _COLOURS[0]),
            (14, row.ratio, f"{row.ours:,.0f} ({row.ratio:.1f} times)", _COLOURS[1]),
        ):
            parts.append(f'<rect x="{_LEFT}" y="{top + shift}" width="{length * unit:.1f}" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{_LEFT + length * unit + 6:.1f}" y="{top + shift + 11}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])
