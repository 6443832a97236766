"""Binary digits in front of a tier's keys: everything works with them, and they cannot change by accident."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli, latest


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """Two partitions, in a tier whose keys begin with four digits."""
    made = TierCli(tmp_path / "cli", {"tier": {"key_entropy_bits": 4}, "publish": {"grace_ms": 0}})
    for number in (0, 1):
        log = LogBuilder()
        for round_ in range(3):
            log.put(*(f"k{key}={round_}" for key in range(20)))
            log.roll()
        log.put("last=1")
        made.named = f"orders-{number}"
        made.bring(log.write(tmp_path / made.named))
    return made


def folders(cli: TierCli) -> set[str]:
    return {str(path.parent.relative_to(cli.tier)) for path in cli.tier.rglob("*.log")}


def test_the_whole_job_is_done_under_such_keys(cli: TierCli, tmp_path: Path) -> None:
    before = folders(cli)
    assert len(before) == 2
    assert all(re.fullmatch(r"[01]{4}/orders-[01]", folder) for folder in before)
    assert {row["status"] for row in cli.do("run", "--force")["partitions"]} == {"cleaned"}
    assert cli.do("retire")["deleted"]
    assert folders(cli) == before
    assert latest(cli.export(tmp_path / "view")) == latest(tmp_path / "orders-1")
    assert cli.do("verify")["ok"]
    stray = next(cli.tier.rglob("orders-1/*.log"))
    stray.with_name(f"{99:020d}-{'A' * 22}.log").write_bytes(b"x")
    assert any("A" * 22 in problem["object"] for problem in cli.do("verify")["problems"]), "orphans are found below the digits"


def test_another_number_than_the_recorded_one_is_refused(cli: TierCli, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in cli.tier.rglob("*") if path.is_file()}
    for bits in (0, 5):
        cli.set(tier={"key_entropy_bits": bits})
        for words in (("run", "--force"), ("retire",), ("import", tmp_path / "orders-0"), ("topics",)):
            answer = cli.ask(*words)
            assert answer.code == 2, words
            assert f"begin with 4 binary digits, not with {bits}" in answer.stderr
    assert {path: path.read_bytes() for path in cli.tier.rglob("*") if path.is_file()} == before
    cli.set(tier={"key_entropy_bits": 4})


@pytest.mark.damages
def test_tiers_that_others_write_have_no_such_keys(tmp_path: Path) -> None:
    for section, settings in (("tier", {"key_entropy_bits": 4}), ("s3", {"storage_class": "STANDARD_IA"})):
        cli = TierCli(tmp_path / section, {section: settings})
        cli.set(tier={"kind": "object-log", "layout": "pinterest", **(settings if section == "tier" else {})})
        cli.refused("topics", code=2, says=f"{next(iter(settings))} is set, and another program")
