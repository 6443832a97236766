"""Question to a cluster whether topics exist, asked by their ids (Metadata request, version 12: KIP-516).

librdkafka asks by name only. kafka-python asks by id; it is a part of the extra ``kafka``, and is imported on first use.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from compactor.brokers.metadata_topic.codec import uuid_bytes
from compactor.brokers.metadata_topic.connection import KafkaConnection
from compactor.constants import TopicId
from compactor.errors import Refused, Unavailable, UsageError

UNKNOWN_TOPIC_ID_CODE = 100
"""Kafka's error code for an id that no topic of the cluster has."""
TIMEOUT_MS = 10_000
IDS_PER_REQUEST = 1_000

_PROPERTIES = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}
"""Properties of librdkafka and what kafka-python calls them."""


@dataclass(frozen=True)
class ExistingAndMissingTopicIds:
    """A cluster's answers about topic ids: ids that no topic has, and ids of topics that exist. Ids with any other answer are left out."""

    cluster_id: str
    missing: tuple[TopicId, ...]
    present: tuple[TopicId, ...]


def query_which_topic_ids_exist(connection: KafkaConnection, topic_ids: Sequence[TopicId]) -> ExistingAndMissingTopicIds:
    """Ask a cluster whether topics with these ids exist.

    Only UNKNOWN_TOPIC_ID for the id itself counts as missing: a topic that may not be described, or any other error, is left out.

    :raises Unavailable: or Refused, if the cluster cannot be asked.
    :raises UsageError: for connection properties that kafka-python does not support.
    """
    missing: list[TopicId] = []
    present: list[TopicId] = []
    with _open_kafka_python_client(connection) as client:
        cluster_id = client.describe_cluster()["cluster_id"]
        for start in range(0, len(topic_ids), IDS_PER_REQUEST):
            asked = {uuid.UUID(bytes=uuid_bytes(text)): text for text in topic_ids[start : start + IDS_PER_REQUEST]}
            for topic in client.describe_topics(list(asked)):
                text = asked.get(uuid.UUID(str(topic["topic_id"])))
                if text and topic["error_code"] in (0, UNKNOWN_TOPIC_ID_CODE):
                    (missing if topic["error_code"] else present).append(text)
        if client.describe_cluster()["cluster_id"] != cluster_id:
            raise Unavailable("another cluster answers by now", hint="It is retried")
    return ExistingAndMissingTopicIds(cluster_id or "", tuple(missing), tuple(present))


@contextmanager
def _open_kafka_python_client(connection: KafkaConnection) -> Iterator[Any]:
    """Yield a connected client of kafka-python, and close it afterwards. Its errors are raised as Unavailable or Refused."""
    try:
        from kafka import KafkaAdminClient
        from kafka.errors import AuthorizationError, KafkaError, SaslAuthenticationFailedError
    except ImportError as error:
        raise UsageError(f"a Kafka client is missing ({error})", hint="pip install 'tiered-compactor[kafka]'") from error
    try:
        client = KafkaAdminClient(**kafka_python_options(connection))
        try:
            yield client
        finally:
            client.close()
    except (AuthorizationError, SaslAuthenticationFailedError) as error:
        raise Refused(f"ask about topic ids: {error}") from None
    except (KafkaError, OSError) as error:
        raise Unavailable(f"ask about topic ids: {error}", hint="It is retried") from None


def kafka_python_options(connection: KafkaConnection) -> dict[str, Any]:
    """Return the options with which kafka-python connects as this connection does. Raises UsageError for a TLS or login property for which
    kafka-python has no option.
    """
    options: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in connection.bootstrap_servers.split(",")],
        "client_id": "tiered-compactor",
        "request_timeout_ms": TIMEOUT_MS,
        "bootstrap_timeout_ms": TIMEOUT_MS,
    }
    for name, value in connection.properties.items():
        if name in _PROPERTIES:
            options[_PROPERTIES[name]] = value.upper() if name == "security.protocol" else value
        elif name == "ssl.endpoint.identification.algorithm":
            options["ssl_check_hostname"] = value != "none"
        elif name.startswith(("ssl.", "sasl.", "enable.ssl", "https.", "oauth")):
            raise UsageError(
                f"topics cannot be asked about by id with the property {name}", hint='Keep on_topic_deletion = "keep" under [tier]'
            )
    return options
