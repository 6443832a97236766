"""Rendering of documents as HTML, with autoescaped templates. Styles and script are the program's own; nothing is loaded from elsewhere."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from compactor.views import words
from compactor.web.axis import axis_ticks, position_percent
from compactor.web.documents import OffsetAxis

ASSETS = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"}


@cache
def read_asset(name: str) -> bytes:
    """Return the content of a static file. Raises KeyError if the name is not in ASSETS."""
    if name not in ASSETS:
        raise KeyError(name)
    return (resources.files("compactor.web") / "static" / name).read_bytes()


def render_template(template: str, **values: Any) -> bytes:
    """Return a template filled with these values, as HTML in UTF-8."""
    return _template_environment().get_template(template).render(**values).encode()


@cache
def _template_environment() -> Environment:
    """Return the template environment with the filters that templates use."""
    found = Environment(
        loader=PackageLoader("compactor.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters |= {
        "size": words.format_size,
        "duration": words.format_duration,
        "moment": words.format_moment,
        "ago": words.format_ago,
        "until": words.format_until,
        "plural": words.count_noun,
        "count": lambda number: f"{number:,}",
        "share": _format_percentage,
        "path": lambda text: quote(str(text), safe=""),
        "x": lambda offset, axis: position_percent(axis, offset),
        "width": _width_percent,
        "ticks": axis_ticks,
        "usd": _format_usd,
    }
    found.globals |= {"asset_url": asset_url}
    return found


def asset_url(name: str) -> str:
    """Return a static file's URL with a digest of its content, so that browsers may cache it forever."""
    return f"static/{name}?v={hashlib.sha256(read_asset(name)).hexdigest()[:12]}"


def _format_percentage(ratio: float) -> str:
    """Return a ratio as percents, such as ``12 %``. A small ratio is shown as ``< 1 %``, never as 0."""
    percents = 100 * ratio
    if 0 < percents < 1:
        return "< 1 %"
    return "> 99 %" if 99 < percents < 100 else f"{percents:.0f} %"


def _format_usd(amount: float) -> str:
    """Return an amount with two significant digits if it is below 1, such as ``0.00012 USD``, else with two decimals."""
    text = f"{amount:,.2f}" if amount >= 1 else np.format_float_positional(amount, precision=2, fractional=False, trim="-")
    return f"{text} USD"


def _width_percent(axis: OffsetAxis, low: int, high: int) -> float:
    """Return the distance between two offsets on the axis, in percent."""
    return round(position_percent(axis, high) - position_percent(axis, low), 4)
