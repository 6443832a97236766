"""`plan` of a round that is due for delete horizons alone, what the round then saved, and prices of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli

HOUR = 3_600_000


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """500 values superseded, 400 kept, 20 tombstones that have their horizon after one round."""
    made = TierCli(tmp_path / "cli", {"cleaner": {"delete_retention_ms": HOUR, "bloom_design_keys": 100}})
    log = LogBuilder()
    for number in range(500):
        log.put(f"a={number}" + "x" * 200)
    for number in range(400):
        log.put(f"k{number}=" + "x" * 200)
    log.put(*(f"t{number}" for number in range(20)))
    log.add("/; b=1")
    made.bring(log.write(tmp_path / "orders-0"))
    assert made.run("--now", "1970-01-01T10:00:00Z")["status"] == "cleaned"
    return made


def test_horizons_promise_what_tombstones_take(cli: TierCli) -> None:
    (row,) = cli.do("plan", "--at", 12 * HOUR)["partitions"]
    assert row["due"]
    assert row["expected_saving_why"] == "only delete horizons are due: 20 tombstones, 128 bytes each at most"
    (done,) = cli.do("run", "--now", 12 * HOUR)["partitions"]
    assert 0 < done["saved_bytes"] <= row["expected_saving_bytes"] < row["bytes_to_write"] / 10
    assert cli.do("runs", "list")["runs"][-1]["stats"]["bytes_dirty"] == 0


def test_prices_of_ones_own(cli: TierCli, tmp_path: Path) -> None:
    document = cli.do("plan")
    assert document["prices"]["of"] == "a directory"
    assert document["partitions"][0]["stored_usd_month"] == 0
    table = tmp_path / "prices.toml"
    table.write_text('as_of = "2026-11"\nread_request_usd = 0\nwrite_request_usd = 0\nstored_gib_month_usd = 1_073_741.824\n')
    document = cli.do("plan", "--prices", table)
    (row,) = document["partitions"]
    stored = sum(path.stat().st_size for path in cli.tier.rglob("orders-0/*.log"))
    assert row["stored_usd_month"] == pytest.approx(stored / 1000)
    shown = cli.ask("plan", "--prices", table, output="table").document
    assert "prices.toml, 2026-11" in str(shown)
    table.write_text("read_request_usd = 0")
    cli.refused("plan", "--prices", table, code=2, says="must be numbers")
