"""Requests other than Fetch: metadata, offsets, leader epochs, refusals; who may connect; and frames that are no requests."""

from __future__ import annotations

import datetime as dt
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kafka.protocol.admin import CreateTopicsRequest, DescribeClusterRequest, DescribeConfigsRequest
from kafka.protocol.consumer import JoinGroupRequest, OffsetCommitRequest, OffsetFetchRequest
from kafka.protocol.metadata import ApiVersionsRequest, FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer import InitProducerIdRequest, ProduceRequest

from compactor.config.settings import ServeSettings
from compactor.errors import UsageError
from compactor.features.serve import access
from compactor.features.serve.endpoint import Endpoint, parse_nodes
from compactor.features.serve.pages import EndpointPages
from compactor.features.serve.partitions import Node, leader_of
from compactor.features.serve.protocol import APIS, ErrorCode
from compactor.model.ids import TopicPartition
from tests.builders import LogBuilder, log_of
from tests.plain_format import read_batches
from tests.support.endpoint import Client, fetch_request, served
from tests.support.tier_cli import TierCli, batches_of
from tests.support.waiting import wait_for

TOPIC = "orders"


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """orders-0: offsets 0 and 1 in epoch 0, 2 to 4 in epoch 3, 5 in epoch 4; times 1000 to 1005."""
    cli = TierCli(tmp_path / "cli")
    log = log_of("a=1 b=1")
    log.leader_epoch = 3
    log.put("c=1", "d=1", "e=1")
    log.leader_epoch = 4
    log.put("f=1")
    cli.bring(log.write(tmp_path / "log"))
    return cli


@pytest.fixture
def endpoint(cli: TierCli) -> Iterator[Endpoint]:
    with served(cli.config) as running:
        yield running


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Client]:
    with Client(endpoint) as client:
        yield client


