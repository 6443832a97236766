"""A consumer of tier and broker returns every record once and in order, while compaction, retention and retire run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.consumer import OFFSET_BEGINNING, OFFSET_END, ConsumerOptions, Place, TieredConsumer
from compactor.control.ports import ObjectRetention
from compactor.errors import BadData, StoreError, UsageError
from compactor.features.consumer import sources as feeding
from compactor.features.consumer.sources import Mode
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition
from compactor.read.records import MessageLike
from compactor.upkeep.retire import GraceClock, retire_partition
from tests.builders import LZ4, NONE, ZSTD, LogBuilder, entry, log_of, read
from tests.plain_format import Batch, Record
from tests.support.keys import object_key
from tests.support.plain_broker import PlainBroker, consumed
from tests.support.small_pieces import cut_into_pieces
from tests.support.spark_tier import NAME, NOW_MS, Twins, state_of

pytestmark = pytest.mark.quick

MODES_READ: Final[tuple[Mode, ...]] = ("remote_preferred", "kafka_preferred")
REFRESH_S = 0.002
"""Seconds after which a partition that could not be read is retried."""


def options(**given: Any) -> ConsumerOptions:
    return ConsumerOptions(**{"refresh_s": REFRESH_S, "threads": 2, **given})


def shape(message: MessageLike) -> tuple[Record, int]:
    headers = tuple((name.encode(), value) for name, value in message.headers() or ())
    assert message.error() is None
    assert (message.topic(), message.partition()) == NAME
    epoch = message.leader_epoch()
    return Record(message.offset() or 0, message.timestamp()[1], message.key(), message.value(), headers), -1 if epoch is None else epoch


def batches_of(folder: Path) -> list[Batch]:
    return [batch for batches in read(folder).values() for batch in batches]


def read_until(consumer: TieredConsumer, until: int, most: int = 5000) -> list[MessageLike]:
    """Return all messages up to the one with offset ``until``."""
    found: list[MessageLike] = []
    for _ in range(most):
        found += consumer.consume(7, timeout=REFRESH_S)
        if found and (found[-1].offset() or 0) >= until:
            return found
    raise AssertionError(f"no message at {until}: {[message.offset() for message in found][-5:]}, {consumer.position([Place(*NAME)])}")


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Twins(tmp_path / "twins", "[cleaner]\nsegment_bytes = 900").local


def import_log(tier: Tier, folder: Path) -> None:
    import_directory(tier, folder, NAME, tier.settings.cleaner.cleaner_policy())


def compact_and_retire(tier: Tier) -> None:
    """Run a round and delete everything that it replaced."""
    compact(tier, NAME, NOW_MS, force=True)
    retire_partition(
        tier.ports,
        tier.open_partition_log(NAME),
        tier.lease,
        ObjectRetention(grace_ms=0),
        clock=GraceClock(NOW_MS * 2, forced=True),
    )


@dataclass
class GrowingLog:
    """A log that grows. The broker holds all of it except what it deletes; sealed segments are imported into the tier."""

    seed: int
    folder: Path
    tier: Tier
    committed: bool
    log: LogBuilder = field(default_factory=lambda: LogBuilder(time=1_700_000_000_000))

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.broker = PlainBroker(NAME, committed=self.committed)
        self.running: set[int] = set()

    def write(self) -> None:
        dice = self.dice
        for _ in range(dice.randint(1, 6)):
            producer = dice.choice((-1, -1, 5, 6, 7))
            pairs = [
                dice.choice((f"k{dice.randrange(12)}={dice.random()}", f"k{dice.randrange(12)}", "=no key"))
                for _ in range(dice.randint(1, 5))
            ]
            self.log.put(*pairs, codec=dice.choice((NONE, LZ4, ZSTD)), pid=producer, txn=producer >= 0, headers=[("h", None)])
            if producer >= 0:
                self.running.add(producer)
            if self.running and dice.random() < 0.4:
                self.finish(dice.choice(sorted(self.running)))

    def finish(self, producer: int) -> None:
        self.running.discard(producer)
        self.log.end(producer, commit=self.dice.random() < 0.6)

    def seal(self) -> None:
        if self.log.segments[-1][1]:
            self.log.leader_epoch += self.dice.random() < 0.3
            self.log.roll()
            self.log.write(self.folder)
            self.broker.batches = batches_of(self.folder)

    def import_sealed(self) -> None:
        if self.broker.batches:
            import_log(self.tier, self.folder)

    def step(self) -> None:
        match self.dice.randrange(6):
            case 0 | 1:
                self.write()
                self.seal()
            case 2:
                self.import_sealed()
            case 3:
                if self.broker.batches:
                    self.import_sealed()
                    compact_and_retire(self.tier)
            case 4:  # the broker deletes what is tiered, whole segments
                tiered = [segment.end_offset + 1 for segment in state_of(self.tier).live]
                self.broker.start = max(self.broker.start, self.dice.choice([0, *tiered]))
            case _:
                pass


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_consumer_returns_every_record_once_and_in_order_while_rounds_and_retention_run(
    seed: int, committed: bool, tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "TURN_BYTES", 500)
    growing = GrowingLog(seed, tmp_path / "log", tier, committed)
    growing.write()
    growing.seal()
    growing.import_sealed()
    isolation = "read_committed" if committed else "read_uncommitted"
    first = growing.dice.choice((0, growing.log.next_offset // 2))
    found: list[MessageLike] = []
    with TieredConsumer(tier, growing.broker, options(isolation=isolation, queue_bytes=2000, mode=MODES_READ[seed % 2])) as consumer:
        consumer.assign([Place(*NAME, first)])
        for _ in range(25):
            growing.step()
            for _ in range(growing.dice.randrange(4)):
                found += consumer.consume(growing.dice.randint(1, 9), timeout=REFRESH_S)
        for producer in sorted(growing.running):
            growing.finish(producer)
        growing.log.put("last=1")
        growing.seal()
        growing.import_sealed()  # needed if the broker has deleted the beginning of a transaction that is open at the tier's end
        truth = {record.offset: (record, epoch) for record, epoch in consumed(growing.broker.batches, committed=committed)[0]}
        if not found or (found[-1].offset() or 0) < max(truth):
            found += read_until(consumer, max(truth))
    got = [shape(message) for message in found]
    offsets = [record.offset for record, _ in got]
    assert offsets == sorted(set(offsets))
    assert all(truth[record.offset] == (record, epoch) for record, epoch in got)
    settled = {record.offset for record, _ in consumed(growing.broker.batches, committed=True)[0]}
    last_of_key = {record.key: offset for offset, (record, _) in truth.items() if offset in settled}
    for offset in set(truth) - set(offsets):
        record = truth[offset][0]
        # Only what a round may remove is missing: no key, superseded, or (read_uncommitted) aborted.
        assert offset < first or record.key is None or offset not in settled or last_of_key[record.key] > offset
    assert growing.broker.closed


@pytest.mark.parametrize("seed", range(4))
def test_view_latest_returns_last_records_and_then_every_record(seed: int, tier: Tier, tmp_path: Path) -> None:
    growing = GrowingLog(seed + 40, tmp_path / "log", tier, committed=True)
    for _ in range(6):
        growing.write()
        growing.seal()
    growing.import_sealed()
    tiered = consumed(growing.broker.batches, committed=True)
    with TieredConsumer(tier, growing.broker, options(view="latest", threads=1)) as consumer:
        consumer.assign([Place(*NAME, OFFSET_BEGINNING)])
        state = {record.key: record for record, _ in tiered[0] if record.key is not None}
        wanted = sorted(record.offset for record in state.values() if record.value is not None)
        found = read_until(consumer, wanted[-1])
        assert [message.offset() for message in found][: len(wanted)] == wanted
        for _ in range(3):
            growing.write()
            growing.seal()
        for producer in sorted(growing.running):
            growing.finish(producer)
        growing.log.put("last=1")
        growing.seal()
        every, end = consumed(growing.broker.batches, committed=True)
        found += read_until(consumer, end - 1)
    assert [message.offset() for message in found] == wanted + [record.offset for record, _ in every if record.offset >= tiered[1]]


def test_read_committed_hands_over_where_a_transaction_is_open(tier: Tier, tmp_path: Path) -> None:
    log = log_of("a=1; 5t: b=1; c=1; /")
    import_log(tier, log.write(tmp_path / "log"))
    log.add("5 aborts; d=1")
    broker = PlainBroker(NAME, batches_of(log.write(tmp_path / "log")))
    with TieredConsumer(tier, broker, options()) as consumer:
        consumer.assign([Place(*NAME, 0)])
        assert [message.offset() for message in read_until(consumer, 4)] == [0, 2, 4]
        assert broker.handed_out == 2
    uncommitted = PlainBroker(NAME, broker.batches, committed=False)
    with TieredConsumer(tier, uncommitted, options(isolation="read_uncommitted")) as consumer:
        consumer.assign([Place(*NAME, 0)])
        assert [message.offset() for message in read_until(consumer, 4)] == [0, 1, 2, 4]
        assert uncommitted.handed_out == 1


def test_the_tier_is_read_again_after_the_broker_deleted_the_position(tier: Tier, tmp_path: Path) -> None:
    log = log_of("a=1 b=1; /")
    folder = log.write(tmp_path / "log")
    import_log(tier, folder)
    broker = PlainBroker(NAME, batches_of(folder))
    with TieredConsumer(tier, broker, options()) as consumer:
        consumer.assign([Place(*NAME, 0)])
        assert [message.offset() for message in read_until(consumer, 1)] == [0, 1]
        assert consumer.consume(1, timeout=REFRESH_S) == []
        log.add("c=1 d=1; /; e=1")
        broker.batches = batches_of(log.write(folder))
        broker.start = 4  # c and d are gone there, and not in the tier yet
        error = None
        for _ in range(1000):
            for message in consumer.consume(1, timeout=REFRESH_S):
                error = error or message.error()
            if error:
                break
        assert error is not None
        assert (error.name(), error.retriable()) == ("OFFSET_OUT_OF_RANGE", True)
        assert "the tier ends at 2, and the broker begins at 4" in error.str()
        import_log(tier, folder)
        assert [message.offset() for message in read_until(consumer, 4)] == [2, 3, 4]


def test_a_broker_log_that_ends_below_the_position_is_reported(tier: Tier, tmp_path: Path) -> None:
    log = log_of("a=1 b=1")
    folder = log.write(tmp_path / "log")
    import_log(tier, folder)
    broker = PlainBroker(NAME, [])
    with TieredConsumer(tier, broker, options()) as consumer:
        consumer.assign([Place(*NAME, 0)])
        found = [message for _ in range(300) for message in consumer.consume(5, timeout=REFRESH_S)]
        assert [message.offset() for message in found] == [0, 1, 2]
        assert "the broker's log ends at 0" in str(found[2].error())
        broker.batches = batches_of(folder)
        assert consumer.position([Place(*NAME)]) == [Place(*NAME, 2)]


def test_a_consumer_without_a_broker_follows_the_end_of_the_tier(tier: Tier, tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a=1", "b", headers=[("h", b"v"), ("n", None)])
    log.put("=x", append_time=9_000)
    log.raw(entry(0, 3, "old=1"), 3)
    log.roll()
    import_log(tier, log.write(tmp_path / "log"))
    with TieredConsumer(tier, options=options()) as consumer:
        assert consumer.poll(0) is None
        consumer.assign([Place(*NAME)])
        found = read_until(consumer, 3)
        assert consumer.poll(REFRESH_S) is None
        assert [message.key() for message in found] == [b"a", b"b", None, b"old"]
        assert [message.value() for message in found] == [b"1", None, b"x", b"1"]
        assert [message.headers() for message in found] == [[("h", b"v"), ("n", None)], [("h", b"v"), ("n", None)], None, None]
        assert [message.timestamp() for message in found] == [(1, 1000), (1, 1001), (2, 9000), (0, -1)]
        assert [message.leader_epoch() for message in found] == [0, 0, 0, None]
        log.put("c=1")
        import_log(tier, log.write(tmp_path / "log"))
        assert [message.offset() for message in read_until(consumer, 4)] == [4]
        assert consumer.position([Place(*NAME)]) == [Place(*NAME, 5)]
        assert consumer.get_watermark_offsets(Place(*NAME)) == (0, 5)


def test_a_consumer_seeks_assigns_and_finds_offsets_by_time(tier: Tier, tmp_path: Path) -> None:
    log = LogBuilder()
    for number in range(40):
        log.put(f"k={number}", times=[number * 1000])
        if number % 10 == 9:
            log.roll()
    folder = log.write(tmp_path / "log")
    import_log(tier, folder)
    log.put("k=40", times=[40_000])
    broker = PlainBroker(NAME, batches_of(log.write(folder)), start=30)
    with TieredConsumer(tier, broker, options()) as consumer:
        consumer.assign([Place(*NAME, 5)])
        assert consumer.assignment() == [Place(*NAME)]
        assert read_until(consumer, 9)[0].offset() == 5
        consumer.seek(Place(*NAME, 2))
        assert [message.offset() for message in read_until(consumer, 40)] == list(range(2, 41))
        consumer.seek(Place(*NAME, 37))
        assert [message.offset() for message in read_until(consumer, 40)] == [37, 38, 39, 40]
        times = [Place(*NAME, time) for time in (0, 14_500, 40_000, 41_000)]
        assert [place.offset for place in consumer.offsets_for_times(times)] == [0, 15, 40, OFFSET_END]
        consumer.seek(Place(*NAME, OFFSET_END))
        assert consumer.position([Place(*NAME)]) == [Place(*NAME, 41)]
        consumer.unassign()
        assert consumer.consume(1, timeout=REFRESH_S) == []
        with pytest.raises(UsageError, match="not assigned"):
            consumer.seek(Place(*NAME, 0))
    with pytest.raises(UsageError, match="closed"):
        consumer.poll(0)


def test_an_offset_below_the_tier_begins_as_offset_reset_says(tier: Tier, tmp_path: Path) -> None:
    log = LogBuilder(next_offset=10).add("a=1 b=1")
    import_log(tier, log.write(tmp_path / "log"))
    for reset, first in (("earliest", 10), ("latest", 12)):
        with TieredConsumer(tier, options=options(offset_reset=reset)) as consumer:
            consumer.assign([Place(*NAME, 3)])
            for _ in range(1000):
                if consumer.poll(REFRESH_S) is not None or consumer.position([Place(*NAME)])[0].offset == 12:
                    break
            assert consumer.position([Place(*NAME)])[0].offset == (11 if first == 10 else 12)
    with TieredConsumer(tier, options=options(offset_reset="error")) as consumer:
        with pytest.raises(UsageError, match="no offset"):
            consumer.assign([Place(*NAME)])
        consumer.assign([Place(*NAME, 3)])
        message = consumer.poll()
        assert message is not None
        assert "the tier begins at 10" in str(message.error())


def test_a_partition_that_the_tier_does_not_hold_is_refused(tier: Tier, tmp_path: Path) -> None:
    log = log_of("a=1")
    import_log(tier, log.write(tmp_path / "log"))
    with TieredConsumer(tier) as consumer, pytest.raises(UsageError, match="holds no partition other-3"):
        consumer.assign([Place("other", 3)])


def test_a_partition_that_only_the_broker_holds_is_read_from_the_broker(tier: Tier, tmp_path: Path) -> None:
    log = log_of("a=1 b=1")
    folder = log.write(tmp_path / "log")
    broker = PlainBroker(NAME, batches_of(folder), start=1)
    with TieredConsumer(tier, broker, options()) as consumer:
        with pytest.raises(UsageError, match="there is no tier"):
            tier.identity.read_catalog()
        consumer.assign([Place(*NAME, OFFSET_BEGINNING)])
        assert [message.offset() for message in read_until(consumer, 1)] == [1]
        import_log(tier, folder)
        consumer.seek(Place(*NAME, 0))
        assert [message.offset() for message in read_until(consumer, 1)] == [0, 1]


def test_a_few_threads_and_a_small_queue_serve_many_partitions(tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "TURN_BYTES", 300)
    names = [TopicPartition("many", number) for number in range(9)]
    for name in names:
        log = LogBuilder()
        for number in range(30):
            log.put(f"k{number}={name.partition}")
        import_directory(tier, log.write(tmp_path / str(name)), name, tier.settings.cleaner.cleaner_policy())
    with TieredConsumer(tier, options=options(threads=3, queue_bytes=600)) as consumer:
        consumer.assign([Place(*name, 0) for name in names])
        found: list[MessageLike] = []
        for _ in range(3000):
            found += consumer.consume(4, timeout=REFRESH_S)
            if len(found) >= 9 * 30:
                break
        for name in names:
            mine = [message for message in found if (message.topic(), message.partition()) == name]
            assert [message.offset() for message in mine] == list(range(30))
            assert {message.value() for message in mine} == {str(name.partition).encode()}


def test_a_missing_object_is_raised_after_the_records_before_it_were_returned(tier: Tier, tmp_path: Path) -> None:
    log = log_of("a=1; /; b=1")
    import_log(tier, log.write(tmp_path / "log"))
    key = object_key(NAME, state_of(tier).live[1])
    sound = tier.ports.data.get(key)
    tier.ports.data.delete([key])
    with TieredConsumer(tier, options=options()) as consumer:
        consumer.assign([Place(*NAME, 0)])
        found = consumer.consume(5, timeout=5)
        assert [message.offset() for message in found] == [0]
        with pytest.raises((BadData, StoreError), match="missing in the store"):
            consumer.poll(5)
        tier.ports.data.create(key, sound)
        assert [message.offset() for message in read_until(consumer, 1)] == [1]


def applied(messages: list[MessageLike]) -> dict[bytes | None, bytes | None]:
    """Return the state of an application that has applied these messages, without deleted keys."""
    state = {message.key(): message.value() for message in messages if message.key() is not None}
    return {key: value for key, value in state.items() if value is not None}


@pytest.mark.parametrize("way", ["the view", "the state"])
@pytest.mark.parametrize("seed", range(4))
def test_a_state_restored_while_rounds_run_is_complete(
    seed: int, way: str, tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into_pieces(monkeypatch, 300)
    growing = GrowingLog(seed + 80, tmp_path / "log", tier, committed=True)
    for _ in range(7):
        growing.write()
        growing.seal()
    growing.import_sealed()
    with TieredConsumer(tier, growing.broker, options(view="latest" if way == "the view" else "all", queue_bytes=500)) as consumer:
        found: list[MessageLike] = []
        if way == "the view":
            consumer.assign([Place(*NAME, 0)])
            found += consumer.consume(3, timeout=5)
        else:
            restored = consumer.latest(Place(*NAME))
            for number, block in enumerate(restored):
                found += block.messages()
                if number % 3 == 0:
                    growing.write()
                    growing.seal()
                    growing.import_sealed()
                    compact_and_retire(tier)
            consumer.assign([Place(*NAME, restored.next_offset)])
        for _ in range(12):
            growing.step()
            found += consumer.consume(5, timeout=REFRESH_S)
        for producer in sorted(growing.running):
            growing.finish(producer)
        growing.log.put("last=1")
        growing.seal()
        growing.import_sealed()
        every = consumed(growing.broker.batches, committed=True)[0]
        if not found or found[-1].key() != b"last":
            found += read_until(consumer, every[-1][0].offset)
    state = {record.key: record.value for record, _ in every if record.key is not None}
    assert applied(found) == {key: value for key, value in state.items() if value is not None}


def test_last_values_come_as_blocks_and_as_arrow_batches(tmp_path: Path) -> None:
    tier = Twins(tmp_path, "[cleaner]\nmap_budget_bytes = 65536").local
    log = LogBuilder()
    for base in range(0, 9000, 500):
        log.put(*[f"key-{number}={base}" for number in range(base, base + 500)])
    log.put("key-7", "key-8=new", headers=[("h", b"v")])
    log.put("open=1", pid=5, txn=True)
    import_log(tier, log.write(tmp_path / "log"))
    with TieredConsumer(tier) as consumer:
        found = consumer.latest(Place(*NAME))
        assert found.next_offset == 9002
        keys = [message.key() for block in found for message in block.messages()]
        assert len(keys) == len(set(keys)) == 8999
        rows = [row for batch in found.arrow("key", "value", "headers", "timestamp") for row in batch.to_pylist()]
        assert len(rows) == 8999
        values = {row["key"]: row["value"] for row in rows}
        assert (values[b"key-8"], values.get(b"key-7"), values[b"key-8999"]) == (b"new", None, b"8500")
        assert [row["headers"] for row in rows if row["key"] == b"key-8"] == [[{"key": "h", "value": b"v"}]]
        with pytest.raises(UsageError, match="no column 'colour'"):
            next(found.arrow("colour"))
