"""Features that one broker supports, by its answer to ApiVersions. Brokers answer it before any login (KIP-152) and to every user.

librdkafka asks the same and does not pass the features on; kafka-python encodes the request.
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compactor.brokers.metadata_topic.connection import KafkaConnection

_log = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 1 << 20
_REQUEST_VERSIONS = (4, 3)
"""Version 3 leaves out features whose lowest level is 0 (KAFKA-17011). Kafka 3.8 has no version 4."""


@dataclass(frozen=True)
class BrokerFeatures:
    """Levels of a broker's features (KIP-584), by feature name. A feature that the broker does not have is missing.

    supported: highest level that the broker supports.
    finalized: level that is in force in the cluster.
    """

    supported: Mapping[str, int] = field(default_factory=dict)
    finalized: Mapping[str, int] = field(default_factory=dict)


def query_broker_features(connection: KafkaConnection, host: str, port: int) -> BrokerFeatures:
    """Ask one broker for its features. Return no features if it does not answer, or if TLS needs properties that only librdkafka reads."""
    try:
        with socket.create_connection((host, port), min(_TIMEOUT_S, connection.timeout_s)) as plain:
            context = _tls_context(connection.properties)
            with context.wrap_socket(plain, server_hostname=host) if context is not None else plain as open_socket:
                return _request_features(open_socket)
    except (OSError, ValueError, ImportError) as error:
        _log.debug("features of the broker at %s:%d are unknown: %s", host, port, error)
        return BrokerFeatures()


def _request_features(open_socket: socket.socket) -> BrokerFeatures:
    """Send ApiVersions over a connected socket, and return the features in the answer."""
    from kafka.protocol.metadata.api_versions import ApiVersionsRequest, ApiVersionsResponse

    for version in _REQUEST_VERSIONS:
        request = ApiVersionsRequest(client_software_name="tiered-compactor", client_software_version="0", version=version)
        request.with_header(version, "tiered-compactor")
        open_socket.sendall(request.encode(version=version, header=True, framed=True))
        [size] = struct.unpack(">i", _read_exactly(open_socket, 4))
        if not 0 < size <= _MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        body = _read_exactly(open_socket, size)
        try:
            answer: Any = ApiVersionsResponse.decode(body, version=version, header=True)
        except Exception as error:  # kafka-python's decoder raises whatever the bytes lead it to
            raise ValueError(f"an answer that is not one to ApiVersions: {error}") from error
        if not answer.error_code:
            return BrokerFeatures(
                {one.name: one.max_version for one in answer.supported_features or ()},
                {one.name: one.max_version_level for one in answer.finalized_features or ()},
            )
    return BrokerFeatures()


def _read_exactly(open_socket: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = open_socket.recv(size - len(received))
        if not part:
            raise OSError("the broker closed the connection")
        received += part
    return bytes(received)


def _tls_context(properties: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return a TLS context as librdkafka's properties describe it, or None for a connection without TLS."""
    if properties.get("security.protocol", "plaintext").lower() not in ("ssl", "sasl_ssl"):
        return None
    context = ssl.create_default_context(cafile=properties.get("ssl.ca.location"), cadata=properties.get("ssl.ca.pem"))
    if properties.get("ssl.endpoint.identification.algorithm") == "none":
        context.check_hostname = False
    if properties.get("enable.ssl.certificate.verification") == "false":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate := properties.get("ssl.certificate.location"):
        context.load_cert_chain(certificate, properties.get("ssl.key.location"), properties.get("ssl.key.password"))
    return context
