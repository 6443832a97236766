"""`verify` needs no right to write: neither in a directory nor in a bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compactor.storage.local import LocalStore
from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """A tier with live segments, replaced ones that wait, and an orphan."""
    made = TierCli(tmp_path / "one")
    log = LogBuilder()
    for number in range(6):
        log.put(f"{number % 2}=value", f"{number % 3}=other")
    made.bring(log.write(tmp_path / "orders-0"))
    made.run()
    (made.tier / "orders-0" / f"{0:020d}-{'x' * 22}.log").write_bytes(b"nobody knows it")
    return made


@pytest.fixture
def without_right_to_write(cli: TierCli) -> Iterator[None]:
    folders = [cli.tier, *(path for path in cli.tier.rglob("*") if path.is_dir())]
    modes = {path: path.stat().st_mode for path in folders}
    for path in folders:
        path.chmod(0o500)
    yield
    for path, mode in modes.items():
        path.chmod(mode)


def notes(cli: TierCli) -> set[str]:
    answer = cli.ask("verify")
    assert answer.code == 0, answer
    assert answer.document["ok"]
    return {problem["kind"] for problem in answer.document["problems"]}


def test_nothing_is_written_to_the_store(cli: TierCli, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote: list[str] = []
    for name in ("create", "create_from_file", "compose", "put", "delete", "clock_ms"):

        def refused(self: LocalStore, *arguments: Any, name: str = name) -> None:
            wrote.append(name)
            raise PermissionError(name)

        monkeypatch.setattr(LocalStore, name, refused)
    assert notes(cli) == {"waiting", "orphan"}
    assert wrote == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.usefixtures("without_right_to_write")
def test_a_directory_that_takes_no_writes_is_verified(cli: TierCli) -> None:
    assert notes(cli) == {"waiting", "orphan"}
