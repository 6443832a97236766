"""Iceberg tables of topics: they hold the last values below the cleaner offset, whatever becomes of the tier."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog, SqlCatalogBaseTable
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from checkpoint.offsets import first_dirty_offset_in
from compactor.access.tier import Tier
from compactor.constants import Offset
from compactor.control.state import PartitionState
from compactor.errors import BadData, Unavailable, UsageError
from compactor.features.iceberg import output as iceberg
from compactor.features.iceberg.output import IcebergOutput
from compactor.features.iceberg.plan import DataFileName, PartitionEntryInSnapshot, summary_key
from compactor.features.iceberg.table import TopicTable, open_table_loader
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.outputs import OutputReport
from compactor.read.ranges import last_values
from tests.builders import LogBuilder
from tests.support.tier_cli import GrowingTier, visible

ORDERS = TopicPartition("orders", 0)

Row = tuple[bytes, bytes, int]


class House(GrowingTier):
    """A tier that is filled again and again, and the table of its topic in a SQL catalog."""

    def __init__(self, folder: Path, **publish: int) -> None:
        self.catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
        self.warehouse = (folder / "warehouse").as_uri()
        settings: dict[str, dict[str, Any]] = {
            "publish": {"grace_ms": 0, "undo_window_ms": 0} | publish,
            "cleaner": {"delete_retention_ms": 0, "keyless_records": "drop"},
        }
        super().__init__(folder, settings)
        self.cli.set(**{"outputs.iceberg": {"warehouse": self.warehouse}, "outputs.iceberg.catalog": self.catalog})
        self.cli.set(**{'outputs.iceberg.topics."orders"': {}})

    def advance(self, *records: str) -> None:
        """A segment more, a round, and the table brought up to it."""
        self.segment(*records)
        self.bring()
        self.cli.run()
        self.update()

    def opened(self) -> Tier:
        return self.cli.open()

    def update(self) -> OutputReport:
        opened = self.opened()
        opened.identity.read_catalog()
        return IcebergOutput().update_output(opened, opened.latest_incarnation(ORDERS), DiskBudget(1 << 30))

    @contextmanager
    def topic_table(self) -> Iterator[Callable[[], TopicTable | None]]:
        opened = self.opened()
        settings = opened.settings.outputs.iceberg.iceberg_table_settings("orders")
        assert settings is not None
        with open_table_loader(settings, opened.identity.read_catalog().tier_id, "orders", create_if_missing=False) as read:
            yield read

    def table(self, name: str = "kafka.orders") -> Table:
        catalog = load_catalog("compacted", **self.catalog, warehouse=self.warehouse)
        try:
            return catalog.load_table(name)
        finally:
            catalog.close()

    def scan(self, snapshot_id: int | None = None) -> pa.Table:
        return self.table().scan(snapshot_id=snapshot_id).to_arrow()

    def entry(self, partition: int = 0) -> PartitionEntryInSnapshot:
        snapshot = self.table().current_snapshot()
        assert snapshot is not None
        assert snapshot.summary is not None
        return PartitionEntryInSnapshot.model_validate_json(snapshot.summary.additional_properties[summary_key(partition)])

    def files(self) -> set[str]:
        return {task.file.file_path for task in self.table().scan().plan_files()}

    def expected(self) -> list[Row]:
        """Last values of keys among all records that were ever written, from the log start of the tier up to its cleaner offset."""
        state = self.opened().open_partition_log(ORDERS).refresh()
        last: dict[bytes, Row | None] = {}
        for offset, _, key, value, _ in visible(self.folder / "log"):
            if key is not None and state.log_start <= offset < first_dirty_offset_in(state.vector):
                last[key] = None if value is None else (key, value, offset)
        return sorted(row for row in last.values() if row is not None)

    def check(self) -> None:
        assert self.rows() == self.expected()

    def compare_with_latest(self) -> None:
        """The rows are what the view `latest` of the tier shows below the cleaner offset."""
        opened = self.opened()
        view = last_values(opened, ORDERS, last_offset=self.entry().cleaner_offset - 1)
        found = [row for batch in view.arrow("key", "value", "offset") for row in batch.to_pylist()]
        assert self.rows() == sorted((row["key"], row["value"], row["offset"]) for row in found)

    def rows(self, snapshot_id: int | None = None) -> list[Row]:
        found = self.scan(snapshot_id).to_pylist()
        return sorted((row["key"], row["value"], row["offset"]) for row in found if row["partition"] == ORDERS.partition)


def show_view_below(monkeypatch: pytest.MonkeyPatch, end_offset: int) -> None:
    """Let tables show all offsets below a limit, although no round has cleaned them."""

    def with_later_vector(state: PartitionState) -> PartitionState:
        return state.model_copy(update={"vector": tuple(v.__class__(v.leader_epoch, Offset(end_offset)) for v in state.vector)})

    for name in ("view_snapshot_entry", "view_slices"):
        real = getattr(iceberg, name)
        monkeypatch.setattr(iceberg, name, lambda state, start, real=real: real(with_later_vector(state), start))


@pytest.fixture
def house(tmp_path: Path) -> House:
    made = House(tmp_path)
    made.segment("a=1", "b=1", "c=1")
    made.segment("a=2", "b=2")
    made.segment("d=1", "a=3", "e=1", "e=2", "=no key", "@=empty key", "f=")
    made.bring()
    return made


def test_a_table_holds_the_last_values_below_the_cleaner_offset(house: House) -> None:
    assert house.update().status == "empty"
    house.cli.run()
    assert house.update().status == "written"
    house.check()
    assert [row[:2] for row in house.rows()][:3] == [(b"", b"empty key"), (b"a", b"3"), (b"b", b"2")]
    assert house.update().status == "up_to_date"
    entry = house.entry()
    assert (entry.incarnation, entry.log_start, entry.cleaner_offset, entry.checked) == (1, 0, 12, 1.0)
    assert entry.run
    assert entry.topic_id


def test_all_columns_hold_what_a_consumer_is_given(house: House) -> None:
    house.log.leader_epoch = 3
    house.log.put("h=1", headers=[("name", b"\x00"), ("none", None)])
    house.log.put("i=1", append_time=77_000)
    house.log.roll()
    house.bring()
    house.cli.run()
    house.update()
    rows = {row["key"]: row for row in house.scan().to_pylist()}
    consumed = {record[2]: record for record in visible(house.folder / "log") if record[2] in (b"h", b"i")}
    for key, (offset, timestamp, _, value, headers) in consumed.items():
        row = rows[key]
        assert (row["offset"], row["value"], row["partition"], row["leader_epoch"]) == (offset, value, 0, 3)
        assert round(row["timestamp"].timestamp() * 1000) == timestamp
        assert [(header["key"].encode(), header["value"]) for header in row["headers"] or ()] == list(headers)
    assert [rows[key]["timestamp_type"] for key in (b"h", b"i")] == [0, 1]


def test_files_have_a_filter_of_their_keys_for_lookups(house: House) -> None:
    house.cli.run()
    house.update()
    for path in house.files():
        group = pq.ParquetFile(path.removeprefix("file://")).metadata.row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
        assert [column.path_in_schema for column in columns if column.bloom_filter_length] == ["key"]


def test_a_round_changes_only_the_files_of_replaced_segments(house: House) -> None:
    house.cli.set(cleaner={"segment_bytes": 150})
    house.cli.run()
    house.update()
    first = house.files()
    house.advance("d=2", "g=1")
    house.check()
    live = {segment.id for segment in house.opened().open_partition_log(ORDERS).refresh().live}
    stayed = {path for path in first if (name := DataFileName.from_data_file_path(path)) and name.slice.segment_id in live}
    assert stayed
    assert stayed == first & house.files()
    names = [DataFileName.from_data_file_path(path) for path in house.files()]
    assert {name.slice.segment_id for name in names if name} <= live


def test_a_round_that_is_undone_is_undone_in_the_table(tmp_path: Path) -> None:
    house = House(tmp_path, undo_window_ms=3_600_000)
    house.advance("a=1", "b=1")
    before = house.rows()
    house.advance("a=2", "c=")
    assert house.rows() != before
    slot = house.entry().slot
    run = house.opened().open_partition_log(ORDERS).refresh().published[-1]
    house.cli.do("undo", run)
    house.update()
    assert house.rows() == before
    assert house.entry().slot > slot
    house.check()


def test_rows_below_the_log_start_leave_the_table(house: House) -> None:
    house.cli.run()
    house.update()
    house.cli.do("topics", "delete-records", "orders-0", "--before", 5)
    house.update()
    house.check()
    assert min(row[2] for row in house.rows()) == 5
    assert house.entry().log_start == 5


def test_a_deleted_topic_leaves_an_empty_table_and_a_new_one_takes_its_place(house: House) -> None:
    house.cli.run()
    house.update()
    house.cli.do("topics", "delete", "orders-0")
    assert house.update().status == "removed"
    assert house.rows() == []
    house.cli.bring(house.folder / "log")
    house.cli.run()
    house.update()
    house.check()


def test_another_incarnation_replaces_all_files_of_the_partition(house: House) -> None:
    house.cli.run()
    house.update()
    other = LogBuilder(topic_id="BBBBBBBBBBBBBBBBBBBBBQ").add("z=1; /")
    house.cli.do("import", other.write(house.folder / "again"), "--topic", "orders", "--partition", 0, "--new-incarnation")
    house.update()
    assert house.rows() == []
    house.cli.do("run", "--force")
    assert house.update().status == "written"
    assert [row[:2] for row in house.rows()] == [(b"z", b"1")]
    assert (house.entry().incarnation, house.entry().topic_id) == (2, "BBBBBBBBBBBBBBBBBBBBBQ")


@pytest.mark.parametrize("is_retired", [False, True])
def test_a_truncation_cuts_the_rows_and_the_new_branch_takes_their_place(tmp_path: Path, is_retired: bool) -> None:
    """Offsets and leader epochs in the snapshot's summary fall back, and its slot rises. An import undoes a round that reached beyond the
    cut, if what that round replaced is still there, so that no value is lost that a discarded one had superseded.
    """
    house = House(tmp_path)
    house.cli.set(cleaner={"segment_bytes": 14})
    house.segment("a=1", "b=1")
    house.segment("c=1", "a=2")
    kept = copy.deepcopy(house.log)
    house.advance("d=1", "e=1", "c=2")
    files, longer = house.files(), house.entry()
    assert [row[:2] for row in house.rows()] == [(b"a", b"2"), (b"b", b"1"), (b"c", b"2"), (b"d", b"1"), (b"e", b"1")]
    accepted = ["--accept-loss"] if is_retired else []
    if is_retired:
        house.cli.do("retire")
    house.log = kept
    house.log.leader_epoch = 1
    house.segment("d=other", "f=1")
    house.segment("a=other")
    branch = house.log.write(house.folder / "branch", indexes=True)
    house.cli.do("import", branch, "--topic", "orders", "--partition", 0, "--accept-truncation", *accepted)
    assert house.update().status == "written"
    shown = house.entry()
    assert (longer.cleaner_offset, shown.cleaner_offset, shown.leader_epochs) == ((7, 4, ((0, 0),)) if is_retired else (7, 0, ()))
    assert shown.snapshot_ordering_key > longer.snapshot_ordering_key
    assert [row[:2] for row in house.rows()] == ([(b"a", b"2"), (b"b", b"1")] if is_retired else [])
    assert house.files() < files
    house.cli.run()
    house.update()
    assert house.entry().leader_epochs == ((0, 0), (1, 4))
    restored = [] if is_retired else [(b"c", b"1")]
    assert [row[:2] for row in house.rows()] == sorted([(b"a", b"other"), (b"b", b"1"), (b"d", b"other"), (b"f", b"1"), *restored])
    house.compare_with_latest()


def test_a_commit_on_top_of_another_snapshot_is_planned_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compactor that was stopped before its commit, while another one ran a round and committed that, commits nothing."""
    house.cli.run()
    commit = TopicTable.commit_snapshot
    stopped: list[int] = []

    def commit_late(table: TopicTable, *rest: Any) -> None:
        if not stopped:
            stopped.append(1)
            house.segment("a=4", "c=")
            house.bring()
            house.cli.run()
            assert house.update().status == "written"
        commit(table, *rest)

    monkeypatch.setattr(TopicTable, "commit_snapshot", commit_late)
    assert house.update().status == "up_to_date"
    assert len(stopped) == 1
    assert len(house.table().snapshots()) == 1
    house.check()


