"""What every layout of segments does, wherever its objects lie: a half that reads, and a half that writes.

A new layout is one more row in RIGS. ``Rig.stored`` puts a segment there as whoever writes it does: this program, or a broker's plug-in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from Crypto.PublicKey import RSA

from compactor.bootstrap import KINDS
from compactor.config import Aiven, Settings, TierSettings
from compactor.errors import NotFound
from compactor.model.ids import TopicPartition, segment_id
from compactor.model.segment import FILE_KINDS, EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.counting import Counters
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.tier import recorded
from compactor.tier.layouts.native import NativeLayout
from compactor.tier.layouts.pinterest.keys import PartitionKeys, id_of
from compactor.tier.layouts.pinterest.layout import PinterestLayout
from compactor.tier.names import TopicIds
from compactor.tier.ports import ListedObject, Named, SegmentLayout
from tests.support.memory_store import Clock, MemoryStore

NAME = TopicPartition("orders", 0)
OTHER = TopicPartition("orders", 10)

Contents = Mapping[str, bytes]


def random_id(start: int) -> str:
    return segment_id(hashlib.sha256(str(start).encode()).digest()[:16])


@dataclass(frozen=True)
class Rig:
    """One layout, and the store below it. ``write``: None for what the layout itself uploads."""

    layout: SegmentLayout
    store: ObjectStore
    write: Callable[[TopicPartition, RemoteLogSegmentMetadata, Contents], None] | None = None
    kinds: tuple[str, ...] = FILE_KINDS
    id_of: Callable[[int], str] = random_id

    def contents(self, seed: int, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
        """Of every kind that the layout has."""
        return contents_of(seed, without=(*without, *(kind for kind in FILE_KINDS if kind not in self.kinds)))

    def segment(self, start: int, contents: Contents, *, digests: bool = True) -> RemoteLogSegmentMetadata:
        return segment_of(start, contents, digests=digests).model_copy(update={"id": self.id_of(start)})

    def stored(self, segment: RemoteLogSegmentMetadata, contents: Contents, name: TopicPartition = NAME) -> None:
        if self.write is not None:
            self.write(name, segment, contents)
        else:
            assert self.layout.upload(name, segment, contents) == ""

    def replace(self, key: str, change: Callable[[bytes], bytes]) -> None:
        """Damages an object behind the layout's back. What the store remembers of it besides its bytes stays."""
        info, data = self.store.head(key), self.store.get(key)
        self.store.delete([key])
        self.store.create(key, change(data), info.metadata)

    def objects(self) -> set[str]:
        return {info.key for info in self.store.list("")}


def native(store: ObjectStore, scratch: Path) -> Rig:
    return Rig(NativeLayout(store), store)


def brokers(layout: str, **settings: object) -> Callable[[ObjectStore, Path], Rig]:
    """A layout of brokers, as the composition root makes it. ``settings``: [tier.aiven]."""

    def rig(store: ObjectStore, scratch: Path) -> Rig:
        (scratch / "key.pem").write_bytes(private_key())
        aiven = {**settings, "key_pairs": {"key1": str(scratch / "key.pem")}}
        made = Settings(tier=TierSettings(aiven=Aiven.model_validate(aiven)))
        return Rig(KINDS["kafka", layout].layout(made, store, TopicIds({"orders": "R0AHqObxTZmsN-zsxr_0TQ"})), store)

    return rig


def pinterest(store: ObjectStore, scratch: Path) -> Rig:
    layout = PinterestLayout(store, PartitionKeys("prod", entropy_bits=7))
    return Rig(layout, store, kinds=("log", "index", "timeindex"), id_of=id_of)


@cache
def private_key() -> bytes:
    return RSA.generate(2048).export_key("PEM", pkcs=8)


RIGS: dict[str, Callable[[ObjectStore, Path], Rig]] = {
    "native": native,
    "pinterest": pinterest,
    "kafka-local": brokers("kafka-local"),
    "aiven": brokers("aiven", key_prefix="some/prefix-", chunk_size=1000),
    "aiven, packed": brokers("aiven", chunk_size=1000, compression="zstd", active_key_pair="key1"),
}
STORES = ("directory", "memory", "moto")


