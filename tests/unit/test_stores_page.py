# ruff: noqa: E501 - rows of tables are long
"""docs/stores.md is made from the table of stores: ``python -m tests.unit.test_stores_page`` writes it anew."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from compactor.storage.schemes import STORE_KINDS, StoreCapabilities
from tests.support.cloud_servers import AZURITE, FAKE_GCS, HADOOP
from tests.support.s3_server import GOFAKES3, S3PROXY, VERSITYGW
from tests.support.store_costs import COSTS

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"
HEAD = """# Object stores

A tier lies in one of these stores. `tests/contract/test_object_store.py` tries each entry of the table on the servers of its last row. **These are
emulators, servers with the same interface and mini clusters: neither S3 nor Google Cloud Storage nor Azure Blob Storage was ever tried on the
provider's own service, and HDFS never on more than one machine.**

| store | extra | example | credentials |
| --- | --- | --- | --- |
| S3 | | `conf/s3.toml` | [S3](s3.md#credentials-and-permissions) |
| Google Cloud Storage | `gcs` | `conf/gcs.toml` | `[gcs] credentials_file`, else the default credentials of the machine |
| Azure Blob Storage | `azure` | `conf/azure.toml` | `[azure] credentials_file` (a connection string, an account key or a shared access signature), else `AZURE_STORAGE_CONNECTION_STRING`, `AZURE_STORAGE_KEY` or `AZURE_STORAGE_SAS_TOKEN`, else the default credentials of the machine (service principal, workload identity, managed identity) |
| HDFS | `hdfs` | `conf/hdfs.toml` | [below](#hdfs) |

| store | right to work | right by which `config check` sees whether deleted objects are kept |
| --- | --- | --- |
| Google Cloud Storage | the role Storage Object User on the bucket | `storage.buckets.get` (soft delete, versioning, retention, holds) |
| Azure Blob Storage | the role Storage Blob Data Contributor on the container | `Microsoft.Storage/storageAccounts/blobServices/read` (soft delete) |

Where deleted objects are kept, compaction saves nothing before they are gone.

A store must create an object only if its key is free, also where the object is sent in parts. The first process on each machine that
writes in a tier tries both on a key of its own (once, with eight requests on S3), and so does each `config check`, which also lets 32 writers
create one key at once. A store that ignores the condition is refused before anything else is written. If a store cannot copy ranges (an empty
cell), or an Azure account refuses a copy, partially rewritten segments are sent whole.

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
    "does_delete_free_space": "deleting frees space at once",
    "listing_order": "order of listings",
    "multipart": "large objects become visible by a request of their own",
}


def shown(value: object) -> str:
    return (
        {True: "yes", False: "no", None: "`config check` asks the store"}[value] if value is None or isinstance(value, bool) else str(value)
    )


SERVERS = [kind for kind in STORE_KINDS if kind.container]
COSTS_HEAD = """
Requests with parts of 5 MiB, as a proxy before each server counts them. `plan` multiplies them by the prices of the store. S3 is moto; a server
that returns checksums of copied parts (versitygw) takes two less to compose. On HDFS a redirect to a datanode counts as a request, and a listing
takes one for each folder (here two).

"""
TAIL = """
## A tier of Aiven's plug-in

Keys, manifests and encryption are the same on every store. From the brokers' `rsm.config.storage.` options:

| plug-in | here |
| --- | --- |
| `gcs.bucket.name` | `[tier] url = "gs://BUCKET"` |
| `gcs.endpoint.url` | `[gcs] endpoint_url` |
| `gcs.credentials.path` | `[gcs] credentials_file`; write the text of `gcs.credentials.json` into such a file |
| `gcs.credentials.default` | `[gcs] credentials_file = ""` |
| `azure.account.name`, `azure.container.name` | `[tier] url = "az://ACCOUNT/CONTAINER"` |
| `azure.endpoint.url` | `[azure] endpoint_url` |
| `azure.account.key`, `azure.sas.token`, `azure.connection.string` | a file named by `[azure] credentials_file` |
| `azure.upload.block.size`, `gcs.resumable.upload.chunk.size` | nothing: objects are the same |

On fake-gcs-server and Azurite, tiers that plug-in 1.0.0 writes are read, checked and compacted under the running broker (Kafka 4.3.1,
`tests/broker/test_aiven_on_cloud_stores.py`).

## HDFS

`hdfs://namenode/path` speaks WebHDFS to the namenode and to the datanodes, which must be reachable under the names that the namenode
gives. `[hdfs] webhdfs_url` is `http://NAMENODE:9870` if it is empty; `[hdfs] user` is the user as whom this program works. HttpFS is refused,
because its renames have no options. `dfs.namenode.xattrs.enabled` must be true, as it is by default.

```toml
[tier]
url = "hdfs://namenode.example.com/kafka-tier/production"
[hdfs]
user = "kafka-compactor"
```

Kerberos: `kerberos = true`, and the extra `kerberos`, which pip builds (Debian: `apt install gcc libkrb5-dev`; the image does not have it).
Tickets come from the cache, or from a keytab that `KRB5_CLIENT_KTNAME` names, and are renewed from the keytab. `[hdfs] user` is the
principal, if it is not the default one. The namenode's principal is `HTTP/HOST`, with the host of `webhdfs_url`. Tried with Apache Kerby, not
with MIT's KDC or Active Directory.

| subject | behaviour |
| --- | --- |
| upload | a file is staged below `.object-store/staged`, read back (WebHDFS takes no checksum) and renamed to its key. `retire` deletes staged files of dead processes when they are older than `orphan_age_ms`, and one hour at least |
| times | a file gets the namenode's time after its rename, so that grace and undo window do not count from staging |
| versions | inode numbers, which HDFS never uses twice: a late writer changes nothing |
| metadata of an object | one extended attribute, `user.tiered_compactor` |
| snapshots | `config check` warns of those of the directory or of one above it, because they keep deleted files |
| deletion | frees space as soon as the datanodes have their orders from the namenode; empty directories stay |
| a standby namenode, or one in safe mode | is retried until it is active, also in the middle of a round. Only one namenode can be named: after a failover that lasts, `[hdfs] webhdfs_url` has to name the other one |
| a quota or a right that the directory of one partition lacks | holds up that partition only |

## Another store

A store is one module below `compactor/adapters/stores` (a `SingleRequestObjectClient` of `cloud.py`), one row in `schemes.py`, and one fixture in
`tests/support/servers.py`. Settings of its own are a section of `config/sections.py`, named in `settings.py` and `conf/default.toml`; a
library is an extra of `extras.py` and `pyproject.toml`. Of the tests, `store_costs.py` has a column for it, the contract suite a parameter, and
`fault_proxy.py` must know its interface. No other file knows a scheme.

## S3 servers that people run at home and in CI

Tried by hand on 2026-11-28 and 29, unless the table above names them. Where `config check` refuses a server, so does the first process that writes
there, except for listings, which only `config check` and `demo --tier` try.

| server | version | what it does otherwise than S3 | fit? |
|---|---|---|---|
| gofakes3 | 1.2.0 | ignores the condition when an upload in parts is completed; copies no ranges; keeps the old metadata of an object that is overwritten; answers with an error where there are no unfinished uploads | no, refused (`conditional-multipart`) |
| `rclone serve s3` | 1.75.2 | ignores all conditions | no, refused (`conditional-puts`) |
| Adobe S3Mock | 5.2.0 | honours `If-None-Match: *` everywhere (of 16 writers at once one wins), but **aborting an upload in parts deletes an object that exists under its key** | no, refused (`multipart-abort`) |
| s3s-fs | 0.14.1 | create-only is not atomic: several writers at once win; an upload with a wrong checksum is answered 400, and the object exists afterwards; the condition of a copy's source is ignored | no, refused (`conditional-puts`) |
| s3rver | 3.7.1 | ignores all conditions; lists by path segment; answers 500 to every continued listing | no, refused (`conditional-puts`) |
| MiniStack | 1.5.33 | nothing: it passes the contract suite (`make nightly`) | yes, in place of LocalStack |
| MinIO, one disk | 2026-02-12 (the newest Go module) | a listing from a key on may end early where names lie beside a folder's (`orders-1.eu` and `orders-1/`); refuses to copy parts into an upload with CRC-32C (`checksum missing`), so that partially rewritten segments are sent whole; lists unfinished uploads of whole keys only, so that what a crash leaves is not found | yes, with a warning (`listing`) |
| SeaweedFS (`weed server -s3`) | 4.48 | lists by path segment: `a/2` before `a-1` | no, refused (`listing`) |
| Garage | 2.5.0 (crates.io) | ignores all conditions; does not know the request for object locks (501) | no, refused (`conditional-puts`) |

`config check` also lists eight small keys, two on a page, and compares order and continuation (`listing`). If `versioning-unknown`
shows an answer 501 or 400, the server does not know the request; no right is missing.

Google's storage-testbench 0.45.0 (`gs://`) adds entries to the metadata of objects that are sent in one request (`x_emulator_crc32c`, `x_testbench_upload` and two more), so that it
fails the contract suite; use fake-gcs-server.

Objects that were sent with a CRC64NVME are read like others (moto, versitygw, MiniStack). moto 5 accepts a wrong one and keeps none; the other two refuse it.

Not tried: Zenko CloudServer, whose only package in npm, 8.0.0-beta, needs sources of GitHub; LocalStack,
of which `localstack-core` 2026.3.0 needs Python 3.12 (its package says 3.10). S3Proxy 4.1.0 wants the CRC-32C of copied parts
when an upload is completed, and does not give it when it copies them: from the first such answer on, partially rewritten segments are sent whole.
"""


def page() -> str:
    rows = [["", *(f"`{kind.example}`" for kind in STORE_KINDS)], ["---"] * (1 + len(STORE_KINDS))]
    rows += [[NOUNS[field.name], *(shown(getattr(kind.can, field.name)) for kind in STORE_KINDS)] for field in fields(StoreCapabilities)]
    rows += [["tried with", *(kind.tested_with for kind in STORE_KINDS)]]
    costs = [["requests to", *(f"`{kind.scheme}://`" for kind in SERVERS)], ["---"] * (1 + len(SERVERS))]
    costs += [[use, *(str(by_scheme.get(kind.scheme, "")) for kind in SERVERS)] for use, by_scheme in COSTS.items()]
    return HEAD + table(rows) + COSTS_HEAD + table(costs) + TAIL


def table(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_page_of_stores_is_the_table_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.unit.test_stores_page"


def test_versions_on_the_page_are_those_that_tests_start() -> None:
    started = {
        "versitygw": VERSITYGW,
        "S3Proxy": S3PROXY,
        "gofakes3": GOFAKES3,
        "fake-gcs-server": FAKE_GCS,
        "Azurite": AZURITE,
        "Hadoop": HADOOP,
    }
    tried = " ".join(kind.tested_with for kind in STORE_KINDS)
    assert [name for name, version in started.items() if f"{name} {version.removeprefix('v')}" not in tried] == []


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
