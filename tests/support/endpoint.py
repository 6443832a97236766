"""An endpoint in this process, and a client of one connection that shows each response as it is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from kafka.protocol.consumer import FetchRequest, FetchResponse, ListOffsetsRequest, OffsetForLeaderEpochRequest
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.serve.endpoint import Endpoint
from compactor.features.serve.protocol import APIS
from compactor.views.checkpoints import read_only_copy
from tests.plain_format import Batch, read_batches
from tests.support.waiting import wait_for

RecordTuple = tuple[int, bytes | None, bytes | None]


@contextmanager
def served(config: Path, change_tier: Callable[[Tier], Tier] = lambda tier: tier, *, listen: str = "127.0.0.1:0") -> Iterator[Endpoint]:
    """Run an endpoint over the tier of a configuration, on a free port. Its state of the tier is at most 10 ms old by default."""
    settings = load_settings(str(config), {})
    if "refresh_ms" not in settings.serve.model_fields_set:
        settings = settings.model_copy(update={"serve": settings.serve.model_copy(update={"refresh_ms": 10})})
    endpoint = Endpoint(change_tier(read_only_copy(open_tier(settings))), settings, listen)
    thread = threading.Thread(target=endpoint.run)
    thread.start()
    try:
        wait_for(lambda: endpoint.requests is not None and not endpoint.state.problem)
        yield endpoint
    finally:
        endpoint.request_stop()
        thread.join(20)
        assert not thread.is_alive()


def fetch_request(
    topic: str, offset: int, committed: bool = True, max_bytes: int = 1 << 20, partition: int = 0, epoch: int = -1, wait_ms: int = 0,
    topic_id: Any = None,
) -> FetchRequest:  # fmt: skip
    rows = FetchRequest.FetchTopic.FetchPartition(
        partition=partition, current_leader_epoch=epoch, fetch_offset=offset, last_fetched_epoch=-1, log_start_offset=-1,
        partition_max_bytes=max_bytes,
    )  # fmt: skip
    topics = [FetchRequest.FetchTopic(topic=topic, topic_id=topic_id, partitions=[rows])]
    return FetchRequest(
        replica_id=-1, max_wait_ms=wait_ms, min_bytes=1, max_bytes=max_bytes, isolation_level=int(committed), session_id=0,
        session_epoch=-1, topics=topics, forgotten_topics_data=[], rack_id="",
    )  # fmt: skip


@dataclass(frozen=True)
class Listener:
    """Address of a broker, or of an endpoint in another process."""

    address: str


class HasAddress(Protocol):
    """An endpoint, or a broker."""

    @property
    def address(self) -> str: ...


class Client:
    """One connection. Requests are kafka-python's messages, sent with the newest version that the endpoint offers."""

    def __init__(self, endpoint: HasAddress) -> None:
        host, _, port = endpoint.address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=20)
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> bytes:
        """Return the next frame, without its length; empty if the connection was closed."""
        head = self._exactly(4)
        return self._exactly(int.from_bytes(head, "big")) if head else b""

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except ConnectionError:
                return b""
            if not part:
                return b""
            data += part
        return data

    def post(self, request: Any, version: int) -> None:
        """Send a request, and do not wait for its response."""
        self._number += 1
        request.API_VERSION = version
        request.with_header(correlation_id=self._number, client_id="test")
        self.send(bytes(request.encode(header=True, framed=True)))

    def ask(self, request: Any, version: int | None = None) -> Any:
        """Send a request and return its response."""
        version = APIS[request.API_KEY].last if version is None else version
        self.post(request, version)
        frame = self.receive()
        assert frame, "the connection was closed"
        found = APIS[request.API_KEY].response.decode(frame, version=version, header=True)
        assert found.header.correlation_id == self._number
        return found

    def fetch(
        self, topic: str, offset: int, *, committed: bool = True, max_bytes: int = 1 << 20, partition: int = 0, epoch: int = -1,
        wait_ms: int = 0, version: int = 12, topic_id: Any = None,
    ) -> Any:  # fmt: skip
        """Ask for one partition, and return its row of the response."""
        request = fetch_request(topic, offset, committed, max_bytes, partition, epoch, wait_ms, topic_id)
        response: FetchResponse = self.ask(request, version)
        assert (response.error_code, response.session_id) == (0, 0), "no session is begun"
        return response.responses[0].partitions[0]

    def metadata(self, *topics: str) -> Any:
        wanted = [MetadataRequest.MetadataRequestTopic(topic_id=None, name=name) for name in topics] if topics else None
        return self.ask(MetadataRequest(topics=wanted, allow_auto_topic_creation=False))

    def offset(self, topic: str, timestamp: int, *, committed: bool = False, epoch: int = -1, partition: int = 0) -> Any:
        row = ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition
        rows = row(partition_index=partition, current_leader_epoch=epoch, timestamp=timestamp)
        topics = [ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=[rows])]
        return self.ask(ListOffsetsRequest(replica_id=-1, isolation_level=int(committed), topics=topics)).topics[0].partitions[0]

    def end_of_epoch(self, topic: str, leader_epoch: int, epoch: int = -1) -> Any:
        rows = OffsetForLeaderEpochRequest.OffsetForLeaderTopic.OffsetForLeaderPartition(
            partition=0, current_leader_epoch=epoch, leader_epoch=leader_epoch
        )
        topics = [OffsetForLeaderEpochRequest.OffsetForLeaderTopic(topic=topic, partitions=[rows])]
        return self.ask(OffsetForLeaderEpochRequest(replica_id=-1, topics=topics)).topics[0].partitions[0]

    def log_in(self, name: str, password: str) -> int:
        """Return the error code of a login by SASL PLAIN."""
        assert self.ask(SaslHandshakeRequest(mechanism="PLAIN")).error_code == 0
        code: int = self.ask(SaslAuthenticateRequest(auth_bytes=f"\0{name}\0{password}".encode())).error_code
        return code

    def read_all(self, topic: str, *, committed: bool, max_bytes: int = 1 << 20, is_librdkafka: bool = False) -> list[RecordTuple]:
        """Read a topic as a consumer does, from its start to its end, and return offset, key and value of the records it shows."""
        offset = self.offset(topic, -2).offset
        end = self.offset(topic, -1, committed=committed).offset
        records: list[RecordTuple] = []
        while offset < end:
            row = self.fetch(topic, offset, committed=committed, max_bytes=max_bytes)
            assert row.error_code == 0, row
            after, found = self.shown(row, offset, committed=committed, is_librdkafka=is_librdkafka)
            if after == offset:
                break  # a hole ends the log
            records += found
            offset = after
        return records

    @staticmethod
    def shown(row: Any, offset: int, *, committed: bool, is_librdkafka: bool = False) -> tuple[int, list[RecordTuple]]:
        """Return the position after a response to a fetch at ``offset``, and the records in it that a consumer shows."""
        batches = list(read_batches(bytes(row.records or b"")))
        aborted = [(one.producer_id, one.first_offset) for one in row.aborted_transactions or ()]
        shown = shown_by_librdkafka if is_librdkafka else shown_by_java
        wanted = shown(batches, aborted) if committed else [batch for batch in batches if not batch.control]
        records = [(one.offset, one.key, one.value) for batch in wanted for one in batch.records if one.offset >= offset]
        return batches[-1].last_offset + 1 if batches else offset, records


