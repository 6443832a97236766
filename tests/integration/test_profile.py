"""Costs that `clean` and `run` report: of their start, and with ``--profile`` of their stages, held against what else they say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compactor.access.rounds import compact
from compactor.cleaner.offline import OfflineCleanOptions, OfflineCleanSummary, clean_log_directory
from compactor.cli.commands import clean, run
from compactor.cli.main import entry
from compactor.profiling import loading_cost
from compactor.records.codecs import LZ4
from compactor.round.compaction import RoundReport
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
    document = cli.do("run", "--profile")
    assert (document["profile"], document["startup"]) == ([], None)


def test_nobody_asks(tmp_path: Path, log_dir: Path) -> None:
    assert TierCli(tmp_path / "tier").do("clean", log_dir, tmp_path / "out")["profile"] is None


def test_as_a_table(tmp_path: Path, log_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert entry(["clean", str(log_dir), str(tmp_path / "out"), "--profile"]) == 0
    assert {"check", "deflate", "other", "total"} <= {line.split()[0] for line in capfd.readouterr().out.splitlines() if line.split()}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has kernels load for 100 seconds of a clock that the commands read."""
    perf_counter, monotonic = time.perf_counter, time.monotonic
    monkeypatch.setattr(loading_cost, "wall", 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: perf_counter() + loading_cost.wall)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + loading_cost.wall)

    def load_kernels() -> None:
        loading_cost.wall += 100

    return load_kernels


@pytest.mark.parametrize("options", [(), ("--profile",)])
def test_loading_of_kernels_is_start_up_and_in_no_phase_of_clean(
    options: tuple[str, ...], tmp_path: Path, log_dir: Path, load: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_and_clean(
        source: Path, target: Path, request: OfflineCleanOptions, report_phase: Callable[[str], None]
    ) -> OfflineCleanSummary:
        def report_and_load(phase: str) -> None:
            report_phase(phase)
            load()

        return clean_log_directory(source, target, request, report_and_load)

    monkeypatch.setattr(clean, "clean_log_directory", load_and_clean)
    document = TierCli(tmp_path / "tier").do("clean", log_dir, tmp_path / "out", *options)
    assert document["startup"]["seconds"] > 300
    assert document["startup"]["cpu"] > 0
    assert all(0 <= document["seconds"][phase] < 90 for phase in ("index", "rewrite", "total"))


def test_loading_of_kernels_is_start_up_and_in_no_round(
    tmp_path: Path, log_dir: Path, load: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_and_compact(*args: Any, **options: Any) -> RoundReport:
        load()
        return compact(*args, **options)

    cli = TierCli(tmp_path / "tier")
    cli.do("import", log_dir)
    monkeypatch.setattr(run, "compact", load_and_compact)
    document = cli.do("run", "--force")
    assert document["startup"]["seconds"] > 100
    assert document["partitions"][0]["seconds"] < 90
