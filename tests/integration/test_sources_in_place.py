"""A directory's segments are read in place, and new ones become objects without a copy: what others do to them meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compactor.cleaner.rewrite import GroupRewriter
from compactor.local.staging import StagingFolder
from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    cli = TierCli(tmp_path / "cli")
    log = LogBuilder()
    for _ in range(3):
        log.put("a=1", "b=2")
        log.put("a=3", "c=4")
        log.roll()
    log.put("z=1")
    cli.bring(log.write(tmp_path / "log", indexes=True))
    return cli


def logs(cli: TierCli) -> dict[str, Path]:
    return {path.name: path for path in cli.tier.rglob("*.log")}


def before_each_group(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    original = GroupRewriter.rewrite_group

    def rewrite(self: GroupRewriter, *arguments: Any, **options: Any) -> Any:
        act()
        return original(self, *arguments, **options)

    monkeypatch.setattr(GroupRewriter, "rewrite_group", rewrite)


def test_a_source_that_a_program_opens_for_writing_stops_the_round_and_nothing_is_published(
    cli: TierCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: path.read_bytes() for name, path in logs(cli).items()}
    waiting: list[Path] = []

    def cut() -> None:
        for path in [path for name, path in logs(cli).items() if name in before]:
            with suppress(BlockingIOError):
                os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK))
                pytest.skip("the file system knows no leases")
            waiting.append(path)

    with monkeypatch.context() as patch:
        before_each_group(patch, cut)
        answer = cli.ask("run", "--force")
    assert waiting
    assert answer.code != 0
    assert any("another program has opened" in remark and "find out what writes" in remark for remark in answer.remarks), answer.remarks
    assert {name: path.read_bytes() for name, path in logs(cli).items() if name in before} == before
    assert cli.do("run", "--force")["partitions"][0]["status"] == "resumed"
    assert cli.do("verify")["ok"]


def test_a_source_that_is_deleted_while_it_is_read_was_read_whole(cli: TierCli, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    original = StagingFolder._lend

    def lend(self: StagingFolder, file: Any, path: Path) -> Any:
        found = original(self, file, path)
        if found is not None and not read:
            os.unlink(logs(cli)[f"{file.segment.start_offset:020d}-{file.segment.id}.log"])
            read.append(path.read_bytes())
        return found

    monkeypatch.setattr(StagingFolder, "_lend", lend)
    cli.ask("run", "--force")
    if not read:
        pytest.skip("the file system knows no leases")
    assert len(read[0]) > 61


def test_a_broker_s_segments_are_copied(cli: TierCli, tmp_path: Path) -> None:
    for path in (tmp_path / "log").glob("*.log"):
        assert path.stat().st_nlink == 1
        assert not any(os.path.samefile(path, held) for held in logs(cli).values())


def test_what_a_round_leaves_has_one_name(cli: TierCli) -> None:
    assert cli.do("run", "--force")["partitions"][0]["status"] == "cleaned"
    for path in cli.tier.rglob("*"):
        assert path.is_dir() or (path.stat().st_nlink, path.stat().st_mode & 0o600) == (1, 0o600), path
    assert not list((cli.folder / "state").rglob("round-*")), "no scratch stays"
