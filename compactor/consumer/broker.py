"""The broker's side of a consumer, as a port: partitions read from given offsets, and told where the broker has no such offset any more.

Conformance: tests/contract/test_broker_log.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from compactor.consumer.messages import MessageLike
from compactor.errors import NotFound, Refused, StoreError
from compactor.metadata_topic.connection import ClientErrors, KafkaConnection, ask, load, mapped
from compactor.model.ids import TopicPartition

_GROUP = "tiered-consumer"
"""librdkafka wants one; nothing is ever joined or committed."""


_PASSING = ("GROUP_AUTHORIZATION_FAILED", "UNKNOWN")
"""librdkafka looks for the coordinator of the group, whom nobody here needs; brokers that have just started answer unknown."""


class LogBounds(NamedTuple):
    """The first offset that a broker has of a partition, and the one that the next record gets (of a consumer's view)."""

    start: int
    end: int


@dataclass(frozen=True)
class Fetched:
    """``messages`` ascend within each partition. ``out_of_range``: partitions whose offset is not there; they are not read any further."""

    messages: Sequence[MessageLike] = ()
    out_of_range: Sequence[TopicPartition] = ()


@dataclass
class _Found:
    messages: list[MessageLike] = field(default_factory=list)
    out_of_range: list[TopicPartition] = field(default_factory=list)


class BrokerLog(Protocol):
    """For one thread. Raises Unavailable, Refused; ``fetch`` only what waiting does not mend."""

    def read_from(self, offsets: Mapping[TopicPartition, int]) -> None:
        """These partitions are read too from now on, each from its offset; one that is read already goes there."""

    def stop(self, names: Iterable[TopicPartition]) -> None:
        """Nothing more of these comes. Those that are not read are passed over."""

    def fetch(self, limit: int, timeout_s: float) -> Fetched:
        """What has come, at most ``limit`` messages; waits for the first one."""

    def bounds(self, name: TopicPartition) -> LogBounds: ...

    def offset_at(self, name: TopicPartition, timestamp_ms: int) -> int | None:
        """Of the first record that is at least that young; None where there is none."""

    def close(self) -> None: ...


class ConfluentBroker:
    """BrokerLog over confluent-kafka (the extra ``kafka``), which is imported on first use; messages are its own.

    :param committed: isolation level read_committed.
    """

    def __init__(self, connection: KafkaConnection, *, committed: bool = True) -> None:
        self._connection = connection
        self._committed = committed
        self._listener = ClientErrors()
        self._client: Any = None
        self._names: set[TopicPartition] = set()

    def read_from(self, offsets: Mapping[TopicPartition, int]) -> None:
        kafka = load()
        self.stop(offsets)
        wanted = [kafka.TopicPartition(name.topic, name.partition, offset) for name, offset in offsets.items()]
        if wanted:
            self._consumer().incremental_assign(wanted)
            self._names |= set(offsets)

    def stop(self, names: Iterable[TopicPartition]) -> None:
        kafka = load()
        known = self._names & set(names)
        if known:
            self._consumer().incremental_unassign([kafka.TopicPartition(*name) for name in known])
            self._names -= known

    def fetch(self, limit: int, timeout_s: float) -> Fetched:
        found = _Found()
        for message in self._consumer().consume(limit, timeout_s):
            error = message.error()
            if error is None:
                found.messages.append(message)
                continue
            told = mapped(error, self._connection.bootstrap_servers, f"{message.topic()}-{message.partition()}")
            if isinstance(told, NotFound):
                name = TopicPartition(message.topic(), message.partition())
                if name in self._names:
                    found.out_of_range.append(name)
            elif isinstance(told, Refused) and error.name() not in _PASSING:
                raise told
        self.stop(found.out_of_range)
        refusal = self._listener.refusal(self._connection.bootstrap_servers, "reading")
        if refusal is not None and not found.messages:
            raise refusal
        return Fetched(found.messages, found.out_of_range)

    def bounds(self, name: TopicPartition) -> LogBounds:
        kafka = load()
        place = kafka.TopicPartition(*name)
        consumer = self._consumer()
        return LogBounds(*self._ask(name, lambda seconds: consumer.get_watermark_offsets(place, timeout=seconds)))

    def offset_at(self, name: TopicPartition, timestamp_ms: int) -> int | None:
        kafka = load()
        place = kafka.TopicPartition(*name, timestamp_ms)
        consumer = self._consumer()
        (found,) = self._ask(name, lambda seconds: consumer.offsets_for_times([place], timeout=seconds))
        return None if found.offset < 0 else int(found.offset)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self, name: TopicPartition, attempt: Any) -> Any:
        try:
            return ask(self._connection, self._listener, f"offsets of {name}", attempt)
        except NotFound as error:
            raise StoreError(error.message, hint=error.hint) from None

    def _consumer(self) -> Any:
        if self._client is None:
            settings = self._connection.settings(
                self._listener,
                group_id=_GROUP,
                enable_auto_commit=False,
                enable_auto_offset_store=False,
                auto_offset_reset="error",
                isolation_level="read_committed" if self._committed else "read_uncommitted",
            )
            self._client = load().Consumer(settings)
        return self._client
