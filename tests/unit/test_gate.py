"""The equivalence gate by itself: what it asks of who uses it, what it does with too little memory, and its key table."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from compactor.cleaner.gate.batch_checks import GateFailed, transaction_outcomes_by_source
from compactor.cleaner.gate.gate import CleanedSegmentCheckParameters
from compactor.cleaner.gate.parser import (
    ABSENT_KEY,
    DUE,
    LatestRecordTable,
    allocate_zero_fingerprint_sums,
    pack_latest_record_rows,
    record_fingerprints,
)
from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory, open_for_round, open_log_directory
from compactor.cleaner.retention import transaction_verdicts_by_source
from compactor.errors import BadData, CompactorError, OutOfBudget
from compactor.records.batches import NOT_CONTROL
from tests.builders import GZIP, LogBuilder, entry, refused_cleaning, wrapper
from tests.support.damage import AMPLE, TINY, Round, settled


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


BUDGETS = [TINY, 24 * 100, AMPLE]
"""Memory for five keys; for a third of the keys; for all of them."""


@pytest.mark.parametrize("budget", BUDGETS)
def test_gate_looks_up_the_keys_of_one_range_and_says_how_many(many: Round, budget: int) -> None:
    (report,) = many.judged(budget_bytes=budget)
    assert report.keys == report.records
    assert report.keys <= 0.7 * max(8, budget // 24)
    assert (report.coverage == 1.0) == (budget == AMPLE)
    assert (report.keys == 201) == (budget == AMPLE)
    assert 201 * report.coverage / 3 < report.keys < 3 * 201 * report.coverage or budget == TINY


@pytest.mark.parametrize("budget", BUDGETS)
def test_ranges_of_the_gate_together_have_every_key_once(many: Round, budget: int) -> None:
    reports = many.judged_in_turn(budget)
    assert sum(report.keys for report in reports) == sum(report.records for report in reports) == 201
    assert sum(report.coverage for report in reports) == 1.0


def test_gate_checks_another_range_when_the_first_dirty_offset_moves_and_the_same_one_until_then(many: Round) -> None:
    terms = [
        CleanedSegmentCheckParameters(open_for_round(many.log_dir, many.request).rules, offset, bytes(16), 1)
        for offset in range(0, 64_000, 1_000)
    ]
    assert len({terms_.checked_hash_value >> 61 for terms_ in terms}) == 8, "each eighth of the hash comes up"
    assert many.gate(TINY)[0].checked_key_share == many.gate(TINY)[0].checked_key_share
    reports = [many.judged(budget_bytes=TINY) for _ in range(2)]
    assert reports[0] == reports[1]


@pytest.mark.parametrize("budget", BUDGETS)
def test_whatever_key_it_is_its_last_record_is_missed(many: Round, budget: int) -> None:
    (base,) = many.outputs()
    before = many.outputs()[base]
    for number in (*range(0, 200, 90 if budget == TINY else 7), 199):
        key = f"key-{number}".encode()
        for damaged in (lambda r: None, lambda r: r._replace(value=b"another")):
            many.put(base, [settled(each, [new for r in each.records if (new := damaged(r) if r.key == key else r)]) for each in before])
            with pytest.raises(GateFailed) as refused:
                many.judged_in_turn(budget)
            assert refused.value.key == key
    many.put(base, before)
    assert many.refusal(budget_bytes=budget) == ""


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_lies_below_the_dirty_range_is_looked_up(tmp_path: Path, budget: int) -> None:
    """Whether the range begins between two segments or inside one."""
    log = LogBuilder()
    log.put(*(f"key-{number}=old" for number in range(100)))
    log.put(*(f"key-{number}=older" for number in range(100, 150)))
    log.roll()
    log.put(*(f"key-{number}=new" for number in range(50, 200)), codec=GZIP)
    folder = log.write(tmp_path / "log")
    for first_dirty in (100, 150):
        round_ = Round.of(folder, tmp_path / f"out-{first_dirty}", {"now_ms": 1_000_000, "first_dirty_offset": first_dirty})
        (base,) = round_.outputs()
        before = round_.outputs()[base]
        assert round_.refusal(budget_bytes=budget) == ""
        back = next(batch for batch in round_.sources() if batch.base_offset == 0)
        for number in (50, 77, 99):
            kept = [*before[0].records, back.records[number]]
            round_.put(base, [settled(before[0], kept), *before[1:]])
            with pytest.raises(GateFailed, match="superseded") as refused:
                round_.judged_in_turn(budget)
            assert refused.value.offset == number
        round_.put(base, [settled(before[0], before[0].records[1:]), *before[1:]])
        assert round_.refusal(budget_bytes=budget) == "the last record of a key is missing"


# ---- what it is given -------------------------------------------------------------------------------------------------------


def test_it_wants_to_read_the_dirty_range_first(many: Round) -> None:
    gate, groups = many.gate()
    gate._batches_read[0] -= 1
    with pytest.raises(CompactorError, match="before it had read"):
        gate.check_cleaned_group(groups[0], many.paths(0), end_offset=None)


@pytest.mark.parametrize("field", ["last_offset", "producer_id", "count", "attributes", "max_timestamp", "control"])
def test_a_table_that_the_cleaner_read_wrong_is_refused(many: Round, field: str) -> None:
    gate, groups = many.gate()
    source = replace(groups[0][0])
    column = getattr(source.table, field).copy()
    column[3] += 1
    source.table = source.table.replace_columns(**{field: column})
    gate._crcs.clear()
    with pytest.raises(GateFailed, match=f"the cleaner read {field}"):
        gate.begin_segment(source)


def test_bad_data_is_not_the_gates_business(tmp_path: Path) -> None:
    """A segment that cannot be cleaned is reported as that, also where the gate would stumble over it first."""
    log = LogBuilder()
    log.put("a=1", codec=GZIP)
    folder = log.write(tmp_path / "log")
    path = folder / f"{0:020}.log"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    for number, entries in enumerate((None, 1)):
        with pytest.raises(BadData):
            clean_log_directory(folder, tmp_path / str(number), OfflineCleanOptions(now_ms=1, map_entries=entries, gate_budget_bytes=AMPLE))


def test_an_old_wrapper_that_counts_from_zero(tmp_path: Path) -> None:
    """Its header ends at offset 0 and its records at 2; they are compared all the same."""
    log = LogBuilder()
    log.raw(wrapper(1, 0, [entry(1, number, f"{number}=a", timestamp=1) for number in range(3)], GZIP, timestamp=1), 2)
    log.put("3=b")
    round_ = cleaned(log, tmp_path)
    assert round_.refusal() == ""
    round_.change(lambda batches: [settled(batches[0], batches[0].records[::2]), *batches[1:]])
    assert round_.refusal() == "the last record of a key is missing"


def test_an_old_wrapper_that_reaches_into_the_next_batch_is_refused_by_the_cleaner(tmp_path: Path) -> None:
    """No order could be kept; Kafka would write two batches with the same offset."""
    log = LogBuilder()
    log.raw(wrapper(1, 0, [entry(1, number, f"{number}=a", timestamp=1) for number in range(3)], GZIP, timestamp=1), 1)
    log.put("3=b")
    for gate in (0, AMPLE):
        refused = refused_cleaning(tmp_path, log, "the last inner offset is not below", gate_budget_bytes=gate)
        assert (refused.position, refused.offset) == (0, 2)


def test_an_old_wrapper_that_reaches_into_the_next_segment_is_refused_by_the_cleaner(tmp_path: Path) -> None:
    """Found by the fuzz: the gate looked for its last record in the next segment, where no batch has it."""
    log = LogBuilder()
    log.raw(wrapper(1, 0, [entry(1, number, f"{number}=a", timestamp=1) for number in range(2)], GZIP, timestamp=1), 0)
    log.roll()
    for gate in (0, AMPLE):
        refused = refused_cleaning(tmp_path, log, "the last inner offset is not below the end of the segment", gate_budget_bytes=gate)
        assert (refused.position, refused.offset) == (0, 1)


# ---- transactions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [{}, {1: 3}, {2: 5}, {1: 3, 2: 5, 9: 7}])
def test_it_tells_the_outcomes_of_transactions_as_the_cleaner_does(tmp_path: Path, opened: dict[int, int]) -> None:
    """Also of those that were open where the log begins; by another algorithm."""
    log = LogBuilder(10)
    log.end(1, commit=False)
    log.add("2t: a=1; 1t: b=1")
    log.end(2, commit=False)
    log.add("2t: c=1; /; 1: d=1")
    log.end(2, commit=True)
    log.end(2, commit=True)
    log.end(1, commit=False)
    log.put("e=1", pid=1, txn=True)
    sources = open_log_directory(log.write(tmp_path / "log"), 4096, 1 << 20)
    for source, outcomes, verdicts in zip(
        sources, transaction_outcomes_by_source(sources, opened), transaction_verdicts_by_source(sources, opened), strict=True
    ):
        assert outcomes.aborted.tolist() == verdicts.aborted.tolist()
        markers = source.table.control != NOT_CONTROL
        assert outcomes.idle[markers].tolist() == verdicts.discardable[markers].tolist()


# ---- the keys ---------------------------------------------------------------------------------------------------------------

Put = tuple[int, int, int, bool]
"""Key, offset, digest, whether it is a tombstone that is due."""

SEGMENTS = [0, 10**6, 10**11, 10**12 + 1]


def hashes_of(keys: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Well mixed, and the same for the same key; key 0 hashes to zeros."""
    mixed = np.array(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.stack((mixed ^ (mixed >> np.uint64(31)), mixed * np.uint64(0xD6E8FEB86659FD93)), axis=1)


def rows(some: list[Put]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    digests = np.array([digest | int(DUE) * due for _, _, digest, due in some], np.uint64)
    return pack_latest_record_rows(hashes_of([put[0] for put in some]), np.array([put[1] for put in some], np.int64), digests)


def sums(left: list[Put]) -> list[list[int]]:
    """By segment, the slow way."""
    found = [[0, 0] for _ in SEGMENTS[1:]]
    for _, offset, digest, _ in left:
        segment = sum(offset >= base for base in SEGMENTS[1:])
        found[segment][0] += 1
        found[segment][1] += int(record_fingerprints(np.array([offset]), np.array([digest], np.uint64))[0])
    return [[count, total % 2**64] for count, total in found]


PUTS = st.lists(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10**12), st.integers(0, 2**32 - 1), st.booleans()), max_size=30), max_size=8
)


