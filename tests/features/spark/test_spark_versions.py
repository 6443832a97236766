"""What Spark needs of a machine, and what is said where it is not there: one line that tells what to do."""

from __future__ import annotations

import stat
from pathlib import Path

import pyspark
import pytest

from compactor.errors import UsageError
from compactor.features.spark.session import executors_not_ready_error, require_supported_java, require_supported_pyspark
from tests.builders import log_of
from tests.support.tier_cli import TierCli

pytestmark = pytest.mark.quick


def java_that_says(folder: Path, words: str) -> Path:
    """A home for JAVA_HOME."""
    home = folder / "a java"
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{words}\nEND\n")
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    return home


@pytest.mark.parametrize(
    "words",
    [
        'openjdk version "17.0.12" 2024-07-16',
        'java version "21"',
        'Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "25-ea" 2025-09-16',
    ],
)
def test_java_that_will_do(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path, words)))
    require_supported_java()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ('openjdk version "11.0.2" 2019-01-15', "Spark needs Java 17 or newer, and .*/a java/bin/java is Java 11"),
        ('java version "1.8.0_292"', "is Java 8"),
        ("Unable to locate a Java Runtime", "does not name a Java version, but: Unable to locate a Java Runtime"),
    ],
)
def test_java_that_will_not_do(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path, words)))
    with pytest.raises(UsageError, match=message):
        require_supported_java()


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=f"Spark needs Java 17 or newer, and JAVA_HOME={tmp_path} has no bin/java"):
        require_supported_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no java on the PATH"):
        require_supported_java()


@pytest.mark.parametrize(("version", "fine"), [("4.1.0", True), ("4.3.0", True), ("4.0.1", False), ("3.5.6", False), ("5.0.0.dev1", False)])
def test_pyspark(version: str, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    if fine:
        require_supported_pyspark()
        return
    with pytest.raises(UsageError, match=f"PySpark {version} is not supported. Supported are PySpark 4.1 to 4.x"):
        require_supported_pyspark()


@pytest.mark.parametrize("command", ["run", "recompact"])
def test_commands_say_it_once_and_change_nothing(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several partitions, too: what is wrong with the machine is wrong for all of them."""
    cli = TierCli(tmp_path / "tier", {"cleaner": {"map_engine": "spark"}})
    for number in range(3):
        log = log_of("a=1 a=2")
        cli.named = f"orders-{number}"
        cli.bring(log.write(tmp_path / f"log-{number}"))
    before = cli.digest()
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path, 'openjdk version "11.0.2" 2019-01-15')))
    answer = cli.ask(command, *(["--force"] if command == "run" else []))
    assert answer.code == 2
    (line,) = [line for line in answer.stderr.splitlines() if "progress" not in line]
    assert line.startswith("error: Spark needs Java 17 or newer")
    assert "set JAVA_HOME" in line
    assert cli.digest() == before


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "... ModuleNotFoundError: No module named 'compactor' ...",
            "the executors' Python has no tiered-compactor: it finds no compactor",
        ),
        ("No module named 'pydantic_core._pydantic_core'", "the executors' Python lacks the package pydantic_core"),
        ("something else", "Spark's executors do not run our tasks: something else"),
    ],
)
def test_what_executors_lack_is_named(said: str, message: str) -> None:
    found = executors_not_ready_error(RuntimeError(said))
    assert found.message == message
    assert ("pip install pydantic" in found.hint) == ("pydantic" in said)
