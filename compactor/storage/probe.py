"""What `config check` asks of a store: may we, can it, and does deleting free anything there.

The important question is whether *create-if-absent* is atomic: everything about leadership rests on it. It is answered by a race
of the store with itself, once per store; a marker object remembers the result.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from compactor.errors import AlreadyExists, CompactorError, NotFound, Refused, StoreError
from compactor.storage.findings import StoreFinding
from compactor.storage.port import ObjectStore
from compactor.storage.s3 import S3Store

MARKER = "conditional-puts-raced-1"
THREADS = 32
ROUNDS = 8
_SKEW_WARNING_MS = 60_000


def probe(store: ObjectStore, now_ms: Callable[[], int], prefix: str = ".tiered-compactor/probe/") -> list[StoreFinding]:
    """Leaves nothing but the marker below ``prefix``. Raises nothing that the store says: that is what findings are for."""
    findings = _permissions(store, prefix)
    if any(finding.severity == "error" for finding in findings):
        return findings
    try:
        findings += _clock(store, now_ms)
        findings += conditional_puts(store, prefix)
        if isinstance(store, S3Store):
            from compactor.storage.probe_s3 import bucket_findings

            findings += bucket_findings(store, prefix, now_ms())
    except CompactorError as error:
        findings.append(_broken(error, store))
    return findings


def conditional_puts(store: ObjectStore, prefix: str, threads: int = THREADS, rounds: int = ROUNDS) -> list[StoreFinding]:
    """The race: every round ``threads`` writers create one key, and exactly one may win. Remembered where it went well."""
    try:
        store.head(prefix + MARKER)
    except NotFound:
        pass
    else:
        return []
    for number in range(rounds):
        key = f"{prefix}{secrets.token_hex(8)}-race-{number}"
        try:
            winners = _race(store, key, threads)
            content = store.get(key)
        finally:
            store.delete([key])
        if len(winners) != 1 or content != winners[0]:
            said = f"of {threads} writers that created one object at once {len(winners)} were told that they won"
            if len(winners) == 1:
                said = "one of the writers that created an object at once was told that it won, and the object is another's"
            return [
                StoreFinding.error(
                    "conditional-puts",
                    f"{store.url}: {said}",
                    "Two compactors would publish over each other. Use a store with atomic conditional puts (If-None-Match)",
                )
            ]
    try:
        store.create(prefix + MARKER, b"conditional puts were raced and held\n")
    except AlreadyExists:
        pass
    return []


def deletes_free_space(store: ObjectStore) -> bool | None:
    """Whether deleting objects saves anything there; None where the store does not say. Two requests on S3, none elsewhere."""
    if not isinstance(store, S3Store):
        return True if store.url.startswith("file:") else None
    from compactor.storage.probe_s3 import bucket_state

    try:
        return bucket_state(store).deletes_free_space
    except StoreError:
        return None


def _race(store: ObjectStore, key: str, threads: int) -> list[bytes]:
    barrier = threading.Barrier(threads)

    def one(number: int) -> bytes | None:
        content = f"writer {number}".encode()
        barrier.wait()
        try:
            store.create(key, content)
        except AlreadyExists:
            return None
        return content

    with ThreadPoolExecutor(threads) as pool:
        return [content for content in pool.map(one, range(threads)) if content is not None]


def _permissions(store: ObjectStore, prefix: str) -> list[StoreFinding]:
    """Tries each kind of request on an object of its own; goes on where access is denied, so that all that is missing is named at once."""
    key = f"{prefix}{secrets.token_hex(8)}-permissions"
    tries: list[tuple[str, str, Callable[[], object]]] = [
        ("write", "s3:PutObject", lambda: store.create(key, b"probe")),
        ("overwrite", "s3:PutObject", lambda: store.put(key, b"probe")),
        ("read", "s3:GetObject", lambda: store.get(key)),
        ("list", "s3:ListBucket", lambda: list(store.list(prefix))),
        ("delete", "s3:DeleteObject", lambda: store.delete([key])),
    ]
    findings = []
    for verb, action, attempt in tries:
        try:
            attempt()
        except NotFound:
            continue  # it could not be written: that is already said
        except Refused as error:
            hint = f"{error.hint} ({action})" if isinstance(store, S3Store) else error.hint
            findings.append(StoreFinding.error(f"cannot-{verb}", error.message, hint))
            if "denied" not in error.message.lower():
                return findings  # no such bucket, wrong region, ...: all others would say the same
        except CompactorError as error:
            return [*findings, _broken(error, store)]
    return findings


def _clock(store: ObjectStore, now_ms: Callable[[], int]) -> list[StoreFinding]:
    before = now_ms()
    there = store.clock_ms()
    difference = there - (before + now_ms()) // 2
    if abs(difference) < _SKEW_WARNING_MS:
        return []
    side = "ahead of" if difference > 0 else "behind"
    return [
        StoreFinding.warning(
            "clock",
            f"the clock of {store.url} is {abs(difference) / 1000:.0f} s {side} this machine's",
            "Set the clocks (NTP). S3 refuses requests from 15 minutes on; leadership does not depend on clocks",
        )
    ]


def _broken(error: CompactorError, store: ObjectStore) -> StoreFinding:
    return StoreFinding.error("store", f"{store.url}: {error.message}", error.hint)