def test_metadata_name_the_endpoint_as_the_only_broker(endpoint: Endpoint, client: Client) -> None:
    answer = client.metadata()
    assert [(node.node_id, f"{node.host}:{node.port}") for node in answer.brokers] == [(0, endpoint.address)]
    (topic,) = answer.topics
    assert (topic.error_code, topic.name) == (0, TOPIC)
    (partition,) = topic.partitions
    assert (partition.leader_id, partition.leader_epoch, partition.replica_nodes, partition.isr_nodes) == (0, 4, [0], [0])
    assert client.metadata("no").topics[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    cluster = client.ask(DescribeClusterRequest())
    assert (cluster.cluster_id, len(cluster.brokers)) == (answer.cluster_id, 1)


def test_offsets_by_place_and_by_time(client: Client) -> None:
    asked = {-2: (0, -1), -1: (6, -1), -3: (5, 1005), 0: (0, 1000), 1003: (3, 1003), 1006: (-1, -1)}
    for timestamp, expected in asked.items():
        row = client.offset(TOPIC, timestamp)
        assert (row.error_code, row.offset, row.timestamp) == (0, *expected), timestamp


def test_the_largest_timestamp_is_a_readable_records(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli")
    log = LogBuilder()
    log.put("a=1", "b=1", "c=1", times=[5_000, 9_000, 9_000])
    log.roll()
    log.put("d=1", times=[7_000], pid=3, txn=True)
    log.put("e=1", times=[8_000])
    log.time = 20_000
    log.commit(3)  # a control record, which nobody reads
    cli.bring(log.write(tmp_path / "log"))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        for start, expected in ((0, (1, 9_000)), (2, (2, 9_000)), (3, (4, 8_000)), (5, (-1, -1))):
            cli.do("topics", "delete-records", "orders-0", "--before", str(start))
            wait_for(lambda start=start: client.offset(TOPIC, -2).offset == start)  # type: ignore[misc]
            row = client.offset(TOPIC, -3)
            assert (row.error_code, row.offset, row.timestamp) == (0, *expected), start


def test_offsets_by_time_are_those_of_the_records_that_a_round_left(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli", {"publish": {"grace_ms": 0}, "cleaner": {"segment_bytes": 400, "delete_retention_ms": 0}})
    draw, log = random.Random(3), LogBuilder()
    for number in range(60):
        log.put(*(f"k{draw.randrange(9)}={number}" for _ in range(2)), times=[1_000 + number + draw.randrange(200) for _ in range(2)])
        if draw.random() < 0.2:
            log.roll()
    cli.bring(log.write(tmp_path / "log", indexes=True, index_interval_bytes=100))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        for round_number in range(2):
            if round_number:
                cli.run()
                cli.do("retire")
            folder = cli.export(tmp_path / f"export {round_number}")
            records = [(one.offset, one.timestamp) for batch in batches_of(folder) if not batch.control for one in batch.records]
            for time_ms in range(990, 1_280, 7):
                row = client.offset(TOPIC, time_ms)
                assert (row.offset, row.timestamp) == next((one for one in records if one[1] >= time_ms), (-1, -1))
            newest = max(time_ms for _, time_ms in records)
            assert client.offset(TOPIC, -3).offset == next(offset for offset, time_ms in records if time_ms == newest)


def test_a_partition_whose_records_are_all_deleted_is_empty(cli: TierCli) -> None:
    cli.do("topics", "delete-records", "orders-0", "--before", "6")
    with served(cli.config) as endpoint, Client(endpoint) as client:
        assert [client.offset(TOPIC, place).offset for place in (-2, -1, -3, 0)] == [6, 6, -1, -1]
        codes = [client.fetch(TOPIC, offset).error_code for offset in (5, 6, 7)]
        assert codes == [ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE]


@pytest.mark.parametrize("name", ["a.b_c-1.x", "x" * 240])
def test_names_with_dots_and_long_ones_are_served_by_name_and_by_id(tmp_path: Path, name: str) -> None:
    cli = TierCli(tmp_path / "cli")
    cli.named = f"{name}-0"
    log = LogBuilder()
    log.put("a=1")
    cli.bring(log.write(tmp_path / "log"))
    with served(cli.config) as endpoint, Client(endpoint) as client:
        topic_id = client.metadata(name).topics[0].topic_id
        wanted = MetadataRequest.MetadataRequestTopic
        ids = [wanted(topic_id=one, name=None) for one in (topic_id, uuid.UUID(int=5), uuid.UUID(int=0))]
        topics = client.ask(MetadataRequest(topics=ids, allow_auto_topic_creation=False)).topics
        unknown = ErrorCode.UNKNOWN_TOPIC_ID
        assert [(topic.name, topic.error_code) for topic in topics] == [(name, 0), (None, unknown), (None, unknown)]
        assert bytes(client.fetch("", 0, version=17, topic_id=topic_id).records) == bytes(client.fetch(name, 0, version=4).records)
        for offset in (2**63 - 1, -(2**63), 2**31):
            assert client.fetch(name, offset).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
        for partition in (-1, 1, 2**31 - 1):
            assert client.fetch(name, 0, partition=partition).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_topics_that_were_imported_from_one_log_are_told_apart_by_name(tmp_path: Path, cli: TierCli) -> None:
    cli.named = "copy-0"
    other = LogBuilder()  # with the id of the first topic
    other.put("z=1")
    with served(cli.config) as endpoint, Client(endpoint) as client:
        topic_id = client.metadata(TOPIC).topics[0].topic_id
        assert client.fetch("", 0, version=17, topic_id=topic_id).error_code == 0
        cli.bring(other.write(tmp_path / "other"))
        # By this id, a client could get the other topic's records. A client that knows it asks for metadata again, and then by name.
        wait_for(lambda: client.fetch("", 0, version=17, topic_id=topic_id).error_code == ErrorCode.UNKNOWN_TOPIC_ID)
        assert [topic.topic_id for topic in client.metadata(TOPIC, "copy").topics] == [None, None]
        assert [key for _, key, _ in client.read_all("copy", committed=True)] == [b"z"]
        assert len(client.read_all(TOPIC, committed=True)) == 6


def test_leader_epochs_end_where_the_next_one_begins(client: Client) -> None:
    ends = {0: (0, 2), 1: (0, 2), 3: (3, 5), 4: (4, 6), 5: (-1, -1)}
    for epoch, expected in ends.items():
        row = client.end_of_epoch(TOPIC, epoch)
        assert (row.error_code, row.leader_epoch, row.end_offset) == (0, *expected), epoch


def test_a_client_with_another_leader_epoch_is_told(client: Client) -> None:
    assert client.fetch(TOPIC, 0, epoch=4).error_code == 0
    for epoch, code in ((3, ErrorCode.FENCED_LEADER_EPOCH), (9, ErrorCode.UNKNOWN_LEADER_EPOCH)):
        assert client.fetch(TOPIC, 0, epoch=epoch).error_code == code
        assert client.offset(TOPIC, -1, epoch=epoch).error_code == code
        assert client.end_of_epoch(TOPIC, 0, epoch=epoch).error_code == code


def test_configs_of_topics_are_read_only(client: Client) -> None:
    resource = DescribeConfigsRequest.DescribeConfigsResource
    resources = [resource(resource_type=2, resource_name=TOPIC, configuration_keys=None), resource(resource_type=4, resource_name="0")]
    topic, broker = client.ask(DescribeConfigsRequest(resources=resources)).results
    assert {row.name: row.value for row in topic.configs}["cleanup.policy"] == "compact"
    assert all(row.read_only for row in topic.configs)
    assert broker.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_writes_and_groups_are_refused_with_a_reason(endpoint: Endpoint, client: Client) -> None:
    data = ProduceRequest.TopicProduceData
    records = [data(name=TOPIC, partition_data=[data.PartitionProduceData(index=0, records=b"")])]
    refused = client.ask(ProduceRequest(transactional_id=None, acks=1, timeout_ms=1, topic_data=records))
    row = refused.responses[0].partition_responses[0]
    assert row.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert "only reads" in row.error_message
    # librdkafka looks for a coordinator also where partitions are assigned, and would report an error. What it asks there is refused.
    found = client.ask(FindCoordinatorRequest(key_type=0, coordinator_keys=["g"])).coordinators[0]
    assert (found.error_code, f"{found.host}:{found.port}") == (0, endpoint.address)
    assert client.ask(FindCoordinatorRequest(key="g"), version=2).node_id == endpoint.me.id
    group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=None)
    # Never "no offset": an application would begin again at auto.offset.reset.
    assert client.ask(OffsetFetchRequest(groups=[group], require_stable=False)).groups[0].error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert client.ask(OffsetFetchRequest(group_id="g", topics=None), version=5).error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED
    commit = OffsetCommitRequest.OffsetCommitRequestTopic
    rows = [commit(name=TOPIC, partitions=[commit.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)])]
    answer = client.ask(OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=1, member_id="m", topics=rows))
    assert answer.topics[0].partitions[0].error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED
    joined = client.ask(JoinGroupRequest(group_id="g", session_timeout_ms=1, member_id="", protocol_type="consumer", protocols=[]))
    assert joined.error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert client.ask(InitProducerIdRequest(transactional_id=None)).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    created = client.ask(CreateTopicsRequest(topics=[CreateTopicsRequest.CreatableTopic(name="new", num_partitions=1)], timeout_ms=1))
    assert created.topics[0].error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED


