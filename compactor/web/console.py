"""Answers to HTTP requests of browsers, Prometheus and health checks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from http import HTTPStatus
from importlib import resources
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlencode

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client import CONTENT_TYPE_LATEST

from checkpoint.lineage import EpochEntry
from compactor.config import times, units
from compactor.control.state import RunHistoryEntry
from compactor.control.summary import SKIPPED_RANGES_STAT, SegmentSummary, SkippedSegmentRange, parse_skipped_ranges
from compactor.daemon.partition_cache import PartitionHistory
from compactor.daemon.scheduling import Due, PartitionCondition
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.model.segment import StrictFrozenModel
from compactor.service import ServiceStatus
from compactor.web.documents import (
    STATE_WORDS,
    LeaderEpochSpan,
    OffsetAxis,
    OffsetAxisSegmentSpan,
    OffsetStateBand,
    PartitionListPage,
    ReplacedSegmentsSpan,
    RowT,
)

# Offset axis of a partition's page. Pure.


MOST_SPANS = 240
"""Largest number of segments drawn one by one. More would be thinner than a pixel, so that similar neighbours are drawn as one."""


def offset_axis(due: Due, segments: Sequence[SegmentSummary], history: PartitionHistory | None) -> OffsetAxis:
    """segments: live, ascending. history: None if only a summary of the control log is known."""
    status, replaced = due.summary, history.replaced if history else ()
    end = max(status.end_offset + 1, status.start_offset, *(each.end_offset + 1 for each in replaced), 0)
    start = min([status.start_offset, *(each.start_offset for each in replaced)])
    dirty = min(max(status.first_dirty_offset, status.start_offset), status.end_offset + 1)
    uncleanable = min(max(due.first_uncleanable_offset, dirty), status.end_offset + 1)
    cuts = (
        ("cleaned", status.start_offset, dirty),
        ("dirty", dirty, uncleanable),
        ("uncleanable", uncleanable, status.end_offset + 1),
    )
    spared = latest_skipped_ranges(history.runs) if history else []
    return OffsetAxis(
        start_offset=start,
        end_offset=end,
        first_dirty_offset=dirty,
        first_uncleanable_offset=uncleanable,
        bands=tuple(OffsetStateBand(state=state, start_offset=low, end_offset=high) for state, low, high in cuts if low < high),
        segments=tuple(_segment_spans(segments, dirty, uncleanable, spared)),
        replaced=tuple(ReplacedSegmentsSpan(run=each.run_id, **each.model_dump(exclude={"run_id"})) for each in replaced),
        leader_epochs=tuple(_leader_epoch_spans(history.lineage if history else (), start, end)),
    )


def _segment_spans(
    segments: Sequence[SegmentSummary],
    first_dirty_offset: int,
    first_uncleanable_offset: int,
    skipped_ranges: Sequence[SkippedSegmentRange],
) -> Iterable[OffsetAxisSegmentSpan]:
    """Join neighbours with the same state and reason if there are more than MOST_SPANS."""
    step = -(-len(segments) // MOST_SPANS) if segments else 1
    found: list[OffsetAxisSegmentSpan] = []
    for segment in segments:
        state = (
            "cleaned"
            if segment.end_offset < first_dirty_offset
            else "dirty"
            if segment.start_offset < first_uncleanable_offset
            else "uncleanable"
        )
        reason = next((each.why for each in skipped_ranges if each.start_offset <= segment.start_offset <= each.end_offset), "")
        decision = "left alone" if reason else ""
        last = found[-1] if found else None
        if last is not None and last.segments < step and (last.state, last.decision, last.why) == (state, decision, reason):
            grown = {"end_offset": segment.end_offset, "segments": last.segments + 1, "bytes": last.bytes + segment.size_bytes}
            found[-1] = last.model_copy(update=grown)
        else:
            found.append(
                OffsetAxisSegmentSpan(
                    start_offset=segment.start_offset,
                    end_offset=segment.end_offset,
                    segments=1,
                    bytes=segment.size_bytes,
                    state=state,
                    decision=decision,
                    why=reason,
                )
            )
    return found


def latest_skipped_ranges(runs: Sequence[RunHistoryEntry]) -> list[SkippedSegmentRange]:
    """Offset ranges that the latest published round skipped. runs: oldest first; undone ones do not count."""
    last = next((run for run in reversed(runs) if run.is_still_published), None)
    return parse_skipped_ranges(str(last.stats.get(SKIPPED_RANGES_STAT, ""))) if last else []


def _leader_epoch_spans(lineage: Sequence[EpochEntry], start: int, end: int) -> Iterable[LeaderEpochSpan]:
    bounds = [(entry.epoch, entry.start_offset) for entry in lineage]
    for (epoch, low), (_, high) in pairwise([*bounds, (-1, end)]):
        if max(low, start) < min(high, end):
            yield LeaderEpochSpan(epoch=epoch, start_offset=max(low, start), end_offset=min(high, end))


def offset_position_percent(axis: OffsetAxis, offset: int) -> float:
    width = axis.end_offset - axis.start_offset
    return round(100 * (offset - axis.start_offset) / width, 4) if width > 0 else 0.0


def offset_axis_ticks(axis: OffsetAxis) -> list[int]:
    """Few round offsets, none within 4 percent of an end."""
    width = axis.end_offset - axis.start_offset
    if width <= 0:
        return []
    step = 10 ** (len(str(width)) - 1)
    while width / step > 5:
        step *= 2
    while width / step < 2 and step > 1:
        step = max(1, step // 2)
    first = -(-axis.start_offset // step) * step
    return [offset for offset in range(first, axis.end_offset + 1, step) if 4 <= offset_position_percent(axis, offset) <= 96]


# The list of partitions on a page. Pure.


PER_PAGE = 50
MOST_PER_PAGE = 1_000


class ListedPartitionEntry(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def condition(self) -> PartitionCondition: ...


ItemT = TypeVar("ItemT", bound=ListedPartitionEntry)
SortKey = Callable[[ItemT], tuple[object, ...]]


@dataclass(frozen=True)
class PartitionListQuery:
    """Search, filter, order and page. An empty text, or None for ``descending``, stands for the default."""

    search: str = ""
    condition: str = ""
    sort: str = ""
    descending: bool | None = None
    page: int = 1
    per_page: int = PER_PAGE

    def query_with(self, **changes: object) -> str:
        """Any change of a field other than ``page`` leads to the first page."""
        new = replace(self, **({"page": 1} | changes))  # type: ignore[arg-type]  # templates name the fields
        pairs = [
            ("q", new.search),
            ("state", new.condition),
            ("sort", new.sort),
            ("dir", "" if new.descending is None else "desc" if new.descending else "asc"),
            ("page", new.page if new.page > 1 else ""),
            ("per_page", new.per_page if new.per_page != PER_PAGE else ""),
        ]
        return "?" + urlencode([(name, value) for name, value in pairs if value != ""])


def parse_list_query(query: str) -> PartitionListQuery:
    values = {name: found[-1] for name, found in parse_qs(query, max_num_fields=50).items()}
    return PartitionListQuery(
        search=values.get("q", "").strip()[:300],
        condition=values.get("state", ""),
        sort=values.get("sort", ""),
        descending={"asc": False, "desc": True}.get(values.get("dir", "")),
        page=_parse_positive_number(values.get("page", ""), 1),
        per_page=min(MOST_PER_PAGE, _parse_positive_number(values.get("per_page", ""), PER_PAGE)),
    )


def _parse_positive_number(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0 else default


@dataclass(frozen=True)
class PartitionListColumn(Generic[ItemT]):
    key: SortKey[ItemT]
    descending: bool = False


def list_partitions_page(
    items: Sequence[ItemT], query: PartitionListQuery, columns: Mapping[str, PartitionListColumn[ItemT]], make_row: Callable[[ItemT], RowT]
) -> PartitionListPage[RowT]:
    """Page of the list, or the last page if the list has fewer. The first of ``columns`` is the default."""
    sort = query.sort if query.sort in columns else next(iter(columns))
    condition = query.condition if query.condition in set(PartitionCondition) else ""
    wanted = query.search.lower()
    named = [item for item in items if wanted in item.name.lower()]
    counts = Counter(item.condition for item in named)
    found = [item for item in named if condition in ("", item.condition)]
    descending = columns[sort].descending if query.descending is None else query.descending
    found.sort(key=columns[sort].key, reverse=descending)
    pages = max(1, -(-len(found) // query.per_page))
    page = min(query.page, pages)
    return PartitionListPage[RowT](
        search=query.search,
        condition=condition,
        sort=sort,
        descending=descending,
        page=page,
        pages=pages,
        per_page=query.per_page,
        matching=len(found),
        conditions={each.value: counts[each] for each in PartitionCondition},
        rows=tuple(map(make_row, found[(page - 1) * query.per_page : page * query.per_page])),
    )


# ---- pages: autoescaped templates; styles and script are our own, nothing is loaded from elsewhere -------------------------------

ASSETS = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"}


@cache
def read_static_file(name: str) -> bytes:
    if name not in ASSETS:
        raise KeyError(name)
    return (resources.files("compactor.web") / "static" / name).read_bytes()


def render_template(template: str, **values: Any) -> bytes:
    return _jinja_template_environment().get_template(template).render(**values).encode()


@cache
def _jinja_template_environment() -> Environment:
    found = Environment(
        loader=PackageLoader("compactor.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters |= {
        "size": units.format_size,
        "duration": units.format_duration,
        "moment": times.format_utc_time,
        "ago": times.format_ago,
        "until": times.format_until,
        "plural": units.count_noun,
        "count": lambda number: f"{number:,}",
        "share": _format_percentage,
        "path": lambda text: quote(str(text), safe=""),
        "x": lambda offset, axis: offset_position_percent(axis, offset),
        "width": _offset_width_percent,
        "ticks": offset_axis_ticks,
        "usd": _format_usd,
        "spark": _svg_line_chart_points,
    }
    found.globals |= {"asset_url": asset_url, "STATE_WORDS": STATE_WORDS}
    return found


def asset_url(name: str) -> str:
    """URL with a digest of the content, so that browsers may cache it forever."""
    return f"static/{name}?v={hashlib.sha256(read_static_file(name)).hexdigest()[:12]}"


def _format_percentage(ratio: float) -> str:
    """Never round another ratio to 0 or 1: ``< 1 %``, ``> 99 %``."""
    percents = 100 * ratio
    if 0 < percents < 1:
        return "< 1 %"
    return "> 99 %" if 99 < percents < 100 else f"{percents:.0f} %"


def _format_usd(amount: float) -> str:
    """Two significant digits below 1, such as ``0.00012 USD``, else two decimals."""
    text = f"{amount:,.2f}" if amount >= 1 else np.format_float_positional(amount, precision=2, fractional=False, trim="-")
    return f"{text} USD"


def _svg_line_chart_points(values: Sequence[int]) -> str:
    most, steps = max(values, default=0) or 1, max(1, len(values) - 1)
    return " ".join(f"{100 * place / steps:.2f},{29 - 28 * value / most:.2f}" for place, value in enumerate(values))


def _offset_width_percent(axis: OffsetAxis, low_offset: int, high_offset: int) -> float:
    return round(offset_position_percent(axis, high_offset) - offset_position_percent(axis, low_offset), 4)


# ---- answers ------------------------------------------------------------------------------------------------------------------

TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
FOR_EVER = "public, max-age=31536000, immutable"
SILENT_MS = 300_000
"""Time beyond the scan interval after which a service whose loop did not come round is unhealthy. A scan of a large tier may take
minutes.
"""

_PATHS = "/topics, /partitions/TOPIC-PARTITION, /api/status, /api/topics, /api/partitions/TOPIC-PARTITION, /metrics, /healthz and /readyz"
THERE_ARE = f"there are /, {_PATHS}"


class HttpResponse(NamedTuple):
    code: HTTPStatus
    kind: str
    body: bytes
    cache_control: str = "no-store"


class ServicePages(Protocol):
    """Pages, health and metrics of a service. No method makes a request to the store."""

    template: ClassVar[str]
    """Template of the first page, which shows ``status_page_document``."""
    partition_template: ClassVar[str]
    """Template of a partition's page, which shows ``partition_document``."""
    looks_for: ClassVar[str]
    """What the service's scans look for, as a word in messages."""

    def health_status(self) -> ServiceStatus: ...

    def metrics_text(self, *, with_kafka_names: bool) -> bytes: ...

    def status_page_document(self, query: PartitionListQuery) -> StrictFrozenModel: ...

    def topics_document(self) -> StrictFrozenModel | None: ...

    def partition_document(self, partition: TopicPartition) -> StrictFrozenModel | None: ...


