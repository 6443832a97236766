"""`pause`, `resume`, `wake` on the command line, and who obeys them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tier_cli import TierCli, tier_of_two_segments


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    return tier_of_two_segments(tmp_path)


def test_rounds_are_paused_and_resumed(cli: TierCli) -> None:
    (one,) = cli.do("pause", "ord.*", "--reason", "a migration")["paused"]
    assert (one["pattern"], one["partitions"], one["reason"]) == ("ord.*", 1, "a migration")
    assert "no round starts, it is paused by" in str(cli.ask("plan", output="table").document)
    row = cli.run()
    assert (row["status"], row["reason"].endswith("a migration (ord.*)")) == ("paused", True)
    assert f"orders-0 is {row['reason']}\n" in str(cli.ask("run", output="table").document)
    assert cli.do("explain", "orders-0")["answer"].startswith("It is paused by")
    assert cli.do("pause")["paused"] == [one]
    cli.refused("erasure", "orders", "--key", "a", "--expedite", says="nothing was done, it is paused")
    assert cli.do("runs", "list")["runs"] == []
    again = cli.ask("pause", "ord.*")
    assert "was paused already" in again.stderr
    note = cli.ask("pause", "payments*").stderr
    assert "matches no partition of the tier yet; it is a whole regular expression" in note
    assert cli.do("resume", "payments*") == {"pattern": "payments*", "still_paused": []}
    assert cli.do("resume", "ord.*") == {"pattern": "ord.*", "still_paused": []}
    assert cli.run()["status"] == "cleaned"
    assert cli.ask("resume", "ord.*").code == 2
    assert cli.do("pause")["paused"] == []


def test_retiring_goes_on_under_a_pause(cli: TierCli) -> None:
    cli.set(publish={"grace_ms": 0})
    cli.run()
    cli.do("pause", "orders-0")
    found = cli.do("retire")
    assert (len(found["deleted"]) > 0, found["next_ms"], found["looked_at"]) == (True, None, 1)


def test_a_wish_is_written_down(cli: TierCli) -> None:
    assert cli.do("wake", "orders-0") == {"wanted": ["orders-0"]}
    assert cli.ask("wake", "orders-1").code == 2
    cli.do("pause", "orders")
    assert "it is taken up once that is over" in cli.ask("wake", "orders-0").stderr
