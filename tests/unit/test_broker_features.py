"""Which features a broker reports to ApiVersions. The broker is a socket here; tests/broker/test_versions.py asks real ones."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kafka.protocol.metadata.api_versions import ApiVersionsResponse

from compactor.adapters.brokers.admin import (
    NEWEST_TESTED,
    OLDER,
    TESTED_MINORS,
    BrokerFeatures,
    is_newer_than_tested,
    minor_version,
    query_broker_features,
)
from compactor.adapters.kafka_client import KafkaConnection

UNSUPPORTED_VERSION = 35


def answer(correlation: int, version: int, error_code: int = 0) -> bytes:
    """An answer with two features; to a version that the broker does not have, as version 0 without any."""
    supported, finalized = ApiVersionsResponse.SupportedFeatureKey, ApiVersionsResponse.FinalizedFeatureKey
    features: dict[str, Any] = {
        "supported_features": [supported(name="metadata.version", min_version=7, max_version=33)],
        "finalized_features_epoch": 1,
        "finalized_features": [finalized(name="remote.log.metadata.version", min_version_level=0, max_version_level=1)],
        "zk_migration_ready": False,
    }
    made = ApiVersionsResponse(
        error_code=error_code,
        api_keys=[],
        version=0 if error_code else version,
        **({} if error_code else {"throttle_time_ms": 0, **features}),
    )
    body = made.encode(version=0 if error_code else version)
    return struct.pack(">ii", len(body) + 4, correlation) + bytes(body)


@contextmanager
def broker(reply: Callable[[int, int], bytes]) -> Iterator[tuple[str, int]]:
    """A listener that answers each request by its correlation id and version. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            taken, _ = server.accept()
            with taken:
                while size := taken.recv(4):
                    request = taken.recv(struct.unpack(">i", size)[0])
                    _, version, correlation = struct.unpack(">hhi", request[:8])
                    taken.sendall(reply(correlation, version))

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[:2]
        thread.join()


@pytest.mark.parametrize("newest", [4, 3])
def test_features_come_from_the_newest_version_of_the_request_that_the_broker_has(newest: int) -> None:
    asked: list[int] = []

    def reply(correlation: int, version: int) -> bytes:
        asked.append(version)
        return answer(correlation, version, 0 if version <= newest else UNSUPPORTED_VERSION)

    with broker(reply) as (host, port):
        found = query_broker_features(KafkaConnection("ignored:1"), host, port)
    assert found == BrokerFeatures({"metadata.version": 33}, {"remote.log.metadata.version": 1})
    assert asked == [4, 3][: 5 - newest]


@pytest.mark.parametrize(
    "reply", [lambda *_: struct.pack(">i", 1 << 30), lambda *_: b"HTTP", lambda *_: struct.pack(">i", 8) + b"\0" * 8, lambda *_: b""]
)
def test_an_answer_that_is_none_means_no_features(reply: Callable[[int, int], bytes]) -> None:
    with broker(reply) as (host, port):
        assert query_broker_features(KafkaConnection("ignored:1", timeout_s=0.3), host, port) == BrokerFeatures()


def test_a_broker_that_cannot_be_reached_has_no_features() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert query_broker_features(KafkaConnection("ignored:1"), "127.0.0.1", port) == BrokerFeatures()
    missing = KafkaConnection("ignored:1", {"security.protocol": "SSL", "ssl.ca.location": "missing.pem"})
    with broker(lambda *_: b"") as (host, port):
        assert query_broker_features(missing, host, port) == BrokerFeatures()


def test_the_level_of_metadata_version_tells_the_minor_version() -> None:
    assert list(TESTED_MINORS.values()) == sorted(TESTED_MINORS.values())
    assert [minor_version(level) for level in TESTED_MINORS.values()] == list(TESTED_MINORS)
    assert (minor_version(19), minor_version(22), minor_version(34)) == (OLDER, "4.0", NEWEST_TESTED)
    assert [is_newer_than_tested(level) for level in (-1, 33, 34)] == [False, False, True]
