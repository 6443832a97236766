"""An HTTP proxy before a server of objects that fails by rule and seed, and counts what goes through.

Faults: ``slow_down`` (503), ``internal`` (500), ``unknown`` (501), ``late`` (200 over an
error), ``denied`` (403), ``expired`` (400): answered, not forwarded. ``reset``: connection
reset, not forwarded. ``lost``: done, but the answer is dropped. ``cut``: the body breaks off. ``short``, ``long``: a body shorter or
longer than the range that the answer names. ``flip``: one bit of the answer's body; ``flip_sent``: one bit of the request's body.
``delay``: ``seconds`` before it.
"""

from __future__ import annotations

import http.client
import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from compactor.storage import azure, gcs
from tests.support.cloud_servers import ACCOUNT

REFUSALS = {
    "slow_down": (503, b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"),
    "denied": (403, b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
    "expired": (400, b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"),
    "unknown": (501, b"<?xml version='1.0'?><Error><Code>NotImplemented</Code><Message>Not here.</Message></Error>"),
    "late": (200, b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>We encountered an error.</Message></Error>"),
    "internal": (500, b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>We encountered an error.</Message></Error>"),
}
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}


@dataclass
class Fault:
    """:param requests: which kinds of request (see ``kind_of``), all if empty; ``match``: a pattern of the path; ``times``: -1 for ever."""

    kind: str
    requests: Sequence[str] = ()
    match: str = ""
    rate: float = 1.0
    times: int = -1
    seconds: float = 0.01

    def applies(self, request: str, path: str) -> bool:
        return self.times != 0 and (not self.requests or request in self.requests) and bool(re.search(self.match, path))


@dataclass
class Seen:
    """What the proxy saw: requests by kind, bytes of object bodies in both directions, faults by kind, bytes read by path."""

    requests: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    read: Counter[str] = field(default_factory=Counter)
    bytes_written: int = 0
    faults: Counter[str] = field(default_factory=Counter)


class FaultProxy:
    def __init__(self, upstream: str, seed: int = 0) -> None:
        parts = urlsplit(upstream)
        self.upstream = (parts.hostname or "", parts.port or 80)
        self.faults: list[Fault] = []
        self.strip: set[str] = set()
        """Request headers (lower case) that are dropped: a server that ignores them."""
        self.before: Callable[[str, str], None] = lambda request, path: None
        """Called with kind and path before a request is forwarded, to let something else happen first."""
        self.seen = Seen()
        self.headers: list[tuple[str, dict[str, str]]] = []
        """Kind and headers (names in lower case) of each request, in order."""
        self.lock = threading.Lock()
        self._random = random.Random(seed)
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[FaultProxy]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def choose(self, request: str, path: str) -> Fault | None:
        with self.lock:
            self.seen.requests[request] += 1
            for fault in self.faults:
                if fault.applies(request, path) and self._random.random() < fault.rate:
                    fault.times -= 1
                    self.seen.faults[fault.kind] += 1
                    return fault
        return None

    def flipped(self, body: bytes) -> bytes:
        with self.lock:
            bit = self._random.randrange(len(body) * 8)
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)


def kind_of(method: str, target: str, copies: bool = False) -> str:
    """The same names that the stores count by."""
    if re.match(r"/((upload|download)/)?storage/v1/", target):
        return gcs.request_kind(method, target)
    if target.startswith(f"/{ACCOUNT}/"):
        return azure.request_kind(method, target, copies=copies)
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    is_object = parts.path.strip("/").count("/") > 0
    if ("uploadId" in query and method in ("POST", "DELETE")) or (method == "POST" and "uploads" in query):
        return "multipart"
    if method == "POST" and "delete" in query:
        return "delete"
    if method == "GET" and "list-type" in query:
        return "list"
    if method == "HEAD":
        return "head"
    return {"GET": "get", "PUT": "copy" if copies else "put"}.get(method, "other") if is_object else "other"


def _size_of_object(content_type: str, body: bytes) -> int:
    """Of an upload. Google's client sends the object as the second part of a body, after its metadata."""
    found = re.match(r'multipart/related; boundary="?([^"]+)"?', content_type)
    if not found:
        return len(body)
    return len(body.split(b"--" + found[1].encode())[2].partition(b"\r\n\r\n")[2]) - len(b"\r\n")


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Who asked was killed meanwhile, or the answer was reset on purpose: nothing to tell."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body leave one after the other: 40 ms a request
    proxy: FaultProxy

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = kind_of(self.command, self.path, any(name in self.headers for name in ("x-amz-copy-source", "x-ms-copy-source")))
        with self.proxy.lock:
            self.proxy.headers.append((request, {name.lower(): value for name, value in self.headers.items()}))
        fault = self.proxy.choose(request, self.path)
        kind = fault.kind if fault else ""
        if request == "put":
            with self.proxy.lock:
                self.proxy.seen.bytes_written += _size_of_object(self.headers.get("Content-Type", ""), body)
        if kind == "reset":
            return self._reset()
        if kind in REFUSALS:
            return self._answer(REFUSALS[kind][0], {"Content-Type": "application/xml"}, REFUSALS[kind][1])
        if kind == "delay" and fault:
            time.sleep(fault.seconds)
        if kind == "flip_sent" and body:
            body = self.proxy.flipped(body)
        self.proxy.before(request, self.path)
        status, headers, answer = self._forward(body)
        if kind == "lost" or (kind == "cut" and not answer):
            return self._reset()
        if request == "get" and status < 300:
            with self.proxy.lock:  # before the answer leaves: who has it may look at once
                self.proxy.seen.bytes_read += len(answer)
                self.proxy.seen.read[urlsplit(self.path).path] += len(answer)
        self._answer(status, headers, self._damaged(kind, answer), cut=kind == "cut")
        return None

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request  # noqa: N815

    def _damaged(self, kind: str, body: bytes) -> bytes:
        if kind == "short":
            return body[: len(body) // 2]
        if kind == "long" and body:
            return body + b"?"
        return self.proxy.flipped(body) if kind == "flip" and body else body

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.proxy.upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP | self.proxy.strip:
                    connection.putheader(name, value)
            if body or "Content-Length" in self.headers:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            response = connection.getresponse()
            headers = {name: value for name, value in response.getheaders() if name.lower() not in _HOP}
            if self.command == "HEAD":
                headers["Content-Length"] = response.getheader("Content-Length") or "0"
            return response.status, headers, response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def _reset(self) -> None:
        """RST instead of an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, *args: object) -> None:
        pass
