"""Checks of a store: permissions, clock, listings, conditional puts, and whether deleting frees space.

Leadership rests on conditional puts. They are tried by a race of many writers, once for each store; a marker object remembers the result.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from compactor.errors import AlreadyExists, CompactorError, NotFound, Refused, StoreError
from compactor.model.finding import Finding
from compactor.storage.factory import NoSuchUpload, PreconditionFailed
from compactor.storage.port import FileRange, ObjectStore
from compactor.storage.schemes import store_kind, store_kind_of_scheme


class ConditionalCreateCheck:
    """Check that a store honours create-if-absent, before this process's first create in a bucket. Thread-safe.

    Otherwise two compactors could lead at once. A store that passed is remembered by a file in ``folder``: a file in the store would also
    be in each copy of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._passed: set[tuple[str, str]] = set()

    def require_conditional_creates(self, store: ObjectStore, prefix: str) -> None:
        """Raise Refused if a store on a server ignores create-if-absent."""
        if not isinstance(store, StoreWithTestableConditionalCreates):
            return
        with self._lock:
            endpoint, bucket, root = store.server_location()
            if (endpoint, bucket) in self._passed:
                return
            place = json.dumps({"endpoint": endpoint, "bucket": bucket, "prefix": root})
            marker = self._folder / hashlib.sha256(place.encode()).hexdigest()[:32]
            if not _is_marked(marker, place):
                self._require_condition(store.without_conditional_create_check(), prefix)
                with suppress(OSError):  # the next process asks again
                    self._folder.mkdir(parents=True, exist_ok=True)
                    marker.write_text(place)
            self._passed.add((endpoint, bucket))

    def _require_condition(self, store: ObjectStore, prefix: str) -> None:
        problem = find_ignored_condition(store, prefix)
        if problem is not None:
            raise Refused(problem.detail, hint=problem.hint)


def _is_marked(marker: Path, location: str) -> bool:
    try:
        return marker.read_text() == location
    except (OSError, UnicodeDecodeError):
        return False


MARKER = "conditional-puts-raced-1"
PROBE_THREADS = 32
PROBE_ROUNDS = 8
_SKEW_WARNING_MS = 60_000


@runtime_checkable
class StoreWithQueryableSettings(Protocol):
    """Store on a server whose settings can be queried. Methods raise StoreError."""

    def inspect_store_settings(self, now_ms: int) -> Sequence[Finding]: ...

    def does_delete_free_space(self) -> bool | None:
        """Return None if the credentials may not ask."""

    def required_permission_name(self, verb: str) -> str:
        """In the vendor's terms, for: write, overwrite, read, list or delete."""


@runtime_checkable
class StoreWithTestableConditionalCreates(Protocol):
    def server_location(self) -> tuple[str, str, str]: ...

    def without_conditional_create_check(self) -> ObjectStore: ...

    def with_list_page(self, keys: int) -> ObjectStore: ...

    def upload_if_absent(self, key: str, file: FileRange) -> None:
        """Raises AlreadyExists, PreconditionFailed or NoSuchUpload if the key is taken."""


def probe_store(store: ObjectStore, now_ms: Callable[[], int], prefix: str = ".tiered-compactor/probe/") -> list[Finding]:
    """Leaves only a marker object below ``prefix``."""
    findings = _test_permissions(store, prefix)
    if any(finding.severity == "error" for finding in findings):
        return findings
    try:
        findings += _clock_difference_findings(store, now_ms)
        findings += find_unsafe_concurrent_creates(store, prefix) or _invalid_listing_findings(store, prefix)
        if isinstance(store, StoreWithQueryableSettings):
            findings += store.inspect_store_settings(now_ms())
    except CompactorError as error:
        findings.append(_finding_from_store_error(error, store))
    return findings


