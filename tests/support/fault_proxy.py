"""An HTTP proxy before a server of objects that fails by rule and seed, and counts what goes through.

Faults: ``slow_down``, ``internal``, ``unknown`` (501), ``late`` (200 over an error), ``denied``, ``expired`` (credentials) and ``skewed``
(clock) are answered in the words of the server's vendor, not forwarded. ``reset``: connection reset, not forwarded. ``lost``: done, but the
answer is dropped. ``torn``: half of the request's body is forwarded, then both connections break. ``cut``: the answer's body breaks
off. ``short``, ``long``: a body shorter or longer than the range that the answer names. ``flip``: one bit of the answer's body;
``flip_sent``: one bit of the request's body. ``delay``: ``seconds`` before it.
"""

from __future__ import annotations

import http.client
import json
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
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from typing_extensions import override

from compactor.adapters.stores import azure, gcs, hdfs
from tests.support.cloud_servers import ACCOUNT

S3 = {
    "slow_down": (503, "SlowDown"),
    "denied": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "unknown": (501, "NotImplemented"),
    "late": (200, "InternalError"),
    "internal": (500, "InternalError"),
}
GOOGLE = {
    "slow_down": (429, "rateLimitExceeded"),
    "denied": (403, "forbidden"),
    "expired": (401, "authError"),
    "skewed": (401, "authError"),
    "unknown": (501, "notImplemented"),
    "internal": (503, "backendError"),
}
AZURE = {
    "slow_down": (503, "ServerBusy"),
    "denied": (403, "AuthorizationPermissionMismatch"),
    "expired": (403, "AuthenticationFailed"),
    "skewed": (403, "AuthenticationFailed"),
    "unknown": (501, "NotImplemented"),
    "internal": (500, "InternalError"),
}
HADOOP = {
    "slow_down": (503, "RetriableException"),
    "denied": (403, "AccessControlException"),
    "expired": (401, "AuthenticationException"),
    "skewed": (401, "AuthenticationException"),
    "unknown": (501, "UnsupportedOperationException"),
    "internal": (500, "RuntimeException"),
}
"""Status and code of each refusal."""
BUSY = "SlowDown|rateLimitExceeded|ServerBusy|RetriableException"
"""What is said of ``slow_down``, in one of the vendors' words."""
CONDITIONS = {"if-none-match", "ifgenerationmatch", "renameoptions"}
"""What makes a request conditional. A server that ignores conditions is one whose requests are stripped of these."""
_GOOGLE_PATH = re.compile(r"/(?:(?:upload|download)/)?storage/v1/b/?(?P<bucket>[^/?]*)(?:/o)?/?(?P<key>[^?]*)")
_HADOOP_PATH = re.compile(r"(?:/node/(?P<node>[^/]+))?/webhdfs/v1(?P<path>[^?]*)")
"""Requests to a datanode, to which a namenode redirects, pass the proxy below ``/node/HOST:PORT``."""
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}


@dataclass
class Fault:
    """:param requests: which kinds of request (see ``kind_of``), all if empty; ``match``: pattern of the place; ``times``: -1 for ever."""

    kind: str
    requests: Sequence[str] = ()
    match: str = ""
    rate: float = 1.0
    times: int = -1
    seconds: float = 0.01

    def applies(self, request: str, place: str) -> bool:
        return self.times != 0 and (not self.requests or request in self.requests) and bool(re.search(self.match, place))


@dataclass
class Seen:
    """What the proxy saw: requests by kind, bytes of object bodies in both directions, faults by kind, bytes read by place."""

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
        """Request headers and parameters (lower case) that are dropped: a server that ignores them."""
        self.before: Callable[[str, str], None] = lambda request, place: None
        """Called with kind and place (``place_of``) before a request is forwarded, to let something else happen first."""
        self.seen = Seen()
        self.headers: list[tuple[str, dict[str, str]]] = []
        """Kind, and headers with parameters (names in lower case), of each request, in order."""
        self.inodes: dict[str, str] = {}
        """Places of HDFS's files by their path by inode, as seen in answers."""
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

    def choose(self, request: str, place: str) -> Fault | None:
        with self.lock:
            self.seen.requests[request] += 1
            for fault in self.faults:
                if fault.applies(request, place) and self._random.random() < fault.rate:
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


def refusal(kind: str, target: str) -> tuple[int, dict[str, str], bytes] | None:
    """Return status, headers and body of a fault that is an answer, as the vendor of this API writes it."""
    if _GOOGLE_PATH.match(target):
        if kind in GOOGLE:
            status, code = GOOGLE[kind]
            body = {"error": {"code": status, "message": code, "errors": [{"reason": code}]}}
            return status, {"Content-Type": "application/json"}, json.dumps(body).encode()
        return None
    if _HADOOP_PATH.match(target):
        if kind in HADOOP:
            status, code = HADOOP[kind]
            return (
                status,
                {"Content-Type": "application/json"},
                json.dumps({"RemoteException": {"exception": code, "message": code}}).encode(),
            )
        return None
    is_azure = target.startswith(f"/{ACCOUNT}/")
    codes = AZURE if is_azure else S3
    if kind not in codes:
        return None
    status, code = codes[kind]
    headers = {"Content-Type": "application/xml", **({"x-ms-error-code": code} if is_azure else {})}
    return status, headers, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}.</Message></Error>".encode()


