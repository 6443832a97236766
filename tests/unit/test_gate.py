"""The equivalence gate by itself: what it asks of who uses it, what it does with too little memory, and its key table."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactor.cleaner.gate import spool
from compactor.cleaner.gate.batches import fates_of
from compactor.cleaner.gate.judge import GateFailed
from compactor.cleaner.gate.ranges import LastRecords, _OfSpool, judge_range, no_sums
from compactor.cleaner.gate.spool import DIRTY, RowSpool
from compactor.cleaner.gate.table import ABSENT, DUE, KeyTable, marks_of, rows_of
from compactor.cleaner.offline import CleanRequest, clean_directory, open_directory
from compactor.cleaner.passes.transactions import fold
from compactor.cleaner.spool_file import NO_LIMIT
from compactor.errors import BadData, CompactorError, OutOfBudget, StoreError, UsageError
from compactor.records.batches import NOT_CONTROL
from tests.builders import GZIP, LogBuilder, entry, wrapper
from tests.support.damage import AMPLE, TINY, Round, open_spool, settled


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
"""Eight cells: many ranges, each in parts; half of the keys; all of them."""


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_key_is_looked_up(many: Round, budget: int) -> None:
    (report,) = many.judged(budget_bytes=budget)
    assert (report.keys, report.records) == (201, 201)


@pytest.mark.parametrize("budget", BUDGETS)
def test_whatever_key_it_is_its_last_record_is_missed(many: Round, budget: int) -> None:
    (base,) = many.outputs()
    before = many.outputs()[base]
    for number in (*range(0, 200, 7), 199):
        key = f"key-{number}".encode()
        for damaged in (lambda r: None, lambda r: r._replace(value=b"another")):
            many.put(base, [settled(each, [new for r in each.records if (new := damaged(r) if r.key == key else r)]) for each in before])
            with pytest.raises(GateFailed) as refused:
                many.judged(budget_bytes=budget)
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
                round_.judged(budget_bytes=budget)
            assert refused.value.offset == number
        round_.put(base, [settled(before[0], before[0].records[1:]), *before[1:]])
        assert round_.refusal(budget_bytes=budget) == "the last record of a key is gone"


def test_rows_that_the_disk_has_changed_are_an_error_in_words(many: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "BLOCK_ROWS", 50)
    written: list[int] = []
    pwrite = os.pwrite

    def flipped(file: int, data: memoryview, position: int) -> int:
        written.append(position)
        return pwrite(file, bytes(data[:-1]) + bytes([data[-1] ^ 1]) if len(written) == 2 else data, position)

    monkeypatch.setattr("compactor.cleaner.spool_file.os.pwrite", flipped)
    with pytest.raises(StoreError, match=r"what the gate wrote to .* has changed on the disk"):
        many.judged(budget_bytes=TINY)
    assert len(written) > 2


def test_a_disk_that_is_full_is_an_error_in_words(many: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("compactor.cleaner.spool_file.os.pwrite", full)
    with pytest.raises(OutOfBudget, match="no space is left for what the gate writes"):
        many.judged(budget_bytes=TINY)


def test_what_it_has_on_the_disk_is_closed_where_the_clean_up_fails(many: Round, tmp_path: Path) -> None:
    """The file's name goes with its folder; its space does only when nobody has it open any more."""
    held: list[list[str]] = []

    def spools() -> list[str]:
        links = (Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
        return [to for link in links if link.is_symlink() and (to := os.readlink(link)).startswith(f"{tmp_path}/") and "/gate" in to]

    def fails(phase: str) -> None:
        if phase == "rewrite":
            held.append(spools())
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(UsageError):
        clean_directory(many.log_dir, tmp_path / "cleaned", CleanRequest(now_ms=1, gate_budget_bytes=TINY), fails)
    assert len(held[0]) == 1
    assert spools() == []


# ---- what it is given -------------------------------------------------------------------------------------------------------


def test_on_disk_it_wants_to_be_shown_what_it_is_asked_about(many: Round) -> None:
    gate, groups = many.gate(TINY)
    del gate._left[1]
    with pytest.raises(CompactorError, match="a segment that it was not shown"):
        gate.check(groups[0], many.paths(0), end_offset=None)


def test_it_wants_to_read_the_dirty_range_first(many: Round) -> None:
    gate, groups = many.gate()
    gate._noted[0, False] -= 1
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
    return rows_of(hashes_of([put[0] for put in some]), np.array([put[1] for put in some], np.int64), digests)


def sums(left: list[Put]) -> list[list[int]]:
    """By segment, the slow way."""
    found = [[0, 0] for _ in SEGMENTS[1:]]
    for _, offset, digest, _ in left:
        segment = sum(offset >= base for base in SEGMENTS[1:])
        found[segment][0] += 1
        found[segment][1] += int(marks_of(np.array([offset]), np.array([digest], np.uint64))[0])
    return [[count, total % 2**64] for count, total in found]


PUTS = st.lists(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10**12), st.integers(0, 2**32 - 1), st.booleans()), max_size=30), max_size=8
)


@given(PUTS, PUTS, st.sampled_from([1, 500, 1500, 1 << 16]), st.booleans(), st.integers(1, 3), st.sampled_from([7, 1 << 10]))
def test_last_records_against_a_dict(
    puts: list[list[Put]], belows: list[list[Put]], budget_bytes: int, on_disk: bool, parts: int, block: int
) -> None:
    """Whether they are in memory or on the disk, or go there in the middle; in as many parts as there are."""
    used: set[int] = set()
    for some in (*puts, *belows):
        some[:] = [put for put in some if put[1] not in used and not used.add(put[1])]  # type: ignore[func-returns-value]
    model: dict[int, Put] = {}
    for put in chain.from_iterable(puts):
        model[put[0]] = max(model.get(put[0], put), put, key=lambda each: each[1])
    left = [put for put in model.values() if not put[3]]
    parts = parts if on_disk else 1
    bounds, found = np.array(SEGMENTS, np.int64), no_sums(len(SEGMENTS) - 1)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(spool, "BLOCK_ROWS", block)
        keys = LastRecords(budget_bytes, 60, open_spool(Path(folder) / "rows"), on_disk=on_disk, parts=parts)
        for _ in range(parts):
            for some in puts:
                keys.put(rows(some))
            if keys.on_disk:
                for some in belows:
                    keys.put_below(rows([(key, offset, digest, False) for key, offset, digest, _ in some]))
                keys.finish(bounds, found)
        assert not list(Path(folder).iterdir()), "nothing stays on the disk"
    if keys.on_disk:
        left += [put for put in chain.from_iterable(belows) if put[0] not in model]
    else:
        keys.left(bounds, found)
        assert keys.latest(hashes_of(list(range(61)))).tolist() == [model[key][1] if key in model else ABSENT for key in range(61)]
    assert found.tolist() == sums(left)
    assert keys.keys == len(model)


def test_more_keys_of_one_hash_than_fit_are_refused(tmp_path: Path) -> None:
    """Where nothing tells them apart no number of parts helps; real hashes are uniform."""
    with RowSpool(tmp_path / "rows", NO_LIMIT, ranges=1) as spooled:
        same = np.array([[1 << 40, number, number << 32] for number in range(100)], np.uint64)
        spooled.add(DIRTY, same)
        with pytest.raises(OutOfBudget, match="share one hash"):
            judge_range(_OfSpool(spooled, 0), KeyTable(1, 0), 1, 0, np.array([0, 1000]), no_sums(1))