def find_ignored_condition(store: ObjectStore, prefix: str) -> Finding | None:
    """Create one key twice, and again by an upload in parts. Return a finding if the existing object is overwritten or deleted. The key is
    then deleted; without permission a few bytes stay.
    """
    key = f"{prefix}{secrets.token_hex(8)}-twice"
    store.create(key, b"first")
    try:
        try:
            store.create(key, b"second")
        except AlreadyExists:
            pass
        else:
            return _ignored_condition_finding(store, "conditional-puts", "an object that existed was created once more")
        try:
            if _multipart_overwrites(store, key):
                return _ignored_condition_finding(store, "conditional-multipart", "an upload in parts wrote over an existing object")
        except NotFound:
            return Finding(
                "error",
                "multipart-abort",
                "",
                f"{store.url} deletes what exists: an upload in parts to an existing key was refused and aborted, and the object is gone",
                "A compactor that loses a race would delete the winner's records. Nothing else was changed. "
                "Use another store (docs/stores.md names those that were tried)",
            )
    finally:
        with suppress(Refused):
            store.delete([key])
    return None


def _multipart_overwrites(store: ObjectStore, key: str) -> bool:
    # Try another request than small creates: some servers check the condition only of those. The object holds ``first``. Raises NotFound if
    # it is gone.
    if not isinstance(store, StoreWithTestableConditionalCreates) or not store_kind(store.url).can.multipart:
        return False
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "parts").write_bytes(b"in parts")
        with suppress(AlreadyExists, PreconditionFailed, NoSuchUpload):
            store.upload_if_absent(key, FileRange(Path(folder) / "parts", 0, 8))
    # Of a range no checksum is compared: such a server may have kept that of the object which it wrote over.
    return store.get(key, 0, 5) != b"first"


def _ignored_condition_finding(store: ObjectStore, kind: str, detail: str) -> Finding:
    return Finding(
        "error",
        kind,
        "",
        f"{store.url} ignores conditional requests: {detail} ({store_kind(store.url).can.create_only})",
        "Two compactors would lead at once and publish over each other. Nothing was changed. "
        "Use a store with atomic conditional puts (`config check` tries it)",
    )


def find_unsafe_concurrent_creates(
    store: ObjectStore, prefix: str, threads: int = PROBE_THREADS, race_count: int = PROBE_ROUNDS
) -> list[Finding]:
    """Let ``threads`` writers create one key at once. Return at most one finding: a race without exactly one winner whose content was
    stored.

    If the marker of an earlier pass exists, ``find_ignored_condition`` is repeated, because it may have come with a copy of another store.
    """
    ignored = find_ignored_condition(store, prefix)
    if ignored is not None:
        return [ignored]
    try:
        store.head(prefix + MARKER)
    except NotFound:
        pass
    else:
        return []
    for number in range(race_count):
        key = f"{prefix}{secrets.token_hex(8)}-race-{number}"
        try:
            winners = _successful_contents(store, key, threads)
            content = store.get(key)
        finally:
            store.delete([key])
        if len(winners) != 1 or content != winners[0]:
            detail = f"of {threads} writers that created one object at once {len(winners)} were answered that they succeeded"
            if len(winners) == 1:
                detail = "a writer was answered that it succeeded, and the object is another writer's"
            return [
                Finding(
                    "error",
                    "conditional-puts",
                    "",
                    f"{store.url}: {detail}",
                    "Two compactors would publish over each other. Use a store with atomic conditional puts (If-None-Match)",
                )
            ]
    try:
        store.create(prefix + MARKER, b"conditional puts were raced and held\n")
    except AlreadyExists:
        pass
    return []


