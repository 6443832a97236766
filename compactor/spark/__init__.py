"""Spark: a data source over remote segments, the distributed offset map, full re-compaction. Imports nothing heavy by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Makes ``spark.read.format("kafka-tiered")`` known to a session. Raises UsageError for a version of Spark that is not supported."""
    from compactor.spark.cluster.versions import check_pyspark
    from compactor.spark.datasource import KafkaTieredSource

    check_pyspark()
    spark.dataSource.register(KafkaTieredSource)
