"""Connections to Kafka brokers: client properties, retries, and translation of librdkafka's errors.

librdkafka retries a broker that refuses it and reports the reason only in a callback; ClientErrorRecorder stores that reason, and
``retry_until_answered`` stops retrying if it is permanent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from compactor.errors import NotFound, Refused, StoreError, Unavailable, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from confluent_kafka import KafkaError


_log = logging.getLogger(__name__)


class NoSuchTopic(Refused): ...


_ATTEMPT_TIMEOUT_S = 0.5
_RETRY_DELAY_S = 0.1
_LOG_INTERVAL_S = 3.0
"""Seconds after which an unanswered request is logged, and between two such lines."""
_FUTURE_POLL_S = 0.005
_RESERVED_PROPERTIES = (
    "bootstrap.servers", "group.id", "enable.auto.commit", "enable.auto.offset.store", "isolation.level", "auto.offset.reset",
    "enable.partition.eof", "enable.idempotence", "acks", "transactional.id", "allow.auto.create.topics",
)  # fmt: skip
_TLS_ERRORS = ("_SSL",)
_LOGIN_ERRORS = ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "ILLEGAL_SASL_STATE")
_NETWORK_ERRORS = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE")
_RETRIABLE_ERRORS = (
    "_TIMED_OUT", "_TIMED_OUT_QUEUE", "_MSG_TIMED_OUT", "REQUEST_TIMED_OUT", "LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION",
    "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "BROKER_NOT_AVAILABLE", "_PURGE_QUEUE", "_PURGE_INFLIGHT",
    "REPLICA_NOT_AVAILABLE", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "OFFSET_NOT_AVAILABLE", "NETWORK_EXCEPTION",
)  # fmt: skip
_MEANINGS: tuple[tuple[tuple[str, ...], type[StoreError], str, str], ...] = (
    (_TLS_ERRORS, Refused, "TLS with {servers} fails: {detail}", "Check security.protocol and the ssl.* properties"),
    (_LOGIN_ERRORS, Refused, "{servers} refuses the login: {detail}", "Check sasl.mechanism, sasl.username and sasl.password"),
    (
        ("TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"),
        Refused,
        "{request}: not authorized ({name})",
        "Grant the user of this program what is missing with kafka-acls --bootstrap-server HOST:PORT --add",
    ),
    (
        ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID"),
        NoSuchTopic,
        "{request}: the topic or partition does not exist",
        "Check the name, and that these are the right brokers. They create __remote_log_metadata when they start with remote storage",
    ),
    (
        ("OFFSET_OUT_OF_RANGE", "_AUTO_OFFSET_RESET", "_LOG_TRUNCATION"),
        NotFound,
        "{request}: the offset no longer exists ({detail})",
        "",
    ),
    (
        ("_BAD_MSG",),
        Refused,
        "{request}: {servers} does not answer as a Kafka broker does ({detail})",
        "Check the port in bootstrap_servers, and security.protocol",
    ),
    (
        _NETWORK_ERRORS,
        Unavailable,
        "{request}: no broker answers at {servers} ({detail})",
        "Is it running, and is security.protocol right?",
    ),
)
"""Names of librdkafka's errors, the kind of error that they become, its message and its hint."""
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class KafkaConnection:
    """Bootstrap servers and librdkafka's properties. Raises UsageError for properties that must not be set. timeout_s: for which a request
    is retried.
    """

    bootstrap_servers: str
    properties: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.bootstrap_servers.strip():
            raise UsageError("no broker is named", hint="Set bootstrap_servers to host:port, several with commas between")
        for name in self.properties:
            if name in _RESERVED_PROPERTIES:
                raise UsageError(f"the property {name} cannot be set", hint="Reading and writing the metadata topic safely depends on it")

    @property
    def producer_delivery_timeout_ms(self) -> int:
        """Milliseconds after which a producer's record cannot arrive any more."""
        detail = self.properties.get("delivery.timeout.ms") or self.properties.get("message.timeout.ms")
        return int(detail) if detail and detail.isdigit() and int(detail) > 0 else int(self.timeout_s * 1000)

    def client_settings(self, listener: ClientErrorRecorder, **ours: object) -> dict[str, Any]:
        """Configuration of a client. ``ours``: further properties, with underscores for dots."""
        fixed = {name.replace("_", "."): value for name, value in ours.items()}
        return {
            "client.id": "tiered-compactor",
            "allow.auto.create.topics": False,
            "socket.timeout.ms": int(self.timeout_s * 1000),
            **self.properties,
            "bootstrap.servers": self.bootstrap_servers,
            **fixed,
            "error_cb": listener.record_error,
            "logger": _LibrdkafkaDebugLogger(),
        }


