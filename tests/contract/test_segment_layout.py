"""What every layout of segments does, wherever its objects lie: reading, writing, and composing logs if the layout can.

A new layout is one more row in RIGS. ``Rig.stored`` puts a segment there as whoever writes it does: this program, or a broker's plug-in.
``FlatLayout`` is the recipe of docs/architecture.md carried out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest
from Crypto.PublicKey import RSA
from typing_extensions import override

from compactor.adapters.brokers.aiven.layout import AivenLayout
from compactor.adapters.brokers.kafka_local import KafkaLocalLayout
from compactor.config.settings import AivenSettings, Settings, TierSettings
from compactor.constants import LeaderEpoch, Offset, TimestampMs, TopicId
from compactor.errors import BadData, CannotCopy, NotFound, Unavailable
from compactor.features.pinterest.layout import PinterestLayout, PinterestObjectKeys, derive_segment_id
from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.model.segment import FILE_KINDS, EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.records.batches import verified_header_digest
from compactor.records.encode import NO_PRODUCER, prepend_batch_header
from compactor.storage.factory import open_store
from compactor.storage.port import ComposeSource, FileRange, ObjectRangeToCopy, ObjectStore
from compactor.storage.wrappers import RequestCounters
from compactor.tier.contents import TopicIdLookup, download_segment_file, read_verified_file, segment_object_name_stem
from compactor.tier.kinds import KINDS
from compactor.tier.plain import ComposableLogLayout, NativeLayout, ParsedFileName
from compactor.tier.ports import ListedObject, SegmentIdAndStartOffset, SegmentLayout, SegmentRef, WholeLogUploadLayout
from tests.support.memory_store import Clock, MemoryStore

NAME = TopicPartition("orders", 0)
OTHER = TopicPartition("orders", 10)

Contents = Mapping[str, bytes]


def random_id(start: int) -> str:
    return encode_segment_id(hashlib.sha256(str(start).encode()).digest()[:16])


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
            assert self.layout.upload_segment(name, segment, contents) == ""

    def replace(self, key: str, change: Callable[[bytes], bytes]) -> None:
        """Damages an object behind the layout's back. What the store remembers of it besides its bytes stays."""
        info, data = self.store.head(key), self.store.get(key)
        self.store.delete([key])
        self.store.create(key, change(data), info.metadata)

    def objects(self) -> set[str]:
        return {info.key for info in self.store.list("")}


class FlatLayout(ComposableLogLayout):
    """A layout as somebody would add one: ``flat/<partition>/<offset>-<id>.<kind>``."""

    NAME = re.compile(rf"(\d{{20}})-([A-Za-z0-9_-]{{22}})\.({'|'.join(FILE_KINDS)})")

    @override
    def partition_folder(self, name: TopicPartition) -> str:
        return f"flat/{name}/"

    @override
    def file_name(self, segment: SegmentRef, kind: str) -> str:
        return f"{segment_object_name_stem(segment)}.{kind}"

    @override
    def parse_file_name(self, file: str) -> ParsedFileName | None:
        match = self.NAME.fullmatch(file)
        return ParsedFileName(match[2], int(match[1]), match[3]) if match else None

    @override
    def partition_in_key(self, key: str) -> str:
        match = re.fullmatch(r"flat/([^/]+-\d+)/[^/]+", key)
        return match[1] if match else ""


def plain(layout: Callable[[ObjectStore], SegmentLayout]) -> Callable[[ObjectStore, Path], Rig]:
    return lambda store, scratch: Rig(layout(store), store)


def brokers(layout: str, **settings: object) -> Callable[[ObjectStore, Path], Rig]:
    """A layout of brokers, as the composition root makes it. ``settings``: [tier.aiven]."""

    def rig(store: ObjectStore, scratch: Path) -> Rig:
        (scratch / "key.pem").write_bytes(private_key())
        aiven = {**settings, "key_pairs": {"key1": str(scratch / "key.pem")}}
        made = Settings(tier=TierSettings(aiven=AivenSettings.model_validate(aiven)))
        return Rig(KINDS["kafka", layout].layout(made, store, TopicIdLookup({"orders": TopicId("R0AHqObxTZmsN-zsxr_0TQ")})), store)

    return rig