@pytest.fixture(params=[f"{layout} in {store}" for layout in RIGS for store in STORES])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    layout, _, kind = request.param.partition(" in ")
    if kind == "directory":
        yield RIGS[layout](open_store((tmp_path / "a tier").as_uri()), tmp_path)
    elif kind == "memory":
        yield RIGS[layout](MemoryStore(Clock(), Counters()), tmp_path)
    else:
        yield RIGS[layout](request.getfixturevalue("s3_bucket").open(), tmp_path)


def contents_of(seed: int, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Of every kind; the log is large enough for a range to be a part of it."""
    sizes = {"log": 5000, "index": 80, "timeindex": 120, "txnindex": 34, "snapshot": 60, "leader-epoch-checkpoint": 12}
    return {kind: hashlib.shake_128(f"{seed} {kind}".encode()).digest(sizes[kind]) for kind in FILE_KINDS if kind not in without}


def segment_of(start: int, contents: Contents, *, digests: bool = True) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        id=random_id(start),
        start_offset=start,
        end_offset=start + 9,
        size_bytes=len(contents["log"]),
        max_timestamp_ms=1_700_000_000_000,
        mtime_ms=1_700_000_000_001,
        leader_epochs=(EpochEntry(0, 0),),
        files={
            kind: SegmentFile(size=len(data), sha256=hashlib.sha256(data).hexdigest() if digests else "") for kind, data in contents.items()
        },
    )


class TestReading:
    def test_every_file_comes_as_it_was_stored(self, rig: Rig, tmp_path: Path) -> None:
        contents = rig.contents(1)
        segment = rig.segment(0, contents)
        rig.stored(segment, contents)
        assert dict(rig.layout.files(NAME, segment)) == segment.files
        for kind, data in contents.items():
            assert rig.layout.read(NAME, segment, kind) == data
            assert rig.layout.download(NAME, segment, kind, tmp_path / kind) > 0
            assert (tmp_path / kind).read_bytes() == data
            assert recorded.content(rig.layout, NAME, segment, kind) == data
            assert recorded.download(rig.layout, NAME, segment, kind, tmp_path / f"{kind} again").is_recorded(segment.files[kind])

    def test_a_range_is_shorter_only_where_the_file_ends(self, rig: Rig) -> None:
        contents = rig.contents(2)
        segment = rig.segment(0, contents)
        rig.stored(segment, contents)
        log = contents["log"]
        for start, length in ((0, 1), (0, 0), (17, 1000), (4999, 1), (4990, 100), (0, 5000), (0, 9000), (2500, None)):
            end = None if length is None else start + length
            assert rig.layout.read(NAME, segment, "log", start, length) == log[start:end], (start, length)

    def test_what_is_listed_lies_in_the_folder_and_has_all_parts(self, rig: Rig) -> None:
        contents = rig.contents(7)
        segment = rig.segment(0, contents)
        rig.stored(segment, contents)
        listed = list(rig.layout.list(NAME))
        folder = rig.layout.folder(NAME)
        assert folder.endswith("/")
        assert all(one.key.startswith(folder) for one in listed)
        assert rig.layout.parts <= {one.kind for one in listed if one.segment_id == segment.id}
        assert {rig.layout.where(NAME, segment, part) for part in rig.layout.parts} <= {one.key for one in listed}

    def test_what_is_not_there_is_not_found(self, rig: Rig, tmp_path: Path) -> None:
        segment = rig.segment(0, rig.contents(3))
        with pytest.raises(NotFound):
            rig.layout.read(NAME, segment, "log")
        with pytest.raises(NotFound):
            rig.layout.download(NAME, segment, "log", tmp_path / "log")
        assert "missing" in rig.layout.problem(NAME, segment)

    def test_without_a_digest_the_size_is_what_counts(self, rig: Rig) -> None:
        contents = rig.contents(4)
        segment = rig.segment(0, contents, digests=False)
        rig.stored(rig.segment(0, contents), contents)
        assert rig.layout.problem(NAME, segment) == ""
        assert recorded.content(rig.layout, NAME, segment, rig.kinds[-1]) == contents[rig.kinds[-1]]

    def test_the_list_names_what_it_knows(self, rig: Rig) -> None:
        segments = [rig.segment(start, rig.contents(start)) for start in (0, 100)]
        for segment in segments:
            rig.stored(segment, rig.contents(segment.start_offset))
        foreign = rig.segment(7, rig.contents(7))
        rig.stored(foreign, rig.contents(7), OTHER)
        listed = list(rig.layout.list(NAME))
        assert {(item.segment_id, item.start_offset) for item in listed} == {(segment.id, segment.start_offset) for segment in segments}
        # A layout may have objects that hold no file, such as one that says where the files lie in the others.
        assert {item.key for item in listed} >= {rig.layout.where(NAME, s, kind) for s in segments for kind in s.files}
        assert all(item.size > 0 and item.modified_ms > 0 for item in listed)
        assert {rig.layout.partition_of(item.key) for item in listed} == {str(NAME)}
        assert {rig.layout.partition_of(key) for key in ("tier-id.json", "some/where/else", f"{NAME}x/y")} == {""}

    def test_strangers_are_listed_as_such(self, rig: Rig) -> None:
        segment = rig.segment(0, rig.contents(5))
        rig.stored(segment, rig.contents(5))
        folder = rig.layout.where(NAME, segment, "log").rpartition("/")[0]
        rig.store.create(f"{folder}/notes.txt", b"mine")
        strangers = [item for item in rig.layout.list(NAME) if not item.segment_id]
        assert [(item.key, item.size, item.start_offset, item.kind) for item in strangers] == [(f"{folder}/notes.txt", 4, -1, "")]


class TestWriting:
    def test_an_upload_reads_back_without_a_problem(self, rig: Rig, tmp_path: Path) -> None:
        contents = rig.contents(1, without=("txnindex",))
        (tmp_path / "the log").write_bytes(contents["log"])
        segment = rig.segment(0, contents)
        assert rig.layout.upload(NAME, segment, {**contents, "log": tmp_path / "the log"}) == ""
        assert rig.layout.problem(NAME, segment) == ""
        assert {kind: rig.layout.read(NAME, segment, kind) for kind in contents} == contents

    def test_the_same_upload_again_is_done_already(self, rig: Rig) -> None:
        contents = rig.contents(2)
        segment = rig.segment(0, contents)
        for _ in range(2):
            assert rig.layout.upload(NAME, segment, contents) == ""

    def test_the_rest_of_an_upload_that_was_cut_short(self, rig: Rig) -> None:
        contents = rig.contents(3)
        segment = rig.segment(0, contents)
        assert rig.layout.upload(NAME, segment, contents) == ""
        rig.store.delete([rig.layout.where(NAME, segment, rig.kinds[-1])])
        assert "missing" in rig.layout.problem(NAME, segment)
        assert rig.layout.upload(NAME, segment, contents) == ""
        assert rig.layout.problem(NAME, segment) == ""

    def test_other_content_under_the_same_id_is_named_and_stays(self, rig: Rig) -> None:
        first, second = rig.contents(4), rig.contents(5)
        assert rig.layout.upload(NAME, rig.segment(0, first), first) == ""
        assert rig.layout.where(NAME, rig.segment(0, second), "log") in rig.layout.upload(NAME, rig.segment(0, second), second)
        assert rig.layout.read(NAME, rig.segment(0, first), "log") == first["log"]

    def test_an_object_of_another_size_is_a_problem(self, rig: Rig) -> None:
        contents = rig.contents(6)
        segment = rig.segment(0, contents)
        rig.stored(segment, contents)
        rig.replace(rig.layout.where(NAME, segment, "log"), lambda data: data[:-1])
        assert rig.layout.where(NAME, segment, "log") in rig.layout.problem(NAME, segment)

    def test_all_objects_go_and_no_others(self, rig: Rig) -> None:
        segments = [rig.segment(start, rig.contents(start)) for start in (0, 100, 200)]
        for segment in segments:
            rig.stored(segment, rig.contents(segment.start_offset))
        rig.stored(segments[0], rig.contents(0), OTHER)
        before = rig.objects()
        gone = {item.key for item in rig.layout.list(NAME) if item.segment_id != segments[1].id}
        # Of one of them nothing is known but its name, as of a plan that was never carried out.
        rig.layout.delete(NAME, [segments[0], Named(segments[2].id, segments[2].start_offset)])
        assert rig.objects() == before - gone
        rig.layout.delete(NAME, segments[:1])  # absent ones are fine
        assert known(rig.layout.list(NAME)) == {segments[1].id}
        assert known(rig.layout.list(OTHER)) == {segments[0].id}


def known(listed: Iterator[ListedObject]) -> set[str]:
    return {item.segment_id for item in listed}
