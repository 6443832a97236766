"""Rows on local disk: they come back by range in their order, the disk budget holds, and a disk that changes them is noticed."""

from __future__ import annotations

import errno
import os
import tempfile
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from compactor.cleaner import disk_map as row_spool
from compactor.cleaner.disk_map import HashRangeRowFile, HashRangeSpan
from compactor.errors import OutOfBudget, StoreError


class Disk:
    """A disk budget of ``limit`` bytes."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.used = limit, 0

    def reserve_bytes_on_disk(self, nbytes: int) -> None:
        if self.used + nbytes > self.limit:
            raise OutOfBudget("the disk budget is used up")
        self.used += nbytes

    def release_bytes_on_disk(self, nbytes: int) -> None:
        self.used -= nbytes


def rows_of(numbers: list[int], words: int, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    rows = np.zeros((len(numbers), words), dtype)
    rows[:, 0] = numbers
    rows[:, words - 1] = np.arange(len(numbers))
    return rows


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2**32 - 1), max_size=40)), max_size=6),
    st.sampled_from([(4, np.uint32), (3, np.uint64)]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([1, 7, 1 << 10]),
)
def test_rows_come_back_by_range_in_the_order_in_which_they_were_added(
    added: list[tuple[int, list[int]]], kind: tuple[int, type[np.generic]], count: int, parts: int, block: int
) -> None:
    """Against a list: each row in the range that its first word names, in one of the parts, unchanged."""
    words, dtype = kind
    found: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    want: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_spool, "BLOCK_BYTES", block * words * np.dtype(dtype).itemsize)
        for part in range(parts):
            disk = Disk()
            with HashRangeRowFile(
                Path(folder) / "rows", disk, HashRangeSpan.of_key_part(count, part, parts), words, dtype, "rows"
            ) as spool:
                for section, numbers in added:
                    spool.add_rows_to_section(section, rows_of(numbers, words, dtype))
                for section in (0, 1):
                    total = 0
                    for number in range(count):
                        read = [tuple(row) for rows in spool.read_range_rows(section, number) for row in rows.tolist()]
                        assert spool.count_range_rows(section, number) == len(read)
                        found[section] += read
                        total += len(read)
                    assert sum(len(rows) for rows in spool.read_rows_of_section(section)) == total
                assert disk.used == spool.size == spool.row_count * words * np.dtype(dtype).itemsize
            assert disk.used == 0
        assert not list(Path(folder).iterdir())
    for section in (0, 1):
        rows = [tuple(row) for each, numbers in added if each == section for row in rows_of(numbers, words, dtype).tolist()]
        want[section] = sorted(rows, key=lambda row: row[0] * count * parts >> 32)
    assert found == want


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_spool, "BLOCK_BYTES", 10 * 16)


@pytest.mark.usefixtures("small_blocks")
def test_a_row_that_the_disk_has_changed_is_an_error_and_not_an_answer(tmp_path: Path) -> None:
    with HashRangeRowFile(tmp_path / "rows", Disk(), HashRangeSpan(4), 4, np.uint32, "the rows") as spool:
        spool.add_rows_to_section(0, rows_of(list(range(0, 2**32, 2**27)), 4, np.uint32))
        path = tmp_path / "rows"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(StoreError, match="the rows in .*/rows have changed on the disk"):
            list(chain.from_iterable(spool.read_range_rows(0, number) for number in range(4)))
        with pytest.raises(StoreError, match="have changed"):
            list(spool.read_rows_of_section(0))


@pytest.mark.usefixtures("small_blocks")
def test_a_write_asks_for_its_bytes_before_the_first_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, sizes = Disk(limit=3 * 160), list[int]()
    pwrite = os.pwrite

    def watched(file: int, data: memoryview, position: int) -> int:
        assert position + len(data) <= disk.used
        sizes.append(len(data))
        return pwrite(file, data[:100], position)

    monkeypatch.setattr("compactor.cleaner.disk_map.os.pwrite", watched)
    spool = HashRangeRowFile(tmp_path / "rows", disk, HashRangeSpan(1), 4, np.uint32, "rows")
    spool.add_rows_to_section(0, rows_of(list(range(35)), 4, np.uint32))
    assert sizes == [160, 60] * 3
    with pytest.raises(OutOfBudget, match="used up"):
        spool.write_buffered_rows()
    spool.close()
    assert (disk.used, list(tmp_path.iterdir())) == (0, [])


def test_an_error_of_the_disk_that_is_not_a_full_disk_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("compactor.cleaner.disk_map.os.pwrite", fails)
    with HashRangeRowFile(tmp_path / "rows", Disk(), HashRangeSpan(1), 4, np.uint32, "rows") as spool:
        spool.add_rows_to_section(0, rows_of([1], 4, np.uint32))
        with pytest.raises(OSError, match="Input/output"):
            spool.write_buffered_rows()
        spool._fill = 0


def test_ranges_outside_of_all_ranges_are_refused() -> None:
    assert HashRangeSpan(3) == HashRangeSpan.of_key_part(3, 0, 1)
    with pytest.raises(ValueError, match="ranges 4 to 6 of 4"):
        HashRangeSpan.of_key_part(2, 2, 2)
