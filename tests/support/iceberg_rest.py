"""A REST catalog for tests: the server that Iceberg's own tests use, over a JDBC catalog in SQLite. Maven fetches it once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.support.kafka_jars import maven_jars
from tests.support.s3_server import Bucket, free_port, running, wait_for

POM = Path(__file__).parents[1] / "iceberg" / "rest.xml"


@contextmanager
def running_rest_catalog(folder: Path, bucket: Bucket) -> Iterator[str]:
    """Run a catalog whose warehouse lies in a bucket, and yield its URL. Raises BrokerUnavailable."""
    jars = maven_jars("iceberg-rest-1.10.0", POM)
    port = free_port()
    properties = {
        "CATALOG_URI": f"jdbc:sqlite:{folder}/rest.db",
        "CATALOG_WAREHOUSE": f"s3://{bucket.name}/warehouse",
        "CATALOG_IO__IMPL": "org.apache.iceberg.aws.s3.S3FileIO",
        "CATALOG_S3_ENDPOINT": bucket.endpoint,
        "CATALOG_S3_PATH__STYLE__ACCESS": "true",
        "CATALOG_REST_PORT": str(port),
        "AWS_REGION": bucket.server.region,
    }
    with patch.dict(os.environ, {**bucket.server.environment(), **properties}):
        command = jars.command("org.apache.iceberg.rest.RESTCatalogServer", heap_mb=256)
        with running(command, stdout=subprocess.DEVNULL) as process:
            wait_for(f"127.0.0.1:{port}", process, 90)
            yield f"http://127.0.0.1:{port}"