@given(PUTS, PUTS, st.sampled_from([1, 500, 1500, 1 << 16]), st.integers(0, 2**64 - 1))
def test_key_table_has_the_last_record_of_each_key_of_its_range(
    puts: list[list[Put]], outside: list[list[Put]], budget_bytes: int, point: int
) -> None:
    """Against a dict; the range becomes smaller while rows are put, wherever the point lies."""
    used: set[int] = set()
    for some in (*puts, *outside):
        some[:] = [put for put in some if put[1] not in used and not used.add(put[1])]  # type: ignore[func-returns-value]
    model: dict[int, Put] = {}
    for put in chain.from_iterable(puts):
        model[put[0]] = max(model.get(put[0], put), put, key=lambda each: each[1])
    table, bounds, found = (
        LatestRecordTable(budget_bytes, 60),
        np.array(SEGMENTS, np.int64),
        allocate_zero_fingerprint_sums(len(SEGMENTS) - 1),
    )
    for some in puts:
        left = rows(some)
        while (done := table.put_rows_until_full(left)) < len(left):
            table.halve_hash_range(point)
            left = left[done:]
    held = dict(enumerate(table.flag_keys_in_range(hashes_of(list(range(61)))).tolist()))
    assert all(held.values()) == (table.hash_range_count == 1)
    for some in outside:
        table.add_outside_sums(rows([(key, offset, digest, False) for key, offset, digest, _ in some]), bounds, found)
    table.add_remaining_sums(bounds, found)
    kept = [put for put in model.values() if not put[3]] + [put for put in chain.from_iterable(outside) if put[0] not in model]
    assert found.tolist() == sums([put for put in kept if held[put[0]]])
    latest = [model[key][1] if key in model and held[key] else ABSENT_KEY for key in range(61)]
    assert table.latest_offsets(hashes_of(list(range(61)))).tolist() == latest
    assert table.key_count == sum(held[key] for key in model)


