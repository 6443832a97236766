"""Real daemons that are killed while they keep an Iceberg table: the next daemon finishes the table and leaves no files over."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from checkpoint.offsets import first_dirty_offset_in
from compactor.model.ids import TopicPartition
from tests.integration.test_daemon_process import FAST
from tests.integration.test_kill_processes import Slow
from tests.support.deployment import Deployment, GrowingLog, Running

ORDERS = TopicPartition("orders", 0)

KILL: str = """
import importlib, os, signal
def kill_in(module, owner, name, after):
    holder = getattr(importlib.import_module(module), owner)
    original = getattr(holder, name)
    def killed(*rest, **named):
        if after:
            original(*rest, **named)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(holder, name, staticmethod(killed) if isinstance(vars(holder).get(name), staticmethod) else killed)
"""
"""Python that kills its own process when a method is called, or when it has returned."""

MOMENTS = {
    "between publication and commit": "kill_in('compactor.features.iceberg.table', 'TopicTable', 'commit_snapshot', False)",
    "when a data file is written": "kill_in('compactor.features.iceberg.table', 'TopicTable', 'write_data_file', True)",
    "when manifests are written": "kill_in('pyiceberg.catalog.sql', 'SqlCatalog', 'commit_table', False)",
    "when metadata are written": "kill_in('pyiceberg.catalog', 'MetastoreCatalog', '_write_metadata', True)",
    "after the commit": "kill_in('pyiceberg.catalog.sql', 'SqlCatalog', 'commit_table', True)",
}


class House:
    """A tier with daemons as processes, and the table of its topic."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": (folder / "warehouse").as_uri()}
        sections = {name: dict(values) for name, values in FAST.items()} | {
            "cleaner": {"segment_bytes": 16_384, "delete_retention_ms": 0, "min_cleanable_dirty_ratio": 0.0},
            "outputs.iceberg.catalog": self.catalog,
            "outputs.iceberg.topics.orders": {},
        }
        sections["publish"] |= {"orphan_age_ms": 0}
        self.deployment = Deployment(folder, sections)
        self.log = GrowingLog(*ORDERS, folder, random.Random(7))
        self.running: list[Running] = []

    def write(self) -> None:
        self.deployment.bring(self.log.write_part(3))

    def start(self, before: str = "") -> Running:
        self.running.append(self.deployment.start("daemon", before=before))
        return self.running[-1]

    def table(self) -> Table | None:
        catalog = load_catalog("compacted", **self.catalog)
        try:
            return catalog.load_table("kafka.orders") if catalog.table_exists("kafka.orders") else None
        finally:
            catalog.close()

    def rows(self) -> list[tuple[int, bytes, bytes]]:
        table = self.table()
        assert table is not None
        return sorted((row["offset"], row["key"], row["value"]) for row in table.scan().to_arrow().to_pylist())

    def naive_view(self) -> list[tuple[int, bytes, bytes]]:
        """Last values below the cleaner offset among all committed records that were ever written."""
        end = first_dirty_offset_in(self.deployment.opened().open_partition_log(ORDERS).refresh().vector)
        last = {key: (offset, key, value) for offset, key, value in self.log.committed if offset < end}
        return sorted((offset, key, value) for offset, key, value in last.values() if value is not None)

    def shown(self) -> Any:
        """The row of `outputs list`."""
        (row,) = self.deployment.do("outputs", "list", "orders-0")["tables"]
        return row

    def is_current(self) -> bool:
        state = self.deployment.opened().open_partition_log(ORDERS).refresh()
        row = self.shown()
        return bool(row["status"] == "current" and row["cleaner_offset"] == state.end_offset + 1)

    def finish(self) -> None:
        """A daemon that nobody kills brings the table up to date; then the table is compared, and every file of it is in use."""
        daemon = self.start()
        wait_for(lambda: "status at http://" in daemon.said(), daemon)  # from then on it handles SIGTERM
        wait_for(lambda: self.is_current() and not self.orphans(), daemon)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(30) == 0, daemon.said()
        assert self.rows() == self.naive_view()

    def orphans(self) -> set[str]:
        """Names of data files that no snapshot uses."""
        table = self.table()
        assert table is not None
        tasks = [task for snapshot in table.snapshots() for task in table.scan(snapshot_id=snapshot.snapshot_id).plan_files()]
        found = {path.name for path in (self.folder / "warehouse").rglob("*.parquet")}
        return found - {task.file.file_path.rpartition("/")[2] for task in tasks}


def wait_for(what: Callable[[], bool], process: Running) -> None:
    until = time.monotonic() + 60
    while not what():
        assert process.poll() is None, process.said()
        assert time.monotonic() < until, process.said()
        time.sleep(0.2)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    made.write()
    yield made
    for process in made.running:
        process.put_down()


@pytest.mark.parametrize("moments", [tuple(MOMENTS)[:1], tuple(MOMENTS)[1:]])
def test_the_next_daemon_finishes_what_killed_ones_began(house: House, moments: tuple[str, ...]) -> None:
    """Each daemon finds what the one before has left behind, and is killed at another moment of its update."""
    house.deployment.do("run", "orders-0")
    house.deployment.do("outputs", "write")
    for moment in moments:
        house.write()
        killed = house.start(before=KILL + MOMENTS[moment])
        assert killed.wait(60) == -signal.SIGKILL, killed.said()
        assert (house.shown()["status"] == "current") is (moment == "after the commit")
    house.finish()


@pytest.mark.slow
def test_daemons_that_are_killed_at_random_moments_leave_an_exact_table(house: House) -> None:
    dice = random.Random(3)
    for _ in range(8):
        house.write()
        daemon = house.start()
        time.sleep(dice.uniform(0.8, 3))
        daemon.put_down()
    house.finish()


def test_a_fenced_compactor_commits_nothing(tmp_path: Path) -> None:
    """It was stopped in its round beyond its lease. Another one ends the round and writes the table, before the first one goes on."""
    slow = Slow(tmp_path)
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": (tmp_path / "warehouse").as_uri()}
    slow.deployment.set(**{"outputs.iceberg.catalog": catalog, "outputs.iceberg.topics.orders": {}})
    try:
        slow.stop()
        slow.deployment.do("run", "orders-0")
        assert slow.deployment.do("outputs", "write")["partitions"][0]["status"] == "written"
        before = slow.deployment.do("outputs", "list")
        assert slow.go_on() == 4
        assert slow.deployment.do("outputs", "write")["partitions"][0]["status"] == "up_to_date"
        assert json.dumps(slow.deployment.do("outputs", "list")) == json.dumps(before)
    finally:
        slow.process.put_down()
