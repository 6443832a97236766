"""Other engines read from a table what its files hold: binary keys, headers, typed columns at the borders of their types, lookups."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compactor.decoding import RegisteredSchema, SchemaRegistry
from tests.features.iceberg.test_iceberg_typed import SCHEMAS, TypedHouse, framed
from tests.iceberg.read_by_engine import plain
from tests.support.go_tools import Unbuildable, pip_packages

PACKAGES = {
    "duckdb": ("duckdb==1.4.4", "duckdb-ext-iceberg==1.4.4.20260205", "duckdb-ext-avro==1.4.4.20260205", "pytz"),
    "polars": ("polars==2.1.0",),
    "daft": ("daft==0.7.26",),
    "datafusion": ("datafusion==54.1.0", "pyiceberg-core==0.11.0"),
    "chdb": ("chdb==4.4.0",),
}
"""Engine -> what is installed for it. pyiceberg and pyarrow are those of this environment, unless it demands others."""
QUICK = ("duckdb", "polars")
COLUMNS = ("key", "value", "partition", "offset", "timestamp", "headers", "decoded_value")
KEY = b"\xff\x00"
LINE = {"type": "record", "name": "Line", "fields": [{"name": "n", "type": ["null", "int"]}]}
ORDER = {
    "type": "record", "name": "Border",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 9}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "clock", "type": {"type": "long", "logicalType": "time-micros"}},
        {"name": "ratio", "type": "double"}, {"name": "photo", "type": ["null", "bytes"]},
        {"name": "code", "type": {"type": "fixed", "name": "Code", "size": 4}},
        {"name": "ref", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "attributes", "type": {"type": "map", "values": "int"}},
        {"name": "lines", "type": {"type": "array", "items": LINE}},
    ],
}  # fmt: skip


def order(at: dt.datetime, amount: str, **fields: Any) -> bytes:
    moment = {"at": at, "day": at.date(), "clock": at.time(), "amount": decimal.Decimal(amount)}
    rest: dict[str, Any] = {"ratio": 0.1, "photo": None, "code": b"\x00\xff\x80z", "ref": uuid.UUID(int=5), "attributes": {}, "lines": []}
    return framed(9, {**rest, **moment, **fields})


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TypedHouse]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(SCHEMAS, 9, ORDER)
        patched.setattr(SchemaRegistry, "_fetch_schema", lambda _, number: RegisteredSchema(number, "AVRO", json.dumps(SCHEMAS[number])))
        yield furnished(TypedHouse(tmp_path_factory.mktemp("house")))


def furnished(made: TypedHouse) -> TypedHouse:
    """Fill the table by two rounds; the second one brings a value without typed columns, and a new field."""
    made.cli.set(registry={"url": "http://127.0.0.1:9"})
    made.cli.set(**{'outputs.iceberg.topics."orders"': {"value_format": "avro"}})
    first = dt.datetime(1, 1, 1, tzinfo=dt.UTC)
    made.log.put(KEY + b"=" + order(first, "-" + "9" * 29 + "." + "9" * 9, id=-(2**63)), headers=[("name", b"\x00"), ("none", None)])
    last = {
        "id": 2**63 - 1,
        "ratio": float("inf"),
        "photo": b"\xff\xfe",
        "attributes": {"x y": -1, "": 2},
        "lines": [{"n": None}, {"n": 3}],
    }
    made.advance_with([
        ("last", order(dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC), "9" * 29 + "." + "9" * 9, **last)),
        ("before 1970", order(dt.datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=dt.UTC), "0.000000001", id=0)),
    ])  # fmt: skip
    made.advance_with([("plain", b"not in the wire format"), ("later", framed(2, {"id": 1, "note": "a new column"}))])
    return made


NAMES = (
    "a b", "a`b", 'a"b', "a'b", "a\nb", "a\\b", "a/b", "a,b", "a:b", "a%b", "$x", "0", "#", "[0]", "<b>", " ", "x" * 300,
    "é", "e\u0301", "İ", "ß", "ss", "\u212a", "😀", "element", "key", "list", "value", "select",
)  # fmt: skip
"""Names of fields that JSON allows, each of which differs from the others also in small letters."""


@pytest.fixture(scope="module")
def house_of_names(tmp_path_factory: pytest.TempPathFactory) -> TypedHouse:
    made = TypedHouse(tmp_path_factory.mktemp("names"))
    made.cli.set(**{'outputs.iceberg.topics."orders"': {"value_format": "json"}})
    made.advance_with([(name, {name: f"{name}\0"}) for name in NAMES])
    made.advance_with([("nothing", {"a\0b": "no engine takes this name"})])
    return made


def as_chdb_has_it(value: Any) -> Any:
    """Texts are bytes, times of day are whole seconds. (Nor are structs, lists and maps ever null.)"""
    if isinstance(value, dict):
        return {name: as_chdb_has_it(one) for name, one in value.items()}
    if isinstance(value, list):
        return [as_chdb_has_it(one) for one in value]
    if isinstance(value, dt.time):
        return value.hour * 3600 + value.minute * 60 + value.second
    return value.encode() if isinstance(value, str) else value


def written(house: TypedHouse) -> list[list[Any]]:
    """Return the rows of the table's files by ascending offset, as pyarrow reads them."""
    files = [pq.read_table(task.file.file_path.removeprefix("file://")) for task in house.table().scan().plan_files()]
    rows = sorted(pa.concat_tables(files, promote_options="permissive").to_pylist(), key=lambda row: int(row["offset"]))
    return [[plain(row[name]) for name in COLUMNS] for row in rows]


