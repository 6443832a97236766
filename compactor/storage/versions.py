"""Old versions of deleted and replaced objects in a bucket with versioning, as a store that can only be read.

A bucket that never had versioning has none, and neither has a directory. Needs s3:ListBucketVersions and s3:GetObjectVersion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from compactor.errors import NotFound
from compactor.storage.forwarding import UnconfiguredStore
from compactor.storage.os_errors import os_errors_as_compactor_errors
from compactor.storage.port import ObjectInfo, ObjectStore
from compactor.storage.s3 import S3Store
from compactor.storage.s3_requests import S3RequestClient, parse_and_check_returned_span


@dataclass(frozen=True)
class ObjectVersion:
    """Version of an object that was overwritten or deleted, in a bucket with versioning. modified_ms: time at which the version was
    written, in milliseconds.
    """

    key: str
    version: str
    size: int
    modified_ms: int


def read_only_stores_of_old_object_versions(store: ObjectStore, prefix: str) -> list[OldObjectVersionStore]:
    """Return read-only stores that show the old versions of objects below ``prefix``. The first store has the newest old version of each
    key, the second one the version before it, and so on.

    The result is empty if there are no old versions, or if the store is not on S3. Raises Refused if the credentials do not allow the
    request, StoreError if the store cannot be reached.
    """
    if not isinstance(store, S3Store):
        return []
    by_key: dict[str, list[ObjectVersion]] = defaultdict(list)
    for version in _noncurrent_object_versions(store.requests, prefix):
        by_key[version.key].append(version)
    deepest = max((len(versions) for versions in by_key.values()), default=0)
    return [OldObjectVersionStore(store, [versions[n] for versions in by_key.values() if len(versions) > n]) for n in range(deepest)]


def _noncurrent_object_versions(requests: S3RequestClient, prefix: str) -> Iterator[ObjectVersion]:
    """Yield the versions below a prefix that are not the current version of their key, in S3's order: by key, and for one key the newest
    first.
    """
    root, marks = requests.prefix, {"KeyMarker": "", "VersionIdMarker": ""}
    while True:
        asked = {name: mark for name, mark in marks.items() if mark}
        answer = requests.send_request_with_retries("list_object_versions", "list the versions of", Prefix=root + prefix, **asked)
        for entry in answer.get("Versions", []):
            key = str(entry["Key"])
            if not entry["IsLatest"] and key.startswith(root + prefix):
                moment = int(entry["LastModified"].timestamp() * 1000)
                yield ObjectVersion(key[len(root) :], str(entry["VersionId"]), int(entry["Size"]), moment)
        following = {"KeyMarker": answer.get("NextKeyMarker", ""), "VersionIdMarker": answer.get("NextVersionIdMarker", "")}
        if not answer.get("IsTruncated") or not following["KeyMarker"] or following == marks:
            return
        marks = following


class OldObjectVersionStore(UnconfiguredStore):
    """Read-only ObjectStore of old object versions, at most one per key."""

    def __init__(self, store: S3Store, versions: Sequence[ObjectVersion]) -> None:
        super().__init__(f"{store.url} is asked for old versions, which nobody writes")
        self._requests = store.requests
        self.versions = {version.key: version for version in versions}

    @property
    @override
    def url(self) -> str:
        return self._requests.object_url().rstrip("/")

    @override
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        version = self._version_of_key(key)
        if length == 0 or start >= version.size:
            return b""
        return self._requests.read_range(key, start, length, VersionId=version.version)

    @override
    def head(self, key: str) -> ObjectInfo:
        return _object_info(self._version_of_key(key))

    @override
    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        version = self._version_of_key(key)

        def download_and_return_byte_count(attempt: int) -> int:
            answer = self._requests.send_request_without_retries("get_object", "read", key, VersionId=version.version)
            span = parse_and_check_returned_span(answer, self._requests.object_url(key), 0, None)
            with os_errors_as_compactor_errors("write", path), path.open("wb") as file:
                return sum(file.write(part) for part in self._requests.read_body(answer, key, span))

        if start == 0 and length is None and version.size:
            return self._requests.request_with_retries(download_and_return_byte_count)
        data = self.get(key, start, length)
        with os_errors_as_compactor_errors("write", path):
            return path.write_bytes(data)

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        found = (version for key, version in self.versions.items() if key.startswith(prefix) and key.encode() > after.encode())
        return (_object_info(version) for version in sorted(found, key=lambda version: version.key.encode()))

    def _version_of_key(self, key: str) -> ObjectVersion:
        try:
            return self.versions[key]
        except KeyError:
            raise NotFound(f"{self._requests.object_url(key)} has no old version") from None


def _object_info(version: ObjectVersion) -> ObjectInfo:
    return ObjectInfo(version.key, version.size, version.modified_ms, metadata={"version": version.version})
