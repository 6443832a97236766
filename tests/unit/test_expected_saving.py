"""The summary keeps what the latest round over dirty bytes saved, from which `plan` expects the saving of the next."""

from __future__ import annotations

import pytest

from compactor.constants import CompactorEpoch
from compactor.control.state import PartitionState, RunHistoryEntry
from compactor.control.summary import summarize_state


def run(before: int, written: int, dirty: int | None = None, *, published: int = 7) -> RunHistoryEntry:
    stats: dict[str, int | float | str] = {"bytes_before": before, "bytes_written": written}
    if dirty is not None:
        stats["bytes_dirty"] = dirty
    return RunHistoryEntry(
        run_id="r", leader_epoch=CompactorEpoch(0), holder="h", slot=1, started_ms=0, published_slot=published, stats=stats
    )


@pytest.mark.parametrize(
    ("runs", "rate"),
    [
        ([], None),
        ([run(100, 50, published=0), run(0, 0)], None),
        ([run(1000, 500, 1000)], 0.5),
        ([run(1000, 500, 250)], 2.0),
        ([run(1000, 900, 1000), run(1000, 500, 1000)], 0.5),
        ([run(1000, 400, 1000), run(1000, 990, 0)], 0.6),
        ([run(1000, 500)], 0.5),
        ([run(100, 120, 100)], 0.0),
    ],
    ids=["no round", "none published", "all dirty", "a part dirty", "latest counts", "horizons only", "old record", "larger result"],
)
def test_saving_rate_is_that_of_the_latest_round_over_dirty_bytes(runs: list[RunHistoryEntry], rate: float | None) -> None:
    summary = summarize_state(PartitionState(topic="orders", partition=0, runs=tuple(runs)))
    assert summary.saved_per_dirty_byte == rate
