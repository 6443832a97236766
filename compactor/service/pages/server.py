"""A small HTTP server for the pages: reads only, one thread a request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from compactor.errors import UsageError
from compactor.service.pages.console import Answer

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The pages need nothing from elsewhere, and no script but their own."""


class Answering(Protocol):
    def answer(self, target: str) -> Answer: ...


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
            answer = pages.answer(self.path)
            self.send_response(answer.code)
            headers = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body)), "Cache-Control": answer.keep, **HEADERS}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(answer.body)

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
