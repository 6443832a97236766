"""``make demo-s3``: the demo on an S3 server of its own: versitygw if Go is there to build it, else moto behind a lock.

python -m tests.support.demo_s3 [--server versitygw|moto] [options of demo]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.go_tools import Unbuildable
from tests.support.s3_server import ROOT, VERSITYGW, S3Server, running_moto, running_versitygw, versitygw_binary


@contextmanager
def a_server(wanted: str) -> Iterator[tuple[str, S3Server]]:
    """What it is, in a line, and the server. ``wanted``: empty for the best that can be had."""
    try:
        binary = versitygw_binary() if wanted != "moto" else None
        why = "as asked for"
    except Unbuildable as error:
        if wanted == "versitygw":
            raise
        binary, why = None, str(error)
    if binary is None:
        with running_moto() as server:
            yield f"moto, a simulation in Python, its requests one at a time ({why})", server
        return
    with tempfile.TemporaryDirectory(prefix="versitygw-") as folder, running_versitygw(binary, Path(folder)) as server:
        yield f"versitygw {VERSITYGW}, a real server over a directory", server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("versitygw", "moto"), default="")
    arguments, options = parser.parse_known_args()
    with a_server(arguments.server) as (what, server):
        bucket = server.make_bucket()
        print(f"server: {what}, {server.endpoint}", file=sys.stderr)
        print(f"tier:   s3://{bucket.name}/demo; both are gone when it ends", file=sys.stderr, flush=True)
        settings = {"TIERED_COMPACTOR__S3__ENDPOINT_URL": server.endpoint, "TIERED_COMPACTOR__S3__REGION": server.region}
        command = [sys.executable, "-m", "compactor", "demo", "--tier", f"s3://{bucket.name}/demo", *options]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **server.environment(), **settings}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
