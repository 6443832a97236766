"""Upkeep of Iceberg tables: snapshots expire, orphans are swept, and `erasure` names what still holds a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from tests.features.iceberg.test_iceberg import Crashed, House, Row, house

__all__ = ["house"]


def test_older_snapshots_show_older_views_until_they_expire(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    views: dict[int, list[Row]] = {}
    for number in range(3):
        house.advance(f"a=round {number}", f"x{number}=1")
        views[house.table().current_snapshot().snapshot_id] = house.expected()  # type: ignore[union-attr]
    assert {snapshot: house.rows(snapshot) for snapshot in views} == views
    data = {path.name for path in (house.folder / "warehouse").rglob("*.parquet")}
    now = house.opened().ports.clock_ms() + 100_000_000
    with house.topic_table() as read:
        table = read()
        assert table is not None
        deleted, _ = table.expire_snapshots(86_400_000, now)
    assert deleted > 0
    left = {path.name for path in (house.folder / "warehouse").rglob("*.parquet")}
    assert left == {path.rpartition("/")[2] for path in house.files()} < data
    house.check()
    house.advance("a=after")
    house.check()


def test_manifests_do_not_accumulate(house: House) -> None:
    for number in range(4):
        house.advance(f"a=round {number}")
    table = house.table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert [one.deleted_files_count for one in snapshot.manifests(table.io) if not one.added_files_count] == [1]


def test_a_sweep_deletes_what_a_killed_process_left_and_nothing_else(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed after it has written data, manifests and metadata, and before the catalog names the metadata. Beside these lie
    files of other programs, and data of another partition whose process may still be writing.
    """
    house.cli.run()
    house.update()
    warehouse = house.folder / "warehouse" / "kafka" / "orders"
    write_metadata = SqlCatalog._write_metadata

    def write_and_die(*rest: Any, **named: Any) -> None:
        write_metadata(*rest, **named)
        raise Crashed

    def files() -> set[Path]:
        return {path for path in warehouse.rglob("*") if path.is_file()}

    house.segment("a=4", "c=")
    house.bring()
    house.cli.run()
    before = files()
    with monkeypatch.context() as killed:
        killed.setattr(SqlCatalog, "_write_metadata", staticmethod(write_and_die))
        with pytest.raises(Crashed):
            house.update()
    left = files() - before
    assert sorted("".join(path.suffixes[-1:]) for path in left) == [".avro"] * (len(left) - 2) + [".json", ".parquet"]
    assert len(left) > 3
    (data,) = (path for path in left if path.suffix == ".parquet")
    (metadata,) = (path for path in left if path.suffix == ".json")
    (manifests,) = (path for path in left if path.name.startswith("snap-"))
    foreign = {
        data.with_name("somebody.parquet"): b"",
        data.with_name(data.name.replace("0.", "1.", 1)): b"of another partition",
        manifests.with_name("snap-1-0-1b4e28ba-2fa1-41d2-883f-0016d3cca427.avro"): b"of another program's commit",
        manifests.with_name("1b4e28ba-2fa1-41d2-883f-0016d3cca427-m0.avro"): b"",
        manifests.with_name("notes.avro"): b"",
        metadata.with_name("00007-1b4e28ba-2fa1-41d2-883f-0016d3cca427.metadata.json"): b"not JSON",
        metadata.with_name("00008-1b4e28ba-2fa1-41d2-883f-0016d3cca427.metadata.json"): metadata.read_bytes().replace(
            str(house.table().metadata.table_uuid).encode(), b"1b4e28ba-2fa1-41d2-883f-0016d3cca427"
        ),
        metadata.with_name("00009-1b4e28ba-2fa1-41d2-883f-0016d3cca427.metadata.json"): Path(
            house.table().metadata_location.removeprefix("file://")
        ).read_bytes(),
    }
    for path, content in foreign.items():
        path.write_bytes(content)
    assert house.update().status == "written"
    assert left <= files(), "they are younger than orphan_age_ms"
    present = files()
    with house.topic_table() as read:
        table = read()
        assert table is not None
        youngest_ms = max(path.stat().st_mtime_ns // 1_000_000 for path in left)
        assert table.delete_orphan_files(0, older_than_ms=0) == (0, youngest_ms)
        assert table.delete_orphan_files(0, older_than_ms=2**50) == (len(left), None)
    assert files() == present - left
    assert foreign.keys() <= files()
    house.check()
    house.advance("a=5")
    house.check()


def test_erasure_names_files_and_snapshots_that_hold_a_key_until_they_expire(house: House) -> None:
    house.cli.run()
    house.update()
    house.segment("a", "z=1")
    house.bring()

    def holders() -> list[tuple[str, str]]:
        document = house.cli.ask("erasure", "orders", "--key", "a").document
        return [(one["object"], one["waits_for"]) for one in document["holders"] if one["state"] == "table"]

    first = house.table().current_snapshot()
    assert first is not None
    ((path, waits_for),) = holders()
    assert {path} == house.files()
    bounds = [set(task.file.lower_bounds) | set(task.file.upper_bounds) for task in house.table().scan().plan_files()]
    assert bounds == [{3, 4, 5, 6, 8}], "manifests hold no keys and values"
    assert "`outputs write`" in waits_for
    house.cli.run()
    house.update()
    assert holders() == [(path, f"the expiry of snapshots {first.snapshot_id} ([outputs.iceberg] keep_ms)")]
    with house.topic_table() as read:
        table = read()
        assert table is not None
        table.expire_snapshots(60_000, house.opened().ports.clock_ms() + 100_000)
    assert holders() == []
