"""How clients reach the brokers, and what their errors mean: librdkafka's own properties in, one clear line out.

confluent-kafka (the extra ``kafka``) is imported on first use. librdkafka tries a broker that refuses it again and again and tells why
only in a callback, so ClientErrors keeps what it said, and ``ask`` gives up on what will not get better.
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
_SLICE_S = 0.5
_PAUSE_S = 0.1
_LOOK_S = 0.005
_OURS = (
    "bootstrap.servers", "group.id", "enable.auto.commit", "enable.auto.offset.store", "isolation.level", "auto.offset.reset",
    "enable.partition.eof", "enable.idempotence", "acks", "transactional.id", "allow.auto.create.topics",
)  # fmt: skip
_TLS = ("_SSL",)
_LOGIN = ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "ILLEGAL_SASL_STATE")
_RIGHTS = ("TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED")
_NO_TOPIC = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID")
_NO_OFFSET = ("OFFSET_OUT_OF_RANGE", "_AUTO_OFFSET_RESET", "_LOG_TRUNCATION")
_NETWORK = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE")
_WAITING = (
    "_TIMED_OUT", "_TIMED_OUT_QUEUE", "_MSG_TIMED_OUT", "REQUEST_TIMED_OUT", "LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION",
    "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "BROKER_NOT_AVAILABLE", "_PURGE_QUEUE", "_PURGE_INFLIGHT",
    "REPLICA_NOT_AVAILABLE", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "OFFSET_NOT_AVAILABLE", "NETWORK_EXCEPTION",
)  # fmt: skip
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class KafkaConnection:
    """``properties``: librdkafka's (security.protocol, sasl.*, ssl.*, client.id ...). Raises UsageError for those that are not free."""

    bootstrap_servers: str
    properties: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.bootstrap_servers.strip():
            raise UsageError("no broker is named", hint="Set bootstrap_servers to host:port, several with commas between")
        for name in self.properties:
            if name in _OURS:
                raise UsageError(f"the property {name} cannot be set", hint="Reading and writing the metadata topic safely depends on it")

    @property
    def delivery_timeout_ms(self) -> int:
        """How long a producer tries; after that nothing of it arrives any more."""
        said = self.properties.get("delivery.timeout.ms") or self.properties.get("message.timeout.ms")
        return int(said) if said and said.isdigit() and int(said) > 0 else int(self.timeout_s * 1000)

    def settings(self, listener: ClientErrors, **ours: object) -> dict[str, Any]:
        """For a client of confluent-kafka; ``ours`` with underscores in the place of dots."""
        fixed = {name.replace("_", "."): value for name, value in ours.items()}
        return {
            "client.id": "tiered-compactor",
            "allow.auto.create.topics": False,
            "socket.timeout.ms": int(self.timeout_s * 1000),
            **self.properties,
            "bootstrap.servers": self.bootstrap_servers,
            **fixed,
            "error_cb": listener.heard,
            "logger": _Quiet(),
        }


class ClientErrors:
    """What librdkafka last said of its connections: the gravest since the last answer that came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: KafkaError | None = None

    def heard(self, error: KafkaError) -> None:
        with self._lock:
            known = self._error
            if known is None or _gravity(error.name()) >= _gravity(known.name()):
                self._error = error

    def forget(self) -> None:
        with self._lock:
            self._error = None

    @property
    def last(self) -> KafkaError | None:
        with self._lock:
            return self._error

    def refusal(self, servers: str, what: str) -> Refused | None:
        """TLS or login: waiting longer changes nothing."""
        error = self.last
        if error is None or _gravity(error.name()) < 2:
            return None
        found = mapped(error, servers, what)
        return found if isinstance(found, Refused) else None


class _Quiet(logging.Handler):
    """librdkafka's own log lines: for debugging, not for stderr. What matters comes as an error too."""

    def log(self, level: int, message: str, *arguments: object) -> None:
        _log.debug(message, *arguments)


def load() -> Any:
    """The module confluent_kafka. Raises UsageError with what to install."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise UsageError(f"a Kafka client is missing ({error})", hint="pip install 'tiered-compactor[kafka]'") from error
    return confluent_kafka


def made(make: Callable[[], Any]) -> Any:
    """A client; properties that librdkafka does not know, or files that it cannot read, are the user's mistake: Refused."""
    kafka = load()
    try:
        return make()
    except (kafka.KafkaException, ValueError, TypeError) as error:
        raise Refused(f"the Kafka client cannot be made: {error}", hint="Look at the properties of the connection") from None


