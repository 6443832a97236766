"""What clients of the endpoint read: the records that a consumer of the log sees, whatever rounds and damage do meanwhile."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from compactor.access.tier import Tier
from compactor.features.serve import pieces
from compactor.features.serve.endpoint import Endpoint
from compactor.features.serve.protocol import ErrorCode
from compactor.storage.wrappers import ForwardingStore
from tests.builders import GZIP, LZ4, NONE, ZSTD, LogBuilder, log_of
from tests.plain_format import Batch, read_batches
from tests.support.endpoint import Client, RecordTuple, served, shown_by_java
from tests.support.tier_cli import TierCli, batches_of, visible

TOPIC = "orders"
SETTINGS = {"publish": {"grace_ms": 0}, "cleaner": {"segment_bytes": 400, "delete_retention_ms": 0}}


@pytest.fixture
def endpoint(cli: TierCli) -> Iterator[Endpoint]:
    with served(cli.config) as running:
        yield running


def committed_records(folder: Path) -> list[RecordTuple]:
    return [(offset, key, value) for offset, _, key, value, _ in visible(folder)]


def all_records(folder: Path) -> list[RecordTuple]:
    return [(one.offset, one.key, one.value) for batch in batches_of(folder) if not batch.control for one in batch.records]


def log_of_transactions(seed: int, batches: int = 60) -> LogBuilder:
    """Producers whose transactions overlap, are committed, aborted or left open, in segments of a few batches."""
    draw, log, opened = random.Random(seed), LogBuilder(), set[int]()
    for number in range(batches):
        pid = draw.randrange(4)
        choice = draw.random()
        if choice < 0.35 and pid in opened:
            log.end(pid, commit=draw.random() < 0.5)
            opened.discard(pid)
        elif choice < 0.8:
            log.put(*(f"k{draw.randrange(9)}={number}" for _ in range(draw.randint(1, 3))), pid=pid, txn=True)
            opened.add(pid)
        else:
            log.put(f"k{draw.randrange(9)}={number}", codec=draw.choice((NONE, GZIP, LZ4, ZSTD)))
        if draw.random() < 0.15:
            log.roll()
    for pid in sorted(opened)[1:] if draw.random() < 0.5 else sorted(opened):
        log.end(pid, commit=draw.random() < 0.5)
    return log


@pytest.mark.parametrize("seed", range(8))
def test_every_client_sees_the_log_whatever_its_fetches_cut(
    tmp_path: Path, cli: TierCli, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 300)
    log = log_of_transactions(seed).write(tmp_path / "log", indexes=True, index_interval_bytes=100)
    cli.bring(log)
    for path in cli.tier.rglob("*.txnindex"):
        path.write_bytes(b"")  # brokers lose entries; the control records stay
    with served(cli.config) as endpoint, Client(endpoint) as client:
        for max_bytes in (1, 500, 1 << 20):
            assert client.read_all(TOPIC, committed=False, max_bytes=max_bytes) == all_records(log)
            for is_librdkafka in (False, True):
                shown = client.read_all(TOPIC, committed=True, max_bytes=max_bytes, is_librdkafka=is_librdkafka)
                assert shown == committed_records(log), (max_bytes, is_librdkafka)
    assert endpoint.reader.damaged == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_round_and_its_deletion_between_two_fetches_lose_and_repeat_nothing(tmp_path: Path, cli: TierCli, seed: int) -> None:
    log = log_of_transactions(seed, 120).write(tmp_path / "log")
    cli.bring(log)
    with served(cli.config) as endpoint, Client(endpoint) as client:
        offset, seen = 0, list[int]()
        end = client.offset(TOPIC, -1, committed=True).offset
        last_of_key: dict[bytes | None, tuple[int, bytes | None]] = {}
        while offset < end:
            row = client.fetch(TOPIC, offset, max_bytes=1)
            assert row.error_code == 0
            batches = list(read_batches(bytes(row.records)))
            aborted = [(one.producer_id, one.first_offset) for one in row.aborted_transactions or ()]
            for batch in shown_by_java(batches, aborted):
                for record in batch.records:
                    if record.offset >= offset:
                        seen.append(record.offset)
                        last_of_key[record.key] = (record.offset, record.value)
            offset = batches[-1].last_offset + 1
            if len(seen) % 7 == 0:
                cli.do("run", "--force")
                cli.do("retire")
        assert seen == sorted(set(seen))
    expected = {key: (found, value) for found, key, value in committed_records(log)}
    assert last_of_key == expected


def test_records_that_are_replaced_while_nobody_refreshes_are_found_in_their_new_segment(tmp_path: Path, cli: TierCli) -> None:
    log = LogBuilder()
    for number in range(6):
        log.put_segment(f"a={number}", f"b{number}=1")
    folder = log.write(tmp_path / "log")
    cli.bring(folder)
    cli.set(serve={"refresh_ms": 600_000, "cache_bytes": 1 << 20, "read_ahead": 0})
    with served(cli.config) as endpoint, Client(endpoint) as client:
        assert client.fetch(TOPIC, 0, max_bytes=1).error_code == 0
        cli.do("run", "--force")
        cli.do("retire")
        keys = [key for _, key, _ in client.read_all(TOPIC, committed=True) if key != b"a"]
        assert keys == [b"b0", b"b1", b"b2", b"b3", b"b4", b"b5"]
        assert endpoint.reader.replaced


def test_a_damaged_batch_is_kafkas_corrupt_record_and_the_others_are_read(tmp_path: Path, cli: TierCli) -> None:
    log = LogBuilder()
    for number in range(5):
        log.put(f"k{number}={number}")
    cli.bring(log.write(tmp_path / "log"))
    (path,) = cli.tier.rglob("*.log")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in the body of the third batch
    path.write_bytes(data)
    with served(cli.config) as endpoint, Client(endpoint) as client:
        first = client.fetch(TOPIC, 0)
        assert [batch.last_offset for batch in read(first)] == [0, 1]
        damaged = client.fetch(TOPIC, 2)
        assert (damaged.error_code, bytes(damaged.records or b"")) == (ErrorCode.CORRUPT_MESSAGE, b"")
        assert [batch.last_offset for batch in read(client.fetch(TOPIC, 3))] == [3, 4]
        assert endpoint.reader.damaged == 1
    for made in cli.tier.rglob("*.log"):
        made.write_bytes(b"".join(one.raw for one in batches_of(tmp_path / "log")))


def read(row: Any) -> list[Batch]:
    return list(read_batches(bytes(row.records)))


def test_a_lying_offset_index_costs_a_scan_and_no_record(tmp_path: Path, cli: TierCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 200)
    folder = log_of_transactions(3).write(tmp_path / "log", indexes=True, index_interval_bytes=100)
    cli.bring(folder)
    kept = {path: path.read_bytes() for path in cli.tier.rglob("*.index")}
    for path, data in kept.items():
        wrong = bytearray(data)
        wrong[7::8] = bytes((byte + 3) % 256 for byte in wrong[7::8])
        path.write_bytes(wrong)
    with served(cli.config) as endpoint, Client(endpoint) as client:
        assert client.read_all(TOPIC, committed=True, max_bytes=100) == committed_records(folder)
    for path, data in kept.items():
        path.write_bytes(data)


def test_the_last_stable_offset_ends_committed_reads(tmp_path: Path, cli: TierCli) -> None:
    log = log_of("a=1; 7t: b=1; c=1")
    cli.bring(log.write(tmp_path / "log"))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        row = client.fetch(TOPIC, 0, committed=True)
        assert (row.high_watermark, row.last_stable_offset, row.log_start_offset) == (3, 1, 0)
        assert [key for _, key, _ in client.read_all(TOPIC, committed=True)] == [b"a"]
        assert [key for _, key, _ in client.read_all(TOPIC, committed=False)] == [b"a", b"b", b"c"]
        log.commit(7)
        cli.bring(log.write(tmp_path / "log"))
        assert [key for _, key, _ in client.read_all(TOPIC, committed=True)] == [b"a", b"b", b"c"]


def test_offsets_outside_the_log_are_out_of_range_and_its_end_is_waited_at(tmp_path: Path, cli: TierCli) -> None:
    log = log_of("a=1; b=1; /")
    cli.bring(log.write(tmp_path / "log"))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        assert client.fetch(TOPIC, 3).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        end = client.fetch(TOPIC, 2, wait_ms=50)
        assert (end.error_code, bytes(end.records or b"")) == (0, b"")
        cli.do("topics", "delete-records", "orders-0", "--before", "1")
        assert client.fetch(TOPIC, 0).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        assert client.offset(TOPIC, -2).offset == 1
        assert client.fetch(TOPIC, 1).error_code == 0
        assert client.fetch("unknown", 0).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert client.fetch(TOPIC, 0, partition=5).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_topic_ids_are_those_of_the_topic_that_has_the_name_now(tmp_path: Path, cli: TierCli) -> None:
    log = log_of("a=1")
    cli.bring(log.write(tmp_path / "log"))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        topic_id = client.metadata(TOPIC).topics[0].topic_id
        assert topic_id is not None
        assert client.fetch("", 0, version=17, topic_id=topic_id).error_code == 0
        assert client.fetch("", 0, version=17, topic_id=uuid.UUID(int=9)).error_code == ErrorCode.UNKNOWN_TOPIC_ID
        again = LogBuilder(topic_id="AAAAAAAAAAAAAAAAAAAAAQ").add("z=1")
        cli.do("import", again.write(tmp_path / "again"), "--topic", TOPIC, "--partition", "0", "--new-incarnation")
        assert client.fetch("", 0, version=17, topic_id=topic_id).error_code == ErrorCode.UNKNOWN_TOPIC_ID
        assert [key for _, key, _ in client.read_all(TOPIC, committed=True)] == [b"z"]
        assert client.metadata(TOPIC).topics[0].topic_id == uuid.UUID(int=1)


class CountingStore(ForwardingStore):
    """Counts reads of log files."""

    reads = 0

    @override
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key.endswith(".log"):
            CountingStore.reads += 1
        return super().get(key, start, length)


def test_pieces_are_read_once_in_memory_or_on_disk(tmp_path: Path, cli: TierCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 200)
    folder = log_of_transactions(5, 200).write(tmp_path / "log", indexes=True, index_interval_bytes=100)
    cli.bring(folder)
    cli.set(serve={"cache_bytes": 1 << 20, "disk_cache_bytes": 1 << 24})

    def counted(tier: Tier) -> Tier:
        CountingStore.reads = 0
        return tier.with_stores(data=CountingStore(tier.ports.data))

    with served(cli.config, counted) as endpoint, Client(endpoint) as client:
        for _ in range(2):
            assert client.read_all(TOPIC, committed=True) == committed_records(folder)
        once = CountingStore.reads
        assert endpoint.cache.counts.store <= once
        assert endpoint.cache.counts.memory
    with served(cli.config, counted) as endpoint, Client(endpoint) as client:
        endpoint.cache._budget = 1  # each piece makes room for the next
        for _ in range(2):
            assert client.read_all(TOPIC, committed=True) == committed_records(folder)
        assert endpoint.cache.counts.disk
        assert CountingStore.reads < 2 * once
