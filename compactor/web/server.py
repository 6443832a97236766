"""HTTP server for the pages: GET and HEAD requests, each in a thread of its own.

A page of another site can let a browser ask for these pages under the other site's name (DNS rebinding). So they are shown under configured
names only; health and metrics under any name.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from typing_extensions import override

from compactor.errors import UsageError
from compactor.web.console import HttpResponse, text_response

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The pages load nothing from elsewhere and run no script but their own."""


UNDER_ANY_NAME = ("/metrics", "/healthz", "/readyz")
"""Paths that are answered whatever the Host header says."""


def is_host_known(host: str, host_names: Collection[str]) -> bool:
    """Return whether the Host header is an IP address, localhost or one of ``host_names``."""
    name, colon, port = host.strip().rpartition(":")
    if not colon or not port.isdigit():
        name = host.strip()
    name = name.rstrip(".").lower()
    if name == "localhost" or name in {known.lower() for known in host_names}:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class HttpResponder(Protocol):
    """Source of responses (``RequestRouter``)."""

    def respond_to_request(self, target: str) -> HttpResponse:
        """target: path with its query string."""


@contextmanager
def serve_pages(listen: str, pages: HttpResponder, setting_name: str = "daemon.listen", host_names: Collection[str] = ()) -> Iterator[str]:
    """Serve the pages while the block runs, and yield the address. Port 0 in ``listen`` stands for any free port.

    :param setting_name: the setting of ``listen``, for messages.
    :param host_names: further names under which the pages are shown.
    :raises UsageError: if the address cannot be used.
    """

    section = setting_name.partition(".")[0]
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    known_names = {host, *host_names}

    class PageRequestHandler(BaseHTTPRequestHandler):
        server_version = "tiered-compactor"
        sys_version = ""
        timeout = 10

        def do_GET(self) -> None:
            self._send_response(with_body=True)

        def do_HEAD(self) -> None:
            self._send_response(with_body=False)

        def _send_response(self, *, with_body: bool) -> None:
            """HEAD gets the headers only."""
            asked = self.headers.get_all("Host", [])  # HTTP/1.0 has none, and no browser speaks that
            if self.path.partition("?")[0] in UNDER_ANY_NAME or all(is_host_known(name, known_names) for name in asked):
                answer = pages.respond_to_request(self.path)
            else:
                advice = f"this name is not one of {section}.host_names. Add it there, or ask by IP address"
                answer = text_response(HTTPStatus.MISDIRECTED_REQUEST, advice)
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

    class PageServer(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        server = PageServer((host, int(port)), PageRequestHandler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"the {section} cannot listen on {listen}: {why}",
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