def test_a_newer_version_of_api_versions_is_answered_with_the_oldest(client: Client) -> None:
    client.send(bytes.fromhex("0000000b") + bytes.fromhex("0012 0063 00000007 0001 78"))
    frame = client.receive()
    assert frame[:6] == bytes.fromhex("00000007 0023")  # the correlation id, and UNSUPPORTED_VERSION
    answer = client.ask(ApiVersionsRequest(client_software_name="t", client_software_version="1"))
    assert {row.api_key for row in answer.api_keys} == set(APIS)


def test_a_frame_that_is_no_request_closes_its_connection_and_nothing_else(endpoint: Endpoint, client: Client) -> None:
    draw = random.Random(7)
    frames = [draw.randbytes(draw.randrange(1, 60)) for _ in range(40)]
    frames += [key.to_bytes(2, "big") + draw.randrange(4, 9).to_bytes(2, "big") + draw.randbytes(40) for key in APIS for _ in range(4)]
    closed = 0
    for frame in frames:
        with Client(endpoint) as other:
            other.send(len(frame).to_bytes(4, "big") + frame)
            other._socket.settimeout(2)
            try:
                closed += not other.receive()
            except TimeoutError:
                pass
    assert closed > len(frames) // 2
    for size in (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\0\0\0\0"):
        with Client(endpoint) as other:
            other.send(size)
            assert other.receive() == b""
    assert client.fetch(TOPIC, 0).error_code == 0
    assert endpoint.state.invalid_frames


def test_connections_beyond_the_limit_are_closed(cli: TierCli) -> None:
    cli.set(serve={"max_connections": 2})
    with served(cli.config) as endpoint, Client(endpoint) as first, Client(endpoint) as second:
        assert first.metadata().topics
        assert second.metadata().topics
        with Client(endpoint) as third:
            assert third.receive() == b""
        assert endpoint.state.refused == 1


def test_a_client_that_takes_nothing_is_dropped_and_holds_up_nobody(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli", {"serve": {"request_timeout_ms": 500, "max_response_bytes": 1 << 25}})
    log = LogBuilder()
    for number in range(40):
        log.put(*(f"k{number}-{one}={'x' * 9000}" for one in range(100)))
    cli.bring(log.write(tmp_path / "log"))
    with served(cli.config) as endpoint:
        slow = [Client(endpoint) for _ in range(4)]
        for one in slow:
            one.post(fetch_request(TOPIC, 0, max_bytes=30 << 20), 12)  # and takes nothing
        with Client(endpoint) as quick:
            assert quick.fetch(TOPIC, 0).error_code == 0
        deadline = time.monotonic() + 30
        wait_for(lambda: endpoint.state.accepted == 5)
        while endpoint.state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not endpoint.state.connections
        assert endpoint.state.in_flight == 0
        for one in slow:
            one._socket.close()


# ---- who may connect -------------------------------------------------------------------------------------------------------------


def test_users_read_their_topics_only(tmp_path: Path, cli: TierCli) -> None:
    users = tmp_path / "users.toml"
    users.write_text('[alice]\npassword = "secret"\ntopics = ["orders"]\n[bob]\npassword = "other"\ntopics = ["payments-.*"]\n')
    users.chmod(0o600)
    cli.set(serve={"users_file": str(users)})
    with served(cli.config) as endpoint:
        with Client(endpoint) as stranger:
            stranger.send(bytes.fromhex("0000000f 0003 0001 00000001 0001 78 00000000"))
            assert stranger.receive() == b""
        with Client(endpoint) as wrong:
            assert wrong.log_in("alice", "guess") == ErrorCode.SASL_AUTHENTICATION_FAILED
        with Client(endpoint) as alice:
            assert alice.log_in("alice", "secret") == 0
            assert alice.fetch(TOPIC, 0).error_code == 0
        with Client(endpoint) as bob:
            assert bob.log_in("bob", "other") == 0
            assert bob.metadata().topics == []
            assert bob.metadata(TOPIC).topics[0].error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            assert bob.fetch(TOPIC, 0).error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            assert bob.offset(TOPIC, -1).error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        users.write_text('[bob]\npassword = "new"\ntopics = [".*"]\n')
        endpoint.request_settings_change(endpoint.tier.settings)
        with Client(endpoint) as bob:
            assert bob.log_in("bob", "new") == 0
            assert bob.fetch(TOPIC, 0).error_code == 0


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("[a]\npassword = 'x'\ntopics = ['.*']", 0o644, "everybody may read"),
        ("[a]\npassword = ''\ntopics = ['.*']", 0o600, "needs a password"),
        ("[a]\npassword = 'sEcReT'\ntopics = ['(']", 0o600, "not a regular expression"),
        ("password = sEcReT", 0o600, "not valid TOML"),
        ("", 0o600, "names nobody"),
    ],
)
def test_a_file_of_users_that_is_not_valid_is_refused_without_repeating_it(tmp_path: Path, text: str, mode: int, message: str) -> None:
    file = tmp_path / "users.toml"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(UsageError, match=message) as caught:
        access.load_users(str(file))
    assert "sEcReT" not in str(caught.value)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for localhost and its key, and return both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    made = made.not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    certificate, key_file = folder / "tls.crt", folder / "tls.key"
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_file.write_bytes(private)
    return certificate, key_file


