"""One fault at a time, exactly where it hurts: lost answers, objects that change, bodies that lie, credentials that end."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compactor.adapters.stores.s3 import S3Store
from compactor.adapters.stores.s3_requests import S3RequestClient
from compactor.errors import AlreadyExists, CompactorError, NotFound, Refused, Unavailable
from compactor.storage.settings import RetrySettings, TransferSettings
from compactor.storage.wrappers import RequestCounters, Retrier
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import ROOT, Bucket

PART = 5 << 20
PARTS = TransferSettings(part_bytes=PART, threads=3)
QUICK = RetrySettings(deadline_s=30, base_s=0.001, cap_s=0.02)
Changed = Callable[[bytes], bytes]


@pytest.fixture
def store(bucket: Bucket) -> S3Store:
    store = bucket.open(transfers=PARTS, retries=QUICK)
    assert isinstance(store, S3Store)
    return store


def large_file(path: Path, size: int = 2 * PART + 77) -> tuple[Path, bytes]:
    data = os.urandom(1024) * (size // 1024 + 1)
    path.write_bytes(data[:size])
    return path, data[:size]


def uploads(bucket: Bucket) -> list[str]:
    return [upload["Key"] for upload in bucket.server.client().list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])]


class TestLostAnswers:
    """The write is done, its answer is dropped, the repetition is told 412."""

    def test_of_a_put_is_one_s_own_success(self, proxy: FaultProxy, store: S3Store) -> None:
        proxy.faults = [Fault("lost", ("put",), times=1)]
        made = store.create("k", b"mine", {"a": "b"})
        assert proxy.seen.requests["put"] == 2
        assert (store.get("k"), dict(made.metadata)) == (b"mine", {"a": "b"})
        with pytest.raises(AlreadyExists):
            store.create("k", b"mine", {"a": "b"})

    def test_of_the_completion_is_one_s_own_success(self, proxy: FaultProxy, store: S3Store, bucket: Bucket, tmp_path: Path) -> None:
        path, data = large_file(tmp_path / "in")
        proxy.faults = [Fault("lost", ("multipart",), match=r"uploadId=", times=1)]
        made = store.create_from_file("k", path, {"sha256": "abc"})
        assert proxy.seen.faults == {"lost": 1}
        assert (made.size, dict(store.head("k").metadata)) == (len(data), {"sha256": "abc"})
        assert store.get("k") == data
        assert uploads(bucket) == []

    def test_another_s_equal_bytes_are_not_one_s_own(self, proxy: FaultProxy, bucket: Bucket) -> None:
        """The first attempt never arrived; before the second somebody else wrote the very same bytes."""
        other = bucket.open()

        def meanwhile(_: float) -> None:
            other.create("lock", b"same")

        retrier = Retrier(QUICK, sleep=meanwhile)
        store = S3Store(S3RequestClient(bucket.name, f"{bucket.prefix}/", bucket.settings, retrier, RequestCounters()), PARTS)
        proxy.faults = [Fault("reset", ("put",), times=1)]
        with pytest.raises(AlreadyExists):
            store.create("lock", b"same")

    def test_of_a_delete_does_no_harm(self, proxy: FaultProxy, store: S3Store) -> None:
        store.create("k", b"")
        proxy.faults = [Fault("lost", ("delete",), times=2)]
        store.delete(["k", "never"])
        assert [info.key for info in store.list("")] == []


class TestUploads:
    def test_a_refused_part_leaves_no_object_and_no_upload(self, proxy: FaultProxy, store: S3Store, bucket: Bucket, tmp_path: Path) -> None:
        path, _ = large_file(tmp_path / "in")
        proxy.faults = [Fault("denied", ("put",), match="partNumber=2")]
        with pytest.raises(Refused, match="cannot write .*/k.*access denied"):
            store.create_from_file("k", path)
        assert [info.key for info in store.list("")] == []
        assert uploads(bucket) == []

    def test_a_loser_s_parts_are_freed(self, proxy: FaultProxy, store: S3Store, bucket: Bucket, tmp_path: Path) -> None:
        path, _ = large_file(tmp_path / "in")
        other = bucket.open()

        def overtake(request: str, target: str) -> None:
            if request == "multipart" and "uploadId" in target:
                proxy.before = lambda *_: None
                other.create("k", b"winner")

        proxy.before = overtake
        with pytest.raises(AlreadyExists):
            store.create_from_file("k", path)
        assert store.get("k") == b"winner"
        assert uploads(bucket) == []

    def test_what_exists_is_not_uploaded_again(self, proxy: FaultProxy, store: S3Store, tmp_path: Path) -> None:
        path, _ = large_file(tmp_path / "in")
        store.create("k", b"x")
        sent = proxy.seen.bytes_written
        with pytest.raises(AlreadyExists):
            store.create_from_file("k", path)
        assert proxy.seen.bytes_written == sent

    def test_bytes_that_arrive_damaged_are_sent_again(self, proxy: FaultProxy, store: S3Store, bucket: Bucket, tmp_path: Path) -> None:
        """versitygw refuses them; moto, like some servers, takes them: then its ETag tells."""
        path, data = large_file(tmp_path / "in")
        store.create("first", b"hello")
        proxy.faults = [Fault("flip_sent", ("put",), times=3)]
        made = store.create("small", b"world" * 10, {"a": "b"})
        assert (store.get("small"), dict(made.metadata)) == (b"world" * 10, {"a": "b"})
        assert proxy.seen.faults == {"flip_sent": 3}
        proxy.faults = [Fault("flip_sent", ("put",), times=3)]
        store.create_from_file("large", path)
        assert proxy.seen.faults == {"flip_sent": 6}
        assert store.get("large") == data
        assert uploads(bucket) == []

    def test_a_killed_process_leaves_no_object(self, proxy: FaultProxy, store: S3Store, bucket: Bucket, tmp_path: Path) -> None:
        path, data = large_file(tmp_path / "in")
        program = """
            import sys
            from pathlib import Path
            from compactor.storage.factory import open_store
            from compactor.config.settings import Settings
            from compactor.config.sections import S3Settings
            from compactor.storage.settings import TransferSettings
            settings = S3Settings(endpoint_url=sys.argv[2], region="us-east-1")
            store = open_store(sys.argv[1], settings=Settings(s3=settings), transfers=TransferSettings(part_bytes=5 << 20, threads=1))
            store.create_from_file("k", Path(sys.argv[3]))
        """
        proxy.faults = [Fault("delay", ("put",), match="partNumber=2", seconds=5)]
        command = [sys.executable, "-c", textwrap.dedent(program), bucket.url, bucket.server.endpoint, str(path)]
        writer = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
        while not proxy.seen.faults and writer.poll() is None:
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert [info.key for info in store.list("")] == []
        assert len(uploads(bucket)) == 1
        proxy.faults = []
        store.create_from_file("k", path)
        assert store.get("k") == data


class TestDownloads:
    @pytest.mark.parametrize(
        ("after", "error"),
        [
            pytest.param(lambda data: data[::-1], Unavailable("changed while it was read"), id="it changes"),
            pytest.param(lambda data: data[:PART], Unavailable("changed while it was read"), id="it shrinks"),
            pytest.param(None, NotFound("/k"), id="it disappears"),
        ],
    )
    def test_an_object_that_changes_between_two_parts(
        self,
        proxy: FaultProxy,
        store: S3Store,
        bucket: Bucket,
        tmp_path: Path,
        after: Callable[[bytes], bytes] | None,
        error: CompactorError,
    ) -> None:
        _, data = large_file(tmp_path / "in")
        store.put("k", data)
        other = bucket.open()

        def change(request: str, target: str) -> None:
            if request == "get" and proxy.seen.requests["get"] == 2:
                proxy.before = lambda *_: None
                if after:
                    other.put("k", after(data))
                else:
                    other.delete(["k"])

        proxy.before = change
        with pytest.raises(type(error), match=error.message):
            store.download("k", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_cut_short_and_long_bodies_are_fetched_again(self, proxy: FaultProxy, store: S3Store, tmp_path: Path) -> None:
        path, data = large_file(tmp_path / "in", 4 * PART)
        store.create_from_file("k", path)
        proxy.faults = [Fault(kind, ("get",), times=2) for kind in ("cut", "short", "long", "reset", "lost", "slow_down", "internal")]
        assert store.download("k", tmp_path / "out", 5, 3 * PART) == 3 * PART
        assert (tmp_path / "out").read_bytes() == data[5 : 5 + 3 * PART]
        assert sum(proxy.seen.faults.values()) == 14
        proxy.faults = [Fault("cut", ("get",))]
        hasty = Retrier(RetrySettings(deadline_s=0.1, base_s=0.01))
        impatient = S3Store(
            S3RequestClient(store.requests.bucket, store.requests.prefix, store.requests.settings, hasty, RequestCounters()), PARTS
        )
        with pytest.raises(Unavailable):
            impatient.download("k", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_flipped_bit_shows_in_the_digest_that_the_caller_knows(self, proxy: FaultProxy, store: S3Store, tmp_path: Path) -> None:
        """A range carries no checksum of the store: whoever downloads compares with SegmentFile.sha256."""
        path, data = large_file(tmp_path / "in")
        digest = hashlib.sha256(data).hexdigest()
        store.create_from_file("k", path, {"sha256": digest})
        proxy.faults = [Fault("flip", ("get",), times=1)]
        store.download("k", tmp_path / "out")
        assert hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest() != digest
        store.download("k", tmp_path / "out")
        assert hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest() == digest


def test_a_store_that_answers_503_for_a_minute_is_waited_for(proxy: FaultProxy, bucket: Bucket, tmp_path: Path) -> None:
    """The minute is of a clock that sleeping moves."""
    elapsed = [0.0]

    def sleep(seconds: float) -> None:
        elapsed[0] += seconds
        if elapsed[0] >= 60:
            proxy.faults = []

    def store_with(deadline_s: float) -> S3Store:
        retrier = Retrier(RetrySettings(deadline_s=deadline_s), lambda: elapsed[0], sleep)
        return S3Store(S3RequestClient(bucket.name, f"{bucket.prefix}/", bucket.settings, retrier, RequestCounters()), PARTS)

    path, data = large_file(tmp_path / "in")
    proxy.faults = [Fault("slow_down")]
    with pytest.raises(Unavailable, match=r"503 .*tried \d+ times"):
        store_with(20).create_from_file("k", path)
    store_with(120).create_from_file("k", path)
    assert elapsed[0] >= 60
    assert bucket.open().get("k") == data


class TestCredentials:
    def test_that_are_refused_in_the_middle_end_it_at_once(self, proxy: FaultProxy, store: S3Store, tmp_path: Path) -> None:
        path, _ = large_file(tmp_path / "in", 12 * PART)
        store.create_from_file("k", path)
        before = proxy.seen.requests["get"]
        proxy.faults = [Fault("delay", ("get",), times=2, seconds=0), Fault("expired", ("get",))]
        with pytest.raises(Refused, match="session token has expired"):
            store.download("k", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        # Each thread may hear of it once, from its own request; the rest was never asked for.
        assert proxy.seen.requests["get"] - before <= 2 + PARTS.threads < 12


class TestCounting:
    def test_requests_and_bytes_are_what_the_proxy_saw(self, proxy: FaultProxy, bucket: Bucket, tmp_path: Path) -> None:
        counters = RequestCounters()
        store = bucket.open(transfers=TransferSettings(part_bytes=PART, threads=3, list_page=2), retries=QUICK, counters=counters)
        path, _ = large_file(tmp_path / "in")
        proxy.faults = [Fault(kind, times=2, rate=0.3) for kind in ("slow_down", "internal", "lost", "delay")]
        store.create_from_file("large", path)
        for number in range(5):
            store.create(f"small/{number}", b"x" * number)
        with pytest.raises(AlreadyExists):
            store.create("small/1", b"y")
        store.put("hint", b"12345")
        proxy.faults = []
        store.get("large", 17, 1000)
        store.download("large", tmp_path / "out")
        assert len(list(store.list(""))) == 7
        with pytest.raises(NotFound):
            store.head("absent")
        store.clock_ms()
        store.delete(["hint", "small/0"])
        usage = counters.usage()
        assert usage.requests == dict(proxy.seen.requests)
        assert (usage.bytes_read, usage.bytes_written) == (proxy.seen.bytes_read, proxy.seen.bytes_written)
        assert usage.requests["list"] >= 5


@pytest.mark.slow
class TestRealServer:
    """What moto does otherwise: it sends no checksums, and answers 500 about an upload that is gone."""

    @pytest.fixture
    def proxied(self, versity_proxy: tuple[FaultProxy, Bucket]) -> tuple[FaultProxy, Bucket]:
        return versity_proxy

    def test_an_upload_that_vanishes_is_begun_anew(self, proxy: FaultProxy, store: S3Store, bucket: Bucket, tmp_path: Path) -> None:
        path, data = large_file(tmp_path / "in")
        client = bucket.server.client()

        def abort(request: str, target: str) -> None:
            if request == "multipart" and "uploadId" in target:
                proxy.before = lambda *_: None
                for upload in client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]:
                    client.abort_multipart_upload(Bucket=bucket.name, Key=upload["Key"], UploadId=upload["UploadId"])

        proxy.before = abort
        store.create_from_file("k", path)
        assert store.get("k") == data
        assert uploads(bucket) == []

    def test_a_flipped_bit_in_a_whole_object_shows_in_the_store_s_checksum(self, proxy: FaultProxy, store: S3Store) -> None:
        store.create("record", b"a control record" * 10)
        proxy.faults = [Fault("flip", ("get",), times=3)]
        assert store.get("record") == b"a control record" * 10
        assert proxy.seen.faults == {"flip": 3}
