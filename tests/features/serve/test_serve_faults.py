"""Faults of a store, of the disk and of clients, which concern what they concern and nothing else; and bounds of memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kafka.protocol.consumer import FetchRequest
from typing_extensions import override

from compactor.config.settings import ServeSettings
from compactor.errors import StoreError, UsageError
from compactor.features.serve import pieces
from compactor.features.serve.endpoint import JOINED, LEAST_RESPONSE, MOST_VIEWS, SLICE, State, parse_nodes, slices, write_at_once
from compactor.features.serve.protocol import ErrorCode
from compactor.model.ids import TopicPartition
from compactor.storage.wrappers import ForwardingStore
from tests.builders import LogBuilder, log_of
from tests.features.serve.test_serve_fetch import TOPIC, all_records, committed_records, log_of_transactions
from tests.plain_format import read_batches
from tests.support.endpoint import Client, fetch_request, served
from tests.support.tier_cli import TierCli, batches_of
from tests.support.waiting import wait_for

T = TypeVar("T")
DATA, CONTROL = "data", "control"


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """orders-0 to orders-3, each with its own number as a key, in two batches."""
    cli = TierCli(tmp_path / "cli")
    for number in range(4):
        log = LogBuilder()
        log.put(f"p{number}=1")
        log.put(f"p{number}=2")
        cli.named = f"{TOPIC}-{number}"
        cli.bring(log.write(tmp_path / f"log {number}"))
    return cli


def slowed(stores: list[Faulty]) -> Callable[[Any], Any]:
    """Opens a tier with a data store that only waits; ``stores`` gets the store."""

    def slow(tier: Any) -> Any:
        stores.append(Faulty(tier.ports.data))
        stores[0].waits_only = True
        return tier.with_stores(data=stores[0])

    return slow


def fetch_all(client: Client, *, max_bytes: int, partition_max_bytes: int, partitions: int = 4, min_bytes: int = 1) -> Any:
    """One Fetch over several partitions from offset 0 on; its rows."""
    row = FetchRequest.FetchTopic.FetchPartition
    rows = [
        row(
            partition=number, current_leader_epoch=-1, fetch_offset=0, last_fetched_epoch=-1, log_start_offset=-1,
            partition_max_bytes=partition_max_bytes,
        )
        for number in range(partitions)
    ]  # fmt: skip
    request = FetchRequest(
        replica_id=-1, max_wait_ms=20_000, min_bytes=min_bytes, max_bytes=max_bytes, isolation_level=1, session_id=0, session_epoch=-1,
        topics=[FetchRequest.FetchTopic(topic=TOPIC, topic_id=None, partitions=rows)], forgotten_topics_data=[], rack_id="",
    )  # fmt: skip
    return client.ask(request, 12).responses[0].partitions


class Faulty(ForwardingStore):
    """A store that fails for keys that contain ``text``, ``seconds`` after it was asked. asked: how often."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.text, self.seconds, self.asked, self.waits_only = "", 0.0, 0, False

    @override
    def _forward_read_request(self, key: str, request: Callable[[], T]) -> T:
        if self.text and self.text in key:
            self.asked += 1
            time.sleep(self.seconds)
            if not self.waits_only:
                raise StoreError(f"{key}: the store does not answer")
        return super()._forward_read_request(key, request)


def test_a_damaged_control_log_is_an_error_of_its_partition_only(cli: TierCli) -> None:
    damaged = cli.tier / ".tiered-compactor/partitions/orders-2/log/00000000000000000001.json"
    kept = damaged.read_bytes()
    damaged.write_bytes(b"\0" * len(kept))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        (topic,) = client.metadata(TOPIC).topics
        assert (topic.error_code, [row.partition_index for row in topic.partitions]) == (0, [0, 1, 2, 3])
        rows = fetch_all(client, max_bytes=1 << 20, partition_max_bytes=1 << 20)
        assert rows[2].error_code == ErrorCode.CORRUPT_MESSAGE
        wait_for(lambda: all_found(client, {0, 1, 3}))
        assert not endpoint.state.problem
    damaged.write_bytes(kept)


