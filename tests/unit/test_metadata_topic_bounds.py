"""Asking brokers for the bounds of the metadata topic while they refuse at once."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient, FirstAndEndOffsets
from compactor.adapters.kafka_client import KafkaConnection
from compactor.errors import Unavailable

TIMEOUT_S = 30.0


def test_bounds_wait_no_longer_for_one_answer_than_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    now = [1000.0]

    def refuse(numbers: Collection[int], seconds: float) -> dict[int, FirstAndEndOffsets]:
        waits.append(seconds)
        return {}

    topic = ConfluentKafkaMetadataTopicClient(KafkaConnection("a:9092", timeout_s=TIMEOUT_S))
    monkeypatch.setattr(topic, "_partitions", 1)
    monkeypatch.setattr(topic, "_leaders", {0: 1})
    monkeypatch.setattr(topic, "_fetch_bounds", refuse)
    monkeypatch.setattr(topic, "identity", lambda: None)
    monkeypatch.setattr("compactor.adapters.brokers.topic.time.monotonic", lambda: now[0])
    monkeypatch.setattr("compactor.adapters.brokers.topic.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with pytest.raises(Unavailable):
        topic.bounds()
    assert len(waits) > 100
    assert max(waits) <= TIMEOUT_S  # librdkafka takes no wait of more than an hour
