"""Reads a table with an engine, in a process of its own: ``read_by_engine.py ENGINE METADATA_URL KEY_IN_HEX COLUMN...``.

Prints two lines, as Python prints values: the rows by ascending offset, and the offsets of the rows with this key.
Engines are installed for this process alone, and belong to no environment of the project.
"""

from __future__ import annotations

import datetime as dt
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
"""Column name -> value, as the engine has it in Python."""


def plain(value: Any) -> Any:
    """Return a value of a row in the form in which engines are compared: times in UTC, UUIDs as texts, maps as lists of pairs."""
    if isinstance(value, Mapping):
        is_map = set(value) <= {"x y", ""}  # Polars has maps as dicts, like structs
        return plain(list(value.items())) if is_map else {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(list(one.values()) if isinstance(one, Mapping) and set(one) == {"key", "value"} else one) for one in value]
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC)
    return str(value) if isinstance(value, uuid.UUID) else value


def _table(metadata: str) -> Any:
    from pyiceberg.table import StaticTable

    return StaticTable.from_metadata(metadata)


def _names(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


def _duckdb(metadata: str, key: bytes, columns: Sequence[str]) -> tuple[Rows, list[int]]:
    duckdb, duckdb_ext = import_module("duckdb"), import_module("duckdb_ext")
    connection = duckdb.connect(config={"extension_directory": f"{next(iter(duckdb_ext.__path__))}/extensions"})
    path = metadata.removeprefix("file://")
    for name in ("avro", "iceberg"):
        connection.load_extension(name)
    rows = connection.execute(f"SELECT {_names(columns)} FROM iceberg_scan('{path}')").fetch_arrow_table().to_pylist()
    found = connection.execute(f"SELECT \"offset\" FROM iceberg_scan('{path}') WHERE key = ?", [key]).fetchall()
    return rows, [offset for (offset,) in found]


def _polars(metadata: str, key: bytes, columns: Sequence[str]) -> tuple[Rows, list[int]]:
    pl = import_module("polars")
    frame = pl.scan_iceberg(_table(metadata))
    found = frame.filter(pl.col("key") == key).select("offset").collect()
    return frame.select(columns).collect().to_dicts(), found["offset"].to_list()


def _daft(metadata: str, key: bytes, columns: Sequence[str]) -> tuple[Rows, list[int]]:
    daft = import_module("daft")
    frame = daft.read_iceberg(_table(metadata))
    return frame.select(*columns).to_pylist(), [row["offset"] for row in frame.where(daft.col("key") == key).select("offset").to_pylist()]


def _datafusion(metadata: str, key: bytes, columns: Sequence[str]) -> tuple[Rows, list[int]]:
    context = import_module("datafusion").SessionContext()
    context.register_table("read", _table(metadata))
    found = context.sql(f"SELECT \"offset\" FROM read WHERE key = X'{key.hex()}'").to_pylist()
    return context.sql(f"SELECT {_names(columns)} FROM read").to_pylist(), [row["offset"] for row in found]


def _chdb(metadata: str, key: bytes, columns: Sequence[str]) -> tuple[Rows, list[int]]:
    chdb = import_module("chdb")
    source = f"icebergLocal('{Path(metadata.removeprefix('file://')).parents[1]}')"
    bytes_stay = "SETTINGS output_format_arrow_string_as_string=0"
    rows = chdb.query(f"SELECT {_names(columns)} FROM {source} {bytes_stay}", "ArrowTable").to_pylist()
    found = chdb.query(f"SELECT \"offset\" FROM {source} WHERE key = unhex('{key.hex()}')", "ArrowTable").to_pylist()
    return rows, [row["offset"] for row in found]


ENGINES: Mapping[str, Callable[[str, bytes, Sequence[str]], tuple[Rows, list[int]]]] = {
    "duckdb": _duckdb,
    "polars": _polars,
    "daft": _daft,
    "datafusion": _datafusion,
    "chdb": _chdb,
}
"""Name -> reads a table, given its metadata file, and looks up a key."""


def main(engine: str, metadata: str, key: str, *columns: str) -> None:
    rows, found = ENGINES[engine](metadata, bytes.fromhex(key), columns)
    print([[plain(row[name]) for name in columns] for row in sorted(rows, key=lambda row: int(row["offset"]))])
    print(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
