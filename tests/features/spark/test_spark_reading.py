"""What a task of the data source reads, without Spark: splits, isolation, ranges, the latest view, objects that go while they are read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.cleaner import disk_map
from compactor.control.ports import ObjectRetention
from compactor.errors import BadData, OutOfBudget, UsageError
from compactor.features.imports.import_ import import_directory
from compactor.features.spark import datasource
from compactor.features.spark.datasource import (
    COLUMN_TYPES,
    SPARK_TYPES,
    KafkaTieredSource,
    ReadRequest,
    ReadSplit,
    parse_read_options,
    plan_splits,
    require_supported_schema,
)
from compactor.kernels.common import KEY_BYTES
from compactor.model.ids import TopicPartition
from compactor.read import outcomes
from compactor.read.columns import LATEST_MS, MESSAGE_COLUMNS, to_arrow_batch
from compactor.read.reading import FIRST_PIECE_BYTES, OffsetRangeReader
from compactor.upkeep.orphans import delete_records
from compactor.upkeep.retire import GraceClock, retire_partition
from tests.builders import LZ4, NONE, TOPIC_ID, ZSTD, LogBuilder, entry, wrapper
from tests.golden_cases import client_rounds, names, unpack
from tests.support.keys import object_key
from tests.support.small_pieces import cut_into_pieces
from tests.support.spark_tier import NAME, NOW_MS, Twins, state_of
from tests.support.tier_cli import latest, visible

pytestmark = pytest.mark.quick

Rows = list[tuple[Any, ...]]


def struct(**columns: str) -> StructType:
    return StructType([StructField(name, SPARK_TYPES[kind]) for name, kind in columns.items()])


def read(tier: Tier, *, topic: str = NAME.topic, columns: str = "", **options: object) -> Rows:
    """All rows of a read, in the order of their offsets; times in microseconds."""
    request = request_of(tier, topic=topic, columns=columns, **options)
    schema = arrow(columns)
    rows: Rows = []
    for split in plan_splits(tier, request):
        rows += read_split(tier, split, schema)
    return sorted(rows, key=lambda row: row[schema.names.index("offset")]) if "offset" in schema.names else rows


def read_split(tier: Tier, split: Any, schema: Any) -> Rows:
    assert isinstance(split, ReadSplit)
    found: Rows = []
    selections = [(part.extent.partition, OffsetRangeReader(tier, part.extent, part.options)) for part in split.parts]
    for name, selection in ((name, selection) for name, reader in selections for selection in reader.read_selected_records()):
        batch = to_arrow_batch(selection, name.topic, name.partition, schema)
        batch.validate(full=True)
        assert batch.num_rows > 0
        columns = [
            column.cast("int64") if name == "timestamp" else column for name, column in zip(schema.names, batch.columns, strict=True)
        ]
        found += zip(*(column.to_pylist() for column in columns), strict=True)
    return found


def request_of(tier: Tier, **options: object) -> ReadRequest:
    given = {name: str(value) for name, value in options.items() if value != ""}
    return replace(parse_read_options({"url": tier.settings.tier_url, **given}), settings=tier.settings)


def arrow(columns: str = "") -> Any:
    chosen = columns.split(",") if columns else MESSAGE_COLUMNS
    return to_arrow_schema(struct(**{name: COLUMN_TYPES[name] for name in chosen}), timezone="UTC")


def offsets(rows: Rows) -> list[int]:
    return [row[MESSAGE_COLUMNS.index("offset")] for row in rows]


def plain(rows: Rows) -> list[tuple[int, int, bytes | None, bytes | None, tuple[tuple[bytes, bytes | None], ...]]]:
    """As ``visible`` has it."""
    found = []
    for key, value, headers, _, _, offset, timestamp, _, _ in rows:
        found.append(
            (
                offset,
                -1 if timestamp is None else timestamp // 1000,
                key,
                value,
                tuple((h["key"].encode(), h["value"]) for h in headers or ()),
            )
        )
    return found


@pytest.fixture
def twins(tmp_path: Path) -> Twins:
    return Twins(tmp_path / "twins")


def log_of(seed: int, segments: int = 5) -> LogBuilder:
    dice = random.Random(seed)
    log = LogBuilder(time=1_700_000_000_000)
    for number in range(segments):
        for _ in range(dice.randint(3, 12)):
            producer = dice.choice((-1, -1, 5, 6))
            pairs = [
                dice.choice((f"k{dice.randrange(30)}={dice.random()}", f"k{dice.randrange(30)}", "=no key"))
                for _ in range(dice.randint(1, 7))
            ]
            headers = [("a", b"1"), ("n", None)] if dice.random() < 0.4 else []
            log.put(*pairs, codec=dice.choice((NONE, LZ4, ZSTD)), pid=producer, txn=producer >= 0, headers=headers)
            if dice.random() < 0.4:
                log.end(dice.choice((5, 6)), commit=dice.random() < 0.5)
        log.leader_epoch = number // 2
        log.roll()
    return log


@pytest.mark.parametrize("seed", range(8))
def test_all_that_a_read_committed_consumer_sees(seed: int, twins: Twins, tmp_path: Path) -> None:
    log = log_of(seed)
    for producer in (5, 6) if seed % 2 else ():
        log.commit(producer)
    folder = log.write(tmp_path / "log")
    twins.bring(folder)
    # Small splits and pieces: outcomes of transactions lie in other ones.
    for split_bytes in (1 << 30, 700):
        assert plain(read(twins.local, splitBytes=split_bytes)) == visible(folder)


@pytest.mark.parametrize("seed", range(4))
def test_pieces_smaller_than_a_segment(seed: int, twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into_pieces(monkeypatch, 300)
    monkeypatch.setattr(outcomes, "MAX_HELD_PIECES", seed)
    folder = log_of(seed + 50).write(tmp_path / "log")
    twins.bring(folder)
    assert plain(read(twins.local)) == visible(folder)
    assert {row[0]: row[1] for row in read(twins.local, view="latest")} == latest(folder)


def test_read_uncommitted_leaves_out_markers_only(twins: Twins, tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a=1")
    log.put("b=1", pid=5, txn=True)
    log.abort(5)
    log.put("c=1", pid=5, txn=True)
    twins.bring(log.write(tmp_path / "log"))
    assert offsets(read(twins.local)) == [0]
    assert offsets(read(twins.local, isolation="read_uncommitted")) == [0, 1, 3]


def test_an_outcome_that_lies_segments_behind(twins: Twins, tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a=1", pid=5, txn=True)
    log.put("b=1", pid=6, txn=True)
    for number in range(6):
        log.roll()
        log.put(f"x={number}")
    log.abort(5)
    log.commit(6)
    log.put("z=1")
    twins.bring(log.write(tmp_path / "log"))
    assert offsets(read(twins.local, splitBytes=80)) == [1, 2, 3, 4, 5, 6, 7, 10]
    assert offsets(read(twins.local, endingOffset=2)) == [1]
    assert [row[0] for row in read(twins.local, view="latest", endingOffset=3)] == [b"b", b"x"]


def test_every_column(twins: Twins, tmp_path: Path) -> None:
    log = LogBuilder(time=1_700_000_000_123, leader_epoch=3)
    log.put("a=1", "b", headers=[("h", b"v"), ("n", None), ("h", b"")])
    log.put("=x", append_time=1_700_000_009_000)
    log.put("c=1", headers=[(b"\xff\xfe", b"bytes")])
    log.raw(wrapper(1, 6, [entry(1, 0, "l=1", timestamp=5), entry(1, 1, "l=2", timestamp=6)], LZ4, timestamp=6), 6)
    log.raw(entry(0, 7, "old=1"), 7)
    twins.bring(log.write(tmp_path / "log"))
    rows = read(twins.local)
    named = [dict(zip(MESSAGE_COLUMNS, row, strict=True)) for row in rows]
    assert [row["key"] for row in named] == [b"a", b"b", None, b"c", b"l", b"l", b"old"]
    assert [row["value"] for row in named] == [b"1", None, b"x", b"1", b"1", b"2", b"1"]
    assert named[0]["headers"] == [{"key": "h", "value": b"v"}, {"key": "n", "value": None}, {"key": "h", "value": b""}]
    assert [row["headers"] for row in named[2:]] == [None, [{"key": "\ufffd\ufffd", "value": b"bytes"}], None, None, None]
    assert {(row["topic"], row["partition"]) for row in named} == {("orders", 0)}
    assert [row["offset"] for row in named] == [0, 1, 2, 3, 5, 6, 7]
    stamps = [row["timestamp"] and row["timestamp"] // 1000 for row in named]
    assert stamps == [1_700_000_000_123, 1_700_000_000_124, 1_700_000_009_000, 1_700_000_000_126, 5, 6, None]
    assert [row["timestampType"] for row in named] == [0, 0, 1, 0, 0, 0, -1]
    assert [row["leaderEpoch"] for row in named] == [3, 3, 3, 3, None, None, None]


def test_times_that_spark_cannot_count_are_its_last(twins: Twins, tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a=1", "b=2", times=[2**62, -(10**9)])
    twins.bring(log.write(tmp_path / "log"))
    assert read(twins.local, columns="timestamp") == [((2**63 - 1) // 1000 * 1000,), (-(10**12),)]


@pytest.mark.parametrize("parameters", ["keep", "drop"])
@pytest.mark.parametrize("name", names("clients"))
def test_what_real_clients_wrote(name: str, parameters: str, tmp_path: Path, golden: Path) -> None:
    case = client_rounds(golden / name, parameters, tmp_path)[0]
    twins = Twins(tmp_path / "twins")
    try:
        twins.bring(case.log_dir)
    except BadData as error:
        pytest.skip(f"import refuses it: {error.cause}")
    rows = read(twins.local, splitBytes=20_000)
    assert [_whole(row) for row in plain(rows)] == [_whole(row) for row in visible(case.log_dir)]


def _whole(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Header names as Kafka's reader shows them, times as far as Spark can count."""
    offset, millis, key, value, headers = row
    return (offset, min(millis, LATEST_MS), key, value, tuple((name.decode("utf-8", "replace"), content) for name, content in headers))


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("clients", tmp_path_factory.mktemp("golden"))


