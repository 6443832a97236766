"""Which partitions go to Spark by themselves: pure decisions over a partition's assessment."""

from __future__ import annotations

import pytest

from compactor.config.settings import CleanerSettings, SparkSettings
from compactor.round.plan import assess_round, spark_reason
from tests.unit.test_round_plan import NOW, segment, state

MIB = 1 << 20
CLUSTER = SparkSettings(master="spark://host:7077")


def reason(spark: SparkSettings = CLUSTER, *, size: int = 100, records: int = 10, clean: int = 0, **cleaner: object) -> str:
    """Of two segments of this size."""
    settings = CleanerSettings.model_validate({"disk_budget_bytes": 64 * MIB, "map_budget_bytes": MIB, **cleaner})
    live = [segment(n * 10, n * 10 + 9, size, records=records) for n in range(2)]
    return spark_reason(settings, spark, assess_round(state(*live, clean=clean), settings, NOW))


def test_small_partitions_stay() -> None:
    assert reason() == ""
    assert reason(SparkSettings(master="spark://host:7077", above_bytes=200)) == ""


def test_a_partition_above_the_bound_goes() -> None:
    assert "above_bytes" in reason(SparkSettings(master="yarn", above_bytes=199))


def test_a_segment_that_does_not_fit_the_disk_goes() -> None:
    assert reason(size=32 * MIB) == ""
    assert "disk_budget_bytes" in reason(size=32 * MIB + 1)


def test_keys_that_need_many_passes_go() -> None:
    assert reason(records=4_000_000) == ""
    assert reason(records=8_000_000).startswith("the keys would need ")
    assert reason(records=8_000_000, map_budget_bytes=1 << 30) == "", "they fit the memory"


@pytest.mark.parametrize("master", ["local[*]", "local", "local-cluster[2,1,1024]"])
def test_spark_on_this_machine_takes_nothing_by_itself(master: str) -> None:
    assert reason(SparkSettings(master=master, above_bytes=1)) == ""


def test_what_is_not_due_or_has_an_engine_stays() -> None:
    spark = SparkSettings(master="yarn", above_bytes=1)
    assert reason(spark, clean=20) == ""
    assert reason(spark, map_engine="memory") == ""
