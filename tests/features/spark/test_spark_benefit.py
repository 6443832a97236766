"""Which partitions a full re-compaction leaves alone: those that gain too little, and none whose tombstones would then stay for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.features.spark.recompaction import assess_round_benefit
from tests.builders import LogBuilder
from tests.support.spark_tier import NAME, NOW_MS, Twins, state_of

pytestmark = pytest.mark.quick

SETTINGS = "[cleaner]\nsegment_bytes = 26000\ndelete_retention_ms = 1000"
LOTS = 10**9


def tier_of(folder: Path, *batches: tuple[str, ...], settings: str = SETTINGS, clean: bool = True) -> Tier:
    log = LogBuilder()
    for batch in batches:
        log.put(*batch)
        log.roll()
    twins = Twins(folder, settings)
    twins.bring(log.write(folder / "log"))
    if clean:
        compact(twins.local, NAME, NOW_MS, force=True)
    return twins.local


def why(tier: Tier, min_benefit: int, now_ms: int = NOW_MS) -> str:
    """Return why no round is worth running, or an empty string."""
    is_worthwhile, reason = assess_round_benefit(tier, state_of(tier), now_ms, min_benefit)
    assert reason
    return "" if is_worthwhile else reason


def test_what_can_gain_nothing(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, ("a=1", "b=1"), ("a=2",))
    assert why(tier, 1) == "a round would gain about 0 B, less than 1 B"
    assert why(tier, 0) == "", "forced"


def test_a_gain_is_held_against_what_is_asked_for(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, *[tuple(f"k{key}={number}" for key in range(50)) for number in range(4)], clean=False)
    assert why(tier, 1) == ""
    size = sum(segment.size_bytes for segment in state_of(tier).live)
    assert why(tier, size // 2) == "", "three of four records are superseded"
    assert "less than" in why(tier, size)


def test_horizons_that_are_due_or_still_to_be_set(tmp_path: Path) -> None:
    dirty = tier_of(tmp_path / "dirty", ("a=1",), ("a",), clean=False)
    assert why(dirty, LOTS) == "", "its tombstone has no horizon yet"
    cleaned = tier_of(tmp_path / "cleaned", ("a=1",), ("a",))
    assert why(cleaned, LOTS) != "", "its horizon is set, and not yet due"
    assert why(cleaned, LOTS, NOW_MS + 10_000) == "", "it is due"


def test_what_was_promised_or_is_not_known(tmp_path: Path) -> None:
    late = tier_of(tmp_path / "late", ("a=1",), ("b=1",), settings=SETTINGS + "\nmax_compaction_lag_ms = 1000", clean=False)
    assert why(late, LOTS) == ""
    blind = tier_of(tmp_path / "blind", ("a=1",), ("b=1",), settings=SETTINGS + "\nbloom = false", clean=False)
    assert why(blind, LOTS) == ""
    lost = tier_of(tmp_path / "lost", ("a=1",), ("b=1",), clean=False)
    lose_sidecars(lost)
    assert why(lost, LOTS) == ""


def test_a_clean_partition_without_sidecars_is_left_alone_until_a_horizon_passes(tmp_path: Path) -> None:
    blind = tier_of(tmp_path / "blind", ("a=1",), ("b",), settings=SETTINGS + "\nbloom = false")
    lost = tier_of(tmp_path / "lost", ("a=1",), ("b",))
    lose_sidecars(lost)
    for tier in (blind, lost):
        assert why(tier, 1) == "nothing is dirty, and no delete horizon has passed"
        assert why(tier, 0) == "", "forced"
        assert why(tier, 1, NOW_MS + 10_000) == "", "the horizon of its tombstone has passed"


def lose_sidecars(tier: Tier) -> None:
    for segment in state_of(tier).live:
        tier.ports.control.delete([tier.open_sidecar_store(NAME).sidecar_object_key(segment.id)])
