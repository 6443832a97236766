"""What a round is expected to save: by rounds of its kind, the latest counting most."""

from __future__ import annotations

import pytest

from compactor.control.savings import SavingRates, expected, learned
from compactor.control.state import Run


def run(before: int, written: int, dirty: int | None = None, *, published: int = 7) -> Run:
    stats: dict[str, int | float | str] = {"bytes_before": before, "bytes_written": written}
    if dirty is not None:
        stats["bytes_dirty"] = dirty
    return Run(run_id="r", leader_epoch=0, holder="h", slot=1, started_ms=0, published_slot=published, stats=stats)


def test_nothing_is_promised_where_nothing_is_remembered() -> None:
    assert learned([]) == SavingRates()
    assert expected(SavingRates(), 100, 0).saving_bytes is None
    assert expected(SavingRates(), 0, 100).saving_bytes is None
    assert expected(SavingRates(), 0, 0).saving_bytes == 0
    assert learned([run(100, 50, published=0), run(0, 0)]) == SavingRates()


def test_a_saving_goes_with_the_dirty_bytes_not_with_all_that_is_rewritten() -> None:
    rates = learned([run(1000, 500, 1000)])
    assert expected(rates, 100, 0) == (50, "its last round saved 0.50 bytes per dirty byte")
    assert learned([run(1000, 500)]) == rates  # an earlier program did not say what was dirty


def test_rounds_for_horizons_are_judged_by_their_like() -> None:
    rates = learned([run(1000, 400, 1000), run(1000, 990, 0)])
    assert (rates.per_dirty_byte, rates.per_horizon_byte) == (0.6, 0.01)
    assert expected(rates, 0, 2_400_000).saving_bytes == 24_000
    only_values = learned([run(1000, 400, 1000)])
    assert expected(only_values, 0, 2_400_000).saving_bytes is None
    few = expected(only_values, 0, 2_400_000, tombstones=80)
    assert few == (10_240, "only delete horizons are due: 80 tombstones, 128 bytes each at most")
    assert expected(only_values, 0, 100, tombstones=80).saving_bytes == 100


def test_it_learns_from_what_happened() -> None:
    runs = [run(100, 100, 100)] * 9 + [run(100, 0, 100)]
    wrong = [1.0]
    for _ in range(4):
        runs.append(run(100, 0, 100))
        wrong.append(1.0 - learned(runs).per_dirty_byte)
    assert wrong[1] > wrong[2] > wrong[3]
    assert wrong[4] == pytest.approx(0.0)


def test_a_round_that_made_a_segment_larger_saved_nothing() -> None:
    assert learned([run(100, 120, 100)]).per_dirty_byte == 0.0
