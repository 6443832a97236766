"""Three brokers and a controller whose network can be cut, and the daemons that compact their tier."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.broker_soak.network import Link, Network
from tests.support.deployment import Deployment, Running
from tests.support.fault_proxy import FaultProxy
from tests.support.kafka_broker import CONTROLLER, HOST, KafkaCluster, free_ports
from tests.support.s3_server import Bucket

BROKERS = 3
AGING = "aging"
"""The topic with a finite ``retention.ms``."""
REBORN = "reborn"
"""The topic that is deleted and made anew."""
RISKY = "risky"
"""The topic with unclean elections."""
AIVEN_CHUNK_BYTES = 16_384
DELETE_RETENTION_MS = 45_000
"""Longer than a consumer's pass takes."""
GRACE_MS = 150_000
"""Longer than a broker that serves reads is behind in the metadata topic. Its one consumer of that topic reads nothing while it asks for
the first and last offset of a partition without a leader, up to a minute for each (Kafka's ConsumerTask.fetchStartAndEndOffsets)."""
LEAST_SEGMENT_BYTES = 12_288
"""A follower that fetches more at once than its segment size gives the partition up until the leader changes (UnifiedLog.append)."""
DAEMON_SETTINGS: dict[str, dict[str, Any]] = {
    "cleaner": {"min_cleanable_dirty_ratio": 0.2, "delete_retention_ms": DELETE_RETENTION_MS, "segment_bytes": 200_000},
    "publish": {"grace_ms": GRACE_MS, "orphan_age_ms": 90_000},
    "lease": {"ttl_ms": 4_000},
    "daemon": {"interval_ms": 1_000, "listen": "127.0.0.1:0", "threads": 1},
    "kafka.properties": {'"message.timeout.ms"': 5_000},
}
_LISTENERS = "CONTROLLER:PLAINTEXT,BROKER:PLAINTEXT,OUTER:PLAINTEXT"


class SoakCluster(KafkaCluster):
    """Brokers speak to each other and to the controller through links, clients speak to brokers directly."""

    def __init__(self, version: str, directory: Path, network: Network, settings: Mapping[str, str]) -> None:
        self._network = network
        self._outer: dict[int, int] = {}
        self.links: dict[int, tuple[Link, Link]] = {}
        super().__init__(version, directory, brokers=BROKERS, settings=settings)

    @property
    @override
    def bootstrap(self) -> str:
        return ",".join(f"{HOST}:{port}" for port in self._outer.values())

    def cut(self, node: int) -> None:
        """Cut a broker off: no other broker reaches it, and it does not reach the controller."""
        for link in self.links[node]:
            self._network.run(link.cut)

    def mend(self, node: int) -> None:
        for link in self.links[node]:
            self._network.run(link.mend)

    def replace(self, node: int) -> None:
        """Start a stopped broker with an empty disk, under its old id."""
        process = self.nodes[node]
        process.empty_disk()
        process.launch()
        process.wait_started(120)

    @override
    def _broker_settings(self, node: int) -> dict[str, str]:
        inner, controller, self._outer[node] = free_ports(3)
        self.links[node] = (self._network.connect(inner, self._ports[node]), self._network.connect(controller, self._controller_port))
        own = {
            "listeners": f"BROKER://{HOST}:{self._ports[node]},OUTER://{HOST}:{self._outer[node]}",
            "advertised.listeners": f"BROKER://{HOST}:{inner},OUTER://{HOST}:{self._outer[node]}",
            "listener.security.protocol.map": _LISTENERS,
            "controller.quorum.voters": f"{CONTROLLER}@{HOST}:{controller}",
            "rlmm.config.remote.log.metadata.topic.num.partitions": "3",
            "replica.fetch.max.bytes": str(LEAST_SEGMENT_BYTES),
        }
        return super()._broker_settings(node) | own


def aiven_settings(plugin: Path, bucket: Bucket) -> dict[str, str]:
    """Return the broker settings with which Aiven's plug-in keeps segments in a bucket.

    plugin: folder with the plug-in's jars.
    """
    prefix = "rsm.config."
    return {
        "remote.log.storage.manager.class.name": "io.aiven.kafka.tieredstorage.RemoteStorageManager",
        "remote.log.storage.manager.class.path": f"{plugin.resolve()}/*",
        f"{prefix}storage.backend.class": "io.aiven.kafka.tieredstorage.storage.s3.S3Storage",
        f"{prefix}storage.s3.bucket.name": bucket.name,
        f"{prefix}storage.s3.endpoint.url": bucket.endpoint,
        f"{prefix}storage.s3.region": bucket.server.region,
        f"{prefix}storage.s3.path.style.access.enabled": "true",
        f"{prefix}storage.aws.access.key.id": bucket.server.access_key,
        f"{prefix}storage.aws.secret.access.key": bucket.server.secret_key,
        f"{prefix}chunk.size": str(AIVEN_CHUNK_BYTES),
    }


@dataclass
class Compactor:
    """One daemon with local state of its own, which it keeps when it is killed and started again.

    sabotage: Python that runs in its process first; empty for the daemon as it is.
    """

    name: str
    deployment: Deployment
    sabotage: str = ""
    logs: list[Path] = field(default_factory=list)
    running: Running | None = None

    def start(self) -> None:
        self.running = self.deployment.start("daemon", before=self.sabotage)
        self.logs.append(self.running.file)

    def kill(self) -> None:
        if self.running is not None:
            self.running.put_down()

    def stop(self) -> int:
        """End the daemon by SIGTERM. Returns its exit code."""
        if self.running is None:
            return 0
        self.running.send_signal(signal.SIGTERM)
        try:
            return self.running.wait(60)
        finally:
            self.running.put_down()

    def log_text(self) -> str:
        return "".join(path.read_text(encoding="utf-8") for path in self.logs)


def compactors(
    folder: Path, cluster: SoakCluster, topics: Sequence[str], bucket: Bucket, proxy: FaultProxy, tier: Mapping[str, Any], sabotage: str
) -> tuple[list[Compactor], Deployment]:
    """Return two daemons that reach S3 through the proxy, and a deployment that reaches it directly, for checks.

    tier: the section [tier] as far as it says where the segments are.
    """

    def deployment(name: str, endpoint: str, segments: Mapping[str, Any]) -> Deployment:
        state = {"control_url": f"s3://{bucket.name}/control", "state_dir": str(folder / name / "state")}
        settings = {section: dict(values) for section, values in DAEMON_SETTINGS.items()}
        settings["tier"] = {"kind": "kafka", **segments, **state}
        settings["s3"] = {"endpoint_url": endpoint}
        if segments["layout"] == "aiven":
            settings["tier.aiven"] = {"chunk_size": AIVEN_CHUNK_BYTES}
        settings["kafka"] = {"bootstrap_servers": cluster.bootstrap, "topics": list(topics)}
        if AGING in topics:
            settings[f'topics."{AGING}"'] = {"cleanup_policy": "compact,delete"}
        return Deployment(folder / name, settings)

    made = [Compactor(name, deployment(name, proxy.url, tier), sabotage) for name in ("daemon-1", "daemon-2")]
    return made, deployment("beside", bucket.endpoint, tier)


def put_down(stack: ExitStack, daemons: Sequence[Compactor]) -> None:
    """Kill the daemons when the stack is left."""
    for daemon in daemons:
        stack.callback(daemon.kill)
