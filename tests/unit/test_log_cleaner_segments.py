"""LogCleanerTest's behaviours on segments: how they are grouped, what their files look like, what a failure leaves behind."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData, UsageError
from tests.builders import Life, LogBuilder, log_of, read, refused_cleaning
from tests.plain_format import fix_crc
from tests.plain_log import indexes_of

MAX32 = 2**31 - 1


def bases(life: Life) -> list[int]:
    return [base for base, _ in (life.summary.segments if life.summary else ())]


def many_segments(count: int = 6) -> LogBuilder:
    log = LogBuilder()
    for number in range(count):
        log.put(f"k{number}=" + "x" * 31)
        if number < count - 1:
            log.roll()
    return log


def test_outputs_are_exactly_as_long_as_their_content(tmp_path: Path) -> None:
    """testSizeTrimmedForPreallocatedAndCompactedTopic: nothing preallocated is left, in indexes neither."""
    log = LogBuilder()
    for number in range(40):
        log.put(f"k{number % 30}=" + "x" * 200)
    life = Life(tmp_path, log)
    life.round(index_interval_bytes=500)
    (batches,) = read(tmp_path / "out-1").values()
    path = tmp_path / "out-1" / f"{0:020}.log"
    assert path.stat().st_size == sum(len(batch.raw) for batch in batches)
    index, time_index = indexes_of(batches, 0, 500)
    assert len(index) > 8
    assert path.with_suffix(".index").read_bytes() == index
    assert path.with_suffix(".timeindex").read_bytes() == time_index


def test_grouping_by_bytes(tmp_path: Path) -> None:
    """testSegmentGrouping: greedy, in order, by the inputs' sizes before cleaning."""
    log = many_segments()
    size = len(log.segments[0][1][0])
    alone = [0, 1, 2, 3, 4, 5]  # one that is too large by itself is its own group
    for limit, expected in ((1 << 30, [0]), (3 * size, [0, 3]), (3 * size - 1, [0, 2, 4]), (size, alone), (1, alone)):
        life = Life(tmp_path / str(limit), many_segments())
        life.round(segment_bytes=limit)
        assert bases(life) == expected


def test_grouping_by_index_size(tmp_path: Path) -> None:
    """testSegmentGrouping: offset and time indexes have a limit of their own."""

    def log() -> LogBuilder:
        made = LogBuilder()
        for segment in range(4):
            for number in range(4):
                made.put(f"{segment}-{number}=" + "x" * 100)
            if segment < 3:
                made.roll()
        return made

    # With an interval of 1 each segment has 3 offset entries (24 bytes) and 3 time entries (36 bytes).
    for limit, expected in ((10_000, [0]), (108, [0, 12]), (107, [0, 8]), (71, [0, 4, 8, 12])):
        folder = log().write(tmp_path / f"log-{limit}", indexes=True, index_interval_bytes=1)
        sizes = {path.suffix: path.stat().st_size for path in folder.glob(f"{4:020}.*")}
        assert (sizes[".index"], sizes[".timeindex"]) == (24, 36)
        request = OfflineCleanOptions(now_ms=1, segment_index_bytes=limit, index_interval_bytes=4096)
        summary = clean_log_directory(folder, tmp_path / f"out-{limit}", request)
        assert [base for base, _ in summary.segments] == expected


def test_grouping_by_offset_span(tmp_path: Path) -> None:
    """testSegmentGroupingWithSparseOffsets: offsets within 2^31 - 1 of the group's base fit one index, one more does not."""
    for gap, expected in ((MAX32, [0]), (MAX32 + 1, [0, MAX32 + 1])):
        log = log_of("0=a")
        log.roll(gap)
        log.put("1=a")
        life = Life(tmp_path / str(gap), log)
        life.round()
        # the bound of the last segment is the offset before the end of the range
        assert bases(life) == expected


def test_empty_segments_join_over_any_span(tmp_path: Path) -> None:
    """testSegmentGroupingWithSparseOffsetsAndEmptySegments (KAFKA-12889): else a zero-byte file would remain every 2^31 offsets."""
    log = log_of("0=a")
    for number in range(1, 4):
        log.roll(number * (MAX32 + 10))
    log.add("/; 1=a")
    life = Life(tmp_path, log)
    life.round()
    assert bases(life)[0] == 0
    assert len(bases(life)) == 2


