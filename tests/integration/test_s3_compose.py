"""Objects put together from copied ranges on S3: what is asked of the server, and what may go wrong where it hurts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass
class Scene:
    """A store behind a proxy with an object to copy from, and a local file that ends what is put together."""

    proxy: FaultProxy
    bucket: Bucket
    store: ObjectStore
    source: ObjectRangeToCopy
    local: FileRange


@pytest.fixture
def scene(proxy: FaultProxy, bucket: Bucket, store: ObjectStore, source: ObjectRangeToCopy, local: FileRange) -> Scene:
    return Scene(proxy, bucket, store, source, local)


EXPECTED = SOURCE[1:-1] + b"the end"


def left_behind(bucket: Bucket, store: ObjectStore) -> list[str]:
    begun = [upload["Key"] for upload in bucket.server.client().list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])]
    return begun + [info.key for info in store.list("") if info.key != "source"]


def test_copied_bytes_are_not_sent(scene: Scene, counters: RequestCounters) -> None:
    known = replace(scene.source, crc32c=google_crc32c.value(SOURCE[1:-1]))
    before = counters.usage()
    read, written, requests = scene.proxy.seen.bytes_read, scene.proxy.seen.bytes_written, scene.proxy.seen.requests.copy()
    scene.store.compose("k", [known, scene.local])
    used = counters.usage().usage_since(before)
    has_receipts = "get" not in used.requests
    read_back = {} if has_receipts else {"get": -(-known.length // PART)}
    assert used.requests == {"copy": 1, "head": 3, "multipart": 2, "put": 1} | read_back
    assert (used.bytes_read, used.bytes_written) == (0 if has_receipts else known.length, 7)
    seen = dict(scene.proxy.seen.requests - requests), scene.proxy.seen.bytes_read - read, scene.proxy.seen.bytes_written - written
    assert seen == (used.requests, used.bytes_read, used.bytes_written)
    assert scene.store.get("k") == EXPECTED


def test_without_a_receipt_every_copied_byte_is_compared(
    scene: Scene, proxied: tuple[FaultProxy, Bucket], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit in the midst of a range, where neither its first nor its last bytes tell."""
    if "versitygw" in request.node.name:
        pytest.skip("it gives receipts")
    complete = MultipartUpload.complete_upload

    def damaged(upload: MultipartUpload, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        answer = complete(upload, parts)
        scene.bucket.open().put("k", EXPECTED[:PART] + bytes([EXPECTED[PART] ^ 1]) + EXPECTED[PART + 1 :])
        return answer

    monkeypatch.setattr(MultipartUpload, "complete_upload", damaged)
    for piece in (scene.source, replace(scene.source, crc32c=google_crc32c.value(SOURCE[1:-1]))):
        with pytest.raises(CopyDiffers, match="source: the store has copied other bytes"):
            scene.store.compose("k", [piece, scene.local])
        assert left_behind(scene.bucket, scene.store) == []


def test_answers_that_are_lost_late_or_refused_for_now(scene: Scene) -> None:
    scene.proxy.faults = [Fault(kind, ("copy",), times=1) for kind in ("lost", "reset", "cut", "slow_down", "internal", "late")]
    scene.store.compose("k", [scene.source, scene.local])
    assert sum(scene.proxy.seen.faults.values()) == 6
    assert scene.store.get("k") == EXPECTED
    assert left_behind(scene.bucket, scene.store) == ["k"]


def test_an_answer_to_the_completion_that_is_lost(scene: Scene) -> None:
    scene.proxy.faults = [Fault("lost", ("multipart",), match=r"uploadId=", times=1)]
    made = scene.store.compose("k", [scene.source, scene.local], {"batches": "abc"})
    assert scene.proxy.seen.faults == {"lost": 1}
    assert (made.size, dict(scene.store.head("k").metadata)) == (len(EXPECTED), {"batches": "abc"})
    assert scene.store.get("k") == EXPECTED
    assert left_behind(scene.bucket, scene.store) == ["k"]


def test_a_server_that_does_not_copy_is_not_asked_again(scene: Scene) -> None:
    other = scene.bucket.open(transfers=PARTS, retries=QUICK)
    assert all(one.server_copy_limits for one in (scene.store, other))
    scene.proxy.faults = [Fault("unknown", ("copy",))]
    with pytest.raises(CannotCopy, match=r"cannot copy a range of .*/source: .*NotImplemented"):
        scene.store.compose("k", [scene.source, scene.local])
    assert scene.proxy.seen.requests["copy"] == 1
    assert left_behind(scene.bucket, scene.store) == []
    assert [one.server_copy_limits for one in (scene.store, other)] == [None, None], (
        "all stores of this process in one bucket learn from each other"
    )


def test_a_copy_that_may_not_be_says_nothing_of_others(scene: Scene) -> None:
    scene.proxy.faults = [Fault("denied", ("copy",))]
    with pytest.raises(Refused, match="access denied"):
        scene.store.compose("k", [scene.source, scene.local])
    assert left_behind(scene.bucket, scene.store) == []
    assert scene.store.server_copy_limits is not None


def test_a_source_that_changes_between_two_copies(scene: Scene) -> None:
    """versitygw refuses the second; moto, like some servers, does not know the condition: then the second look at the source tells."""
    half = ObjectRangeToCopy("source", 0, PART, scene.source.etag)
    other = scene.bucket.open()

    def change(request: str, target: str) -> None:
        if request == "copy" and "partNumber=2" in target:
            scene.proxy.before = lambda *_: None
            other.put("source", SOURCE[::-1])

    scene.proxy.before = change
    with pytest.raises(Unavailable, match="source is not the version that was to be copied"):
        scene.store.compose("k", [half, half, scene.local])
    assert left_behind(scene.bucket, scene.store) == []


def test_the_server_is_told_which_version_to_copy(scene: Scene) -> None:
    """For servers that know the condition: they refuse at once, before a wrong version is copied."""
    scene.store.compose("k", [scene.source, scene.local])
    assert [headers["x-amz-copy-source-if-match"] for request, headers in scene.proxy.headers if request == "copy"] == [
        f'"{scene.source.etag}"'
    ]


def test_a_source_that_changes_after_its_last_copy(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no request of the copy can tell: only the second look at the source does."""
    send_parts = MultipartUpload.send_parts

    def changed(upload: MultipartUpload, parts: Sequence[Any]) -> list[dict[str, Any]]:
        done = send_parts(upload, parts)
        scene.bucket.open().put("source", SOURCE[::-1])
        return done

    monkeypatch.setattr(MultipartUpload, "send_parts", changed)
    with pytest.raises(Unavailable, match="source is not the version that was to be copied"):
        scene.store.compose("k", [replace(scene.source, crc32c=google_crc32c.value(SOURCE[1:-1])), scene.local])
    assert left_behind(scene.bucket, scene.store) == []


def test_a_loser_s_parts_are_freed(scene: Scene) -> None:
    other = scene.bucket.open()

    def overtake(request: str, target: str) -> None:
        if request == "multipart" and "uploadId" in target:
            scene.proxy.before = lambda *_: None
            other.create("k", b"winner")

    scene.proxy.before = overtake
    with pytest.raises(AlreadyExists):
        scene.store.compose("k", [scene.source, scene.local])
    assert scene.store.get("k") == b"winner"
    assert left_behind(scene.bucket, scene.store) == ["k"]


def test_a_part_that_is_too_small_is_a_bug_before_anything_is_asked(scene: Scene) -> None:
    asked = scene.proxy.seen.requests.total()
    with pytest.raises(ValueError, match="a part of 7 bytes that is not the last"):
        scene.store.compose("k", [scene.local, scene.source])
    assert scene.proxy.seen.requests.total() == asked


@pytest.mark.parametrize("moved", [1, -1])
def test_a_server_that_copies_something_else(scene: Scene, monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    """Without a receipt it is noticed by the edges of the range; with one by its checksum."""
    monkeypatch.setattr(s3_transfer, "range_header", lambda start, length: range_header(start + moved, length))
    known = replace(scene.source, crc32c=google_crc32c.value(SOURCE[1:-1]))
    with pytest.raises(CopyDiffers):
        scene.store.compose("k", [known, scene.local])
    assert left_behind(scene.bucket, scene.store) == []


@pytest.mark.slow
class TestReceipts:
    """moto tells no checksum of what it has copied."""

    @pytest.fixture
    def proxied(self, versity_proxy: tuple[FaultProxy, Bucket]) -> tuple[FaultProxy, Bucket]:
        return versity_proxy

    @pytest.mark.parametrize("flip", [0, 1])
    def test_are_compared_with_what_the_caller_knows(self, scene: Scene, flip: int) -> None:
        known = ObjectRangeToCopy("source", 5, PART, scene.source.etag, google_crc32c.value(SOURCE[5 : 5 + PART]) ^ flip)
        if not flip:
            scene.store.compose("k", [scene.source, known, scene.local])
            assert scene.store.get("k") == SOURCE[1:-1] + SOURCE[5 : 5 + PART] + b"the end"
            return
        with pytest.raises(CopyDiffers, match="another checksum than it must have"):
            scene.store.compose("k", [scene.source, known, scene.local])
        assert left_behind(scene.bucket, scene.store) == []