def pinterest(store: ObjectStore, scratch: Path) -> Rig:
    layout = PinterestLayout(store, PinterestObjectKeys("prod", entropy_bits=7))
    return Rig(layout, store, kinds=("log", "index", "timeindex"), id_of=derive_segment_id)


@cache
def private_key() -> bytes:
    return RSA.generate(2048).export_key("PEM", pkcs=8)


@dataclass(frozen=True)
class Row:
    """A layout in this suite. layout: the class, which is asked what it can do before any test runs."""

    layout: type[WholeLogUploadLayout]
    make: Callable[[ObjectStore, Path], Rig]


RIGS: Mapping[str, Row] = {
    "native": Row(NativeLayout, plain(NativeLayout)),
    "native with digits": Row(NativeLayout, plain(partial(NativeLayout, entropy_bits=3))),
    "flat": Row(FlatLayout, plain(FlatLayout)),
    "pinterest": Row(PinterestLayout, pinterest),
    "kafka-local": Row(KafkaLocalLayout, brokers("kafka-local")),
    "aiven": Row(AivenLayout, brokers("aiven", key_prefix="some/prefix-", chunk_size=1000)),
    "aiven, packed": Row(AivenLayout, brokers("aiven", chunk_size=1000, compression="zstd", active_key_pair="key1")),
}
STORES = ("directory", "memory", "moto")


def rigs(*, composing: bool = False) -> list[str]:
    """All layouts in all stores, or those that compose logs of copied ranges."""
    return [
        f"{name} in {store}" for name, row in RIGS.items() for store in STORES if row.layout.should_record_batch_digests or not composing
    ]


composing_rigs = pytest.mark.parametrize("rig", rigs(composing=True), indirect=True)


@pytest.fixture(params=rigs())
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    layout, _, kind = request.param.partition(" in ")
    if kind == "directory":
        yield RIGS[layout].make(open_store((tmp_path / "a tier").as_uri()), tmp_path)
    elif kind == "memory":
        yield RIGS[layout].make(MemoryStore(Clock(), RequestCounters()), tmp_path)
    else:
        yield RIGS[layout].make(request.getfixturevalue("s3_bucket").open(), tmp_path)


