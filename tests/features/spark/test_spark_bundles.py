"""Which segments go together in pass 1, in which order their rows are looked at, and what a bundle says of itself to whoever finds it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compactor.errors import BadData
from compactor.features.spark import exchange as bundles, pass_one as range_rows
from compactor.features.spark.exchange import (
    BatchScanSummary,
    PassOneResultOfSegment,
    PassOneResultOfSegmentBundle,
    RowNumberRange,
    StoredGateRows,
    StoredKeyRows,
    decode_bundle_result,
    decode_scan_summaries,
    encode_bundle_result,
    merge_row_number_ranges,
    pack_tail,
    plan_segment_bundles,
    read_tail,
)
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import BatchTable
from compactor.records.indexes import TXN_ENTRY
from tests.features.spark.test_spark_worker import SMALL, growing
from tests.support.segments import make_segment
from tests.support.spark_tier import HereCluster, Twins

pytestmark = pytest.mark.quick


def segment(number: int, size: int, records: int) -> RemoteLogSegmentMetadata:
    return make_segment(f"s{number}", number * 1000, number * 1000 + 999, size=size, records=records)


def test_neighbours_go_together_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [100] * 20 + [2000] + [100] * 20
    segments = [segment(number, size, 10) for number, size in enumerate(sizes)]
    runs = plan_segment_bundles(segments, task_slots=2, disk_bytes=1 << 30)
    assert [number for begin, end in runs for number in range(begin, end)] == list(range(41))
    assert 3 <= len(runs) <= 5
    monkeypatch.setattr(bundles, "MAX_BUNDLE_BYTES", 300)
    assert max(sum(sizes[begin:end]) for begin, end in plan_segment_bundles(segments, task_slots=2, disk_bytes=1 << 30)) == 2000, (
        "one segment is never cut"
    )
    assert len(plan_segment_bundles(segments, task_slots=2, disk_bytes=4000 + 2 * 16 * 10)) == 41, "there is room for the rows of one"
    assert plan_segment_bundles([], task_slots=2, disk_bytes=1) == []


def indexed(name: str, first: int, ordinals: int) -> PassOneResultOfSegment:
    return PassOneResultOfSegment(
        name, 3, np.array([1]), BatchTable.allocate_rows(1), np.empty(0, TXN_ENTRY), False, first, ordinals, ordinals
    )


def test_rows_of_bundles_that_lie_between_each_other() -> None:
    """Segments with transactions are read again, in bundles of their own: 9, 7 and 6 lie in one, 8 and 5 in the other."""
    order = [(0, indexed("9", 0, 5)), (1, indexed("8", 0, 4)), (0, indexed("7", 8, 2)), (0, indexed("6", 16, 9)), (1, indexed("5", 8, 1))]
    assert merge_row_number_ranges(order) == (
        RowNumberRange(0, 0, 5),
        RowNumberRange(1, 0, 4),
        RowNumberRange(0, 8, 25),
        RowNumberRange(1, 8, 9),
    )
    assert merge_row_number_ranges([(0, indexed("2", 0, 5)), (0, indexed("1", 8, 5))]) == (RowNumberRange(0, 0, 13),)


def test_a_bundle_says_what_was_found(tmp_path: Path) -> None:
    store = Twins(tmp_path).remote.ports.control
    segments = (
        indexed("b", 0, 11),
        PassOneResultOfSegment("headers", 2, np.array([0, 1]), BatchTable.allocate_rows(2), np.zeros(2, TXN_ENTRY), True),
    )
    keys = StoredKeyRows("scratch/keys-x", 0, 7, 11, 9, 2)
    gate = StoredGateRows("scratch/gate-x", 500, 7, 9, 2)
    facts = {"b": BatchScanSummary(np.array([True, False, True]), np.array([3, 3, 5]), np.array([0, 2, 0]))}
    data = b"rows" + pack_tail(encode_bundle_result(PassOneResultOfSegmentBundle(segments, keys, gate), facts))
    store.create(keys.key, data)
    tail = read_tail(store, keys.key, len(data))
    again = decode_bundle_result(tail, keys.key, len(data))
    shown = [(s.id, s.batches, s.undecided, s.first, s.ordinals, len(s.places), len(s.txn_entries)) for s in again.segments]
    assert shown == [("b", 3, False, 0, 11, 1, 0), ("headers", 2, True, -1, 0, 2, 2)]
    assert (again.gate, again.keys) == (gate, StoredKeyRows(keys.key, len(data), 7, 11, 9, 2))
    assert decode_scan_summaries(tail)["b"].tombstones.tolist() == [True, False, True]
    assert decode_scan_summaries(tail)["b"].keyless.tolist() == [0, 2, 0]
    store.create("scratch/cut", data[:-3])
    with pytest.raises(BadData, match="the end of a scratch object is damaged"):
        read_tail(store, "scratch/cut", len(data) - 3)


@pytest.mark.parametrize("together", [0, 300])
def test_ranges_that_are_fetched_alone_or_a_few_at_a_time(together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_rows, "COMBINED_FETCH_BYTES", together)
    twins = Twins(tmp_path, f"{SMALL}\n[spark]\npartitions = 13")
    log, folder = growing(tmp_path / "one", 3)
    twins.bring(folder)
    twins.round(HereCluster())
    assert twins.difference() == ""
    twins.bring(growing(tmp_path / "two", 7, start=log, segments=3)[1])
    twins.round(HereCluster())
    assert twins.difference() == ""
