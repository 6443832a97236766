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

A tier lies in one of these stores. The table is made from `compactor/storage/schemes.py`; `tests/contract/test_object_store.py`
tries each entry on the servers named in its last row. **Emulators, servers with the same interface and mini clusters only: neither S3
nor Google Cloud Storage nor Azure Blob Storage was ever tried on the provider's own service, and HDFS never on more than one machine.**

Every store must create an object only if its key is free, also where an object is sent in parts. The first process on each machine
that writes in a tier tries both on a key of its own (once, with eight requests on S3), and so does each `config check`; a store that
ignores the condition is refused before anything else is written. `config check` also lets 32 writers create one key at once. A store
that cannot copy ranges (an empty cell) receives partially rewritten segments whole. So does an Azure account that refuses a copy, as
firewalls of accounts do, from the first refusal on.

Credentials: S3 as in [S3](s3.md). Google Cloud Storage: `[gcs] credentials_file`, or the default credentials of the machine;
install the extra `gcs`. Azure: `[azure] credentials_file` (a connection string, an account key or a shared access signature), else
`AZURE_STORAGE_CONNECTION_STRING`, `AZURE_STORAGE_KEY` or `AZURE_STORAGE_SAS_TOKEN`, else the default credentials of the machine
(service principal, workload identity, managed identity); install the extra `azure`. `conf/s3.toml`, `conf/gcs.toml` and
`conf/azure.toml` are worked configurations. HDFS: see [below](#hdfs).

Rights: Google, the role Storage Object User on the bucket; `storage.buckets.get` lets `config check` see soft delete, versioning,
retention and holds. Azure, the role Storage Blob Data Contributor on the container;
`Microsoft.Storage/storageAccounts/blobServices/read` lets it see soft delete. Where deleted objects are kept, nothing is saved before
they are gone.

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
A proxy before each server counts the requests, with parts of 5 MiB. The contract suite fails where they differ. `plan` multiplies
them by the prices of the store. On S3 that was moto; a server that returns checksums of copied parts (versitygw) takes two less to compose.
HDFS: a redirect to a datanode counts as a request of its own, and listings take one for each folder (here two).

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
gives. Install the extra `hdfs` (it brings `requests`: the packages `hdfs` and `fsspec` know neither options of a rename nor extended
attributes). `[hdfs] webhdfs_url` is `http://NAMENODE:9870` if it is empty; `[hdfs] user` is who this program works as. HttpFS is refused,
because its renames have no options.

```toml
[tier]
url = "hdfs://namenode.example.com/kafka-tier/production"
[hdfs]
user = "kafka-compactor"
```

Kerberos: `kerberos = true`, and the extra `kerberos`, which pip builds (Debian: `apt install gcc libkrb5-dev`; the image does not have it).
Tickets come from the cache, or from a keytab that `KRB5_CLIENT_KTNAME` names; they are renewed from the keytab. `[hdfs] user` is the
principal, if it is not the default one. The namenode is `HTTP/HOST`, with the host of `webhdfs_url`, and is asked for a ticket once for
each of its cookies. Datanodes get the namenode's delegation tokens. Tried with Apache Kerby, not with MIT's KDC or Active Directory.

These rules held on a mini cluster of Hadoop 3.5.0, and the adapter rests on them:

- **An object is complete as soon as it is visible.** Each attempt stages a file of its own below `.object-store/staged`, reads it back,
  and renames it to its key. WebHDFS takes no checksum with an upload, so that bytes which arrive damaged would stay damaged.
- **It is created only if its key is free.** `RENAME` with `renameoptions=NONE`: of twelve at once, one succeeded and eleven were
  answered 403 (FileAlreadyExistsException).
- **Grace and undo window never count from staging.** A rename keeps the modification time. So a staged file is dated 2^43 ms (278
  years) into the future, and gets the namenode's time after the rename. What a crash leaves undated is due for nobody; the next
  reader who may write dates it.
- **The time is never before publication.** It is the date of an answer to a request that began after the rename, and a second more,
  because dates have whole seconds.
- **A late writer changes nothing.** Versions are inode numbers, which HDFS never uses twice. Bytes are read, and times are set, by
  `/.reserved/.inodes/NUMBER`.
- **Metadata of an object** is one extended attribute, `user.tiered_compactor`. `dfs.namenode.xattrs.enabled` must be true, as it is by
  default.
- **What a crash leaves is swept.** `retire` deletes staged files that are older than `orphan_age_ms`, one hour at least.

`config check` warns of snapshots of the directory or of one above it, because they keep deleted files. Deletion frees space as soon as
the namenode has told the datanodes. Empty directories stay. Processes killed at random moments were tried there, too. A standby namenode
is asked again until it is active, also in the middle of a round; so is one in safe mode. One namenode only can be named, so after a
failover that lasts, `[hdfs] webhdfs_url` has to name the other one. A quota or a right that one partition's directory lacks holds up that
partition only. Not tried: more than one machine.

## Another store

A store is one module below `compactor/storage` (a `SingleRequestObjectClient` of `cloud.py`, whose single requests `CloudStore` makes into
the port), one row in `schemes.py`, and one fixture in `tests/support/servers.py`. If it has settings, they are a section of
`config/store_sections.py`, named in `settings.py` and `conf/default.toml`; if it needs a library, an extra of `extras.py` and
`pyproject.toml`. No other file of the program knows a scheme. Of the tests, `store_costs.py` has a column for it, the contract suite a
parameter, and `fault_proxy.py` must know its interface if that is a new one. HDFS was added in this way.

## S3 servers that people run at home and in CI

Tried by hand on 2026-11-28, unless the table above names them. Where `config check` refuses a server, so does the first process that writes
there, except for listings, which only `config check` and `demo --tier` try.

| server | version | what it does otherwise than S3 | fit? |
|---|---|---|---|
| gofakes3 | 1.2.0 | ignores the condition when an upload in parts is completed; copies no ranges; keeps the old metadata of an object that is overwritten; answers with an error where there are no unfinished uploads | no, refused (`conditional-multipart`) |
| `rclone serve s3` | 1.75.2 | ignores all conditions | no, refused (`conditional-puts`) |
| Adobe S3Mock | 5.2.0 | honours `If-None-Match: *` everywhere (of 16 writers at once one wins), but **aborting an upload in parts deletes an object that exists under its key** | no, refused (`multipart-abort`) |
| s3s-fs | 0.14.1 | create-only is not atomic: several writers at once win; an upload with a wrong checksum is answered 400, and the object exists afterwards; the condition of a copy's source is ignored | no, refused (`conditional-puts`) |
| s3rver | 3.7.1 | ignores all conditions; lists by path segment; answers 500 to every continued listing | no, refused (`conditional-puts`) |
| ministack | 1.5.33 | nothing that the main job needs | yes, in place of LocalStack |

`config check` also lists three small keys, two on a page, and compares order and continuation (`listing`). A server that answers 501 or 400
to the question whether it keeps versions (`versioning-unknown`) lacks the question, not a right: the finding says what it answered.

Garage, MinIO and SeaweedFS were not built for the tests. Garage's documentation of PutObject names no condition, so that it would be
refused. SeaweedFS's Go module replaces other modules, which `go install` refuses; MinIO's newest one (2026-02-12) replaces none. S3Proxy 4.1.0 wants the CRC-32C of copied
parts when an upload is completed, and does not give it when it copies them. The first such answer is noticed, and partially rewritten
segments are sent whole from then on.
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
