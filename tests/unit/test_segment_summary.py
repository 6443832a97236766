"""What a segment's metadata says of its content."""

from __future__ import annotations

import numpy as np
import pytest

from compactor.cleaner.source import summarize_timestamps
from compactor.records.batches import HEADER, BatchTable


def table_of(*batches: tuple[int, int, int]) -> BatchTable:
    """Batches of one record or more, each (base offset, last offset, largest timestamp)."""
    table = BatchTable.allocate_rows(len(batches))
    table.base_offset[:], table.last_offset[:], table.max_timestamp[:] = np.array(batches).T
    table.count[:], table.magic[:], table.control[:], table.size[:] = table.last_offset - table.base_offset + 1, 2, -1, HEADER
    return table


@pytest.mark.parametrize(("log_start", "latest"), [(0, 90), (4, 90), (5, 30), (9, 30), (10, 20), (12, 20), (13, -1)])
def test_batches_below_the_log_start_do_not_count_for_the_largest_timestamp(log_start: int, latest: int) -> None:
    found = summarize_timestamps(table_of((0, 4, 90), (5, 9, 30), (10, 12, 20)), log_start)
    assert (found.max_timestamp_ms, found.first_timestamp_ms, found.records) == (latest, 90, 13)
