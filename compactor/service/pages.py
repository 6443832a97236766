"""What the daemon serves: ``/metrics``, ``/healthz``, ``/readyz`` and a plain status page."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST

from compactor.errors import UsageError
from compactor.service.metrics import Exporter, Status
from compactor.service.scheduling import PartitionWatch
from compactor.views.difference import iso

TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
SILENT_MS = 300_000
"""A daemon that has not come round for so long, beyond its interval, is not healthy. A look at a large tier may take minutes."""

Answer = tuple[HTTPStatus, str, bytes]


class Pages:
    """Answers by path. ``silent_ms``: since when the daemon has not come round; ``interval_ms``: how often it should."""

    def __init__(self, status: Callable[[], Status], silent_ms: Callable[[], int], interval_ms: int) -> None:
        self._status = status
        self._silent_ms = silent_ms
        self._limit_ms = interval_ms + SILENT_MS
        self._exporter = Exporter(status)

    def answer(self, path: str) -> Answer:
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, self._exporter.text()
        if path == "/healthz":
            silent = self._silent_ms()
            if silent > self._limit_ms:
                return plain(HTTPStatus.SERVICE_UNAVAILABLE, f"it has not looked for work since {silent // 1000} s")
            return plain(HTTPStatus.OK, "ok")
        if path == "/readyz":
            status = self._status()
            if status.ready:
                return plain(HTTPStatus.OK, "ok")
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, status.problem or ("it is stopping" if status.stopping else "it is starting"))
        if path == "/":
            return HTTPStatus.OK, HTML, status_page(self._status()).encode()
        return plain(HTTPStatus.NOT_FOUND, "there are /, /metrics, /healthz and /readyz")


class Answering(Protocol):
    def answer(self, path: str) -> Answer: ...


def plain(code: HTTPStatus, text: str) -> Answer:
    """A line of text."""
    return code, TEXT, f"{text}\n".encode()


@contextmanager
def served(listen: str, pages: Answering, setting: str = "daemon.listen") -> Iterator[str]:
    """Serves them while the block runs; gives the address, where port 0 has become a real one. Raises UsageError."""

    class Handler(BaseHTTPRequestHandler):
        server_version = "tiered-compactor"
        sys_version = ""
        timeout = 10

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            code, kind, data = pages.answer(self.path.partition("?")[0])
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the standard library
            pass

    host, _, port = listen.rpartition(":")
    host = host.strip("[]")

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        server = Server((host, int(port)), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"the {setting.partition('.')[0]} cannot listen on {listen}: {why}", hint=f"Set {setting} to a free address, or port 0"
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, name="pages", daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"{shown}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# --- the status page ---

STYLE = (
    "body{font-family:sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ccc}td.n{text-align:right}.bad{color:#a00}"
)


def status_page(status: Status) -> str:
    """Partitions with their cleaner offsets, what is at work, what is wrong. No script, nothing from elsewhere."""
    state = "stopping" if status.stopping else "ready" if status.ready else "not ready"
    facts = [
        ("tier", status.tier),
        ("compactor", f"{status.holder}, since {iso(status.started_ms)}"),
        ("state", state + (f": {status.problem}" if status.problem else "")),
        ("last scan", iso(status.scan_ms) if status.scan_ms else "none yet"),
        ("at work", ", ".join(f"{job.name} ({job.action.value})" for job in status.running) or "nothing"),
        ("requests", f"{status.usage.total_requests:,}"),
        ("local disk", f"{status.disk_used:,} of {status.disk_total:,} bytes"),
    ]
    head = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    columns = ("partition", "cleaner offsets", "first dirty", "end", "dirty", "state", "leader", "to retire")
    heading = "".join(f"<th>{name}</th>" for name in columns)
    rows = "".join(_row(watch, status) for watch in sorted(status.watches, key=lambda watch: watch.name))
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>tiered-compactor</title><style>{STYLE}</style></head>"
        f"<body><h1>tiered-compactor</h1><table>{head}</table>"
        f"<h2>{len(status.watches)} partitions</h2><table><tr>{heading}</tr>{rows}</table></body></html>\n"
    )


def _row(watch: PartitionWatch, status: Status) -> str:
    seen = watch.sight
    if seen is None:
        return f"<tr><td>{escape(str(watch.name))}</td><td colspan=7 class=bad>{escape(watch.unreadable or 'not looked at yet')}</td></tr>"
    working = next((job.action.value for job in status.running if job.name == watch.name), "")
    what = watch.uncleanable or (f"{working} at work" if working else f"due: {seen.reason}" if seen.due else seen.reason)
    bad = " class=bad" if watch.uncleanable else ""
    vector = " ".join(f"{entry.leader_epoch}:{entry.offset}" for entry in seen.cleaner_offsets) or "none"
    cells = [f"<td>{escape(str(watch.name))}</td>", f"<td>{escape(vector)}</td>"]
    cells += [f"<td class=n>{number}</td>" for number in (seen.first_dirty_offset, seen.end_offset, f"{100 * seen.dirty_ratio:.0f} %")]
    cells.append(f"<td{bad}>{escape(what)}</td><td>{escape(seen.leader)}</td><td class=n>{seen.waiting_bytes:,}</td>")
    return f"<tr>{''.join(cells)}</tr>"
