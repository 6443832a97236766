"""Typed columns of a table: whatever values come, each row has its columns or reasons, and what is right about a value is kept."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from fastavro import parse_schema, schemaless_writer
from hypothesis import given, settings, strategies as st
from pyiceberg.catalog import Catalog, load_catalog

from compactor.config.settings import load_settings
from compactor.decoding import KeyAndValueDecoder, RegisteredSchema, SchemaRegistry
from compactor.features.iceberg import table as iceberg_table
from compactor.features.iceberg.columns import MAX_DEPTH, TypedColumnBuilder
from compactor.features.iceberg.table import SCHEMA, TopicTable

pytestmark = pytest.mark.quick

NAMES = st.sampled_from(["a", "b", "A", "x.y", "", "\ud800", "long name", "é"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3) | st.just("\udfff"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    made = load_catalog("memory", type="in-memory")
    made.create_namespace("k")
    yield made
    made.close()


def fresh_table(catalog: Catalog) -> TopicTable:
    catalog.drop_table("k.t") if catalog.table_exists("k.t") else None
    return TopicTable("k.t", catalog.create_table("k.t", SCHEMA))


def typed_rows(table: TopicTable, values: list[bytes], value_format: Any = "json", chunk: int = 4) -> list[tuple[Any, str | None]]:
    """Return (typed value, reason) of each value, as a writer of a file makes them: once to find the types, and once to write."""
    decoder = KeyAndValueDecoder(load_settings("", {}) if value_format == "json" else REGISTRY)
    batches = [pa.record_batch({"value": pa.array(values[first : first + chunk], pa.binary())}) for first in range(0, len(values), chunk)]
    for _ in range(2):
        builder = TypedColumnBuilder(table, decoder, {"value": value_format})
        found = [builder.add_typed_columns(batch) for batch in batches]
        if not builder.lacks_columns:
            rows = [row for batch in found for row in batch.to_pylist()]
            return [(row.get("decoded_value"), row["decoding_error"]) for row in rows]
        table.add_columns(builder.missing_columns_error().columns)
        table = TopicTable(table.name, table.table.catalog.load_table("k.t"))
    raise AssertionError("the table lacks columns after all that were missing were added")


REGISTRY = load_settings("", {"TIERED_COMPACTOR__REGISTRY__URL": "http://127.0.0.1:9"})


@settings(max_examples=60, deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=12), at_most=st.sampled_from([14, 18, 1000]))
def test_any_json_values_are_rows_with_columns_or_reasons(values: list[Any], at_most: int) -> None:
    made = load_catalog("memory", type="in-memory")
    made.create_namespace("k")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(iceberg_table, "MAX_COLUMNS", at_most)
        table = fresh_table(made)
        rows = typed_rows(table, [json.dumps(value).encode() for value in values])
        assert len(rows) == len(values)
        assert len(made.load_table("k.t").schema().column_names) <= at_most
        for (typed, reason), value in zip(rows, values, strict=True):
            assert reason or is_covered(typed, value), (typed, value)
        again = typed_rows(TopicTable("k.t", made.load_table("k.t")), [json.dumps(value).encode() for value in reversed(values)])
        assert [str(row) for row in again[::-1]] == [str(row) for row in rows], "the order of rows decides nothing once there are columns"
    made.close()


def is_covered(typed: Any, value: Any) -> bool:
    """Return whether a typed value has all of a value but what says nothing: nulls, and empty objects and lists."""
    if value is None or value in ({}, []):
        return True
    if isinstance(value, dict):
        return all(is_covered(None if typed is None else typed.get(name), each) for name, each in value.items())
    if isinstance(value, list):
        nothing = all(is_covered(None, each) for each in value)
        return nothing or (typed is not None and len(typed) == len(value) and all(map(is_covered, typed, value)))
    return bool(typed == value or (isinstance(value, float) and math.isnan(value) and math.isnan(typed)))


def test_a_field_that_does_not_match_costs_that_field_of_that_row(catalog: Catalog) -> None:
    values = [
        {"n": 1, "t": "x"},
        {"n": "text", "t": "y"},
        {"n": 2**70, "t": "z"},
        {"n": 3, "t": {"deep": 1}},
        {"n": 4, "x.y": 1, "t": "w"},
        [1],
    ]
    rows = typed_rows(fresh_table(catalog), [json.dumps(value).encode() for value in values])
    assert [row[0] for row in rows] == [
        {"n": 1, "t": "x"}, {"n": None, "t": "y"}, {"n": None, "t": "z"}, {"n": 3, "t": None}, {"n": 4, "t": "w"}, None,
    ]  # fmt: skip
    problems = [
        "", ".n: string instead of long", ".n: the long is beyond long", ".t: struct instead of string", ".x.y: its name contains a dot",
        ": list instead of struct",
    ]  # fmt: skip
    assert [row[1] and row[1].replace(": its type has no place in the table", "") for row in rows] == [
        f"value{problem}" if problem else None for problem in problems
    ]


@pytest.mark.parametrize("part", [[], {"a": 1}])
def test_a_field_that_is_nested_too_deeply_has_no_column_and_leaves_the_others(catalog: Catalog, part: Any) -> None:
    """Also beyond the depth at which Python's own functions end."""
    deepest: dict[int, Any] = {}
    for levels in (MAX_DEPTH - 2, MAX_DEPTH + 2, 100, 400):
        value: Any = 1
        for _ in range(levels):
            value = [value] if isinstance(part, list) else {"a": value}
        deepest[levels] = value
    values = [json.dumps({"n": levels, f"d{levels}": value}).encode() for levels, value in deepest.items()]
    too_deep = b'{"n":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    rows = typed_rows(fresh_table(catalog), [*values, too_deep])
    assert [row[0]["n"] for row in rows[:-1]] == list(deepest)
    assert rows[0][1] is None
    assert rows[0][0][f"d{MAX_DEPTH - 2}"] == deepest[MAX_DEPTH - 2]
    assert all(reason is not None and f"nested more than {MAX_DEPTH} levels deep" in reason for _, reason in rows[1:-1])
    assert rows[-1] == (None, "value: not JSON: it is nested too deeply")
    assert catalog.load_table("k.t").schema().highest_field_id < 100