# ---- ranges -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def numbered(twins: Twins, tmp_path: Path) -> Tier:
    """Five segments of ten offsets; a record's time is its offset, in seconds, but 17 and 18 are late and early."""
    log = LogBuilder()
    for base in range(0, 50, 10):
        for offset in range(base, base + 10, 2):
            times = [{17: 30_000, 18: 1_000}.get(number, number * 1000) for number in (offset, offset + 1)]
            log.put(f"k{offset % 7}={offset}", f"k{offset % 7}={offset + 1}", times=times)
        log.roll()
    twins.bring(log.write(tmp_path / "log", indexes=True, index_interval_bytes=50))
    return twins.local


def without(tier: Tier, *numbers: int) -> None:
    """Takes away log objects: who reads them notices."""
    live = state_of(tier).live
    tier.ports.data.delete([object_key(NAME, live[number]) for number in numbers])


def test_offset_options(numbered: Tier) -> None:
    without(numbered, 0, 4)
    assert offsets(read(numbered, startingOffset=13, endingOffset=37)) == list(range(13, 37))
    assert offsets(read(numbered, starting_offset=25, ENDINGOFFSET=26)) == [25]
    assert read(numbered, startingOffset=30, endingOffset=30) == []
    assert read(numbered, startingOffset=1000) == []


