"""What a service answers to a browser, to Prometheus and to whoever asks for its health: one piece of code for daemon and agent."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_LATEST

from compactor.errors import UsageError
from compactor.model.base import Value
from compactor.model.ids import TopicPartition
from compactor.service.pages import rendering
from compactor.service.pages.listing import ListQuery, parsed

TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
FOR_EVER = "public, max-age=31536000, immutable"
SILENT_MS = 300_000
"""A service that has not come round for so long, beyond its interval, is not healthy. A look at a large tier may take minutes."""

THERE_ARE = "there are /, /partitions/TOPIC-PARTITION, /api/status, /api/partitions/TOPIC-PARTITION, /metrics, /healthz and /readyz"


class Answer(NamedTuple):
    """``keep``: how long whoever gets it may keep it (Cache-Control)."""

    code: HTTPStatus
    kind: str
    body: bytes
    keep: str = "no-store"


class Health(Protocol):
    """What every status has. ``problem``: why it is not ready."""

    @property
    def ready(self) -> bool: ...
    @property
    def stopping(self) -> bool: ...
    @property
    def problem(self) -> str: ...


class Face(Protocol):
    """What a service shows of itself. Nothing here may make a request to the store."""

    @property
    def template(self) -> str:
        """That draws ``document``."""

    @property
    def partition_template(self) -> str:
        """That draws ``partition``."""

    @property
    def looks_for(self) -> str:
        """What its looks are for, for people."""

    def health(self) -> Health: ...

    def metrics(self, *, aliases: bool) -> bytes:
        """For Prometheus; ``aliases``: with the names of Kafka, too, where there are some."""

    def document(self, query: ListQuery) -> Value: ...

    def partition(self, name: TopicPartition) -> Value | None:
        """None for a partition that it does not know."""


class Console:
    """Answers by path. ``silent_ms``: since when the service has not come round; ``interval_ms``: how often it should."""

    def __init__(self, face: Face, silent_ms: Callable[[], int], interval_ms: int) -> None:
        self._face = face
        self._silent_ms = silent_ms
        self._limit_ms = interval_ms + SILENT_MS

    def answer(self, target: str) -> Answer:
        """``target``: a path, with its query."""
        path, _, query = target.partition("?")
        if path == "/":
            return Answer(HTTPStatus.OK, HTML, self._page(parsed(query)))
        if path == "/metrics":
            own = "names=own" in query.split("&")
            return Answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, self._face.metrics(aliases=not own))
        if path == "/healthz":
            return self._alive()
        if path == "/readyz":
            return self._ready()
        if path == "/api/status":
            return Answer(HTTPStatus.OK, JSON, _json(self._face.document(parsed(query))))
        if path.startswith("/api/partitions/"):
            found = self._partition(path.removeprefix("/api/partitions/"))
            return Answer(HTTPStatus.OK, JSON, _json(found)) if found else _absent()
        if path.startswith("/partitions/"):
            found = self._partition(path.removeprefix("/partitions/"))
            page = rendering.render(self._face.partition_template, document=found, root="../") if found else None
            return Answer(HTTPStatus.OK, HTML, page) if page else _absent()
        if path.startswith("/static/") and (name := path.removeprefix("/static/")) in rendering.ASSETS:
            return Answer(HTTPStatus.OK, rendering.ASSETS[name], rendering.asset(name), FOR_EVER if query else "no-cache")
        return plain(HTTPStatus.NOT_FOUND, THERE_ARE)

    def _page(self, query: ListQuery) -> bytes:
        return rendering.render(self._face.template, document=self._face.document(query), query=query, root="")

    def _alive(self) -> Answer:
        silent = self._silent_ms()
        if silent > self._limit_ms:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, f"it has not looked for {self._face.looks_for} since {silent // 1000} s")
        return plain(HTTPStatus.OK, "ok")

    def _ready(self) -> Answer:
        health = self._face.health()
        if health.ready:
            return plain(HTTPStatus.OK, "ok")
        return plain(HTTPStatus.SERVICE_UNAVAILABLE, health.problem or ("it is stopping" if health.stopping else "it is starting"))

    def _partition(self, text: str) -> Value | None:
        try:
            return self._face.partition(TopicPartition.parse(unquote(text)))
        except UsageError:
            return None


def plain(code: HTTPStatus, text: str) -> Answer:
    """A line of text."""
    return Answer(code, TEXT, f"{text}\n".encode())


def _absent() -> Answer:
    return plain(HTTPStatus.NOT_FOUND, "there is no such partition here")


def _json(document: Value) -> bytes:
    return document.model_dump_json(indent=2).encode() + b"\n"
