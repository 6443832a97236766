"""Clients of the endpoint read every kind of tier as `cat` and the brokers' own consumers do, while logs grow, lose records and change."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typing_extensions import override

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.adapters.brokers import view as brokers_view
from compactor.constants import TopicId
from compactor.errors import Unavailable
from compactor.features.serve import partitions
from compactor.features.serve.endpoint import Endpoint
from compactor.features.serve.protocol import ErrorCode, uuid_of_topic_id
from compactor.model.ids import TopicPartition
from compactor.storage.wrappers import ForwardingStore
from compactor.upkeep.retire import retire_partition
from compactor.views.checkpoints import read_only_copy
from tests.builders import log_of
from tests.features.imports.test_import_truncated import Log
from tests.features.pinterest.test_pinterest_tier import Upstream
from tests.features.serve.test_serve_fetch import TOPIC, all_records, committed_records, log_of_transactions
from tests.golden.test_broker_tier_cat import CASES, digest, expected
from tests.golden_cases import names, unpack
from tests.simulation.world import Faults
from tests.support.broker_metadata import broker_cli
from tests.support.broker_tiers import aiven_tier, local_tier
from tests.support.endpoint import Client, RecordTuple, served
from tests.support.memory_brokers import MemoryBrokers
from tests.support.tier_cli import TierCli
from tests.support.waiting import wait_for

T = TypeVar("T")
NAME = TopicPartition(TOPIC, 0)
ISOLATIONS = {True: "read_committed", False: "read_uncommitted"}


def hashed(records: Iterable[RecordTuple]) -> str:
    sha = hashlib.sha256()
    for offset, key, value in records:
        sha.update(repr((offset, key, value)).encode())
    return sha.hexdigest()


def by_cat(cli: TierCli, partition: str, isolation: str) -> list[RecordTuple]:
    formats = ("--format", "json", "--key-format", "bytes", "--value-format", "bytes")
    text = cli.ask("cat", partition, "--isolation", isolation, *formats, output="table").document or ""

    def plain(line: dict[str, Any], name: str) -> bytes | None:
        encoded = line.get(f"{name}_base64", line.get(name))
        return None if encoded is None else base64.b64decode(encoded)

    return [(line["offset"], plain(line, "key"), plain(line, "value")) for line in map(json.loads, text.splitlines())]


# ---- what brokers and clients wrote -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_tiers_of_brokers_are_read_as_the_brokers_own_consumers_read_them(layout: str, case: str, tmp_path: Path) -> None:
    written = local_tier(case, tmp_path) if layout == "kafka-local" else aiven_tier(case, tmp_path)
    cli = broker_cli(tmp_path / "control of it", written, layout)
    with served(cli.config) as endpoint, Client(endpoint) as client:
        for committed, isolation in ISOLATIONS.items():
            end = client.offset(TOPIC, -1, committed=committed).offset
            found = [(offset, key, digest(value)) for offset, key, value in client.read_all(TOPIC, committed=committed)]
            assert found == [(row[0], row[2], row[3]) for row in expected(written, isolation, end)]
        assert client.metadata(TOPIC).topics[0].topic_id == uuid_of_topic_id(TopicId(written.topic_id))


def read_as_both_judge(client: Client, topic: str, *, committed: bool) -> tuple[list[RecordTuple], list[RecordTuple]]:
    """Read a topic once; return the records that Java's consumer shows, and those that librdkafka shows."""
    java: list[RecordTuple] = []
    librdkafka: list[RecordTuple] = []
    offset, end = client.offset(topic, -2).offset, client.offset(topic, -1, committed=committed).offset
    while offset < end:
        row = client.fetch(topic, offset, committed=committed, max_bytes=50_000)
        assert row.error_code == 0, row
        after, found = client.shown(row, offset, committed=committed)
        java += found
        librdkafka += client.shown(row, offset, committed=committed, is_librdkafka=True)[1] if committed else found
        if after == offset:
            break  # a hole ends the log
        offset = after
    return java, librdkafka


FAMILIES = sorted({("cleaner", name.partition("-")[0]) for name in names("cleaner")} | {("clients", "")})


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_logs_of_all_clients_are_read_as_cat_reads_them(
    kind: str, family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    archive = unpack(kind, tmp_path_factory.getbasetemp() / "golden of serve")
    cli = TierCli(tmp_path / "cli")
    cases = [name for name in names(kind) if name.startswith(family)]
    for name in cases:
        cli.named = f"{name}-0"
        cli.bring(archive / name / "in")
    with served(cli.config) as endpoint, Client(endpoint) as client:
        for name in cases:
            for committed, isolation in ISOLATIONS.items():
                wanted = by_cat(cli, f"{name}-0", isolation)
                for found in read_as_both_judge(client, name, committed=committed):
                    assert hashed(found) == hashed(wanted), (name, isolation, len(found), len(wanted))
        assert endpoint.reader.damaged == 0


# ---- logs that others write -------------------------------------------------------------------------------------------------


def test_a_bucket_of_pinterest_is_read_while_it_grows_and_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "UNHINTED_S", 0.0)
    upstream = Upstream(tmp_path)
    upstream.segment("a=1", "b=1")
    upstream.segment("a=2", "c=1")
    folder = upstream.upload()
    with served(upstream.cli.config) as endpoint, Client(endpoint) as client:

        def texts() -> list[str]:
            return [f"{offset} {(key or b'').decode()}" for offset, key, _ in client.read_all(TOPIC, committed=True)]

        assert texts() == ["0 a", "1 b", "2 a", "3 c"]
        upstream.segment("d=1")
        upstream.upload()
        wait_for(lambda: texts() == ["0 a", "1 b", "2 a", "3 c", "4 d"])
        upstream.upload("orders-1")
        wait_for(lambda: len(client.metadata(TOPIC).topics[0].partitions) == 2)
        endpoint.cache._pieces.clear()
        for path in folder.glob(f"{0:020d}.*"):
            path.unlink()
        assert client.fetch(TOPIC, 2).error_code == 0
        wait_for(lambda: client.offset(TOPIC, -2).offset == 2)
        assert texts() == ["2 a", "3 c", "4 d"]
        assert endpoint.reader.damaged == 0


