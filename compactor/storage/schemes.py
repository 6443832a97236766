"""Kinds of object stores.

Another store needs a module with ``open_store_at``, a row here, and a fixture in tests/contract/test_object_store.py. Settings read this
module, therefore it imports no adapter and no settings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from compactor.errors import UsageError
from compactor.storage.keys import MAX_KEY_BYTES, object_key_problem

NO_CREDENTIALS = "no user and no password here: credentials come from the store's usual chain"
UTF_8 = "UTF-8"
_MAX_PREFIX_BYTES = 1024 - MAX_KEY_BYTES - 1


@dataclass(frozen=True)
class StoreCapabilities:
    """Abilities of a kind of store, as docs/stores.md lists them and the contract suite tests them. Empty: the store cannot do that.

    :param publication_time: whether ``modified_ms`` of a control record is never earlier than the moment at which it became visible.
    :param start_key: whether a listing can begin after a key.
    :param listing_order: an order other than UTF-8's is detected and refused.
    :param metadata_names: which names the store itself accepts.
    :param does_delete_free_space: None if the store has to be asked.
    :param multipart: whether large objects become visible by another request, so that its condition has to be tried, too.
    """

    create_only: str
    conditional_delete: str
    range_copy: str
    checksum: str
    publication_time: bool
    start_key: bool
    unfinished_uploads: bool
    metadata_names: str
    does_delete_free_space: bool | None = None
    listing_order: str = UTF_8
    multipart: bool = True


GIB = 2**30
CONTROL_WRITES = 5
"""Control records per round: leadership acquired and released, plan, publication, change hint. Each group adds a receipt."""
OBJECTS_PER_SEGMENT = 5
"""Objects per segment: log, three indexes, sidecar."""


@dataclass(frozen=True)
class StorePrices:
    """Prices of one store in the month ``as_of``. of: name and region."""

    as_of: str
    of: str
    read_request_usd: float
    write_request_usd: float
    stored_gib_month_usd: float

    def monthly_storage_usd(self, size_bytes: int) -> float:
        return round(size_bytes / GIB * self.stored_gib_month_usd, 6)

    def requests_usd(self, reads: int, writes: int) -> float:
        return round(reads * self.read_request_usd + writes * self.write_request_usd, 6)

    def round_requests_usd(self, source_segments: int, new_segments: int) -> float:
        """Two passes read the sources' logs, and each new object is written and read back."""
        objects = new_segments * OBJECTS_PER_SEGMENT
        return self.requests_usd(2 * source_segments + objects, objects + new_segments + CONTROL_WRITES)


@dataclass(frozen=True)
class StoreKind:
    """A URL scheme and the kind of store that it stands for.

    :param container: pattern of the URL's bucket; None for a directory.
    :param noun: word for the bucket in messages; ``naming_rule`` says what ``container`` matches.
    :param section: section of the settings with address and credentials.
    :param extra: has the client library.
    :param tested_with: servers and versions of the contract suite.
    :param pinterest: whether consumers of Pinterest's layout can read from such stores.
    """

    scheme: str
    example: str
    adapter: str
    can: StoreCapabilities
    prices: StorePrices
    tested_with: str
    container: re.Pattern[str] | None = None
    noun: str = "bucket"
    naming_rule: str = ""
    section: str = ""
    extra: str = ""
    pinterest: bool = True


DIRECTORY = StoreKind(
    scheme="file",
    example="file:///var/lib/tier",
    adapter="compactor.storage.local",
    can=StoreCapabilities(
        create_only="an exclusive hard link",
        conditional_delete="",
        range_copy="copy_file_range; shares blocks on Btrfs and XFS",
        checksum="the disk's",
        publication_time=True,
        start_key=True,
        unfinished_uploads=True,
        metadata_names="any; kept in a companion file",
        does_delete_free_space=True,
        multipart=False,
    ),
    prices=StorePrices("", "a directory", 0.0, 0.0, 0.0),
    tested_with="ext4, overlayfs and tmpfs of the test machines",
)
"""The kind of a plain path, too."""

