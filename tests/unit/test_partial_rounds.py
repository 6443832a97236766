"""Segments that are read in part: each check that stands between a wrong key directory and a new segment, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from bloom.directory import HAS_TOMBSTONE, KeyDirectory
from bloom.sidecar import RemovableRecordCounts, Sidecar
from compactor.cleaner.retention import BatchRetentionDecisions, TransactionVerdicts
from compactor.cleaner.source import SourceSegment, open_source_segment
from compactor.constants import NEVER_MS, LeaderEpoch, Offset, TimestampMs
from compactor.model.segment import Balance, CountAndDigestSum, EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.records.batches import HORIZON, BatchTable, copy_batch_headers, select_batches_of_table, sha256_of_batch_headers
from compactor.records.encode import COPY, BalanceDigestKey, digest_sum_of_headers
from compactor.round.partial import (
    BatchRange,
    KeyDirectoryCache,
    PartialRewritePlan,
    SegmentPartToRead,
    WholeSegmentReadNeededError,
    balance_with_copies,
    composed_removable_counts,
    flag_touched_batches,
    whole_read_reason,
)
from compactor.storage.port import CopyLimits
from compactor.tier.sidecars import SidecarStore
from tests.builders import LogBuilder

NOW = 1_000
BATCHES = 4
KEY = BalanceDigestKey(b"k" * 16)
READ = np.array([1, 3])
"""Batches that are read; 0 and 2 are copied."""


@pytest.fixture
def source(tmp_path: Path) -> SourceSegment:
    log = LogBuilder()
    for number in range(BATCHES):
        log.put(f"k{number}=value {number}")
    (path,) = log.write(tmp_path / "log").glob("*.log")
    return open_source_segment(0, path, 0, None, 0, -1, 1 << 20)


@pytest.fixture
def directory(source: SourceSegment) -> KeyDirectory:
    return KeyDirectory(
        segment_id="s" * 22,
        headers=copy_batch_headers(source.buf, source.table.position),
        control=source.table.control,
        coordinator_epoch=source.table.coordinator_epoch,
        flags=np.zeros(BATCHES, np.uint8),
        keys=np.zeros(BATCHES, np.int32),
        pieces=np.zeros(0, np.uint32),
    )


def splice_of(table: BatchTable, directory: KeyDirectory) -> PartialRewritePlan:
    stretches = tuple(BatchRange(number, number + 1, copied_batch_flags=number not in READ) for number in range(BATCHES))
    return PartialRewritePlan(lambda: directory, table, stretches, "version")


def part_with(source: SourceSegment, directory: KeyDirectory) -> SegmentPartToRead:
    """The segment with batches 1 and 3 read."""
    position, size = source.table.position[READ], source.table.size[READ]
    buf = np.concatenate([source.buf[at : at + length] for at, length in zip(position, size, strict=True)])
    read = replace(source, buf=buf, table=select_batches_of_table(source.table, READ))
    nobody = cast("TransactionVerdicts", None)
    return SegmentPartToRead(splice_of(source.table, directory), source, nobody, READ, read, nobody)


class TestWhatIsReadIsWhatTheDirectorySays:
    def test_the_same(self, source: SourceSegment, directory: KeyDirectory) -> None:
        part_with(source, directory).require_matching_batches()

    @pytest.mark.parametrize("batch", READ)
    def test_another_header(self, source: SourceSegment, directory: KeyDirectory, batch: int) -> None:
        """The batches that were read are sound; only the directory tells that they are not those that were meant."""
        headers = directory.headers.copy()
        headers[batch, 7] ^= 1
        with pytest.raises(WholeSegmentReadNeededError, match="its batches do not match its key directory"):
            part_with(source, replace(directory, headers=headers)).require_matching_batches()

    def test_a_payload_that_does_not_fit_its_crc(self, source: SourceSegment, directory: KeyDirectory) -> None:
        part = part_with(source, directory)
        buf = part.source.buf.copy()
        buf[-1] ^= 1
        with pytest.raises(WholeSegmentReadNeededError, match="CRC"):
            replace(part, source=replace(part.source, buf=buf)).require_matching_batches()


class TestTheDirectoryIsTheSegments:
    def found(self, directory: KeyDirectory, recorded: str) -> KeyDirectory | None:
        class Stored:
            def load_key_directories(self, ids: Sequence[str]) -> Iterator[tuple[KeyDirectory, int]]:
                return ((directory, 1) for _ in ids)

        ((found, _),) = KeyDirectoryCache(cast("SidecarStore", Stored())).load_key_directories([segment(batches=recorded)])
        return found

    def test_by_the_digest_of_its_headers(self, directory: KeyDirectory) -> None:
        recorded = sha256_of_batch_headers(directory.headers)
        assert self.found(directory, recorded) is directory
        other = replace(directory, headers=directory.headers[::-1].copy())
        assert self.found(other, recorded) is None
        assert self.found(directory, "") is None


class TestTheSumOfAllBatches:
    def test_is_the_recorded_one(self, source: SourceSegment, directory: KeyDirectory) -> None:
        part = part_with(source, directory)
        whole = digest_sum_of_headers(directory.headers, KEY)
        read = digest_sum_of_headers(directory.headers[READ], KEY)
        balance = balance_with_copies(part, Balance(sources=read, left=read, result=read), whole, KEY)
        assert (balance.sources, balance.left, balance.result, balance.imbalance_problem()) == (whole, whole, whole, "")

    @pytest.mark.parametrize("recorded", [None, CountAndDigestSum(), CountAndDigestSum(count=BATCHES, digest="1" * 32)])
    def test_is_another_than_was_recorded(self, source: SourceSegment, directory: KeyDirectory, recorded: CountAndDigestSum | None) -> None:
        read = digest_sum_of_headers(directory.headers[READ], KEY)
        with pytest.raises(WholeSegmentReadNeededError, match="do not come to the sum that was recorded"):
            balance_with_copies(part_with(source, directory), Balance(sources=read), recorded, KEY)


class TestWhichBatchesAreTouched:
    @pytest.mark.parametrize(("horizon_ms", "is_touched"), [(NOW + 1, False), (NOW, True), (NOW - 1, True)])
    def test_a_tombstone_from_its_horizon_on(
        self, source: SourceSegment, directory: KeyDirectory, horizon_ms: int, is_touched: bool
    ) -> None:
        table = source.table.replace_columns(base_timestamp=np.full(BATCHES, horizon_ms), attributes=np.full(BATCHES, HORIZON, np.int16))
        flags = np.full(BATCHES, HAS_TOMBSTONE, np.uint8)
        nothing = np.zeros(BATCHES, np.bool_)
        outcomes = BatchRetentionDecisions(np.full(BATCHES, COPY), nothing, nothing)
        found = flag_touched_batches(table, outcomes, replace(directory, flags=flags), nothing, NOW)
        assert found.tolist() == [is_touched] * 3 + [True]  # the last one always is


class TestDueTogether:
    def test_copied_tombstones_count_with_their_horizon(self, source: SourceSegment, directory: KeyDirectory) -> None:
        table = source.table.replace_columns(base_timestamp=np.array([70, 10, 50, 20]))
        marked = replace(directory, flags=np.full(BATCHES, HAS_TOMBSTONE, np.uint8))
        fresh = RemovableRecordCounts(3, 1, 90, 2)
        assert composed_removable_counts(splice_of(table, marked), fresh) == RemovableRecordCounts(5, 1, 50, 2)
        assert composed_removable_counts(
            splice_of(table, marked), replace(fresh, earliest_tombstone_horizon_ms=40)
        ) == RemovableRecordCounts(5, 1, 40, 2)
        assert composed_removable_counts(splice_of(table, directory), RemovableRecordCounts()) == RemovableRecordCounts(0, 0, NEVER_MS, 0)


def segment(batches: str = "b" * 64, **changes: Any) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        id="s" * 22,
        start_offset=Offset(0),
        end_offset=Offset(99),
        size_bytes=8 << 20,
        max_timestamp_ms=TimestampMs(1),
        mtime_ms=1,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(0)),),
        files={"log": SegmentFile(size=8 << 20, batches=batches)},
        content=CountAndDigestSum(),
    ).model_copy(update=changes)


class TestWhatIsReadWhole:
    SIDECAR = cast("Sidecar", type("Counted", (), {"records": 1_000}))
    COPIES = CopyLimits(0, 1 << 30)

    def test_nothing_stands_against_a_plain_segment(self) -> None:
        assert whole_read_reason(segment(), self.SIDECAR, 1, self.COPIES) == ""

    @pytest.mark.parametrize(
        "changes",
        [
            {"negative_timestamps": 1},
            {"files": segment().files | {"txnindex": SegmentFile(size=1)}},
            {"end_offset": 90, "copied_end_offset": 99},
        ],
        ids=["negative timestamps", "aborted transactions", "an end that is cut"],
    )
    def test_what_needs_a_look_at_all_of_it(self, changes: dict[str, Any]) -> None:
        assert "require reading all of it" in whole_read_reason(segment(**changes), self.SIDECAR, 1, self.COPIES)

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"content": None}, "an earlier program"),
            ({"size_bytes": 1 << 19}, "short"),
            ({"files": {"log": SegmentFile(size=1)}}, "earlier"),
        ],
    )
    def test_what_is_not_known_well_enough(self, changes: dict[str, Any], why: str) -> None:
        assert why in whole_read_reason(segment(**changes), self.SIDECAR, 1, self.COPIES)