@given(PUTS, st.integers(0, 2**64 - 1))
def test_a_range_that_was_made_smaller_is_the_range_that_was_asked_for_at_once(puts: list[list[Put]], point: int) -> None:
    table = LatestRecordTable(1 << 16, 60)
    everything = rows(list(chain.from_iterable(puts)))
    assert table.put_rows_until_full(everything) == len(everything)
    for _ in range(3):
        table.halve_hash_range(point)
    at_once = LatestRecordTable(1 << 16, 60)
    at_once.reset_to_hash_range(60, 8, point * 8 >> 64)
    assert at_once.put_rows_until_full(everything) == len(everything)
    keys = hashes_of(list(range(61)))
    assert (table.key_count, table.latest_offsets(keys).tolist()) == (
        at_once.key_count,
        at_once.latest_offsets(keys).tolist(),
    )


def test_more_keys_of_one_hash_than_the_memory_holds_are_refused() -> None:
    """Where nothing tells them apart no smaller range helps; real hashes are uniform."""
    table = LatestRecordTable(1, 0)
    same = np.array([[1 << 40, number, number << 32] for number in range(100)], np.uint64)
    for _ in range(62):
        assert table.put_rows_until_full(same) < len(same)
        table.halve_hash_range(256)
    with pytest.raises(OutOfBudget, match="share one hash"):
        table.halve_hash_range(256)
