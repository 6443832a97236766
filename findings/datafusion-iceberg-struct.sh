#!/usr/bin/env bash
# DataFusion 54.1.0 with pyiceberg-core 0.11.0 (Iceberg's Rust library): once a struct has gained a field, files from before cannot be read.
#
# Input: a table with a struct of one field and a row; then an optional field is added to the struct, and a second row. PyIceberg 0.12.0 writes both.
# Expected: two rows, the older one with null for the new field. Iceberg's specification, "Column Projection": values for field ids which are not
#   present in a data file are null, at any depth.
# Seen: SELECT of the struct fails: "Incorrect number of arrays for StructArray fields, expected 2 got 1". Other columns, and count(*), are read.
# Way around: select other columns, or read with another engine.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check datafusion==54.1.0 pyiceberg-core==0.11.0 'pyiceberg[pyarrow,sql-sqlite]==0.12.0'

cat > "$folder/read.py" <<'PY'
import os

import pyarrow as pa
from datafusion import SessionContext
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.types import LongType

catalog = SqlCatalog("catalog", uri="sqlite:///catalog.db", warehouse=f"file://{os.getcwd()}/warehouse")
catalog.create_namespace("shop")
rows = pa.table({"n": pa.array([1]), "item": pa.array([{"id": 7}], pa.struct([("id", pa.int64())]))})
table = catalog.create_table("shop.orders", schema=rows.schema)
table.append(rows)
with table.update_schema() as update:
    update.add_column(("item", "price"), LongType())
table.append(pa.table({"n": pa.array([2]), "item": pa.array([{"id": 8, "price": 9}], pa.struct([("id", pa.int64()), ("price", pa.int64())]))}))
print("pyiceberg", sorted((row["n"], row["item"]["price"]) for row in table.scan().to_arrow().to_pylist()))
context = SessionContext()
context.register_table("orders", catalog.load_table("shop.orders"))
print("n", sorted(row["n"] for row in context.sql("SELECT n FROM orders").to_pylist()))
try:
    print("item", context.sql("SELECT n, item FROM orders").to_pylist())
except Exception as error:
    print("item", str(error).rpartition("error: ")[2])
PY

expected="pyiceberg [(1, None), (2, 9)]
n [1, 2]
item Incorrect number of arrays for StructArray fields, expected 2 got 1"
seen=$(cd "$folder" && env/bin/python read.py 2>/dev/null)
echo "$seen"
[ "$seen" = "$expected" ] || { echo "changed: this was seen before: $expected"; exit 1; }
