"""A topic with short retention under load, agents, a daemon, leaders that move, processes killed at random, readers that compare.

    python -m tests.agent_soak --minutes 10

Two brokers with an agent each and one daemon over one tier. A producer writes all the time; retention deletes behind the agents. One
reader follows from the start for ever, another restarts from zero: whatever they have read at any moment must be what was committed up
to there. Ends with exit code 1 and a line for each thing that is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.agents import AgentBeside, beside
from tests.support.deployment import Deployment, Running
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.kafka_jars import VERSIONS, BrokerUnavailable
from tests.support.tier_readers import StateReader, WrittenTopic

TOPIC = "orders"
STOCK = {"remote.storage.enable": "false", "cleanup.policy": "delete", "local.retention.bytes": "-2", "retention.bytes": "2097152"}
SEGMENT_BYTES = 131_072
SETTINGS: dict[str, dict[str, Any]] = {
    "cleaner": {"segment_bytes": 1 << 20, "min_cleanable_dirty_ratio": 0.3, "delete_retention_ms": 60_000},
    "publish": {"grace_ms": 30_000},
    "lease": {"ttl_ms": 2_000},
    "daemon": {"interval_ms": 1_000, "listen": "127.0.0.1:0"},
}


@dataclass
class Soak:
    """What runs, what happened, and what was wrong."""

    cluster: KafkaCluster
    admin: ClusterAdmin
    tier: Deployment
    written: WrittenTopic
    agents: dict[int, AgentBeside]
    daemon: Running
    dice: random.Random
    wrong: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def read_for_ever(self, stop: threading.Event) -> None:
        reader = StateReader.over(self.tier.config, self.written)
        while not stop.is_set():
            reader.read(1.0)
            if self.dice.random() < 0.1:
                self.compare(reader, "the follower")
        self.finish(reader, "the follower")

    def read_again_and_again(self, stop: threading.Event, every_s: float) -> None:
        while not stop.wait(every_s):
            reader = StateReader.over(self.tier.config, self.written)
            end = self.written.last_offset()
            if not reader.read_to(end, 60):
                self.wrong.append(f"a restarted reader came to {reader.position} of {end} in 60 s")
            self.compare(reader, "a restarted reader")
            reader.close()
            self.happened["restarts from zero"] += 1

    def finish(self, reader: StateReader, who: str) -> None:
        if not reader.read_to(self.written.last_offset(), 60):
            self.wrong.append(f"{who} came to {reader.position} of {self.written.last_offset()}")
        self.compare(reader, who)
        self.happened[f"records of {who}"] = reader.records
        reader.close()

    def compare(self, reader: StateReader, who: str) -> None:
        found = self.written.wrong_in(reader.state, reader.position) + reader.errors
        self.wrong += [f"{who} at {reader.position}: {what}" for what in found[:3]]
        self.happened["states compared"] += 1

    def disturb(self) -> None:
        """One process is killed and soon started again."""
        if self.dice.random() < 0.4:
            self.daemon.put_down()
            time.sleep(self.dice.uniform(0, 2))
            self.daemon = self.tier.start("daemon")
            self.happened["daemons killed"] += 1
        else:
            agent = self.dice.choice(list(self.agents.values()))
            agent.process.put_down()
            time.sleep(self.dice.uniform(0, 2))
            agent.restart()
            self.happened["agents killed"] += 1

    def move_leader(self) -> None:
        now = self.admin.leadership(TOPIC)
        self.admin.move_leader(TOPIC, 0, next(node for node in now.replicas if node != now.leader))
        self.happened["leaders moved"] += 1


def run(soak: Soak, minutes: float) -> None:
    """Load and trouble for so long, then everything comes to rest and is compared."""
    stop, end_readers = threading.Event(), threading.Event()
    soak.written.write()
    readers = [
        threading.Thread(target=soak.read_for_ever, args=(end_readers,)),
        threading.Thread(target=soak.read_again_and_again, args=(end_readers, 20.0)),
    ]
    producer = threading.Thread(target=soak.written.write_until, args=(stop, 0.1))
    wait_until(lambda: soak.admin.leadership(TOPIC).leader > 0, "a leader")
    wait_for_tier(soak)
    for thread in (producer, *readers):
        thread.start()
    began, seconds = time.monotonic(), minutes * 60
    moves = [seconds / 3, 2 * seconds / 3]
    while time.monotonic() - began < seconds:
        time.sleep(min(15.0, seconds / 6))
        if moves and time.monotonic() - began > moves[0]:
            moves.pop(0)
            soak.move_leader()
        else:
            soak.disturb()
    stop.set()
    producer.join(120)
    wait_until(lambda: tier_end(soak) == soak.admin.active_base(TOPIC) - 1, "the tier to have all that is sealed")
    end_readers.set()
    for thread in readers:
        thread.join(120)
    soak.happened["records written"] = len(soak.written.model.records)
    soak.happened["the broker's first offset"] = soak.admin.offsets(TOPIC).earliest
    if soak.written.failures:
        soak.wrong.append("the producer gave up")


def wait_for_tier(soak: Soak) -> None:
    """Readers need a tier to open; the first sealed segment makes the partition."""
    while tier_end(soak) < 0:
        soak.written.write()


def tier_end(soak: Soak) -> int:
    found = soak.tier.ask("checkpoints", "show", f"{TOPIC}-0").document
    return int(found["end_offset"]) if found else -1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    try:
        prepare(VERSIONS[0])
    except BrokerUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    dice = random.Random(arguments.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-soak-")))
        settings = {"remote.log.storage.system.enable": "false"}
        cluster = stack.enter_context(KafkaCluster(VERSIONS[0], folder / "cluster", brokers=2, settings=settings))
        admin = stack.enter_context(ClusterAdmin(cluster))
        admin.create_topic(TOPIC, segment_bytes=SEGMENT_BYTES, settings=STOCK)
        tier = Deployment(folder / "tier", {name: dict(values) for name, values in SETTINGS.items()})
        agents = {node: stack.enter_context(beside(cluster, node, tier, [TOPIC])) for node in cluster.node_ids}
        soak = Soak(
            cluster, admin, tier, WrittenTopic(cluster, TOPIC, dice), agents, tier.start("daemon"), random.Random(arguments.seed + 1)
        )
        try:
            run(soak, arguments.minutes)
        finally:
            soak.daemon.put_down()
        document = tier.do("verify")
        soak.wrong += [] if document["ok"] else [str(problem) for problem in document["problems"]]
        soak.happened["rounds"] = len(tier.do("runs", "list")["runs"])
    for what, count in soak.happened.items():
        print(f"{what}: {count}")
    print("\n".join(soak.wrong) or "nothing is wrong")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
