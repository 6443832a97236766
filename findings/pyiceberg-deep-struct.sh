#!/usr/bin/env bash
# pyiceberg 0.12.0: a schema update commits a struct of 70 levels, and the same version cannot load the table afterwards.
#
# Input: a schema with a column of nested structs.
# Expected: what an update accepts and commits can be read again by the program that wrote it.
# Seen:     union_by_name commits; load_table then fails with "recursion limit exceeded" of the JSON parser. 60 levels work.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'pyiceberg==0.12.0' 'pyarrow==21.0.0' 'sqlalchemy==2.0.43'
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON' || { echo "changed: something else was seen before"; exit 1; }
import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog

catalog = SqlCatalog("c", uri="sqlite:///catalog.db", warehouse="file://warehouse")
catalog.create_namespace("n")


def outcome(levels: int) -> str:
    name = f"n.t{levels}"
    table = catalog.create_table(name, schema=pa.schema([("a", pa.int64())]))
    deep = pa.int64()
    for _ in range(levels):
        deep = pa.struct([("f", deep)])
    with table.update_schema() as update:
        update.union_by_name(pa.schema([("deep", deep)]))
    try:
        catalog.load_table(name)
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if "Invalid JSON" in line), type(error).__name__)
        return f"committed, and cannot be loaded: {reason[:60]}"
    return "committed and loaded"


seen = {levels: outcome(levels) for levels in (60, 70)}
for levels, what in seen.items():
    print(f"{levels} levels: {what}")
assert seen[60] == "committed and loaded"
assert "cannot be loaded" in seen[70] and "recursion limit" in seen[70]
PYTHON
