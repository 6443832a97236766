"""The endpoint's pages, health and metrics. Their names begin with ``tiered_compactor_serve_``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, Metric

from compactor import __version__
from compactor.features.serve.endpoint import Endpoint
from compactor.model.segment import StrictFrozenModel
from compactor.service_metrics import (
    MOST_LABELLED,
    OWN,
    add_labelled_values,
    common_metrics,
    make_counters,
    make_gauges,
    partition_gauges,
    render_metrics,
)
from compactor.web.console import ASSETS, FOR_EVER, HTML, JSON, TEXT, HttpResponse, read_static_file, render_template

SILENT_S = 60.0
"""Seconds after which an event loop that did not come round is unhealthy."""
_MOST_SHOWN = 200


class ConnectionRow(StrictFrozenModel):
    """connected_ms: how long the connection has lasted."""

    peer: str
    user: str
    client_id: str
    requests: int
    bytes: int
    connected_ms: int


class ServedPartition(StrictFrozenModel):
    """end_offset, stable_offset: exclusive. age_ms: age of this view."""

    partition: str
    log_start_offset: int
    end_offset: int
    stable_offset: int
    leader_epoch: int
    age_ms: int


class EndpointDocument(StrictFrozenModel):
    """problem: why the endpoint is not ready; empty if it is."""

    version: str
    tier: str
    address: str
    node_id: int
    nodes: tuple[str, ...]
    problem: str
    connections: int
    cache_bytes: int
    cache_limit: int
    disk_bytes: int
    pieces_from_memory: int
    pieces_from_disk: int
    pieces_from_store: int
    served_bytes: int
    requests: dict[str, int]
    errors: dict[str, int]
    clients: tuple[ConnectionRow, ...]
    partitions: tuple[ServedPartition, ...]


class EndpointPages:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def respond_to_request(self, target: str) -> HttpResponse:
        path, _, query = target.partition("?")
        if path == "/":
            return HttpResponse(HTTPStatus.OK, HTML, render_template("serve.html", document=self.document(), root=""))
        if path == "/api/status":
            return HttpResponse(HTTPStatus.OK, JSON, self.document().model_dump_json().encode())
        if path == "/metrics":
            return HttpResponse(HTTPStatus.OK, CONTENT_TYPE_LATEST, render_metrics(self.metrics()))
        if path in ("/healthz", "/readyz"):
            problem = self.silence() if path == "/healthz" else self.silence() or self._endpoint.state.problem
            code = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
            return HttpResponse(code, TEXT, f"{problem or 'ok'}\n".encode())
        name = path.removeprefix("/static/")
        if path.startswith("/static/") and name in ASSETS:
            return HttpResponse(HTTPStatus.OK, ASSETS[name], read_static_file(name), FOR_EVER if query else "no-cache")
        return HttpResponse(HTTPStatus.NOT_FOUND, TEXT, b"there are /, /api/status, /metrics, /healthz and /readyz\n")

    def silence(self) -> str:
        silent = time.monotonic() - self._endpoint.state.turned_s - self._endpoint.partitions.max_age_s
        return f"it has not come round for {silent:.0f} s" if silent > SILENT_S else ""

    def document(self) -> EndpointDocument:
        endpoint, now = self._endpoint, time.monotonic()
        counts = endpoint.requests.counts if endpoint.requests is not None else None
        cache = endpoint.cache
        clients = sorted(endpoint.state.connections.copy().values(), key=lambda one: -one.bytes)
        return EndpointDocument(
            version=__version__,
            tier=endpoint.tier.ports.layout.url,
            address=f"{endpoint.me.host}:{endpoint.me.port}",
            node_id=endpoint.me.id,
            nodes=tuple(f"{node.id}@{node.host}:{node.port}" for node in endpoint.nodes),
            problem=self.silence() or endpoint.state.problem,
            connections=len(clients),
            cache_bytes=cache.used,
            cache_limit=endpoint.settings.cache_bytes,
            disk_bytes=cache.disk_used,
            pieces_from_memory=cache.counts.memory,
            pieces_from_disk=cache.counts.disk,
            pieces_from_store=cache.counts.store,
            served_bytes=counts.bytes if counts else 0,
            requests=dict(sorted(counts.by_api.copy().items())) if counts else {},
            errors=dict(sorted(counts.errors.copy().items())) if counts else {},
            clients=tuple(
                ConnectionRow(
                    peer=one.peer, user=one.user, client_id=one.client_id, requests=one.requests, bytes=one.bytes,
                    connected_ms=int((now - one.since_s) * 1000),
                )
                for one in clients[:_MOST_SHOWN]
            ),
            partitions=tuple(
                ServedPartition(
                    partition=str(view.partition), log_start_offset=view.start, end_offset=view.end, stable_offset=view.stable,
                    leader_epoch=view.epoch, age_ms=int((now - view.taken_s) * 1000),
                )
                for view in sorted(endpoint.partitions.views(), key=lambda view: view.partition)[:_MOST_SHOWN]
            ),
        )  # fmt: skip

    def metrics(self) -> Iterator[Metric]:
        document, state, now = self.document(), self._endpoint.state, time.monotonic()
        requests = CounterMetricFamily(f"{OWN}_serve_requests", "Requests of clients, by type", labels=["api"])
        yield add_labelled_values(requests, document.requests)
        errors = CounterMetricFamily(f"{OWN}_serve_errors", "Errors that clients were answered with, by Kafka's name", labels=["error"])
        yield add_labelled_values(errors, document.errors)
        pieces = CounterMetricFamily(f"{OWN}_serve_pieces", "Pieces of segments, by where they were found", labels=["source"])
        sources = {"memory": document.pieces_from_memory, "disk": document.pieces_from_disk, "store": document.pieces_from_store}
        yield add_labelled_values(pieces, sources)
        yield from make_gauges(
            (
                ("serve_ready", "1 while the tier can be read", not document.problem),
                ("serve_connections", "Clients that are connected", document.connections),
                ("serve_cache_bytes", "Bytes of segments in memory", document.cache_bytes),
                ("serve_disk_cache_bytes", "Bytes of segments in the disk cache", document.disk_bytes),
                ("serve_in_flight_bytes", "Bytes of responses that are being written", state.in_flight),
                (
                    "serve_max_view_age_seconds",
                    "Age of the oldest view",
                    max((row.age_ms for row in document.partitions), default=0) / 1000,
                ),
            )
        )
        yield from make_counters(
            (
                ("serve_bytes", "Bytes of records sent", document.served_bytes),
                ("serve_connections_accepted", "Connections accepted", state.accepted),
                ("serve_connections_refused", "Connections closed because max_connections were open", state.refused),
                ("serve_invalid_frames", "Connections closed because of a frame that is not a valid request", state.invalid_frames),
                (
                    "serve_replaced_segments",
                    "Reads that found a segment replaced and went on in its replacement",
                    self._endpoint.reader.replaced,
                ),
                ("serve_damaged_reads", "Reads that met damage in the tier", self._endpoint.reader.damaged),
            )
        )
        at_end = self._endpoint.requests.counts.at_end.copy() if self._endpoint.requests is not None else {}
        described = {
            "serve_end_offset": f"End offset (exclusive) of the tier, which is not the cluster's, for at most {MOST_LABELLED} partitions",
            "serve_seconds_since_client_at_end": "Seconds since a client last waited at the tier's end; -1 if none did",
        }
        views = sorted(self._endpoint.partitions.views(), key=lambda view: view.partition)[:MOST_LABELLED]
        rows = ((view.partition, (view.end, now - at_end[view.partition] if view.partition in at_end else -1)) for view in views)
        yield from partition_gauges(described, rows)
        yield from common_metrics(self._endpoint.tier.counters.usage())