STORE_KINDS: tuple[StoreKind, ...] = (
    DIRECTORY,
    StoreKind(
        scheme="s3",
        example="s3://bucket/prefix",
        adapter="compactor.adapters.stores.s3",
        section="s3",
        container=re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}"),
        naming_rule="3 to 255 letters, digits, dots, hyphens and underscores",
        can=StoreCapabilities(
            create_only="If-None-Match: *, on PutObject and on CompleteMultipartUpload",
            conditional_delete="",
            range_copy="UploadPartCopy; parts of at least 5 MiB but the last",
            checksum="CRC-32 of each part, CRC-32C of copies; of whole objects when read",
            publication_time=True,
            start_key=True,
            unfinished_uploads=True,
            metadata_names="HTTP header names; `_` travels as `-`, because proxies drop headers with underscores",
        ),
        prices=StorePrices("2026-11", "S3 Standard in us-east-1", 0.4e-6, 5e-6, 0.023),
        tested_with="moto (requests one at a time), versitygw 1.8.0, S3Proxy 4.1.0 (joins no copied part with one that was sent; "
        "orders names as UTF-16); gofakes3 1.2.0: `config check` refuses it, because it ignores the condition of CompleteMultipartUpload",
    ),
    StoreKind(
        scheme="gs",
        example="gs://bucket/prefix",
        adapter="compactor.adapters.stores.gcs",
        section="gcs",
        extra="gcs",
        container=re.compile(r"[a-z0-9][a-z0-9._-]{2,221}"),
        naming_rule="3 to 222 small letters, digits, dots, hyphens and underscores",
        pinterest=False,
        can=StoreCapabilities(
            create_only="ifGenerationMatch=0, for resumable uploads too",
            conditional_delete="ifGenerationMatch",
            range_copy="",
            checksum="CRC-32C of uploads; of whole objects when read",
            publication_time=True,
            start_key=True,
            unfinished_uploads=False,
            metadata_names="any",
        ),
        prices=StorePrices("2026-11", "Google Cloud Storage Standard in us-east1", 0.4e-6, 5e-6, 0.020),
        tested_with="fake-gcs-server 1.56.1",
    ),
    StoreKind(
        scheme="az",
        example="az://account/container/prefix",
        adapter="compactor.adapters.stores.azure",
        section="azure",
        extra="azure",
        container=re.compile(r"[a-z0-9]{3,24}/[a-z0-9](?:-?[a-z0-9]){2,62}"),
        noun="account and container",
        naming_rule="3 to 24 small letters and digits, a slash, 3 to 63 small letters, digits and single hyphens",
        pinterest=False,
        can=StoreCapabilities(
            create_only="If-None-Match: *, on Put Blob and on Put Block List",
            conditional_delete="If-Match",
            range_copy="Put Block From URL; of at least 5 MiB but the last, as planned for all servers; read back",
            checksum="MD5 of each block sent; of whole objects when read",
            publication_time=True,
            start_key=False,
            unfinished_uploads=False,
            metadata_names="identifiers: letters, digits and `_`",
            listing_order="UTF-16 (Azurite); differs from UTF-8 for characters beyond U+FFFF only, which no name of Kafka has",
        ),
        prices=StorePrices("2026-11", "Azure Blob Storage, block blobs, Hot LRS in East US", 0.44e-6, 5.5e-6, 0.0184),
        tested_with="Azurite 3.37.0",
    ),
    StoreKind(
        scheme="hdfs",
        example="hdfs://namenode/path",
        adapter="compactor.adapters.stores.hdfs",
        section="hdfs",
        extra="hdfs",
        container=re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]{1,5})?"),
        noun="namenode",
        naming_rule="a host, and :PORT if it has one",
        pinterest=False,
        can=StoreCapabilities(
            create_only="a staged file, and a rename with renameoptions=NONE",
            conditional_delete="by the number of the inode",
            range_copy="",
            checksum="the datanodes' block checksums; uploads are read back and compared",
            publication_time=True,
            start_key=False,
            unfinished_uploads=True,
            metadata_names="any; kept in an extended attribute",
            multipart=False,
        ),
        prices=StorePrices("", "HDFS", 0.0, 0.0, 0.0),
        tested_with="a mini cluster of Hadoop 3.5.0; with Kerberos (Apache Kerby as KDC), the main job only",
    ),
)


