"""The endpoint beside a stock broker: the same topic, the same client, in the same run; both have the records in memory.

    python -m benchmarks.serve [--megabytes 200] [--value-bytes 1000] [--codec lz4] [--rounds 5]        (needs Java, Maven and Go)

The client is a bare socket in a process of its own that asks for the next records, finds the last offset, and throws the data away. Both
servers are asked in turn, and the medians count. CPU seconds are those of the server, for each GB of records. ``not cached``: the endpoint
reads the segments from its directory each time. ``store of 50 ms``: they lie in a bucket behind a proxy that waits so long before each
request, and nothing is cached when a pass begins. Memory is what the endpoint has beyond its cache while 32 connections read.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kafka.protocol.consumer import FetchRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from benchmarks.consumer import NAME, VERSION, fill_topic, import_topic
from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.process_tree import below
from tests.support.bucket_cli import BucketCli
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.s3_server import free_port, running_versitygw, versitygw_binary, wait_for

MIB: Final = 1 << 20
DELAY_S: Final = 0.05
TICKS: Final = os.sysconf("SC_CLK_TCK")
USER: Final = ("bench", "a password of a benchmark")


# ---- the client --------------------------------------------------------------------------------------------------------------


class Connection:
    """A client that reads partition 0 of the topic and throws the records away."""

    def __init__(self, address: str, max_bytes: int, certificate: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket: socket.socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._max_bytes = max_bytes
        self._data = bytearray(max_bytes + 4 * MIB)
        if certificate:
            self._socket = ssl.create_default_context(cafile=certificate).wrap_socket(self._socket, server_hostname=host)
            self._ask(SaslHandshakeRequest(mechanism="PLAIN"), 1)
            self._ask(SaslAuthenticateRequest(auth_bytes="\0".join(("", *USER)).encode()), 2)

    def _ask(self, request: Any, version: int) -> memoryview:
        request.API_VERSION = version
        request.with_header(correlation_id=1, client_id="bench")
        self._socket.sendall(request.encode(header=True, framed=True))
        head = self._exactly(4)
        return self._exactly(int.from_bytes(head, "big"))

    def _exactly(self, size: int) -> memoryview:
        view, at = memoryview(self._data), 0
        while at < size:
            read = self._socket.recv_into(view[at:size])
            if not read:
                raise EOFError("the server has closed the connection")
            at += read
        return view[:size]

    def read(self, end: int) -> int:
        """Read from offset 0 to ``end`` and return the bytes of the records."""
        offset, size = 0, 0
        partition = FetchRequest.FetchTopic.FetchPartition
        while offset < end:
            row = partition(partition=0, fetch_offset=offset, partition_max_bytes=self._max_bytes)
            topics = [FetchRequest.FetchTopic(topic=NAME.topic, partitions=[row])]
            request = FetchRequest(
                replica_id=-1, max_wait_ms=500, min_bytes=1, max_bytes=self._max_bytes, isolation_level=0, topics=topics
            )  # fmt: skip
            answer = self._ask(request, 4)
            at = 4 + 4 + 4 + 2 + len(NAME.topic) + 4 + 4
            if error := int.from_bytes(answer[at : at + 2], "big", signed=True):
                raise SystemExit(f"the server answers a fetch with error {error}")
            at += 2 + 8 + 8 + 4  # of read_uncommitted, no transaction is aborted
            length = int.from_bytes(answer[at : at + 4], "big")
            size += length
            at += 4
            stop = at + length
            while at + 61 <= stop:  # batches: base offset, length, ..., delta of the last offset
                batch = 12 + int.from_bytes(answer[at + 8 : at + 12], "big")
                if at + batch > stop:
                    break
                offset = int.from_bytes(answer[at : at + 8], "big") + int.from_bytes(answer[at + 23 : at + 27], "big") + 1
                at += batch
        return size


def run_client(args: argparse.Namespace) -> None:
    """Read the topic on each connection, and print the bytes and the seconds that it took."""
    sizes: list[int] = []

    def work(connection: Connection) -> None:
        sizes.extend(connection.read(args.end) for _ in range(args.passes))

    connections = [Connection(args.client, args.fetch_bytes, args.certificate) for _ in range(args.connections)]
    threads = [threading.Thread(target=work, args=(connection,)) for connection in connections]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(sizes) != args.connections * args.passes:
        raise SystemExit("a connection failed")
    print(sum(sizes), time.perf_counter() - began)


# ---- the servers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server that is measured. pid: its process."""

    address: str
    pid: int
    certificate: str = ""

    def cpu_seconds(self) -> float:
        return below(self.pid).get(self.pid, 0) / TICKS

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


