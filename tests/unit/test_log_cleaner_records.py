"""LogCleanerTest's behaviours on records, tombstones, headers of emptied batches and damaged data, driving `clean`."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData
from tests.builders import GZIP, Life, LogBuilder, entry, wrapper

LATER = 10**12


def test_superseded_records_go(tmp_path: Path) -> None:
    """testCleanSegments: overwritten keys vanish, the others stay; every input byte is counted once."""
    log = LogBuilder()
    for number in range(10):
        log.put(f"{number}=old", f"other{number}=kept")
    log.roll()
    log.put("1=new", "3=new", "5=new", "7=new", "9=new")
    life = Life(tmp_path, log)
    size = sum(path.stat().st_size for path in life.folder.glob("*.log"))
    summary = life.round()
    assert [text.split(":")[1] for text in life.live() if "other" not in text] == [
        *(f"{number}=old" for number in (0, 2, 4, 6, 8)),
        *(f"{number}=new" for number in (1, 3, 5, 7, 9)),
    ]
    assert sum("other" in text for text in life.live()) == 10
    assert summary.bytes_read == size


def test_deleted_keys_have_no_value_left(tmp_path: Path) -> None:
    """testCleaningWithDeletes"""
    log = LogBuilder()
    for number in range(16):
        log.put(f"k{number}=value")
    for number in range(0, 16, 2):
        log.put(f"k{number}")
    life = Life(tmp_path, log)
    life.round()
    assert [text for text in life.live() if "=" in text] == [f"{n}:k{n}=value" for n in range(1, 16, 2)]
    assert [text for text in life.live() if "=" not in text] == [f"{16 + n // 2}:k{n}" for n in range(0, 16, 2)]
    life.round(first_dirty_offset=0, now=LATER, high_watermark=99)
    assert [text for text in life.live() if "=" not in text] == []


def test_record_timestamps_do_not_drive_tombstones(tmp_path: Path) -> None:
    """testCleanTombstone (KAFKA-4529): ancient and future timestamps make no difference, the horizon does."""
    log = LogBuilder()
    log.put("a=1", times=[1_000])
    log.put("a", times=[1])
    log.put("b", times=[10**15])
    log.put("c=1")
    life = Life(tmp_path, log)
    life.round(now=1_000, delete_retention_ms=100)
    assert life.live() == ["1:a", "2:b", "3:c=1"]
    assert [b.horizon for b in life.batches()] == [1_100, 1_100, None]
    life.round(first_dirty_offset=0, now=1_099)
    assert life.live() == ["1:a", "2:b", "3:c=1"]
    life.round(first_dirty_offset=0, now=1_100)
    assert life.live() == ["3:c=1"]


def test_records_without_a_key_go(tmp_path: Path) -> None:
    """testCleaningWithUnkeyedMessages"""
    log = LogBuilder()
    for number in range(5):
        log.put(f"={number}", f"={number}")
    log.put("1=a", "=x", "2=b")
    life = Life(tmp_path, log)
    summary = life.round()
    assert life.live() == ["10:1=a", "12:2=b"]
    assert (summary.records_read, summary.records_kept) == (13, 2)


def test_counts(tmp_path: Path) -> None:
    """testLogCleanerStats: what was read, kept and written, and where the next round begins."""
    log = LogBuilder()
    log.put("=0", "1=a", "2=a")
    log.put("2=b")
    log.roll()
    log.put("3=c")
    life = Life(tmp_path, log)
    size = sum(path.stat().st_size for path in life.folder.glob("*.log"))
    summary = life.round()
    assert (summary.records_read, summary.records_kept, summary.next_dirty_offset, summary.map_entries) == (5, 3, 5, 3)
    written = sum(path.stat().st_size for path in life.folder.glob("*.log"))
    assert (summary.bytes_read, summary.bytes_written) == (size, written)


def test_last_batch_of_the_log_stays_as_an_empty_header(tmp_path: Path) -> None:
    """testCleanSegmentsRetainingLastEmptyBatch (KAFKA-17076), by the rule of KAFKA-20452: where the high watermark stands."""
    log = LogBuilder()
    log.put("1=a", "2=a")
    log.put("=nobody")
    life = Life(tmp_path, log)
    life.round()
    assert life.shape() == ["0-1", "(2-2)"]
    life.round(first_dirty_offset=0)
    assert life.shape() == ["0-1", "(2-2)"]
    log.put("1=b")
    life.round()
    assert life.shape() == ["0-1", "3-3"]


def test_no_empty_last_batch_below_the_high_watermark(tmp_path: Path) -> None:
    """testCleanSegmentsNotRetainingLastEmptyBatch (KAFKA-20452): with data behind it nothing needs the header."""
    log = LogBuilder()
    log.put("1=a", "2=a")
    log.put("=nobody")
    life = Life(tmp_path, log)
    life.round(high_watermark=4)
    assert life.shape() == ["0-1"]


def test_records_of_any_size(tmp_path: Path) -> None:
    """testLargeMessage, testMessageLargerThanMaxMessageSize (KAFKA-6834): no limit of a topic or buffer applies to what exists."""
    log = LogBuilder()
    log.put("1=" + "v" * 3_000_000)
    log.put("2=" + "w" * 2_000_000, codec=GZIP)
    log.put("2=small", "3=" + "x" * 1_500_000)
    life = Life(tmp_path, log)
    life.round()
    assert [len(text) for text in life.live()] == [3_000_004, 9, 1_500_004]


def test_bad_magic_is_named(tmp_path: Path) -> None:
    """testMessageLargerThanMaxMessageSizeWithCorruptHeader"""
    log = LogBuilder()
    log.put("1=a")
    log.put("2=b", pid=1)
    folder = log.write(tmp_path / "log")
    path = folder / f"{0:020}.log"
    data = bytearray(path.read_bytes())
    position = 12 + int.from_bytes(data[8:12], "big")
    data[position + 16] = 127
    path.write_bytes(data)
    with pytest.raises(BadData, match="magic") as refused:
        clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1))
    assert (refused.value.segment, refused.value.position) == (path.name, position)
    assert not (tmp_path / "out").exists()


def test_truncated_segment_is_named(tmp_path: Path) -> None:
    """testCorruptMessageSizeLargerThanBytesAvailable"""
    log = LogBuilder()
    log.put("1=a")
    log.put("2=" + "b" * 100)
    folder = log.write(tmp_path / "log")
    path = folder / f"{0:020}.log"
    position = 12 + int.from_bytes(path.read_bytes()[8:12], "big")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadData) as refused:
        clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1))
    assert (refused.value.segment, refused.value.position) == (path.name, position)


@pytest.mark.parametrize("base", [0, 100])
def test_wrappers_of_magic_1_around_magic_0_are_repaired(tmp_path: Path, base: int) -> None:
    """testCleanCorruptMessageSet, testClientHandlingOfCorruptMessageSet (KAFKA-4298): the offsets come out right."""
    log = LogBuilder(next_offset=base)
    inner = [entry(0, number, f"{number}=a") for number in range(4)]
    log.raw(wrapper(1, base + 3, inner, GZIP, timestamp=500), base + 3)
    log.put("2=b")
    life = Life(tmp_path, log)
    life.round()
    assert life.live() == [f"{base}:0=a", f"{base + 1}:1=a", f"{base + 3}:3=a", f"{base + 4}:2=b"]
    assert [b.magic for b in life.batches()] == [2, 2]
    assert [r.timestamp for r in life.batches()[0].records] == [-1, -1, -1]