def all_found(client: Client, partitions: set[int]) -> bool:
    """Whether a fetch brings records of these partitions: what is not in memory is loaded while the first one is answered."""
    rows = fetch_all(client, max_bytes=1 << 20, partition_max_bytes=1 << 20)
    return {row.partition_index for row in rows if row.records} == partitions


def test_the_first_batch_comes_whatever_the_budgets_and_no_other_one_beyond_them(cli: TierCli) -> None:
    with served(cli.config) as endpoint, Client(endpoint) as client:
        wait_for(lambda: all_found(client, {0, 1, 2, 3}))
        for budgets in ({"max_bytes": 0, "partition_max_bytes": 1 << 20}, {"max_bytes": 1 << 20, "partition_max_bytes": 0}):
            rows = fetch_all(client, **budgets)
            assert [len(list(read_batches(bytes(row.records or b"")))) for row in rows] == [1, 0, 0, 0]
        # More bytes than a response may hold are not waited for.
        assert fetch_all(client, max_bytes=1, partition_max_bytes=1, min_bytes=1 << 30)[0].records
        assert {name.partition for name in endpoint.requests.counts.at_end} == set()  # type: ignore[union-attr]


@pytest.mark.parametrize("version", range(4, 18))
def test_each_version_of_fetch_is_answered(cli: TierCli, version: int) -> None:
    log = LogBuilder(topic_id="AAAAAAAAAAAAAAAAAAAAAQ").add("a=1")
    cli.named = "named-0"
    cli.bring(log.write(cli.folder / "named"))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        topic_id = client.metadata("named").topics[0].topic_id if version >= 13 else None
        row = client.fetch("named", 0, version=version, topic_id=topic_id)
        assert [batch.last_offset for batch in read_batches(bytes(row.records))] == [0]
        assert client.fetch("named", -1, version=version, topic_id=topic_id).error_code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_an_unavailable_store_is_asked_once_for_all_and_closes_no_connection(cli: TierCli) -> None:
    stores: list[Faulty] = []

    def faulty(tier: Any) -> Any:
        stores.append(Faulty(tier.ports.control))
        return tier.with_stores(control=stores[0])

    cli.set(serve={"refresh_ms": 600_000})
    with served(cli.config, faulty) as endpoint:
        stores[0].text, stores[0].seconds = TOPIC, 0.5
        with Client(endpoint) as client:
            for _ in range(3):
                rows = fetch_all(client, max_bytes=1 << 20, partition_max_bytes=1 << 20)
                assert {row.error_code for row in rows} == {ErrorCode.KAFKA_STORAGE_ERROR}
                assert client.offset(TOPIC, -2).error_code == ErrorCode.KAFKA_STORAGE_ERROR
            assert stores[0].asked <= 4 * 2


def test_a_search_for_markers_does_not_hold_up_the_end(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli", {"cleaner": {"segment_bytes": 400}, "serve": {"read_ahead": 0}})
    log = log_of("7t: a=1")
    for number in range(5):
        log.roll()
        log.put(f"b{number}=1")
    log.commit(7)
    cli.bring(log.write(tmp_path / "log"))
    stores: list[Faulty] = []
    slow = slowed(stores)
    with served(cli.config, slow) as endpoint, Client(endpoint) as client:
        assert client.fetch(TOPIC, 0, committed=False, max_bytes=1).error_code == 0
        stores[0].text, stores[0].seconds = ".log", 0.3

        def ask() -> None:
            with suppress(AssertionError):  # the connection is closed
                client.fetch(TOPIC, 0, max_bytes=1)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: stores[0].asked > 0)
        endpoint.request_stop()  # ``served`` fails if the endpoint does not end
        asking.join(20)


def test_a_disk_cache_that_was_changed_costs_a_read_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 200)
    cli = TierCli(tmp_path / "cli", {"serve": {"cache_bytes": 1 << 20, "disk_cache_bytes": 1 << 24}})
    folder = log_of_transactions(5, 100).write(tmp_path / "log", indexes=True, index_interval_bytes=100)
    cli.bring(folder)
    with served(cli.config) as endpoint, Client(endpoint) as client:
        endpoint.cache._budget = 1
        assert client.read_all(TOPIC, committed=True) == committed_records(folder)
        for path in tmp_path.rglob("*.piece"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        assert client.read_all(TOPIC, committed=False) == all_records(folder)
        assert endpoint.reader.damaged == 0


def test_bounds_of_segments_hold_no_offset_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 200)
    cli = TierCli(tmp_path / "cli")
    cli.bring(log_of_transactions(5, 100).write(tmp_path / "log", indexes=True, index_interval_bytes=100))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        client.read_all(TOPIC, committed=True)
        assert endpoint.cache._bounds
        assert all(bounds.reader._offset_entries is None for bounds in endpoint.cache._bounds.values())