def store_kind_of_scheme(url: str) -> StoreKind | None:
    return next((kind for kind in STORE_KINDS if url.lower().startswith(f"{kind.scheme}://")), None)


def store_kind(url: str) -> StoreKind:
    if not url.strip():
        raise UsageError("the store's URL is empty", hint=f"Write {_known_schemes_text()}")
    kind = store_kind_of_scheme(url)
    if kind is not None:
        return kind
    if "://" in url or url.lower().startswith(f"{DIRECTORY.scheme}:"):
        raise UsageError(f"{url!r} is not a store", hint=f"Write {_known_schemes_text()}")
    return DIRECTORY


def url_problem(url: str) -> str:
    """Return why this text is no valid store URL, or an empty string. Plain paths are not URLs."""
    scheme, _, rest = url.partition("://")
    kind = store_kind_of_scheme(url)
    if kind is None or scheme != kind.scheme or not re.match(r"[^/]" if kind.container else r"(localhost)?/.", rest):
        return f"write {_known_schemes_text()}"
    if kind.container and "@" in rest.partition("/")[0]:
        return NO_CREDENTIALS
    return ""


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Bucket (``account/container`` on Azure), and prefix of keys, empty or ending with a slash; both empty for a directory. Raises
    UsageError if the URL names no bucket.
    """
    kind = store_kind(url)
    if kind.container is None:
        return "", ""
    rest = url.partition("://")[2]
    found = kind.container.match(rest)
    if found is None or rest[found.end() : found.end() + 1] not in ("", "/"):
        given = "/".join(rest.split("/")[: kind.noun.count(" and ") + 1])
        fault = f" names no {kind.noun}" if not given.strip("/") else f": {given!r} is not a valid {kind.noun} ({kind.naming_rule})"
        raise UsageError(f"{url!r}{fault}", hint=f"Write {kind.example}")
    prefix = rest[found.end() :].strip("/")
    fault = object_key_problem(prefix) if prefix else ""
    if not fault and len(prefix.encode()) > _MAX_PREFIX_BYTES:
        fault = f"is longer than {_MAX_PREFIX_BYTES} bytes"
    if fault:
        raise UsageError(f"the prefix of {url!r} {fault}", hint=f"Write {kind.example}")
    return found[0], f"{prefix}/" if prefix else ""


def directory_of_store_url(url: str) -> Path:
    """Directory that a URL (percent-encoded or with plain spaces) or a path names. Raises UsageError if there is none."""
    if store_kind(url) is DIRECTORY and "://" not in url:
        return Path(url)
    parts = urlsplit(url.replace("?", "%3F").replace("#", "%23"))
    if parts.scheme != DIRECTORY.scheme or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UsageError(f"{url!r} is not a store", hint=f"Write {_known_schemes_text()}")
    return Path(unquote(parts.path))


def existing_folder(url: str) -> Path | None:
    """Store's directory, or the nearest existing one above it. Raises UsageError if the URL names no store."""
    if store_kind(url) is not DIRECTORY:
        return None
    root = directory_of_store_url(url)
    return next(folder for folder in (root, *root.parents) if folder.exists())


def _known_schemes_text() -> str:
    examples = [f"{DIRECTORY.example} (three slashes, the full path)", *(kind.example for kind in STORE_KINDS[1:])]
    return f"{', '.join(examples[:-1])} or {examples[-1]}"
