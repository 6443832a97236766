"""A tier's data belongs to one control store: a configuration that names another one by mistake neither writes nor sweeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli, visible

ID = "tier-id.json"


def log_of(folder: Path, start: int = 0, count: int = 6) -> Path:
    log = LogBuilder(next_offset=start)
    for number in range(count):
        log.put(f"k{number % 3}={number}")
        if number == count // 2:
            log.roll()
    return log.write(folder)


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    cli = TierCli(tmp_path / "a")
    cli.bring(log_of(tmp_path / "log"))
    return cli


def other(cli: TierCli, tmp_path: Path) -> TierCli:
    """The same tier.url, another control_url."""
    made = TierCli(tmp_path / "b")
    made.set(tier={"url": cli.tier.as_uri(), "control_url": (tmp_path / "mistyped").as_uri()})
    return made


@pytest.mark.damages
def test_a_mistyped_control_url_costs_nothing(cli: TierCli, tmp_path: Path) -> None:
    """A imports; B, with another control store, imports the next increment, checks, and retires."""
    before, wrong = cli.digest(), other(cli, tmp_path)
    tier_id = json.loads((cli.tier / ID).read_text())["tier_id"]
    commands: list[list[object]] = [
        ["import", log_of(tmp_path / "next", 6), "--topic", "orders", "--partition", 0],
        ["config", "check"], ["verify"], ["retire"], ["run", "--force"], ["topics"],
    ]  # fmt: skip
    for command in commands:
        answer = wrong.ask(*command)
        assert answer.code == 2, command
        assert tier_id in str(answer.document) + answer.stderr, command
        assert "Correct tier.url or tier.control_url" in str(answer.document) + answer.stderr, command
    assert cli.digest() == before
    assert not list((tmp_path / "mistyped").rglob("*.json"))
    assert cli.do("config", "check")["ok"]
    assert cli.do("verify") == {"ok": True, "problems": []}


@pytest.mark.damages
def test_two_control_stores_over_a_root_of_before(cli: TierCli, tmp_path: Path) -> None:
    """An earlier program let both import: no side may sweep what the other one names, whoever comes first."""
    (cli.tier / ID).unlink()
    aside = tmp_path / "aside"
    (cli.tier / "orders-0").rename(aside)
    wrong = other(cli, tmp_path)
    wrong.bring(log_of(tmp_path / "next", 6))
    (cli.tier / ID).unlink()
    for path in aside.iterdir():
        if path.is_file():
            path.rename(cli.tier / "orders-0" / path.name)
    before = cli.digest()
    for side in (cli, wrong):
        for command in ("retire --now 4000000000000 --force-now", "run --force"):
            side.refused(*command.split(), code=2, says="does not name")
    assert cli.digest() == before


def test_a_root_of_before_is_adopted_by_who_names_its_segments(cli: TierCli, tmp_path: Path) -> None:
    (cli.tier / ID).unlink()
    for command in ("topics", "plan", "verify", "retire --dry-run", f"export orders-0 {tmp_path / 'out'}", "config check"):
        cli.do(*command.split())
        assert not (cli.tier / ID).exists(), "commands that read create nothing"
    assert cli.run()["status"] == "cleaned"
    catalog = json.loads(next(cli.tier.glob(".tiered-compactor/catalog/log/*1.json")).read_bytes())
    assert json.loads((cli.tier / ID).read_text())["tier_id"] == catalog["record"]["body"]["tier_id"]


@pytest.mark.damages
def test_no_tier_is_made_over_segments_whose_control_store_is_lost(cli: TierCli, tmp_path: Path) -> None:
    shutil.rmtree(cli.tier / ".tiered-compactor")
    (cli.tier / ID).unlink()
    before = cli.digest()
    cli.refused("import", log_of(tmp_path / "next", 6), "--topic", "orders", "--partition", 0, code=2, says="holds segments already")
    assert cli.digest() == before


@pytest.mark.damages
def test_a_lost_tier_wide_log_is_not_up_to_date(cli: TierCli, tmp_path: Path) -> None:
    shutil.rmtree(cli.tier / ".tiered-compactor" / "catalog")
    before = cli.digest()
    cli.refused("import", log_of(tmp_path / "again"), "--topic", "orders", "--partition", 0, code=2, says="has no tier yet")
    assert cli.digest() == before


@pytest.mark.damages
def test_a_mistyped_tier_url_with_the_right_control_url_is_no_new_home(cli: TierCli, tmp_path: Path) -> None:
    cli.set(publish={"grace_ms": 0})
    cli.run()
    cli.bring(log_of(tmp_path / "more", 6))
    (wrong := TierCli(tmp_path / "b")).set(publish={"grace_ms": 0})
    wrong.set(tier={"url": (tmp_path / "mistyped").as_uri(), "control_url": (cli.tier / ".tiered-compactor").as_uri()})
    before = cli.digest()
    for command in ("retire", "run --force", "topics delete orders-0"):
        answer = wrong.ask(*command.split())
        assert (answer.code, "Correct tier.url" in answer.stderr) == (2, True), (command, answer)
    answer = wrong.ask("import", log_of(tmp_path / "next", 12), "--topic", "orders", "--partition", 0)
    assert answer.code in (2, 3), answer
    assert cli.digest() == before
    assert not list(tmp_path.glob("mistyped/**/*.*"))


def test_a_tier_may_be_moved(cli: TierCli, tmp_path: Path) -> None:
    shown = visible(cli.export(tmp_path / "before"))
    cli.tier = Path(shutil.copytree(cli.tier, tmp_path / "elsewhere"))
    shutil.rmtree(tmp_path / "a" / "tier")
    cli.set()
    assert visible(cli.export(tmp_path / "after")) == shown
    cli.bring(log_of(tmp_path / "next", 6))
    assert cli.run()["status"] == "cleaned"
    assert cli.do("verify")["ok"]


def test_an_object_that_the_log_does_not_know_is_swept_only_when_it_is_old(cli: TierCli) -> None:
    orphan = cli.tier / "orders-0" / f"{99:020}-AAAAAAAAAAAAAAAAAAAAAA.log"
    orphan.write_bytes(b"whose is this?")
    assert cli.do("retire")["swept"] == []
    assert [problem["kind"] for problem in cli.do("verify")["problems"]] == ["orphan"]
    cli.set(publish={"orphan_age_ms": 0})
    assert cli.do("retire")["swept"] == [f"orders-0/{orphan.name}"]


def test_grace_is_what_the_publisher_recorded(cli: TierCli, tmp_path: Path) -> None:
    """Neither another configuration nor a wrong --now deletes what was promised to be kept."""
    cli.run()
    before = cli.digest()
    hasty = TierCli(tmp_path / "c")
    hasty.set(tier={"url": cli.tier.as_uri()}, publish={"grace_ms": 0, "undo_window_ms": 0, "orphan_age_ms": 0})
    for command in ("retire", "retire --now 4000000000000"):
        answer = hasty.do(*command.split())
        assert (answer["deleted"], bool(answer["waiting"])) == ([], True)
    assert "only --force-now shortens grace" in hasty.ask("retire", "--now", 4000000000000).stderr
    assert cli.digest() == before
    assert cli.do("retire", "--now", 2**62, "--force-now")["deleted"]


def test_an_undo_window_that_was_promised_is_kept(cli: TierCli) -> None:
    cli.set(publish={"grace_ms": 0, "undo_window_ms": 2**40})
    cli.run()
    cli.set(publish={"undo_window_ms": 0})
    assert cli.do("retire")["deleted"] == []
    (run,) = cli.do("runs", "list")["runs"]
    cli.do("undo", run["run_id"])
    assert cli.do("retire")["deleted"], "what an undone round made needs no window"