class ClientErrorRecorder:
    """Recorder of the most severe error since librdkafka's last successful answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: KafkaError | None = None

    def record_error(self, error: KafkaError) -> None:
        """Store an error unless a more severe one is stored."""
        with self._lock:
            known = self._error
            if known is None or _error_severity_rank(error.name()) >= _error_severity_rank(known.name()):
                self._error = error

    def clear_error(self) -> None:
        with self._lock:
            self._error = None

    @property
    def most_severe_error(self) -> KafkaError | None:
        with self._lock:
            return self._error

    def tls_or_login_error(self, servers: str, request_name: str) -> Refused | None:
        """Stored error if it is about TLS or login, so that retrying is pointless."""
        error = self.most_severe_error
        if error is None or _error_severity_rank(error.name()) < 2:
            return None
        found = translate_kafka_error(error, servers, request_name)
        return found if isinstance(found, Refused) else None


class _LibrdkafkaDebugLogger(logging.Handler):
    def log(self, level: int, message: str, *arguments: object) -> None:
        _log.debug(message, *arguments)


def load_confluent_kafka() -> Any:
    """Raises UsageError if confluent_kafka is not installed."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise UsageError(f"a Kafka client is missing ({error})", hint="pip install 'tiered-compactor[kafka]'") from error
    return confluent_kafka


def create_kafka_client(factory: Callable[[], Any]) -> Any:
    """Raises Refused if librdkafka rejects a property or cannot read a file."""
    kafka = load_confluent_kafka()
    try:
        return factory()
    except (kafka.KafkaException, ValueError, TypeError) as error:
        raise Refused(f"the Kafka client cannot be created: {error}", hint="Check the properties of the connection") from None


def retry_until_answered(
    connection: KafkaConnection, listener: ClientErrorRecorder, request_name: str, send_once: Callable[[float], T]
) -> T:
    """Call ``send_once`` (with the seconds that the attempt may take) until it returns. Raises Unavailable after the connection's
    ``timeout_s``, and at once an error that a retry cannot solve.
    """
    kafka = load_confluent_kafka()
    began = time.monotonic()
    deadline, next_line = began + connection.timeout_s, began + _LOG_INTERVAL_S
    while True:
        now = time.monotonic()
        left = deadline - now
        if now >= next_line and left > _ATTEMPT_TIMEOUT_S:
            waiting = f"{request_name}: no broker answers at {connection.bootstrap_servers}; waited"
            _log.warning("%s %.0f of %.0f s", waiting, now - began, connection.timeout_s, extra={"transient": True})
            next_line = now + _LOG_INTERVAL_S
        try:
            answer = send_once(max(0.1, min(_ATTEMPT_TIMEOUT_S, left)))
        except kafka.KafkaException as raised:
            error: KafkaError = raised.args[0]
            if error.name() not in (*_NETWORK_ERRORS, *_RETRIABLE_ERRORS) or left <= _ATTEMPT_TIMEOUT_S:
                raise _error_after_retries(error, connection, listener, request_name) from None
            time.sleep(_RETRY_DELAY_S)
        except TimeoutError:
            if left <= _ATTEMPT_TIMEOUT_S:
                raise no_answer_error(connection, listener, request_name) from None
        else:
            listener.clear_error()
            return answer
        refusal = listener.tls_or_login_error(connection.bootstrap_servers, request_name)
        if refusal is not None:
            raise refusal