def test_a_login_that_failed_ends_its_connection(tmp_path: Path, cli: TierCli) -> None:
    users = tmp_path / "users.toml"
    users.write_text('[alice]\npassword = "secret"\ntopics = [".*"]\n')
    users.chmod(0o600)
    cli.set(serve={"users_file": str(users)})
    with served(cli.config) as endpoint, Client(endpoint) as client:
        assert client.log_in("alice", "guess") == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert client.receive() == b""


def test_an_endpoint_listens_on_ipv6_and_says_so(cli: TierCli) -> None:
    with served(cli.config, listen="[::1]:0") as endpoint, Client(endpoint) as client:
        (node,) = client.metadata().brokers
        assert f"[{node.host}]:{node.port}" == endpoint.address
        assert client.fetch(TOPIC, 0).error_code == 0


def test_addresses_that_clients_cannot_connect_to_are_refused() -> None:
    for address in ("0.0.0.0:9192", "[::]:9192"):
        with pytest.raises(UsageError, match="cannot connect"):
            parse_nodes(ServeSettings(), address)
        assert parse_nodes(ServeSettings(advertised="reader:1"), address)[0].port == 1
    assert parse_nodes(ServeSettings(advertised="reader:0"), "127.0.0.1:4711")[0].port == 4711


def test_a_port_that_is_none_is_refused_with_words(cli: TierCli) -> None:
    for text in ("9192", "localhost:", "localhost:x"):
        answer = cli.ask("serve", "--listen", text)
        assert answer.code == 2
        assert "HOST:PORT" in answer.stderr or "host and port" in answer.stderr


def test_bytes_are_reserved_while_they_are_read(cli: TierCli) -> None:
    stores: list[Faulty] = []
    cli.set(serve={"max_in_flight_bytes": 100_000, "max_response_bytes": 90_000})
    slow = slowed(stores)
    with served(cli.config, slow) as endpoint, Client(endpoint) as first, Client(endpoint) as second:
        stores[0].text, stores[0].seconds = ".log", 0.5
        first.post(fetch_request(TOPIC, 0), 12)
        wait_for(lambda: stores[0].asked > 0)
        assert endpoint.state.in_flight == 90_000
        second.post(fetch_request(TOPIC, 0, partition=1), 12)
        wait_for(lambda: stores[0].asked > 1)
        assert endpoint.state.in_flight == 90_000 + LEAST_RESPONSE
        assert first.receive()
        assert second.receive()
        wait_for(lambda: not endpoint.state.in_flight)


def test_a_response_holds_no_pieces_beyond_the_budget(tmp_path: Path) -> None:
    log = LogBuilder()
    for number in range(40):
        log.put(f"k{number}={'x' * 10_000}")
    cli = TierCli(tmp_path / "cli", {"serve": {"max_in_flight_bytes": 110_000}})
    cli.bring(log.write(tmp_path / "log"))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        seen: list[int] = []

        class Watched(State):
            @override
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value)
                if name == "in_flight":
                    seen.append(value)

        endpoint.state = Watched()
        client.post(fetch_request(TOPIC, 0, max_bytes=100_000), 12)
        assert len(client.receive()) > 80_000
        assert 80_000 < max(seen) <= 100_000 + 1_000, "not the piece of 400,000 bytes"


def test_pieces_count_as_cached_while_they_are_loaded(cli: TierCli) -> None:
    stores: list[Faulty] = []
    slow = slowed(stores)
    with served(cli.config, slow) as endpoint, Client(endpoint) as client:
        stores[0].text, stores[0].seconds = ".log", 0.5
        client.post(fetch_request(TOPIC, 0), 12)
        wait_for(lambda: stores[0].asked > 0)
        (log,) = (cli.tier / f"{TOPIC}-0").rglob("*.log")
        assert endpoint.cache.used == log.stat().st_size
        assert client.receive()
        assert endpoint.cache.used == sum(piece.nbytes for piece in endpoint.cache._pieces.values())


