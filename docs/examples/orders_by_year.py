"""What years of a tiered topic say, asked of the object store: no broker is involved, and none notices.

    spark-submit --py-files tiered-compactor.zip docs/examples/orders_by_year.py --config tiered-compactor.toml --topic orders

For every year: how many records came, how many different keys they were about, and their bytes; and of how many keys today's value was
written in that year, which is what a compacted topic still has to say about it. Prints one line of comma-separated values per year.
"""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import DataFrame, SparkSession, functions as f

from compactor.spark import register


def records(spark: SparkSession, columns: str, **options: str) -> DataFrame:
    """The tier as a DataFrame; ``columns`` keeps from Arrow what the question does not need."""
    return spark.read.format("kafka-tiered").options(columns=columns, **options).load()


def by_year(spark: SparkSession, **options: str) -> list[Any]:
    """One row per year: year, records, keys, bytes, current."""
    year = f.year("timestamp").alias("year")
    history = (
        records(spark, "key,value,timestamp", **options)
        .groupBy(year)
        .agg(
            f.count("*").alias("records"),
            f.countDistinct("key").alias("keys"),
            f.sum(f.coalesce(f.octet_length("value"), f.lit(0))).alias("bytes"),
        )
    )
    current = records(spark, "key,timestamp", view="latest", **options).groupBy(year).agg(f.count("*").alias("current"))
    return history.join(current, "year", "left").fillna(0, ["current"]).orderBy("year").collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the configuration of the tier")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--since", default="0", metavar="MS", help="leave out what is older; segments that end before it are not read")
    args = parser.parse_args()
    spark = SparkSession.builder.appName("orders by year").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    register(spark)
    print("year,records,keys,bytes,current")
    for row in by_year(spark, config=args.config, topic=args.topic, startingTimestamp=args.since):
        print(",".join(str(value) for value in row))


if __name__ == "__main__":
    main()