def shown_by_java(batches: Sequence[Batch], aborted: Sequence[tuple[int, int]]) -> Iterator[Batch]:
    """The batches that Java's consumer shows (CompletedFetch): a producer is aborted from an entry's offset on to its next abort marker."""
    coming, now = sorted(aborted, key=lambda entry: entry[1]), set[int]()
    for batch in batches:
        while coming and coming[0][1] <= batch.last_offset:
            now.add(coming.pop(0)[0])
        if batch.control:
            if batch.records and batch.records[0].key is not None and batch.records[0].key[2:4] == b"\0\0":
                now.discard(batch.producer_id)
        elif not (batch.transactional and batch.producer_id in now):
            yield batch


def shown_by_librdkafka(batches: Sequence[Batch], aborted: Sequence[tuple[int, int]]) -> Iterator[Batch]:
    """The batches that librdkafka shows (rdkafka_msgset_reader.c): each abort marker takes one entry of its producer off."""
    entries: dict[int, list[int]] = {}
    for producer, first in sorted(aborted, key=lambda entry: entry[1]):
        entries.setdefault(producer, []).append(first)
    for batch in batches:
        mine = entries.get(batch.producer_id, [])
        if batch.control:
            is_abort = batch.records and batch.records[0].key is not None and batch.records[0].key[2:4] == b"\0\0"
            if is_abort and mine and mine[0] <= batch.base_offset:
                mine.pop(0)
        elif not (batch.transactional and mine and batch.base_offset >= mine[0]):
            yield batch