def test_a_client_that_reads_late_gets_every_byte_of_a_response(tmp_path: Path) -> None:
    log = LogBuilder()
    for number in range(40):
        log.put(f"k{number}={'x' * 400_000}")
    cli = TierCli(tmp_path / "cli")
    folder = log.write(tmp_path / "log")
    cli.bring(folder)
    with served(cli.config) as endpoint, Client(endpoint) as client:
        client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        while len(client.fetch(TOPIC, 0, max_bytes=1 << 24).records) < 15_000_000:
            pass  # pieces that are not in memory are not waited for
        client.post(fetch_request(TOPIC, 0, max_bytes=1 << 24), 12)
        # More than the sockets hold: the endpoint waits for the client.
        wait_for(lambda: endpoint.state.in_flight > 15_000_000)
        frame = client.receive()
        assert b"".join(batch.raw for batch in batches_of(folder))[:15_000_000] in frame
        wait_for(lambda: not endpoint.state.in_flight)


class Transport:
    """Stands for a StreamWriter."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def get_extra_info(self, name: str) -> socket.socket:
        return self.end


def test_a_socket_takes_what_it_can_of_many_views() -> None:
    views = [memoryview(bytes([number % 251]) * (number % 900)) for number in range(3 * MOST_VIEWS)]
    ours, theirs = socket.socketpair()
    read = bytearray()
    with ours, theirs:
        ours.setblocking(False)
        left = write_at_once(Transport(ours), views)  # type: ignore[arg-type]
        assert left
        while left:
            read += theirs.recv(1 << 20)
            left = write_at_once(Transport(ours), left)  # type: ignore[arg-type]
        ours.close()
        while part := theirs.recv(1 << 20):
            read += part
    assert read == b"".join(views)


def test_a_request_that_takes_too_long_ends_its_connection_and_not_what_it_began(cli: TierCli) -> None:
    stores: list[Faulty] = []
    cli.set(serve={"request_timeout_ms": 300, "refresh_ms": 600_000})

    def slow(tier: Any) -> Any:
        stores.append(Faulty(tier.ports.control))
        stores[0].waits_only = True
        return tier.with_stores(control=stores[0])

    with served(cli.config, slow) as endpoint:
        stores[0].text, stores[0].seconds = "orders-1/", 1.0
        with Client(endpoint) as client:
            client.post(fetch_request(TOPIC, 0, partition=1), 12)
            assert client.receive() == b""
        with Client(endpoint) as client:
            assert client.fetch(TOPIC, 0).records, "others are answered meanwhile"
        stores[0].seconds = 0.0
        wait_for(lambda: endpoint.partitions.last_view(TopicPartition(TOPIC, 1)) is not None)
        with Client(endpoint) as client:
            assert client.fetch(TOPIC, 0, partition=1).records


def test_an_unchanged_partition_is_not_looked_at_for_each_request(cli: TierCli) -> None:
    cli.set(serve={"refresh_ms": 500})
    with served(cli.config) as endpoint, Client(endpoint) as client:
        assert client.fetch(TOPIC, 0).records
        time.sleep(0.6)
        refreshed = []
        original = endpoint.partitions._refresh_view

        async def counted(*arguments: Any) -> Any:
            refreshed.append(arguments)
            return await original(*arguments)

        endpoint.partitions._refresh_view = counted  # type: ignore[assignment, method-assign]
        began = time.monotonic()
        for _ in range(20):
            assert client.fetch(TOPIC, 0).records
        assert len(refreshed) <= 1 + (time.monotonic() - began) / 0.5


def test_small_parts_of_a_frame_are_joined() -> None:
    views = [memoryview(bytes([number]) * size) for number, size in enumerate((4, 60, 600_000, 5, 3))]
    parts = [bytes(part) for part in slices(views)]
    assert b"".join(parts) == b"".join(views)
    assert [len(part) for part in parts] == [JOINED, SLICE, SLICE, 600_064 - JOINED - 2 * SLICE, 8]
    assert [bytes(part) for part in slices([memoryview(b"whole")])] == [b"whole"]
    assert list(slices([])) == []
