"""A replica is away for longer than delete.retention.ms: stock brokers then diverge for ever. What becomes of the two kinds of tiers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.broker.test_compaction import BrokerTierCli
from tests.plain_format import read_batches, segment_paths
from tests.plain_log import control_type
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_traffic import READ_COMMITTED, DraftRecord, Writer, WrittenPartition, consume
from tests.support.tier_cli import TierCli, latest, visible

pytestmark = [pytest.mark.slow_broker, pytest.mark.timeout(900)]
TOPIC = "away"
DELETED, ABORTED = b"k0", b"never"
"""A key that is deleted, and one that is written only in a transaction that is aborted, while the replica is away."""
ABORT = b"the marker"

QUICK = {"log.cleaner.backoff.ms": "300", "producer.id.expiration.ms": "1000", "producer.id.expiration.check.interval.ms": "300"}
COMPACT = {
    "cleanup.policy": "compact",
    "delete.retention.ms": "0",
    "min.cleanable.dirty.ratio": "0.0001",
    "segment.ms": "1000",
    "remote.storage.enable": "false",
    "local.retention.bytes": "-2",
}


@pytest.fixture
def story(new_cluster: Callable[..., KafkaCluster]) -> Iterator[Story]:
    with new_cluster(brokers=2, settings=QUICK) as cluster, ClusterAdmin(cluster) as admin:
        yield Story(cluster, admin)


class Story:
    """One topic, which broker 1 leads."""

    def __init__(self, cluster: KafkaCluster, admin: ClusterAdmin) -> None:
        self.cluster, self.admin, self.model, self.number = cluster, admin, WrittenPartition(), 0

    def begin(self, settings: dict[str, str]) -> None:
        """The key, and a record of a transaction that stays open, on both brokers, in a sealed segment."""
        self.admin.create_topic(TOPIC, replicas=[[1, 2]], segment_bytes=4096, settings=settings)
        self.plain, self.txn = Writer(self.cluster, TOPIC, self.model), Writer(self.cluster, TOPIC, self.model, transactional_id="t")
        self.plain.write([self.record(DELETED, b"v1")])
        self.txn.begin()
        self.txn.write([self.record(ABORTED, b"aborted")])
        self.fill()

    def record(self, key: bytes, value: bytes | None) -> DraftRecord:
        self.number += 1
        return DraftRecord(key, value, int(time.time() * 1000) + self.number)

    def fill(self) -> None:
        """Other keys, until a segment is sealed."""
        self.plain.write([self.record(b"other-%d" % self.number, bytes(80)) for _ in range(60)], per_batch=5)

    def lose_sight(self) -> None:
        """Broker 2 is gone; the key is deleted, the transaction is aborted."""
        self.cluster.nodes[2].stop()
        self.plain.write([self.record(DELETED, None)])
        self.txn.end(commit=False)
        wait_until(lambda: ABORT in on_disk(self.directory(1)), "the marker of the abort")  # the coordinator writes it a moment later
        self.fill()

    def commit_later(self) -> None:
        """The same producer commits another transaction: where the marker of the abort is missing, it commits that one, too."""
        with self.txn.transaction(commit=True):
            self.txn.write([self.record(b"later", b"committed")])
        self.fill()

    def wait_until_cleaned_away(self) -> None:
        """The key, the aborted record and the abort are gone from broker 1: a cleaner was there, and again after the retention."""

        def is_gone() -> bool:
            self.fill()  # a cleaner comes only if there is something new
            time.sleep(1)  # segment.ms
            with suppress(FileNotFoundError):  # the cleaner has just replaced a segment
                return on_disk(self.directory(1)).isdisjoint({DELETED, ABORTED, ABORT})
            return False

        wait_until(is_gone, "the leader to clean", seconds=300)

    def bring_back(self, *, empty: bool = False) -> None:
        """Broker 2 is back, and leads."""
        if empty:
            self.cluster.nodes[2].empty_disk()
        self.cluster.nodes[2].launch()
        self.cluster.nodes[2].wait_started()
        with ClusterAdmin(self.cluster) as admin:  # the one before has seen a broker die
            admin.move_leader(TOPIC, 0, 2)

    def directory(self, node: int) -> Path:
        return self.cluster.nodes[node].log_dir / f"{TOPIC}-0"

    def values(self, key: bytes) -> list[bytes | None]:
        """What a read_committed consumer is given of a key."""
        return [record.value for record in consume(self.cluster, TOPIC, isolation=READ_COMMITTED) if record.key == key]


def on_disk(directory: Path) -> set[bytes | None]:
    """The keys of all data records in a log directory, and ABORT if it has the marker of an abort."""
    batches = [batch for path in segment_paths(directory).values() for batch in read_batches(path.read_bytes())]
    keys = {record.key for batch in batches if not batch.control for record in batch.records}
    return keys | {ABORT for batch in batches if batch.control and control_type(batch) == 0}


def copy(directory: Path, folder: Path) -> Path:
    """A copy of a log directory, without the checkpoints of its broker."""
    target = folder / directory.name

    def is_copied() -> bool:
        shutil.rmtree(target, ignore_errors=True)
        with suppress(shutil.Error, FileNotFoundError):  # a cleaner has just replaced a segment
            shutil.copytree(directory, target)
            return True
        return False

    wait_until(is_copied, f"{directory} to be copied")
    return target


def test_a_compactor_managed_tier_takes_nothing_from_a_replica_that_has_missed_deletes(story: Story, tmp_path: Path) -> None:
    early, late = (TierCli(tmp_path / name, {"cleaner": {"delete_retention_ms": 0}}, f"{TOPIC}-0") for name in ("early", "late"))
    story.begin({**COMPACT, "cleanup.policy": "delete"})
    early.do("import", story.directory(1), "--live")
    story.lose_sight()
    late.do("import", story.directory(1), "--live")  # it holds the tombstone and the marker
    story.commit_later()

    story.admin.set_config(TOPIC, {"cleanup.policy": "compact"})
    story.wait_until_cleaned_away()
    story.bring_back()
    assert story.values(DELETED) == [b"v1"], "stock brokers diverge"
    assert story.values(ABORTED) == [b"aborted"], "and an aborted record is committed"

    before = early.digest()
    for number, source in enumerate(
        (story.directory(1), copy(story.directory(1), tmp_path / "one"), copy(story.directory(2), tmp_path / "two"))
    ):
        answer = early.ask("import", source, "--live")
        assert answer.code == 3, (number, answer)
        # Where whole ends of segments are missing, a segment may be lost instead.
        assert "`topics delete away-0`" in answer.stderr or "are missing after" in answer.stderr, (number, answer)
    assert early.digest() == before

    for _ in range(3):
        late.do("run", "--force")
    shown = late.export(tmp_path / "shown")
    assert {DELETED, ABORTED}.isdisjoint(latest(shown))
    assert {DELETED, ABORTED}.isdisjoint({record[2] for record in visible(shown)})


@pytest.mark.parametrize("empty", [False, True], ids=["it was down", "it is built anew"])
@pytest.mark.parametrize("local", ["-2", "1"], ids=["all is local", "little is local"])
def test_a_broker_managed_tier_is_immune(empty: bool, local: str, story: Story, tmp_path: Path) -> None:
    """Brokers do not clean its topic, and every replica gets tombstone and marker; readers see what is cleaned here."""
    story.begin({"local.retention.bytes": local})
    story.lose_sight()
    story.commit_later()
    wait_until(
        lambda: story.admin.offsets(TOPIC).latest_tiered == story.admin.active_base(TOPIC) - 1, "the topic to be tiered", seconds=120
    )
    ours = BrokerTierCli(story.cluster, tmp_path / "compactor", [TOPIC])
    for _ in range(3):
        ours.process("run", "--force")
    for _ in range(2):
        assert story.values(DELETED)[-1:] in ([], [None])
        assert story.values(ABORTED) == []
        assert story.values(b"later") == [b"committed"]
        if 2 not in story.cluster.running:
            story.bring_back(empty=empty)