def test_tls_with_users_is_needed_where_others_can_connect(tmp_path: Path, cli: TierCli) -> None:
    certificate, key = self_signed(tmp_path)
    plain = ServeSettings()
    safe = plain.model_copy(update={"tls_certificate": str(certificate), "tls_key": str(key), "users_file": "users.toml"})
    for host in ("127.0.0.1", "::1", "localhost"):
        access.require_safe_listener(plain, host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "reader-0"):
        access.require_safe_listener(safe, host)
        for less in ({"tls_certificate": ""}, {"users_file": ""}):
            with pytest.raises(UsageError, match="without TLS and users"):
                access.require_safe_listener(safe.model_copy(update=less), host)
    assert access.tls_context(safe) is not None
    with pytest.raises(UsageError, match="cannot be used"):
        access.tls_context(safe.model_copy(update={"tls_key": str(certificate)}))


# ---- replicas and pages ----------------------------------------------------------------------------------------------------------


def test_partitions_move_only_to_and_from_a_replica_that_comes_or_goes() -> None:
    nodes = [Node(number, f"reader-{number}", 9192) for number in range(4)]
    names = [TopicPartition("orders", number) for number in range(400)]
    four = {name: leader_of(name, nodes) for name in names}
    three = {name: leader_of(name, nodes[:3]) for name in names}
    assert all(three[name] == node for name, node in four.items() if node.id != 3)
    counts = [sum(node.id == number for node in four.values()) for number in range(4)]
    assert min(counts) > 60