@pytest.fixture
def brokers(tmp_path: Path) -> MemoryBrokers:
    settings: dict[str, dict[str, Any]] = {
        "cleaner": {"segment_bytes": 400, "min_cleanable_dirty_ratio": 0.0, "delete_retention_ms": 0},
        "publish": {"grace_ms": 0},
    }
    made = MemoryBrokers(tmp_path / "brokers", settings)
    made.topic(TOPIC)
    return made


def serving(brokers: MemoryBrokers) -> Any:
    opened = read_only_copy(brokers.opened())
    return served(brokers.folder / "tier.toml", lambda _: opened)


def wait_until_loaded(endpoint: Endpoint, client: Client) -> None:
    client.read_all(TOPIC, committed=True)
    endpoint.cache._pieces.clear()  # the view is kept


def test_what_brokers_and_rounds_delete_is_never_taken_for_damage(
    brokers: MemoryBrokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known is as old as can be when a segment is missed: only then may it be asked anew."""
    monkeypatch.setattr(brokers_view, "METADATA_MAX_AGE_S", 600.0)
    brokers.settings = {**brokers.settings, "serve": {"refresh_ms": 600_000}}
    folder = log_of_transactions(21, 120).write(tmp_path / "log", indexes=True, index_interval_bytes=100)
    brokers.tier(NAME, folder)
    with serving(brokers) as endpoint, Client(endpoint) as client:
        assert client.read_all(TOPIC, committed=True) == committed_records(folder)
        assert client.read_all(TOPIC, committed=False) == all_records(folder)
        end = client.offset(TOPIC, -1).offset

        def compacted() -> None:
            opened = brokers.opened()
            assert compact(opened, NAME, opened.ports.clock_ms()).status == "cleaned"
            log = opened.open_partition_log(NAME, caller_runs_round=True)
            retire_partition(opened.ports, log, opened.lease, opened.retention)

        for change in (compacted, lambda: brokers.expire(NAME, end // 2)):
            wait_until_loaded(endpoint, client)
            change()
            for offset in range(end // 2, end, 7):
                assert client.fetch(TOPIC, offset).error_code == 0
        assert endpoint.reader.replaced
        assert endpoint.reader.damaged == 0


def test_a_topic_that_brokers_create_again_is_another_one(brokers: MemoryBrokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers_view, "TOPICS_MAX_AGE_S", 0.0)
    log = log_of("a=1; b=1; c=1; /")
    brokers.tier(NAME, log.write(tmp_path / "log"))
    with serving(brokers) as endpoint, Client(endpoint) as client:
        assert len(client.read_all(TOPIC, committed=True)) == 3
        old = client.metadata(TOPIC).topics[0].topic_id
        again = log_of("z=1; /")
        brokers.topic(TOPIC, number=1)
        brokers.restart(NAME)
        brokers.tier(NAME, again.write(tmp_path / "again"))
        wait_for(lambda: client.metadata(TOPIC).topics[0].topic_id != old)
        assert client.fetch("", 0, version=17, topic_id=old).error_code == ErrorCode.UNKNOWN_TOPIC_ID
        assert client.read_all(TOPIC, committed=True) == [(0, b"z", b"1")]
        assert client.fetch(TOPIC, 3).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        brokers.topic("others")
        log.put_segment("d=1")
        brokers.tier(TopicPartition("others", 0), log.write(tmp_path / "log"))
        wait_for(lambda: "others" in {topic.name for topic in client.metadata().topics})


def test_control_logs_of_brokers_tiers_are_opened_once(brokers: MemoryBrokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers.tier(NAME, log_of_transactions(22).write(tmp_path / "log"))
    opened: list[TopicPartition] = []
    original = Tier.open_partition_log

    def counting(self: Tier, partition: TopicPartition, **options: Any) -> Any:
        opened.append(partition)
        return original(self, partition, **options)

    monkeypatch.setattr(Tier, "open_partition_log", counting)
    with serving(brokers) as endpoint, Client(endpoint) as client:
        for _ in range(5):
            before = view.taken_s if (view := endpoint.partitions.last_view(NAME)) else 0.0
            time.sleep(0.02)
            assert client.fetch(TOPIC, 0).error_code == 0
            last = endpoint.partitions.last_view(NAME)
            assert last is not None
            assert last.taken_s > before
    assert opened == [NAME]


# ---- logs that lose records -------------------------------------------------------------------------------------------------


def test_a_truncated_log_is_told_by_its_leader_epochs(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli", {"publish": {"grace_ms": 0, "orphan_age_ms": 0}})
    first = Log(tmp_path / "first").lead(0, 100)
    cli.do("import", first.path)
    with served(cli.config) as endpoint, Client(endpoint) as client:
        assert client.fetch(TOPIC, 60, epoch=0).error_code == 0
        second = first.replica_until(40, "second").lead(2, 160)
        cli.do("import", second.path, "--accept-truncation")
        wait_for(lambda: client.metadata(TOPIC).topics[0].partitions[0].leader_epoch == 2)
        assert client.fetch(TOPIC, 60, epoch=0).error_code == ErrorCode.FENCED_LEADER_EPOCH
        # A client that read up to 60 in epoch 0 is told that this epoch ends at 40: it has read what no longer exists.
        for asked in (0, 1):
            row = client.end_of_epoch(TOPIC, asked, epoch=2)
            assert (row.error_code, row.leader_epoch, row.end_offset) == (0, 0, 40)
        assert client.end_of_epoch(TOPIC, 2, epoch=2).end_offset == 200
        records = client.read_all(TOPIC, committed=True)
        assert [offset for offset, _, _ in records] == list(range(200))
        assert {(value or b"")[-1:] for _, _, value in records[40:]} == {b"2"}


# ---- stores that break ------------------------------------------------------------------------------------------------------


class Breaking(ForwardingStore):
    """A store that refuses and delays reads as the simulation's do, by a seed, more often."""

    faults = Faults(throttle=0.2, delay=0.2)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.draw, self.refused, self.is_broken = random.Random(1), 0, False
        self._lock = threading.Lock()

    @override
    def _forward_read_request(self, key: str, request: Callable[[], T]) -> T:
        with self._lock:
            choice = self.draw.random() if self.is_broken else 1.0
            self.refused += choice < self.faults.throttle
        if choice < self.faults.throttle:
            raise Unavailable(f"{key}: slow down")
        if choice < self.faults.throttle + self.faults.delay:
            time.sleep(0.002)
        return super()._forward_read_request(key, request)


@pytest.mark.parametrize("seed", range(6))
def test_broken_stores_and_rounds_cost_repeats_and_no_record(seed: int, tmp_path: Path) -> None:
    cli = TierCli(
        tmp_path / "cli",
        {
            "publish": {"grace_ms": 0},
            "cleaner": {"segment_bytes": 400, "delete_retention_ms": 0},
            "serve": {"cache_bytes": 1024, "read_ahead": seed % 4},
        },
    )
    log = log_of_transactions(30 + seed, 80).write(tmp_path / "log", indexes=True, index_interval_bytes=100)
    cli.bring(log)
    stores: list[Breaking] = []

    def breaking(tier: Tier) -> Tier:
        stores.extend(Breaking(store) for store in (tier.ports.data, tier.ports.control))
        return tier.with_stores(data=stores[0], control=stores[1])

    def read(client: Client, happens: Callable[[int], None] = lambda offset: None) -> list[RecordTuple]:
        """Read to the end as clients do, which repeat what Kafka calls retriable and nothing else."""
        found: list[RecordTuple] = []

        def ask(request: Callable[[], Any]) -> Any:
            for _ in range(1000):
                row = request()
                if row.error_code != ErrorCode.KAFKA_STORAGE_ERROR:
                    assert row.error_code == 0, row
                    return row
                time.sleep(0.011)  # an endpoint does not ask the store again at once
            raise AssertionError("it never comes")

        end = ask(lambda: client.offset(TOPIC, -1, committed=True)).offset
        offset = 0
        while offset < end:
            happens(offset)
            row = ask(partial(client.fetch, TOPIC, offset, max_bytes=300))
            after, records = client.shown(row, offset, committed=True)
            if after == offset:
                break  # a hole ends the log
            offset = after
            found += records
        return found

    with served(cli.config, breaking) as endpoint, Client(endpoint) as client:
        for store in stores:
            store.is_broken = True
        assert read(client) == committed_records(log)
        end = committed_records(log)[-1][0]
        todo: list[Callable[[], Any]] = [cli.run, lambda: cli.do("retire")]

        def happens(offset: int) -> None:
            if todo and offset > end // 4 * (3 - len(todo)):
                todo.pop(0)()

        seen = read(client, happens)
        assert not todo
        assert set(seen) <= set(committed_records(log))
        assert [one[0] for one in seen] == sorted({one[0] for one in seen})
        compacted = committed_records(cli.export(tmp_path / "compacted"))
        assert {one for one in compacted if one[0] > end // 2} <= set(seen)
        assert read(client) == compacted
        assert endpoint.reader.damaged == 0
        assert min(store.refused for store in stores) > 0
