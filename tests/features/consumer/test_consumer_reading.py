"""Reading for consumers: prefetched pieces, outcomes of transactions while rounds run, brokers that do not answer."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.consumer import ConsumerOptions, Place, TieredConsumer
from compactor.errors import Unavailable
from compactor.features.consumer.group import LogStartAndEndOffset
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition
from compactor.read.ranges import read_record_blocks
from compactor.read.reading import OffsetRangeReader, OffsetRangeToRead, ReadOptions
from compactor.tier.ports import SegmentLayout
from tests.builders import LZ4, NONE, LogBuilder, log_of, read
from tests.support.plain_broker import PlainBroker, consumed
from tests.support.small_pieces import cut_into_pieces
from tests.support.spark_tier import NAME, NOW_MS, Twins, state_of

pytestmark = pytest.mark.quick

LIMIT = 1 << 20


def import_log(tier: Tier, folder: Path) -> None:
    import_directory(tier, folder, NAME, tier.settings.cleaner.cleaner_policy())


def offsets_of(tier: Tier, extent: OffsetRangeToRead, *, ahead: int = 0, committed: bool = True) -> list[int]:
    reader = OffsetRangeReader(tier, extent, ReadOptions(committed, LIMIT, requests_in_advance=ahead))
    return [offset for selection in reader.read_selected_records() for offset in selection.rows.offset[selection.picked].tolist()]


# ---- segments that rounds replace -------------------------------------------------------------------------------------------


def test_a_reader_skips_aborted_records_after_rounds_removed_their_marker(tmp_path: Path) -> None:
    """The reader's segments are still in grace; two rounds have removed the marker from the live ones."""
    tier = Twins(tmp_path / "twins", "[cleaner]\nsegment_bytes = 400\ndelete_retention_ms = 0").local
    log = log_of("a=1")
    log.put(*(f"k{number}={'x' * 60}" for number in range(4)), pid=5, txn=True)
    log.add("/; 5 aborts; b=1; /; 5t: c=1; 5 commits; d=1")
    import_log(tier, log.write(tmp_path / "log"))
    before = state_of(tier)
    extent = OffsetRangeToRead(NAME, 0, before.end_offset, before.live)
    truth = [record.offset for record, _ in consumed([b for bs in read(tmp_path / "log").values() for b in bs], committed=True)[0]]
    assert offsets_of(tier, extent) == truth
    for late in range(4):
        compact(tier, NAME, NOW_MS + late * 1_000_000, force=True)
        log.roll()
        log.put(f"later-{late}=1")
        import_log(tier, log.write(tmp_path / "log"))
    assert not {segment.id for segment in before.live} & {segment.id for segment in state_of(tier).live}
    assert all(tier.ports.data.head(f"{NAME}/{s.start_offset:020}-{s.id}.log").size == s.size_bytes for s in before.live)
    assert offsets_of(tier, extent) == truth
    assert offsets_of(tier, extent, ahead=2) == truth


# ---- prefetching ------------------------------------------------------------------------------------------------------------


@dataclass
class CountingLayout:
    """A layout that counts which bytes of logs are read, and notes the threads that read them."""

    inner: SegmentLayout

    def __post_init__(self) -> None:
        self.bytes: Counter[tuple[str, int]] = Counter()
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_file(self, name: TopicPartition, segment: Any, kind: str, start: int = 0, length: int | None = None) -> bytes:
        data = self.inner.read_file(name, segment, kind, start, length)
        if kind == "log":
            self.bytes.update((segment.id, at) for at in range(start, start + len(data)))
            self.threads.add(threading.current_thread().name)
        return data


