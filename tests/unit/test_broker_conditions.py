"""What has to be so before a brokers' tier is compacted, and whose settings are the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compactor.adapters.brokers.admin import (
    NEWEST_TESTED,
    OLDER,
    TESTED_MINORS,
    BrokerDescription,
    ClusterDescription,
    KafkaSetting,
    TopicDescription,
    minor_version,
)
from compactor.adapters.brokers.cluster import (
    KAFKA_METADATA_MANAGER,
    NOTHING_CONFIRMED,
    ClusterConfirmations,
    ClusterSettingsCheckBeforePublication,
    UnsuitableCluster,
    broker_problem,
    topic_settings_refusal_reason,
)
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
        ("cleanup_policy", "", "cleanup.policy of orders is '', it must be delete"),
        ("remote_storage_enable", "false", "remote.storage.enable of orders is false, it must be true"),
        ("retention_ms", None, "retention.ms of orders is unknown"),
    ],
)
def test_others_are_refused_with_the_setting(setting: str, value: str | None, said: str) -> None:
    assert topic_settings_refusal_reason("orders", settings(**{setting: value}), "compact").startswith(said)


NEWEST = TESTED_MINORS[NEWEST_TESTED]


def broker(level: int = NEWEST, number: int = 1, **facts: Any) -> BrokerDescription:
    """A broker that supports this level of metadata.version, -1 if it reports none."""
    known = {"version": minor_version(level), "metadata_version": level, "metadata_manager": KAFKA_METADATA_MANAGER}
    return BrokerDescription(number, f"host:{number}", **{**known, **facts})


def test_brokers_of_each_tested_minor_version_and_mixes_of_them_are_accepted() -> None:
    brokers = [broker(level, number) for number, level in enumerate(TESTED_MINORS.values())]
    assert [one.version for one in brokers] == list(TESTED_MINORS)
    assert broker_problem(brokers, NOTHING_CONFIRMED) is None
    assert broker_problem([broker(24)], NOTHING_CONFIRMED) is None  # of a release candidate of 4.0


@pytest.mark.parametrize(
    ("facts", "cause", "said"),
    [
        ({"level": 19}, "old-brokers", f"broker 2 is of version {OLDER}, it must be 3.8 or newer"),
        ({"level": -1, "version": "2.8"}, "old-brokers", "broker 2 is of version 2.8, it must be 3.8 or newer"),
        ({"level": NEWEST + 1}, "untested-brokers", f"the version of broker 2 is newer than {NEWEST_TESTED}, the newest tested version"),
        ({"level": -1, "version": "4.4"}, "untested-brokers", "the version of broker 2 is unknown"),
        ({"level": -1, "version": ""}, "untested-brokers", "the version of broker 2 is unknown"),
        ({"level": -1, "version": "3.9"}, None, ""),  # by inter.broker.protocol.version
        (
            {"metadata_topic_version": 1},
            "metadata-topic",
            "the feature remote.log.metadata.version is at level 1, it must be 0: from level 1",
        ),
        (
            {"metadata_topic_version": 2},
            "metadata-topic",
            "the feature remote.log.metadata.version is at level 2, it must be 0: from level 1",
        ),
        ({"metadata_manager": ""}, "metadata-manager", "remote.log.metadata.manager.class.name of broker 2 is unknown"),
        (
            {"metadata_manager": "x.Other"},
            "metadata-manager",
            f"broker 2 keeps its metadata by x.Other, and not by {KAFKA_METADATA_MANAGER}",
        ),
    ],
)
def test_one_broker_that_is_unsuitable_rules_out_the_cluster(facts: dict[str, Any], cause: str | None, said: str) -> None:
    problem = broker_problem([broker(), broker(**{"number": 2, **facts})], NOTHING_CONFIRMED)
    assert (problem.cause if problem else None) == cause
    assert problem is None or problem.message.startswith(said)


def test_another_metadata_manager_is_told_before_a_version() -> None:
    problem = broker_problem([broker(19), broker(number=2, metadata_manager="x.Other")], NOTHING_CONFIRMED)
    assert problem is not None
    assert problem.cause == "metadata-manager"


def test_the_configuration_confirms_a_class_or_accepts_untested_brokers_and_nothing_else() -> None:
    class_of_a_vendor = ClusterConfirmations(metadata_manager="x.Vendor")
    for manager in ("", "x.Vendor", KAFKA_METADATA_MANAGER):
        assert broker_problem([broker(metadata_manager=manager)], class_of_a_vendor) is None
    other = broker_problem([broker(metadata_manager="x.Other")], class_of_a_vendor)
    assert other is not None
    assert broker_problem([broker(NEWEST + 1)], class_of_a_vendor) is not None
    untested = ClusterConfirmations(untested_brokers=True)
    for level in (NEWEST + 1, -1):
        assert broker_problem([broker(level, version="4.4")], untested) is None
    assert broker_problem([broker(19)], untested) is not None
    assert broker_problem([broker(NEWEST + 1, metadata_topic_version=2)], untested) is not None
    unknown = broker_problem([broker(metadata_manager="")], untested)
    assert unknown is not None
    assert "--add --allow-principal User:... --operation DescribeConfigs --cluster" in unknown.hint


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


@pytest.mark.parametrize(
    ("table", "chosen", "lags", "yields"),
    [
        ("", {"min.compaction.lag.ms": "200"}, (200, 200), "max_compaction_lag_ms"),
        ("", {"max.compaction.lag.ms": "5"}, (5, 5), "min_compaction_lag_ms"),
        ("max_compaction_lag_ms = 90", {"min.compaction.lag.ms": "200"}, (90, 90), "min_compaction_lag_ms"),
        ("min_compaction_lag_ms = 60", {"max.compaction.lag.ms": "5"}, (60, 60), "max_compaction_lag_ms"),
        ("", {"min.compaction.lag.ms": "20", "max.compaction.lag.ms": "30"}, (20, 30), ""),
    ],
)
def test_of_two_lags_that_contradict_each_other_the_one_with_precedence_holds(
    tmp_path: Path, table: str, chosen: dict[str, str], lags: tuple[int, int], yields: str
) -> None:
    path = tmp_path / "tiered-compactor.toml"
    path.write_text(f"[cleaner]\nmin_compaction_lag_ms = 50\nmax_compaction_lag_ms = 100\n[topics.orders]\n{table}\n")
    loaded = load_settings(str(path), {})
    cleaner = loaded.cleaner_settings_for_topic("orders", chosen)
    assert (cleaner.min_compaction_lag_ms, cleaner.max_compaction_lag_ms) == lags
    names = ["min_compaction_lag_ms", "max_compaction_lag_ms"]
    sources = {name: loaded.source_of_topic_setting("orders", name, chosen) for name in names}
    assert [name for name in names if sources[name] in names] == ([yields] if yields else [])


def test_settings_that_do_not_go_together_are_told() -> None:
    with pytest.raises(UsageError, match="the settings of topic orders and \\[cleaner\\] do not go together: .*min_compaction_lag_ms"):
        load_settings(None, {}).cleaner_settings_for_topic("orders", {"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "5"})


class Cluster:
    """ClusterDescriptionQueries: what is asked, and what is so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.known = {topic: facts(topic) for topic in ("orders", "payments")}
        self.broker = broker()

    def describe_cluster(self) -> ClusterDescription:
        self.asked.append("cluster")
        return ClusterDescription("cluster", (self.broker,))

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
    assert cluster.asked == ["cluster", "metadata topic", "orders", "payments"]
    impatient = ClusterSettingsCheckBeforePublication(cluster, max_age_s=0)
    impatient.require_publishing_allowed(ORDERS)
    cluster.known["orders"] = facts("orders", retention_ms="1")
    with pytest.raises(Refused, match="retention.ms of orders is 1"):
        impatient.require_publishing_allowed(ORDERS)
    cluster.known["orders"] = facts("orders")
    impatient.require_publishing_allowed(ORDERS)
    cluster.broker = broker(metadata_manager="x.Other")
    for require in (impatient.require_suitable_cluster, lambda: impatient.require_publishing_allowed(ORDERS)):
        with pytest.raises(
            UnsuitableCluster, match="nothing is compacted under these brokers: broker 1 keeps its metadata by x.Other"
        ) as told:
            require()
        assert told.value.cause == "metadata-manager"


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
