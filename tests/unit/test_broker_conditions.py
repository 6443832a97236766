"""What has to be so before a brokers' tier is compacted, and whose settings are the policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.config import load
from compactor.errors import UsageError
from compactor.metadata_topic.admin import BrokerFacts, ClusterFacts, Setting, TopicFacts
from compactor.tier.conditions import topic_problem, version_problem

RIGHT = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "remote.storage.enable": "true"}


def facts(**changes: str | None) -> TopicFacts:
    said = {**RIGHT, **{name.replace("_", "."): value for name, value in changes.items()}}
    return TopicFacts("orders", b"i" * 16, {}, {name: Setting(value, "topic") for name, value in said.items() if value is not None})


def test_a_topic_that_brokers_keep_whole_may_be_compacted() -> None:
    assert topic_problem(facts()) == ""


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
    assert topic_problem(facts(**{setting: value})).startswith(said)


@pytest.mark.parametrize(("version", "refused"), [("3.7", True), ("3.8", False), ("3.9", False), ("4", False), ("", False), ("2.8", True)])
def test_brokers_before_3_8_are_refused(version: str, refused: bool) -> None:
    problem = version_problem(ClusterFacts("cluster", (BrokerFacts(1, "host:1", "4"), BrokerFacts(2, "host:2", version))))
    assert problem == (f"broker 2 is of version {version}, it must be 3.8 or newer" if refused else "")


def test_topics_tables_go_before_the_topic_and_that_before_cleaner(tmp_path: Path) -> None:
    path = tmp_path / "tiered-compactor.toml"
    path.write_text('[cleaner]\nsegment_bytes = 1000\nbloom = false\n[topics."ord.*"]\ndelete_retention_ms = 7\n')
    settings = load(str(path), {})
    chosen = {"delete.retention.ms": "8", "segment.bytes": "2000", "min.cleanable.dirty.ratio": "0.25", "retention.ms": "-1"}
    cleaner = settings.cleaner_for("orders", chosen)
    assert (cleaner.delete_retention_ms, cleaner.segment_bytes, cleaner.min_cleanable_dirty_ratio, cleaner.bloom) == (7, 2000, 0.25, False)
    assert settings.source_for("orders", "segment_bytes", chosen) == "topic orders"
    assert settings.source_for("orders", "delete_retention_ms", chosen) == f'{path}, [topics."ord.*"]'
    assert (settings.source_for("orders", "bloom", chosen), settings.source_for("orders", "map_engine", chosen)) == (str(path), "default")
    assert settings.cleaner_for("other", chosen).delete_retention_ms == 8
    assert settings.cleaner_for("other").segment_bytes == 1000


def test_settings_that_do_not_go_together_are_told() -> None:
    with pytest.raises(UsageError, match="the settings of topic orders and \\[cleaner\\] do not go together: .*min_compaction_lag_ms"):
        load(None, {}).cleaner_for("orders", {"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "5"})