@dataclass(frozen=True)
class Cost:
    """Speed in MB/s, and CPU seconds of the server for each GB of records."""

    speed: float
    cpu: float


@contextmanager
def endpoint(config: Path, certificate: str = "", **settings: object) -> Iterator[Server]:
    """Run ``serve`` on the tier of a configuration, in a process of its own."""
    address = f"127.0.0.1:{free_port()}"
    values = {"PAGES_LISTEN": "127.0.0.1:0", **{name.upper(): value for name, value in settings.items()}}
    environment = os.environ | {f"TIERED_COMPACTOR__SERVE__{name}": str(value) for name, value in values.items()}
    command = [sys.executable, "-m", "compactor", "serve", "--config", str(config), "--listen", address]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        try:
            wait_for(address, started, seconds=60)
            yield Server(address, started.pid, certificate)
        finally:
            started.terminate()


def read(server: Server, end: int, fetch_bytes: int = MIB, connections: int = 1, passes: int = 3) -> Cost:
    """Let a client read the topic."""
    command = [sys.executable, "-m", "benchmarks.serve", "--client", server.address, "--end", end, "--certificate", server.certificate]
    command += ["--fetch-bytes", fetch_bytes, "--connections", connections, "--passes", passes]
    cpu = server.cpu_seconds()
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    size, seconds = map(float, done.stdout.split())
    return Cost(size / seconds / 1e6, (server.cpu_seconds() - cpu) / (size / 1e9))


