"""`retire` over more partitions than it looks at each time: the tier-wide log tells where, and hints bring it back."""

from __future__ import annotations

from pathlib import Path

from compactor.upkeep.retire import MAX_UNHINTED_INSPECTIONS
from tests.builders import log_of
from tests.support.tier_cli import TierCli

PARTITIONS = MAX_UNHINTED_INSPECTIONS + 4


def test_what_is_idle_is_left_alone_until_something_is_written(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli", {"publish": {"grace_ms": 0}})
    for number in range(PARTITIONS):
        log = log_of("a=1; a=2")
        log.write(tmp_path / "logs" / f"orders-{number}")
    cli.do("import", tmp_path / "logs")
    first = cli.do("retire")
    assert (first["looked_at"], first["deleted"]) == (PARTITIONS, [])
    assert cli.do("retire")["looked_at"] == 0
    assert cli.run("orders-7")["status"] == "cleaned"
    found = cli.do("retire")
    assert found["looked_at"] == 1
    assert all(name.startswith("orders-7/") for name in found["deleted"])
    assert found["deleted"]
    assert cli.do("retire")["looked_at"] == 0
    assert cli.do("retire", "--all")["looked_at"] == PARTITIONS
    cli.set(publish={"grace_ms": 3_600_000})
    assert cli.run("orders-9")["status"] == "cleaned"
    waits = cli.do("retire")
    assert (waits["looked_at"], waits["deleted"], len(waits["waiting"]) > 0) == (1, [], True)
    again = cli.do("retire")
    assert (again["looked_at"], again["next_ms"]) == (0, waits["next_ms"])
    table = cli.ask("retire", output="table").document
    assert f"Looked at 0 of {PARTITIONS} partitions" in str(table)
