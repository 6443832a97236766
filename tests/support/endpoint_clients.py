"""Kafka's clients, one of each family, that read a whole partition by `assign`: of an endpoint or of a broker."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import aiokafka
import pytest
from kafka import KafkaConsumer, TopicPartition as KafkaPythonPartition

from tests.broker_soak.readers import JavaReader, LibrdkafkaReader
from tests.support.endpoint import RecordTuple
from tests.support.go_tools import Unbuildable, go_program
from tests.support.kafka_jars import VERSIONS, BrokerJars, BrokerUnavailable, broker_jars
from tests.support.kafka_traffic import READ_COMMITTED, READ_UNCOMMITTED

FRANZ: Final = Path(__file__).parents[1] / "features" / "serve" / "franz"
SILENT_S: Final = 3.0
"""Seconds without a record after which a partition is taken to be read: aborted records and holes may be what is left."""
Reading = Callable[[str, bool], list[RecordTuple]]


@dataclass
class Address:
    """Address of an endpoint or a broker, and the jars of Kafka's own client."""

    bootstrap: str
    version: str = VERSIONS[0]

    @property
    def jars(self) -> BrokerJars:
        try:
            return broker_jars(self.version)
        except BrokerUnavailable as error:
            pytest.skip(str(error))

    def client_settings(self) -> dict[str, str]:
        return {"bootstrap.servers": self.bootstrap}


class Family:
    """One kind of client, with connections that last, as applications keep them. Partition 0 of a topic is read from start to end."""

    def __init__(self, name: str, address: str) -> None:
        kind, _, version = name.partition(" ")
        where = Address(address, version or VERSIONS[0])
        readers: dict[str, Callable[[], Any]] = {
            "librdkafka": lambda: {committed: LibrdkafkaReader(where, is_committed=committed) for committed in (True, False)},
            "Java": lambda: {committed: JavaReader(where, is_committed=committed) for committed in (True, False)},
        }
        self._address = address
        self._readers = readers[kind]() if kind in readers else {}
        self._read: Reading = {"kafka-python": self._kafka_python, "aiokafka": self._aiokafka, "franz-go": self._franz}.get(
            kind, self._by_reader
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for reader in self._readers.values():
            reader.close()

    def read(self, topic: str, *, committed: bool) -> list[RecordTuple]:
        """Return offset, key and value of the records that this client shows."""
        return self._read(topic, committed)

    def _by_reader(self, topic: str, committed: bool) -> list[RecordTuple]:
        return [(one.offset, one.record.key, one.record.value) for one in self._readers[committed].read(topic, 0).found]

    def _kafka_python(self, topic: str, committed: bool) -> list[RecordTuple]:
        isolation = READ_COMMITTED if committed else READ_UNCOMMITTED
        consumer = KafkaConsumer(
            bootstrap_servers=self._address, group_id=None, isolation_level=isolation, auto_offset_reset="none", fetch_max_wait_ms=100
        )
        partition, found = KafkaPythonPartition(topic, 0), list[RecordTuple]()
        try:
            consumer.assign([partition])
            end = consumer.end_offsets([partition])[partition]
            consumer.seek(partition, consumer.beginning_offsets([partition])[partition])
            quiet = time.monotonic()
            while consumer.position(partition) < end and time.monotonic() - quiet < SILENT_S:
                for one in consumer.poll(500).get(partition, []):
                    quiet = time.monotonic()
                    found.append((one.offset, one.key, one.value))
        finally:
            consumer.close()
        return found

    def _aiokafka(self, topic: str, committed: bool) -> list[RecordTuple]:
        async def read() -> list[RecordTuple]:
            isolation = READ_COMMITTED if committed else READ_UNCOMMITTED
            consumer = aiokafka.AIOKafkaConsumer(
                bootstrap_servers=self._address, group_id=None, isolation_level=isolation, auto_offset_reset="none", fetch_max_wait_ms=100
            )
            await consumer.start()
            try:
                partition, found = aiokafka.TopicPartition(topic, 0), list[RecordTuple]()
                consumer.assign([partition])
                end = (await consumer.end_offsets([partition]))[partition]
                consumer.seek(partition, (await consumer.beginning_offsets([partition]))[partition])
                quiet = time.monotonic()
                while await consumer.position(partition) < end and time.monotonic() - quiet < SILENT_S:
                    for one in (await consumer.getmany(partition, timeout_ms=500)).get(partition, []):
                        quiet = time.monotonic()
                        found.append((one.offset, one.key, one.value))
                return found
            finally:
                await consumer.stop()

        return asyncio.run(read())

    def _franz(self, topic: str, committed: bool) -> list[RecordTuple]:
        try:
            program = go_program(FRANZ)
        except Unbuildable as error:
            pytest.skip(str(error))
        admin = KafkaConsumer(bootstrap_servers=self._address, group_id=None)
        partition = KafkaPythonPartition(topic, 0)
        start, end = admin.beginning_offsets([partition])[partition], admin.end_offsets([partition])[partition]
        admin.close()
        isolation = READ_COMMITTED if committed else READ_UNCOMMITTED
        command = [str(program), self._address, isolation, topic, "0", str(start), str(end)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout.splitlines()
        assert lines.pop() == "end"
        return [(int(offset), _bytes(key), _bytes(value)) for offset, key, value in map(str.split, lines)]


def _bytes(text: str) -> bytes | None:
    return None if text == "-" else bytes.fromhex(text[1:])
