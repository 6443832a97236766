"""The endpoint beside a real broker that has the same log: the same records for all clients, and the same errors for the same requests."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.endpoint import Client, Listener, RecordTuple, served
from tests.support.endpoint_clients import Family
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.streams_table import GlobalTable
from tests.support.tier_cli import TierCli


def digest(records: list[RecordTuple]) -> tuple[int, str]:
    return len(records), hashlib.sha256(repr(records).encode()).hexdigest()


FAMILIES = ("librdkafka", "Java", "Java 3.8.1", "franz-go")
"""Families that read every codec; the others need one more library for snappy."""


@pytest.mark.broker
def test_clients_get_the_same_from_endpoint_and_broker(broker: KafkaCluster, broker_admin: ClusterAdmin, tmp_path: Path) -> None:
    topic = f"served-{uuid.uuid4()}"
    story = TopicStory(broker, broker_admin, topic).create({"remote.storage.enable": "false"})
    story.plain()
    story.transactions()
    story.plain()
    cli = TierCli(tmp_path / "cli")
    cli.named = f"{topic}-0"
    # A copy, as of a broker that is gone: the active segment is part of the log.
    log = shutil.copytree(broker.nodes[1].log_dir / f"{topic}-0", tmp_path / "log" / f"{topic}-0")
    cli.do("import", log, "--topic", topic, "--partition", 0)
    with served(cli.config) as endpoint:
        for name in FAMILIES:
            with Family(name, endpoint.address) as ours, Family(name, broker.bootstrap) as theirs:
                for committed in (True, False):
                    assert digest(ours.read(topic, committed=committed)) == digest(theirs.read(topic, committed=committed)), name
        for committed in (True, False):
            tables = {}
            for name, records in (("ours", endpoint.address), ("theirs", broker.bootstrap)):
                folder = tmp_path / f"{name} {committed}"
                with GlobalTable(folder, topic, cluster=broker.bootstrap, records=records, committed=committed) as table:
                    tables[name] = table.entries()
            assert digest_of_table(tables["ours"]) == digest_of_table(tables["theirs"])
            assert tables["ours"]
        broker_end = same_answers(Client(Listener(broker.bootstrap)), topic)
        assert same_answers(Client(endpoint), topic) == broker_end


def digest_of_table(table: dict[bytes, bytes]) -> tuple[int, str]:
    return len(table), hashlib.sha256(repr(sorted(table.items())).encode()).hexdigest()


def same_answers(client: Client, topic: str) -> list[Any]:
    """Error codes of requests before, at and after a log's bounds."""
    with client:
        end = client.offset(topic, -1).offset
        places = (-1, 0, end - 1, end, end + 1)
        rows = [client.fetch(topic, place, version=12, committed=False) for place in places]
        return [(row.error_code, bool(row.records)) for row in rows]
