"""Real Kafka brokers for tests: KRaft on loopback, one JVM each, tiering into a directory through Kafka's LocalTieredStorage.

    with KafkaCluster("4.4.0", tmp_path) as cluster:
        admin = ClusterAdmin(cluster) ...

One broker is its own controller. Two or more have a controller of their own, so that any broker may be stopped or killed.

python -m tests.support.kafka_broker      fetches and prepares what all versions need (CI does it before the tests)
"""

from __future__ import annotations

import base64
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.kafka_jars import TOOLS, VERSIONS, BrokerJars, BrokerUnavailable, broker_jars
from tests.support.leftovers import guard

HOST = "127.0.0.1"
CONTROLLER = 100  # its node id where it is a process of its own
CLUSTER_ID = "dGllcmVkLWNvbXBhY3Q_Pw"
START_SECONDS = 180.0
STARTED = "Kafka Server started"
_BUSY_CONTROLLER = re.compile(r"controller event queue overloaded|apiKey=CONTROLLER_REGISTRATION")
TIERING = "Initialized topic-based RLMM resources successfully"  # before that, not even a clean shutdown works
METADATA_MANAGER = "remote.log.metadata.manager.class.name"  # a setting; brokers with another than Kafka's do not say so

_ALL = """
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,BROKER:PLAINTEXT,CLIENT:SASL_PLAINTEXT
remote.log.storage.system.enable=true
"""
# Small, quick and quiet: a leader moves when a test says so, a dead broker is noticed within seconds.
_BROKER = """
inter.broker.listener.name=BROKER
auto.create.topics.enable=false
auto.leader.rebalance.enable=false
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=3000
replica.fetch.wait.max.ms=200
replica.lag.time.max.ms=5000
group.initial.rebalance.delay.ms=0
offsets.topic.num.partitions=1
transaction.state.log.num.partitions=1
transaction.state.log.min.isr=1
transaction.abort.timed.out.transaction.cleanup.interval.ms=1000
num.network.threads=2
num.io.threads=4
background.threads=2
log.cleaner.dedupe.buffer.size=2097152
log.cleaner.io.buffer.size=65536
log.retention.check.interval.ms=500
log.initial.task.delay.ms=500
remote.log.manager.task.interval.ms=500
remote.log.manager.task.retry.backoff.ms=200
remote.log.manager.task.retry.backoff.max.ms=1000
remote.log.metadata.manager.listener.name=BROKER
remote.log.metadata.manager.impl.prefix=rlmm.config.
remote.log.storage.manager.impl.prefix=rsm.config.
remote.log.storage.manager.class.name=org.apache.kafka.server.log.remote.storage.LocalTieredStorage
"""


class BrokerFailed(Exception):
    """A broker did not start, or no longer exists. Holds the last lines of its log."""


