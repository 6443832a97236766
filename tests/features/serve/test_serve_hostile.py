"""Clients that are slow, broken or malicious, with and without TLS and a login: they cost their own connection and nothing else."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition as At
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest

from compactor.features.serve.endpoint import CLIENT_ID_CHARS, LOGIN_BYTES, Endpoint
from compactor.features.serve.pages import EndpointPages
from compactor.features.serve.protocol import MOST_ROWS, InvalidFrame, decode_request
from tests.builders import LogBuilder
from tests.features.serve.test_serve_requests import self_signed
from tests.support.endpoint import Client, fetch_request, served
from tests.support.kafka_traffic import SILENT
from tests.support.tier_cli import TierCli
from tests.support.waiting import wait_for

TOPIC = "orders"
USERS = '[alice]\npassword = "secret"\ntopics = ["orders"]\n'


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    cli = TierCli(tmp_path / "cli")
    log = LogBuilder()
    for number in range(20):
        log.put(f"k{number}=1")
    cli.bring(log.write(tmp_path / "log"))
    return cli


class TlsClient(Client):
    """A connection with TLS. certificate: what the endpoint must show."""

    def __init__(self, endpoint: Endpoint, certificate: Path) -> None:
        super().__init__(endpoint)
        context = ssl.create_default_context(cafile=str(certificate))
        self._socket = context.wrap_socket(self._socket, server_hostname="localhost")


@contextmanager
def guarded(cli: TierCli, folder: Path, **settings: Any) -> Iterator[tuple[Endpoint, Path]]:
    """An endpoint with TLS and a user, and its certificate."""
    certificate, key = self_signed(folder)
    users = folder / "users.toml"
    users.write_text(USERS)
    users.chmod(0o600)
    cli.set(
        serve={
            "tls_certificate": str(certificate), "tls_key": str(key), "users_file": str(users), "advertised": "localhost:0", **settings,
        }
    )  # fmt: skip
    with served(cli.config) as endpoint:
        yield endpoint, certificate


# ---- frames ----------------------------------------------------------------------------------------------------------------------


def test_a_number_without_an_end_is_not_decoded() -> None:
    head = bytes.fromhex("0012 0003 00000001 0001 78 00")
    with pytest.raises(InvalidFrame, match="without an end"):
        decode_request(head + b"\xff" * 4_200)
    with pytest.raises(InvalidFrame, match="cannot be read"):
        decode_request(head + b"\xff" * 100)


def test_a_request_with_too_many_rows_closes_its_connection(cli: TierCli) -> None:
    def ask(client: Client, count: int) -> None:
        topics = [MetadataRequest.MetadataRequestTopic(topic_id=None, name="x") for _ in range(count)]
        client.post(MetadataRequest(topics=topics, allow_auto_topic_creation=False), 9)

    with served(cli.config) as endpoint:
        with Client(endpoint) as client:
            ask(client, MOST_ROWS)
            assert len(client.receive()) > MOST_ROWS
            ask(client, MOST_ROWS + 1)
            assert client.receive() == b""
        assert endpoint.state.invalid_frames == 1


def test_others_are_answered_while_a_request_has_many_partitions(cli: TierCli) -> None:
    count = 5_000
    row = FetchRequest.FetchTopic.FetchPartition
    rows = [
        row(partition=0, current_leader_epoch=-1, fetch_offset=0, last_fetched_epoch=-1, log_start_offset=-1, partition_max_bytes=1)
        for _ in range(count)
    ]
    request = FetchRequest(
        replica_id=-1, max_wait_ms=0, min_bytes=1 << 30, max_bytes=1 << 30, isolation_level=0, session_id=0, session_epoch=-1,
        topics=[FetchRequest.FetchTopic(topic=TOPIC, topic_id=None, partitions=rows)], forgotten_topics_data=[], rack_id="",
    )  # fmt: skip
    cli.set(serve={"refresh_ms": 600_000})
    with served(cli.config) as endpoint, Client(endpoint) as large, Client(endpoint) as small:
        assert small.fetch(TOPIC, 0).records
        turns: list[int] = []
        is_small_sent = threading.Event()
        original = endpoint.requests._read_partition  # type: ignore[union-attr]

        async def counted(*arguments: Any, **options: Any) -> Any:
            turns.append(arguments[1].partition_max_bytes)
            is_small_sent.wait(20)  # holds the whole endpoint at the first row, so that the small request is there before the second
            return await original(*arguments, **options)

        endpoint.requests._read_partition = counted  # type: ignore[union-attr, method-assign]
        large.post(request, 12)
        wait_for(lambda: bool(turns))
        small.post(fetch_request(TOPIC, 0), 12)
        is_small_sent.set()
        assert len(small.receive()) < count
        assert len(large.receive()) > count
        assert len(turns) == count + 1
        assert turns.index(1 << 20) < count, "it waited for the large request"


def test_random_changes_of_valid_frames_close_their_connection_and_nothing_else(cli: TierCli) -> None:
    draw = random.Random(11)
    with served(cli.config) as endpoint, Client(endpoint) as steady:
        for _ in range(150):
            request = fetch_request(TOPIC, draw.randrange(30), topic_id=None)
            version = draw.randrange(4, 13)
            request.API_VERSION = version
            request.with_header(correlation_id=1, client_id="x")
            frame = bytearray(request.encode(header=True, framed=False))
            for _ in range(draw.randrange(1, 4)):
                frame[draw.randrange(len(frame))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
            with Client(endpoint) as other:
                other.send(len(frame).to_bytes(4, "big") + frame)
                other._socket.shutdown(socket.SHUT_WR)
                other.receive()
            assert steady.fetch(TOPIC, 0).error_code == 0
        wait_for(lambda: len(endpoint.state.connections) == 1 and not endpoint.state.in_flight)


def test_clients_that_go_away_in_the_middle_of_a_response_leave_nothing_behind(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli")
    log = LogBuilder()
    for number in range(20):
        log.put(*(f"k{number}-{one}={'x' * 9000}" for one in range(50)))
    cli.bring(log.write(tmp_path / "log"))
    with served(cli.config) as endpoint:
        for _ in range(20):
            client = Client(endpoint)
            client.post(fetch_request(TOPIC, 0, max_bytes=8 << 20), 12)
            assert client._socket.recv(1000)
            client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
            client._socket.close()
        wait_for(lambda: not endpoint.state.connections and not endpoint.state.in_flight)
        with Client(endpoint) as client:
            assert client.fetch(TOPIC, 0).records


def test_a_client_that_sends_a_frame_byte_by_byte_is_dropped(cli: TierCli) -> None:
    cli.set(serve={"request_timeout_ms": 300})
    with served(cli.config) as endpoint, Client(endpoint) as slow:
        slow.send(b"\0\0\x10\0")
        wait_for(lambda: not endpoint.state.connections and endpoint.state.accepted == 1)
        assert slow.receive() == b""


def test_a_client_id_is_shown_in_part_and_as_text(cli: TierCli) -> None:
    with served(cli.config) as endpoint, Client(endpoint) as client:
        request = ApiVersionsRequest(client_software_name="t", client_software_version="1")
        request.API_VERSION = 3
        request.with_header(correlation_id=1, client_id="<script>" + "x" * 30_000)
        client.send(bytes(request.encode(header=True, framed=True)))
        assert client.receive()
        page = EndpointPages(endpoint).respond_to_request("/").body.decode()
        assert "<script>x" not in page
        assert "&lt;script&gt;xxx" in page
        assert "x" * CLIENT_ID_CHARS not in page


# ---- before a login --------------------------------------------------------------------------------------------------------------


def test_a_stranger_may_send_small_frames_for_a_login_and_for_a_short_time_only(cli: TierCli, tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text(USERS)
    users.chmod(0o600)
    cli.set(serve={"users_file": str(users), "request_timeout_ms": 1_500})
    with served(cli.config) as endpoint:
        with Client(endpoint) as large:
            large.send((LOGIN_BYTES + 1).to_bytes(4, "big"))
            assert large.receive() == b""
        with Client(endpoint) as known:
            assert known.log_in("alice", "secret") == 0
            known.send((LOGIN_BYTES + 1).to_bytes(4, "big") + bytes(LOGIN_BYTES + 1))
            assert known.receive() == b""
            assert endpoint.state.invalid_frames == 2
        with Client(endpoint) as lingering, Client(endpoint) as again:
            assert again.log_in("alice", "secret") == 0
            wait_for(lambda: is_dropped(lingering))
            assert again.fetch(TOPIC, 0).records
    with pytest.raises(InvalidFrame, match="authenticate first"):
        decode_request(bytes.fromhex("0003 0009 00000001") + b"no request at all", lambda key: key == ApiVersionsRequest.API_KEY)


def is_dropped(client: Client) -> bool:
    """Ask something that needs no login: it does not prolong a client's time."""
    try:
        client.ask(ApiVersionsRequest(client_software_name="t", client_software_version="1"))
    except (AssertionError, OSError):
        return True
    return False


