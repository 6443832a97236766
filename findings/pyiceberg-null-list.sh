#!/usr/bin/env bash
# PyIceberg 0.12.0: a list that is null becomes an empty list, when a table is appended to, and again when it is read.
#
# Input: a table with an optional list of structs and an optional map, and three rows: a list of one struct, null, an empty list; the same for maps.
#   append() writes them; then a file with the same rows that pyarrow has written is added with add_files().
# Expected: both files hold, and scan().to_arrow() returns, the list, null and the empty list. Iceberg's specification, "Schemas and Data Types": a
#   list is a field like any other, optional or required.
# Seen: append() writes the list and two empty lists; of the added file, which holds the null, scan() returns the same. Maps keep their nulls.
# Cause: ArrowProjectionVisitor.list (pyiceberg/io/pyarrow.py) rebuilds the array from its offsets and values, without its validity.
# Way around: write files with pyarrow and add them; read them with another engine, or with pyarrow by scan().plan_files().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check pyarrow==25.0.1 'pyiceberg[pyarrow,sql-sqlite]==0.12.0'

cat > "$folder/read.py" <<'PY'
import os

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog

catalog = SqlCatalog("catalog", uri="sqlite:///catalog.db", warehouse=f"file://{os.getcwd()}/warehouse")
catalog.create_namespace("shop")
lines = pa.list_(pa.struct([("n", pa.int64())]))
rows = pa.table({"lines": pa.array([[{"n": 1}], None, []], lines), "attributes": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64()))})
table = catalog.create_table("shop.orders", schema=rows.schema)
table.append(rows)
pq.write_table(rows, "added.parquet")


def files() -> dict[str, list[object]]:
    paths = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
    return {path.rpartition("/")[2]: pq.read_table(path, partitioning=None)["lines"].to_pylist() for path in paths}


print("appended", *files().values())
table.delete()
table.add_files([f"file://{os.getcwd()}/added.parquet"])
print("added", *files().values())
found = table.scan().to_arrow()
print("read", *(found[name].to_pylist() for name in ("lines", "attributes")))
PY

expected="appended [[{'n': 1}], [], []]
added [[{'n': 1}], None, []]
read [[{'n': 1}], [], []] [[('a', 1)], None, []]"
seen=$(cd "$folder" && env/bin/python read.py)
echo "$seen"
[ "$seen" = "$expected" ] || { echo "changed: this was seen before: $expected"; exit 1; }
