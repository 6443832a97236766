"""Brokers that keep their metadata in ZooKeeper: Kafka 3.9 is the last version that can."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from tests.support.kafka_broker import HOST, START_SECONDS, BrokerFailed, KafkaCluster, free_ports

VERSION = "3.9.2"
_KRAFT = ("process.roles", "node.id", "controller.quorum.voters", "controller.listener.names")


class ZooKeeperCluster(KafkaCluster):
    """As KafkaCluster, without tiering and without users; ZooKeeper is one more JVM."""

    def __init__(self, directory: Path, *, brokers: int = 1, settings: Mapping[str, str] | None = None) -> None:
        (self._zookeeper_port,) = free_ports(1)
        self._zookeeper: subprocess.Popen[bytes] | None = None
        super().__init__(VERSION, directory, brokers=brokers, settings={"remote.log.storage.system.enable": "false"} | dict(settings or {}))

    @override
    def start(self) -> None:
        if self._zookeeper is None:
            command = self.jars.command("org.apache.zookeeper.server.ZooKeeperServerMain", "-Dzookeeper.admin.enableServer=false")
            command += [str(self._zookeeper_port), str(self.directory / "zookeeper")]
            with (self.directory / "zookeeper.log").open("wb") as log:
                self._zookeeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            self._wait_listening(self._zookeeper)
        super().start()

    @override
    def close(self) -> None:
        super().close()
        if self._zookeeper is not None:
            self._zookeeper.kill()
            self._zookeeper.wait()

    def _wait_listening(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection((HOST, self._zookeeper_port), timeout=1).close()
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BrokerFailed(f"ZooKeeper did not start:\n{(self.directory / 'zookeeper.log').read_text()[-3000:]}") from None
                time.sleep(0.05)
            else:
                return

    @override
    def _add_controller(self) -> None:
        """One of the brokers is."""

    @override
    def _broker_settings(self, node: int) -> dict[str, str]:
        settings = {name: value for name, value in super()._broker_settings(node).items() if name not in _KRAFT}
        listener = f"BROKER://{HOST}:{self._ports[node]}"
        return settings | {
            "broker.id": str(node),
            "zookeeper.connect": f"{HOST}:{self._zookeeper_port}",
            "zookeeper.session.timeout.ms": "4000",
            "listeners": listener,
            "advertised.listeners": listener,
            "listener.security.protocol.map": "BROKER:PLAINTEXT",
        }
