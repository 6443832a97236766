"""Programs that tests use and that do not belong to this environment: fetched once into the user's cache, by Go, npm or pip."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


class Unbuildable(Exception):
    """Why the program cannot be had on this machine, for the skip message."""


def go_tool(package: str, version: str) -> Path:
    """The binary of a package with a main function; the first time this takes minutes. Raises Unbuildable."""
    name = package.rsplit("/", 1)[-1]
    return _cached(f"{name}-{version}", name, "go", lambda cache: ["install", f"{package}@{version}"])


def go_program(folder: Path) -> Path:
    """The binary of a Go module in this repository. Raises Unbuildable."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.iterdir()))).hexdigest()[:16]
    name = folder.name
    return _cached(f"{name}-{digest}", name, "go", lambda cache: ["-C", str(folder), "build", "-o", str(cache / name), "."])


def npm_tool(package: str, version: str) -> Path:
    """The program of an npm package; the first time this takes a minute. Raises Unbuildable."""
    options = ["--no-audit", "--no-fund", "--no-save", "--ignore-scripts"]
    where = f"node_modules/.bin/{package}"
    return _cached(
        f"{package}-{version}", where, "npm", lambda cache: ["install", *options, "--prefix", str(cache), f"{package}@{version}"]
    )


def pip_packages(name: str, requirements: Sequence[str]) -> Path:
    """A folder for PYTHONPATH that holds Python packages; the first time this takes a minute. Raises Unbuildable."""
    digest = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:16]
    options = ["--quiet", "--disable-pip-version-check", "--upgrade"]
    return _cached(
        f"{name}-{digest}", "packages", sys.executable,
        lambda cache: ["-m", "pip", "install", *options, "--target", str(cache / "packages"), *requirements],
    )  # fmt: skip


def _cached(folder: str, program: str, builder: str, arguments: Callable[[Path], list[str]]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered-compactor-tests" / folder
    binary = cache / program
    done = cache / "done"
    if done.exists() or (binary.exists() and builder == "go"):
        return binary
    tool = shutil.which(builder)
    if not tool:
        raise Unbuildable(f"{folder} needs '{builder}': install it from {'https://go.dev/dl' if builder == 'go' else 'https://nodejs.org'}")
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            try:
                environment = {**os.environ, "GOBIN": str(cache)}
                subprocess.run([tool, *arguments(cache)], env=environment, check=True, capture_output=True, timeout=900)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
                raise Unbuildable(f"{folder} could not be built: {said[-1] if said else error}") from error
            done.touch()
    return binary
