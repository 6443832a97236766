"""Spark with Iceberg's own runtime, which reads tables for tests and benchmarks.

The Spark is the newest that Iceberg supports, 4.1, fetched by Maven; the one that is installed may be newer.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.kafka_jars import BrokerUnavailable, maven_jars

_FOLDER = Path(__file__).parents[1] / "iceberg"
_PACKAGES = ("lang", "lang.invoke", "lang.reflect", "io", "net", "nio", "util", "util.concurrent", "util.concurrent.atomic")
_JAVA_FLAGS = [part for name in _PACKAGES for part in ("--add-opens", f"java.base/java.{name}=ALL-UNNAMED")]
_JAVA_FLAGS += ["--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED"]


@dataclass(frozen=True)
class Executed:
    """What one statement took: seconds, and CPU seconds of Spark's process. values: the first column of its rows, as texts."""

    seconds: float
    cpu: float
    values: list[str]


def run_statements(database: Path, warehouse: str, *statements: str, threads: int, heap_mb: int) -> list[Executed]:
    """Run SQL statements in one Spark. Texts in the first column of their rows must be without spaces.

    :param database: SQLite file of a SQL catalog, which is ``compacted`` in statements.
    :raises BrokerUnavailable: if Java or Maven are missing. :raises RuntimeError: if a statement fails.
    """
    jars = maven_jars("iceberg-1.12.0", _FOLDER / "pom.xml")
    program = ["java", f"-Xmx{heap_mb}m", *_JAVA_FLAGS, "-cp", jars.class_path, str(_FOLDER / "RunStatements.java")]
    command = [*program, f"jdbc:sqlite:{database}", warehouse, str(threads), *statements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-6000:])
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("done ")]
    return [Executed(float(seconds), float(cpu), values) for seconds, cpu, *values in lines]


def read_by_spark(database: Path, warehouse: str, *queries: str) -> list[list[str]]:
    """Return the rows of each query, which has one column of texts without spaces. Skips the test if Java or Maven are missing.

    :param database: SQLite file of a SQL catalog, which is ``compacted`` in queries.
    """
    try:
        done = run_statements(database, warehouse, *queries, threads=1, heap_mb=768)
    except BrokerUnavailable as error:
        pytest.skip(str(error))
    return [one.values for one in done]
