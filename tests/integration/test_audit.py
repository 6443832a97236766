"""The audit: what people do to a tier is recorded with user, host and reason, before it is done."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path
from typing import Any

import pytest

from compactor.control import audit
from compactor.storage.factory import open_store
from tests.support.tier_cli import TierCli, tier_of_two_segments


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    return tier_of_two_segments(tmp_path)


def actions(cli: TierCli, *arguments: object) -> list[tuple[str, list[str], str]]:
    return [(row["action"]["command"], row["action"]["targets"], row["action"]["reason"]) for row in found(cli, *arguments)]


def found(cli: TierCli, *arguments: object) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = cli.do("audit", "list", *arguments)["actions"]
    return rows


def test_the_audit_lists_manual_actions_with_user_host_and_reason(cli: TierCli) -> None:
    cli.do("pause", "ord.*", "--reason", "a migration")
    cli.do("resume", "ord.*")
    cli.do("wake", "orders-0", "--reason", "now, please")
    cli.run()
    run = cli.do("runs", "list")["runs"][0]["run_id"]
    cli.do("undo", run, "--reason", "wrong policy")
    cli.do("retire")  # routine work of programs is in `runs list`
    cli.do("topics", "delete-records", "orders-0", "--before", "1")
    cli.do("topics", "delete", "orders-0", "--reason", "moved")
    rows = found(cli)
    assert {(row["action"]["user"], row["action"]["host"]) for row in rows} == {(getpass.getuser(), socket.gethostname())}
    assert all(row["outcome"]["error"] == "" for row in rows)
    assert actions(cli) == [
        ("topics delete", ["orders-0"], "moved"),
        ("topics delete-records", ["orders-0"], ""),
        ("undo", ["orders-0"], "wrong policy"),
        ("wake", ["orders-0"], "now, please"),
        ("resume", ["ord.*"], ""),
        ("pause", ["ord.*"], "a migration"),
    ]
    assert rows[2]["action"]["details"] == {"run": run}
    assert len(actions(cli, "orders")) == 6
    assert actions(cli, "payments") == []
    assert len(actions(cli, "--limit", 2)) == 2
    assert actions(cli, "--since", "in 1h") == []


def test_an_action_that_fails_is_listed_with_its_error(cli: TierCli) -> None:
    assert cli.ask("resume", "nothing").code == 2
    (row,) = found(cli)
    assert row["outcome"]["error"] == "nothing was paused by 'nothing'. Nothing is paused"
    assert "failed" in str(cli.ask("audit", "list", output="table").document)


def test_an_action_that_cannot_be_recorded_is_not_made(cli: TierCli) -> None:
    (cli.tier / ".tiered-compactor" / "audit").write_text("in the way of the audit's folder")
    assert cli.ask("pause", "orders").code == 5
    assert cli.do("pause")["paused"] == []


def test_an_action_whose_process_died_has_no_outcome(cli: TierCli) -> None:
    control = open_store((cli.tier / ".tiered-compactor").as_uri())
    begun = audit.ManualAction(at_ms=1_700_000_000_000, user="ann", host="box", process=1, command="undo", targets=("orders-0",))
    audit.record_action(control, begun, "id")
    control.create("audit/1700000000001-other.json", b"not a record")
    (row,) = found(cli)
    assert (row["action"]["user"], row["outcome"]) == ("ann", None)
    shown = str(cli.ask("audit", "list", output="table").document)
    assert "ann@box" in shown
    assert "unknown" in shown


def test_keys_of_records_are_not_in_the_audit(cli: TierCli) -> None:
    cli.ask("erasure", "orders", "--key", "secret-key", "--expedite", "--reason", "ticket 7")
    (row,) = found(cli)
    assert row["action"]["details"] == {"keys": 1, "shorten_grace": False}
    stored = b"".join(path.read_bytes() for path in (cli.tier / ".tiered-compactor" / "audit").iterdir())
    assert b"secret-key" not in stored
