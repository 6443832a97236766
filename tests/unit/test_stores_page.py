"""docs/stores.md is made from the table of stores: ``python -m tests.unit.test_stores_page`` writes it anew."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from compactor.storage.schemes import STORE_KINDS, Capabilities

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"
HEAD = """# Object stores

A tier lies in one of these stores. The table is made from `compactor/storage/schemes.py`; `tests/contract/test_object_store.py`
tries each entry on the servers named in its last row. **Emulators and servers with the same interface only: neither S3 nor Google
Cloud Storage nor Azure Blob Storage was ever tried on the provider's own service.**

Every store must create an object only if its key is free. `config check` tries that, and so does the first process that leads in
a tier; a store that ignores the condition is refused before anything is written. A store that cannot copy ranges (an empty cell)
receives partially rewritten segments whole.

Credentials: S3 as in [S3](s3.md). Google Cloud Storage: `[gcs] credentials_file`, or the default credentials of the machine;
install the extra `gcs`. Azure: `[azure] credentials_file` (a connection string, an account key or a shared access signature), else
`AZURE_STORAGE_CONNECTION_STRING`, `AZURE_STORAGE_KEY` or `AZURE_STORAGE_SAS_TOKEN`, else the default credentials of the machine
(service principal, workload identity, managed identity); install the extra `azure`.

"""
NOUNS = {
    "create_only": "create only if absent",
    "conditional_delete": "delete only this version",
    "range_copy": "copy of ranges in the store",
    "checksum": "checksum",
    "publication_time": "the modification time is never before publication",
    "start_key": "listing from a key on",
    "unfinished_uploads": "lists unfinished uploads",
    "metadata_names": "names of object metadata",
    "deletes_free_space": "deleting frees space at once",
    "listing_order": "order of listings",
}


def shown(value: object) -> str:
    return (
        {True: "yes", False: "no", None: "`config check` asks the store"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def page() -> str:
    rows = [["", *(f"`{kind.example}`" for kind in STORE_KINDS)], ["---"] * (1 + len(STORE_KINDS))]
    rows += [[NOUNS[field.name], *(shown(getattr(kind.can, field.name)) for kind in STORE_KINDS)] for field in fields(Capabilities)]
    rows += [["tried with", *(kind.tested_with for kind in STORE_KINDS)]]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_page_of_stores_is_the_table_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.unit.test_stores_page"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