def _invalid_listing_findings(store: ObjectStore, prefix: str) -> list[Finding]:
    # Return a list with one finding if a store on a server lists eight keys, two on a page, in another order than that of their bytes, or
    # not all of them. The keys differ where servers that sort by path segment put ``/`` before ``-``. A listing without order or end would
    # hide objects. It is a warning if only a listing ends early that begins after a key in a folder beside whose name others lie, as on
    # MinIO.
    if not isinstance(store, StoreWithTestableConditionalCreates):
        return []
    root = f"{prefix}{secrets.token_hex(8)}-list"
    keys = [root + end for end in (" b/1", "!", "-b/1", ".b", "/1", "3", "4", "5")]
    paged = store.with_list_page(2)
    inside, after_inside = keys[4], list[str]()
    try:
        for key in keys:
            store.create(key, b"listed")
        listings = [[info.key for info in paged.list(root, after)] for after in ("", keys[0])]
        detail = "" if listings == [keys, keys[1:]] else f"of {keys} it lists {listings[0]}, and {listings[1]} after the first one"
        after_inside = [info.key for info in paged.list(root, inside)]
    except StoreError as error:
        detail = error.message
    finally:
        store.delete(keys)
    if detail:
        hint = "Objects would be overlooked, and their deletion, too. Use another store (docs/stores.md names those that were tried)"
        return [Finding("error", "listing", "", f"{store.url} does not list eight keys, two on a page, as S3 does: {detail}", hint)]
    if after_inside != keys[5:]:
        detail = f"a listing of {store.url} that begins after {inside} ends early: {after_inside} instead of {keys[5:]}"
        hint = (
            "A listing that is repeated from its middle may overlook objects where names of partitions lie beside each other, such as"
            " orders-1 and orders-1.eu-0: use another version of the store, or avoid such topic names"
        )
        return [Finding("warning", "listing", "", detail, hint)]
    return []


def does_delete_free_space(store: ObjectStore) -> bool | None:
    if not isinstance(store, StoreWithQueryableSettings):
        kind = store_kind_of_scheme(store.url)
        return kind.can.does_delete_free_space if kind else None
    try:
        return store.does_delete_free_space()
    except StoreError:
        return None


def _successful_contents(store: ObjectStore, key: str, threads: int) -> list[bytes]:
    barrier = threading.Barrier(threads)

    def create_content(writer_number: int) -> bytes | None:
        content = f"writer {writer_number}".encode()
        barrier.wait()
        try:
            store.create(key, content)
        except AlreadyExists:
            return None
        return content

    with ThreadPoolExecutor(threads) as pool:
        return [content for content in pool.map(create_content, range(threads)) if content is not None]


def _test_permissions(store: ObjectStore, prefix: str) -> list[Finding]:
    key = f"{prefix}{secrets.token_hex(8)}-permissions"
    tries: list[tuple[str, Callable[[], object]]] = [
        ("write", lambda: store.create(key, b"probe")),
        ("overwrite", lambda: store.put(key, b"probe")),
        ("read", lambda: store.get(key)),
        ("list", lambda: list(store.list(prefix))),
        ("delete", lambda: store.delete([key])),
    ]
    findings = []
    for verb, attempt in tries:
        try:
            attempt()
        except NotFound:
            continue  # it could not be written: that is already said
        except Refused as error:
            hint = f"{error.hint} ({store.required_permission_name(verb)})" if isinstance(store, StoreWithQueryableSettings) else error.hint
            findings.append(Finding("error", f"cannot-{verb}", "", error.message, hint))
            if "denied" not in error.message.lower():
                return findings  # no such bucket, wrong region, ...: all others would say the same
        except CompactorError as error:
            return [*findings, _finding_from_store_error(error, store)]
    return findings


def _clock_difference_findings(store: ObjectStore, now_ms: Callable[[], int]) -> list[Finding]:
    before = now_ms()
    there = store.clock_ms()
    difference = there - (before + now_ms()) // 2
    if abs(difference) < _SKEW_WARNING_MS:
        return []
    side = "ahead of" if difference > 0 else "behind"
    return [
        Finding(
            "warning",
            "clock",
            "",
            f"the clock of {store.url} is {abs(difference) / 1000:.0f} s {side} this machine's",
            "Set the clocks (NTP). Stores refuse requests from 15 minutes on; leadership does not depend on clocks",
        )
    ]


def _finding_from_store_error(error: CompactorError, store: ObjectStore) -> Finding:
    return Finding("error", "store", "", f"{store.url}: {error.message}", error.hint)