class RequestRouter:
    """Maps the path of an HTTP request to a page.

    :param ms_since_loop_turn: age of the service loop's last iteration.
    :param interval_ms: /healthz fails if no iteration was completed for this time plus SILENT_MS.
    """

    def __init__(self, pages: ServicePages, ms_since_loop_turn: Callable[[], int], interval_ms: int) -> None:
        self._pages = pages
        self._silent_ms = ms_since_loop_turn
        self._limit_ms = interval_ms + SILENT_MS

    def respond_to_request(self, target: str) -> HttpResponse:
        path, _, query = target.partition("?")
        if path == "/":
            return HttpResponse(HTTPStatus.OK, HTML, self._render_status_page(parse_list_query(query)))
        if path == "/metrics":
            own = "names=own" in query.split("&")
            return HttpResponse(HTTPStatus.OK, CONTENT_TYPE_LATEST, self._pages.metrics_text(with_kafka_names=not own))
        if path == "/healthz":
            return self._liveness_response()
        if path == "/readyz":
            return self._readiness_response()
        if path == "/api/status":
            return HttpResponse(HTTPStatus.OK, JSON, _to_json_bytes(self._pages.status_page_document(parse_list_query(query))))
        if path.startswith("/api/partitions/"):
            found = self._find_partition_document(path.removeprefix("/api/partitions/"))
            return HttpResponse(HTTPStatus.OK, JSON, _to_json_bytes(found)) if found else _not_found_response()
        if path.startswith("/partitions/"):
            found = self._find_partition_document(path.removeprefix("/partitions/"))
            page = render_template(self._pages.partition_template, document=found, root="../") if found else None
            return HttpResponse(HTTPStatus.OK, HTML, page) if page else _not_found_response()
        if path in ("/topics", "/api/topics") and (topics := self._pages.topics_document()):
            if path == "/api/topics":
                return HttpResponse(HTTPStatus.OK, JSON, _to_json_bytes(topics))
            return HttpResponse(HTTPStatus.OK, HTML, render_template("topics.html", document=topics, root=""))
        if path.startswith("/static/") and (name := path.removeprefix("/static/")) in ASSETS:
            return HttpResponse(HTTPStatus.OK, ASSETS[name], read_static_file(name), FOR_EVER if query else "no-cache")
        return text_response(HTTPStatus.NOT_FOUND, THERE_ARE)

    def _render_status_page(self, query: PartitionListQuery) -> bytes:
        return render_template(self._pages.template, document=self._pages.status_page_document(query), query=query, root="")

    def _liveness_response(self) -> HttpResponse:
        """200 while the main loop runs, 503 if its last iteration is too long ago."""
        silent = self._silent_ms()
        if silent > self._limit_ms:
            return text_response(HTTPStatus.SERVICE_UNAVAILABLE, f"it has not scanned for {self._pages.looks_for} since {silent // 1000} s")
        return text_response(HTTPStatus.OK, "ok")

    def _readiness_response(self) -> HttpResponse:
        """200 if the service can work; 503 with the reason if not."""
        health = self._pages.health_status()
        if health.ready:
            return text_response(HTTPStatus.OK, "ok")
        return text_response(HTTPStatus.SERVICE_UNAVAILABLE, health.problem or ("it is stopping" if health.stopping else "it is starting"))

    def _find_partition_document(self, partition_name: str) -> StrictFrozenModel | None:
        try:
            return self._pages.partition_document(TopicPartition.parse_partition_store_prefix(unquote(partition_name)))
        except UsageError:
            return None


def text_response(code: HTTPStatus, text: str) -> HttpResponse:
    return HttpResponse(code, TEXT, f"{text}\n".encode())


def _not_found_response() -> HttpResponse:
    return text_response(HTTPStatus.NOT_FOUND, "the tier has no such partition")


def _to_json_bytes(document: StrictFrozenModel) -> bytes:
    return document.model_dump_json(indent=2).encode() + b"\n"
