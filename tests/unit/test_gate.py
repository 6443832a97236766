"""The equivalence gate by itself: what it asks of who uses it, what it does with too little memory, and its key table."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactor.cleaner.gate.batches import fates_of
from compactor.cleaner.gate.judge import GateFailed
from compactor.cleaner.gate.table import ABSENT, DUE, UNKNOWN, KeyTable
from compactor.cleaner.offline import CleanRequest, clean_directory, open_directory
from compactor.cleaner.passes.transactions import fold
from compactor.errors import BadData, CompactorError
from compactor.records.batches import NOT_CONTROL
from tests.builders import GZIP, LogBuilder, entry, wrapper
from tests.support.damage import AMPLE, Round, changed, settled

SMALL = 3_000
"""Bytes of key table for some 60 keys."""


def cleaned(log: LogBuilder, folder: Path, **request: int) -> Round:
    return Round.of(log.write(folder / "log"), folder / "out", {"now_ms": 1_000_000, **request})


# ---- too little memory ------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path) -> Round:
    """200 keys twice each, in two segments."""
    log = LogBuilder()
    for turn in range(2):
        for begin in range(0, 200, 10):
            log.put(*(f"key-{number}={turn}" for number in range(begin, begin + 10)))
        log.roll()
    log.put("last=1")
    return cleaned(log, tmp_path)


def lose(round_: Round, key: bytes) -> None:
    round_.change(lambda batches: [settled(each, [r for r in each.records if r.key != key]) for each in batches])


def refused_with(round_: Round, seed: int, budget_bytes: int) -> bool:
    try:
        round_.judged(budget_bytes=budget_bytes, seed=seed)
    except GateFailed:
        return True
    return False


def test_with_enough_memory_every_key_is_looked_up(many: Round) -> None:
    (report,) = many.judged()
    assert (report.keys, report.coverage, report.records) == (201, 1.0, 201)


def test_with_little_memory_some_keys_are_looked_up_and_the_share_is_told(many: Round) -> None:
    (report,) = many.judged(budget_bytes=SMALL)
    assert report.coverage in (1 / 4, 1 / 8)
    assert 0 < report.keys < 60
    assert report.records == 201, "headers and order are compared all the same"


def test_each_seed_looks_at_other_keys_and_together_they_see_all(many: Round) -> None:
    """A lost key is noticed by the rounds that look at its range: by one in eight at least."""
    lose(many, b"key-77")
    assert refused_with(many, 0, AMPLE)
    seen = [refused_with(many, seed, SMALL) for seed in range(8)]
    assert any(seen)
    assert not all(seen)


def test_with_almost_no_memory_batches_are_still_compared(many: Round) -> None:
    assert many.judged(budget_bytes=1)[0].coverage < 1 / 8
    many.change(lambda batches: [changed(batches[0], leader_epoch=5), *batches[1:]])
    assert refused_with(many, 0, 1)


# ---- what it is given -------------------------------------------------------------------------------------------------------


def test_it_wants_to_read_the_dirty_range_first(many: Round) -> None:
    gate, groups = many.gate()
    gate._unread[0] += 1
    with pytest.raises(CompactorError, match="before it had read"):
        gate.check(groups[0], many.paths(0), end_offset=None)


@pytest.mark.parametrize("field", ["last_offset", "producer_id", "count", "attributes", "max_timestamp", "control"])
def test_a_table_that_the_cleaner_read_wrong_is_refused(many: Round, field: str) -> None:
    gate, groups = many.gate()
    source = replace(groups[0][0])
    column = getattr(source.table, field).copy()
    column[3] += 1
    source.table = replace(source.table, **{field: column})
    gate._crcs.clear()
    with pytest.raises(GateFailed, match=f"the cleaner read {field}"):
        gate.begin(source)


def test_bad_data_is_not_the_gates_business(tmp_path: Path) -> None:
    """A segment that cannot be cleaned is reported as that, also where the gate would stumble over it first."""
    log = LogBuilder()
    log.put("a=1", codec=GZIP)
    folder = log.write(tmp_path / "log")
    path = folder / f"{0:020}.log"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    for number, entries in enumerate((None, 1)):
        with pytest.raises(BadData):
            clean_directory(folder, tmp_path / str(number), CleanRequest(now_ms=1, map_entries=entries, gate_budget_bytes=AMPLE))


def test_an_old_wrapper_that_counts_from_zero(tmp_path: Path) -> None:
    """Its header ends at offset 0 and its records at 2; they are compared all the same."""
    log = LogBuilder()
    log.raw(wrapper(1, 0, [entry(1, number, f"{number}=a", timestamp=1) for number in range(3)], GZIP, timestamp=1), 2)
    log.put("3=b")
    round_ = cleaned(log, tmp_path)
    assert round_.refusal() == ""
    round_.change(lambda batches: [settled(batches[0], batches[0].records[::2]), *batches[1:]])
    assert round_.refusal() == "the last record of a key is gone"


def test_an_old_wrapper_that_reaches_into_the_next_batch_is_refused_by_the_cleaner(tmp_path: Path) -> None:
    """No order could be kept; Kafka would write two batches with the same offset."""
    log = LogBuilder()
    log.raw(wrapper(1, 0, [entry(1, number, f"{number}=a", timestamp=1) for number in range(3)], GZIP, timestamp=1), 1)
    log.put("3=b")
    folder = log.write(tmp_path / "log")
    for gate in (0, AMPLE):
        with pytest.raises(BadData, match="the last inner offset is not below") as refused:
            clean_directory(folder, tmp_path / "out", CleanRequest(now_ms=1, gate_budget_bytes=gate))
        assert (refused.value.position, refused.value.offset) == (0, 2)


def test_an_old_wrapper_that_reaches_into_the_next_segment_is_refused_by_the_cleaner(tmp_path: Path) -> None:
    """Found by the fuzz: the gate looked for its last record in the next segment, where no batch has it."""
    log = LogBuilder()
    log.raw(wrapper(1, 0, [entry(1, number, f"{number}=a", timestamp=1) for number in range(2)], GZIP, timestamp=1), 0)
    log.roll()
    folder = log.write(tmp_path / "log")
    for gate in (0, AMPLE):
        with pytest.raises(BadData, match="the last inner offset is not below the end of the segment") as refused:
            clean_directory(folder, tmp_path / "out", CleanRequest(now_ms=1, gate_budget_bytes=gate))
        assert (refused.value.position, refused.value.offset) == (0, 1)


# ---- transactions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [{}, {1: 3}, {2: 5}, {1: 3, 2: 5, 9: 7}])
def test_it_tells_the_outcomes_of_transactions_as_the_cleaner_does(tmp_path: Path, opened: dict[int, int]) -> None:
    """Also of those that were open where the log begins; by another algorithm."""
    log = LogBuilder(10)
    log.end(1, commit=False)
    log.put("a=1", pid=2, txn=True)
    log.put("b=1", pid=1, txn=True)
    log.end(2, commit=False)
    log.put("c=1", pid=2, txn=True)
    log.roll()
    log.put("d=1", pid=1)
    log.end(2, commit=True)
    log.end(2, commit=True)
    log.end(1, commit=False)
    log.put("e=1", pid=1, txn=True)
    sources = open_directory(log.write(tmp_path / "log"), 4096, 1 << 20)
    for source, fates, verdicts in zip(sources, fates_of(sources, opened), fold(sources, opened), strict=True):
        assert fates.aborted.tolist() == verdicts.aborted.tolist()
        markers = source.table.control != NOT_CONTROL
        assert fates.idle[markers].tolist() == verdicts.discardable[markers].tolist()


# ---- the key table ----------------------------------------------------------------------------------------------------------


def hashes_of(keys: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Well mixed, and the same for the same key; key 0 hashes to zeros."""
    mixed = np.array(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.stack((mixed ^ (mixed >> np.uint64(31)), mixed * np.uint64(0xD6E8FEB86659FD93)), axis=1)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10**12), st.integers(0, 2**32 - 1), st.booleans()), max_size=30)),
    st.sampled_from([1, 500, 1500, 1 << 16]),
    st.integers(0, 2**31),
)
def test_key_table_against_a_dict(puts: list[list[tuple[int, int, int, bool]]], budget_bytes: int, seed: int) -> None:
    table, model = KeyTable(budget_bytes, sum(map(len, puts)), seed), dict[int, tuple[int, int]]()
    offsets_used: set[int] = set()
    for rows in puts:
        fresh = [row for row in rows if row[1] not in offsets_used and not offsets_used.add(row[1])]  # type: ignore[func-returns-value]
        digests = [digest | int(DUE) * due for _, _, digest, due in fresh]
        table.put(hashes_of([row[0] for row in fresh]), np.array([row[1] for row in fresh], np.int64), np.array(digests, np.uint64))
        for (key, offset, _, _), digest in zip(fresh, digests, strict=True):
            model[key] = max(model.get(key, (-1, 0)), (offset, digest))
    keys = list(range(61))
    spoken = table.speaks(hashes_of(keys)).tolist()
    known = {key: model[key] for key in keys if key in model and spoken[key]}
    assert table.keys == len(known)
    assert table.coverage == 1.0 or budget_bytes < 1 << 16
    expected = [(known.get(key, (ABSENT, 0))[0] if speaks else UNKNOWN) for key, speaks in zip(keys, spoken, strict=True)]
    assert table.latest(hashes_of(keys)).tolist() == expected
    alive = {key: value for key, value in known.items() if not value[1] & int(DUE)}
    bounds = [0, 10**6, 10**11, 10**12 + 1]
    ranges = [sum(low <= offset < high for offset, _ in alive.values()) for low, high in pairwise(bounds)]
    assert table.live(np.array(bounds, np.int64)).tolist() == ranges
    for key, (offset, digest) in alive.items():
        assert table.missing(offset, offset + 1) == offset
        assert table.tick(hashes_of([key]), np.array([offset]), np.array([digest + 1 & 2**32 - 1], np.uint64)) == (0, 0)
        assert table.tick(hashes_of([key]), np.array([offset]), np.array([digest], np.uint64)) == (-1, 1)
        assert table.tick(hashes_of([key]), np.array([offset]), np.array([digest], np.uint64)) == (0, 0), "for the first time only"
        assert table.missing(offset, offset + 1) == -1