def test_span_is_measured_to_the_next_base(tmp_path: Path) -> None:
    """testSegmentGroupingFollowingLoadOfZeroIndex (KAFKA-5413): what counts is where the next segment begins, not an index."""
    log = log_of("0=a")
    log.roll(MAX32 - 1)
    log.put("1=a")
    log.roll(MAX32 + 1)
    log.put("2=a")
    log.roll(2 * MAX32)
    log.put("3=a")
    life = Life(tmp_path, log)
    life.round()
    assert bases(life) == [0, MAX32 + 1]


def test_output_base_is_the_first_inputs_and_empty_outputs_exist(tmp_path: Path) -> None:
    """A group that loses everything is a zero-byte segment; bases never move to the first offset that is left."""
    log = log_of("1=a; /; 2=a 1=b; /; 2=b")
    life = Life(tmp_path, log)
    life.round(segment_bytes=1)
    assert life.summary is not None
    assert life.summary.segments[0] == (0, 0)
    assert [base for base, _ in life.summary.segments] == [0, 1, 3]
    assert life.live() == ["2:1=b", "3:2=b"]
    for suffix in (".index", ".timeindex"):
        assert (life.folder / f"{0:020}{suffix}").read_bytes() == b""


def test_modification_time_is_the_last_inputs(tmp_path: Path) -> None:
    log = many_segments(4)
    log.mtimes = {0: 1_000, 1: 9_000, 2: 5_000, 3: 7_000}
    size = len(log.segments[0][1][0])
    life = Life(tmp_path, log)
    life.round(segment_bytes=2 * size)
    times = {path.name: path.stat().st_mtime_ns // 1_000_000 for path in (tmp_path / "out-1").iterdir()}
    assert times == {f"{base:020}{suffix}": time for base, time in ((0, 9_000), (2, 7_000)) for suffix in (".log", ".index", ".timeindex")}


def test_a_failed_round_leaves_nothing(tmp_path: Path) -> None:
    """testCleanSegmentsWithAbort: a round that ends early has replaced nothing."""
    log = many_segments(3)
    folder = log.write(tmp_path / "log")
    last = folder / f"{2:020}.log"
    last.write_bytes(last.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(BadData):
        clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_what_a_crash_left_is_no_obstacle(tmp_path: Path) -> None:
    """testRecoveryAfterCrash, as far as `clean` goes: an earlier run's half-written output is never taken for a result."""
    folder = many_segments(2).write(tmp_path / "log")
    half = tmp_path / "out.partial"
    half.mkdir()
    (half / f"{0:020}.log").write_bytes(b"half a batch")
    clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1))
    assert not half.exists()
    assert [len(batches) for batches in read(tmp_path / "out").values()] == [2]
    with pytest.raises(UsageError, match="exists"):
        clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1))


def test_time_index_points_at_the_earliest_batch_with_the_largest_time(tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("1=a", times=[50])
    log.put("2=a", "3=a", times=[90, 10])
    log.put("4=a", times=[90])
    life = Life(tmp_path, log)
    life.round()
    assert (life.folder / f"{0:020}.timeindex").read_bytes() == struct.pack(">qi", 90, 2)


def test_full_index_does_not_fail_the_round(tmp_path: Path) -> None:
    """A deviation: Kafka's round fails with "Attempt to append to a full index" where the outputs' entries exceed the limit."""
    log = LogBuilder()
    for number in range(40):
        log.put(f"k{number}=" + "x" * 60)
    life = Life(tmp_path, log, indexes=True)
    life.round(segment_index_bytes=64, index_interval_bytes=1)
    assert len(life.live()) == 40
    assert (life.folder / f"{0:020}.index").stat().st_size == 39 * 8


def test_offsets_that_no_index_holds_are_refused(tmp_path: Path) -> None:
    """testSegmentWithOffsetOverflow (KAFKA-6264), a deviation: Kafka splits the segment, gives the round up and tries again."""
    log = log_of("a=1")
    log.skip(2**31)
    log.put("b=1")
    refused = refused_cleaning(tmp_path, log, "offset")
    assert (refused.segment, refused.offset) == (f"{0:020}.log", 2**31 + 1)


def test_last_offset_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    """A delta that would make the last offset wrap around to a negative one."""
    log = log_of("a=1 b=1")
    raw = log.segments[0][1][0]
    log.segments[0][1][0] = fix_crc((2**63 - 1).to_bytes(8, "big") + raw[8:])
    refused = refused_cleaning(tmp_path, log, "the last offset lies before the base offset")
    assert (refused.position, refused.offset) == (0, 2**63 - 1)