def read(engine: str, house: TypedHouse, columns: Sequence[str]) -> tuple[list[list[Any]], list[int]]:
    """Return the rows by ascending offset, and the offsets of those whose key is KEY."""
    try:
        packages = pip_packages(f"iceberg-{engine}", PACKAGES[engine])
    except Unbuildable as error:
        pytest.skip(str(error))
    program = Path(__file__).parents[2] / "iceberg" / "read_by_engine.py"
    command = [sys.executable, str(program), engine, house.table().metadata_location, KEY.hex(), *columns]
    environment = {**os.environ, "PYTHONPATH": str(packages), "TZ": "UTC", "HOME": str(house.folder)}
    done = subprocess.run(command, env=environment, cwd=house.folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    rows, found = done.stdout.splitlines()[-2:]
    names = {"inf": float("inf"), "Decimal": decimal.Decimal, "datetime": dt}
    return eval(rows, names), eval(found)  # the program wrote both with repr


@pytest.mark.parametrize("engine", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in PACKAGES])
def test_an_engine_reads_the_rows_that_were_written(house: TypedHouse, engine: str) -> None:
    expected, columns = written(house), list(COLUMNS)
    assert [row[-1] for row in expected].count(None) == 1
    if engine == "chdb":
        fields: dict[str, list[Any]] = {"attributes": [], "lines": []}
        for row in expected:
            row[5] = row[5] or []
            struct = row[6] or dict.fromkeys(next(row[6] for row in expected if row[6]))
            row[6] = struct | {name: struct[name] or empty for name, empty in fields.items()}
        expected = as_chdb_has_it(expected)
    if engine == "datafusion":  # it does not read structs that have gained a field
        columns, expected = columns[:-1], [row[:-1] for row in expected]
    rows, found = read(engine, house, columns)
    assert rows == expected
    assert found == [0]


@pytest.mark.parametrize("engine", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in PACKAGES])
def test_an_engine_reads_columns_of_any_name(house_of_names: TypedHouse, engine: str) -> None:
    """But for a null character: Arrow's C interface ends names there."""
    expected = [[number, dict.fromkeys(NAMES) | {name: f"{name}\0"}] for number, name in enumerate(NAMES)]
    expected.append([len(NAMES), dict.fromkeys(NAMES)])
    rows, _ = read(engine, house_of_names, ["offset", "decoded_value"])
    assert rows == (as_chdb_has_it(expected) if engine == "chdb" else expected)
    [reason] = {row["decoding_error"] for row in house_of_names.scan().to_pylist()} - {None}
    assert reason == "value.a\0b: its type has no place in the table: its name contains a null character"


def test_pyiceberg_reads_null_lists_as_empty_ones(house: TypedHouse) -> None:
    shown = sorted(house.scan().to_pylist(), key=lambda row: int(row["offset"]))
    assert [row["headers"] for row in shown][1:] == [[]] * 4
    assert [row[5] for row in written(house)][1:] == [None] * 4
