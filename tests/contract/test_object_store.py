"""What every object store does, whichever it is and whatever fails on the way to it.

Adapters: a directory; the memory that other tests use; S3 on moto (behind a lock), versitygw, S3Proxy and MiniStack (gofakes3 is refused);
Google Cloud Storage on fake-gcs-server; Azure on Azurite; HDFS on a mini cluster. Most servers again behind a proxy that lets every tenth
request fail.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from compactor.adapters.stores import s3_requests as s3_parts
from compactor.adapters.stores.hdfs import HdfsStore, _RequestBody
from compactor.adapters.stores.s3 import MultipartUpload, S3Store
from compactor.errors import AlreadyExists, CannotCopy, NotFound, Refused, Unavailable
from compactor.storage.factory import open_store
from compactor.storage.keys import RESERVED
from compactor.storage.port import ComposeSource, CopyLimits, FileRange, ObjectInfo, ObjectRangeToCopy, ObjectStore, UnfinishedUpload
from compactor.storage.schemes import DIRECTORY, UTF_8, StoreCapabilities, directory_of_store_url, store_kind_of_scheme
from compactor.storage.settings import RetrySettings, TransferSettings
from compactor.storage.wrappers import RequestCounters
from tests.support.cloud_servers import AnyBucket, CloudBucket
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.memory_store import Clock, MemoryStore
from tests.support.s3_server import Bucket
from tests.support.servers import BUCKETS, ON_ALL_SERVERS
from tests.support.store_costs import COSTS, measured

PART = 5 << 20
SMALL_PAGES = TransferSettings(part_bytes=PART, threads=3, list_page=3)
PATIENT = RetrySettings(deadline_s=60, base_s=0.002, cap_s=0.05)
FAULTS = [
    Fault("slow_down", rate=0.03),
    Fault("internal", rate=0.03),
    Fault("reset", rate=0.03),
    Fault("lost", rate=0.05),
    Fault("cut", rate=0.03),
    Fault("short", ("get",), rate=0.05),
    Fault("long", ("get",), rate=0.05),
    Fault("delay", rate=0.05),
]


@pytest.fixture(
    params=[
        "directory",
        "memory",
        "moto",
        "faulty moto",
        "versitygw",
        pytest.param("faulty versitygw", marks=pytest.mark.slow),
        "S3Proxy",
        pytest.param("MiniStack", marks=pytest.mark.slow),
        pytest.param("faulty MiniStack", marks=pytest.mark.slow),
        "fake-gcs-server",
        pytest.param("faulty fake-gcs-server", marks=pytest.mark.slow),
        "Azurite",
        pytest.param("faulty Azurite", marks=pytest.mark.slow),
        "HDFS",
        pytest.param("faulty HDFS", marks=pytest.mark.slow),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    kind: str = request.param
    if kind == "directory":
        yield open_store((tmp_path / "a tier").as_uri())
        return
    if kind == "memory":
        yield MemoryStore(Clock(time.time_ns() // 1_000_000), RequestCounters())
        return
    bucket: Bucket | CloudBucket = request.getfixturevalue(BUCKETS[kind.removeprefix("faulty ")])
    if not kind.startswith("faulty"):
        yield bucket.open(transfers=SMALL_PAGES)
        return
    with FaultProxy(bucket.endpoint, seed=7).running() as proxy:
        proxy.faults = [*FAULTS]
        yield bucket.behind(proxy.url).open(transfers=SMALL_PAGES, retries=PATIENT)


def pattern(size: int) -> bytes:
    """Bytes that differ at every position a range could be confused with."""
    return np.arange(size // 4 + 1, dtype=">u4").tobytes()[:size]


def keys(found: Iterator[ObjectInfo]) -> list[str]:
    return [info.key for info in found]


class TestCreate:
    def test_what_was_created_is_read_back(self, store: ObjectStore) -> None:
        made = store.create("orders-0/00.log", b"hello", {"sha256": "abc", "mtime_ms": "17"})
        assert (made.key, made.size, dict(made.metadata)) == ("orders-0/00.log", 5, {"sha256": "abc", "mtime_ms": "17"})
        found = store.head("orders-0/00.log")
        assert (found.key, found.size, dict(found.metadata), found.etag) == (made.key, 5, dict(made.metadata), made.etag)
        assert found.etag
        assert store.get("orders-0/00.log") == b"hello"

    def test_an_object_without_metadata_has_none(self, store: ObjectStore) -> None:
        store.create("plain", b"x")
        assert dict(store.head("plain").metadata) == {}

    def test_an_existing_object_stays_as_it_is(self, store: ObjectStore, tmp_path: Path) -> None:
        store.create("k", b"first", {"by": "one"})
        for data in (b"second", b"first"):
            with pytest.raises(AlreadyExists, match="k exists already"):
                store.create("k", data, {"by": "two"})
        (tmp_path / "file").write_bytes(b"third")
        with pytest.raises(AlreadyExists):
            store.create_from_file("k", tmp_path / "file", {"by": "three"})
        assert store.get("k") == b"first"
        assert dict(store.head("k").metadata) == {"by": "one"}

    def test_one_of_many_wins(self, store: ObjectStore) -> None:
        for number in range(5):
            key = f"race/{number}"
            won = race(8, partial(create_as, store, key))
            assert len(won) == 1
            assert store.get(key) == f"by {won[0]}".encode()
            assert store.head(key).metadata["by"] == str(won[0])

    def test_one_of_several_large_files_wins(self, store: ObjectStore, tmp_path: Path) -> None:
        paths = []
        for me in range(3):
            paths.append(tmp_path / str(me))
            paths[me].write_bytes(bytes([me]) + pattern(PART + 100))
        won = race(3, lambda me: store.create_from_file("large", paths[me], {"by": str(me)}))
        assert len(won) == 1
        assert store.get("large", 0, 1) == bytes([won[0]])
        assert store.head("large").size == PART + 101
        assert store.head("large").metadata["by"] == str(won[0])

    @pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 2 * PART + 12345])
    def test_files_of_every_size(self, request: pytest.FixtureRequest, store: ObjectStore, tmp_path: Path, size: int) -> None:
        if "faulty fake-gcs-server" in request.node.name and size > PART:
            pytest.skip("the emulator appends a chunk once more that is sent again after its answer was lost")
        data = pattern(size)
        (tmp_path / "in").write_bytes(data)
        made = store.create_from_file("dir/object", tmp_path / "in", {"sha256": hashlib.sha256(data).hexdigest()})
        assert (made.size, store.head("dir/object").size) == (size, size)
        assert dict(store.head("dir/object").metadata) == dict(made.metadata)
        assert store.download("dir/object", tmp_path / "out put") == size
        assert (tmp_path / "out put").read_bytes() == data

    def test_a_file_that_may_be_linked(self, store: ObjectStore, tmp_path: Path) -> None:
        (tmp_path / "made").write_bytes(b"content")
        store.create_from_file("k", tmp_path / "made", {"by": "me"}, may_link=True)
        (tmp_path / "made").unlink()
        assert (store.get("k"), dict(store.head("k").metadata)) == (b"content", {"by": "me"})

    def test_what_is_lent_is_the_object_and_what_is_not_leaves_nothing(self, store: ObjectStore, tmp_path: Path) -> None:
        store.create("k", b"content")
        lease = store.lend("k", tmp_path / "lent")
        if lease is None:
            assert not (tmp_path / "lent").is_symlink()
            return
        assert (tmp_path / "lent").read_bytes() == b"content"
        lease.require_unbroken()
        lease.close()

    def test_the_time_is_the_store_s_own(self, store: ObjectStore) -> None:
        before = store.clock_ms() // 1000 * 1000
        made = store.create("k", b"x")
        after = store.clock_ms() + 1000
        assert before <= made.modified_ms <= after
        assert before <= store.head("k").modified_ms <= after
        assert before <= next(store.list("k")).modified_ms <= after


def capabilities(store: ObjectStore) -> StoreCapabilities:
    """What the row of its scheme says; the memory that tests use can do what a directory can."""
    return (store_kind_of_scheme(store.url) or DIRECTORY).can


def test_a_store_copies_ranges_if_its_row_says_so(store: ObjectStore) -> None:
    assert (store.server_copy_limits is not None) == bool(capabilities(store).range_copy)
    if store.server_copy_limits is None:
        with pytest.raises(CannotCopy):
            store.compose("new", [ObjectRangeToCopy("old", 0, 5, "etag")])


class TestCompose:
    """An object of ranges of others and of local files. Read as ranges: of those a server says how long they are, whatever its body is."""

    @pytest.fixture(autouse=True)
    def can_copy(self, request: pytest.FixtureRequest, store: ObjectStore, tmp_path: Path) -> None:
        if not capabilities(store).range_copy:
            pytest.skip("such a store copies no ranges")
        if "S3Proxy" in request.node.name:
            whole = made_as(store, "whole", pattern(PART), tmp_path)
            (tmp_path / "end").write_bytes(b"end")
            with pytest.raises(CannotCopy, match="checksum for each part"):
                store.compose("composed", [whole.range(0, PART), FileRange(tmp_path / "end", 0, 3)], {})
            assert store.server_copy_limits is None
            pytest.skip("S3Proxy joins no copied part with one that was sent, and that is noticed")

    @pytest.fixture
    def source(self, store: ObjectStore, tmp_path: Path) -> Source:
        return made_as(store, "old/source", pattern(3 * PART + 77), tmp_path)

    @pytest.fixture
    def local(self, tmp_path: Path) -> Path:
        (tmp_path / "local").write_bytes(pattern(2 * PART)[::-1])
        return tmp_path / "local"

    def test_copied_and_local_ranges(self, store: ObjectStore, source: Source, local: Path) -> None:
        sent = [FileRange(local, 3, PART), FileRange(local, 1, 0), FileRange(local, 1, 2)]
        pieces: list[ComposeSource] = [source.range(3, PART), FileRange(local, 7, PART), source.range(PART + 9, PART + 1), *sent]
        made = store.compose("new/object", pieces, {"batches": "abc"})
        expected = b"".join(source.of(piece) for piece in pieces)
        assert (made.key, made.size, dict(made.metadata)) == ("new/object", len(expected), {"batches": "abc"})
        found = store.head("new/object")
        assert (found.size, found.etag, dict(found.metadata)) == (len(expected), made.etag, {"batches": "abc"})
        assert found.etag
        assert store.get("new/object", 0, len(expected) + 1) == expected
        store.delete([source.key])
        assert store.get("new/object", PART - 3, 9) == expected[PART - 3 : PART + 6]

    @pytest.mark.parametrize("what", ["all copied", "all local", "whole", "short", "nothing", "of two"])
    def test_of_one_kind(self, store: ObjectStore, source: Source, local: Path, tmp_path: Path, what: str) -> None:
        other = made_as(store, "old/other", source.data[::-1], tmp_path)
        ways: dict[str, Sequence[ComposeSource]] = {
            "all copied": [source.range(PART, PART), source.range(0, PART), source.range(2 * PART, PART + 77)],
            "all local": [FileRange(local, 5, 3), FileRange(local, 2, 2 * PART - 2), FileRange(local, 0, 1)],
            "whole": [source.range(0, len(source.data))],
            "short": [source.range(0, 0), FileRange(local, 5, 3), FileRange(local, 0, 0)],
            "nothing": [source.range(0, 0)],
            "of two": [source.range(0, PART), other.range(5, PART), source.range(1, PART)],
        }
        pieces = ways[what]
        expected = b"".join(
            (other if isinstance(piece, ObjectRangeToCopy) and piece.key == other.key else source).of(piece) for piece in pieces
        )
        assert store.compose("new", pieces).size == len(expected)
        assert store.get("new", 0, len(expected) + 1) == expected
        assert dict(store.head("new").metadata) == {}

    def test_long_ranges_are_split(self, store: ObjectStore, source: Source, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3_parts, "COPIES", CopyLimits(min_run_bytes=PART, max_bytes=PART + 100))
        crc = google_crc32c.value(source.data[1:])
        pieces: list[ComposeSource] = [
            replace(source.range(1, 3 * PART + 76), crc32c=crc),
            FileRange(local, 0, 2 * PART),
            FileRange(local, 0, 11),
        ]
        store.compose("new", pieces)
        expected = b"".join(source.of(piece) for piece in pieces)
        assert store.get("new", 0, len(expected) + 1) == expected

    def test_an_existing_object_stays_as_it_is(self, store: ObjectStore, source: Source, local: Path) -> None:
        store.create("new", b"first", {"by": "one"})
        with pytest.raises(AlreadyExists, match="new exists already"):
            store.compose("new", [source.range(0, PART), FileRange(local, 0, 9)], {"by": "two"})
        with pytest.raises(AlreadyExists):
            store.compose(source.key, [source.range(0, PART)])
        assert (store.get("new"), dict(store.head("new").metadata)) == (b"first", {"by": "one"})
        assert store.get(source.key, 0, len(source.data) + 1) == source.data

    def test_one_of_several_wins(self, store: ObjectStore, source: Source, tmp_path: Path) -> None:
        paths = []
        for me in range(3):
            paths.append(tmp_path / str(me))
            paths[me].write_bytes(bytes([me]))
        won = race(3, lambda me: store.compose("new", [source.range(0, PART), FileRange(paths[me], 0, 1)], {"by": str(me)}))
        assert len(won) == 1
        assert store.get("new", PART) == bytes([won[0]])
        assert store.head("new").metadata["by"] == str(won[0])

    def test_another_version_of_the_source_is_not_taken(self, store: ObjectStore, source: Source, local: Path, tmp_path: Path) -> None:
        store.delete([source.key])
        made_as(store, source.key, source.data[::-1], tmp_path)
        with pytest.raises(Unavailable, match="old/source is not the version that was to be copied"):
            store.compose("new", [FileRange(local, 0, PART), source.range(0, PART)])
        assert keys(store.list("")) == [source.key]

    def test_a_source_that_is_gone(self, store: ObjectStore, source: Source, local: Path) -> None:
        store.delete([source.key])
        with pytest.raises(NotFound, match="old/source"):
            store.compose("new", [FileRange(local, 0, PART), source.range(0, PART)])
        assert keys(store.list("")) == []

    def test_ranges_that_are_none_are_bugs(self, store: ObjectStore, source: Source, local: Path) -> None:
        with pytest.raises(ValueError, match="not a range"):
            store.compose("new", [FileRange(local, -1, 4)])
        with pytest.raises(ValueError, match="ends before"):
            store.compose("new", [source.range(PART, 3 * PART)])
        assert keys(store.list("")) == [source.key]


@dataclass(frozen=True)
class Source:
    """An object of a store, and what it holds."""

    key: str
    data: bytes
    etag: str

    def range(self, start: int, length: int) -> ObjectRangeToCopy:
        return ObjectRangeToCopy(self.key, start, length, self.etag)

    def of(self, piece: ComposeSource) -> bytes:
        data = self.data if isinstance(piece, ObjectRangeToCopy) else piece.path.read_bytes()
        return data[piece.start : piece.start + piece.length]


def made_as(store: ObjectStore, key: str, data: bytes, folder: Path) -> Source:
    """In parts: a server that refuses a large body before it has read all of it closes the connection."""
    (folder / "made").write_bytes(data)
    store.create_from_file(key, folder / "made", {"by": "one"})
    return Source(key, data, store.head(key).etag)


class TestRead:
    @pytest.mark.parametrize(
        ("start", "length", "expected"),
        [
            (0, None, b"0123456789"),
            (3, None, b"3456789"),
            (0, 4, b"0123"),
            (3, 4, b"3456"),
            (8, 4, b"89"),
            (9, 1, b"9"),
            (10, None, b""),
            (10, 5, b""),
            (99, 5, b""),
            (0, 0, b""),
            (4, 0, b""),
            (0, 1 << 40, b"0123456789"),
        ],
    )
    def test_ranges(self, store: ObjectStore, tmp_path: Path, start: int, length: int | None, expected: bytes) -> None:
        store.create("ten", b"0123456789")
        assert store.get("ten", start, length) == expected
        assert store.download("ten", tmp_path / "out", start, length) == len(expected)
        assert (tmp_path / "out").read_bytes() == expected

    def test_an_empty_object(self, store: ObjectStore, tmp_path: Path) -> None:
        store.create("empty", b"")
        assert store.get("empty") == b"" == store.get("empty", 0, 5)
        assert store.download("empty", tmp_path / "out") == 0
        assert (tmp_path / "out").read_bytes() == b""

    def test_a_range_over_several_parts(self, store: ObjectStore, tmp_path: Path) -> None:
        data = pattern(3 * PART)
        store.create("large", data)
        (tmp_path / "out").write_bytes(b"old" * PART)
        assert store.download("large", tmp_path / "out", 1001, 2 * PART + 3) == 2 * PART + 3
        assert (tmp_path / "out").read_bytes() == data[1001 : 1001 + 2 * PART + 3]

    def test_what_is_absent_is_not_found(self, store: ObjectStore, tmp_path: Path) -> None:
        store.create("here/x", b"")
        reads: list[Callable[[], object]] = [
            lambda: store.get("absent"),
            lambda: store.get("here/y"),
            lambda: store.get("absent", 5, 5),
            lambda: store.get("absent", 0, 0),
            lambda: store.head("absent"),
            lambda: store.download("absent", tmp_path / "out"),
            lambda: store.download("absent", tmp_path / "out", 0, 0),
        ]
        for read in reads:
            with pytest.raises(NotFound, match=r"here/y|absent"):
                read()
        assert not (tmp_path / "out").exists()

    def test_a_negative_range_is_a_bug(self, store: ObjectStore, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="not a range"):
            store.get("k", -1)
        with pytest.raises(ValueError, match="not a range"):
            store.download("k", tmp_path / "out", 0, -1)


class TestPut:
    def test_it_overwrites(self, store: ObjectStore) -> None:
        assert store.put("beat/a", b"one").size == 3
        assert store.put("beat/a", b"three").size == 5
        assert store.get("beat/a") == b"three"
        store.create("made", b"1", {"by": "create"})
        store.put("made", b"2")
        assert store.get("made") == b"2"
        assert dict(store.head("made").metadata) == {}

    def test_a_created_object_is_in_the_way_of_create_only(self, store: ObjectStore) -> None:
        store.put("k", b"put")
        with pytest.raises(AlreadyExists):
            store.create("k", b"create")


class TestList:
    KEYS = (
        "A",
        "a b/1",
        "a!",
        "a-b/1",
        "a.b",
        "a/1",
        "a/10",
        "a/2/x",
        "a/b/c/d",
        "a0",
        "aa/0",
        "b%2Fc",
        "b+c",
        "z&<>'\"",
        "é/1",
        "日本/ü",
        "\ufa6a",
        "😀",
    )

    def test_order_prefixes_and_after(self, request: pytest.FixtureRequest, store: ObjectStore) -> None:
        is_utf_8 = capabilities(store).listing_order == UTF_8 and "S3Proxy" not in request.node.name
        created = self.KEYS if is_utf_8 else self.KEYS[:-1]
        for number, key in enumerate(created):
            store.create(key, b"x" * number)
        ordered = sorted(created, key=lambda key: key.encode())
        found = list(store.list(""))
        assert [info.key for info in found] == ordered
        assert {info.key: info.size for info in found} == {key: number for number, key in enumerate(created)}
        for prefix in ("a", "a/", "a/1", "a/b/", "a-", "a b/", "é", "nothing", "nothing/", "a/1/"):
            assert keys(store.list(prefix)) == [key for key in ordered if key.startswith(prefix)]
        for after in (*ordered, "a/", "a/1/", "a/b", "zzz", "0"):
            assert keys(store.list("", after)) == [key for key in ordered if key.encode() > after.encode()]
            assert keys(store.list("a/", after)) == [key for key in ordered if key.startswith("a/") and key.encode() > after.encode()]

    def test_an_empty_store_lists_nothing(self, store: ObjectStore) -> None:
        assert keys(store.list("")) == []
        assert keys(store.list("x/y/")) == []

    def test_what_is_created_behind_the_cursor_may_appear_and_nothing_is_lost(self, store: ObjectStore) -> None:
        for number in range(7):
            store.create(f"n/{number}", b"")
        cursor = store.list("n/")
        first = next(cursor).key
        store.delete(["n/0"])
        store.create("n/9", b"")
        assert [first, *keys(cursor)][:7] == [f"n/{number}" for number in range(7)]


class TestDelete:
    def test_they_are_gone_and_absent_keys_are_fine(self, store: ObjectStore) -> None:
        for key in ("d/1", "d/2", "d/é 3", "e"):
            store.create(key, b"x", {"a": "b"})
        store.delete(["d/1", "d/é 3", "d/never", "never/was", "d/1"])
        assert keys(store.list("")) == ["d/2", "e"]
        with pytest.raises(NotFound):
            store.get("d/1")
        store.delete([])
        store.delete(iter(["d/2", "e"]))
        assert keys(store.list("")) == []

    def test_a_deleted_key_is_free_again(self, store: ObjectStore) -> None:
        store.create("k", b"1", {"by": "one"})
        store.delete(["k"])
        store.create("k", b"2")
        assert (store.get("k"), dict(store.head("k").metadata)) == (b"2", {})


class TestKeys:
    @pytest.mark.parametrize(
        "key", ["a b/c d", "ü/日本 😀", "x" * 255 + "/" + "é" * 127, "per%cent%2F/+plus", "~tilde/,;=@$'()", ".hidden/.x"]
    )
    def test_names_that_must_work(self, store: ObjectStore, tmp_path: Path, key: str) -> None:
        store.create(key, b"content", {"a": "b"})
        assert store.get(key) == b"content"
        assert dict(store.head(key).metadata) == {"a": "b"}
        assert store.download(key, tmp_path / "out") == 7
        assert keys(store.list(key[:5])) == [key]
        store.delete([key])
        assert keys(store.list("")) == []

    @pytest.mark.parametrize(
        "key",
        [
            *("", "/", "/a", "a/", "a//b", ".", "..", "../x", "a/../b", "a/./b", "a/..", "a\x00b", "a\nb", "\ud800"),
            *("x" * 256, "é" * 128, "/".join("x" * 100 for _ in range(9))),
            *(".object-store/tmp/x", "a/.object-store"),
        ],
    )
    def test_names_that_are_refused_everywhere(self, store: ObjectStore, tmp_path: Path, key: str) -> None:
        (tmp_path / "in").write_bytes(b"")
        uses: list[Callable[[], object]] = [
            lambda: store.create(key, b""),
            lambda: store.create_from_file(key, tmp_path / "in"),
            lambda: store.compose(key, []),
            lambda: store.put(key, b""),
            lambda: store.get(key),
            lambda: store.head(key),
            lambda: store.download(key, tmp_path / "out"),
            lambda: store.delete([key]),
        ]
        for use in uses:
            with pytest.raises(Refused, match="cannot be an object key"):
                use()
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../", "a//", "..//x", "a\x00"])
    def test_prefixes_that_are_refused_everywhere(self, store: ObjectStore, prefix: str) -> None:
        with pytest.raises(Refused, match="cannot be a prefix"):
            list(store.list(prefix))

    @pytest.mark.parametrize(
        "metadata", [{"Upper": "x"}, {"a": "é"}, {"a": " x"}, {"a": ""}, {"a b": "x"}, {"a": "x" * 1600}, {"a": "b\nc: d"}]
    )
    def test_metadata_that_no_header_carries_is_refused(self, store: ObjectStore, metadata: dict[str, str]) -> None:
        with pytest.raises(Refused, match="metadata"):
            store.create("k", b"", metadata)
        assert keys(store.list("")) == []


class TestUnfinished:
    @pytest.fixture(autouse=True)
    def can_list_them(self, request: pytest.FixtureRequest, store: ObjectStore) -> None:
        if not capabilities(store).unfinished_uploads:
            assert list(store.unfinished_uploads("")) == []
            pytest.skip("such a store does not list unfinished uploads")
        if "faulty HDFS" in request.node.name:
            pytest.skip("a request that fails may leave a staged file, until that is old enough to be swept")

    def test_what_was_begun_and_not_finished_is_told_and_freed(self, store: ObjectStore) -> None:
        store.create("orders-0/whole", b"x")
        assert list(store.unfinished_uploads("")) == []
        begin(store, "orders-0/large")
        found = list(store.unfinished_uploads(""))  # an answer that was lost may have left a second one
        assert len({upload.key for upload in found}) == 1
        assert keys(store.list("")) == ["orders-0/whole"]
        assert all(upload.begun_ms <= store.clock_ms() + 1000 for upload in found)
        store.abort_uploads(found)
        assert list(store.unfinished_uploads("")) == []
        store.abort_uploads(found)
        assert store.get("orders-0/whole") == b"x"

    def test_below_a_prefix_only_what_goes_there(self, store: ObjectStore) -> None:
        begin(store, "orders-0/large")
        assert list(store.unfinished_uploads("orders-1/")) == []
        assert [upload.key for upload in store.unfinished_uploads("orders-0/") if upload.key != "orders-0/large"] == []

    def test_many_are_all_told(self, store: ObjectStore) -> None:
        for number in range(5):
            begin(store, f"orders-0/{number}")
        found = list(store.unfinished_uploads(""))
        assert len({(upload.key, upload.id) for upload in found}) == len(found)
        assert len({upload.key for upload in found}) == 5
        store.abort_uploads(found)
        assert list(store.unfinished_uploads("")) == []


@pytest.mark.parametrize("server", ["moto", "fake-gcs-server", "Azurite", "HDFS"])
def test_each_use_costs_the_requests_that_the_page_says(request: pytest.FixtureRequest, tmp_path: Path, server: str) -> None:
    bucket: Bucket | CloudBucket = request.getfixturevalue(BUCKETS[server])
    scheme = bucket.url.partition(":")[0]
    assert measured(bucket, tmp_path) == {use: by_scheme[scheme] for use, by_scheme in COSTS.items() if scheme in by_scheme}


@ON_ALL_SERVERS
def test_an_upload_whose_connection_breaks_is_sent_again(proxied_bucket: tuple[FaultProxy, AnyBucket], tmp_path: Path) -> None:
    proxy, bucket = proxied_bucket
    store = bucket.open(transfers=SMALL_PAGES, retries=PATIENT)
    data = pattern(2 * PART + 9)
    for key, size in (("one request", PART), ("parts", len(data))):
        (tmp_path / "file").write_bytes(data[:size])
        proxy.faults = [Fault("torn", ("put",), times=3)]
        store.create_from_file(key, tmp_path / "file", {"by": key})
        assert store.download(key, tmp_path / "read") == size
        assert (tmp_path / "read").read_bytes() == data[:size]
        assert store.head(key).metadata["by"] == key
    assert proxy.seen.faults["torn"] == 6
    assert keys(store.list("")) == ["one request", "parts"]


def begin(store: ObjectStore, key: str) -> None:
    """As a process leaves it that is killed before it has sent everything."""
    if store.url.startswith("file:"):
        staged = directory_of_store_url(store.url) / RESERVED / "tmp" / f"1-{key.replace('/', '-')}"
        staged.parent.mkdir(parents=True, exist_ok=True)
        staged.write_bytes(b"half")
        return
    if isinstance(store, MemoryStore):
        store.begun.append(UnfinishedUpload(key, f"upload {len(store.begun)}", store.clock_ms()))
        return
    if isinstance(store, HdfsStore):
        store._client._write_staged_file(_RequestBody([b"half"], 4), key)
        return
    assert isinstance(store, S3Store)
    MultipartUpload(store.requests, SMALL_PAGES, key, {})


def create_as(store: ObjectStore, key: str, me: int) -> object:
    return store.create(key, f"by {me}".encode(), {"by": str(me)})


def race(threads: int, run: Callable[[int], object]) -> list[int]:
    """All at once; returns who did not meet AlreadyExists."""
    barrier = threading.Barrier(threads)

    def one(me: int) -> int | None:
        barrier.wait()
        try:
            run(me)
        except AlreadyExists:
            return None
        return me

    with ThreadPoolExecutor(threads) as pool:
        return [me for me in pool.map(one, range(threads)) if me is not None]
