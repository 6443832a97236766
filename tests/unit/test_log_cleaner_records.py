"""LogCleanerTest's behaviours on records, tombstones, headers of emptied batches and damaged data, driving `clean`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData
from tests.builders import GZIP, LATER, Life, LogBuilder, entry, log_of, tell, wrapper

STORIES = {
    "testCleanTombstone (KAFKA-4529): ancient and future timestamps make no difference, the horizon does": """
        a=1 @1_000
        a @1
        b @1_000_000_000_000_000
        c=1
        clean now=1_000 retention=100: live 1:a 2:b 3:c=1 | horizons 1100 1100 None
        clean first=0 now=1_099: live 1:a 2:b 3:c=1
        clean first=0 now=1_100: live 3:c=1""",
    "testCleanSegmentsRetainingLastEmptyBatch (KAFKA-17076), by the rule of KAFKA-20452: where the high watermark stands": """
        1=a 2=a
        =nobody
        clean: 0-1 (2-2)
        clean first=0: 0-1 (2-2)
        1=b
        clean: 0-1 3-3""",
    "testCleanSegmentsNotRetainingLastEmptyBatch (KAFKA-20452): with data behind it nothing needs the header": """
        1=a 2=a
        =nobody
        clean high_watermark=4: 0-1""",
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_records(story: str, tmp_path: Path) -> None:
    tell(tmp_path, story)


def test_superseded_records_go(tmp_path: Path) -> None:
    """testCleanSegments: overwritten keys vanish, the others stay."""
    log = log_of(";".join(f"{number}=old other{number}=kept" for number in range(10)))
    life = Life(tmp_path, log.add("/; 1=new 3=new 5=new 7=new 9=new"))
    life.round()
    kept = [text.split(":")[1] for text in life.live()]
    assert [text for text in kept if "other" not in text] == [
        *(f"{n}=old" for n in range(0, 10, 2)),
        *(f"{n}=new" for n in range(1, 10, 2)),
    ]
    assert sum("other" in text for text in kept) == 10


def test_deleted_keys_have_no_value_left(tmp_path: Path) -> None:
    """testCleaningWithDeletes"""
    log = log_of(";".join([f"k{number}=value" for number in range(16)] + [f"k{number}" for number in range(0, 16, 2)]))
    life = Life(tmp_path, log)
    life.round()
    left = [f"{n}:k{n}=value" for n in range(1, 16, 2)]
    assert life.live() == left + [f"{16 + n // 2}:k{n}" for n in range(0, 16, 2)]
    life.round(first_dirty_offset=0, now=LATER, high_watermark=99)
    assert life.live() == left


def test_counts(tmp_path: Path) -> None:
    """testLogCleanerStats, testCleaningWithUnkeyedMessages: what was read, kept and written; records without a key go."""
    life = Life(tmp_path, log_of("=0 1=a 2=a; 2=b; /; 3=c =x"))
    size = sum(path.stat().st_size for path in life.folder.glob("*.log"))
    summary = life.round()
    assert life.live() == ["1:1=a", "3:2=b", "4:3=c"]
    assert (summary.records_read, summary.records_kept, summary.next_dirty_offset, summary.map_entries) == (6, 3, 6, 3)
    written = sum(path.stat().st_size for path in life.folder.glob("*.log"))
    assert (summary.bytes_read, summary.bytes_written) == (size, written)


def test_records_of_any_size(tmp_path: Path) -> None:
    """testLargeMessage, testMessageLargerThanMaxMessageSize (KAFKA-6834): no limit of a topic or buffer applies to what exists."""
    log = LogBuilder()
    log.put("1=" + "v" * 3_000_000)
    log.put("2=" + "w" * 2_000_000, codec=GZIP)
    log.put("2=small", "3=" + "x" * 1_500_000)
    life = Life(tmp_path, log)
    life.round()
    assert [len(text) for text in life.live()] == [3_000_004, 9, 1_500_004]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        pytest.param(
            lambda data, at: data[: at + 16] + b"\x7f" + data[at + 17 :], "magic", id="testMessageLargerThanMaxMessageSizeWithCorruptHeader"
        ),
        pytest.param(lambda data, at: data[:-20], ".", id="testCorruptMessageSizeLargerThanBytesAvailable"),
    ],
)
def test_damage_is_named(damage: Callable[[bytes, int], bytes], word: str, tmp_path: Path) -> None:
    folder = log_of("1=a; 1: 2=" + "b" * 100).write(tmp_path / "log")
    path = folder / f"{0:020}.log"
    data = path.read_bytes()
    position = 12 + int.from_bytes(data[8:12], "big")
    path.write_bytes(damage(data, position))
    with pytest.raises(BadData, match=word) as refused:
        clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1))
    assert (refused.value.segment, refused.value.position) == (path.name, position)
    assert not (tmp_path / "out").exists()


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
