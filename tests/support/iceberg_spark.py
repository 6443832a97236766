"""Spark with Iceberg's own runtime, which reads tables for tests.

The Spark is the newest that Iceberg supports, 4.1, fetched by Maven; the one that is installed may be newer.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.kafka_jars import BrokerUnavailable, maven_jars

_FOLDER = Path(__file__).parents[1] / "iceberg"
_PACKAGES = ("lang", "lang.invoke", "lang.reflect", "io", "net", "nio", "util", "util.concurrent", "util.concurrent.atomic")
JAVA_FLAGS = [part for name in _PACKAGES for part in ("--add-opens", f"java.base/java.{name}=ALL-UNNAMED")]
JAVA_FLAGS += ["--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED"]


def read_by_spark(database: Path, warehouse: str, *queries: str) -> list[list[str]]:
    """Return the rows of each query, which has one column of texts without spaces. Skips the test if Java or Maven are missing.

    :param database: SQLite file of a SQL catalog, which is ``compacted`` in queries.
    """
    try:
        jars = maven_jars("iceberg-1.12.0", _FOLDER / "pom.xml")
    except BrokerUnavailable as error:
        pytest.skip(str(error))
    command = [*jars.command(str(_FOLDER / "ReadTable.java"), *JAVA_FLAGS, heap_mb=768), f"jdbc:sqlite:{database}", warehouse, *queries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("rows")]
