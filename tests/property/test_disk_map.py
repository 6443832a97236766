"""The engine on disk gives the answers of the engine in memory, whatever the budgets, parts and calls; and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from bloom.filter import key_hash_tag
from compactor.cleaner import disk_map, disk_map as row_spool
from compactor.cleaner.disk_map import KEY_ROW_BYTES, DiskOffsetMap, count_log_scans
from compactor.cleaner.keys import ENTRY_BYTES, SMALLEST, SPACE, KeyHashSet
from compactor.errors import OutOfBudget
from tests.support.depth import examples

MEGABYTE = 1 << 20
LEAST = (SMALLEST + SPACE) * ENTRY_BYTES
Hashes = npt.NDArray[np.uint64]


class DiskBudget:
    """A disk budget that remembers how much was out at most."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.used, self.peak = limit, 0, 0

    def reserve_bytes_on_disk(self, nbytes: int) -> None:
        if self.used + nbytes > self.limit:
            raise OutOfBudget("the disk budget is used up")
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def release_bytes_on_disk(self, nbytes: int) -> None:
        self.used -= nbytes
        assert self.used >= 0


def hashes_of(keys: npt.NDArray[np.int64]) -> Hashes:
    """Well-mixed hashes of small numbers."""
    table = np.random.default_rng(11).integers(0, 2**64, size=(int(np.max(keys, initial=0)) + 1, 2), dtype=np.uint64)
    return table[keys]


def kept_of(*chunks: Hashes) -> list[tuple[int, int]]:
    """What of hashes is looked at, sorted."""
    return sorted((int(key_hash_tag(h0)), int(h1)) for chunk in chunks for h0, h1 in chunk)


def in_memory(dirty: Hashes, clean: Hashes) -> list[bool]:
    key_set = KeyHashSet(64 * MEGABYTE)
    first, found = np.zeros(len(dirty), dtype=np.bool_), np.zeros(len(clean), dtype=np.bool_)
    assert key_set.insert_keys_until_full(dirty, first) == len(dirty)
    key_set.flag_contained_keys(clean, found)
    return first.tolist() + (~found).tolist()


def on_disk(dirty: Hashes, clean: Hashes, calls: int, budget: DiskBudget, **settings: int) -> list[bool]:
    """Ordinals: the dirty rows in the order of the scan, then the clean ones."""
    rows = len(dirty) + len(clean)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "with a space"
        with DiskOffsetMap(path, budget, **settings) as engine:
            for part in np.array_split(np.arange(len(dirty)), calls):
                engine.add_dirty_rows(dirty[part], part.astype(np.uint32))
            mine = engine.flag_own_keys(dirty)
            assert kept_of(*engine.iterate_dirty_key_hashes()) == kept_of(dirty[mine])
            for part in np.array_split(np.arange(len(clean)), calls):
                engine.add_clean_rows(clean[part], (part + len(dirty)).astype(np.uint32))
            bitmap = engine.survivor_bitmap(rows)
            assert path.stat().st_size == engine.written_bytes == budget.used
            assert engine.peak_bytes <= settings["map_budget_bytes"]
        assert list(Path(directory).iterdir()) == []
    assert budget.used == 0
    return [bool(bit) for bit in np.unpackbits(bitmap)[:rows]]


keys = st.lists(st.integers(0, 60), max_size=120).map(lambda some: np.array(some, dtype=np.int64))


@examples(100)
@given(
    dirty=keys,
    clean=keys,
    calls=st.integers(1, 4),
    block=st.sampled_from([1, 3, 16, 1 << 10]),
    expected=st.sampled_from([0, 50, 10**7]),
    parts=st.integers(1, 3),
)
def test_the_same_answers_as_in_memory(
    dirty: npt.NDArray[np.int64], clean: npt.NDArray[np.int64], calls: int, block: int, expected: int, parts: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_spool, "BLOCK_BYTES", block * KEY_ROW_BYTES)
        answers = [
            on_disk(
                hashes_of(dirty),
                hashes_of(clean),
                calls,
                DiskBudget(),
                map_budget_bytes=LEAST,
                expected_row_count=expected,
                key_part_number=part,
                key_part_count=parts,
            )
            for part in range(parts)
        ]
    assert [any(each) for each in zip(*answers, strict=True)] == in_memory(hashes_of(dirty), hashes_of(clean))
    assert all(sum(each) <= 1 for each in zip(*answers, strict=True)), "every row belongs to one part only"


@pytest.mark.parametrize("expected_row_count", [0, 30_000, 10**9])
def test_many_keys_in_the_smallest_map_budget(expected_row_count: int) -> None:
    dice = np.random.default_rng(3)
    dirty, clean = hashes_of(dice.integers(0, 20_000, 30_000)), hashes_of(dice.integers(0, 40_000, 20_000))
    assert on_disk(dirty, clean, 3, DiskBudget(), map_budget_bytes=LEAST, expected_row_count=expected_row_count) == in_memory(dirty, clean)


