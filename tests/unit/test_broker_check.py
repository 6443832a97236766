"""What `config check` says of brokers: what is unsafe, and the command that mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from typing_extensions import override

from compactor.access.metadata import BrokerManagedTierMetadataSource
from compactor.access.tier import Tier
from compactor.adapters.brokers.admin import (
    BrokerDescription,
    ClusterDescription,
    KafkaSetting,
    MissingPermission,
    PartitionLeaderAndOffsets,
    TopicDescription,
)
from compactor.adapters.brokers.cluster import KAFKA_METADATA_MANAGER, ClusterConfirmations
from compactor.adapters.brokers.codec import TOPIC
from compactor.config.settings import PublishSettings, Settings, TierSettings
from compactor.constants import LeaderEpoch
from compactor.control.logs import open_catalog
from compactor.errors import Refused
from compactor.storage.wrappers import RequestCounters
from compactor.upkeep.broker_doctor import (
    check_cluster,
    check_record_rate,
    check_topics,
)
from tests.metadata_events import finished
from tests.support.broker_metadata import brokers_of
from tests.support.memory_store import Clock, MemoryStore, ports_on

LED = {0: PartitionLeaderAndOffsets(1, LeaderEpoch(3), 0, 10, 10)}
FOREVER = {
    "cleanup.policy": KafkaSetting("delete", "topic"),
    "retention.ms": KafkaSetting("-1", "topic"),
    "retention.bytes": KafkaSetting("-1", "default"),
}
METADATA = TopicDescription(TOPIC, bytes(16), LED, FOREVER)
ORDERS = TopicDescription("orders", bytes(16), LED, FOREVER | {"remote.storage.enable": KafkaSetting("true", "topic")})
NINE = BrokerDescription(1, "a:9092", "3.9", metadata_version=21, metadata_manager=KAFKA_METADATA_MANAGER)
FOUR = replace(NINE, id=2, address="b:9092", version="4.0", metadata_version=25)
SOUND = ClusterDescription("cluster", (NINE, FOUR))


@dataclass
class Answers:
    facts: ClusterDescription = SOUND
    metadata: TopicDescription = METADATA
    known: dict[str, TopicDescription] = field(default_factory=lambda: {"orders": ORDERS})
    refuses: bool = False

    def describe_cluster(self) -> ClusterDescription:
        if self.refuses:
            raise Refused("a:9092 refuses the login", hint="Check sasl.mechanism")
        return self.facts

    def describe_metadata_topic(self, *, reports_missing_append_permission: bool = False) -> TopicDescription:
        return self.metadata

    def describe_topics(self, names: Sequence[str], *, reports_missing_append_permission: bool = False) -> dict[str, TopicDescription]:
        return {name: self.known[name] for name in names}


def test_a_sound_cluster_has_no_findings() -> None:
    assert check_cluster(Answers(), "a:9092", reports_missing_append_permission=True) == []
    assert check_topics(Answers(), ["orders"]) == []


def test_brokers_that_refuse_are_one_line() -> None:
    [found] = check_cluster(Answers(refuses=True), "a:9092", reports_missing_append_permission=False)
    assert (found.severity, found.kind, found.detail, found.hint) == (
        "error",
        "brokers",
        "a:9092 refuses the login",
        "Check sasl.mechanism",
    )


def test_old_untested_and_unknown_brokers_are_warnings_and_the_metadata_topic_is_checked_all_the_same() -> None:
    brokers = (replace(NINE, version="3.7", metadata_version=19), FOUR, replace(NINE, id=3, metadata_version=99))
    answers = Answers(ClusterDescription("cluster", brokers), replace(METADATA, settings={}))
    found = check_cluster(answers, "a:9092", reports_missing_append_permission=True)
    assert [(one.severity, one.kind, one.object) for one in found] == [
        ("warning", "old-brokers", "broker 1 (a:9092)"),
        ("warning", "untested-brokers", "broker 3 (a:9092)"),
        ("error", "metadata-topic", TOPIC),
    ]
    assert "allow_untested_brokers = true" in found[1].hint


@pytest.mark.parametrize(("publishes", "severity"), [(True, "error"), (False, "warning")])
def test_an_unknown_metadata_manager_is_an_error_where_rounds_are_published(publishes: bool, severity: str) -> None:
    answers = Answers(ClusterDescription("cluster", (NINE, replace(FOUR, metadata_manager=""))))
    [found] = check_cluster(answers, "a:9092", reports_missing_append_permission=publishes)
    assert (found.severity, found.kind, found.object) == (severity, "metadata-manager", "broker 2 (b:9092)")
    assert "--operation DescribeConfigs --cluster" in found.hint
    confirmed = ClusterConfirmations(metadata_manager=KAFKA_METADATA_MANAGER)
    assert check_cluster(answers, "a:9092", reports_missing_append_permission=publishes, confirmed=confirmed) == []


def test_another_metadata_manager_is_an_error_also_where_there_is_no_metadata_topic() -> None:
    class BornWithAnother(Answers):
        @override
        def describe_metadata_topic(self, *, reports_missing_append_permission: bool = False) -> TopicDescription:
            raise Refused("the topic does not exist")

    answers = BornWithAnother(ClusterDescription("cluster", (replace(NINE, metadata_manager="x.Other"),)))
    [found] = check_cluster(answers, "a:9092", reports_missing_append_permission=False)
    assert (found.severity, found.kind) == ("error", "metadata-manager")
    assert "x.Other" in found.detail
    assert KAFKA_METADATA_MANAGER in found.detail


def test_a_metadata_topic_that_forgets_comes_with_its_mending() -> None:
    for name, value in (("cleanup.policy", "compact"), ("retention.ms", "604800000")):
        wrong = replace(METADATA, settings=FOREVER | {name: KafkaSetting(value, "topic")})
        [found] = check_cluster(Answers(metadata=wrong), "a:9092", reports_missing_append_permission=False)
        assert (found.severity, found.kind) == ("error", "metadata-topic")
        # No command turns a compacted topic back: brokers may compact it on purpose (KIP-1266).
        offered = f"kafka-configs --bootstrap-server a:9092 --alter --topic {TOPIC} --add-config {name}=" in found.detail
        assert offered == (name == "retention.ms")


def test_rights_that_are_missing_come_with_the_acl() -> None:
    read = MissingPermission(f"topic {TOPIC}", "READ", "its records cannot be read")
    describe = MissingPermission("the cluster", "DESCRIBE_CONFIGS", "versions are unknown")
    answers = Answers(replace(SOUND, missing_rights=(describe,)), replace(METADATA, missing_rights=(read,)))
    found = check_cluster(answers, "a:9092", reports_missing_append_permission=False)
    assert [(one.severity, one.hint) for one in found] == [
        ("warning", "kafka-acls --bootstrap-server a:9092 --add --allow-principal User:... --operation DescribeConfigs --cluster"),
        ("error", f"kafka-acls --bootstrap-server a:9092 --add --allow-principal User:... --operation Read --topic {TOPIC}"),
    ]


def test_topics_whose_retention_or_policy_is_unsafe() -> None:
    settings = dict(ORDERS.settings) | {
        "retention.ms": KafkaSetting("86400000", "topic"),
        "remote.storage.enable": KafkaSetting("false", "default"),
    }
    found = check_topics(Answers(known={"orders": replace(ORDERS, settings=settings)}), ["orders"], bootstrap_servers="a:9092")
    assert [(one.severity, one.hint) for one in found] == [
        ("error", "kafka-configs --bootstrap-server a:9092 --alter --topic orders --add-config remote.storage.enable=true,retention.ms=-1"),
        ("error", "kafka-configs --bootstrap-server a:9092 --alter --topic orders --add-config remote.storage.enable=true,retention.ms=-1"),
    ]


def test_the_next_step_of_a_compacted_topic_is_one_alteration() -> None:
    """First the policy and then the retention would let brokers delete what is older than seven days."""
    changed = {"cleanup.policy": KafkaSetting("compact", "topic"), "retention.ms": KafkaSetting("604800000", "default")}
    found = check_topics(
        Answers(known={"orders": replace(ORDERS, settings=dict(ORDERS.settings) | changed)}), ["orders"], bootstrap_servers="a:9092"
    )
    command = "kafka-configs --bootstrap-server a:9092 --alter --topic orders --add-config cleanup.policy=delete,retention.ms=-1"
    assert {one.hint for one in found} == {f"{command}, in one command; check first what docs/migrating.md lists"}


@pytest.mark.parametrize(("per_hour", "said"), [(0, 0), (4, 1), (6, 0)])
def test_a_budget_that_a_first_round_does_not_fit_into(tmp_path: Path, per_hour: int, said: int) -> None:
    events = [event for number in range(2) for event in finished(number, number * 10, number * 10 + 9)]
    brokers = brokers_of(events, tmp_path)
    settings = Settings(tier=TierSettings(kind="kafka", layout="kafka-local"), publish=PublishSettings(metadata_records_per_hour=per_hour))
    ports = ports_on(MemoryStore(Clock(), RequestCounters()), Clock())
    opened = Tier(settings, ports, open_catalog(ports), RequestCounters(), metadata=BrokerManagedTierMetadataSource(brokers))
    found = check_record_rate(opened, brokers.list_topic_partitions())
    assert [finding.kind for finding in found] == ["budget"] * said
    assert all("a first round over orders-7 with its 2 segments writes about 6 records" in finding.detail for finding in found)
