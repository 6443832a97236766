#!/usr/bin/env bash
# chdb 4.4.0 (ClickHouse in a process): a column of Iceberg's type `time` loses its microseconds.
#
# Input: a table of one row that PyIceberg 0.12.0 writes: a `time` of 23:59:59.999999 and a `timestamp` with microseconds.
# Expected: 23:59:59.999999 in some type that has fractions, or an error. Iceberg's specification, "Primitive Types": time is a time of day with
#   microsecond precision, without a date or zone. PyIceberg reads the value back whole.
# Seen: icebergLocal() returns an Int64 of 86399, whole seconds, without a word. It keeps the microseconds of the timestamp beside it.
# Way around: write times of day that need fractions as a long of microseconds, or read such tables with another engine.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check chdb==4.4.0 'pyiceberg[pyarrow,sql-sqlite]==0.12.0'

cat > "$folder/read.py" <<'PY'
import datetime as dt
import os

import chdb
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog

catalog = SqlCatalog("catalog", uri="sqlite:///catalog.db", warehouse=f"file://{os.getcwd()}/warehouse")
catalog.create_namespace("shop")
clock = pa.array([dt.time(23, 59, 59, 999999)], pa.time64("us"))
rows = pa.table({"clock": clock, "at": pa.array([dt.datetime(2026, 1, 1, 0, 0, 0, 999999)], pa.timestamp("us"))})
table = catalog.create_table("shop.hours", schema=rows.schema)
table.append(rows)
print("pyiceberg", table.scan().to_arrow().to_pylist()[0]["clock"])
place = table.location().removeprefix("file://")
result = chdb.query(f"SELECT clock, toTypeName(clock), toString(at) FROM icebergLocal('{place}')", "TSV")
print("chdb", *str(result).strip().split("\t"))
PY

expected="pyiceberg 23:59:59.999999
chdb 86399 Nullable(Int64) 2026-01-01 00:00:00.999999"
seen=$(cd "$folder" && env/bin/python read.py)
echo "$seen"
[ "$seen" = "$expected" ] || { echo "changed: this was seen before: $expected"; exit 1; }
