"""``--profile``: what `clean` and `run` say of their stages, held against what else they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compactor.cli.main import entry
from compactor.records.codecs import LZ4
from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli


def stages(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["stage"]: row for row in document["profile"]}


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    log = LogBuilder()
    for number in range(6):
        log.put(*(f"customer-{key}={number} {'value ' * 20}" for key in range(number, number + 20)), codec=LZ4)
        log.roll()
    log.write(tmp_path / "orders-0")
    return tmp_path / "orders-0"


def test_clean(tmp_path: Path, log_dir: Path) -> None:
    cli = TierCli(tmp_path / "tier")
    document = cli.do("clean", log_dir, tmp_path / "out", "--threads", "2", "--profile")
    found = stages(document)
    assert found["check"]["bytes"] == document["bytes_read"]
    assert found["write"]["bytes"] == document["bytes_written"]
    assert found["inflate"]["bytes"] == found["parse"]["bytes"] > document["bytes_read"]
    assert 0 < found["deflate"]["bytes"] < found["inflate"]["bytes"]
    assert found["map"]["bytes"] == 16 * document["records_read"]
    assert found["gate"]["bytes"] == found["fetch"]["bytes"] == found["upload"]["bytes"] == 0
    total = found.pop("total")["cpu"]
    assert sum(row["cpu"] for row in found.values()) == pytest.approx(total, abs=0.001)


def test_run(tmp_path: Path, log_dir: Path) -> None:
    cli = TierCli(tmp_path / "tier")
    cli.do("import", log_dir)
    document = cli.do("run", "--force", "--profile")
    (row,) = document["partitions"]
    found = stages(document)
    assert found["fetch"]["bytes"] == row["bytes_read"]
    assert found["upload"]["bytes"] == row["bytes_written"]
    assert found["gate"]["bytes"] > row["bytes_written"]


def test_nothing_to_do(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "tier")
    log = LogBuilder()
    log.put("key=value")
    log.roll()
    log.write(tmp_path / "orders-0")
    cli.do("import", tmp_path / "orders-0")
    cli.do("run", "--force")
    assert cli.do("run", "--profile")["profile"] == []


def test_nobody_asks(tmp_path: Path, log_dir: Path) -> None:
    assert TierCli(tmp_path / "tier").do("clean", log_dir, tmp_path / "out")["profile"] is None


def test_as_a_table(tmp_path: Path, log_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert entry(["clean", str(log_dir), str(tmp_path / "out"), "--profile"]) == 0
    assert {"check", "deflate", "other", "total"} <= {line.split()[0] for line in capfd.readouterr().out.splitlines() if line.split()}
