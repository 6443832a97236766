"""A topic with short retention under load, agents, a daemon, leaders that move, processes killed at random, readers that compare.

    python -m tests.agent_soak --minutes 10

Two brokers with an agent each and one daemon over one tier. A producer writes all the time; retention deletes behind the agents. One
reader follows from the start for ever; every minute another one restarts from zero, and a third has its state restored from the tier.
Whatever they have read at any moment must be what was committed up to there: the last value of every key, each record as it was written,
ascending, and none missing but what a round may have removed. It also watches what must hold for that: that retention does not overtake the
agents, and that no reader is slower than ``delete_retention_ms``. Ends with figures, and with exit code 1 and a line for each thing that is
wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kafka.errors import KafkaError

from compactor.access.tier import Tier
from compactor.model.ids import TopicPartition
from tests.evidence import write_record
from tests.support.agents import AgentBeside, beside
from tests.support.deployment import Deployment, Running
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.kafka_jars import VERSIONS, BrokerUnavailable
from tests.support.process_watch import usage
from tests.support.tier_readers import StateReader, WrittenTopic

TOPIC = "orders"
STOCK = {"remote.storage.enable": "false", "cleanup.policy": "delete", "local.retention.bytes": "-2", "retention.bytes": "4194304"}
SEGMENT_BYTES = 131_072
DELETE_RETENTION_S = 60.0
SETTINGS: dict[str, dict[str, Any]] = {
    "cleaner": {"segment_bytes": 1 << 20, "min_cleanable_dirty_ratio": 0.3, "delete_retention_ms": int(DELETE_RETENTION_S * 1000)},
    "publish": {"grace_ms": 30_000},
    "lease": {"ttl_ms": 2_000},
    "daemon": {"interval_ms": 1_000, "listen": "127.0.0.1:0"},
}


@dataclass
class Soak:
    """What runs, what happened, and what was wrong. ``most``: the largest of each figure that is watched; ``last``: its last.

    ``margin``: records that the tier had and the broker had not deleted yet, the least.
    """

    cluster: KafkaCluster
    admin: ClusterAdmin
    tier: Deployment
    written: WrittenTopic
    agents: dict[int, AgentBeside]
    daemon: Running
    dice: random.Random
    wrong: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    most: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    rounds: set[str] = field(default_factory=set)
    margin: int = 1 << 62

    def __post_init__(self) -> None:
        self.opened: Tier = self.tier.opened()

    def tier_end(self) -> int:
        """The first offset that the tier does not have: no round has been beyond it."""
        return self.opened.open_partition_log(TopicPartition(TOPIC, 0)).refresh().end_offset + 1

    # ---- readers ------------------------------------------------------------------------------------------------------------

    def read_for_ever(self, stop: threading.Event) -> None:
        reader = StateReader.over(self.tier.config, self.written)
        compared = time.monotonic()
        while not stop.is_set():
            reader.read(0.2)
            self.note("records that the follower was behind", self.written.end() - reader.position)
            if time.monotonic() - compared > 2:
                self.compare(reader, "the follower")
                compared = time.monotonic()
        self.finish(reader, "the follower")

    def read_again_and_again(self, stop: threading.Event, every_s: float) -> None:
        while not stop.wait(every_s):
            self.begin_anew(StateReader.over, "a restarted reader")
            self.begin_anew(StateReader.restored, "a restored reader")

    def begin_anew(self, make: Callable[[Path, WrittenTopic], StateReader], who: str) -> None:
        began = time.monotonic()
        end = self.written.last_offset()
        reader = make(self.tier.config, self.written)
        self.note(f"seconds until {who} had the tier's state", time.monotonic() - began)
        while reader.position <= end and time.monotonic() - began < DELETE_RETENTION_S:
            reader.read_to(min(end, reader.position + 20_000), 5)
            self.compare(reader, who)
        if reader.position <= end:
            self.wrong.append(f"{who} came to {reader.position} of {end} in {DELETE_RETENTION_S:.0f} s")
        reader.close()
        self.note(f"seconds that {who} took", time.monotonic() - began)
        self.happened[f"times {who} began"] += 1

    def finish(self, reader: StateReader, who: str) -> None:
        if not reader.read_to(self.written.last_offset(), 60):
            self.wrong.append(f"{who} came to {reader.position} of {self.written.last_offset()}")
        self.compare(reader, who)
        self.happened[f"records of {who}"] = reader.records
        reader.close()

    def compare(self, reader: StateReader, who: str) -> None:
        found = reader.wrong(self.written, self.tier_end())
        self.wrong += [f"{who} at {reader.position}: {what}" for what in found[:3]]
        self.happened["states compared"] += 1

    # ---- trouble ------------------------------------------------------------------------------------------------------------

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

    # ---- watching -----------------------------------------------------------------------------------------------------------

    def note(self, what: str, value: float) -> None:
        self.most[what], self.last[what] = max(self.most.get(what, value), value), value

    def watch(self, stop: threading.Event) -> None:
        """How far the tier is behind the broker, how close retention is behind the tier, and what processes use."""
        with ClusterAdmin(self.cluster) as admin:
            while not stop.wait(1.0):
                processes = {agent.process.pid: "an agent" for agent in self.agents.values()} | {self.daemon.pid: "the daemon"}
                for pid, who in (*processes.items(), (os.getpid(), "this process")):
                    for what, value in usage(pid).items():
                        self.note(f"{what} of {who}", value)
                state = self.opened.open_partition_log(TopicPartition(TOPIC, 0)).refresh()
                self.rounds |= {run.run_id for run in state.runs}
                end = state.end_offset + 1
                with suppress(KafkaError):  # while a leader moves
                    broker = admin.offsets(TOPIC)
                    self.note("records that the tier was behind the broker", broker.latest - end)
                    self.margin = min(self.margin, end - broker.earliest)

    def guarded(self, what: Callable[..., None]) -> Callable[..., None]:
        """A thread that ends early is wrong, too."""

        def work(*arguments: Any) -> None:
            try:
                what(*arguments)
            except Exception:  # noqa: BLE001 - told with everything else
                self.wrong.append(f"{what.__name__}: {traceback.format_exc()}")

        return work


def run(soak: Soak, minutes: float) -> None:
    """Load and trouble for so long, then everything comes to rest and is compared."""
    stop, end_readers = threading.Event(), threading.Event()
    soak.written.write()
    seconds = minutes * 60

    def thread(what: Callable[..., None], *arguments: Any) -> threading.Thread:
        made = threading.Thread(target=soak.guarded(what), args=arguments, name=what.__name__)
        made.start()
        return made

    wait_until(lambda: soak.admin.leadership(TOPIC).leader > 0, "a leader")
    while soak.tier_end() <= 0:  # readers need a tier to open; the first sealed segment makes the partition
        soak.written.write()
    producer = thread(soak.written.write_until, stop, 0.05)
    threads = [
        thread(soak.read_for_ever, end_readers),
        thread(soak.read_again_and_again, end_readers, min(60.0, seconds / 5)),
        thread(soak.watch, end_readers),
    ]
    began = time.monotonic()
    moves = [seconds / 3, 2 * seconds / 3]
    try:
        while time.monotonic() - began < seconds and not soak.written.failures:
            time.sleep(soak.dice.uniform(2, 12))
            if moves and time.monotonic() - began > moves[0]:
                moves.pop(0)
                soak.move_leader()
            else:
                soak.disturb()
        stop.set()
        producer.join(120)
        wait_until(lambda: soak.tier_end() >= soak.admin.active_base(TOPIC), "the tier to have all that is sealed", seconds=120)
    finally:
        stop.set()
        end_readers.set()
        for one in threads:
            one.join(180)
    soak.happened["seconds"] = round(time.monotonic() - began)
    soak.happened["records written"] = len(soak.written.model.records)
    soak.happened["of them committed"] = len(soak.written.history)
    soak.happened["the broker's first offset"] = soak.admin.offsets(TOPIC).earliest
    if soak.written.failures:
        soak.wrong.append("the producer gave up")


def report(soak: Soak) -> int:
    soak.happened["rounds"] = len(soak.rounds)
    soak.happened["records that retention was behind the tier, least"] = soak.margin
    if soak.margin < 0:
        soak.wrong.append("retention has overtaken the agents: the tier may lack records")
    for what, count in soak.happened.items():
        print(f"{what}: {count}")
    for what, value in soak.most.items():
        print(f"{what}: {value:.1f} at most, {soak.last[what]:.1f} at the end")
    print("\n".join(soak.wrong[:40]) or "nothing is wrong")
    return 1 if soak.wrong else 0


FAULTS = ("daemons killed", "agents killed", "leaders moved")


def record_of(soak: Soak, seed: int) -> dict[str, Any]:
    """The run as docs/reliability.md is made from."""
    return {
        "kafka": soak.cluster.version,
        "seed": seed,
        "minutes": round(soak.happened["seconds"] / 60, 1),
        "faults": {name: soak.happened[name] for name in FAULTS},
        "rounds": len(soak.rounds),
        "load": {name: count for name, count in sorted(soak.happened.items()) if name not in FAULTS},
        "violations": soak.wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="write the run here, as JSON")
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
        code = report(soak)
        write_record(arguments.record, "agent-soak", record_of(soak, arguments.seed))
        return code


if __name__ == "__main__":
    sys.exit(main())