# ---- TLS -------------------------------------------------------------------------------------------------------------------------


def test_handshakes_that_do_not_end_are_connections_and_end_in_time(cli: TierCli, tmp_path: Path) -> None:
    with guarded(cli, tmp_path, max_connections=3, request_timeout_ms=1_500) as (endpoint, certificate):
        silent = [socket.create_connection(("127.0.0.1", int(endpoint.address.rpartition(":")[2]))) for _ in range(3)]
        wait_for(lambda: len(endpoint.state.connections) == 3)
        with Client(endpoint) as fourth:
            assert fourth.receive() == b""
        assert endpoint.state.refused == 1
        wait_for(lambda: not endpoint.state.connections)
        for one in silent:
            one.close()
        with TlsClient(endpoint, certificate) as client:
            assert client.log_in("alice", "secret") == 0
            assert client.fetch(TOPIC, 0).records


def test_what_is_no_handshake_closes_its_connection_and_nothing_else(cli: TierCli, tmp_path: Path) -> None:
    draw = random.Random(5)
    with guarded(cli, tmp_path) as (endpoint, certificate), TlsClient(endpoint, certificate) as steady:
        assert steady.log_in("alice", "secret") == 0
        for start in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\x0f", b"\x16\x03\x03\xff\xff", b""):
            with Client(endpoint) as other:
                other.send(start + draw.randbytes(300))
                other._socket.shutdown(socket.SHUT_WR)
                while other._socket.recv(1000):
                    pass  # an alert
            assert steady.fetch(TOPIC, 0).records
        wait_for(lambda: len(endpoint.state.connections) == 1)


