"""Full re-compaction as a call from PySpark: a tier's configuration in, a data frame of what became of its partitions out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from compactor.bootstrap import open_tier
from compactor.config import load
from compactor.errors import UsageError
from compactor.spark.cluster.executor import Cost
from compactor.spark.cluster.jobs import JobWatch
from compactor.spark.cluster.session import cluster
from compactor.spark.recompaction import Listener, recompact, row_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: Final = {
    "topic": "string", "partition": "int", "status": "string", "reason": "string", "rewritten_data_files_count": "bigint",
    "added_data_files_count": "bigint", "rewritten_bytes_count": "bigint", "failed_data_files_count": "bigint", "records_read": "bigint",
    "records_kept": "bigint", "bytes_read": "bigint", "bytes_written": "bigint", "next_dirty_offset": "bigint", "seconds": "double",
}  # fmt: skip


def recompacted(spark: SparkSession, config: str, topics: str, min_benefit: int, now_ms: int | None) -> DataFrame:
    """See compactor.spark.recompact."""
    settings = load(config)
    tier = open_tier(settings)
    if settings.tier.kind == "kafka":
        tier.create()
    names = [name for name in sorted(tier.partitions()) if re.fullmatch(topics, name.topic)]
    if not names:
        raise UsageError(f"the tier at {tier.ports.layout.url} holds no topic that matches {topics}")
    now = tier.ports.clock_ms() if now_ms is None else now_ms
    with cluster(settings) as started:
        finished = recompact(tier, started.cluster, names, now, Cost(), Listener(JobWatch(), lambda _: None), min_benefit)
    rows = [row_of(one) for one in finished]
    schema = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    return spark.createDataFrame([tuple(row.get(name) for name in COLUMNS) for row in rows], schema)
