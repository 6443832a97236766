"""Typed columns of tables: decoded keys and values beside their bytes, by Iceberg's rules for changes of a schema."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fastavro import schemaless_writer
from typing_extensions import override

from compactor.decoding import RegisteredSchema, SchemaRegistry
from compactor.features.iceberg import table as iceberg_table
from compactor.outputs import OutputReport
from tests.features.iceberg.test_iceberg import House
from tests.features.iceberg.test_iceberg_recompact import update_on_cluster
from tests.support.spark_tier import HereCluster

MISMATCH = "its type has no place in the table"


class TypedHouse(House):
    """A table with typed columns. on_cluster: whether executors write its files."""

    on_cluster = False

    @override
    def update(self) -> OutputReport:
        return update_on_cluster(self, HereCluster()) if self.on_cluster else super().update()

    def advance_with(self, records: Sequence[tuple[str, object]]) -> None:
        """One segment with JSON or bytes as values, a round, and the table brought up to it."""
        self.log.put(*(key.encode() + b"=" + (value if isinstance(value, bytes) else json.dumps(value).encode()) for key, value in records))
        self.log.roll()
        self.bring()
        self.cli.run()
        self.update()
        self.check()

    def decoded(self, column: str = "decoded_value") -> dict[str, Any]:
        """Return the decoded values by key; of those without, the reason."""
        found = {}
        for row in self.scan().to_pylist():
            found[row["key"].decode()] = row[column] if row["decoding_error"] is None else row["decoding_error"]
        return found

    def types(self, column: str = "decoded_value") -> str:
        return str(self.table().schema().find_field(column).field_type)


@pytest.fixture(params=[False, True], ids=["here", "on executors"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> TypedHouse:
    made = TypedHouse(tmp_path)
    made.on_cluster = request.param
    made.cli.set(**{'outputs.iceberg.topics."orders"': {"value_format": "json", "key_format": "text"}})
    return made


def test_json_values_have_columns_that_grow_and_keep_what_does_not_match(house: TypedHouse) -> None:
    house.advance_with([("a", {"n": 1, "tags": ["x"]}), ("b", b"not json"), ("c", None), ("d", {"n": 2.5})])
    shown = house.decoded()
    assert shown["a"] == {"n": 1.0, "tags": ["x"]}
    assert shown["b"].startswith("value: not JSON")
    assert (shown["c"], shown["d"]) == (None, {"n": 2.5, "tags": None})
    assert re.sub(r"\d+: ", "", house.types()) == "struct<n: optional double, tags: optional list<string>>"
    older = house.table().current_snapshot()
    assert older is not None
    house.advance_with([("e", {"n": "text"}), ("f", {"more": {"deep": True}}), ("g", [1])])
    shown = house.decoded()
    assert MISMATCH in shown["e"]
    assert MISMATCH in shown["g"]
    assert shown["f"] == {"n": None, "tags": None, "more": {"deep": True}}
    assert shown["a"] == {"n": 1.0, "tags": ["x"], "more": None}
    assert house.scan(older.snapshot_id).num_rows == 4
    assert house.decoded("decoded_key")["a"] == "a"
    (row,) = house.cli.do("outputs", "list", "orders")["tables"]
    assert (row["status"], row["undecoded"]) == ("current", 3)


def test_metadata_holds_no_values_of_typed_columns(house: TypedHouse) -> None:
    house.advance_with([("a", {"secret": "hidden value"}), ("b", b"{secret")])
    for task in house.table().scan().plan_files():
        assert set(task.file.lower_bounds) == {3, 4, 5, 6, 8}
    metadata = [path for path in (house.folder / "warehouse").rglob("*") if path.is_file() and path.suffix != ".parquet"]
    assert metadata
    assert not any(b"hidden value" in path.read_bytes() for path in metadata)


def test_names_that_queries_cannot_say_get_no_column(house: TypedHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    house.advance_with([("a", {"n": 1}), ("b", {"N": 1}), ("c", {"x.y": 1}), ("d", {"": 1}), ("e", {"n": 2**70})])
    shown = house.decoded()
    assert shown.pop("a") == {"n": 1}
    assert all(MISMATCH in reason for reason in shown.values())
    monkeypatch.setattr(iceberg_table, "MAX_COLUMNS", 20)
    house.advance_with([("f", {f"column {number}": number for number in range(12)}), ("g", {"one": 1})])
    assert MISMATCH in house.decoded()["f"]
    assert house.decoded()["g"] == {"n": None, "one": 1}


def test_a_large_number_that_a_later_fraction_makes_inexact_keeps_its_bytes(house: TypedHouse) -> None:
    house.advance_with([("a", 2**60), ("b", 0.5)])
    assert MISMATCH in house.decoded()["a"]
    assert house.decoded()["b"] == 0.5


FIRST = {
    "type": "record", "name": "Order",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}, {"name": "photo", "type": ["null", "bytes"]},
        {"name": "attributes", "type": {"type": "map", "values": "int"}},
        {"name": "ref", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["OPEN", "DONE"]}},
        {"name": "before", "type": ["null", "State"]},
    ],
}  # fmt: skip
WIDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}, {"name": "note", "type": "string"}]}
OTHER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}
UNION = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": ["int", "string"]}]}
TREE = {"type": "record", "name": "Tree", "fields": [{"name": "left", "type": ["null", "Tree"]}]}
SCHEMAS: dict[int, dict[str, Any]] = {1: FIRST, 2: WIDER, 3: OTHER, 4: UNION, 5: TREE}


def framed(schema_id: int, value: object) -> bytes:
    stream = io.BytesIO()
    schemaless_writer(stream, SCHEMAS[schema_id], value)
    return b"\0" + schema_id.to_bytes(4, "big") + stream.getvalue()


def test_avro_values_have_the_types_of_their_schema_and_widen_with_it(house: TypedHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(registry: SchemaRegistry, schema_id: int) -> RegisteredSchema | None:
        return RegisteredSchema(schema_id, "AVRO", json.dumps(SCHEMAS[schema_id])) if schema_id in SCHEMAS else None

    monkeypatch.setattr(SchemaRegistry, "_fetch_schema", fetch)
    house.cli.set(registry={"url": "http://127.0.0.1:9"})
    house.cli.set(**{'outputs.iceberg.topics."orders"': {"value_format": "avro"}})
    at = dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC)
    order = {
        "id": 7, "price": decimal.Decimal("12.50"), "at": at, "photo": b"\xff", "attributes": {"x": 1}, "ref": uuid.UUID(int=5),
        "state": "OPEN", "before": None,
    }  # fmt: skip
    house.advance_with([("a", framed(1, order)), ("b", framed(1, order)[:-1]), ("c", b"plain")])
    shown = house.decoded()
    assert shown["a"] == order | {"ref": str(uuid.UUID(int=5)), "attributes": [("x", 1)]}
    assert shown["b"].startswith("value: not valid by schema 1")
    assert shown["c"].startswith("value: not in the wire format")
    assert ("id: optional int," in house.types(), "price: optional decimal(6, 2)" in house.types()) == (True, True)
    house.advance_with([("d", framed(2, {"id": 2**40, "note": "wider"})), ("e", framed(3, {"id": "text"})), ("f", framed(4, {"id": 1}))])
    house.advance_with([("g", framed(5, {"left": {"left": None}})), ("h", framed(1, order))])
    shown = house.decoded()
    assert "id: optional long," in house.types()
    assert (shown["d"]["id"], shown["d"]["note"], shown["a"]["id"], shown["h"]["id"]) == (2**40, "wider", 7, 7)
    assert all(MISMATCH in str(shown[key]) for key in "efg"), shown


def test_records_with_ever_new_names_make_a_table_and_rows_with_reasons(house: TypedHouse) -> None:
    house.advance_with([(f"k{number}", {"id": number, f"name {number}": 1}) for number in range(1500)])
    rows = house.scan().to_pylist()
    assert sorted(row["decoded_value"]["id"] for row in rows) == list(range(1500))
    assert len([row for row in rows if row["decoding_error"] is not None]) > 500
    assert len(house.table().schema().column_names) == 1000


def test_values_that_cannot_be_typed_stop_no_other_row(house: TypedHouse) -> None:
    deep = b'{"id": 2, "deep": ' + b'{"a":' * 120 + b"1" + b"}" * 120 + b"}"
    house.advance_with([("a", {"id": 1}), ("b", deep), ("c", b"[" * 5000), ("d", {"id": "text", "note": "x"})])
    rows = {row["key"]: (row["decoded_value"], row["decoding_error"]) for row in house.scan().to_pylist()}
    assert rows[b"a"] == ({"id": 1, "note": None}, None)
    assert rows[b"b"] == ({"id": 2, "note": None}, f"value.deep: {MISMATCH}: it is nested more than 32 levels deep")
    assert rows[b"c"] == (None, "value: not JSON: it is nested too deeply")
    assert rows[b"d"] == ({"id": None, "note": "x"}, f"value.id: {MISMATCH}: string instead of long")
