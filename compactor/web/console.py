"""Answers to HTTP requests of browsers, Prometheus and health checks. The daemon and the agent use the same code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from http import HTTPStatus
from importlib import resources
from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import quote, unquote

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client import CONTENT_TYPE_LATEST

from compactor.errors import UsageError
from compactor.model.base import StrictFrozenModel
from compactor.model.ids import TopicPartition
from compactor.service.service_status import ServiceStatus
from compactor.views import time_formats
from compactor.web.axis import offset_axis_ticks, offset_position_percent
from compactor.web.documents import STATE_WORDS, OffsetAxis
from compactor.web.listing import PartitionListQuery, parse_partition_list_query

# ---- pages: autoescaped templates; styles and script are our own, nothing is loaded from elsewhere -------------------------------

ASSETS = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"}


@cache
def read_static_file(name: str) -> bytes:
    """Return the content of a static file. Raises KeyError if the name is not in ASSETS."""
    if name not in ASSETS:
        raise KeyError(name)
    return (resources.files("compactor.web") / "static" / name).read_bytes()


def render_template(template: str, **values: Any) -> bytes:
    """Return a page as HTML in UTF-8. ``template``: file name of the template. ``values``: its variables."""
    return _jinja_template_environment().get_template(template).render(**values).encode()


@cache
def _jinja_template_environment() -> Environment:
    """Return the Jinja environment with the filters and globals that the page templates use."""
    found = Environment(
        loader=PackageLoader("compactor.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters |= {
        "size": time_formats.format_size,
        "duration": time_formats.format_duration,
        "moment": time_formats.format_utc_time,
        "ago": time_formats.format_ago,
        "until": time_formats.format_until,
        "plural": time_formats.count_noun,
        "count": lambda number: f"{number:,}",
        "share": _format_percentage,
        "path": lambda text: quote(str(text), safe=""),
        "x": lambda offset, axis: offset_position_percent(axis, offset),
        "width": _offset_distance_percent_of_axis,
        "ticks": offset_axis_ticks,
        "usd": _format_usd,
        "spark": _svg_line_chart_points,
    }
    found.globals |= {"asset_url": asset_url, "STATE_WORDS": STATE_WORDS}
    return found


def asset_url(name: str) -> str:
    """Return a static file's URL with a digest of its content, so that browsers may cache it forever."""
    return f"static/{name}?v={hashlib.sha256(read_static_file(name)).hexdigest()[:12]}"


def _format_percentage(ratio: float) -> str:
    """Return a ratio as a percentage, such as ``12 %``. A ratio other than 0 and 1 is never rounded to these: ``< 1 %``, ``> 99 %``."""
    percents = 100 * ratio
    if 0 < percents < 1:
        return "< 1 %"
    return "> 99 %" if 99 < percents < 100 else f"{percents:.0f} %"


def _format_usd(amount: float) -> str:
    """Return an amount with two significant digits if it is below 1, such as ``0.00012 USD``, else with two decimals."""
    text = f"{amount:,.2f}" if amount >= 1 else np.format_float_positional(amount, precision=2, fractional=False, trim="-")
    return f"{text} USD"


def _svg_line_chart_points(values: Sequence[int]) -> str:
    """Return values as points of a small line chart: an SVG polyline in a box of 100 by 30, with the largest value at the top."""
    most, steps = max(values, default=0) or 1, max(1, len(values) - 1)
    return " ".join(f"{100 * place / steps:.2f},{29 - 28 * value / most:.2f}" for place, value in enumerate(values))


def _offset_distance_percent_of_axis(axis: OffsetAxis, low_offset: int, high_offset: int) -> float:
    """Return the distance between two offsets on the axis in percent of the axis's width."""
    return round(offset_position_percent(axis, high_offset) - offset_position_percent(axis, low_offset), 4)


# ---- answers ------------------------------------------------------------------------------------------------------------------

TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
FOR_EVER = "public, max-age=31536000, immutable"
SILENT_MS = 300_000
"""Time, in milliseconds beyond the scan interval, after which a service whose loop did not come round is unhealthy. A scan of a large tier
may take minutes.
"""

_PATHS = "/topics, /partitions/TOPIC-PARTITION, /api/status, /api/topics, /api/partitions/TOPIC-PARTITION, /metrics, /healthz and /readyz"
THERE_ARE = f"there are /, {_PATHS}"


class HttpResponse(NamedTuple):
    """HTTP response. code: status code. kind: content type. cache_control: value of the Cache-Control header."""

    code: HTTPStatus
    kind: str
    body: bytes
    cache_control: str = "no-store"


