"""A table in a REST catalog whose warehouse is a bucket on an S3 server: the server of Iceberg's own tests, and moto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.features.iceberg.test_iceberg import House
from tests.support.iceberg_rest import running_rest_catalog
from tests.support.kafka_jars import BrokerUnavailable
from tests.support.s3_server import Bucket, S3Server


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    return s3_server.make_bucket()


@pytest.fixture
def house(tmp_path: Path, bucket: Bucket) -> Iterator[House]:
    try:
        with running_rest_catalog(tmp_path, bucket) as url:
            made = House(tmp_path)
            secrets = {"s3.access-key-id": bucket.server.access_key, "s3.secret-access-key": bucket.server.secret_key}
            made.catalog = {"type": "rest", "uri": url, "s3.endpoint": bucket.endpoint, "s3.region": bucket.server.region, **secrets}
            made.warehouse = f"s3://{bucket.name}/warehouse"
            del made.cli.settings["outputs.iceberg.catalog"]
            properties = {json.dumps(name): value for name, value in made.catalog.items()}  # names with dots
            made.cli.set(**{"outputs.iceberg": {"warehouse": made.warehouse}, "outputs.iceberg.catalog": properties})
            yield made
    except BrokerUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_a_table_lives_in_a_rest_catalog_and_a_bucket(house: House) -> None:
    house.cli.set(**{'outputs.iceberg.topics."orders"': {"value_format": "json"}})
    house.advance("a=1", "b=1", 'c={"n": 1}')
    house.check()
    house.advance("a=2", 'c={"n": 1.5}', "d=[]")
    house.check()
    house.compare_with_latest()
    assert house.update().status == "up_to_date"
