"""What has to be so before a brokers' tier is compacted, and whose settings are the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from compactor.brokers.conditions import ClusterSettingsCheckBeforePublication, too_old_broker_reason, topic_settings_refusal_reason
from compactor.brokers.metadata_topic.admin import BrokerDescription, ClusterDescription, KafkaSetting, TopicDescription
from compactor.config.settings import load_settings
from compactor.errors import NotFound, Refused, UsageError
from compactor.model.ids import TopicPartition

RIGHT = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "remote.storage.enable": "true"}


def settings(**changes: str | None) -> dict[str, str]:
    said = {**RIGHT, **{name.replace("_", "."): value for name, value in changes.items()}}
    return {name: value for name, value in said.items() if value is not None}


def test_a_topic_that_brokers_keep_whole_may_be_compacted() -> None:
    assert topic_settings_refusal_reason("orders", settings(), "compact") == ""


def test_a_topic_that_brokers_expire_may_be_compacted_where_our_policy_says_so() -> None:
    finite = settings(retention_ms="604800000")
    assert topic_settings_refusal_reason("orders", finite, "compact,delete") == ""
    assert 'cleanup_policy = "compact,delete"' in topic_settings_refusal_reason("orders", finite, "compact")
    assert topic_settings_refusal_reason("orders", settings(retention_ms=None), "compact,delete").startswith(
        "retention.ms of orders is unknown"
    )
    assert topic_settings_refusal_reason("orders", settings(retention_bytes="1"), "compact,delete").startswith(
        "retention.bytes of orders is 1"
    )


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("retention_ms", "604800000", "retention.ms of orders is 604800000, it must be -1"),
        ("retention_bytes", "1", "retention.bytes of orders is 1, it must be -1"),
        ("cleanup_policy", "compact", "cleanup.policy of orders is compact, it must be delete"),
        ("remote_storage_enable", "false", "remote.storage.enable of orders is false, it must be true"),
        ("retention_ms", None, "retention.ms of orders is unknown"),
    ],
)
def test_others_are_refused_with_the_setting(setting: str, value: str | None, said: str) -> None:
    assert topic_settings_refusal_reason("orders", settings(**{setting: value}), "compact").startswith(said)


@pytest.mark.parametrize(("version", "refused"), [("3.7", True), ("3.8", False), ("3.9", False), ("4", False), ("", False), ("2.8", True)])
def test_brokers_before_3_8_are_refused(version: str, refused: bool) -> None:
    problem = too_old_broker_reason(
        ClusterDescription("cluster", (BrokerDescription(1, "host:1", "4"), BrokerDescription(2, "host:2", version)))
    )
    assert problem == (f"broker 2 is of version {version}, it must be 3.8 or newer" if refused else "")


def test_topics_tables_go_before_the_topic_and_that_before_cleaner(tmp_path: Path) -> None:
    path = tmp_path / "tiered-compactor.toml"
    path.write_text('[cleaner]\nsegment_bytes = 1000\nbloom = false\n[topics."ord.*"]\ndelete_retention_ms = 7\n')
    loaded = load_settings(str(path), {})
    chosen = {"delete.retention.ms": "8", "segment.bytes": "2000", "min.cleanable.dirty.ratio": "0.25", "retention.ms": "-1"}
    cleaner = loaded.cleaner_settings_for_topic("orders", chosen)
    assert (cleaner.delete_retention_ms, cleaner.segment_bytes, cleaner.min_cleanable_dirty_ratio, cleaner.bloom) == (7, 2000, 0.25, False)
    assert loaded.source_of_topic_setting("orders", "segment_bytes", chosen) == "topic orders"
    assert loaded.source_of_topic_setting("orders", "delete_retention_ms", chosen) == f'{path}, [topics."ord.*"]'
    assert (
        loaded.source_of_topic_setting("orders", "bloom", chosen),
        loaded.source_of_topic_setting("orders", "map_engine", chosen),
    ) == (str(path), "default")
    assert loaded.cleaner_settings_for_topic("other", chosen).delete_retention_ms == 8
    assert loaded.cleaner_settings_for_topic("other").segment_bytes == 1000


def test_settings_that_do_not_go_together_are_told() -> None:
    with pytest.raises(UsageError, match="the settings of topic orders and \\[cleaner\\] do not go together: .*min_compaction_lag_ms"):
        load_settings(None, {}).cleaner_settings_for_topic("orders", {"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "5"})


class Cluster:
    """ClusterDescriptionQueries: what is asked, and what is so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.known = {topic: facts(topic) for topic in ("orders", "payments")}
        self.version = "4"

    def describe_cluster(self) -> ClusterDescription:
        self.asked.append("cluster")
        return ClusterDescription("cluster", (BrokerDescription(1, "host:1", self.version),))

    def describe_metadata_topic(self, *, reports_missing_append_permission: bool = False) -> TopicDescription:
        assert reports_missing_append_permission
        self.asked.append("metadata topic")
        return facts("__remote_log_metadata")

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicDescription]:
        self.asked += names
        if missing := [name for name in names if name not in self.known]:
            raise NotFound(f"there is no topic {missing[0]}")
        return {name: self.known[name] for name in names}


def facts(topic: str, topic_id: bytes = b"i" * 16, **changes: str | None) -> TopicDescription:
    return TopicDescription(topic, topic_id, {}, {name: KafkaSetting(value, "topic") for name, value in settings(**changes).items()})


ORDERS = TopicPartition("orders", 0)


def test_the_cluster_is_asked_once_for_all_topics_and_each_topic_once_in_a_while() -> None:
    cluster = Cluster()
    conditions = ClusterSettingsCheckBeforePublication(cluster)
    for name in (ORDERS, TopicPartition("orders", 1), TopicPartition("payments", 0), ORDERS):
        conditions.require_publishing_allowed(name)
    assert cluster.asked == ["metadata topic", "cluster", "orders", "payments"]
    impatient = ClusterSettingsCheckBeforePublication(cluster, max_age_s=0)
    impatient.require_publishing_allowed(ORDERS)
    cluster.known["orders"] = facts("orders", retention_ms="1")
    with pytest.raises(Refused, match="retention.ms of orders is 1"):
        impatient.require_publishing_allowed(ORDERS)
    cluster.known["orders"] = facts("orders")
    impatient.require_publishing_allowed(ORDERS)
    cluster.version = "3.7"
    with pytest.raises(Refused, match="nothing is compacted under these brokers: broker 1 is of version 3.7"):
        impatient.require_publishing_allowed(ORDERS)


def test_a_topic_that_was_made_anew_is_refused_to_what_is_at_work_and_no_longer() -> None:
    cluster = Cluster()
    conditions = ClusterSettingsCheckBeforePublication(cluster, max_age_s=0)
    conditions.require_publishing_allowed(ORDERS)
    cluster.known["orders"] = facts("orders", b"j" * 16)
    with pytest.raises(Refused, match="topic orders was deleted and created again"):
        conditions.require_publishing_allowed(ORDERS)
    conditions.require_publishing_allowed(ORDERS)
    del cluster.known["orders"]
    with pytest.raises(Refused, match="topic orders no longer exists"):
        conditions.require_publishing_allowed(ORDERS)
