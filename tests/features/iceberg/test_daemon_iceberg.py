"""The daemon keeps Iceberg tables: after each round, after an undo, and after it was killed between a publication and the commit."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from compactor.daemon.daemon import Daemon
from compactor.errors import Unavailable, UsageError
from compactor.features.iceberg.table import TopicTable
from compactor.web.console import RequestRouter
from compactor.web.pages import DaemonPages
from tests.features.iceberg.test_iceberg import ORDERS, House
from tests.features.pinterest.test_daemon_generations import idle, work
from tests.support.told import Told


@pytest.fixture
def house(tmp_path: Path) -> House:
    made = House(tmp_path, undo_window_ms=3_600_000)
    made.cli.set(cleaner={"min_cleanable_dirty_ratio": 0.3})
    made.segment("a=1", "b=1")
    made.segment("a=2", "c=1")
    made.bring()
    return made


def test_the_table_follows_rounds_and_their_undoing(house: House) -> None:
    told = Told()
    daemon = Daemon(house.opened(), seed=1, log=told)
    idle(daemon)
    assert daemon.status().totals.jobs[("output", "written")] == 1
    assert any("table kafka.orders: 1 file with 3 rows" in line for line in told)
    house.check()
    before = house.rows()
    house.segment("a=3", "d=1")
    house.segment("a=4")
    house.bring()
    work(daemon, {("output", "written"): 2})
    house.check()
    assert house.rows() != before
    house.cli.do("pause", "orders")
    house.cli.do("undo", house.opened().open_partition_log(ORDERS).refresh().published[-1])
    work(daemon, {("output", "written"): 3})
    assert house.rows() == before
    requests = daemon.status().usage.total_requests
    daemon.scan()
    assert daemon.start_due_jobs() == []
    assert daemon.status().usage.total_requests - requests <= 4


def test_the_next_daemon_commits_a_round_that_the_one_before_has_published_only(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(table: TopicTable, *rest: Any) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(TopicTable, "commit_snapshot", killed)
    idle(Daemon(house.opened(), seed=1))
    assert house.table().current_snapshot() is None
    assert house.opened().open_partition_log(ORDERS).refresh().published
    monkeypatch.undo()
    idle(Daemon(house.opened(), seed=1))
    house.check()


def test_the_page_of_a_partition_shows_how_far_its_table_is(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(house.opened(), seed=1)
    pages = RequestRouter(DaemonPages(daemon.status, daemon.partition_details), lambda: 0, 1000)

    def shown() -> Any:
        document = json.loads(pages.respond_to_request("/api/partitions/orders-0").body)
        return document["output"], html.unescape(pages.respond_to_request("/partitions/orders-0").body.decode())

    idle(daemon)
    output, page = shown()
    assert output == {"end_offset": 4, "lag_offsets": 0, "lag_since_ms": None, "files": 1, "snapshots": 1, "problem": ""}
    assert "up to date" in page
    assert "1 file, 1 snapshot" in page
    monkeypatch.setattr(TopicTable, "commit_snapshot", refused)
    house.segment("a=3", "d=1")
    house.bring()
    work(daemon, {("output", "failed"): 1})
    output, page = shown()
    assert (output["lag_offsets"], output["files"], output["problem"]) == (2, 1, "the catalog is away")
    assert output["lag_since_ms"]
    assert "2 offsets behind since" in page
    assert "the catalog is away" in page


def refused(table: TopicTable, *rest: Any) -> None:
    raise Unavailable("the catalog is away")


def test_topics_without_a_table_are_left_alone(house: House) -> None:
    house.cli.set(**{'outputs.iceberg.topics."orders"': {"table": "kafka.{topic}"}})
    house.cli.named = "payments-0"
    house.cli.bring(house.folder / "log")
    daemon = Daemon(house.opened(), seed=1)
    idle(daemon)
    assert daemon.status().totals.jobs[("output", "empty")] == 1
    house.check()


def test_a_second_output_is_refused(house: House) -> None:
    house.cli.set(**{"tier.pinterest": {"cluster": "prod", "target": (house.folder / "compacted").as_uri()}})
    with pytest.raises(UsageError, match="two outputs"):
        Daemon(house.opened(), seed=1)
