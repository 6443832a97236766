"""A directory tier whose disk is full: `retire` deletes what is due, and nothing that is open stands in its way."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from compactor.storage.local import RESERVE_BYTES
from tests.builders import NONE, LogBuilder
from tests.support.tier_cli import TierCli, latest


def log_of(folder: Path, start: int = 0, segments: int = 4, size: int = 60_000, *, keys: int = 5) -> Path:
    log = LogBuilder(next_offset=start)
    for number in range(segments):
        if number:
            log.roll()
        for at in range(size // 5_000):
            log.put(b"k%d=" % ((start + 12 * number + at) % keys) + os.urandom(5_000), codec=NONE)
    return log.write(folder)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def filled(folder: Path) -> Path:
    """Nothing is left, not a byte."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    stat = os.statvfs(folder)
    assert stat.f_bavail == 0
    return ballast


@pytest.fixture
def cli(tmp_path: Path, small: Path) -> TierCli:
    cli = TierCli(tmp_path / "conf")
    cli.tier = small / "tier"
    cli.set(publish={"grace_ms": 0})
    cli.bring(log_of(tmp_path / "log"))
    return cli


def test_the_reserve_is_kept_back(cli: TierCli) -> None:
    (reserve,) = cli.tier.rglob("reserve")
    assert reserve.stat().st_size == RESERVE_BYTES


def test_retire_frees_a_full_disk(cli: TierCli, small: Path, tmp_path: Path) -> None:
    cli.run()
    shown = latest(cli.export(tmp_path / "before"))
    ballast = filled(small)
    assert cli.do("retire")["deleted"]
    assert cli.do("verify") == {"ok": True, "problems": []}
    assert os.statvfs(small).f_bavail > 0
    ballast.unlink()
    cli.do("retire")
    cli.bring(log_of(tmp_path / "next", 48, 1))
    (reserve,) = cli.tier.rglob("reserve")
    assert reserve.stat().st_size == RESERVE_BYTES, "it is made whole again"
    assert latest(cli.export(tmp_path / "after")).keys() == shown.keys()


def test_what_is_due_goes_before_an_open_round_is_resumed(cli: TierCli, small: Path, tmp_path: Path) -> None:
    """A round that ran into the full disk stays open; what would make room for it must not wait for it."""
    cli.run()  # leaves something that is due
    cli.bring(log_of(tmp_path / "next", 48, 6, keys=100))
    ballast = filled(small)
    assert cli.ask("run", "--force").code == 6
    assert [p["kind"] for p in cli.do("verify")["problems"] if p["kind"] == "intent"] == ["intent"]
    answer = cli.do("retire")
    assert answer["deleted"]
    assert not [p for p in cli.do("verify")["problems"] if p["kind"] == "intent"], "resumed or given up"
    ballast.unlink()
    cli.ask("run", "--force")
    assert cli.do("verify")["ok"]


def test_a_round_that_fits_no_more_is_given_up(cli: TierCli, tmp_path: Path, small: Path) -> None:
    """With a lowered budget nobody could resume it, and nobody could sweep: it is recorded undone."""
    cli.bring(log_of(tmp_path / "next", 48, 6, keys=100))
    ballast = filled(small)
    assert cli.ask("run", "--force").code == 6
    ballast.unlink()
    cli.set(cleaner={"disk_budget_bytes": 20_000})
    assert cli.do("retire")["deleted"] == []
    cli.set(cleaner={"disk_budget_bytes": 1 << 24})
    statuses = [run["status"] for run in cli.do("runs", "list")["runs"]]
    assert "undone" in statuses, statuses
    assert cli.run()["status"] == "cleaned"
    assert cli.do("verify")["ok"]
