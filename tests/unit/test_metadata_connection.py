"""What goes wrong before a broker answers: one clear line each. No broker is needed for these."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError

from compactor.adapters import kafka_client as connection
from compactor.adapters.brokers.admin import (
    KafkaAdmin,
    KafkaSetting,
    PartitionLeaderAndOffsets,
    TopicDescription,
    metadata_topic_problem,
)
from compactor.adapters.brokers.chain import AgentClusterQueriesOverKafka
from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient
from compactor.adapters.kafka_client import ClientErrorRecorder, KafkaConnection, NoSuchTopic, translate_kafka_error
from compactor.constants import LeaderEpoch
from compactor.errors import CompactorError, NotFound, Refused, Unavailable, UsageError

ASKS: dict[str, Callable[[KafkaConnection], object]] = {
    "identity": lambda brokers: ConfluentKafkaMetadataTopicClient(brokers).identity(),
    "append": lambda brokers: ConfluentKafkaMetadataTopicClient(brokers).append(0, b"x"),
    "cluster": lambda brokers: KafkaAdmin(brokers).describe_cluster(),
    "topics": lambda brokers: KafkaAdmin(brokers).describe_metadata_topic(),
    "leaders": lambda brokers: AgentClusterQueriesOverKafka(brokers).leaders(),
}


def nobody_there() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("what", ASKS)
def test_no_broker(what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    servers = nobody_there()
    monkeypatch.setattr(connection, "_LOG_INTERVAL_S", 0.4)
    with pytest.raises(Unavailable, match=f"no broker answers at {servers}.*Connection refused"):
        ASKS[what](KafkaConnection(servers, timeout_s=2))
    told = [record for record in caplog.records if f"no broker answers at {servers}; waited" in record.getMessage()]
    assert told
    assert all(vars(record)["transient"] for record in told)


@pytest.mark.parametrize("what", ASKS)
def test_properties_that_librdkafka_does_not_take(what: str) -> None:
    with pytest.raises(Refused, match="No such configuration property"):
        ASKS[what](KafkaConnection("127.0.0.1:1", {"no.such.thing": "1"}))
    with pytest.raises(Refused, match=r"ssl\.ca\.location failed"):
        ASKS[what](KafkaConnection("127.0.0.1:1", {"security.protocol": "SSL", "ssl.ca.location": "missing.pem"}))


@pytest.mark.parametrize("what", ASKS)
def test_without_the_client_it_says_what_to_install(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(UsageError, match=r"pip install 'tiered-compactor\[kafka\]'"):
        ASKS[what](KafkaConnection("127.0.0.1:1"))


@pytest.mark.parametrize("name", ["acks", "transactional.id", "isolation.level", "group.id", "enable.auto.commit"])
def test_properties_that_are_not_free(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        KafkaConnection("127.0.0.1:1", {name: "x"})


def test_a_connection_needs_brokers() -> None:
    with pytest.raises(UsageError, match="no broker is named"):
        KafkaConnection(" ")


def test_nothing_takes_part_in_a_transaction_or_commits() -> None:
    settings = KafkaConnection("b:1", {"client.id": "mine"}).client_settings(ClientErrorRecorder(), group_id="g", enable_auto_commit=False)
    assert "transactional.id" not in settings
    assert (settings["client.id"], settings["group.id"], settings["enable.auto.commit"]) == ("mine", "g", False)


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (KafkaError._SSL, Refused, "TLS"),
        (KafkaError._AUTHENTICATION, Refused, "refuses the login"),
        (KafkaError.SASL_AUTHENTICATION_FAILED, Refused, "refuses the login"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, Refused, "not authorized"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, NoSuchTopic, "topic or partition does not exist"),
        (KafkaError._UNKNOWN_TOPIC, NoSuchTopic, "topic or partition does not exist"),
        (KafkaError.OFFSET_OUT_OF_RANGE, NotFound, "no longer exists"),
        (KafkaError._AUTO_OFFSET_RESET, NotFound, "no longer exists"),
        (KafkaError._BAD_MSG, Refused, "b:1 does not answer as a Kafka broker does"),
        (KafkaError._TRANSPORT, Unavailable, "no broker answers"),
        (KafkaError.NOT_LEADER_FOR_PARTITION, Unavailable, "NOT_LEADER"),
        (KafkaError.NOT_ENOUGH_REPLICAS, Unavailable, "NOT_ENOUGH_REPLICAS"),
        (KafkaError.MSG_SIZE_TOO_LARGE, Refused, "MSG_SIZE_TOO_LARGE"),
    ],
)
def test_errors_are_sorted_by_what_to_do_next(code: int, kind: type[CompactorError], said: str) -> None:
    found = translate_kafka_error(KafkaError(code), "b:1", "append")
    assert type(found) is kind
    assert said in str(found)


def test_the_gravest_word_of_a_connection_is_kept() -> None:
    listener = ClientErrorRecorder()
    listener.record_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    listener.record_error(KafkaError(KafkaError._AUTHENTICATION))
    listener.record_error(KafkaError(KafkaError._TRANSPORT))
    assert isinstance(listener.tls_or_login_error("b:1", "read"), Refused)
    listener.clear_error()
    assert listener.tls_or_login_error("b:1", "read") is None


def topic(log_start: int = 0, **settings: str) -> TopicDescription:
    known = {"cleanup_policy": "delete", "retention_ms": "-1", "retention_bytes": "-1"} | settings
    listed = {name.replace("_", "."): KafkaSetting(value, "topic") for name, value in known.items() if value}
    return TopicDescription("__remote_log_metadata", b"i" * 16, {0: PartitionLeaderAndOffsets(1, LeaderEpoch(0), log_start, 9, 9)}, listed)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (topic(), ""),
        (topic(cleanup_policy="compact"), "cleanup.policy of __remote_log_metadata is compact, it must be delete"),
        (topic(cleanup_policy="compact,delete"), "compact,delete"),
        (topic(retention_ms="604800000"), "--add-config retention.ms=-1"),
        (topic(retention_bytes="1000"), "retention.bytes"),
        (topic(retention_ms=""), "retention.ms of __remote_log_metadata is unknown"),
        (topic(log_start=7), "lost its beginning in partitions [0]"),
    ],
)
def test_a_metadata_topic_that_loses_records_is_a_problem(facts: TopicDescription, said: str) -> None:
    found: Any = metadata_topic_problem(facts)
    assert (said in found) if said else found == ""


def test_what_the_owner_has_set_is_told_from_defaults() -> None:
    settings = {"delete.retention.ms": KafkaSetting("5", "topic"), "segment.bytes": KafkaSetting("9", "default")}
    facts = TopicDescription("orders", b"i" * 16, {}, settings)
    assert facts.topic_level_settings() == {"delete.retention.ms": "5"}
