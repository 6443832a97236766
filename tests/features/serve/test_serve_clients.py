"""Every family of Kafka's clients reads the records that the log holds: by `assign`, in both isolations, whatever rounds do meanwhile."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from confluent_kafka import Consumer, TopicPartition as At
from typing_extensions import override

from compactor.errors import StoreError
from compactor.model.ids import TopicPartition
from compactor.storage.wrappers import ForwardingStore
from tests.builders import LogBuilder
from tests.features.serve.test_serve_fetch import TOPIC, all_records, committed_records, log_of_transactions
from tests.support.bucket_cli import BucketCli
from tests.support.cloud_servers import AnyBucket
from tests.support.endpoint import RecordTuple, served
from tests.support.endpoint_clients import Family
from tests.support.kafka_traffic import SILENT
from tests.support.servers import ON_ALL_BUCKETS
from tests.support.streams_table import GlobalTable
from tests.support.tier_cli import TierCli
from tests.support.waiting import wait_for

T = TypeVar("T")
FAMILIES = ("librdkafka", "Java", "Java 3.8.1", "kafka-python", "aiokafka", "franz-go")
SETTINGS: dict[str, dict[str, Any]] = {"publish": {"grace_ms": 0}, "cleaner": {"segment_bytes": 400, "delete_retention_ms": 0}}


def both(family: Family, log: Path) -> None:
    """Compare what a client reads with what a log directory holds."""
    assert family.read(TOPIC, committed=True) == committed_records(log)
    assert family.read(TOPIC, committed=False) == all_records(log)


@pytest.mark.parametrize("name", FAMILIES)
def test_clients_read_an_import_its_rounds_their_retirement_and_their_undo(tmp_path: Path, name: str) -> None:
    cli = TierCli(tmp_path / "cli", SETTINGS)
    log = log_of_transactions(11, 150).write(tmp_path / "log", indexes=True, index_interval_bytes=100)
    cli.bring(log)
    indexes = {path: path.read_bytes() for path in cli.tier.rglob("*.txnindex")}
    with served(cli.config) as endpoint, Family(name, endpoint.address) as family:
        for path in indexes:
            path.write_bytes(b"")  # brokers lose entries; the control records stay
        both(family, log)
        for path, data in indexes.items():
            path.write_bytes(data)
        cli.run()
        run = endpoint.tier.open_partition_log(TopicPartition(TOPIC, 0)).refresh().published[-1]
        compacted = cli.export(tmp_path / "compacted")
        both(family, compacted)
        cli.do("undo", run)
        both(family, log)
        cli.run()
        cli.do("retire")
        both(family, compacted)
    assert endpoint.reader.damaged == 0
    assert not endpoint.state.invalid_frames


@ON_ALL_BUCKETS
def test_clients_read_a_bucket(tmp_path: Path, new_bucket: AnyBucket) -> None:
    cli = BucketCli(tmp_path / "cli", new_bucket, "", **SETTINGS)
    log = log_of_transactions(12).write(tmp_path / "log", indexes=True, index_interval_bytes=100)
    cli.bring(log)
    with served(cli.config) as endpoint, Family("librdkafka", endpoint.address) as family:
        both(family, log)
        cli.run()
        cli.do("retire")
        both(family, cli.export(tmp_path / "compacted"))


@pytest.mark.parametrize("name", FAMILIES)
def test_clients_stop_before_an_open_transaction_and_begin_at_a_raised_log_start(tmp_path: Path, name: str) -> None:
    cli = TierCli(tmp_path / "cli", SETTINGS)
    log = LogBuilder()
    for number in range(6):
        log.put(f"k{number}=1", f"l{number}=1")
    log.add("7t: open=1; after=1")
    folder = log.write(tmp_path / "log")
    cli.bring(folder)
    cli.do("topics", "delete-records", "orders-0", "--before", "3")
    with served(cli.config) as endpoint, Family(name, endpoint.address) as family:
        committed, every = family.read(TOPIC, committed=True), family.read(TOPIC, committed=False)
    assert committed == [one for one in all_records(folder) if 3 <= one[0] < 12]
    assert every == [one for one in all_records(folder) if one[0] >= 3]


def last_values(records: list[RecordTuple]) -> dict[bytes, bytes]:
    """What a table of these records holds: records without a key are skipped, a tombstone removes its key."""
    table: dict[bytes, bytes] = {}
    for _, key, value in records:
        if key is not None:
            table.pop(key, None)
            if value is not None:
                table[key] = value
    return table


@pytest.mark.parametrize("committed", [True, False])
def test_a_global_table_of_kafka_streams_is_restored_and_follows_the_tier(tmp_path: Path, committed: bool) -> None:
    cli = TierCli(tmp_path / "cli", SETTINGS)
    log = log_of_transactions(15, 150)
    cli.bring(log.write(tmp_path / "log", indexes=True, index_interval_bytes=100))
    read = committed_records if committed else all_records

    with served(cli.config) as endpoint:

        def table(name: str) -> GlobalTable:
            return GlobalTable(tmp_path / name, TOPIC, cluster=endpoint.address, records=endpoint.address, committed=committed)

        with table("first") as running:
            assert running.entries() == last_values(read(tmp_path / "log"))
            cli.run()
            cli.do("retire")
            log.put("new=1", "k1=2")
            log.put("k2")
            cli.bring(log.write(tmp_path / "log", indexes=True, index_interval_bytes=100))
            expected = last_values(read(tmp_path / "log"))
            wait_for(lambda: running.entries() == expected)
        with table("compacted") as running:
            assert running.entries() == expected
    assert endpoint.reader.damaged == 0


def reader(address: str, fetch_bytes: int) -> Consumer:
    """A consumer of librdkafka that takes little at once, so that much can happen while it reads."""
    return Consumer(
        {
            "bootstrap.servers": address, "group.id": "none", "enable.auto.commit": False, "auto.offset.reset": "error",
            "fetch.message.max.bytes": fetch_bytes, "queued.min.messages": 1, "reconnect.backoff.max.ms": 500,
            "fetch.error.backoff.ms": 50, "fetch.queue.backoff.ms": 1, "error_cb": lambda error: None,
        },
        logger=SILENT,
    )  # fmt: skip


def read_with_events(consumer: Consumer, count: int, events: dict[int, Callable[[], None]]) -> list[RecordTuple]:
    """Read a number of records from the beginning. events: what happens after so many of them."""
    consumer.assign([At(TOPIC, 0, 0)])
    found = list[RecordTuple]()

    def more() -> bool:
        for message in consumer.consume(1, 0.2):
            if not message.error():
                offset = message.offset()
                assert offset is not None
                found.append((offset, message.key(), message.value()))
                events.get(len(found), lambda: None)()
        return len(found) >= count

    try:
        wait_for_quickly(more)
    finally:
        consumer.close()
    return found


def wait_for_quickly(more: Callable[[], bool]) -> None:
    wait_for(lambda: any(more() for _ in range(50)))


class Moody(ForwardingStore):
    """A store that does not answer while ``is_away``."""

    is_away = threading.Event()

    @override
    def _forward_read_request(self, key: str, request: Callable[[], T]) -> T:
        if self.is_away.is_set():
            raise StoreError(f"{key}: the store does not answer")
        return super()._forward_read_request(key, request)


def test_clients_go_on_where_they_were_when_a_store_answers_again(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli", SETTINGS | {"serve": {"cache_bytes": 1 << 20, "read_ahead": 0}})
    log = log_of_transactions(13, 120).write(tmp_path / "log")
    cli.bring(log)
    expected = committed_records(log)
    Moody.is_away.clear()
    with served(cli.config, lambda tier: tier.with_stores(data=Moody(tier.ports.data), control=Moody(tier.ports.control))) as endpoint:

        def leave() -> None:
            endpoint.cache._pieces.clear()
            Moody.is_away.set()
            threading.Timer(1.0, Moody.is_away.clear).start()

        assert read_with_events(reader(endpoint.address, 200), len(expected), {10: leave, 40: leave}) == expected


@contextmanager
def process(config: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, once it serves."""
    command = [sys.executable, "-m", "compactor", "serve", "--config", str(config), "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as started:
        try:
            assert started.stderr is not None
            assert any("status at" in line for line in started.stderr), "it ended"
            threading.Thread(target=started.stderr.read, daemon=True).start()
            yield started
        finally:
            started.kill()


def test_clients_go_on_where_they_were_when_the_endpoint_was_killed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cli = TierCli(tmp_path / "cli", SETTINGS | {"serve": {"pages_listen": "127.0.0.1:0", "disk_cache_bytes": 1 << 20}})
    log = log_of_transactions(14, 120).write(tmp_path / "log")
    cli.bring(log)
    expected = committed_records(log)
    with process(cli.config, port) as first:
        again: list[Any] = []

        def kill() -> None:
            first.send_signal(signal.SIGKILL)
            first.wait()
            again.append(process(cli.config, port))
            again.append(again[0].__enter__())

        try:
            assert read_with_events(reader(f"127.0.0.1:{port}", 200), len(expected), {20: kill}) == expected
            again[1].send_signal(signal.SIGTERM)
            assert again[1].wait(30) == 0
        finally:
            if again:
                again[0].__exit__(None, None, None)
