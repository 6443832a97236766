"""Requests and responses of Kafka's protocol that the endpoint knows.

The message types and their encoding are kafka-python's. A frame is four bytes of length and then that many bytes.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple

from kafka.protocol import admin, consumer, metadata, producer, sasl
from kafka.protocol.data_container import DataContainer

from compactor.constants import TopicId


class ErrorCode(IntEnum):
    """From org.apache.kafka.common.protocol.Errors."""

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    NOT_LEADER_OR_FOLLOWER = 6
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    INVALID_REQUEST = 42
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 76
    UNKNOWN_TOPIC_ID = 100


class Api(NamedTuple):
    """first, last: offered versions, inclusive."""

    request: Any
    response: Any
    first: int
    last: int


APIS: Final[dict[int, Api]] = {
    api.request.API_KEY: api
    for api in (
        # Produce is refused. librdkafka does not fetch from a broker that does not offer it (its features MsgVer2 and ZSTD).
        Api(producer.ProduceRequest, producer.ProduceResponse, 3, 9),
        Api(consumer.FetchRequest, consumer.FetchResponse, 4, 17),
        Api(consumer.ListOffsetsRequest, consumer.ListOffsetsResponse, 1, 7),
        Api(metadata.MetadataRequest, metadata.MetadataResponse, 0, 12),
        Api(consumer.OffsetCommitRequest, consumer.OffsetCommitResponse, 2, 9),
        Api(consumer.OffsetFetchRequest, consumer.OffsetFetchResponse, 1, 9),
        Api(metadata.FindCoordinatorRequest, metadata.FindCoordinatorResponse, 0, 5),
        Api(consumer.JoinGroupRequest, consumer.JoinGroupResponse, 0, 9),
        Api(sasl.SaslHandshakeRequest, sasl.SaslHandshakeResponse, 1, 1),
        Api(metadata.ApiVersionsRequest, metadata.ApiVersionsResponse, 0, 4),
        Api(admin.CreateTopicsRequest, admin.CreateTopicsResponse, 2, 7),
        Api(producer.InitProducerIdRequest, producer.InitProducerIdResponse, 0, 4),
        Api(consumer.OffsetForLeaderEpochRequest, consumer.OffsetForLeaderEpochResponse, 2, 4),
        Api(admin.DescribeConfigsRequest, admin.DescribeConfigsResponse, 1, 4),
        Api(sasl.SaslAuthenticateRequest, sasl.SaslAuthenticateResponse, 0, 2),
        Api(admin.DescribeClusterRequest, admin.DescribeClusterResponse, 0, 1),
    )
}


MOST_ROWS: Final = 50_000
"""Number of topics, partitions and the like in a request: each costs memory and time, and others wait."""
_ENDLESS_NUMBER: Final = re.compile(rb"[\x80-\xff]{4096}")
"""Longer than any number of the protocol. The library's decoder knows no limit, and its time grows faster than the length."""


class InvalidFrame(Exception):
    """Raised if a frame is not a known request. The connection is closed."""


class Request(NamedTuple):
    """body: kafka-python's message; None if the version of an ApiVersions request is not offered (KIP-511)."""

    key: int
    version: int
    correlation_id: int
    client_id: str
    body: Any


def decode_request(frame: bytes, may_send: Callable[[int], bool] = lambda key: True) -> Request:
    """The frame is without its length. Raises InvalidFrame.

    :param may_send: whether the client may send a type of request now; others are not decoded.
    """
    if len(frame) < 8:
        raise InvalidFrame("it is shorter than a request header")
    key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
    correlation_id = int.from_bytes(frame[4:8], "big", signed=True)
    api = APIS.get(key)
    if api is None:
        raise InvalidFrame(f"the request type {key} is not served")
    if not may_send(key):
        raise InvalidFrame("it must authenticate first")
    if not api.first <= version <= api.last:
        if key == metadata.ApiVersionsRequest.API_KEY:
            return Request(key, version, correlation_id, "", None)
        raise InvalidFrame(f"version {version} of {api.request.__name__} is not served")
    if _ENDLESS_NUMBER.search(frame):
        raise InvalidFrame(f"{api.request.__name__} has a number without an end")
    try:
        body = api.request.decode(frame, version=version, header=True)
    except Exception as error:  # whatever the decoder makes of arbitrary bytes, they are no request
        raise InvalidFrame(f"{api.request.__name__} cannot be read: {type(error).__name__}") from error
    # Each row is at least one byte.
    if len(frame) > MOST_ROWS and (rows := _count_rows(body)) > MOST_ROWS:
        raise InvalidFrame(f"{api.request.__name__} has {rows} rows; allowed are {MOST_ROWS}")
    return Request(key, version, correlation_id, body.header.client_id or "", body)


def _count_rows(message: Any) -> int:
    lists = (value for name in message.fields if isinstance(value := getattr(message, name, None), list))
    return sum(len(rows) + sum(_count_rows(row) for row in rows if isinstance(row, DataContainer)) for rows in lists)


def encode_response(request: Request, response: Any) -> bytearray:
    """Frame with its length. The version is the request's; 0 where that one is not offered (KIP-511)."""
    response.API_VERSION = 0 if request.body is None else request.version
    response.with_header(correlation_id=request.correlation_id)
    encoded: bytearray = response.encode(header=True, framed=True)
    return encoded


def api_versions(request: Request) -> Any:
    response = metadata.ApiVersionsResponse
    return response(
        error_code=ErrorCode.NONE if request.body is not None else ErrorCode.UNSUPPORTED_VERSION,
        api_keys=[response.ApiVersion(api_key=key, min_version=api.first, max_version=api.last) for key, api in sorted(APIS.items())],
        throttle_time_ms=0,
    )


def uuid_of_topic_id(topic_id: TopicId) -> uuid.UUID:
    """Zero, which clients take for none, if the topic id is empty."""
    return uuid.UUID(bytes=base64.urlsafe_b64decode(topic_id + "==")) if topic_id else uuid.UUID(int=0)
