"""Signs in a log's batches that a cleaner has compacted it, and what looks like one and is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.cleaner.offline import list_segment_base_offsets, open_segments_of_directory
from compactor.features.imports.log_directory import CleaningSign, describe_cleaning_signs, find_cleaning_signs
from tests.builders import GZIP, LogBuilder, entry, wrapper


def signs(log: LogBuilder, folder: Path) -> list[str]:
    """Kind and offsets of each sign."""
    path = log.write(folder / "orders-0")
    bases = list_segment_base_offsets(path, is_written_by_broker=False)
    found = find_cleaning_signs(open_segments_of_directory(path, bases, None, 4096, 1 << 20))
    return [f"{sign.kind} {sign.first}-{sign.last} {int(sign.segment[:20])}" for sign in found]


@pytest.fixture
def log() -> LogBuilder:
    return LogBuilder(20).add("a=1 b=1")


def test_consecutive_offsets_are_none(log: LogBuilder, tmp_path: Path) -> None:
    log.put("c", pid=7, txn=True, codec=GZIP)
    log.add("7 aborts; /")
    log.put("=1", sequence=90, pid=8)  # the sequences before it expired with their producer
    assert signs(log, tmp_path) == []


def test_offsets_missing_between_batches_are_one(log: LogBuilder, tmp_path: Path) -> None:
    log.add("+3; c=1")
    assert signs(log, tmp_path) == ["missing 22-24 20"]


def test_offsets_missing_at_the_beginning_of_a_segment_are_one(log: LogBuilder, tmp_path: Path) -> None:
    log.add("/; +1; c=1")
    assert signs(log, tmp_path) == ["missing 22-22 22"]


def test_offsets_missing_at_the_end_of_a_segment_are_one_that_a_lost_file_leaves_too(log: LogBuilder, tmp_path: Path) -> None:
    log.add("/ 25; c=1")
    assert signs(log, tmp_path) == ["boundary 22-24 20"]


@pytest.mark.parametrize("offsets", [(22, 24), (23, 25), (22, 23)])
def test_a_batch_that_lacks_records_is_one(offsets: tuple[int, ...], log: LogBuilder, tmp_path: Path) -> None:
    log.put("c=1", "d=1", offsets=offsets, last_offset=25)
    before = [f"missing 22-{offsets[0] - 1} 20"] if offsets[0] > 22 else []
    assert signs(log, tmp_path) == [*before, f"incomplete {offsets[0]}-25 20"]


def test_a_delete_horizon_is_one(log: LogBuilder, tmp_path: Path) -> None:
    log.put("a", horizon=5)
    log.end(7, commit=True, horizon=5)
    assert signs(log, tmp_path) == ["horizon 22-22 20", "horizon 23-23 20"]


def test_zero_byte_segments_at_the_end_are_none(log: LogBuilder, tmp_path: Path) -> None:
    log.add("/; / 30")
    assert signs(log, tmp_path) == []


def test_a_segment_that_lost_all_its_batches_is_one(log: LogBuilder, tmp_path: Path) -> None:
    """Kafka's cleaner leaves a zero-byte file."""
    log.add("/; / 30; c=1")
    assert signs(log, tmp_path) == ["missing 22-29 20"]


def test_batches_of_v0_and_v1_show_what_their_headers_state(log: LogBuilder, tmp_path: Path) -> None:
    for offset in (22, 24):
        log.raw(entry(1, offset, "c=1"), offset)
    log.raw(wrapper(1, 29, [entry(1, 0, "d=1"), entry(1, 1, "e=1")], GZIP), 29)  # 25 to 27 are missing, and its header does not tell
    log.raw(entry(0, 31, "f=1"), 31)
    assert signs(log, tmp_path) == ["missing 23-23 20", "missing 30-30 20"]


def test_a_message_names_the_first_signs() -> None:
    several = [CleaningSign("missing", 2, 3, "s"), CleaningSign("incomplete", 4, 9, "s"), CleaningSign("horizon", 10, 10, "s")]
    text = "offsets 2 to 3 are missing, the batch of offsets 4 to 9 lacks records, the batch of offsets 10 to 10 has a delete horizon"
    assert describe_cleaning_signs(several) == text
    assert describe_cleaning_signs([*several, *several]) == f"{text}, 3 more such places"
