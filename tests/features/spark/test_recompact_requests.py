"""Requests of a full re-compaction of many small partitions.

A partition that one executor cleans takes 28 requests and one for each of its segments: 16 for the control log (reading, the gap check,
five records), 1 for the producer snapshot, 6 to write the result and 5 to check it. Every 64 partitions share seven more, for hints.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import import_directory
from compactor.features.spark.jobs import JobListener, SparkCluster
from compactor.features.spark.recompaction import RecompactionListener, recompact_partitions
from compactor.model.ids import TopicPartition
from compactor.round.ports import Costs
from compactor.storage.wrappers import RequestCounters
from tests.builders import LogBuilder
from tests.support.spark_tier import NOW_MS, HereCluster
from tests.support.tier_cli import MADE, typed

PARTITIONS = 32
MOST = 30.5
"""Half of the 61 that it took once."""
RACE = 60
"""Requests of the race that a machine runs before its first write to a store."""


def two_segments(folder: Path) -> Path:
    log = LogBuilder()
    for turn in range(2):
        log.put(*(f"key-{number}={turn}" for number in range(20)), pid=7)
        log.roll()
    return log.write(folder)


def test_a_small_partition_of_two_segments_takes_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    # One after the other, so that whose the tier is, is asked once.
    file.write_text(f'[tier]\nurl = "{(tmp_path / "tier").as_uri()}"\nstate_dir = "{tmp_path}/state"\n[spark]\nled_at_once = 1\n')
    MADE.append(lambda: typed(file, "verify"))
    tier = open_tier(load_settings(str(file), {}))
    names = [TopicPartition("orders", number) for number in range(PARTITIONS)]
    log_dir = two_segments(tmp_path / "log")
    for name in names:
        import_directory(tier, log_dir, name, tier.settings.cleaner.cleaner_policy())
    asked: Counter[str] = Counter()
    monkeypatch.setattr(RequestCounters, "record_request", lambda self, kind: asked.update([kind]))
    done = recompact_partitions(
        tier,
        cast(SparkCluster, HereCluster()),
        names,
        NOW_MS,
        Costs(),
        RecompactionListener(JobListener(), lambda finished: None),
        min_benefit_bytes=1,
    )
    assert not [finished.error for finished in done if finished.error]
    assert [finished.report.status for finished in done if finished.report] == ["cleaned"] * PARTITIONS
    assert sum(asked.values()) <= MOST * PARTITIONS + RACE, asked
    # Before a round is published each of its five objects is compared with its receipt, digests of indexes included.
    assert asked["head"] == 5 * PARTITIONS
    assert asked["list"] == PARTITIONS, "before leading, whether the log has a gap"
