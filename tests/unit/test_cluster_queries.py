"""What is asked of the cluster when a tier is opened."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from compactor.adapters.brokers.admin import KafkaAdmin
from compactor.adapters.brokers.cluster import AdminClusterQueries
from compactor.adapters.kafka_client import KafkaConnection
from compactor.errors import Unavailable


def test_the_cluster_id_needs_no_answer_from_a_broker_that_has_just_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Unavailable("settings of broker 3: Timed out", hint="Try again")

    admin = KafkaAdmin(KafkaConnection("a:9092"))
    monkeypatch.setattr(admin, "_request_settings_of_resources", refuse)
    monkeypatch.setattr(
        admin, "_session", SimpleNamespace(client=None, request_cluster_metadata=lambda what: SimpleNamespace(cluster_id="some cluster"))
    )
    assert AdminClusterQueries(admin).cluster_id() == "some cluster"