def test_time_options_are_offsets_as_in_sparks_kafka_source(numbered: Tier) -> None:
    without(numbered, 0, 4)
    # The first record that is 25 s old or younger is 17, which came late.
    assert offsets(read(numbered, startingTimestamp=25_000, endingTimestamp=36_500)) == list(range(17, 37))
    assert offsets(read(numbered, startingTimestamp=30_001, endingTimestamp=32_000)) == [31]
    assert read(numbered, startingTimestamp=10**9) == []
    assert offsets(read(numbered, startingOffset=36, endingTimestamp=38_999)) == [36, 37, 38]


def test_records_below_the_log_start_are_not_read_also_inside_a_batch(numbered: Tier) -> None:
    newest = {f"k{offset // 2 * 2 % 7}": offset for offset in range(50)}
    stream: Any = KafkaTieredSource({"url": numbered.settings.tier_url, "topic": "orders"}).streamReader(struct(offset="bigint"))
    before = {"orders-0": 3}  # a stream that had read up to here
    for start in (15, 45, 50):
        delete_records(numbered, NAME, start)
        left = list(range(start, 50))
        for options in ({}, {"startingOffset": 13}, {"startingTimestamp": 0}, {"isolation": "read_uncommitted"}):
            assert offsets(read(numbered, **options)) == left
        assert read(numbered, startingOffset=3, endingOffset=15) == []
        assert offsets(read(numbered, view="latest")) == sorted(offset for offset in newest.values() if offset >= start)
        rows = [row for split in stream.partitions(before, stream.latestOffset()) for part in stream.read(split) for row in part["offset"]]
        assert [row.as_py() for row in rows] == left


