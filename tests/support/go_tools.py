"""Programs written in Go that tests use: built once into the user's cache by Go's module proxy."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path


class Unbuildable(Exception):
    """Why the program cannot be had on this machine, for the skip message."""


def go_tool(package: str, version: str) -> Path:
    """The binary of a package with a main function; the first time this takes minutes. Raises Unbuildable."""
    name = package.rsplit("/", 1)[-1]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered-compactor-tests" / f"{name}-{version}"
    binary = cache / name
    if binary.exists():
        return binary
    go = shutil.which("go")
    if not go:
        raise Unbuildable(f"{name} needs Go to be built: install it from https://go.dev/dl")
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            command = [go, "install", f"{package}@{version}"]
            try:
                subprocess.run(command, env={**os.environ, "GOBIN": str(cache)}, check=True, capture_output=True, timeout=900)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
                raise Unbuildable(f"{name} could not be built: {said[-1] if said else error}") from error
    return binary
