"""What goes wrong in the broker soak, one fault after the other. The seed decides which, on what, and for how long."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from checkpoint.files import parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from tests.broker_soak.cluster import LEAST_SEGMENT_BYTES, Compactor, SoakCluster
from tests.broker_soak.topics import SoakTopics
from tests.broker_soak.traffic import WrittenPartition
from tests.soak.trouble import drizzle, storms
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.kafka_admin import METADATA_TOPIC, ClusterAdmin, NotYet, wait_until
from tests.support.kafka_broker import BrokerFailed

UNCLEAN = 1
INTERNAL = (METADATA_TOPIC, "__transaction_state")
ALLOWED_STORMS = ("slow down", "outage", "resets", "slow", "lost answers")
SILENT_DAMAGE = ("short", "flip")
"""Answers that are wrong and do not look so. Brokers hand them on to consumers, whatever is compacted."""


def weather() -> list[Fault]:
    """Return what happens to a few requests to the S3 server at any time."""
    return [fault for fault in drizzle() if fault.kind not in SILENT_DAMAGE]


class Skipped(Exception):
    """The cluster is not in the state that the fault needs."""


@dataclass
class Faults:
    """One fault after the other until ``over`` is set.

    daemons: empty in a control run; then faults of daemons happen to nobody, and all others at the same moments.
    """

    cluster: SoakCluster
    topics: SoakTopics
    proxy: FaultProxy
    daemons: list[Compactor]
    dice: random.Random
    over: threading.Event
    only: frozenset[str] = frozenset()
    happened: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    diary: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Inject faults. Each kind comes once before any comes again."""
        self.proxy.faults = weather()
        kinds = {name: action for name, action in self.kinds().items() if not self.only or name in self.only}
        deck: list[str] = []
        while not self.over.wait(self.dice.uniform(1, 5)):
            if not deck:
                deck = sorted(kinds)
                self.dice.shuffle(deck)
            name = deck.pop()
            began = time.strftime("%H:%M:%S")
            try:
                kinds[name]()
                self.happened[name] += 1
            except (Skipped, NotYet, KafkaError) as error:
                self.skipped[f"{name}: {error if isinstance(error, Skipped) else type(error).__name__}"] += 1
            except BrokerFailed as error:
                self.problems.append(f"{name}: {error}")
            self._restore()
            self.diary.append(f"{began} to {time.strftime('%H:%M:%S')} {name}")
        self.proxy.faults = []

    def kinds(self) -> dict[str, Callable[[], None]]:
        return {
            "broker killed": lambda: self._restart(kill=True),
            "broker stopped": lambda: self._restart(kill=False),
            "broker stood still": self._freeze,
            "network cut": self._cut,
            "leader moved": self._move_leader,
            "unclean election": self._elect_uncleanly,
            "broker replaced by an empty one": self._replace,
            "segment size changed": self._roll_elsewhere,
            "records deleted": self._delete_records,
            "topic deleted and made anew": self._recreate,
            "daemon killed": self._kill_daemon,
            "daemon stood still": self._freeze_daemon,
            "S3 storm": self._storm,
        }

    # ---- brokers ------------------------------------------------------------------------------------------------------------

    def _restart(self, *, kill: bool) -> None:
        node = self.dice.choice(self.cluster.node_ids)
        away = self.dice.uniform(0, 6)
        self._wait_in_sync(seconds=30)
        (self.cluster.nodes[node].kill if kill else self.cluster.nodes[node].stop)()
        self.over.wait(away)
        self._launch(node)

    def _freeze(self) -> None:
        """A broker that stands still is fenced by the controller, and goes on without knowing it."""
        node, seconds = self.dice.choice(self.cluster.node_ids), self.dice.uniform(1, 8)
        process = self.cluster.nodes[node]._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            self.over.wait(seconds)
        finally:
            process.send_signal(signal.SIGCONT)

    def _cut(self) -> None:
        node, seconds = self.dice.choice(self.cluster.node_ids), self.dice.uniform(1, 10)
        self.cluster.cut(node)
        try:
            self.over.wait(seconds)
        finally:
            self.cluster.mend(node)

    def _move_leader(self) -> None:
        written = self.dice.choice(self.topics.partitions())
        with ClusterAdmin(self.cluster) as admin:
            now = admin.leadership(written.topic, written.partition)
            admin.move_leader(written.topic, written.partition, self.dice.choice([node for node in now.replicas if node != now.leader]))

    def _replace(self) -> None:
        """An empty broker builds its state from remote storage, and then leads."""
        node = self.dice.choice(self.cluster.node_ids)
        self._wait_in_sync(seconds=60)
        self.cluster.nodes[node].stop()
        self.cluster.replace(node)
        self._wait_in_sync(seconds=90)
        with ClusterAdmin(self.cluster) as admin:
            for written in self.topics.partitions():
                if node in admin.leadership(written.topic, written.partition).replicas:
                    admin.move_leader(written.topic, written.partition, node)

    def _elect_uncleanly(self) -> None:
        """The follower that lacks the end of the log leads: what was written meanwhile is discarded, though it may be tiered."""
        written = self.topics.risky
        self._wait_in_sync(seconds=60)
        with ClusterAdmin(self.cluster) as admin:
            now = admin.leadership(written.topic, written.partition)
        behind = next(node for node in now.replicas if node != now.leader)
        self.cluster.nodes[behind].stop()
        self.over.wait(self.dice.uniform(4, 15))  # writers go on, the leader tiers what they write
        with written.changing():
            self.cluster.nodes[now.leader].kill()
            self._launch(behind)
            end = self._led_by_survivor(written, behind)
            with written.lock:
                lost = len(written.history.between(end, 1 << 62))
                written.history.disown_from(end)
            self.happened["records that unclean elections discarded"] += lost
            self.topics.writer_of(written).forget()
            self._launch(now.leader)

    def _led_by_survivor(self, written: WrittenPartition, node: int) -> int:
        """Elect the only living replica. Returns the end of its log."""
        client = KafkaAdminClient(bootstrap_servers=self.cluster.bootstrap.split(","), request_timeout_ms=20_000)

        def is_led() -> bool:
            client.elect_leaders(UNCLEAN, {written.topic: [written.partition]}, raise_errors=False)
            [described] = client.describe_topics([written.topic])
            return int(described["partitions"][written.partition]["leader_id"]) == node

        def assigned() -> EpochEntry:
            """The newest leader epoch on the survivor, which begins where its log ended; the high watermark may still be lower."""
            folder = self.cluster.nodes[node].log_dir / str(written)
            return parse_leader_epoch_checkpoint((folder / "leader-epoch-checkpoint").read_text())[-1]

        def is_assigned() -> bool:
            with ClusterAdmin(self.cluster) as admin:
                return admin.leadership(written.topic, written.partition).leader_epoch == assigned().epoch

        try:
            wait_until(is_led, f"{written} to be led by {node}", seconds=120)
            wait_until(is_assigned, f"the end of {written}", seconds=120)
        finally:
            client.close()
        return assigned().start_offset

    # ---- topics -------------------------------------------------------------------------------------------------------------

    def _roll_elsewhere(self) -> None:
        """While a follower is away, the leader gets another segment size: their segments differ from now on."""
        written = self.dice.choice(self.topics.partitions())
        with ClusterAdmin(self.cluster) as admin:
            admin.set_config(written.topic, self.topics.segment_size(self.dice.choice((LEAST_SEGMENT_BYTES, 24_576, 49_152))))

    def _delete_records(self) -> None:
        written = self.topics.trimmed
        with ClusterAdmin(self.cluster) as admin:
            found = admin.offsets(written.topic, written.partition)
            if found.latest_tiered <= found.earliest:
                raise Skipped("nothing is tiered")
            before = self.dice.randint(found.earliest, (found.earliest + found.latest_tiered) // 2)
            with written.changing():
                with written.lock:
                    written.history.log_start = max(written.history.log_start, before)
                admin.delete_records(written.topic, written.partition, before)

    def _recreate(self) -> None:
        with ClusterAdmin(self.cluster) as admin:
            self.topics.recreate(admin)

    # ---- compaction ---------------------------------------------------------------------------------------------------------

    def _kill_daemon(self) -> None:
        which, away = self.dice.randrange(2), self.dice.uniform(0, 8)
        for daemon in self._daemon(which):
            daemon.kill()
        self.over.wait(away)
        for daemon in self._daemon(which):
            daemon.start()

    def _freeze_daemon(self) -> None:
        """For longer than its lease in most cases: another one takes over, and this one goes on with what it had in mind."""
        which, seconds = self.dice.randrange(2), self.dice.uniform(2, 12)
        for daemon in self._daemon(which):
            if daemon.running is not None:
                daemon.running.send_signal(signal.SIGSTOP)
        self.over.wait(seconds)
        for daemon in self._daemon(which):
            if daemon.running is not None:
                daemon.running.send_signal(signal.SIGCONT)

    def _daemon(self, which: int) -> Iterable[Compactor]:
        return self.daemons[which : which + 1]

    def _storm(self) -> None:
        name = self.dice.choice(ALLOWED_STORMS)
        self.proxy.faults = storms()[name]
        self.over.wait(self.dice.uniform(4, 15))
        self.proxy.faults = weather()
        self.happened[f"S3 storm: {name}"] += 1

    # ---- between faults -----------------------------------------------------------------------------------------------------

    def _launch(self, node: int) -> None:
        self.cluster.nodes[node].launch()
        with suppress(BrokerFailed):  # a loaded machine needs longer; one that has ended is found by the next check
            self.cluster.nodes[node].wait_started(120)
        if not self.cluster.nodes[node].running:
            raise BrokerFailed(f"broker {node} ended by itself:\n{self.cluster.nodes[node].last_words()}")

    def _restore(self) -> None:
        """Start every broker that a fault left behind when it was given up."""
        for node in self.cluster.node_ids:
            if not self.cluster.nodes[node].running:
                try:
                    self._launch(node)
                except BrokerFailed as error:
                    self.problems.append(str(error))

    def _wait_in_sync(self, seconds: float) -> None:
        """Wait until every replica of every partition is in sync: a fault then takes away no more than it means to. Raises NotYet."""
        wait_until(self.is_in_sync, "all replicas to be in sync", seconds=seconds)

    def is_in_sync(self) -> bool:
        return not self.partitions_not_in_sync()

    def partitions_not_in_sync(self) -> list[str]:
        with ClusterAdmin(self.cluster) as admin:
            described = admin._client.describe_topics([*self.topics.names(), *INTERNAL])
        return [
            f"{topic['name']}-{one['partition_index']}, led by {one['leader_id']}, in sync {one['isr_nodes']}"
            for topic in described
            for one in topic["partitions"]
            if set(one["isr_nodes"]) != set(one["replica_nodes"]) or one["leader_id"] <= 0
        ]


def heal(faults: Faults) -> None:
    """End all faults and wait until the cluster is whole. Raises NotYet."""
    faults.proxy.faults = []
    for node in faults.cluster.node_ids:
        faults.cluster.mend(node)
    faults._restore()
    wait_until(
        faults.is_in_sync,
        "all replicas to be in sync after the last fault",
        seconds=180,
        stand=lambda: "; ".join(faults.partitions_not_in_sync()),
    )
