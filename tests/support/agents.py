"""Agents as processes beside the brokers of a test cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.deployment import Deployment, Running
from tests.support.kafka_broker import KafkaCluster
from tests.support.waiting import wait_for


@dataclass
class AgentBeside:
    """One broker's agent. It has a configuration of its own, for the same tier."""

    deployment: Deployment
    process: Running
    address: str

    def restart(self) -> None:
        """Killed, and started anew."""
        self.process.put_down()
        self.process = self.deployment.start("agent")


@contextmanager
def beside(cluster: KafkaCluster, node: int, tier: Deployment, topics: Sequence[str]) -> Iterator[AgentBeside]:
    """The agent of one broker, uploading into the deployment's tier, while the block runs."""
    made = Deployment(
        tier.folder / f"agent {node}",
        {
            **{name: dict(values) for name, values in tier.settings.items()},
            "tier": {"url": tier.tier.as_uri(), "state_dir": str(tier.folder / f"agent {node}" / "state")},
            "kafka": {"bootstrap_servers": cluster.bootstrap},
            "agent": {
                "listen": "127.0.0.1:0",
                "log_dirs": [str(cluster.nodes[node].log_dir)],
                "topics": list(topics),
                "interval_ms": 1000,
            },
        },
    )
    process = made.start("agent")
    agent = AgentBeside(made, process, "")
    try:
        wait_for(lambda: "status at http://" in process.said() or process.poll() is not None)
        found = re.search(r"status at (http://[^ ]+/)", process.said())
        assert found, process.said()
        agent.address = found[1]
        yield agent
    finally:
        agent.process.put_down()
