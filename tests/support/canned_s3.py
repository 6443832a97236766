"""An HTTP server that gives prepared answers, for what no test server says by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import override


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    said_length: int = -1
    """What Content-Length says, if not the truth; the connection is closed after the body."""


def failure(status: int, code: str, message: str = "", inside: str = "", headers: dict[str, str] | None = None) -> Answer:
    """An S3 error as XML; ``inside`` are further elements."""
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message>{inside}</Error>"
    return Answer(status, body.encode(), {"Content-Type": "application/xml", **(headers or {})})


@dataclass
class Canned:
    url: str
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


@contextmanager
def answering(answers: Sequence[Answer]) -> Iterator[Canned]:
    """Gives these answers in order, the last one for ever."""
    left = list(answers)
    canned = Canned("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            canned.asked.append((self.command, self.path, dict(self.headers.items())))
            said = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(said.body) if said.said_length < 0 else said.said_length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said.body)
            self.close_connection = said.said_length >= 0

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

        @override
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    canned.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield canned
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