def with_counting_layout(tier: Tier) -> tuple[Tier, CountingLayout]:
    layout = CountingLayout(tier.ports.layout)
    return replace(tier, ports=replace(tier.ports, layout=layout)), layout


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into_pieces(monkeypatch, 600)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(6))
def test_prefetching_returns_the_same_records_and_fetches_no_byte_twice(seed: int, tmp_path: Path) -> None:
    tier = Twins(tmp_path / "twins", "[cleaner]\nindex_interval_bytes = 100").local
    dice, log = random.Random(seed), LogBuilder()
    for _ in range(dice.randint(2, 4)):
        for _ in range(dice.randint(3, 25)):
            producer = dice.choice((-1, 5, 6)) if seed % 2 else -1
            log.put(
                *(f"k{dice.randrange(9)}={'x' * dice.randint(0, 90)}" for _ in range(3)),
                codec=dice.choice((NONE, LZ4)),
                pid=producer,
                txn=producer >= 0,
            )
            if producer >= 0 and dice.random() < 0.5:
                log.end(producer, commit=dice.random() < 0.5)
        log.roll()
    log.end(5, commit=True)
    log.end(6, commit=False)
    import_log(tier, log.write(tmp_path / "log"))
    state = state_of(tier)
    for first, last in ((0, state.end_offset), (dice.randrange(state.end_offset), state.end_offset), (0, state.end_offset // 2)):
        extent = OffsetRangeToRead(NAME, first, last, state.live)
        plain, layout_of_plain = with_counting_layout(tier)
        fast, layout = with_counting_layout(tier)
        assert offsets_of(fast, extent, ahead=3) == offsets_of(plain, extent)
        if (first, last) == (0, state.end_offset):
            assert any(name.startswith("fetch-ahead") for name in layout.threads)
        if not seed % 2:
            assert set(layout.bytes.values()) == {1}, "nothing is fetched twice"
            assert len(layout.bytes) <= len(layout_of_plain.bytes) + 1200


@pytest.mark.usefixtures("small_pieces")
def test_idle_threads_prefetch_for_a_single_partition(tmp_path: Path) -> None:
    tier = Twins(tmp_path / "twins", "[cleaner]\nindex_interval_bytes = 100").local
    log = LogBuilder()
    for number in range(200):
        log.put(f"k{number}={'x' * 50}")
    import_log(tier, log.write(tmp_path / "log"))
    fast, layout = with_counting_layout(tier)
    with TieredConsumer(fast, options=ConsumerOptions(threads=3)) as consumer:
        consumer.assign([Place(*NAME, 0)])
        found = consumer.consume(200, timeout=20)
    assert [message.offset() for message in found] == list(range(200))
    assert any(name.startswith("fetch-ahead") for name in layout.threads)


# ---- a broker that does not answer ------------------------------------------------------------------------------------------


@dataclass
class UnreachableBroker(PlainBroker):
    """A broker that does not answer the next ``down`` calls."""

    down: int = 0

    def _asked(self) -> None:
        if self.down:
            self.down -= 1
            raise Unavailable("no broker answers")

    @override
    def offset_bounds(self, name: TopicPartition) -> LogStartAndEndOffset:
        self._asked()
        return super().offset_bounds(name)

    @override
    def start_reading_from(
        self, offsets: Mapping[TopicPartition, int], previous_epochs: Mapping[TopicPartition, int] | None = None
    ) -> None:
        self._asked()
        super().start_reading_from(offsets, previous_epochs)


@pytest.mark.parametrize("first", [0, 10])
def test_the_hand_over_is_retried_while_the_broker_does_not_answer(first: int, tmp_path: Path) -> None:
    """From offset 0 the broker is asked for records before the tier; from 10 it is to continue where the tier ends."""
    tier = Twins(tmp_path / "twins").local
    log = LogBuilder(next_offset=10).add("a=1 b=1; /; c=1")
    folder = log.write(tmp_path / "log")
    whole = [batch for batches in read(folder).values() for batch in batches]
    (folder / f"{12:020}.log").unlink()
    import_log(tier, folder)
    broker = UnreachableBroker(NAME, whole, start=10, down=3)
    found: list[int | None] = []
    errors = 0
    with TieredConsumer(tier, broker, ConsumerOptions(refresh_s=0.001)) as consumer:
        consumer.assign([Place(*NAME, first)])
        for _ in range(500):
            try:
                found += [message.offset() for message in consumer.consume(5, timeout=0.01)]
            except Unavailable:
                errors += 1
            if len(found) == 3:
                break
    assert found == [10, 11, 12]
    assert errors >= 2
    assert broker.down == 0


# ---- one key ----------------------------------------------------------------------------------------------------------------


def test_a_search_for_one_key_skips_segments_whose_filter_excludes_it(tmp_path: Path) -> None:
    tier = Twins(tmp_path / "twins", "[cleaner]\nsegment_bytes = 30000\nbloom_design_keys = 1000\nmin_cleanable_dirty_ratio = 0.0").local
    log, dice = LogBuilder(), random.Random(1)
    for segment in range(5):
        for number in range(0, 60, 20):
            log.put(*(b"s%d-k%d=" % (segment, key) + dice.randbytes(300) for key in range(number, number + 20)))
        log.roll()
    log.put("s3-k5=new", "s3-k6")
    import_log(tier, log.write(tmp_path / "log"))
    compact(tier, NAME, NOW_MS, force=True)
    live = state_of(tier).live

    def found(key: str, **options: Any) -> tuple[list[int | None], set[int]]:
        """Offsets, and the numbers of the segments that were read."""
        looking, layout = with_counting_layout(tier)
        blocks = list(read_record_blocks(looking, NAME, key=key.encode(), **options))
        read_ids = {segment_id for segment_id, _ in layout.bytes}
        return [m.offset() for block in blocks for m in block.messages()], {n for n, s in enumerate(live) if s.id in read_ids}

    newest = {len(live) - 1}
    assert found("s0-k7") == ([7], {0})
    offsets, segments = found("s3-k5")
    assert offsets == [300]
    assert segments <= newest | {3}
    assert found("nobody has it")[0] == []
    assert found("nobody has it")[1] <= newest
    assert found("s0-k7", latest_only=True)[0] == [7]
    assert found("s0-k7", first_offset=60)[0] == []
    assert found("s0-k7", first_offset=60)[1] <= newest