def contents_of(seed: int, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Of every kind; the log is large enough for a range to be a part of it."""
    sizes = {"log": 5000, "index": 80, "timeindex": 120, "txnindex": 34, "snapshot": 60, "leader-epoch-checkpoint": 12}
    return {kind: hashlib.shake_128(f"{seed} {kind}".encode()).digest(sizes[kind]) for kind in FILE_KINDS if kind not in without}


def segment_of(start: int, contents: Contents, *, digests: bool = True) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        id=random_id(start),
        start_offset=Offset(start),
        end_offset=Offset(start + 9),
        size_bytes=len(contents["log"]),
        max_timestamp_ms=TimestampMs(1_700_000_000_000),
        mtime_ms=1_700_000_000_001,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(0)),),
        files={
            kind: SegmentFile(size=len(data), sha256=hashlib.sha256(data).hexdigest() if digests else "") for kind, data in contents.items()
        },
    )


class TestReading:
    def test_every_file_comes_as_it_was_stored(self, rig: Rig, tmp_path: Path) -> None:
        contents = rig.contents(1)
        segment = rig.segment(0, contents)
        rig.stored(segment, contents)
        assert dict(rig.layout.segment_files(NAME, segment)) == segment.files
        for kind, data in contents.items():
            assert rig.layout.read_file(NAME, segment, kind) == data
            assert rig.layout.download_file(NAME, segment, kind, tmp_path / kind) > 0
            assert (tmp_path / kind).read_bytes() == data
            assert read_verified_file(rig.layout, NAME, segment, kind) == data
            assert download_segment_file(rig.layout, NAME, segment, kind, tmp_path / f"{kind} again").matches_recorded_content(
                segment.files[kind]
            )

    def test_a_range_is_shorter_only_where_the_file_ends(self, rig: Rig) -> None:
        contents = rig.contents(2)
        segment = rig.segment(0, contents)
        rig.stored(segment, contents)
        log = contents["log"]
        for start, length in ((0, 1), (0, 0), (17, 1000), (4999, 1), (4990, 100), (0, 5000), (0, 9000), (2500, None)):
            end = None if length is None else start + length
            assert rig.layout.read_file(NAME, segment, "log", start, length) == log[start:end], (start, length)

    def test_what_is_listed_lies_in_the_folder_and_has_all_parts(self, rig: Rig) -> None:
        contents = rig.contents(7)
        segment = rig.segment(0, contents)
        rig.stored(segment, contents)
        listed = list(rig.layout.list_objects(NAME))
        folder = rig.layout.partition_folder(NAME)
        assert folder.endswith("/")
        assert all(one.key.startswith(folder) for one in listed)
        assert rig.layout.required_kinds <= {one.kind for one in listed if one.segment_id == segment.id}
        assert {rig.layout.object_name(NAME, segment, part) for part in rig.layout.required_kinds} <= {one.key for one in listed}

    def test_what_is_not_there_is_not_found(self, rig: Rig, tmp_path: Path) -> None:
        segment = rig.segment(0, rig.contents(3))
        with pytest.raises(NotFound):
            rig.layout.read_file(NAME, segment, "log")
        with pytest.raises(NotFound):
            rig.layout.download_file(NAME, segment, "log", tmp_path / "log")
        assert "missing" in rig.layout.stored_segment_problem(NAME, segment)

    def test_without_a_digest_the_size_is_what_counts(self, rig: Rig) -> None:
        contents = rig.contents(4)
        segment = rig.segment(0, contents, digests=False)
        rig.stored(rig.segment(0, contents), contents)
        assert rig.layout.stored_segment_problem(NAME, segment) == ""
        assert read_verified_file(rig.layout, NAME, segment, rig.kinds[-1]) == contents[rig.kinds[-1]]

    def test_the_list_names_what_it_knows(self, rig: Rig) -> None:
        segments = [rig.segment(start, rig.contents(start)) for start in (0, 100)]
        for segment in segments:
            rig.stored(segment, rig.contents(segment.start_offset))
        foreign = rig.segment(7, rig.contents(7))
        rig.stored(foreign, rig.contents(7), OTHER)
        listed = list(rig.layout.list_objects(NAME))
        assert {(item.segment_id, item.start_offset) for item in listed} == {(segment.id, segment.start_offset) for segment in segments}
        # A layout may have objects that hold no file, such as one that says where the files lie in the others.
        assert {item.key for item in listed} >= {rig.layout.object_name(NAME, s, kind) for s in segments for kind in s.files}
        assert all(item.size > 0 and item.modified_ms > 0 for item in listed)
        assert {rig.layout.partition_in_key(item.key) for item in listed} == {str(NAME)}
        assert {rig.layout.partition_in_key(key) for key in ("tier-id.json", "some/where/else", f"{NAME}x/y")} == {""}

    def test_strangers_are_listed_as_such(self, rig: Rig) -> None:
        segment = rig.segment(0, rig.contents(5))
        rig.stored(segment, rig.contents(5))
        folder = rig.layout.object_name(NAME, segment, "log").rpartition("/")[0]
        rig.store.create(f"{folder}/notes.txt", b"mine")
        strangers = [item for item in rig.layout.list_objects(NAME) if not item.segment_id]
        assert [(item.key, item.size, item.start_offset, item.kind) for item in strangers] == [(f"{folder}/notes.txt", 4, -1, "")]


class TestWriting:
    def test_an_upload_reads_back_without_a_problem(self, rig: Rig, tmp_path: Path) -> None:
        contents = rig.contents(1, without=("txnindex",))
        (tmp_path / "the log").write_bytes(contents["log"])
        segment = rig.segment(0, contents)
        assert rig.layout.upload_segment(NAME, segment, {**contents, "log": tmp_path / "the log"}) == ""
        assert rig.layout.stored_segment_problem(NAME, segment) == ""
        assert {kind: rig.layout.read_file(NAME, segment, kind) for kind in contents} == contents

    def test_the_same_upload_again_is_done_already(self, rig: Rig) -> None:
        contents = rig.contents(2)
        segment = rig.segment(0, contents)
        for _ in range(2):
            assert rig.layout.upload_segment(NAME, segment, contents) == ""

    def test_the_rest_of_an_upload_that_was_cut_short(self, rig: Rig) -> None:
        contents = rig.contents(3)
        segment = rig.segment(0, contents)
        assert rig.layout.upload_segment(NAME, segment, contents) == ""
        rig.store.delete([rig.layout.object_name(NAME, segment, rig.kinds[-1])])
        assert "missing" in rig.layout.stored_segment_problem(NAME, segment)
        assert rig.layout.upload_segment(NAME, segment, contents) == ""
        assert rig.layout.stored_segment_problem(NAME, segment) == ""

    def test_other_content_under_the_same_id_is_named_and_stays(self, rig: Rig) -> None:
        first, second = rig.contents(4), rig.contents(5)
        assert rig.layout.upload_segment(NAME, rig.segment(0, first), first) == ""
        assert rig.layout.object_name(NAME, rig.segment(0, second), "log") in rig.layout.upload_segment(
            NAME, rig.segment(0, second), second
        )
        assert rig.layout.read_file(NAME, rig.segment(0, first), "log") == first["log"]

    def test_an_object_of_another_size_is_a_problem(self, rig: Rig) -> None:
        contents = rig.contents(6)
        segment = rig.segment(0, contents)
        rig.stored(segment, contents)
        rig.replace(rig.layout.object_name(NAME, segment, "log"), lambda data: data[:-1])
        assert rig.layout.object_name(NAME, segment, "log") in rig.layout.stored_segment_problem(NAME, segment)

    def test_all_objects_go_and_no_others(self, rig: Rig) -> None:
        segments = [rig.segment(start, rig.contents(start)) for start in (0, 100, 200)]
        for segment in segments:
            rig.stored(segment, rig.contents(segment.start_offset))
        rig.stored(segments[0], rig.contents(0), OTHER)
        before = rig.objects()
        gone = {item.key for item in rig.layout.list_objects(NAME) if item.segment_id != segments[1].id}
        # Of one of them nothing is known but its name, as of a plan that was never carried out.
        rig.layout.delete_segments(NAME, [segments[0], SegmentIdAndStartOffset(segments[2].id, segments[2].start_offset)])
        assert rig.objects() == before - gone
        rig.layout.delete_segments(NAME, segments[:1])  # absent ones are fine
        assert known(rig.layout.list_objects(NAME)) == {segments[1].id}
        assert known(rig.layout.list_objects(OTHER)) == {segments[0].id}


class TestPuttingTogether:
    """A new log of an old one's range and of local bytes."""

    def test_only_plain_objects_with_digests_of_ours_are_copied(self, rig: Rig) -> None:
        segment = rig.segment(0, rig.contents(1))
        rig.stored(segment, rig.contents(1))
        assert rig.layout.log_file_copy_limits == (rig.store.server_copy_limits if rig.layout.should_record_batch_digests else None)
        if not rig.layout.should_record_batch_digests:
            with pytest.raises(CannotCopy, match="cannot compose logs"):
                rig.layout.log_object_version(NAME, segment)
            with pytest.raises(CannotCopy, match="cannot compose logs"):
                rig.layout.compose_segment(NAME, segment, [], rig.contents(1))

    @pytest.fixture
    def spliced(self, rig: Rig, tmp_path: Path) -> Spliced:
        """Its source is there already."""
        old, new = log_of(b"old", b"end"), log_of(b"old", b"new", b"and newer")
        beside = rig.contents(1, without=("log",))
        source = rig.segment(0, {"log": old, **beside})
        source = with_log(source, replace(source.files["log"], batches=digest_of(tmp_path, old)))
        rig.stored(source, {"log": old, **beside})
        kept = len(old) - len(log_of(b"end"))
        (tmp_path / "anew").write_bytes(new[kept:])
        made = rig.segment(100, {"log": new, **beside})
        made = with_log(made, SegmentFile(size=len(new), batches=digest_of(tmp_path, new)))
        return Spliced(rig, source, made, new, beside, kept, tmp_path / "anew")

    @composing_rigs
    def test_it_reads_back_without_a_problem(self, spliced: Spliced, tmp_path: Path) -> None:
        layout, made = spliced.rig.layout, spliced.made
        assert spliced.compose() == ""
        assert layout.stored_segment_problem(NAME, made) == ""
        assert layout.read_file(NAME, made, "log", 0, len(spliced.log) + 1) == spliced.log
        assert {kind: layout.read_file(NAME, made, kind) for kind in spliced.beside} == spliced.beside
        assert download_segment_file(layout, NAME, made, "log", tmp_path / "down").matches_recorded_content(made.files["log"])
        assert read_verified_file(layout, NAME, made, "log") == spliced.log
        about = spliced.rig.store.head(layout.object_name(NAME, made, "log")).metadata
        assert about == {"batches": made.files["log"].batches, "mtime_ms": "1700000000001"}
        of_source = spliced.source.files["log"]
        about = spliced.rig.store.head(layout.object_name(NAME, spliced.source, "log")).metadata
        assert about == {"sha256": of_source.sha256, "batches": of_source.batches, "mtime_ms": "1700000000001"}

    @composing_rigs
    @pytest.mark.parametrize("by", ["the same way", "whole", "whole, by an earlier program", "whole, by somebody else"])
    def test_what_exists_with_the_same_content_is_done(self, by: str, spliced: Spliced) -> None:
        layout, made = spliced.rig.layout, spliced.made
        file = SegmentFile(size=len(spliced.log), sha256=hashlib.sha256(spliced.log).hexdigest())
        if by == "the same way":
            assert spliced.compose() == ""
        elif by == "whole, by somebody else":
            spliced.rig.store.create(layout.object_name(NAME, made, "log"), spliced.log)
        else:
            file = replace(file, batches=made.files["log"].batches) if by == "whole" else file
            assert layout.upload_segment(NAME, with_log(made, file), {"log": spliced.log, **spliced.beside}) == ""
        assert spliced.compose() == ""
        assert layout.stored_segment_problem(NAME, made) == ""
        assert layout.upload_segment(NAME, with_log(made, file), {"log": spliced.log, **spliced.beside}) == ""
        assert layout.stored_segment_problem(NAME, with_log(made, file)) == ""

    @composing_rigs
    @pytest.mark.parametrize("known", ["both", "sha256", "batches", ""])
    def test_other_content_is_named_and_stays(self, known: str, spliced: Spliced, tmp_path: Path) -> None:
        layout, made = spliced.rig.layout, spliced.made
        other = log_of(b"odd", b"new", b"and newer")
        assert len(other) == len(spliced.log)
        about = {"sha256": hashlib.sha256(other).hexdigest(), "batches": digest_of(tmp_path, other)}
        key = layout.object_name(NAME, made, "log")
        spliced.rig.store.create(key, other, {what: told for what, told in about.items() if known in ("both", what)})
        assert spliced.compose() == f"{key} exists already with other content"
        assert layout.stored_segment_problem(NAME, made) == f"{spliced.rig.store.url}/{key} has another digest than was recorded"
        assert spliced.rig.store.get(key, 0, len(other) + 1) == other
        assert not spliced.rig.objects() & {layout.object_name(NAME, made, kind) for kind in spliced.beside}

    @composing_rigs
    @pytest.mark.parametrize("again", ["composed", "uploaded"])
    def test_a_composed_log_that_nobody_has_compared_is_read(self, again: str, spliced: Spliced) -> None:
        """A process may die between the completion and the comparison; the object then bears the digest of what it ought to be."""
        layout, made = spliced.rig.layout, spliced.made
        key = layout.object_name(NAME, made, "log")
        spliced.rig.store.create(key, flipped(spliced.log), {"batches": made.files["log"].batches, "mtime_ms": "1700000000001"})
        if again == "composed":
            assert spliced.compose() == f"{key} exists already with other content"
        else:
            file = replace(made.files["log"], sha256=hashlib.sha256(spliced.log).hexdigest())
            problem = layout.upload_segment(NAME, with_log(made, file), {"log": spliced.log, **spliced.beside})
            assert problem == f"{key} exists already with other content"
        assert spliced.rig.store.get(key, 0, len(spliced.log) + 1) == flipped(spliced.log)

    @composing_rigs
    def test_damage_in_an_object_that_does_not_say_what_it_is(self, spliced: Spliced) -> None:
        layout, made = spliced.rig.layout, spliced.made
        key = layout.object_name(NAME, made, "log")
        assert spliced.compose() == ""
        spliced.rig.store.delete([key])
        spliced.rig.store.create(key, flipped(spliced.log))
        assert layout.stored_segment_problem(NAME, made) == f"{spliced.rig.store.url}/{key} has another digest than was recorded"
        with pytest.raises(BadData, match="its digest is not the one that was recorded"):
            read_verified_file(layout, NAME, made, "log")

    @composing_rigs
    def test_a_version_is_of_what_was_recorded(self, spliced: Spliced) -> None:
        layout, source = spliced.rig.layout, spliced.source
        key = layout.object_name(NAME, source, "log")
        assert layout.log_object_version(NAME, source) == spliced.rig.store.head(key).etag != ""
        spliced.rig.replace(key, lambda data: data[:-1])
        with pytest.raises(BadData, match=f"it has {source.size_bytes - 1} bytes, recorded are {source.size_bytes}"):
            layout.log_object_version(NAME, source)
        spliced.rig.store.delete([key])
        with pytest.raises(NotFound):
            layout.log_object_version(NAME, source)
        data = spliced.log[: source.size_bytes].ljust(source.size_bytes)
        spliced.rig.store.create(key, data, {"sha256": hashlib.sha256(data).hexdigest()})
        with pytest.raises(BadData, match="its digest is not the one"):
            layout.log_object_version(NAME, source)

    @composing_rigs
    def test_a_source_that_was_replaced_meanwhile(self, spliced: Spliced) -> None:
        pieces = spliced.pieces()
        spliced.rig.replace(pieces[0].key, flipped)
        before = spliced.rig.objects()
        with pytest.raises(Unavailable, match="is not the version that was to be copied"):
            spliced.rig.layout.compose_segment(NAME, spliced.made, pieces, spliced.beside)
        assert spliced.rig.objects() == before

    @pytest.mark.parametrize("rig", ["native in memory"], indirect=True)
    def test_a_store_that_turns_out_not_to_copy(self, spliced: Spliced) -> None:
        pieces, before = spliced.pieces(), spliced.rig.objects()
        assert isinstance(spliced.rig.store, MemoryStore)
        spliced.rig.store.server_copy_limits = None
        assert spliced.rig.layout.log_file_copy_limits is None
        with pytest.raises(CannotCopy):
            spliced.rig.layout.compose_segment(NAME, spliced.made, pieces, spliced.beside)
        assert spliced.rig.objects() == before


@dataclass(frozen=True)
class Spliced:
    """``made``: its log is the first ``kept`` bytes of the source's log, and those of the file ``anew``."""

    rig: Rig
    source: RemoteLogSegmentMetadata
    made: RemoteLogSegmentMetadata
    log: bytes
    beside: Contents
    kept: int
    anew: Path

    def pieces(self) -> tuple[ObjectRangeToCopy, FileRange]:
        layout, source = self.rig.layout, self.source
        copied = ObjectRangeToCopy(layout.object_name(NAME, source, "log"), 0, self.kept, layout.log_object_version(NAME, source))
        return copied, FileRange(self.anew, 0, len(self.log) - self.kept)

    def compose(self) -> str:
        pieces: tuple[ComposeSource, ...] = self.pieces()
        return self.rig.layout.compose_segment(NAME, self.made, pieces, self.beside)


def log_of(*texts: bytes) -> bytes:
    """A batch for each; that of b"o..." is large enough to be copied."""
    sizes = [5 << 20 if text.startswith(b"o") else 3000 for text in texts]
    bodies = [(text * size)[:size] for text, size in zip(texts, sizes, strict=True)]
    return b"".join(prepend_batch_header(offset, 0, 0, 0, 0, 0, NO_PRODUCER, 1, body) for offset, body in enumerate(bodies))


def digest_of(scratch: Path, log: bytes) -> str:
    (scratch / "digested").write_bytes(log)
    return verified_header_digest(scratch / "digested")


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def with_log(segment: RemoteLogSegmentMetadata, file: SegmentFile) -> RemoteLogSegmentMetadata:
    return segment.model_copy(update={"files": {**segment.files, "log": file}})


def known(listed: Iterator[ListedObject]) -> set[str]:
    return {item.segment_id for item in listed}