def test_the_change_over_in_mid_pass() -> None:
    dirty = hashes_of(np.random.default_rng(5).integers(0, 20_000, 50_000))
    key_set, first = KeyHashSet(100_000), np.zeros(len(dirty), dtype=np.bool_)
    done = key_set.insert_keys_until_full(dirty, first)
    assert 0 < done < len(dirty)
    with (
        tempfile.TemporaryDirectory() as directory,
        DiskOffsetMap(Path(directory) / "b", DiskBudget(), map_budget_bytes=100_000, expected_row_count=50_000) as engine,
    ):
        for some in key_set.iterate_key_hashes():
            engine.add_known_keys(some)
        engine.add_dirty_rows(dirty[done:], np.arange(done, len(dirty), dtype=np.uint32))
        first |= np.unpackbits(engine.survivor_bitmap(len(dirty)))[: len(dirty)].astype(np.bool_)
        assert engine.entries == len(np.unique(dirty, axis=0))
    assert first.tolist() == in_memory(dirty, dirty[:0])


def test_the_disk_share_is_asked_before_every_byte() -> None:
    dirty = hashes_of(np.arange(5_000))
    budget = DiskBudget(limit=5_000 * KEY_ROW_BYTES - 1)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_spool, "BLOCK_BYTES", 1_000 * KEY_ROW_BYTES)
        path = Path(directory) / "b"
        engine = DiskOffsetMap(path, budget, map_budget_bytes=MEGABYTE, expected_row_count=5_000)
        with pytest.raises(OutOfBudget, match="used up"), engine:
            engine.add_dirty_rows(dirty, np.arange(5_000, dtype=np.uint32))
        assert not path.exists()
    assert budget.peak == 4_000 * KEY_ROW_BYTES
    assert budget.used == 0
    engine.close()  # a second time
    assert budget.used == 0


def test_passes_needed_leaves_room_for_uneven_parts() -> None:
    assert count_log_scans(0, 100) == 1
    assert count_log_scans(1_000, 1_000 * KEY_ROW_BYTES) == 2
    assert count_log_scans(1_000, 1_100 * KEY_ROW_BYTES) == 1
    assert count_log_scans(10**9, 10**9) == 18


def test_ordinals_outside_the_bitmap_and_wrong_parts_are_refused() -> None:
    one = hashes_of(np.arange(1))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "b"
        with DiskOffsetMap(path, DiskBudget(), map_budget_bytes=MEGABYTE, expected_row_count=1) as engine:
            with pytest.raises(ValueError, match="at most"):
                engine.add_dirty_rows(one, np.array([disk_map.SEEN], dtype=np.uint32))
            engine.add_dirty_rows(one, np.array([8], dtype=np.uint32))
            with pytest.raises(ValueError, match="ordinal 8"):
                engine.survivor_bitmap(8)
            assert engine.survivor_bitmap(9).tolist() == [0, 128]
        with pytest.raises(ValueError, match="of 2"):
            DiskOffsetMap(path, DiskBudget(), map_budget_bytes=MEGABYTE, expected_row_count=1, key_part_number=2, key_part_count=2)
        with pytest.raises(OutOfBudget, match="too small"):
            DiskOffsetMap(path, DiskBudget(), map_budget_bytes=100, expected_row_count=1)
        assert not path.exists()


def test_hashes_that_no_range_can_tell_apart_end_in_an_error_not_in_a_loop() -> None:
    hashes = np.zeros((3_000, 2), dtype=np.uint64)
    hashes[:, 1] = np.random.default_rng(1).integers(0, 2**64, size=3_000, dtype=np.uint64)
    with pytest.raises(OutOfBudget, match="not uniform"):
        on_disk(hashes, hashes[:0], 1, DiskBudget(), map_budget_bytes=LEAST, expected_row_count=0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_is_an_error_that_says_what_to_do(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    budget = DiskBudget()
    with DiskOffsetMap(tmp_path / "b", budget, map_budget_bytes=MEGABYTE, expected_row_count=1) as engine:
        engine.add_dirty_rows(hashes_of(np.arange(100)), np.arange(100, dtype=np.uint32))
        monkeypatch.setattr("compactor.cleaner.disk_map.os.pwrite", full)
        with pytest.raises(OutOfBudget, match="no space is left for the keys of the offset map in .*/b") as error:
            engine.survivor_bitmap(100)
        assert "Free space there" in error.value.hint
    assert budget.used == 0
    assert not list(tmp_path.iterdir())


def test_a_file_that_somebody_cut_is_an_error_not_an_answer() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "b"
        with DiskOffsetMap(path, DiskBudget(), map_budget_bytes=MEGABYTE, expected_row_count=1) as engine:
            engine.add_dirty_rows(hashes_of(np.arange(100)), np.arange(100, dtype=np.uint32))
            engine._spool.write_buffered_rows()
            path.write_bytes(path.read_bytes()[:50])
            with pytest.raises(OSError, match="shorter"):
                engine.survivor_bitmap(100)
