"""Objects put together from copied ranges on S3: what is asked of the server, and what may go wrong where it hurts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from compactor.adapters.stores import s3 as s3_transfer
from compactor.adapters.stores.s3 import MultipartUpload
from compactor.adapters.stores.s3_requests import range_header
from compactor.errors import AlreadyExists, CannotCopy, CopyDiffers, Refused, Unavailable
from compactor.storage.port import FileRange, ObjectRangeToCopy, ObjectStore
from compactor.storage.settings import RetrySettings, TransferSettings
from compactor.storage.wrappers import RequestCounters
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import Bucket

PART = 5 << 20
PARTS = TransferSettings(part_bytes=PART, threads=3)
QUICK = RetrySettings(deadline_s=30, base_s=0.001, cap_s=0.02)
SOURCE = bytes(range(251)) * (3 * PART // 251 + 1)


@pytest.fixture(params=["moto", pytest.param("versitygw", marks=pytest.mark.slow)])
def proxied(request: pytest.FixtureRequest) -> tuple[FaultProxy, Bucket]:
    proxy: tuple[FaultProxy, Bucket] = request.getfixturevalue("s3_proxy" if request.param == "moto" else "versity_proxy")
    return proxy


@pytest.fixture
def proxy(proxied: tuple[FaultProxy, Bucket]) -> FaultProxy:
    return proxied[0]


@pytest.fixture
def bucket(proxied: tuple[FaultProxy, Bucket]) -> Bucket:
    return proxied[1]


@pytest.fixture
def counters() -> RequestCounters:
    return RequestCounters()


@pytest.fixture
def store(bucket: Bucket, counters: RequestCounters) -> ObjectStore:
    return bucket.open(transfers=PARTS, retries=QUICK, counters=counters)


@pytest.fixture
def source(store: ObjectStore) -> ObjectRangeToCopy:
    """All of an object but its first and last bytes."""
    store.create("source", SOURCE)
    return ObjectRangeToCopy("source", 1, len(SOURCE) - 2, store.head("source").etag)


@pytest.fixture
def local(tmp_path: Path) -> FileRange:
    (tmp_path / "local").write_bytes(b"<the end>")
    return FileRange(tmp_path / "local", 1, 7)


EXPECTED = SOURCE[1:-1] + b"the end"


def left_behind(bucket: Bucket, store: ObjectStore) -> list[str]:
    begun = [upload["Key"] for upload in bucket.server.client().list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])]
    return begun + [info.key for info in store.list("") if info.key != "source"]


def test_copied_bytes_are_not_sent(
    proxy: FaultProxy, store: ObjectStore, source: ObjectRangeToCopy, local: FileRange, counters: RequestCounters
) -> None:
    known = replace(source, crc32c=google_crc32c.value(SOURCE[1:-1]))
    before = counters.usage()
    read, written, requests = proxy.seen.bytes_read, proxy.seen.bytes_written, proxy.seen.requests.copy()
    store.compose("k", [known, local])
    used = counters.usage().usage_since(before)
    has_receipts = "get" not in used.requests
    read_back = {} if has_receipts else {"get": -(-known.length // PART)}
    assert used.requests == {"copy": 1, "head": 3, "multipart": 2, "put": 1} | read_back
    assert (used.bytes_read, used.bytes_written) == (0 if has_receipts else known.length, 7)
    seen = dict(proxy.seen.requests - requests), proxy.seen.bytes_read - read, proxy.seen.bytes_written - written
    assert seen == (used.requests, used.bytes_read, used.bytes_written)
    assert store.get("k") == EXPECTED


def test_without_a_receipt_every_copied_byte_is_compared(
    proxied: tuple[FaultProxy, Bucket],
    store: ObjectStore,
    bucket: Bucket,
    source: ObjectRangeToCopy,
    local: FileRange,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One bit in the midst of a range, where neither its first nor its last bytes tell."""
    if "versitygw" in request.node.name:
        pytest.skip("it gives receipts")
    complete = MultipartUpload.complete_upload

    def damaged(upload: MultipartUpload, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        answer = complete(upload, parts)
        bucket.open().put("k", EXPECTED[:PART] + bytes([EXPECTED[PART] ^ 1]) + EXPECTED[PART + 1 :])
        return answer

    monkeypatch.setattr(MultipartUpload, "complete_upload", damaged)
    for piece in (source, replace(source, crc32c=google_crc32c.value(SOURCE[1:-1]))):
        with pytest.raises(CopyDiffers, match="source: the store has copied other bytes"):
            store.compose("k", [piece, local])
        assert left_behind(bucket, store) == []


def test_answers_that_are_lost_late_or_refused_for_now(
    proxy: FaultProxy, store: ObjectStore, bucket: Bucket, source: ObjectRangeToCopy, local: FileRange
) -> None:
    proxy.faults = [Fault(kind, ("copy",), times=1) for kind in ("lost", "reset", "cut", "slow_down", "internal", "late")]
    store.compose("k", [source, local])
    assert sum(proxy.seen.faults.values()) == 6
    assert store.get("k") == EXPECTED
    assert left_behind(bucket, store) == ["k"]


def test_an_answer_to_the_completion_that_is_lost(
    proxy: FaultProxy, store: ObjectStore, bucket: Bucket, source: ObjectRangeToCopy, local: FileRange
) -> None:
    proxy.faults = [Fault("lost", ("multipart",), match=r"uploadId=", times=1)]
    made = store.compose("k", [source, local], {"batches": "abc"})
    assert proxy.seen.faults == {"lost": 1}
    assert (made.size, dict(store.head("k").metadata)) == (len(EXPECTED), {"batches": "abc"})
    assert store.get("k") == EXPECTED
    assert left_behind(bucket, store) == ["k"]


def test_a_server_that_does_not_copy_is_not_asked_again(
    proxy: FaultProxy, store: ObjectStore, bucket: Bucket, source: ObjectRangeToCopy, local: FileRange
) -> None:
    other = bucket.open(transfers=PARTS, retries=QUICK)
    assert all(one.server_copy_limits for one in (store, other))
    proxy.faults = [Fault("unknown", ("copy",))]
    with pytest.raises(CannotCopy, match=r"cannot copy a range of .*/source: .*NotImplemented"):
        store.compose("k", [source, local])
    assert proxy.seen.requests["copy"] == 1
    assert left_behind(bucket, store) == []
    assert [one.server_copy_limits for one in (store, other)] == [None, None], (
        "all stores of this process in one bucket learn from each other"
    )


def test_a_copy_that_may_not_be_says_nothing_of_others(
    proxy: FaultProxy, store: ObjectStore, bucket: Bucket, source: ObjectRangeToCopy, local: FileRange
) -> None:
    proxy.faults = [Fault("denied", ("copy",))]
    with pytest.raises(Refused, match="access denied"):
        store.compose("k", [source, local])
    assert left_behind(bucket, store) == []
    assert store.server_copy_limits is not None


def test_a_source_that_changes_between_two_copies(
    proxy: FaultProxy, store: ObjectStore, bucket: Bucket, source: ObjectRangeToCopy, local: FileRange
) -> None:
    """versitygw refuses the second; moto, like some servers, does not know the condition: then the second look at the source tells."""
    half = ObjectRangeToCopy("source", 0, PART, source.etag)
    other = bucket.open()

    def change(request: str, target: str) -> None:
        if request == "copy" and "partNumber=2" in target:
            proxy.before = lambda *_: None
            other.put("source", SOURCE[::-1])

    proxy.before = change
    with pytest.raises(Unavailable, match="source is not the version that was to be copied"):
        store.compose("k", [half, half, local])
    assert left_behind(bucket, store) == []


def test_the_server_is_told_which_version_to_copy(
    proxy: FaultProxy, store: ObjectStore, source: ObjectRangeToCopy, local: FileRange
) -> None:
    """For servers that know the condition: they refuse at once, before a wrong version is copied."""
    store.compose("k", [source, local])
    assert [headers["x-amz-copy-source-if-match"] for request, headers in proxy.headers if request == "copy"] == [f'"{source.etag}"']


def test_a_source_that_changes_after_its_last_copy(
    proxy: FaultProxy, store: ObjectStore, bucket: Bucket, source: ObjectRangeToCopy, local: FileRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here no request of the copy can tell: only the second look at the source does."""
    send_parts = MultipartUpload.send_parts

    def changed(upload: MultipartUpload, parts: Sequence[Any]) -> list[dict[str, Any]]:
        done = send_parts(upload, parts)
        bucket.open().put("source", SOURCE[::-1])
        return done

    monkeypatch.setattr(MultipartUpload, "send_parts", changed)
    with pytest.raises(Unavailable, match="source is not the version that was to be copied"):
        store.compose("k", [replace(source, crc32c=google_crc32c.value(SOURCE[1:-1])), local])
    assert left_behind(bucket, store) == []


def test_a_loser_s_parts_are_freed(
    proxy: FaultProxy, store: ObjectStore, bucket: Bucket, source: ObjectRangeToCopy, local: FileRange
) -> None:
    other = bucket.open()

    def overtake(request: str, target: str) -> None:
        if request == "multipart" and "uploadId" in target:
            proxy.before = lambda *_: None
            other.create("k", b"winner")

    proxy.before = overtake
    with pytest.raises(AlreadyExists):
        store.compose("k", [source, local])
    assert store.get("k") == b"winner"
    assert left_behind(bucket, store) == ["k"]


def test_a_part_that_is_too_small_is_a_bug_before_anything_is_asked(
    proxy: FaultProxy, store: ObjectStore, source: ObjectRangeToCopy, local: FileRange
) -> None:
    asked = proxy.seen.requests.total()
    with pytest.raises(ValueError, match="a part of 7 bytes that is not the last"):
        store.compose("k", [local, source])
    assert proxy.seen.requests.total() == asked


@pytest.mark.parametrize("moved", [1, -1])
def test_a_server_that_copies_something_else(
    store: ObjectStore, bucket: Bucket, source: ObjectRangeToCopy, local: FileRange, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    """Without a receipt it is noticed by the edges of the range; with one by its checksum."""
    monkeypatch.setattr(s3_transfer, "range_header", lambda start, length: range_header(start + moved, length))
    known = replace(source, crc32c=google_crc32c.value(SOURCE[1:-1]))
    with pytest.raises(CopyDiffers):
        store.compose("k", [known, local])
    assert left_behind(bucket, store) == []


@pytest.mark.slow
class TestReceipts:
    """moto tells no checksum of what it has copied."""

    @pytest.fixture
    def proxied(self, versity_proxy: tuple[FaultProxy, Bucket]) -> tuple[FaultProxy, Bucket]:
        return versity_proxy

    @pytest.mark.parametrize("flip", [0, 1])
    def test_are_compared_with_what_the_caller_knows(
        self, store: ObjectStore, bucket: Bucket, source: ObjectRangeToCopy, local: FileRange, flip: int
    ) -> None:
        known = ObjectRangeToCopy("source", 5, PART, source.etag, google_crc32c.value(SOURCE[5 : 5 + PART]) ^ flip)
        if not flip:
            store.compose("k", [source, known, local])
            assert store.get("k") == SOURCE[1:-1] + SOURCE[5 : 5 + PART] + b"the end"
            return
        with pytest.raises(CopyDiffers, match="another checksum than it must have"):
            store.compose("k", [source, known, local])
        assert left_behind(bucket, store) == []
