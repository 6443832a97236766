#!/usr/bin/env bash
# pyiceberg 0.12.0, SQL catalog: expiring a snapshot drops a tag that somebody else has set on it meanwhile.
#
# Input: a table of two snapshots, a tag on the first one, and an expiry that was prepared before the tag.
# Expected: the commit of the expiry is refused, or keeps the snapshot, because a tag protects it (Iceberg's specification: a snapshot that
#           a tag names is kept until the tag is removed or its own age has passed).
# Seen:     the expiry commits. ExpireSnapshots sends no requirement about references, and removing the snapshot removes the tag silently.
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
table = catalog.create_table("n.t", schema=pa.schema([("a", pa.int64())]))
for value in (1, 2):
    table.append(pa.table({"a": [value]}))
first = table.metadata.snapshots[0].snapshot_id
mine = catalog.load_table("n.t")
somebody = catalog.load_table("n.t")
somebody.manage_snapshots().create_tag(first, "audit").commit()
try:
    mine.maintenance.expire_snapshots().by_id(first).commit()
    outcome = "the expiry was committed"
except Exception as error:
    outcome = f"the expiry was refused: {type(error).__name__}"
after = catalog.load_table("n.t")
kept = [snapshot.snapshot_id for snapshot in after.metadata.snapshots]
print(f"{outcome}; the tag is {'kept' if 'audit' in after.refs() else 'gone'}, its snapshot is {'kept' if first in kept else 'gone'}")
assert outcome == "the expiry was committed", outcome
assert "audit" not in after.refs() and first not in kept
PYTHON