def test_splits_cover_each_offset_once(numbered: Tier) -> None:
    live = state_of(numbered).live
    size = max(segment.size_bytes for segment in live)
    request = request_of(numbered, topic="orders", splitBytes=size // 3)
    splits = [part.extent for split in plan_splits(numbered, request) if isinstance(split, ReadSplit) for part in split.parts]
    assert len(splits) >= 10
    assert [number for extent in splits for number in range(extent.first, extent.last + 1)] == list(range(50))
    together = plan_splits(numbered, request_of(numbered, topic="orders", splitBytes=2 * size))
    assert len(together) == 3
    assert offsets(read(numbered, splitBytes=size // 3)) == list(range(50))


@pytest.fixture
def fetched(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Each read of a store: the kind of file, the position and the number of bytes."""
    asked: list[tuple[str, int, int]] = []
    store = type(twins.local.ports.data)
    get = store.get

    def watched(self: Any, key: str, start: int = 0, length: int | None = None) -> bytes:
        data: bytes = get(self, key, start, length)
        asked.append((key.rpartition(".")[2], start, len(data)))
        return data

    monkeypatch.setattr(store, "get", watched)
    return asked


def test_a_split_inside_a_segment_is_found_by_the_index(numbered: Tier, fetched: list[tuple[str, int, int]]) -> None:
    assert offsets(read(numbered, startingOffset=27, endingOffset=29)) == [27, 28]
    logs = [start for kind, start, _ in fetched if kind == "log"]
    assert len(logs) == 1
    assert logs[0] > 0


@pytest.fixture
def wide(twins: Twins, tmp_path: Path) -> Tier:
    """One segment of 6 MB: 600 records of 10 kB, one second after the other, each a batch of its own."""
    log, dice = LogBuilder(), random.Random(1)
    for offset in range(600):
        log.put(b"k%d=" % offset + dice.randbytes(10_000), times=[offset * 1000])
    twins.bring(log.write(tmp_path / "log", indexes=True))
    return twins.local


@pytest.mark.parametrize("options", [{"endingOffset": 220}, {"endingTimestamp": 220_000}, {"startingOffset": 100, "endingOffset": 320}])
def test_bytes_after_a_range_are_not_read(wide: Tier, fetched: list[tuple[str, int, int]], options: dict[str, Any]) -> None:
    first, last = options.get("startingOffset", 0), options.get("endingOffset", 220)
    assert offsets(read(wide, **options)) == list(range(first, last))
    of_log = sum(size for kind, _, size in fetched if kind == "log")
    lookup = FIRST_PIECE_BYTES if "endingTimestamp" in options else 0
    assert of_log - lookup < 2_300_000, "220 records of 10 kB, and at most a few next to them"


def test_a_range_without_its_index_is_read(wide: Tier) -> None:
    wide.ports.data.delete([object_key(NAME, state_of(wide).live[0], "index")])
    assert offsets(read(wide, endingOffset=220)) == list(range(220))


def test_a_limit_reads_the_first_megabyte(wide: Tier, fetched: list[tuple[str, int, int]]) -> None:
    """Spark pulls no further batch once it has enough rows."""
    (split,) = plan_splits(wide, request_of(wide, topic="orders"))
    assert isinstance(split, ReadSplit)
    selections = OffsetRangeReader(wide, split.parts[0].extent, split.parts[0].options).read_selected_records()
    assert len(next(selections).picked) > 90
    assert sum(size for kind, _, size in fetched if kind == "log") == FIRST_PIECE_BYTES


def test_a_damaged_index_only_costs_time(numbered: Tier) -> None:
    segment = state_of(numbered).live[2]
    store = numbered.ports.data
    key = object_key(NAME, segment, "index")
    store.delete([key])
    store.create(key, b"\x00\x00\x00\x09\x00\x00\x00\x00" * 3 + b"\x01")
    assert offsets(read(numbered, startingOffset=27, endingOffset=29)) == [27, 28]
    assert offsets(read(numbered, view="latest", startingOffset=20, endingOffset=30))[-1] == 29


# ---- the latest view --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_latest_view(seed: int, twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = log_of(seed + 20, segments=7).write(tmp_path / "log")
    twins.bring(folder)
    truth = latest(folder)
    for ranges, key_bytes in ((0, 20), (1, 20), (3, 20), (0, 10**9)):
        monkeypatch.setattr(datasource, "KEY_BYTES", key_bytes)
        rows = read(twins.local, view="latest", keyRanges=ranges or "")
        assert len(rows) == len(truth)
        assert {row[0]: row[1] for row in rows} == truth


@pytest.mark.parametrize(("ranges", "times"), [(1, 1), (8, 2), (32, 2)])
def test_values_are_read_once_whatever_the_number_of_ranges(
    ranges: int, times: int, numbered: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the keys do not fit the memory, their hashes once before: twice the segments are fetched, not once for each range."""
    records = sum(segment.records for segment in state_of(numbered).live)
    monkeypatch.setattr(datasource, "KEY_BYTES", ranges * numbered.settings.cleaner.map_budget_bytes // records)
    monkeypatch.setattr(disk_map, "CACHE_BYTES", max(1, records * KEY_BYTES // ranges))
    looked_at: set[int] = set()
    answer = disk_map.DiskOffsetMap._mark_range_survivors

    def told(self: Any, bucket: int, *arguments: Any) -> None:
        looked_at.add(bucket)
        answer(self, bucket, *arguments)

    monkeypatch.setattr(disk_map.DiskOffsetMap, "_mark_range_survivors", told)
    fetched: list[int] = []
    get = type(numbered.ports.data).get

    def watched(self: Any, key: str, *arguments: Any, **more: Any) -> bytes:
        data = get(self, key, *arguments, **more)
        fetched.append(len(data) if key.endswith(".log") else 0)
        return data

    monkeypatch.setattr(type(numbered.ports.data), "get", watched)
    assert len(read(numbered, view="latest")) == 7
    assert sum(fetched) == times * sum(segment.size_bytes for segment in state_of(numbered).live)
    assert len(looked_at) >= ranges - 1, "of one range in memory none"


def test_the_latest_view_of_a_range_is_that_of_its_end(numbered: Tier) -> None:
    assert offsets(read(numbered, view="latest", endingOffset=20)) == [7, 9, 11, 13, 15, 17, 19]
    assert offsets(read(numbered, view="latest", startingOffset=14, endingOffset=20)) == [15, 17, 19]


def test_more_keys_than_a_task_may_hold(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "[cleaner]\nmap_budget_bytes = 65536")
    log = LogBuilder()
    for base in range(0, 6000, 500):
        log.put(*[f"key-{number}=1" for number in range(base, base + 500)])
    twins.bring(log.write(tmp_path / "log"))
    splits = plan_splits(twins.local, request_of(twins.local, topic="orders", view="latest"))
    assert [part.options.last_records_only.spill.records for split in splits for part in split.parts] == [6000]  # type: ignore[attr-defined]
    assert len(read(twins.local, view="latest")) == 6000
    with pytest.raises(OutOfBudget, match="keyRanges"):
        read(twins.local, view="latest", keyRanges=1)


# ---- what goes while it is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["all", "latest"])
def test_readers_fold_again_where_an_object_has_gone(view: str, tmp_path: Path) -> None:
    twins = Twins(tmp_path, "[cleaner]\nsegment_bytes = 700")
    folder = log_of(31).write(tmp_path / "log")
    twins.bring(folder)
    tier = twins.local
    splits = plan_splits(tier, request_of(tier, topic="orders", view=view, splitBytes=500))
    before = visible(folder)
    assert compact(tier, NAME, NOW_MS, force=True).status == "cleaned"
    retire_partition(
        tier.ports,
        tier.open_partition_log(NAME),
        tier.lease,
        ObjectRetention(grace_ms=0),
        clock=GraceClock(NOW_MS * 2, forced=True),
    )
    rows = [row for split in splits for row in read_split(tier, split, arrow())]
    if view == "latest":
        assert {row[0]: row[1] for row in rows} == latest(folder)
    else:
        after = plain(sorted(rows, key=lambda row: row[5]))
        assert after == plain(read(tier))
        assert set(after) < set(before)


def test_an_object_that_is_missing_for_good_is_named(numbered: Tier) -> None:
    segment = state_of(numbered).live[3]
    without(numbered, 3)
    with pytest.raises(BadData, match=f"{segment.id}.*: a live segment is missing in the store"):
        read(numbered)


@pytest.mark.parametrize("lost", [slice(1, 2), slice(-1, None), slice(None)], ids=["in the middle", "the last", "all"])
@pytest.mark.parametrize("view", ["all", "latest"])
def test_a_control_log_that_has_lost_a_record_is_no_older_view(lost: slice, view: str, twins: Twins, tmp_path: Path) -> None:
    """The tier-wide log has seen more of it: neither fewer rows nor those of before a round, but an error."""
    tier = twins.local
    twins.bring(log_of(7).write(tmp_path / "log"))
    assert compact(tier, NAME, NOW_MS, force=True).status == "cleaned"
    log = tier.open_partition_log(NAME)
    log.refresh()
    tier.identity.read_catalog()
    tier.change_notifier.announce_changed_control_logs([log])
    keys = sorted(info.key for info in tier.ports.control.list(f"{log.prefix}/log/"))
    read(open_tier(tier.settings), view=view)
    tier.ports.control.delete(keys[lost])
    with pytest.raises(BadData, match=f"has seen its slot {len(keys)}: the records between are missing"):
        read(open_tier(tier.settings), view=view)


def test_damage_is_located(numbered: Tier) -> None:
    segment = state_of(numbered).live[2]
    store, key = numbered.ports.data, object_key(NAME, segment)
    data = bytearray(store.get(key))
    data[-3] ^= 1
    store.delete([key])
    store.create(key, bytes(data))
    with pytest.raises(BadData, match=f"{segment.id}.*offset 28: the CRC") as caught:
        read(numbered, startingOffset=27)
    assert caught.value.position > 0


# ---- options ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topik": "a"}, "no option 'topik'. Did you mean topic?"),
        ({"topic": ""}, "needs the option topic"),
        ({"topic": "no/topic"}, "is not a topic name"),
        ({"topic": "a", "startingOffset": "-1"}, "startingOffset = '-1' is not a whole number"),
        ({"topic": "a", "isolation": "dirty"}, "allowed is read_committed or read_uncommitted"),
        ({"topic": "a", "view": "newest"}, "allowed is all or latest"),
        ({"topic": "a", "columns": "offset,valu"}, "no column 'valu'"),
        ({"topic": "a", "partitions": "1,x"}, "write numbers with commas"),
        ({"topic": "a", "splitBytes": "0"}, "splitBytes = '0' is not a whole number from 1"),
        ({"topic": "a", "url": "ftp://x"}, "write file:///var/lib/tier"),
        ({"topic": "a", "layout": "strange"}, '= "strange": allowed is "native"'),
        ({"topic": "a", "controlurll": "x"}, "Did you mean controlUrl?"),
        ({"topic": "a", "kafka.bootstrap.servers": "b:1"}, "It asks no broker: leave it out"),
        ({"topic": "a", "path": "/srv/tier"}, "takes no path"),
        ({"topic": "a", "subscribe": "b"}, "topic and subscribe both select topics"),
        ({"subscribePattern": "a("}, "is not a valid regular expression"),
        ({"assign": '{"a": 1}'}, "has no list of partitions"),
        ({"assign": "a"}, "is not a JSON object with topics"),
        ({"topic": "a", "startingOffsets": "latest"}, "leaves nothing to read"),
        ({"topic": "a", "startingOffsets": '{"a": {"0": -1}}'}, "has no offsets by partition"),
        ({"topic": "a", "endingOffsets": '{"a": 5}'}, "has no offsets by partition"),
        ({"topic": "a", "endingOffset": "5", "endingOffsets": '{"a": {"0": 5}}'}, "both select a range"),
    ],
)
def test_options_that_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_read_options({"url": "file:///srv/tier", **options})
    assert message in str(caught.value)


def test_options_of_sparks_own_kafka_source(numbered: Tier, tmp_path: Path) -> None:
    import_directory(
        numbered, log_of(3, 2).write(tmp_path / "other"), TopicPartition("other", 2), numbered.settings.cleaner.cleaner_policy()
    )
    both = {(row[3], row[4]) for row in read(numbered, topic="", subscribe="orders, other")}
    assert both == {("orders", 0), ("other", 2)}
    assert {row[3] for row in read(numbered, topic="", subscribePattern="oth.*")} == {"other"}
    assert {row[3] for row in read(numbered, topic="", assign='{"orders": [0]}')} == {"orders"}
    starting, ending = '{"orders": {"0": 13}}', '{"orders": {"0": 37}}'
    assert offsets(read(numbered, startingOffsets=starting, endingOffsets=ending)) == list(range(13, 37))
    assert offsets(read(numbered, startingOffsets='{"orders": {"0": -2}}', endingOffsets='{"orders": {"0": -1}}')) == list(range(50))
    assert offsets(read(numbered, startingOffsets="earliest", endingOffsets="latest")) == list(range(50))
    assert "headers" not in parse_read_options({"url": "file:///srv/tier", "topic": "a", "includeHeaders": "false"}).columns
    assert len(plan_splits(numbered, request_of(numbered, topic="", subscribePattern=".*"))) == 1, "small partitions share a task"


def test_a_table_keeps_its_options_in_its_columns(numbered: Tier) -> None:
    said = {"url": numbered.settings.tier_url, "topic": "orders", "columns": "offset"}
    spark = {"provider": "kafka-tiered", "path": "file:/warehouse/t", "owner": "me", "option.topic": "orders"}
    schema: Any = KafkaTieredSource({**said, **spark}).schema()
    assert [field.name for field in schema.fields] == ["offset"]
    reader = KafkaTieredSource({}).reader(StructType.fromJson(schema.jsonValue()))
    assert len([split for split in reader.partitions() if isinstance(split, ReadSplit)]) == 1
    with pytest.raises(UsageError, match="Spark does not tell the options of this table"):
        KafkaTieredSource({}).reader(struct(offset="bigint"))


def test_a_stream_goes_on_where_the_tier_ended(numbered: Tier, tmp_path: Path) -> None:
    options = {"url": numbered.settings.tier_url, "topic": "orders"}
    schema = struct(**{name: COLUMN_TYPES[name] for name in MESSAGE_COLUMNS})
    stream: Any = KafkaTieredSource(options).streamReader(schema)

    def batch(start: Any, end: Any) -> list[int]:
        return sorted(row for split in stream.partitions(start, end) for part in stream.read(split) for row in part["offset"].to_pylist())

    first = stream.latestOffset()
    assert first == {"orders-0": 50, "history": {"orders-0": [0, TOPIC_ID]}}
    assert batch(stream.initialOffset(), first) == list(range(50))
    log = LogBuilder(next_offset=50)
    log.put("k=1", "k=2")
    import_directory(numbered, log.write(tmp_path / "more"), NAME, numbered.settings.cleaner.cleaner_policy())
    then = stream.latestOffset()
    assert batch(first, then) == list(range(50, then["orders-0"]))
    assert batch(then, then) == []
    for refused in ({"view": "latest"}, {"endingOffset": "7"}):
        with pytest.raises(UsageError, match=r"is for spark.read, not for readStream"):
            KafkaTieredSource({**options, **refused}).streamReader(schema)


def test_a_configuration_file_and_options_over_it(tmp_path: Path) -> None:
    file = tmp_path / "tier.toml"
    file.write_text('[tier]\nurl = "file:///srv/one"\n[s3]\nregion = "eu-north-1"\n')
    request = parse_read_options(
        {"config": str(file), "topic": "orders", "control_url": "file:///srv/control", "endpointUrl": "http://127.0.0.1:1"}
    )
    assert (request.settings.tier.url, request.settings.tier.control_url) == ("file:///srv/one", "file:///srv/control")
    assert (request.settings.s3.region, request.settings.s3.endpoint_url) == ("eu-north-1", "http://127.0.0.1:1")


def test_what_the_tier_does_not_hold(numbered: Tier) -> None:
    with pytest.raises(UsageError, match="holds no topic others"):
        read(numbered, topic="others")
    with pytest.raises(UsageError, match="orders has no partition 4"):
        read(numbered, partitions="0,4")


def test_a_schema_chooses_columns_and_changes_no_types() -> None:
    require_supported_schema(struct(offset="bigint", headers=COLUMN_TYPES["headers"]))
    with pytest.raises(UsageError, match="column value is binary"):
        require_supported_schema(struct(value="string"))
    with pytest.raises(UsageError, match="no column 'size'"):
        require_supported_schema(struct(size="int"))


def test_columns_that_were_not_asked_for_are_not_gathered(numbered: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    from compactor.read import columns

    def refused(*_: object) -> Any:
        raise AssertionError("a value was copied")

    monkeypatch.setattr(columns, "to_arrow_binary_column", refused)
    assert read(numbered, columns="offset,timestampType") == [(offset, 0) for offset in range(50)]


def test_names_of_columns() -> None:
    assert tuple(COLUMN_TYPES) == MESSAGE_COLUMNS
    sizes: Sequence[int] = np.diff([MESSAGE_COLUMNS.index(name) for name in ("key", "value", "headers")]).tolist()
    assert list(sizes) == [1, 1]