class RetriedAdminRequest(Generic[K, T]):
    """Admin request that ``retry_until_answered`` can repeat. Calling it returns all answers, or raises TimeoutError.

    If the known controller or leader has died, no answer comes; therefore the metadata is refreshed and the request sent again, while
    answers to the first are still accepted.

    :param topic: topic whose leaders are needed; None for all topics.
    """

    def __init__(self, client: Any, send: Callable[[], Mapping[K, Future[T]]], topic: str | None = None) -> None:
        self._client = client
        self._send = send
        self._topic = topic
        self._sent: list[Mapping[K, Future[T]]] = []
        self._patience_s = 0.0
        self._again = 0.0

    def __call__(self, timeout_s: float) -> dict[K, T]:
        deadline = time.monotonic() + timeout_s
        self._client.poll(0)  # callbacks are made by it
        if time.monotonic() >= self._again:
            if self._patience_s:
                self._client.list_topics(self._topic, timeout=timeout_s)
            self._patience_s = 1.5 * self._patience_s or timeout_s
            self._again = time.monotonic() + self._patience_s
            self._sent.append(self._send())
        while True:
            for sent in self._sent:
                if all(future.done() for future in sent.values()):
                    self._sent.remove(sent)
                    self._again = 0.0  # where it is an error
                    return {key: future.result() for key, future in sent.items()}
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(_FUTURE_POLL_S)


class LazyKafkaAdminClient:
    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._listener = ClientErrorRecorder()
        self._client: Any = None

    @property
    def client(self) -> Any:
        """Raises Refused if the connection's properties are invalid."""
        if self._client is None:
            self._client = create_kafka_client(
                lambda: load_confluent_kafka().admin.AdminClient(self._connection.client_settings(self._listener))
            )
        return self._client

    def send_request(self, request_name: str, send: Callable[[], Mapping[K, Future[T]]]) -> dict[K, T]:
        """Answers under the keys of their futures. Raises Unavailable, Refused or NotFound."""
        return retry_until_answered(self._connection, self._listener, request_name, RetriedAdminRequest(self.client, send))

    def request_cluster_metadata(self, request_name: str) -> Any:
        client = self.client
        return retry_until_answered(
            self._connection, self._listener, request_name, lambda seconds: [client.poll(0), client.list_topics(timeout=seconds)][1]
        )

    def close(self) -> None:
        self._client = None


def translate_kafka_error(error: KafkaError, servers: str, request_name: str) -> StoreError:
    name, detail = error.name(), error.str()
    for names, kind, text, hint in _MEANINGS:
        if name in names:
            return kind(text.format(request=request_name, servers=servers, name=name, detail=detail), hint=hint)
    if name in _RETRIABLE_ERRORS or error.retriable():
        return Unavailable(f"{request_name}: {detail} ({name})", hint="Try again")
    return Refused(f"{request_name}: {detail} ({name})")


def _error_after_retries(error: KafkaError, connection: KafkaConnection, listener: ClientErrorRecorder, request_name: str) -> StoreError:
    refusal = listener.tls_or_login_error(connection.bootstrap_servers, request_name)
    if refusal is not None:
        return refusal
    if error.name() in (*_RETRIABLE_ERRORS, *_NETWORK_ERRORS) and (received := listener.most_severe_error) is not None:
        return translate_kafka_error(received, connection.bootstrap_servers, request_name)
    return translate_kafka_error(error, connection.bootstrap_servers, request_name)


def no_answer_error(connection: KafkaConnection, listener: ClientErrorRecorder, request_name: str) -> StoreError:
    """Most severe error that the client reported, else Unavailable."""
    received = listener.most_severe_error
    if received is not None:
        return translate_kafka_error(received, connection.bootstrap_servers, request_name)
    return Unavailable(f"{request_name}: no answer from {connection.bootstrap_servers} within {connection.timeout_s:g} s", hint="Try again")


def _error_severity_rank(error_name: str) -> int:
    if error_name in (*_TLS_ERRORS, *_LOGIN_ERRORS):
        return 2
    return 1 if error_name in ("_TRANSPORT", "_RESOLVE") else 0
