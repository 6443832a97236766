"""Spark: a data source over remote segments, the distributed offset map, full re-compaction. Imports nothing heavy by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def register(spark: SparkSession) -> None:
    """Makes ``spark.read.format("kafka-tiered")`` known to a session. Raises UsageError for a version of Spark that is not supported."""
    from compactor.spark.cluster.versions import check_pyspark
    from compactor.spark.datasource import KafkaTieredSource

    check_pyspark()
    spark.dataSource.register(KafkaTieredSource)


def recompact(
    spark: SparkSession, config: str, *, topics: str = ".*", min_benefit: int = 1, force: bool = False, now_ms: int | None = None
) -> DataFrame:
    """Full re-compaction of the topics whose whole name matches, as the command of that name does it, in this session.

    Each partition is published by itself, and an error is its own: it stands in the frame, a row for each partition, with the names that
    Iceberg's ``rewrite_data_files`` has for its counts beside ours.

    :param config: a configuration file. :param now_ms: the cleaner's clock.
    :param min_benefit: partitions whose round would gain less bytes are left alone; ``force``: none is.
    :raises UsageError:
    """
    from compactor.spark.procedure import recompacted

    return recompacted(spark, config, topics, 0 if force else min_benefit, now_ms)