def test_a_view_that_changes_while_files_are_written_is_not_committed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.cli.run()
    write, views = iceberg._TableUpdateAttempt._write_changed_slices, list[int]()

    def write_slowly(update: Any, *rest: Any) -> float:
        checked = write(update, *rest)
        if not views:
            views.append(1)
            house.segment("a=4")
            house.bring()
            house.cli.run()
            house.cli.do("retire")
        return checked

    monkeypatch.setattr(iceberg._TableUpdateAttempt, "_write_changed_slices", write_slowly)
    assert house.update().status == "written"
    assert len(house.table().snapshots()) == 1
    house.check()


def test_a_commit_whose_answer_was_lost_is_not_repeated(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.cli.run()
    commit = TopicTable.commit_snapshot

    def lose_answer(table: TopicTable, *rest: Any) -> None:
        commit(table, *rest)
        raise Unavailable("no answer")

    monkeypatch.setattr(TopicTable, "commit_snapshot", lose_answer)
    with pytest.raises(Unavailable):
        house.update()
    monkeypatch.undo()
    assert house.update().status == "up_to_date"
    assert len(house.table().snapshots()) == 1
    house.check()


def test_a_key_that_occurs_twice_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an earlier vector than the one of its segments, a view would hold superseded values."""
    house.cli.run()
    house.update()
    before = house.rows()
    house.segment("a=4")
    house.bring()
    show_view_below(monkeypatch, house.log.next_offset)
    with pytest.raises(BadData, match="occurs twice"):
        house.update()
    assert house.rows() == before


def test_a_check_that_exceeds_its_memory_states_its_share(house: House) -> None:
    house.segment(*(f"key {number}={number}" for number in range(3000)))
    house.bring()
    house.cli.run()
    house.cli.set(cleaner={"map_budget_bytes": 4096})
    house.update()
    house.check()
    assert 0 < house.entry().checked < 1


def test_two_processes_make_a_new_catalog_at_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one finds none of the catalog's own tables, and they are there when it makes them."""

    def make_after_another_process(catalog: SqlCatalog) -> None:
        for _ in range(2):
            SqlCatalogBaseTable.metadata.create_all(catalog.engine, checkfirst=False)

    house.cli.run()
    monkeypatch.setattr(SqlCatalog, "create_tables", make_after_another_process)
    assert house.update().status == "written"
    house.check()


def test_two_partitions_share_a_table(house: House) -> None:
    other = LogBuilder()
    other.put("a=of the other partition")
    other.add("/; b=1; /")
    house.cli.do("import", other.write(house.folder / "other"), "--topic", "orders", "--partition", 1)
    house.cli.do("run", "--force")
    house.update()
    opened = house.opened()
    opened.identity.read_catalog()
    IcebergOutput().update_output(opened, TopicPartition("orders", 1), DiskBudget(1 << 30))
    assert house.entry(0).cleaner_offset > house.entry(1).cleaner_offset > 0
    rows = [row for row in house.scan().to_pylist() if row["key"] == b"a"]
    assert sorted((row["partition"], row["value"]) for row in rows) == [(0, b"3"), (1, b"of the other partition")]


def test_a_table_of_another_topic_is_refused(house: House) -> None:
    house.cli.run()
    house.update()
    house.cli.set(**{'outputs.iceberg.topics."orders"': {}, "outputs.iceberg": {"table": "kafka.orders"}})
    opened = house.opened()
    opened.identity.read_catalog()
    moved = opened.settings.outputs.iceberg.topics["orders"]
    settings = opened.settings.outputs.iceberg.model_copy(update={"topics": {".*": moved}})
    outputs = opened.settings.outputs.model_copy(update={"iceberg": settings})
    opened.settings.__dict__["outputs"] = outputs
    with pytest.raises(UsageError, match="belongs to topic orders"):
        IcebergOutput().update_output(opened, TopicPartition("payments", 0), DiskBudget(1 << 30))


def test_topics_whose_names_differ_in_separators_only_have_tables_of_their_own_or_none(house: House) -> None:
    """Neither of them gets the one table that both would have, whichever comes first."""
    house.cli.set(**{'outputs.iceberg.topics.".*"': {}})
    del house.cli.settings['outputs.iceberg.topics."orders"']
    for name in ("a.b-0", "a-b-0", "a_b-0"):
        house.cli.named = name
        house.cli.bring(house.folder / "log")
    house.cli.do("run", "--force")
    answer = house.cli.ask("config", "check")
    assert [one["detail"] for one in answer.document["problems"]] == ["topics a-b and a.b and a_b would have one table, kafka.a_b"]
    assert answer.code != 0
    answer = house.cli.ask("outputs", "write")
    assert answer.code == UsageError.exit_code
    assert [row["topic"] for row in answer.document["partitions"]] == ["orders"]
    with pytest.raises(NoSuchTableError):
        house.table("kafka.a_b")
    house.cli.set(**{'outputs.iceberg.topics."a.b"': {"table": "kafka.dot"}, 'outputs.iceberg.topics."a-b"': {"table": "kafka.dash"}})
    house.cli.do("config", "check")
    assert {row["status"] for row in house.cli.do("outputs", "write")["partitions"]} == {"written", "up_to_date"}
    tables = {row["topic"]: row["table"] for row in house.cli.do("outputs", "list")["tables"]}
    assert tables == {"a.b": "kafka.dot", "a-b": "kafka.dash", "a_b": "kafka.a_b", "orders": "kafka.orders"}


def test_a_commit_of_another_program_hides_no_entry(house: House) -> None:
    house.cli.run()
    house.update()
    entry, table = house.entry(), house.table()
    with table.transaction() as transaction, transaction.update_snapshot().overwrite():
        pass  # as Spark's rewrite_manifests, whose snapshot has no entries
    assert house.update().status == "up_to_date"
    with house.topic_table() as read:
        found = read()
        assert found is not None
        assert found.partition_entry(0) == entry


def test_rows_of_another_program_stop_updates(house: House) -> None:
    house.cli.run()
    house.update()
    house.table().append(house.scan().slice(0, 1).cast(house.table().schema().as_arrow()))
    before = house.rows()
    house.segment("a=4")
    house.bring()
    house.cli.run()
    with pytest.raises(BadData, match="not written by this program"):
        house.update()
    assert house.rows() == before


def test_a_list_of_outputs_shows_how_far_a_table_is(house: House) -> None:
    def listed() -> dict[str, Any]:
        (row,) = house.cli.do("outputs", "list", "orders")["tables"]
        return dict(row)

    assert (listed()["status"], listed()["lag_offsets"], listed()["files"]) == ("missing", 0, 0)
    house.cli.run()
    assert (listed()["status"], listed()["lag_offsets"]) == ("missing", 12)
    assert [row["status"] for row in house.cli.do("outputs", "write")["partitions"]] == ["written"]
    row = listed()
    assert (row["status"], row["lag_offsets"], row["lag_ms"], row["files"], row["snapshots"]) == ("current", 0, 0, 1, 1)
    assert row["rows"] == len(house.rows())
    house.segment("a=9")
    house.bring()
    house.cli.run()
    row = listed()
    assert (row["status"], row["lag_offsets"]) == ("behind", 1)
    assert row["lag_ms"] > 0


class Crashed(BaseException):
    """The process was killed."""


@pytest.mark.parametrize("seed", range(int(os.environ.get("ICEBERG_SEEDS", "4"))))
def test_a_table_shows_the_last_values_throughout_a_random_life(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    house = house_for_a_life(tmp_path)
    views = live_through(house, random.Random(seed), monkeypatch)
    assert {snapshot: house.rows(snapshot) for snapshot in views} == views
    entries = [
        PartitionEntryInSnapshot.model_validate_json(snapshot.summary.additional_properties[summary_key(0)])
        for snapshot in house.table().snapshots()
        if snapshot.summary
    ]
    orders = [entry.snapshot_ordering_key for entry in entries]
    assert orders == sorted(set(orders))


def house_for_a_life(folder: Path) -> House:
    house = House(folder, undo_window_ms=3_600_000)
    house.cli.set(cleaner={"segment_bytes": 400, "min_cleanable_dirty_ratio": 0.0})
    return house


def live_through(house: House, dice: random.Random, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Row]]:
    """Let a tier live with rounds, undo, retention and crashes. After each update the table is compared with every record ever written.
    Return what each snapshot must show.
    """
    commit, crash = TopicTable.commit_snapshot, [0]

    def commit_or_crash(table: TopicTable, *rest: Any) -> None:
        if crash[0] == 1:
            raise Crashed
        commit(table, *rest)
        if crash[0] == 2:
            raise Crashed

    monkeypatch.setattr(TopicTable, "commit_snapshot", commit_or_crash)
    views: dict[int, list[Row]] = {}
    steps: Sequence[Callable[[], object]] = (
        lambda: _write(house, dice),
        lambda: _write(house, dice),
        lambda: house.cli.ask("run", "--force"),
        lambda: house.cli.ask("run", "--force"),
        lambda: _undo(house),
        lambda: _delete_records(house, dice),
        lambda: house.cli.ask("retire"),
    )
    _write(house, dice)
    for step in (steps[2], *dice.choices(steps, k=14)):
        step()
        crash[0] = dice.choice((0, 0, 1, 2))
        try:
            house.update()
        except Crashed:
            crash[0] = 0
            house.update()
        if (snapshot := house.table().current_snapshot()) is not None:
            house.check()
            views[snapshot.snapshot_id] = house.expected()
    return views


def _write(house: House, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 3)):
        pid = dice.choice((-1, -1, 7))
        values = ("", f"={house.log.next_offset}", f"={'x' * 60}")
        records = [f"k{dice.randrange(12)}{dice.choice(values)}" for _ in range(dice.randint(1, 6))]
        house.log.put(*records, pid=pid, txn=pid >= 0)
        if pid >= 0:
            house.log.end(pid, commit=dice.random() < 0.6)
        house.log.roll()
    house.bring()


def _undo(house: House) -> None:
    published = house.opened().open_partition_log(ORDERS).refresh().published
    if published:
        house.cli.ask("undo", published[-1])


def _delete_records(house: House, dice: random.Random) -> None:
    state = house.opened().open_partition_log(ORDERS).refresh()
    house.cli.ask("topics", "delete-records", "orders-0", "--before", dice.randint(state.log_start, state.log_start + 6))
