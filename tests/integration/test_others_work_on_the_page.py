"""What a daemon's page shows of rounds and deletions that other processes did: it comes from the control log."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.daemon.daemon import Daemon
from compactor.views.forecast import price_table_of_tier
from compactor.web.console import PartitionListQuery
from compactor.web.pages import DaemonPages
from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    cli = TierCli(tmp_path / "cli", {"publish": {"grace_ms": 0}, "cleaner": {"segment_bytes": 3_000}})
    log = LogBuilder()
    for number in range(8):
        for at in range(20):
            log.put(f"old-{number}-{at}={'x' * 100}")
        log.roll()
    log.put("old-0-0=1", "old-0-0=2")
    cli.bring(log.write(tmp_path / "log"))
    assert cli.run()["status"] == "cleaned"
    more = LogBuilder(next_offset=log.next_offset).add("new=1 new=2")
    cli.bring(more.write(tmp_path / "more"))
    assert cli.run()["segments_skipped"] > 0
    return cli


def test_skipped_segments_costs_and_what_was_reclaimed(cli: TierCli) -> None:
    daemon = Daemon(cli.open(), seed=1)
    daemon.scan()
    pages = DaemonPages(daemon.status, daemon.partition_details, prices=price_table_of_tier("s3://bucket"))
    (name,) = [schedule.partition for schedule in daemon.status().schedules]
    shown = pages.partition_document(name)
    assert shown is not None
    assert shown.axis is not None
    spared = [each for each in shown.axis.segments if each.decision == "left alone"]
    assert spared
    assert all(each.why for each in spared)
    assert all(each.start_offset < shown.axis.end_offset - 2 for each in spared), "the new segment was read"
    assert [each.cost_usd is not None and each.cost_usd > 0 for each in shown.rounds] == [True, True]
    assert shown.rounds[1].saved_usd_month is not None
    before = pages.status_page_document(PartitionListQuery()).totals
    assert before.reclaimed_24h_bytes == 0
    waiting = before.waiting_bytes
    assert waiting > 0
    assert cli.do("retire")["deleted"]
    another = Daemon(cli.open(), seed=2)
    another.scan()
    after = DaemonPages(another.status, another.partition_details).status_page_document(PartitionListQuery()).totals
    assert (after.reclaimed_24h_bytes, after.waiting_bytes) == (waiting, 0)
    line = cli.do("runs", "list")["runs"][-1]["stats"]["left_alone"]
    assert line.startswith(f"{spared[0].start_offset}-")
