"""moto's S3 over HTTP, its requests served one at a time: without the lock its conditional puts let two win.

python -m tests.support.moto_server [--port N]      prints "listening on http://127.0.0.1:N" and serves until killed
"""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any


def locked(application: Callable[..., Iterable[bytes]]) -> Callable[..., list[bytes]]:
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        with lock:
            return list(application(environ, start_response))

    return serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    port = parser.parse_args().port

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        disable_nagle_algorithm = True  # as in the fault proxy

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", port, locked(DomainDispatcherApplication(create_backend_app)), threaded=True, request_handler=Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