class BrokerNode:
    """One JVM. Its port, data and log outlive it: ``start`` after ``stop`` or ``kill`` is a restart."""

    def __init__(self, node: int, jars: BrokerJars, directory: Path, settings: Mapping[str, str], *, heap_mb: int) -> None:
        self.node = node
        self.directory = directory
        self.log = directory / "broker.log"
        self.log_dir = Path(settings["log.dirs"])
        self._jars = jars
        self._heap_mb = heap_mb
        self._settings = directory / "server.properties"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True)
        self._settings.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        roles = settings.get("process.roles", "")
        tiers = "broker" in roles and settings["remote.log.storage.system.enable"] == "true"
        started = STARTED if roles else f"[KafkaServer id={node}] started"
        self._started, self._tiers = started, tiers
        if roles:
            _format(jars, self.log_dir, node)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BrokerFailed(f"node {self.node} was never started")
        return self._process.pid

    def launch(self, *flags: str) -> None:
        """Starts it, the JVM with more ``flags``, and does not wait. Raises BrokerFailed if it runs."""
        if self.running:
            raise BrokerFailed(f"node {self.node} runs already")
        with self.log.open("ab") as log:
            self._seen = log.seek(0, os.SEEK_END)
            guard()
            command = self._jars.command("kafka.Kafka", *(flags or _archive(self._jars)), heap_mb=self._heap_mb)
            self._process = subprocess.Popen(
                [*command, str(self._settings)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.directory
            )

    def wait_started(self, seconds: float = START_SECONDS) -> None:
        """Until it serves. Raises BrokerFailed with its last words."""
        deadline = time.monotonic() + seconds
        initializes = self._tiers and METADATA_MANAGER not in self._settings.read_text()
        signs = [self._started, TIERING] if initializes else [self._started]
        while any(sign not in self.text(since=self._seen) for sign in signs):
            if not self.running:
                raise BrokerFailed(f"node {self.node} ended while it started:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise BrokerFailed(f"node {self.node} did not start within {seconds:.0f} s:\n{self.last_words()}")
            time.sleep(0.05)

    def stop(self, seconds: float = 30.0) -> None:
        """SIGTERM, a clean shutdown; killed if that takes longer than ``seconds``."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def empty_disk(self) -> None:
        """Replace what the node has stored by a freshly formatted, empty disk. The node must not run."""
        if self.running:
            raise BrokerFailed(f"node {self.node} runs")
        shutil.rmtree(self.log_dir)
        _format(self._jars, self.log_dir, self.node)

    def text(self, since: int = 0) -> str:
        """Its log, over all its starts, from a byte on."""
        with self.log.open("rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    def errors(self, since: int = 0) -> list[str]:
        """The lines that it logged at ERROR. Tiering that fails and metadata that is refused are among them. That the controller was late
        on a busy machine, or registered while it was elected, is not.
        """
        return [line for line in self.text(since).splitlines() if "] ERROR " in line and not _BUSY_CONTROLLER.search(line)]

    def last_words(self) -> str:
        return "\n".join(self.text().splitlines()[-25:])


class KafkaCluster:
    """``brokers`` brokers with the node ids 1, 2, ..., which tier into the directory ``tier``.

    Clients without a name are super users. With ``users`` (name: password) there is a second listener, SASL/PLAIN, whose
    users may do only what ACLs allow; ``client_settings(user)`` speaks to it. Settings are a broker's, in Kafka's own names.
    """

    def __init__(
        self,
        version: str,
        directory: Path,
        *,
        brokers: int = 1,
        users: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.tier = directory / "tier" / "kafka-tiered-storage"
        self.jars = broker_jars(version)
        self.version = self.jars.version
        self._users = dict(users or {})
        self._settings = dict(settings or {})
        self.node_ids = tuple(range(1, brokers + 1))
        self._controller_id = CONTROLLER if brokers > 1 else 1
        free = free_ports(2 * brokers + 1)
        self._controller_port = free[-1]
        self._ports = dict(zip(self.node_ids, free, strict=False))
        self._client_ports = dict(zip(self.node_ids, free[brokers:], strict=False))
        self.tier.parent.mkdir(parents=True)
        self.nodes = {node: self._make(node, self._broker_settings(node), heap_mb=384) for node in self.node_ids}
        self._add_controller()

    def _add_controller(self) -> None:
        if self._controller_id not in self.nodes:
            self.nodes[CONTROLLER] = self._make(CONTROLLER, self._controller_settings("controller"), heap_mb=128)

    @property
    def bootstrap(self) -> str:
        """Of the listener without authentication."""
        return ",".join(f"{HOST}:{port}" for port in self._ports.values())

    def client_settings(self, user: str = "") -> dict[str, str]:
        """librdkafka's properties to reach it, as nobody in particular (a super user) or as one of ``users``."""
        if not user:
            return {"bootstrap.servers": self.bootstrap}
        return {
            "bootstrap.servers": ",".join(f"{HOST}:{port}" for port in self._client_ports.values()),
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": self._users[user],
        }

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """All nodes that do not run; returns when they serve."""
        idle = [node for node in reversed(self.nodes.values()) if not node.running]
        for node in idle:
            node.launch()
        for node in idle:
            node.wait_started()

    @property
    def running(self) -> set[int]:
        return {node for node, process in self.nodes.items() if process.running}

    def restart(self, node: int = 1, *, kill: bool = False) -> None:
        """One broker, cleanly or not. Cleanly, its partitions have a new leader epoch afterwards; killed and soon back, perhaps not."""
        if kill:
            self.nodes[node].kill()
        else:
            self.nodes[node].stop()
        self.nodes[node].launch()
        self.nodes[node].wait_started()

    def close(self) -> None:
        """Nothing is kept, so nobody is asked to stop cleanly."""
        for node in self.nodes.values():
            node.kill()

    def errors(self) -> list[str]:
        """The ERROR lines of all nodes since they first started."""
        return [line for node in self.nodes.values() for line in node.errors()]

    def _make(self, node: int, settings: Mapping[str, str], *, heap_mb: int) -> BrokerNode:
        return BrokerNode(node, self.jars, self.directory / f"node-{node}", settings, heap_mb=heap_mb)

    def _controller_settings(self, roles: str, node: int = CONTROLLER) -> dict[str, str]:
        settings = {
            **_properties(_ALL),
            "process.roles": roles,
            "node.id": str(node),
            "controller.quorum.voters": f"{self._controller_id}@{HOST}:{self._controller_port}",
            "listeners": f"CONTROLLER://{HOST}:{self._controller_port}",
            "log.dirs": str(self.directory / f"node-{node}" / "logs"),
        }
        if self._users:
            settings["authorizer.class.name"] = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
            settings["super.users"] = "User:ANONYMOUS"
        return settings

    def _broker_settings(self, node: int) -> dict[str, str]:
        alone = self._controller_id == node
        listeners = [f"BROKER://{HOST}:{self._ports[node]}"]
        settings = self._controller_settings("broker,controller" if alone else "broker", node) | _properties(_BROKER)
        if self._users:
            listeners.append(f"CLIENT://{HOST}:{self._client_ports[node]}")
            login = " ".join(f'user_{name}="{password}"' for name, password in self._users.items())
            settings["listener.name.client.sasl.enabled.mechanisms"] = "PLAIN"
            settings["listener.name.client.plain.sasl.jaas.config"] = (
                f"org.apache.kafka.common.security.plain.PlainLoginModule required {login};"
            )
        settings["advertised.listeners"] = ",".join(listeners)
        settings["listeners"] = ",".join([*listeners, settings["listeners"]] if alone else listeners)
        copies = str(min(len(self.node_ids), 3))
        for name in ("offsets.topic.replication.factor", "transaction.state.log.replication.factor", "default.replication.factor"):
            settings[name] = copies
        settings["rlmm.config.remote.log.metadata.topic.replication.factor"] = copies
        settings["rlmm.config.remote.log.metadata.topic.num.partitions"] = "5"
        settings["rlmm.config.remote.log.metadata.topic.min.isr"] = "1"
        settings["rsm.config.dir"] = str(self.tier.parent)
        return settings | self._settings


def prepare(version: str) -> BrokerJars:
    """The jars, and beside them an archive of loaded classes with which a broker starts in half the time.

    Made once, by a broker that starts and stops. Raises BrokerUnavailable.
    """
    jars = broker_jars(version)
    if not (jars.home / "broker.jsa").exists():
        with tempfile.TemporaryDirectory(dir=jars.home) as scratch:
            made = Path(scratch) / "broker.jsa"
            with KafkaCluster(version, Path(scratch) / "cluster") as cluster:
                node = cluster.nodes[1]
                node.stop()
                node.launch(f"-XX:ArchiveClassesAtExit={made}")
                node.wait_started()
                node.stop(60)
            made.replace(jars.home / "broker.jsa")
    return jars


def _format(jars: BrokerJars, log_dir: Path, node: int) -> None:
    """A log directory as ``kafka-storage format`` makes it. Kafka does it once a version; the others are copies with ids of their own."""
    model = jars.home / "formatted"
    if not model.exists():
        with tempfile.TemporaryDirectory(dir=jars.home) as scratch:
            settings = Path(scratch) / "server.properties"
            first = Path(scratch) / "formatted"
            settings.write_text(
                "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:1\ncontroller.listener.names=CONTROLLER\n"
                f"listeners=PLAINTEXT://127.0.0.1:2,CONTROLLER://127.0.0.1:1\nlog.dirs={first}\n"
            )
            command = [*jars.command("kafka.tools.StorageTool"), "format", "-t", CLUSTER_ID, "-c", str(settings)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BrokerFailed(f"Kafka {jars.version} cannot format a log directory: {done.stdout[-500:]} {done.stderr[-500:]}")
            with suppress(OSError):  # another process was faster
                first.rename(model)
    shutil.copytree(model, log_dir)
    directory_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    (log_dir / "meta.properties").write_text(f"node.id={node}\ndirectory.id={directory_id}\nversion=1\ncluster.id={CLUSTER_ID}\n")


def _archive(jars: BrokerJars) -> list[str]:
    path = jars.home / "broker.jsa"
    return ["-Xshare:auto", f"-XX:SharedArchiveFile={path}"] if path.exists() else []


def _properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line)


def free_ports(count: int) -> list[int]:
    """Below the range from which the system gives ports to clients: a broker that is down keeps its own."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def exit_code_or_failure(run: Callable[[], int]) -> int:
    """The exit code of a demo; 1 with the reason on stderr if a broker did not start or ended."""
    try:
        return run()
    except BrokerFailed as error:
        print(f"error: {error}\nNothing is left behind; run it again on a machine with less to do", file=sys.stderr)
        return 1


def main() -> int:
    status = 0
    for version in VERSIONS:
        try:
            prepare(version)
            broker_jars(TOOLS)
        except BrokerUnavailable as error:
            print(f"Kafka {version}: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"Kafka {version} is ready to be started")
    return status


if __name__ == "__main__":
    sys.exit(main())
