"""Logs of which nothing but their batches' digest is known (put together of copies): fetched, found on this machine, damaged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import override

from compactor.errors import BadData
from compactor.local.staging import DiskBudget, FileToStage, StagingFolder
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.records.batches import BatchHeaderDigestBuilder
from compactor.storage.wrappers import RequestCounters
from compactor.tier import contents
from compactor.tier.contents import stored_file_problem
from compactor.tier.plain import NativeLayout
from tests.builders import LogBuilder
from tests.support.keys import object_key
from tests.support.memory_store import Clock, MemoryStore
from tests.support.segments import segment_of

NAME = TopicPartition("orders", 0)
LOCAL = "orders-0/00000000000000000100.log"


def log_of(value: str = "some value") -> bytes:
    log = LogBuilder(100)
    for number in range(50):
        log.put(f"{number}={value}", f"{number + 1}={value}")
    return b"".join(log.segments[0][1])


LOG = log_of()
OTHER = log_of("else value")


def in_a_payload(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]


def in_an_offset(data: bytes) -> bytes:
    """No CRC is over that one."""
    return bytes([data[0], data[1] ^ 1]) + data[2:]


def cut(data: bytes) -> bytes:
    return data[:-1]


DAMAGE = [in_a_payload, in_an_offset, cut, lambda data: OTHER]


class Flipping(NativeLayout):
    """What passes through it is damaged on the way, the first ``times``."""

    def __init__(self, store: MemoryStore, damage: Callable[[bytes], bytes], times: int) -> None:
        super().__init__(store)
        self.damage, self.times, self.asked = damage, times, 0

    def _through(self, data: bytes) -> bytes:
        self.asked += 1
        return self.damage(data) if self.asked <= self.times else data

    @override
    def read_file(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, start: int = 0, length: int | None = None
    ) -> bytes:
        return self._through(super().read_file(name, segment, kind, start, length))

    @override
    def download_file(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, path: Path) -> int:
        return path.write_bytes(self._through(super().read_file(name, segment, kind)))


def layout_with(damage: Callable[[bytes], bytes], times: int) -> Flipping:
    store = MemoryStore(Clock(), RequestCounters())
    store.create(object_key(NAME, SEGMENT), LOG)
    return Flipping(store, damage, times)


def batches_of(data: bytes) -> str:
    digest = BatchHeaderDigestBuilder()
    digest.add_log_bytes(data)
    return digest.header_digest()


SEGMENT = segment_of({"log": LOG}).model_copy(update={"files": {"log": SegmentFile(size=len(LOG), batches=batches_of(LOG))}})


@pytest.fixture
def staging(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StagingFolder]:
    made = StagingFolder(tmp_path / "staging", layout_with(*request.param), DiskBudget(1 << 20), local_log_dirs=[tmp_path / "broker"])
    yield made
    made.close()


class TestFetching:
    def test_other_is_as_long(self) -> None:
        assert len(OTHER) == len(LOG)
        assert batches_of(OTHER) not in ("", batches_of(LOG))

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_what_is_damaged_on_its_way_is_fetched_once_more(self, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
        layout = layout_with(damage, 1)
        arrived = contents.download_segment_file(layout, NAME, SEGMENT, "log", tmp_path / "log")
        arrived.require_match("log", SEGMENT.files["log"])
        assert (tmp_path / "log").read_bytes() == LOG
        assert (arrived.size, arrived.transferred, layout.asked) == (len(LOG), len(LOG) + len(damage(LOG)), 2)
        assert contents.read_verified_file(layout_with(damage, 1), NAME, SEGMENT, "log") == LOG

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_what_is_damaged_where_it_lies_is_refused(self, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
        cause = f"it has {len(LOG) - 1} bytes" if damage is cut else "its digest is not the one that was recorded"
        arrived = contents.download_segment_file(layout_with(damage, 2), NAME, SEGMENT, "log", tmp_path / "log")
        assert not arrived.matches_recorded_content(SEGMENT.files["log"])
        with pytest.raises(BadData, match=f"bad data in the-object: the object was changed or damaged: {cause}"):
            arrived.require_match("the-object", SEGMENT.files["log"])
        with pytest.raises(BadData, match=cause):
            contents.read_verified_file(layout_with(damage, 2), NAME, SEGMENT, "log")

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_sha256_comes_first_where_both_are_known(self, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
        """It says more."""
        both = replace(SEGMENT.files["log"], sha256=hashlib.sha256(damage(LOG)).hexdigest(), size=len(damage(LOG)))
        segment = SEGMENT.model_copy(update={"files": {"log": both}})
        arrived = contents.download_segment_file(layout_with(damage, 1), NAME, segment, "log", tmp_path / "log")
        assert arrived.matches_recorded_content(both)
        assert arrived.found.batches == ""

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_in_a_store_that_says_nothing_of_its_objects(self, damage: Callable[[bytes], bytes]) -> None:
        store = MemoryStore(Clock(), RequestCounters())
        store.create("k", LOG)
        store.create("damaged", damage(LOG))
        assert stored_file_problem(store, "k", SEGMENT, "log") == ""
        problem = f"has {len(LOG) - 1} bytes, recorded are {len(LOG)}" if damage is cut else "has another digest than was recorded"
        assert stored_file_problem(store, "damaged", SEGMENT, "log") == f"memory://store/damaged {problem}"


class TestStaging:
    @pytest.mark.parametrize("staging", [(in_a_payload, 1)], indirect=True)
    def test_damaged_on_its_way(self, staging: StagingFolder) -> None:
        with staging.local_copy(FileToStage(NAME, SEGMENT, "log", LOCAL)) as path:
            assert path.read_bytes() == LOG
        assert staging.bytes_fetched == 2 * len(LOG)

    @pytest.mark.parametrize("staging", [(in_a_payload, 2)], indirect=True)
    def test_damaged_where_it_lies(self, staging: StagingFolder) -> None:
        with (
            pytest.raises(BadData, match="its digest is not the one"),
            staging.local_copy(FileToStage(NAME, SEGMENT, "log", LOCAL)),
        ):
            pytest.fail("it came")
        assert list(staging.folder.iterdir()) == []

    @pytest.mark.parametrize("staging", [(in_a_payload, 0)], indirect=True)
    @pytest.mark.parametrize("digest", ["sha256", "batches", ""])
    @pytest.mark.parametrize("lies_there", [LOG, OTHER, in_a_payload(LOG), in_an_offset(LOG)])
    def test_a_broker_s_log_directory_may_have_it(self, staging: StagingFolder, lies_there: bytes, digest: str, tmp_path: Path) -> None:
        (tmp_path / "broker" / "orders-0").mkdir(parents=True)
        (tmp_path / "broker" / LOCAL).write_bytes(lies_there)
        known = {"sha256": hashlib.sha256(LOG).hexdigest(), "batches": batches_of(LOG)}
        file = SegmentFile(len(LOG), **{what: told for what, told in known.items() if what == digest})
        with staging.local_copy(FileToStage(NAME, SEGMENT.model_copy(update={"files": {"log": file}}), "log", LOCAL)) as path:
            assert path.read_bytes() == LOG
        assert staging.bytes_fetched == (0 if digest and lies_there == LOG else len(LOG))
