"""Samples as a picture: panels one below the other over the same time, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tests.soak.watch import Samples

WIDTH, PANEL, LEFT, TOP = 860, 110, 70, 34
COLOURS = ("#2563a8", "#b4531a")


def drawn(samples: Samples, panels: Sequence[tuple[str, Sequence[str]]], marks: Sequence[tuple[float, str]], title: str) -> str:
    """``panels``: heading and the names of its lines; ``marks``: moments at which something was done, ticks below each panel."""
    height = TOP + len(panels) * (PANEL + 44) + 10
    last = max((row["at"] for row in samples.rows), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/><text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for number, (heading, names) in enumerate(panels):
        parts += _panel(samples, heading, names, marks, TOP + number * (PANEL + 44), last)
    return "\n".join([*parts, "</svg>", ""])


def _panel(samples: Samples, heading: str, names: Sequence[str], marks: Sequence[tuple[float, str]], top: float, last: float) -> list[str]:
    lines = {name: samples.of(name) for name in names}
    most = max((value for line in lines.values() for _, value in line), default=1.0) or 1.0
    width, floor = WIDTH - LEFT - 20, top + 20 + PANEL

    def point(at: float, value: float) -> str:
        return f"{LEFT + width * at / last:.1f},{floor - PANEL * value / most:.1f}"

    parts = [f'<text x="{LEFT}" y="{top + 14}">{escape(heading)}</text>']
    for name, colour, shift in zip(names, COLOURS, (0, 180), strict=False):
        parts.append(f'<text x="{WIDTH - 380 + shift}" y="{top + 14}" fill="{colour}">{escape(name)}</text>')
    parts.append(f'<path d="M{LEFT} {floor - PANEL}V{floor}H{LEFT + width}" fill="none" stroke="#666"/>')
    parts.append(f'<text x="{LEFT - 6}" y="{floor - PANEL + 10}" text-anchor="end">{most:,.0f}</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>')
    for minutes in range(0, int(last // 60) + 1, max(1, int(last // 600))):
        at = LEFT + width * minutes * 60 / last
        parts.append(f'<text x="{at:.1f}" y="{floor + 18}" text-anchor="middle" fill="#666">{minutes} min</text>')
    ticks = "".join(f"M{LEFT + width * at / last:.1f} {floor}v5" for at, _ in marks if at <= last)
    parts.append(f'<path d="{ticks or "M0 0"}" stroke="#b00"/>')
    for (name, line), colour in zip(lines.items(), COLOURS, strict=False):
        points = " ".join(point(at, value) for at, value in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"><title>{escape(name)}</title></polyline>')
    return parts