def test_ever_new_names_cost_time_by_rows_and_leave_space_for_the_rest(catalog: Catalog) -> None:
    values = [json.dumps({"id": number, f"name {number}": number}).encode() for number in range(3000)]
    rows = typed_rows(fresh_table(catalog), values, chunk=1000)
    assert [row[0]["id"] for row in rows] == list(range(3000))
    typed = [number for number, (value, _) in enumerate(rows) if value.get(f"name {number}") == number]
    assert typed == list(range(len(typed)))
    assert len(catalog.load_table("k.t").schema().column_names) == 1000
    assert all(reason == f"value.name {number}: its type has no place in the table: the table would have more than 1,000 columns"
               for number, (_, reason) in enumerate(rows) if number >= len(typed))  # fmt: skip


CONNECT: dict[str, Any] = {
    "type": "record", "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "price", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 64, "scale": 2}]},
        {"name": "fee", "type": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}},
        {"name": "either", "type": ["null", "string", "long"]},
        {"name": "parts", "type": {"type": "array", "items": {"type": "record", "name": "Part", "fields": [
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 64, "scale": 2}},
            {"name": "count", "type": "int"}, {"name": "next", "type": ["null", "Part"]}]}}},
    ],
}  # fmt: skip


def test_a_decimal_of_connects_precision_and_a_union_cost_only_themselves(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchemaRegistry, "_fetch_schema", lambda registry, number: RegisteredSchema(number, "AVRO", json.dumps(CONNECT)))
    nothing: dict[str, Any] = {"id": 1, "price": None, "fee": Decimal("0.50"), "either": None, "parts": []}
    part = {"price": Decimal("1.00"), "count": 3, "next": None}
    rows = typed_rows(
        fresh_table(catalog),
        [framed(value) for value in (nothing, nothing | {"price": Decimal("9.99"), "either": 5, "parts": [part]})],
        "avro",
    )
    assert rows[0] == ({"id": 1, "fee": Decimal("0.50"), "parts": []}, None)
    assert rows[1][0] == {"id": 1, "fee": Decimal("0.50"), "parts": [{"count": 3}]}
    assert rows[1][1] == "; ".join(
        f"value.{path}: its type has no place in the table: its type is {why}"
        for path, why in (
            ("price", "decimal(64, 2), and a table's decimals have at most 38 digits"), ("either", "a union of string, long"),
            ("parts.price", "decimal(64, 2), and a table's decimals have at most 38 digits"),
        )
    )  # fmt: skip


def framed(value: dict[str, Any], schema: Any = CONNECT) -> bytes:
    stream = io.BytesIO()
    schemaless_writer(stream, parse_schema(schema), value)
    return b"\0" + (1).to_bytes(4, "big") + stream.getvalue()


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        ("1e400", "the number is beyond double"),
        ("-1e400", "the number is beyond double"),
        ("9" * 5000, "the number is beyond double"),
        ("9" * 400, "the number is beyond long"),
    ],
    ids=["exponent", "negative", "digits that Python does not convert", "digits"],
)
def test_a_json_number_beyond_double_is_no_infinity_and_costs_only_itself(catalog: Catalog, number: str, problem: str) -> None:
    [row] = typed_rows(fresh_table(catalog), [f'{{"id": 1, "n": {number}}}'.encode()])
    assert row == ({"id": 1}, f"value.n: its type has no place in the table: {problem}")
    rows = typed_rows(fresh_table(catalog), [f'{{"id": 1, "n": {each}}}'.encode() for each in ("1e308", number, "Infinity")])
    assert [value["n"] for value, _ in rows] == [1e308, None, math.inf]
    assert [value["id"] for value, _ in rows] == [1, 1, 1]
    [unreadable] = typed_rows(fresh_table(catalog), [b"[1e9999999999999999999]"])
    assert unreadable == (None, "value: not JSON: the exponent of a number is too large")


