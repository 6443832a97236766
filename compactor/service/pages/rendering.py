"""Documents as HTML: templates with autoescape, styles and a script of our own, nothing from elsewhere."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from compactor.service.pages.axis import percent, ticks
from compactor.service.pages.documents import OffsetAxis
from compactor.views import words

ASSETS = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"}


@cache
def asset(name: str) -> bytes:
    """Raises KeyError for a name that is not in ASSETS."""
    if name not in ASSETS:
        raise KeyError(name)
    return (resources.files("compactor.service.pages") / "static" / name).read_bytes()


def render(template: str, **values: Any) -> bytes:
    return _environment().get_template(template).render(**values).encode()


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("compactor.service.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters |= {
        "size": words.size,
        "duration": words.duration,
        "moment": words.moment,
        "ago": words.ago,
        "until": words.until,
        "plural": words.plural,
        "count": lambda number: f"{number:,}",
        "share": _share,
        "path": lambda text: quote(str(text), safe=""),
        "x": lambda offset, axis: percent(axis, offset),
        "width": _width,
        "ticks": ticks,
        "usd": _usd,
    }
    found.globals |= {"asset_url": asset_url}
    return found


def asset_url(name: str) -> str:
    """With a digest of its content, so that a browser may keep it for ever."""
    return f"static/{name}?v={hashlib.sha256(asset(name)).hexdigest()[:12]}"


def _share(ratio: float) -> str:
    """0.123 -> ``12 %``; what is little is not nothing."""
    percents = 100 * ratio
    if 0 < percents < 1:
        return "< 1 %"
    return "> 99 %" if 99 < percents < 100 else f"{percents:.0f} %"


def _usd(amount: float) -> str:
    """Two digits that say something: 0.000123 -> ``0.00012 USD``."""
    text = f"{amount:,.2f}" if amount >= 1 else np.format_float_positional(amount, precision=2, fractional=False, trim="-")
    return f"{text} USD"


def _width(axis: OffsetAxis, low: int, high: int) -> float:
    """From one offset to another, in percent."""
    return round(percent(axis, high) - percent(axis, low), 4)
