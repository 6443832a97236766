"""What other programs do to a table: their rows are noticed, their files stay, and what Iceberg allows them works on."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriter, ManifestWriterV2
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, StringType
from typing_extensions import override

from compactor.errors import BadData, UsageError
from compactor.features.iceberg import table as iceberg_table
from compactor.features.iceberg.output import IcebergOutput
from compactor.features.iceberg.plan import DataFileName
from compactor.features.iceberg.table import TopicTable
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.outputs import OutputReport
from tests.builders import LogBuilder
from tests.features.iceberg.test_iceberg import ORDERS, Crashed, House, house

__all__ = ["house"]

LATER_MS = 10**12
"""Longer than anything is kept."""


def commit_nothing(table: Table) -> None:
    """Commit as Spark's rewrite_manifests does: the snapshot has the same rows and no entries."""
    with table.transaction() as transaction, transaction.update_snapshot().overwrite():
        pass


class _WriterOfDeletes(ManifestWriterV2):
    @override
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    @override
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _AppendDeletes(_FastAppendFiles):
    @override
    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        return _WriterOfDeletes(spec, self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression)


def delete_by_position(table: Table) -> None:
    """As Spark does with write.delete.mode=merge-on-read: the first row of each file is deleted."""
    paths = [task.file.file_path for task in table.scan().plan_files()]
    commit_deletes(table, DataFileContent.POSITION_DELETES, pa.table({"file_path": paths, "pos": pa.array([0] * len(paths), pa.int64())}))


def delete_by_key(table: Table) -> None:
    """As Flink does with upsert-enabled."""
    commit_deletes(table, DataFileContent.EQUALITY_DELETES, pa.table({"key": [b"a"]}), equality_ids=[1])


def commit_deletes(table: Table, content: DataFileContent, rows: pa.Table, **more: Any) -> None:
    """pyiceberg itself writes no deletes. rows: those of a file of deletes in partition 0."""
    path = Path(table.location().removeprefix("file://")) / f"data/{uuid.uuid4().hex}.parquet"
    ids = {"file_path": 2147483546, "pos": 2147483545, "key": 1}
    fields = [field.with_metadata({"PARQUET:field_id": str(ids[field.name])}) for field in rows.schema]
    pq.write_table(rows.cast(pa.schema(fields)), path)
    append_file(table, _AppendDeletes, content, path, FileFormat.PARQUET, **more)


def append_file(table: Table, how: type[_FastAppendFiles], content: DataFileContent, path: Path, kind: FileFormat, **more: Any) -> None:
    size = path.stat().st_size
    file = DataFile.from_args(
        content=content, file_path=path.as_uri(), file_format=kind, partition=Record(0), record_count=1, file_size_in_bytes=size, **more
    )
    file.spec_id = 0
    with table.transaction() as transaction, how(Operation.APPEND, transaction, table.io) as producer:
        producer.append_data_file(file)


def names(house: House) -> set[str]:
    return {path.name for path in (house.folder / "warehouse").rglob("*") if path.is_file()}


@contextmanager
def loaded(house: House) -> Iterator[TopicTable]:
    with house.topic_table() as read:
        table = read()
        assert table is not None
        yield table


def expire(house: House) -> int:
    with loaded(house) as table:
        return table.expire_snapshots(60_000, house.opened().ports.clock_ms() + LATER_MS)[0]


def update_partition(house: House, partition: int) -> OutputReport:
    opened = house.opened()
    opened.identity.read_catalog()
    return IcebergOutput().update_output(opened, TopicPartition("orders", partition), DiskBudget(1 << 30))


def add_partition(house: House) -> None:
    other = LogBuilder()
    other.put("a=of the other partition")
    other.add("/; b=1; /")
    house.cli.do("import", other.write(house.folder / "other"), "--topic", "orders", "--partition", 1)
    house.cli.do("run", "--force")


# --- rows ---


