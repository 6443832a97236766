"""The topics of the broker soak, each with a writer in a thread of its own."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from kafka.errors import KafkaError

from checkpoint.files import parse_leader_epoch_checkpoint
from compactor.errors import BadData
from tests.broker_soak.cluster import AGING, REBORN, RISKY, SoakCluster
from tests.broker_soak.readers import pause
from tests.broker_soak.traffic import TOPIC_SETTINGS, PartitionWriter, WrittenPartition, joined
from tests.support.kafka_admin import ClusterAdmin, wait_until

ORDERS = "orders"
TRIMMED = "trimmed"
SEGMENT_BYTES = 24_576
RISKY_REPLICAS = [1, 2]
_FRESH_S = 5.0


@dataclass
class SoakTopics:
    """orders: two partitions, everything but what the others are for. trimmed: records are deleted. reborn: deleted and made anew.
    risky: two replicas and unclean elections. aging: a finite ``retention.ms``, if ``retention_ms`` is not 0.
    """

    cluster: SoakCluster
    dice: random.Random
    retention_ms: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    _writers: dict[str, tuple[PartitionWriter, threading.Event, threading.Thread]] = field(default_factory=dict)
    _tiered: dict[str, int] = field(default_factory=dict)
    _tiered_at: float = float("-inf")

    def names(self) -> list[str]:
        return [ORDERS, TRIMMED, REBORN, RISKY, *([AGING] if self.retention_ms else [])]

    def partitions(self) -> list[WrittenPartition]:
        return [writer.written for writer, _, _ in self._writers.values()]

    def writer_of(self, written: WrittenPartition) -> PartitionWriter:
        return self._writers[str(written)][0]

    @property
    def risky(self) -> WrittenPartition:
        return self._writers[f"{RISKY}-0"][0].written

    @property
    def trimmed(self) -> WrittenPartition:
        return self._writers[f"{TRIMMED}-0"][0].written

    def segment_size(self, size: int) -> dict[str, str]:
        """The topic setting for segments of so many bytes."""
        return {("internal.segment.bytes" if self.cluster.version.startswith("4") else "segment.bytes"): str(size)}

    def create(self, admin: ClusterAdmin) -> None:
        """Create all topics and start their writers."""
        for topic in self.names():
            self._create(admin, topic)
        for topic in self.names():
            for partition in range(2 if topic == ORDERS else 1):
                self._start(WrittenPartition(topic, partition))

    def recreate(self, admin: ClusterAdmin) -> None:
        """Delete a topic and create it again under the same name."""
        writer, stop, thread = self._writers[f"{REBORN}-0"]
        with writer.written.lock:
            writer.written.generation += 1  # stays odd: this incarnation is read no more
        stop.set()
        thread.join(120)
        admin.delete_topic(REBORN)
        self._tiered.pop(f"{REBORN}-0", None)

        def is_created() -> bool:
            self._create(admin, REBORN)
            return True

        wait_until(is_created, f"{REBORN} to be created again")
        self._start(WrittenPartition(REBORN, 0))

    def stop(self) -> list[str]:
        """Stop the writers. Returns those that did not end."""
        for _, stop, _ in self._writers.values():
            stop.set()
        return joined([thread for _, _, thread in self._writers.values()], 300)

    def write_more(self, count: int) -> None:
        """Write in this thread, after the writers were stopped: segments are rolled, and with them the last batches are tiered."""
        for writer, _, _ in self._writers.values():
            for _ in range(count // 20):
                writer.write(20)

    def watch_tier(self, stop: threading.Event) -> None:
        """Keep up with how far each partition is tiered."""
        while not stop.wait(1.0):
            try:
                with ClusterAdmin(self.cluster) as admin:
                    while not stop.wait(1.0):
                        for written in self.partitions():
                            name = str(written)
                            found = admin.offsets(written.topic, written.partition).latest_tiered + 1
                            self._tiered[name] = max(self._tiered.get(name, 0), found)
                        self._tiered_at = time.monotonic()
            except (KafkaError, ValueError, IndexError, KeyError, OSError):
                continue  # brokers are away; until they are back nothing is known

    def tiered_end(self, written: WrittenPartition) -> int:
        """Return an exclusive upper bound of what rounds can have compacted by now.

        No round has been beyond the last segment but one, so that an answer of some seconds ago is good enough. Without such an answer
        rounds may have been anywhere.
        """
        if time.monotonic() - self._tiered_at > _FRESH_S:
            return 1 << 62
        return self._tiered.get(str(written), 1 << 62)

    def first_offset(self, written: WrittenPartition) -> int:
        """Return the log start as the leader tells it; -1 if none answers within a minute."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(KafkaError, ValueError, IndexError, KeyError, OSError), ClusterAdmin(self.cluster) as admin:
                return admin.offsets(written.topic, written.partition).earliest
            time.sleep(1)
        return -1

    def first_known_epoch(self, written: WrittenPartition, broker: int) -> int:
        """Return the first offset in a broker's leader-epoch-checkpoint; -1 if there is none."""
        if broker not in self.cluster.nodes:
            return -1
        path = self.cluster.nodes[broker].log_dir / str(written) / "leader-epoch-checkpoint"
        try:
            entries = parse_leader_epoch_checkpoint(path.read_text())
        except (OSError, BadData):
            return -1
        return entries[0].start_offset if entries else -1

    def _create(self, admin: ClusterAdmin, topic: str) -> None:
        replicas = {ORDERS: [[1, 2, 3], [3, 1, 2]], RISKY: [RISKY_REPLICAS]}.get(topic, [[2, 3, 1]])
        settings = dict(TOPIC_SETTINGS)
        if topic == AGING:
            settings["retention.ms"] = str(self.retention_ms)
        admin.create_topic(topic, replicas=replicas, segment_bytes=SEGMENT_BYTES, settings=settings)

    def _start(self, written: WrittenPartition) -> None:
        seed = self.dice.random()
        writer = PartitionWriter(self.cluster, written, random.Random(seed), self.happened)
        stop = threading.Event()
        thread = threading.Thread(target=writer.write_until, args=(stop, pause(random.Random(seed), 0.2, 0.8)), name=f"writer of {written}")
        self._writers[str(written)] = (writer, stop, thread)
        thread.start()
