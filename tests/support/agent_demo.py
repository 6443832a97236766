"""``make agent-demo``: a stock broker with short retention, the agent, the daemon, a consumer, and what becomes of a topic.

Everything is gone when it ends.
"""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from compactor.config.units import format_size
from tests.support.agents import beside
from tests.support.deployment import Deployment
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster, exit_code_or_failure, prepare
from tests.support.kafka_jars import VERSIONS, BrokerUnavailable
from tests.support.tier_readers import StateReader, WrittenTopic

TOPIC = "orders"
STOCK = {"remote.storage.enable": "false", "cleanup.policy": "delete", "local.retention.bytes": "-2", "retention.bytes": "262144"}
PARTS = 4


def show(cluster: KafkaCluster, admin: ClusterAdmin, tier: Deployment, stack: ExitStack) -> bool:
    """Writes, waits for what the others do, and compares what a reader gets with what was written."""
    admin.create_topic(TOPIC, segment_bytes=32_768, settings=STOCK)
    agent = stack.enter_context(beside(cluster, 1, tier, [TOPIC]))
    print(f"agent:     {agent.address}", flush=True)
    daemon = tier.start("daemon")
    stack.callback(daemon.put_down)
    written = WrittenTopic(cluster, TOPIC, random.Random(1))

    def shown() -> dict[str, int]:
        found = tier.ask("checkpoints", "show", f"{TOPIC}-0").document
        return dict(found) if found else {"end_offset": -1, "first_dirty_offset": 0}

    def uploaded() -> bool:
        return shown()["end_offset"] >= admin.active_base(TOPIC) - 1

    for part in range(1, PARTS + 1):
        for _ in range(20):
            written.write()
        wait_until(uploaded, "the agent to upload", stand=agent.process.said)
        offsets, end = admin.offsets(TOPIC), shown()["end_offset"]
        print(f"part {part}:    the broker has offsets {offsets.earliest} to {offsets.latest}, the tier 0 to {end}", flush=True)
    wait_until(lambda: shown()["first_dirty_offset"] == shown()["end_offset"] + 1, "the daemon to clean")
    wait_until(lambda: admin.offsets(TOPIC).earliest > 0, "retention to delete")
    [row] = tier.do("topics")["partitions"]
    held = f"{row['segments']} segments, {format_size(row['bytes'])}, compacted"
    print(f"tier:      {held}; the broker begins at {admin.offsets(TOPIC).earliest}")
    reader = StateReader.over(tier.config, written)
    stack.callback(reader.close)
    whole = reader.read_to(written.last_offset(), 60)
    wrong = reader.errors + written.wrong_in(reader.state, reader.position)
    print(f"consumer:  {reader.records} of {len(written.model.records)} records, from tier and broker, up to offset {reader.last}")
    print(f"state:     {len(reader.state)} keys, {'as written' if whole and not wrong else 'NOT as written'}")
    print("\n".join(wrong[:5]), end="", flush=True)
    return whole and not wrong


def main() -> int:
    try:
        prepare(VERSIONS[0])
    except BrokerUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-demo-")))
        settings = {"remote.log.storage.system.enable": "false"}
        cluster = stack.enter_context(KafkaCluster(VERSIONS[0], folder / "cluster", settings=settings))
        print(f"broker:    Kafka {cluster.version} at {cluster.bootstrap}, without tiered storage; keeps {STOCK['retention.bytes']} bytes")
        admin = stack.enter_context(ClusterAdmin(cluster))
        cleaner = {"min_cleanable_dirty_ratio": 0.0, "delete_retention_ms": 60_000}
        sections: dict[str, dict[str, Any]] = {
            "cleaner": cleaner,
            "publish": {"grace_ms": 5_000},
            "daemon": {"interval_ms": 500, "listen": "127.0.0.1:0"},
        }
        tier = Deployment(folder / "tier", sections)
        return 0 if show(cluster, admin, tier, stack) else 1


if __name__ == "__main__":
    sys.exit(exit_code_or_failure(main))