def test_rows_that_another_program_deleted_are_noticed_without_a_round(house: House) -> None:
    house.cli.run()
    house.update()
    house.table().delete("offset == 6")
    with pytest.raises(BadData, match="not written by this program"):
        house.update()
    assert house.cli.ask("outputs", "list", "orders").code == BadData.exit_code


@pytest.mark.parametrize("delete", [delete_by_position, delete_by_key])
def test_deletes_beside_the_data_files_stop_updates_until_the_table_is_rolled_back(house: House, delete: Any) -> None:
    """They would hide rows of files that stay, and a key's next value would be a row that they do not hide."""
    house.cli.run()
    house.update()
    own = house.table().metadata.current_snapshot_id
    delete(house.table())
    present = names(house)
    for _ in range(2):
        with pytest.raises(BadData, match="rows were deleted in it by another program"):
            house.update()
        assert house.cli.ask("outputs", "list", "orders").code == BadData.exit_code
        house.segment("z=1")
        house.bring()
        house.cli.run()
    assert names(house) == present
    assert own is not None
    house.table().manage_snapshots().rollback_to_snapshot(own).commit()
    assert house.update().status == "written"
    house.check()


def test_erasure_names_deletes_by_key_and_files_that_it_cannot_search(house: House) -> None:
    """Of another program's rows, which it may have written as Avro or ORC."""
    house.cli.run()
    house.update()
    delete_by_position(house.table())
    (ours,) = house.files()
    delete_by_key(house.table())
    path = house.folder / "warehouse/kafka/orders/data/rows.avro"
    path.write_bytes(b"whatever")
    append_file(house.table(), _FastAppendFiles, DataFileContent.DATA, path, FileFormat.AVRO)
    for key, searched in (("a", 2), ("z", 0)):
        document = house.cli.ask("erasure", "orders", "--key", key).document
        found = [(one["object"], one["what"]) for one in document["holders"] if one["state"] == "table"]
        assert len(found) == searched + 1
        assert (path.as_uri(), "unknown") in found
        assert [what for _, what in found].count("record") == searched
        assert ((ours, "record") in found) == (searched > 0)


@pytest.mark.parametrize("partition", [0, 77])
def test_rows_that_another_program_appended_are_noticed_without_a_round(house: House, partition: int) -> None:
    """Also those of a partition that the topic does not have."""
    house.cli.run()
    house.update()
    row = house.scan().slice(0, 1).set_column(2, "partition", pa.array([partition], pa.int32()))
    house.table().append(row.cast(house.table().schema().as_arrow()))
    with pytest.raises(BadData, match="not written by this program"):
        house.update()
    assert house.cli.ask("outputs", "list", "orders").code == BadData.exit_code


def test_a_file_that_another_program_removed_is_written_again(house: House) -> None:
    house.cli.run()
    house.update()
    house.table().delete("partition == 0")
    assert house.rows() == []
    (row,) = house.cli.do("outputs", "list", "orders")["tables"]
    assert row["status"] == "behind"
    assert house.update().status == "written"
    house.check()
    assert house.update().status == "up_to_date"


def test_an_entry_is_not_copied_if_the_rows_of_its_partition_are_gone(house: House) -> None:
    """Another program's commit removes the rows of one partition, and the next update is one of the other partition."""
    house.cli.run()
    add_partition(house)
    house.update()
    update_partition(house, 1)
    before = house.scan().num_rows
    house.table().delete("partition == 1")
    assert update_partition(house, 0).status == "up_to_date"
    assert update_partition(house, 1).status == "written"
    assert house.scan().num_rows == before


# --- entries ---


def test_entries_are_committed_again_after_a_commit_of_another_program(house: House) -> None:
    house.cli.run()
    add_partition(house)
    house.update()
    update_partition(house, 1)
    entries = [house.entry(0), house.entry(1)]
    commit_nothing(house.table())
    assert house.update().status == "up_to_date"
    assert [house.entry(0), house.entry(1)] == entries
    assert house.update().status == "up_to_date"
    assert len(house.table().snapshots()) == 4
    expire(house)
    assert len(house.table().snapshots()) == 1
    house.cli.do("topics", "delete", "orders-1")
    assert update_partition(house, 1).status == "removed"
    assert {row["partition"] for row in house.scan().to_pylist()} == {0}