def place_of(target: str, body: bytes) -> str:
    """Return ``/bucket/key`` of a request, unquoted, with the query where the API has one besides the key."""
    parts = urlsplit(target)
    if hadoop := _HADOOP_PATH.match(target):
        return parse_qs(parts.query).get("destination", [unquote(hadoop["path"])])[0]
    found = _GOOGLE_PATH.match(target)
    if not found:
        return unquote(parts.path) + (f"?{parts.query}" if parts.query else "")
    query = parse_qs(parts.query)
    named = [unquote(found["key"] or ""), *query.get("name", []), *re.findall(r'"name": ?"([^"]+)"', body[:2000].decode(errors="replace"))]
    return f"/{found['bucket']}/{next(filter(None, named), '')}"


def kind_of(method: str, target: str, copies: bool = False) -> str:
    """The same names that the stores count by."""
    if _GOOGLE_PATH.match(target):
        return gcs.request_kind_for_metering(method, target)
    if _HADOOP_PATH.match(target):
        return hdfs.request_kind_for_metering(method, target)
    if target.startswith(f"/{ACCOUNT}/"):
        return azure.request_kind_for_metering(method, target, is_copy=copies)
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


def _bounds_of_object(content_type: str, body: bytes) -> tuple[int, int]:
    """Return where the object's bytes lie in the body of an upload. Google's client sends them as the second part, after the metadata."""
    found = re.match(r'multipart/related; boundary="?([^"]+)"?', content_type)
    if not found:
        return 0, len(body)
    boundary = b"--" + found[1].encode()
    start = body.index(b"\r\n\r\n", body.index(boundary, len(boundary))) + 4
    return start, body.rindex(b"\r\n" + boundary)


class _Server(ThreadingHTTPServer):
    @override
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
            asked = [*self.headers.items(), *parse_qsl(urlsplit(self.path).query)]
            self.proxy.headers.append((request, {name.lower(): value for name, value in asked}))
        place = place_of(self.path, body)
        place = self.proxy.inodes.get(place, place)
        fault = self.proxy.choose(request, place)
        kind = fault.kind if fault else ""
        if request == "put":
            with self.proxy.lock:
                start, end = _bounds_of_object(self.headers.get("Content-Type", ""), body)
                self.proxy.seen.bytes_written += end - start
        if kind == "reset":
            return self._reset()
        if refused := refusal(kind, self.path):
            return self._answer(*refused)
        if kind == "delay" and fault:
            time.sleep(fault.seconds)
        if kind == "flip_sent" and request == "put" and body:
            start, end = _bounds_of_object(self.headers.get("Content-Type", ""), body)
            body = body[:start] + self.proxy.flipped(body[start:end]) + body[end:]
        self.proxy.before(request, place)
        status, headers, answer = self._forward(body, torn=kind == "torn")
        if kind in ("lost", "torn") or (kind == "cut" and not answer):
            return self._reset()
        if request == "get" and status < 300:
            with self.proxy.lock:  # before the answer leaves: who has it may look at once
                self.proxy.seen.bytes_read += len(answer)
                self.proxy.seen.read[place.partition("?")[0]] += len(answer)
        self._answer(status, headers, self._damaged(kind, answer), cut=kind == "cut")
        return None

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request  # noqa: N815

    def _damaged(self, kind: str, body: bytes) -> bytes:
        if kind == "short":
            return body[: len(body) // 2]
        if kind == "long" and body:
            return body + b"?"
        return self.proxy.flipped(body) if kind == "flip" and body else body

    def _forward(self, body: bytes, torn: bool = False) -> tuple[int, dict[str, str], bytes]:
        hadoop = _HADOOP_PATH.match(self.path)
        node = hadoop["node"] if hadoop else None
        connection = http.client.HTTPConnection(node or "{}:{}".format(*self.proxy.upstream), timeout=60)
        try:
            connection.putrequest(
                self.command, self._stripped_target().removeprefix(f"/node/{node}"), skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in _HOP | self.proxy.strip:
                    connection.putheader(name, value)
            if body or "Content-Length" in self.headers:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders((body[: len(body) // 2] if torn else body) or None)
            if torn:
                return 0, {}, b""
            response = connection.getresponse()
            headers = {name: value for name, value in response.getheaders() if name.lower() not in _HOP}
            if self.command == "HEAD":
                headers["Content-Length"] = response.getheader("Content-Length") or "0"
            answer = response.read()
            if hadoop:
                if "Location" in headers:
                    headers["Location"] = headers["Location"].replace("://", f"://{urlsplit(self.proxy.url).netloc}/node/")
                named = re.search(rb'"fileId":(\d+)', answer) if "op=GETFILESTATUS" in self.path else None
                if named and not hadoop["path"].startswith("/.reserved/"):
                    self.proxy.inodes[f"/.reserved/.inodes/{named[1].decode()}"] = unquote(hadoop["path"])
            return response.status, headers, answer
        finally:
            connection.close()

    def _stripped_target(self) -> str:
        path, sign, query = self.path.partition("?")
        left = [each for each in query.split("&") if each.partition("=")[0].lower() not in self.proxy.strip]
        return path + sign + "&".join(left)

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

    @override
    def log_message(self, *args: object) -> None:
        pass
