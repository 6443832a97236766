"""HTTP server for the pages. It only answers GET and HEAD requests, each in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from typing_extensions import override

from compactor.errors import UsageError
from compactor.web.console import HttpResponse

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Security headers of every response. The pages load nothing from elsewhere and run no script but their own."""


class HttpResponder(Protocol):
    """Source of the responses to HTTP requests. ``RequestRouter`` is the implementation that maps paths to pages."""

    def respond_to_request(self, target: str) -> HttpResponse:
        """Return the response to a GET request. ``target``: path with its query string."""


@contextmanager
def serve_pages(listen: str, pages: HttpResponder, setting_name: str = "daemon.listen") -> Iterator[str]:
    """Serve the pages while the block runs, and yield the address (host and port). Port 0 in ``listen`` stands for any free port.

    :param listen: host and port.
    :param setting_name: the setting that ``listen`` comes from, for messages.
    :raises UsageError: if the address cannot be used.
    """

    class PageRequestHandler(BaseHTTPRequestHandler):
        server_version = "tiered-compactor"
        sys_version = ""
        timeout = 10

        def do_GET(self) -> None:
            self._send_response(with_body=True)

        def do_HEAD(self) -> None:
            self._send_response(with_body=False)

        def _send_response(self, *, with_body: bool) -> None:
            """Send the response for the request's path. ``with_body``: false for HEAD, which gets the headers only."""
            answer = pages.respond_to_request(self.path)
            self.send_response(answer.code)
            headers = {
                "Content-Type": answer.kind,
                "Content-Length": str(len(answer.body)),
                "Cache-Control": answer.cache_control,
                **HEADERS,
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(answer.body)

        @override
        def log_message(self, format: str, *args: object) -> None:
            pass

    host, _, port = listen.rpartition(":")
    host = host.strip("[]")

    class PageServer(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        server = PageServer((host, int(port)), PageRequestHandler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"the {setting_name.partition('.')[0]} cannot listen on {listen}: {why}",
            hint=f"Set {setting_name} to a free address, or port 0",
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