def test_a_new_certificate_and_new_users_are_read_without_a_restart(cli: TierCli, tmp_path: Path) -> None:
    with guarded(cli, tmp_path) as (endpoint, certificate):
        old = Path(tmp_path, "old.crt")
        old.write_bytes(certificate.read_bytes())
        self_signed(tmp_path)
        with TlsClient(endpoint, old) as client:
            assert client.log_in("alice", "secret") == 0
            endpoint.request_settings_change(endpoint.tier.settings)
            with pytest.raises(ssl.SSLCertVerificationError):
                TlsClient(endpoint, old)
            with TlsClient(endpoint, certificate) as other:
                assert other.log_in("alice", "secret") == 0
            assert client.fetch(TOPIC, 0).records, "connections go on"
            certificate.write_bytes(b"none")
            endpoint.request_settings_change(endpoint.tier.settings)
            with TlsClient(endpoint, certificate_of(endpoint, tmp_path)) as other:
                assert other.log_in("alice", "secret") == 0


def certificate_of(endpoint: Endpoint, folder: Path) -> Path:
    """What the endpoint shows."""
    file = folder / "shown.crt"
    host, _, port = endpoint.address.rpartition(":")
    file.write_text(ssl.get_server_certificate((host, int(port))))
    return file


def taken(consumer: Consumer, found: list[Message]) -> list[Message]:
    found += consumer.consume(100, 0.5)
    return found


def tls_settings(endpoint: Endpoint, certificate: Path, password: str = "secret") -> dict[str, Any]:
    return {
        "bootstrap.servers": f"localhost:{endpoint.me.port}", "security.protocol": "SASL_SSL", "ssl.ca.location": str(certificate),
        "sasl.mechanism": "PLAIN", "sasl.username": "alice", "sasl.password": password, "broker.address.family": "v4",
    }  # fmt: skip


def test_a_real_client_reads_with_tls_and_a_password(cli: TierCli, tmp_path: Path) -> None:
    with guarded(cli, tmp_path) as (endpoint, certificate):
        consumer = Consumer({**tls_settings(endpoint, certificate), "group.id": "none", "enable.auto.commit": False}, logger=SILENT)
        consumer.assign([At(TOPIC, 0, 0)])
        found = list[Message]()
        wait_for(lambda: len(taken(consumer, found)) >= 20)
        assert [message.offset() for message in found] == list(range(20))
        consumer.close()
        errors: list[int] = []
        refused = Consumer(
            {**tls_settings(endpoint, certificate, "guess"), "group.id": "none", "error_cb": lambda error: errors.append(error.code())},
            logger=SILENT,
        )
        refused.assign([At(TOPIC, 0, 0)])
        wait_for(lambda: not refused.consume(1, 0.2) and KafkaError._AUTHENTICATION in errors)
        refused.close()


# ---- refusals, as clients show them ----------------------------------------------------------------------------------------------


def test_librdkafka_says_that_writes_and_groups_are_refused(cli: TierCli) -> None:
    with served(cli.config) as endpoint:
        outcome: list[Any] = []
        producer = Producer({"bootstrap.servers": endpoint.address, "message.timeout.ms": 20_000}, logger=SILENT)
        producer.produce(TOPIC, b"x", on_delivery=lambda error, _: outcome.append(error and error.code()))
        producer.flush(30)
        assert outcome == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
        consumer = Consumer({"bootstrap.servers": endpoint.address, "group.id": "g", "auto.offset.reset": "earliest"}, logger=SILENT)
        with pytest.raises(KafkaException) as caught:
            consumer.committed([At(TOPIC, 0)], timeout=20)
        assert caught.value.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED
        consumer.subscribe([TOPIC])
        seen = list[Message]()
        wait_for(lambda: bool(taken(consumer, seen)))
        errors = [message.error() for message in seen]
        assert {error and error.code() for error in errors} == {KafkaError.GROUP_AUTHORIZATION_FAILED}
        consumer.close()
