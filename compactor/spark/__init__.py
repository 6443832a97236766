"""Spark integration: a data source over remote segments, and full re-compaction. Importing it loads neither PySpark nor Arrow."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def register(spark: SparkSession) -> None:
    """Register the data source ``kafka-tiered`` with a Spark session. Raises UsageError if the installed PySpark version is not supported.

    Workers of a local master run the Python of this process, unless PYSPARK_PYTHON or ``spark.pyspark.python`` names another. Spark's
    default, the first ``python3`` of the path, does not have the packages of a virtual environment.
    """
    from compactor.features.spark.datasource import KafkaTieredSource
    from compactor.features.spark.session import require_supported_pyspark

    require_supported_pyspark()
    _use_this_python()
    spark.dataSource.register(KafkaTieredSource)


def _use_this_python() -> None:
    from pyspark import SparkContext

    context = SparkContext._active_spark_context  # None with Spark Connect, whose server chooses the Python
    if context is None or "PYSPARK_PYTHON" in os.environ or context.getConf().get("spark.pyspark.python"):
        return
    if str(context.master).startswith("local"):
        context.pythonExec = sys.executable


def recompact(
    spark: SparkSession, config: str, *, topics: str = ".*", min_benefit: int = 1, force: bool = False, now_ms: int | None = None
) -> DataFrame:
    """Re-compact the whole log of every partition of the matching topics, using an existing Spark session.

    Each partition is published on its own; its errors are reported in its row and affect no other. The data frame has one row per
    partition, including the count columns of Iceberg's ``rewrite_data_files``.

    :param topics: regular expression that must match the whole topic name.
    :param min_benefit: partitions for which a round is estimated to save fewer bytes are skipped.
    :param force: skip no partition for its small benefit.
    :param now_ms: the cleaner's clock; None means the store's clock.
    :raises UsageError: if no topic matches or Spark cannot start.
    """
    from compactor.features.spark.recompaction import recompact_topics

    return recompact_topics(spark, config, topics, 0 if force else min_benefit, now_ms)