def medians(servers: Mapping[str, Server], rounds: int, end: int, **how: int) -> dict[str, Cost]:
    """Measure servers in turn, after a pass that warms their caches and compiles what they run."""
    found: dict[str, list[Cost]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        for name, server in servers.items():
            cost = read(server, end, **how)
            if number:
                found[name].append(cost)
    return {
        name: Cost(statistics.median(cost.speed for cost in costs), statistics.median(cost.cpu for cost in costs))
        for name, costs in found.items()
    }


def row_of(name: str, ours: Cost, theirs: Cost | None) -> tuple[str, ...]:
    if theirs is None:
        return name, f"{ours.speed:.0f}", "", "", f"{ours.cpu:.2f}", "", ""
    ratios = f"{ours.speed / theirs.speed:.2f}", f"{ours.cpu / theirs.cpu:.2f}"
    return name, f"{ours.speed:.0f}", f"{theirs.speed:.0f}", ratios[0], f"{ours.cpu:.2f}", f"{theirs.cpu:.2f}", ratios[1]


def tls_settings(folder: Path) -> tuple[str, dict[str, object]]:
    """Return a certificate for this machine, and the settings of an endpoint that has it, with one user."""
    certificate, key, users = folder / "tls.crt", folder / "tls.key", folder / "users.toml"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject, "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    users.write_text(f'[{USER[0]}]\npassword = "{USER[1]}"\ntopics = [".*"]\n')
    users.chmod(0o600)
    return str(certificate), {"tls_certificate": certificate, "tls_key": key, "users_file": users}


@contextmanager
def slow_bucket(folder: Path, log_dir: Path) -> Iterator[Path]:
    """Import a log into a bucket, and yield the configuration of a tier whose requests wait before each answer."""
    with (
        running_versitygw(versitygw_binary(), folder) as server,
        FaultProxy(server.endpoint).running() as proxy,
    ):
        os.environ.update(server.environment())
        bucket = server.make_bucket()
        BucketCli(folder / "import", bucket).do("import", log_dir, "--topic", *map(str, (NAME.topic, "--partition", 0)), "--live")
        proxy.faults.append(Fault("delay", seconds=DELAY_S))
        yield BucketCli(folder / "cli", bucket.behind(proxy.url)).config


def measure(args: argparse.Namespace, scratch: Path) -> list[tuple[str, ...]]:
    """Return the rows of the documents' table."""
    rows: list[tuple[str, ...]] = []
    with KafkaCluster(VERSION, scratch / "cluster") as cluster, ExitStack() as running:
        records = args.megabytes * 1_000_000 // (args.value_bytes + 13)
        fill_topic(cluster, iter(range(records)), args.value_bytes, args.codec, segment_bytes=16 << 20)
        _, end = import_topic(cluster, scratch)
        broker = Server(cluster.bootstrap, cluster.nodes[1].pid)
        config, cache = scratch / "tier.toml", 2 * args.megabytes * 1_000_000
        ours = running.enter_context(endpoint(config, cache_bytes=cache))
        both = {"ours": ours, "theirs": broker}
        for name, how in (
            ("1 MiB, 1 connection", {"fetch_bytes": MIB}),
            ("4 MiB, 1 connection", {"fetch_bytes": 4 * MIB}),
            ("1 MiB, 8 connections", {"fetch_bytes": MIB, "connections": 8}),
        ):
            found = medians(both, args.rounds, end, **how)
            rows.append(row_of(name, found["ours"], found["theirs"]))
            print(rows[-1], flush=True)
        peak = [0]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                peak[0] = max(peak[0], ours.memory_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        many = read(ours, end, connections=32)
        done.set()
        watcher.join()
        rows.append(row_of("1 MiB, 32 connections", many, None))
        cached = sum(path.stat().st_size for path in (scratch / "tier").rglob("*.log"))
        print(rows[-1], f"{(peak[0] - cached) / 1e6:.0f} MB of memory beyond {cached / 1e6:.0f} MB of cached segments", flush=True)
        with endpoint(config, cache_bytes=24 * MIB) as uncached:
            rows.append(row_of("1 MiB, 1 connection, not cached", medians({"ours": uncached}, args.rounds, end)["ours"], None))
            print(rows[-1], flush=True)
        certificate, settings = tls_settings(scratch)
        with endpoint(config, certificate, cache_bytes=cache, **settings) as encrypted:
            rows.append(row_of("1 MiB, 1 connection, TLS", medians({"ours": encrypted}, args.rounds, end)["ours"], None))
            print(rows[-1], flush=True)
        log_dir = cluster.nodes[1].log_dir / str(NAME)
        folder = scratch / "bucket"
        folder.mkdir()
        with slow_bucket(folder, log_dir) as slow, endpoint(slow, cache_bytes=24 * MIB) as distant:
            rows.append(row_of("1 MiB, 1 connection, store of 50 ms", medians({"ours": distant}, args.rounds, end)["ours"], None))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--value-bytes", type=int, default=1000)
    parser.add_argument("--codec", default="lz4")
    parser.add_argument("--rounds", type=int, default=5)
    for name, default in (("client", ""), ("end", 0), ("certificate", ""), ("fetch-bytes", MIB), ("connections", 1), ("passes", 3)):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        return run_client(args)
    prepare(VERSION)
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(args, Path(scratch))
    columns = ("fetches", "`serve`, MB/s", "broker, MB/s", "ratio", "`serve`, CPU s/GB", "broker, CPU s/GB", "ratio of CPU")
    report_table(BenchmarkTable("serve", columns, rows, compared=("ratio", "ratio of CPU")))
    return None


if __name__ == "__main__":
    main()
