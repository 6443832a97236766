"""Where the soak plays: an S3 server behind a proxy, and machines with a disk of their own, each with a daemon on it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.deployment import Deployment, Running
from tests.support.fault_proxy import FaultProxy
from tests.support.go_tools import Unbuildable
from tests.support.s3_server import Bucket, S3Server, running_moto, running_versitygw, versitygw_binary

SETTINGS: dict[str, dict[str, Any]] = {
    "cleaner": {
        "segment_bytes": 1 << 20,
        "min_cleanable_dirty_ratio": 0.3,
        "delete_retention_ms": 60_000,
        "disk_budget_bytes": 12 << 20,
        "map_budget_bytes": 16 << 20,
    },
    "publish": {"grace_ms": 15_000, "orphan_age_ms": 45_000},
    "lease": {"ttl_ms": 4_000},
    "daemon": {"interval_ms": 3_000, "listen": "127.0.0.1:0", "threads": 2},
}
DISK_BYTES = 64 << 20


@dataclass
class Machine:
    """One daemon with a small disk for its ``state_dir``."""

    name: str
    deployment: Deployment
    disk: Path
    daemon: Running
    said: list[Path] = field(default_factory=list)
    killed: bool = False

    def kill(self) -> None:
        self.killed = True
        self.daemon.put_down()

    def ended_by_itself(self) -> bool:
        return not self.killed and self.daemon.poll() is not None

    def restart(self) -> None:
        """After ``kill``."""
        self.daemon = self.deployment.start("daemon")
        self.killed = False
        self.said.append(self.daemon.file)

    def stop(self) -> None:
        self.daemon.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.daemon.send_signal(signal.SIGCONT)

    def fill_disk(self) -> None:
        """Until not a block is left."""
        with open(self.disk / "ballast", "ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass

    def free_disk(self) -> None:
        (self.disk / "ballast").unlink(missing_ok=True)


@dataclass(frozen=True)
class Stage:
    """``importer`` and the machines reach the tier through the proxy, ``beside`` does not: it is what checks."""

    proxy: FaultProxy
    importer: Deployment
    beside: Deployment
    machines: tuple[Machine, ...]


@contextmanager
def s3_server(stack: ExitStack, folder: Path) -> Iterator[S3Server]:
    """versitygw where Go has built it, else moto."""
    try:
        binary = versitygw_binary()
    except Unbuildable:
        yield stack.enter_context(running_moto())
    else:
        folder.mkdir(parents=True)
        yield stack.enter_context(running_versitygw(binary, folder))


@contextmanager
def small_disk(folder: Path, size: int = DISK_BYTES) -> Iterator[Path]:
    """A file system of its own. Raises RuntimeError where none can be mounted."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if (done := subprocess.run(command, check=False, capture_output=True, text=True)).returncode:
        raise RuntimeError(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextmanager
def set_up(folder: Path, seed: int) -> Iterator[Stage]:
    with ExitStack() as stack:
        server = stack.enter_context(s3_server(stack, folder / "s3"))
        os.environ.update(server.environment())
        bucket = server.make_bucket()
        proxy = stack.enter_context(FaultProxy(server.endpoint, seed).running())
        behind = bucket.behind(proxy.url)

        def deployment(name: str, where: Bucket, state: Path) -> Deployment:
            settings = deepcopy(SETTINGS) | {
                "tier": {"url": where.url, "state_dir": str(state)},
                "s3": {"endpoint_url": where.server.endpoint},
            }
            return Deployment(folder / name, settings)

        machines = []
        for number in (1, 2):
            name = f"machine-{number}"
            disk = stack.enter_context(small_disk(folder / f"disk-{number}"))
            made = deployment(name, behind, disk / "state")
            daemon = made.start("daemon")
            machines.append(Machine(name, made, disk, daemon, [daemon.file]))
        stage = Stage(
            proxy,
            deployment("importer", behind, folder / "importer" / "state"),
            deployment("beside", bucket, folder / "beside" / "state"),
            tuple(machines),
        )
        try:
            yield stage
        finally:
            for machine in machines:
                machine.daemon.put_down()