def typed_avro_rows(catalog: Catalog, monkeypatch: pytest.MonkeyPatch, kind: Any, values: list[Any]) -> list[tuple[Any, str | None]]:
    """Typed rows of a record with an id and a field of this type, of which ``values`` are as Avro has them, without a logical type."""
    record = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "int"}, {"name": "x", "type": kind}]}
    monkeypatch.setattr(SchemaRegistry, "_fetch_schema", lambda registry, number: RegisteredSchema(number, "AVRO", json.dumps(record)))
    plain = {name: each for name, each in kind.items() if name != "logicalType"}
    raw = {**record, "fields": [{"name": "id", "type": "int"}, {"name": "x", "type": plain}]}
    return typed_rows(fresh_table(catalog), [framed({"id": 7, "x": value}, raw) for value in values], "avro")


INFINITY = 9_223_372_036_825_200_000
"""Microseconds that Debezium writes for PostgreSQL's ``infinity``."""


@pytest.mark.parametrize(
    ("kind", "fits", "beyond"),
    [
        ({"type": "long", "logicalType": "timestamp-micros"}, [-62_135_596_800_000_000, 253_402_300_799_999_999], [INFINITY, -(2**63)]),
        ({"type": "long", "logicalType": "timestamp-millis"}, [-62_135_596_800_000, 253_402_300_799_999], [-62_135_596_800_001, 2**63 - 1]),
        ({"type": "long", "logicalType": "local-timestamp-millis"}, [0], [253_402_300_800_000]),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, [0], [INFINITY]),
        ({"type": "int", "logicalType": "date"}, [-719_162, 2_932_896], [-719_163, 2_932_897, 2**31 - 1, -(2**31)]),
        ({"type": "int", "logicalType": "time-millis"}, [0, 86_399_999], [86_400_000]),
        ({"type": "long", "logicalType": "time-micros"}, [0, 86_399_999_999], [86_400_000_000, 2**63 - 1]),
    ],
    ids=lambda each: each["logicalType"] if isinstance(each, dict) else "",
)
def test_a_time_that_python_has_not_costs_only_itself(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, kind: Any, fits: list[int], beyond: list[int]
) -> None:
    rows = typed_avro_rows(catalog, monkeypatch, kind, [*fits, *beyond])
    assert [(value["id"], value["x"] is not None, reason) for value, reason in rows[: len(fits)]] == [(7, True, None)] * len(fits)
    wanted = str(catalog.load_table("k.t").schema().find_type("decoded_value.x"))
    reason = f"value.x: its type has no place in the table: a time out of range instead of {wanted}"
    assert rows[len(fits) :] == [({"id": 7, "x": None}, reason)] * len(beyond)
    decoded = KeyAndValueDecoder(REGISTRY).decode_key_or_value(framed({"id": 7, "x": beyond[0]}, PLAIN), "avro")
    assert decoded.format_value_as_text() == f'{{"id":7,"x":"{beyond[0]}"}}'
    only = typed_avro_rows(catalog, monkeypatch, kind, beyond[:1])
    assert only == [({"id": 7, "x": None}, reason)], "also where no other value of the file has told the type"


PLAIN = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "int"}, {"name": "x", "type": "long"}]}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ({"type": "string", "logicalType": "timestamp-millis"}, "2024-02-29"),
        ({"type": "long", "logicalType": "date"}, 2**40),
        ({"type": "bytes", "logicalType": "decimal"}, b"\x01"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 3}, b"\x01"),
        ({"type": "string", "logicalType": "decimal", "precision": 4}, "1.5"),
        ({"type": "fixed", "name": "Uuid", "size": 16, "logicalType": "uuid"}, bytes(range(240, 256))),
        ({"type": "long", "logicalType": "timestamp-nanos"}, 2**63 - 1),
        ({"type": "string", "logicalType": "uuid"}, "not one"),
    ],
    ids=str,
)
def test_a_logical_type_that_is_not_valid_is_ignored_as_avro_demands(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, kind: Any, value: Any
) -> None:
    assert typed_avro_rows(catalog, monkeypatch, kind, [value]) == [({"id": 7, "x": value}, None)]


def test_a_key_that_is_not_decoded_costs_nothing_of_its_value(catalog: Catalog) -> None:
    table = fresh_table(catalog)
    decoder = KeyAndValueDecoder(load_settings("", {}))
    batch = pa.record_batch({"key": pa.array([b"\xff", b"k"], pa.binary()), "value": pa.array([b'{"n": 1}', b"{"], pa.binary())})
    builder = TypedColumnBuilder(table, decoder, {"key": "text", "value": "json"})
    builder.add_typed_columns(batch)
    table.add_columns(builder.missing_columns_error().columns)
    table = TopicTable("k.t", catalog.load_table("k.t"))
    rows = TypedColumnBuilder(table, decoder, {"key": "text", "value": "json"}).add_typed_columns(batch).to_pylist()
    assert [(row["decoded_key"], row["decoded_value"]) for row in rows] == [(None, {"n": 1}), ("k", None)]
    assert rows[0]["decoding_error"] == "key: not UTF-8"
    assert rows[1]["decoding_error"].startswith("value: not JSON")
