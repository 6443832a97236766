"""Which commands go by what this machine remembers, which never do, and that nothing depends on it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from compactor.control.summary import encode_summary
from compactor.local.cache import LocalState
from tests.builders import LogBuilder, log_of
from tests.support.tier_cli import TierCli


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    log = LogBuilder()
    for number in range(4):
        log.put(*(f"key-{key}={number}" for key in range(20)))
        log.roll()
    log.put("last=1")
    cli = TierCli(tmp_path / "a tier")
    cli.bring(log.write(tmp_path / "log"))
    return cli


def cache(cli: TierCli) -> Path:
    (folder,) = (cli.folder / "state" / "cache").iterdir()
    return folder


def poison(cli: TierCli) -> None:
    """A summary that says that the partition ends at 7 and is clean."""
    local = LocalState(cache(cli))
    _, summary = local.cached_summaries()["orders-0"]
    wrong = summary.model_copy(update={"end_offset": 7, "bytes": 1, "first_dirty_offset": 81})
    local._rocks.write({b"summary/orders-0": encode_summary(wrong)})
    local.close()


def ends(document: Any) -> list[int]:
    return [row["end_offset"] for row in document["partitions"]]


def test_topics_and_plan_go_by_it_and_the_others_read_the_tier(cli: TierCli) -> None:
    assert ends(cli.do("topics")) == [80]
    poison(cli)
    assert ends(cli.do("topics")) == [7], "or this test shows nothing"
    assert [row["due"] for row in cli.do("plan")["partitions"]] == [False]
    assert ends(cli.do("checkpoints", "list")) == [80]
    assert cli.do("checkpoints", "verify")["ok"]
    assert cli.do("verify")["ok"]
    assert cli.do("segments", "list", "orders-0")["segments"][-1]["end_offset"] == 80
    assert "80" in str(cli.do("explain", "orders-0")["facts"])
    assert cli.do("export", "orders-0", cli.folder / "out")["end_offset"] == 80


def test_the_same_answers_with_without_and_after_a_run(cli: TierCli) -> None:
    for _ in range(2):
        with_it = [cli.do("topics"), cli.do("plan", "--now", "5")]
        state, away = cli.folder / "state", cli.folder / "away"
        state.rename(away)
        assert [cli.do("topics"), cli.do("plan", "--now", "5")] == with_it
        shutil.rmtree(state)
        away.rename(state)
        cli.run()
    assert cli.do("verify")["ok"]


def test_it_may_be_deleted_at_any_time(cli: TierCli) -> None:
    first = cli.do("topics")
    shutil.rmtree(cli.folder / "state")
    assert cli.do("topics") == first
    assert cli.run()["status"] == "cleaned"
    shutil.rmtree(cli.folder / "state")
    (row,) = cli.do("plan")["partitions"]
    assert (row["due"], row["reason"]) == (False, "nothing is dirty")


def test_reading_commands_need_no_state_dir(cli: TierCli) -> None:
    (cli.folder / "file").write_text("")
    cli.set(tier={"state_dir": str(cli.folder / "file" / "state")})
    answer = cli.ask("topics")
    assert (answer.code, answer.stderr) == (0, "")
    assert ends(answer.document) == [80]
    answer = cli.ask("plan")
    assert (answer.code, answer.stderr) == (0, "")


def test_another_machine_that_knows_an_older_tier_does_the_right_thing(cli: TierCli, tmp_path: Path) -> None:
    """It has not heard of the first round; nobody hints, and it is not asked to look."""
    other = TierCli(tmp_path / "other")
    other.set(tier={"url": cli.tier.as_uri()})
    cli.do("topics")
    assert [row["due"] for row in other.do("plan")["partitions"]] == [True]
    assert cli.run()["status"] == "cleaned"
    (row,) = other.do("run")["partitions"]
    assert (row["status"], row["first_dirty_offset"]) == ("nothing_to_do", 81)
    assert [row["due"] for row in other.do("plan")["partitions"]] == [False]


@pytest.mark.damages
@pytest.mark.parametrize("known", [False, True])
def test_a_partition_whose_log_cannot_be_read_stands_for_itself(cli: TierCli, tmp_path: Path, known: bool) -> None:
    other = log_of("a=1 a=2")
    cli.named = "orders-1"
    cli.bring(other.write(tmp_path / "other"))
    if known:
        cli.do("topics")
        more = LogBuilder(2).add("a=3")
        cli.bring(more.write(tmp_path / "more"))
    record = max((cli.tier / ".tiered-compactor" / "partitions" / "orders-1" / "log").glob("*.json"))
    record.write_bytes(record.read_bytes()[:-9])
    for command in (["topics"], ["plan"], ["run", "--force"]):
        answer = cli.ask(*command)
        assert (answer.code, len(answer.remarks)) == (3, 1), answer
        assert record.name in answer.stderr
        rows = {row["partition"]: row.get("status") for row in answer.document["partitions"]}
        assert rows == ({0: "cleaned", 1: "quarantined"} if command[0] == "run" else {0: None})


def test_plan_expects_a_saving_by_the_last_round(cli: TierCli, tmp_path: Path) -> None:
    (row,) = cli.do("plan", "--sample", 0)["partitions"]
    assert row["expected_saving_bytes"] is None
    assert "no earlier round" in row["expected_saving_why"]
    done = cli.run()
    more = LogBuilder(81)
    more.put(*(f"key-{key}=5" for key in range(20)))
    cli.bring(more.write(tmp_path / "more"))
    (row,) = cli.do("plan", "--force")["partitions"]
    assert row["due"]
    dirty = sum(segment["bytes"] for segment in row["segments"] if segment["why"] == "dirty")
    assert 0 < dirty < row["bytes_to_write"]
    assert row["expected_saving_bytes"] == pytest.approx(dirty * done["saved_bytes"] / done["bytes_read"], abs=1)
    again = cli.run()
    shown = cli.do("runs", "show", cli.do("runs", "list")["runs"][-1]["run_id"])
    assert shown["stats"]["bytes_before"] - shown["stats"]["bytes_written"] == again["saved_bytes"]
    table = cli.ask("runs", "show", shown["run_id"], output="table").document
    assert str(shown["run_id"]) in str(table)


def test_plan_of_a_due_partition_opens_no_state(cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.run()
    more = LogBuilder(81)
    more.put(*(f"key-{key}=5" for key in range(20)))
    cli.bring(more.write(tmp_path / "more"))
    cli.do("topics")
    before = cli.do("plan", "--force", "--sample", 0)
    (row,) = before["partitions"]
    assert row["due"]
    assert {segment["why"] for segment in row["segments"]} > {"dirty"}, "or no sidecar is asked for"
    monkeypatch.setattr(LocalState, "cached_partition_state", lambda *_: pytest.fail("a state was opened"))
    assert cli.do("plan", "--force", "--sample", 0) == before