def test_a_snapshot_does_not_expire_while_its_entries_are_in_no_later_one(house: House) -> None:
    house.cli.run()
    house.update()
    own = house.table().current_snapshot()
    assert own is not None
    for _ in range(3):
        commit_nothing(house.table())
    expire(house)
    assert house.table().snapshots()[0].snapshot_id == own.snapshot_id
    assert len(house.table().snapshots()) == 2


def test_rows_of_a_deleted_topic_leave_a_table_whose_entries_another_program_expired(house: House) -> None:
    house.cli.run()
    house.update()
    own = house.table().current_snapshot()
    assert own is not None
    commit_nothing(house.table())
    house.table().maintenance.expire_snapshots().by_id(own.snapshot_id).commit()
    house.cli.do("topics", "delete", "orders-0")
    assert house.update().status == "removed"
    assert house.rows() == []


# --- files ---


def test_expiry_keeps_files_that_other_snapshots_use(house: House) -> None:
    house.cli.set(cleaner={"segment_bytes": 150})
    house.cli.run()
    house.update()
    first = house.files()
    house.advance("d=2", "g=1")
    assert first & house.files()
    assert expire(house) > 0
    house.check()


def test_a_sweep_keeps_files_that_are_committed_while_it_lists(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.cli.run()
    house.update()
    house.segment("a=4", "c=")
    house.bring()
    house.cli.run()
    listing = iceberg_table._list_files_under_location
    with loaded(house) as table, monkeypatch.context() as patched:

        def list_after_a_commit(*rest: Any) -> Any:
            patched.undo()
            assert house.update().status == "written"
            return listing(*rest)

        patched.setattr(iceberg_table, "_list_files_under_location", list_after_a_commit)
        assert table.delete_orphan_files(0, older_than_ms=2**50) == (0, None)
    house.check()


def name_files_like_an_earlier_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmarked(name: DataFileName, nonce: str) -> str:
        return f"{name.partition}.{name.incarnation}.{name.slice}.{uuid.uuid4().hex}.parquet"

    monkeypatch.setattr(DataFileName, "file_name_with_nonce", unmarked)
    monkeypatch.setattr(TopicTable, "_new_marked_id", lambda table: uuid.UUID(f"{b'tiered'.hex()}8{uuid.uuid4().hex[13:]}"))


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_sweep_keeps_the_files_of_a_renamed_table_at_the_same_location(
    house: House, monkeypatch: pytest.MonkeyPatch, is_marked: bool
) -> None:
    house.cli.run()
    with monkeypatch.context() as patched:
        if not is_marked:
            name_files_like_an_earlier_version(patched)
        house.update()
        house.segment("a=4")
        house.bring()
        house.cli.run()
        house.update()
    catalog = load_catalog("compacted", **house.catalog, warehouse=house.warehouse)
    catalog.rename_table("kafka.orders", "kafka.archive")
    catalog.close()
    archive = house.table("kafka.archive").scan().to_arrow()
    assert house.update().status == "written"
    assert house.table().location() == house.table("kafka.archive").location()
    before = names(house)
    with loaded(house) as table:
        assert table.delete_orphan_files(0, older_than_ms=2**50) == (0, None)
    assert names(house) == before
    assert house.table("kafka.archive").scan().to_arrow() == archive
    house.advance("a=5")
    expire(house)
    assert house.table("kafka.archive").scan().to_arrow() == archive
    assert [
        house.table("kafka.archive").scan(snapshot_id=one.snapshot_id).to_arrow().num_rows
        for one in house.table("kafka.archive").snapshots()
    ]


def test_files_of_an_earlier_version_expire_and_are_swept_where_no_other_table_has_been(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        name_files_like_an_earlier_version(patched)
        house.cli.run()
        house.update()
        house.segment("a", "b=2")
        house.bring()
        house.cli.run()
        patched.setattr(TopicTable, "commit_snapshot", killed)
        with pytest.raises(Crashed):
            house.update()
    house.update()
    assert expire(house) > 0
    with loaded(house) as table:
        assert table.delete_orphan_files(0, older_than_ms=2**50) == (1, None)
    assert {path for path in names(house) if path.endswith(".parquet")} == {path.rpartition("/")[2] for path in house.files()}
    house.check()


def killed(table: TopicTable, *rest: Any) -> None:
    raise Crashed


def test_a_table_that_keeps_all_files_says_so(house: House) -> None:
    house.cli.run()
    house.update()
    with house.table().transaction() as transaction:
        transaction.set_properties({"gc.enabled": "false"})
    house.advance("a")
    before = names(house)
    assert expire(house) == 0
    with loaded(house) as table:
        assert table.delete_orphan_files(0, older_than_ms=2**50) == (0, None)
    assert names(house) == before
    assert "gc.enabled=false keeps" in house.update().summary
    (row,) = house.cli.do("outputs", "list", "orders")["tables"]
    assert "gc.enabled=false" in row["remains"]
    document = house.cli.ask("erasure", "orders", "--key", "a").document
    assert all("gc.enabled=false" in one["waits_for"] for one in document["holders"] if one["state"] == "table")
    with house.table().transaction() as transaction:
        transaction.set_properties({"gc.enabled": "true"})
    assert expire(house) > 0
    house.check()


def test_a_killed_writers_file_is_swept_when_it_is_old_enough(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if snapshots expire long before, and no round follows."""
    house.cli.set(publish={"grace_ms": 0, "undo_window_ms": 0, "orphan_age_ms": 3_600_000})
    house.cli.set(**{"outputs.iceberg": {"warehouse": house.warehouse, "keep_ms": 60_000}})
    house.cli.run()
    with monkeypatch.context() as patched:
        patched.setattr(TopicTable, "commit_snapshot", killed)
        with pytest.raises(Crashed):
            house.update()
    (orphan,) = (house.folder / "warehouse").rglob("*.parquet")
    opened, output = house.opened(), IcebergOutput()
    opened.identity.read_catalog()
    due_ms = orphan.stat().st_mtime_ns // 1_000_000 + 3_600_000 + 1

    def update_at(now_ms: int) -> OutputReport:
        tier = replace(opened, ports=replace(opened.ports, clock_ms=lambda: now_ms))
        return output.update_output(tier, opened.latest_incarnation(ORDERS), DiskBudget(1 << 30))

    update_at(opened.ports.clock_ms())
    report = update_at(due_ms - 10_000)
    assert (report.status, report.next_deletion_ms) == ("up_to_date", due_ms)
    assert orphan.exists()
    report = update_at(due_ms)
    assert (report.status, report.summary) == ("up_to_date", "deleted 1 file")
    assert not orphan.exists()
    assert report.next_deletion_ms == due_ms + 60_000, "other programs may change the table"
    house.check()


# --- branches and tags ---


def test_a_tag_that_is_set_while_snapshots_expire_keeps_its_files(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.cli.run()
    house.update()
    first, rows = house.table().current_snapshot(), house.rows()
    assert first is not None
    house.advance("a=4")
    commit = SqlCatalog.commit_table

    def commit_after_a_tag(catalog: SqlCatalog, *rest: Any) -> Any:
        monkeypatch.undo()
        house.table().manage_snapshots().create_tag(first.snapshot_id, "audit").commit()
        return commit(catalog, *rest)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_after_a_tag)
    with loaded(house) as table, pytest.raises(iceberg_table.TableChanged):
        table.expire_snapshots(60_000, house.opened().ports.clock_ms() + LATER_MS)
    assert "audit" in house.table().refs()
    expire(house)
    assert house.rows(first.snapshot_id) == rows


def test_a_tag_that_a_catalog_dropped_keeps_its_files(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A REST server does not know the requirement that holds the tag of another program."""
    house.cli.run()
    house.update()
    first = house.table().current_snapshot()
    assert first is not None
    tagged = house.files()
    house.advance("a=4")
    commit = SqlCatalog.commit_table

    def commit_after_a_tag(catalog: SqlCatalog, *rest: Any) -> Any:
        monkeypatch.setattr(SqlCatalog, "commit_table", commit)
        house.table().manage_snapshots().create_tag(first.snapshot_id, "audit").commit()
        return commit(catalog, *rest)

    monkeypatch.setattr(iceberg_table, "RestCatalog", SqlCatalog)
    monkeypatch.setattr(SqlCatalog, "commit_table", commit_after_a_tag)
    expire(house)
    assert house.table().snapshot_by_id(first.snapshot_id) is None
    assert all(Path(path.removeprefix("file://")).exists() for path in tagged)
    assert Path(first.manifest_list.removeprefix("file://")).exists()


def test_the_slower_of_two_expiries_deletes_nothing(house: House) -> None:
    house.cli.run()
    house.update()
    house.advance("a=4")
    now_ms = house.opened().ports.clock_ms() + LATER_MS
    with loaded(house) as faster, loaded(house) as slower:
        assert faster.expire_snapshots(60_000, now_ms)[0] > 0
        with pytest.raises(iceberg_table.TableChanged):
            slower.expire_snapshots(60_000, now_ms)
    house.check()


def test_a_tag_is_as_old_as_it_may_become(house: House) -> None:
    house.cli.run()
    house.update()
    first = house.table().current_snapshot()
    assert first is not None
    house.table().manage_snapshots().create_tag(first.snapshot_id, "short", max_ref_age_ms=100_000).commit()
    house.table().manage_snapshots().create_tag(first.snapshot_id, "long", max_ref_age_ms=200_000).commit()
    house.advance("a=4")
    with loaded(house) as table:
        assert table.expire_snapshots(60_000, first.timestamp_ms + 100_000) == (0, first.timestamp_ms + 100_001)
    with loaded(house) as table:
        assert table.expire_snapshots(60_000, first.timestamp_ms + 100_001) == (0, first.timestamp_ms + 200_001)
    assert set(house.table().refs()) == {"main", "long"}
    assert house.rows(first.snapshot_id)
    assert expire(house) > 0
    assert set(house.table().refs()) == {"main"}
    assert len(house.table().snapshots()) == 1
    house.check()


def test_a_branch_with_rows_of_its_own_works_on(house: House) -> None:
    house.cli.run()
    house.update()
    first = house.table().current_snapshot()
    assert first is not None
    house.table().manage_snapshots().create_branch(first.snapshot_id, "experiment").commit()
    house.table().append(house.scan().slice(0, 1).cast(house.table().schema().as_arrow()), branch="experiment")
    assert house.update().status == "up_to_date"
    house.advance("a=4", "z=1")
    house.check()
    expire(house)
    with loaded(house) as table:
        assert table.delete_orphan_files(0, older_than_ms=2**50) == (0, None)
    house.check()
    branch = house.table().snapshot_by_name("experiment")
    assert branch is not None
    assert house.scan(branch.snapshot_id).num_rows == house.scan().num_rows


def test_a_snapshot_can_be_read_after_its_last_successor_although_a_branch_began_at_it(house: House) -> None:
    house.cli.run()
    house.update()
    first = house.table().current_snapshot()
    assert first is not None
    house.table().manage_snapshots().create_branch(first.snapshot_id, "experiment").commit()
    house.table().append(house.scan().slice(0, 1).cast(house.table().schema().as_arrow()), branch="experiment")
    house.table().manage_snapshots().remove_branch("experiment").commit()
    house.advance("a=4")
    last = house.table().current_snapshot()
    assert last is not None
    with loaded(house) as table:
        table.expire_snapshots(60_000, last.timestamp_ms + 59_999)
    assert house.table().snapshot_by_id(first.snapshot_id) is not None


def test_a_table_that_was_rolled_back_is_brought_up_again(house: House) -> None:
    house.cli.run()
    house.update()
    first = house.table().current_snapshot()
    assert first is not None
    house.advance("a=4", "c=")
    house.table().manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()
    assert house.update().status == "written"
    house.check()
    expire(house)
    house.check()


# --- layout ---


def refused_before_a_file_is_written(house: House, words: str) -> None:
    before = names(house)
    house.segment("a=4")
    house.bring()
    house.cli.run()
    with pytest.raises(UsageError, match=words):
        house.update()
    assert names(house) == before


def test_a_newer_format_is_refused_before_a_file_is_written(house: House) -> None:
    house.cli.run()
    house.update()
    path = Path(house.table().metadata_location.removeprefix("file://"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format-version": 3, "next-row-id": 0}))
    refused_before_a_file_is_written(house, "has format-version 3, and 2 is the newest")


@pytest.mark.parametrize(
    ("column", "transform"), [("key", BucketTransform(4)), ("offset", IdentityTransform()), ("key", IdentityTransform())]
)
def test_a_partition_field_that_may_differ_within_a_file_is_refused_before_a_file_is_written(
    house: House, column: str, transform: Any
) -> None:
    house.cli.run()
    house.update()
    with house.table().update_spec() as spec:
        spec.add_field(column, transform, "extra")
    refused_before_a_file_is_written(house, "is partitioned by extra")


def test_a_file_with_both_timestamp_types_is_refused_and_leaves_nothing(house: House) -> None:
    house.cli.run()
    house.update()
    with house.table().update_spec() as spec:
        spec.add_field("timestamp_type", IdentityTransform(), "type")
    house.log.put("h=1")
    house.log.put("i=1", append_time=77_000)
    house.log.roll()
    house.bring()
    house.cli.run()
    before = names(house)
    with pytest.raises(UsageError, match="more than one partition values"):
        house.update()
    assert names(house) == before


def add_a_column(table: Table) -> None:
    with table.update_schema() as schema:
        schema.add_column("note", StringType())
        schema.add_column("score", LongType())


def partition_by_a_users_column(table: Table) -> None:
    add_a_column(table)
    with table.update_spec() as spec:
        spec.add_field("note", IdentityTransform(), "note")
        spec.add_field("score", BucketTransform(8), "bucket")


def partition_by_timestamp_type(table: Table) -> None:
    with table.update_spec() as spec:
        spec.add_field("timestamp_type", IdentityTransform(), "type")


def remove_partition_field(table: Table) -> None:
    with table.update_spec() as spec:
        spec.remove_field("partition")


def drop_not_null(table: Table) -> None:
    with table.update_schema() as schema:
        schema.update_column("value", required=False)
        schema.update_column("offset", required=False)


@pytest.mark.parametrize(
    "change", [add_a_column, partition_by_a_users_column, partition_by_timestamp_type, remove_partition_field, drop_not_null]
)
def test_what_iceberg_allows_to_change_in_a_table_works_on(house: House, change: Any) -> None:
    house.cli.run()
    house.update()
    change(house.table())
    assert house.update().status == "up_to_date"
    add_partition(house)
    assert update_partition(house, 1).status == "written"
    for records in (("a=4", "z=1"), ("a=5", "b=")):
        house.segment(*records)
        house.bring()
        house.cli.do("run", "--force")
        house.update()
        house.check()
    expire(house)
    with loaded(house) as table:
        assert table.delete_orphan_files(0, older_than_ms=2**50) == (0, None)
    house.check()
    assert len([row for row in house.scan().to_pylist() if row["partition"] == 1]) == 2