def test_a_replica_sends_clients_to_the_leader_of_a_partition(cli: TierCli) -> None:
    cli.set(serve={"nodes": ["0@127.0.0.1:1", "1@127.0.0.1:2"], "node_id": 0})
    other = leader_of(TopicPartition(TOPIC, 0), parse_nodes(ServeSettings(nodes=("0@127.0.0.1:1", "1@127.0.0.1:2")), "127.0.0.1:1")[1])
    with served(cli.config) as endpoint, Client(endpoint) as client:
        assert client.metadata().topics[0].partitions[0].leader_id == other.id
        expected = 0 if other.id == 0 else ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert client.fetch(TOPIC, 0).error_code == expected
    with pytest.raises(UsageError, match="this one"):
        parse_nodes(ServeSettings(nodes=("1@a:2",), node_id=0), "127.0.0.1:1")


def test_pages_say_who_reads_what(endpoint: Endpoint, client: Client) -> None:
    assert list(read_batches(bytes(client.fetch(TOPIC, 0).records)))
    client.fetch(TOPIC, 6)
    pages = EndpointPages(endpoint)
    document = pages.document()
    assert (document.connections, document.problem, document.partitions[0].partition) == (1, "", "orders-0")
    assert document.requests["FetchRequest"] == 2
    page = pages.respond_to_request("/")
    assert (page.code, b"orders-0" in page.body, endpoint.address.encode() in page.body) == (200, True, True)
    metrics = pages.respond_to_request("/metrics").body.decode()
    assert 'tiered_compactor_serve_end_offset{partition="0",topic="orders"} 6.0' in metrics
    assert [pages.respond_to_request(path).code for path in ("/healthz", "/readyz", "/api/status", "/nothing")] == [200, 200, 200, 404]
    endpoint.state.problem = "the store does not answer"
    assert pages.respond_to_request("/readyz").code == 503