class ServicePages(Protocol):
    """The pages, health and metrics of one kind of service. No method makes a request to the store."""

    template: ClassVar[str]
    """Name of the template of the first page, which shows ``status_page_document``."""
    partition_template: ClassVar[str]
    """Name of the template of a partition's page, which shows ``partition_document``."""
    looks_for: ClassVar[str]
    """What the service's scans look for, as a word in messages."""

    def health_status(self) -> ServiceStatus:
        """Return the present status of the service."""

    def metrics_text(self, *, with_kafka_names: bool) -> bytes:
        """Return the service's metrics in the text format of Prometheus.

        :param with_kafka_names: whether to repeat metrics under Kafka's names, where Kafka has names for them.
        """

    def status_page_document(self, query: PartitionListQuery) -> StrictFrozenModel:
        """Return the document of the first page, with the list of partitions that ``query`` selects."""

    def topics_document(self) -> StrictFrozenModel | None:
        """Return the document of the page of topics, or None if the service has none."""

    def partition_document(self, partition: TopicPartition) -> StrictFrozenModel | None:
        """Return one partition's document, or None for an unknown partition."""


class RequestRouter:
    """Router that maps the path of an HTTP request to a page of the service.

    :param ms_since_loop_turn: returns the milliseconds since the service's main loop last completed an iteration.
    :param interval_ms: the service's scan interval in milliseconds. /healthz fails if no iteration was completed for this time plus
        SILENT_MS.
    """

    def __init__(self, pages: ServicePages, ms_since_loop_turn: Callable[[], int], interval_ms: int) -> None:
        self._pages = pages
        self._silent_ms = ms_since_loop_turn
        self._limit_ms = interval_ms + SILENT_MS

    def respond_to_request(self, target: str) -> HttpResponse:
        """Return the response to a GET request.

        :param target: path with its query string.
        """
        path, _, query = target.partition("?")
        if path == "/":
            return HttpResponse(HTTPStatus.OK, HTML, self._render_status_page(parse_partition_list_query(query)))
        if path == "/metrics":
            own = "names=own" in query.split("&")
            return HttpResponse(HTTPStatus.OK, CONTENT_TYPE_LATEST, self._pages.metrics_text(with_kafka_names=not own))
        if path == "/healthz":
            return self._liveness_response()
        if path == "/readyz":
            return self._readiness_response()
        if path == "/api/status":
            return HttpResponse(HTTPStatus.OK, JSON, _to_json_bytes(self._pages.status_page_document(parse_partition_list_query(query))))
        if path.startswith("/api/partitions/"):
            found = self._find_partition_document(path.removeprefix("/api/partitions/"))
            return HttpResponse(HTTPStatus.OK, JSON, _to_json_bytes(found)) if found else _partition_not_found_response()
        if path.startswith("/partitions/"):
            found = self._find_partition_document(path.removeprefix("/partitions/"))
            page = render_template(self._pages.partition_template, document=found, root="../") if found else None
            return HttpResponse(HTTPStatus.OK, HTML, page) if page else _partition_not_found_response()
        if path in ("/topics", "/api/topics") and (topics := self._pages.topics_document()):
            if path == "/api/topics":
                return HttpResponse(HTTPStatus.OK, JSON, _to_json_bytes(topics))
            return HttpResponse(HTTPStatus.OK, HTML, render_template("topics.html", document=topics, root=""))
        if path.startswith("/static/") and (name := path.removeprefix("/static/")) in ASSETS:
            return HttpResponse(HTTPStatus.OK, ASSETS[name], read_static_file(name), FOR_EVER if query else "no-cache")
        return text_response(HTTPStatus.NOT_FOUND, THERE_ARE)

    def _render_status_page(self, query: PartitionListQuery) -> bytes:
        """Return the service's first page as HTML, with the partitions that ``query`` selects."""
        return render_template(self._pages.template, document=self._pages.status_page_document(query), query=query, root="")

    def _liveness_response(self) -> HttpResponse:
        """Return the response of /healthz: 200 while the service's main loop runs, 503 if its last iteration is too long ago."""
        silent = self._silent_ms()
        if silent > self._limit_ms:
            return text_response(HTTPStatus.SERVICE_UNAVAILABLE, f"it has not scanned for {self._pages.looks_for} since {silent // 1000} s")
        return text_response(HTTPStatus.OK, "ok")

    def _readiness_response(self) -> HttpResponse:
        """Return the response of /readyz: 200 if the service can work; 503 with the reason if it cannot, is starting or is stopping."""
        health = self._pages.health_status()
        if health.ready:
            return text_response(HTTPStatus.OK, "ok")
        return text_response(HTTPStatus.SERVICE_UNAVAILABLE, health.problem or ("it is stopping" if health.stopping else "it is starting"))

    def _find_partition_document(self, partition_name: str) -> StrictFrozenModel | None:
        """Return the document of a partition; None if the service knows no such partition, or the name is not valid.

        :param partition_name: last part of the request's path, URL-quoted.
        """
        try:
            return self._pages.partition_document(TopicPartition.parse_partition_store_prefix(unquote(partition_name)))
        except UsageError:
            return None


def text_response(code: HTTPStatus, text: str) -> HttpResponse:
    """Return a response with one line of text."""
    return HttpResponse(code, TEXT, f"{text}\n".encode())


def _partition_not_found_response() -> HttpResponse:
    """Return the response for a partition that does not exist."""
    return text_response(HTTPStatus.NOT_FOUND, "the tier has no such partition")


def _to_json_bytes(document: StrictFrozenModel) -> bytes:
    """Return a document as JSON."""
    return document.model_dump_json(indent=2).encode() + b"\n"