def ask(connection: KafkaConnection, listener: ClientErrors, what: str, attempt: Callable[[float], T]) -> T:
    """``attempt(seconds)`` again and again until it answers. Raises Unavailable, Refused, NotFound."""
    kafka = load()
    deadline = time.monotonic() + connection.timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            answer = attempt(max(0.1, min(_SLICE_S, left)))
        except kafka.KafkaException as raised:
            error: KafkaError = raised.args[0]
            if error.name() not in (*_NETWORK, *_WAITING) or left <= _SLICE_S:
                raise _failed(error, connection, listener, what) from None
            time.sleep(_PAUSE_S)
        except TimeoutError:
            if left <= _SLICE_S:
                raise unanswered(connection, listener, what) from None
        else:
            listener.forget()
            return answer
        refusal = listener.refusal(connection.bootstrap_servers, what)
        if refusal is not None:
            raise refusal


class AdminAnswers(Generic[K, T]):
    """An attempt for ``ask`` over the admin client: all answers to one request.

    It goes to the controller, or to the leaders, that the client has last heard of. One that has died since does not answer, and the client
    waits for it to the end: so the cluster is looked at anew and the request sent once more, beside the one that a slow broker may yet
    answer.

    :param topic: whose leaders count; none: all that there are.
    """

    def __init__(self, client: Any, send: Callable[[], Mapping[K, Future[T]]], topic: str | None = None) -> None:
        self._client = client
        self._send = send
        self._topic = topic
        self._sent: list[Mapping[K, Future[T]]] = []
        self._patience_s = 0.0
        self._again = 0.0

    def __call__(self, seconds: float) -> dict[K, T]:
        deadline = time.monotonic() + seconds
        self._client.poll(0)  # callbacks are made by it
        if time.monotonic() >= self._again:
            if self._patience_s:
                self._client.list_topics(self._topic, timeout=seconds)
            self._patience_s = 1.5 * self._patience_s or seconds
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
            time.sleep(_LOOK_S)


class AdminSession:
    """An admin client that connects on first use; for one thread."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._listener = ClientErrors()
        self._client: Any = None

    @property
    def client(self) -> Any:
        """Raises Refused where no client can be made of the connection's properties."""
        if self._client is None:
            self._client = made(lambda: load().admin.AdminClient(self._connection.settings(self._listener)))
        return self._client

    def answers(self, what: str, send: Callable[[], Mapping[K, Future[T]]]) -> dict[K, T]:
        """All answers to one request. Raises Unavailable, Refused, NotFound."""
        return ask(self._connection, self._listener, what, AdminAnswers(self.client, send))

    def listed(self, what: str) -> Any:
        """The cluster's metadata: brokers, topics, who leads. One request."""
        client = self.client
        return ask(self._connection, self._listener, what, lambda seconds: [client.poll(0), client.list_topics(timeout=seconds)][1])

    def close(self) -> None:
        self._client = None


def mapped(error: KafkaError, servers: str, what: str) -> StoreError:
    """An error of librdkafka or of a broker, in the words of this program."""
    name, said = error.name(), error.str()
    if name in _TLS:
        return Refused(f"TLS with {servers} fails: {said}", hint="Look at security.protocol and the ssl.* properties")
    if name in _LOGIN:
        return Refused(f"{servers} refuses the login: {said}", hint="Look at sasl.mechanism, sasl.username and sasl.password")
    if name in _RIGHTS:
        return Refused(f"{what}: not authorized ({name})", hint="Grant the user of this program what is missing with kafka-acls --add")
    if name in _NO_TOPIC:
        return Refused(
            f"{what}: there is no such topic or partition", hint="Brokers create the metadata topic when they tier for the first time"
        )
    if name in _NO_OFFSET:
        return NotFound(f"{what}: the offset is not there any more ({said})")
    if name in _NETWORK:
        return Unavailable(f"{what}: no broker answers at {servers} ({said})", hint="Is it running, and is security.protocol right?")
    if name in _WAITING or error.retriable():
        return Unavailable(f"{what}: {said} ({name})", hint="Try again")
    return Refused(f"{what}: {said} ({name})")


def _failed(error: KafkaError, connection: KafkaConnection, listener: ClientErrors, what: str) -> StoreError:
    refusal = listener.refusal(connection.bootstrap_servers, what)
    if refusal is not None:
        return refusal
    if error.name() in (*_WAITING, *_NETWORK) and (heard := listener.last) is not None:
        return mapped(heard, connection.bootstrap_servers, what)
    return mapped(error, connection.bootstrap_servers, what)


def unanswered(connection: KafkaConnection, listener: ClientErrors, what: str) -> StoreError:
    heard = listener.last
    if heard is not None:
        return mapped(heard, connection.bootstrap_servers, what)
    return Unavailable(f"{what}: no answer from {connection.bootstrap_servers} within {connection.timeout_s:g} s", hint="Try again")


def _gravity(name: str) -> int:
    if name in (*_TLS, *_LOGIN):
        return 2
    return 1 if name in ("_TRANSPORT", "_RESOLVE") else 0
