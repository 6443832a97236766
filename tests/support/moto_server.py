"""moto's S3 over HTTP, its requests served one at a time: without the lock its conditional puts let two win.

python -m tests.support.moto_server [--port N] [--racy]      prints "listening on http://127.0.0.1:N" and serves until killed

With --racy it tests a condition first and creates the object a moment later, so that several writers of one key succeed.
"""

from __future__ import annotations

import argparse
import io
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any


def locked(application: Callable[..., Iterable[bytes]]) -> Callable[..., list[bytes]]:
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        with lock:
            return list(application(environ, start_response))

    return serve


def check_then_set(application: Callable[..., Iterable[bytes]]) -> Callable[..., list[bytes]]:
    """Serve conditional puts as s3s-fs 0.14.1 does, only slower."""
    inner = locked(application)

    def serve(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if environ["REQUEST_METHOD"] == "PUT" and "HTTP_IF_NONE_MATCH" in environ:
            statuses: list[str] = []
            question = environ | {"REQUEST_METHOD": "HEAD", "CONTENT_LENGTH": "0", "wsgi.input": io.BytesIO(), "QUERY_STRING": ""}
            del question["HTTP_IF_NONE_MATCH"]
            inner(question, lambda status, headers, info=None: statuses.append(status))
            if not statuses[0].startswith("200"):
                time.sleep(0.05)
                environ = {name: value for name, value in environ.items() if name != "HTTP_IF_NONE_MATCH"}
        return inner(environ, start_response)

    return serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--racy", action="store_true")
    args = parser.parse_args()

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        disable_nagle_algorithm = True  # as in the fault proxy

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = (check_then_set if args.racy else locked)(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", args.port, application, threaded=True, request_handler=Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
