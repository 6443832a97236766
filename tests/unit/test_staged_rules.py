"""Which files staged for deletion still belong to a log: each rule by itself, and that none can be dropped unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from checkpoint.lineage import EpochEntry, Lineage
from compactor.constants import LeaderEpoch, Offset
from compactor.features.imports import staged_files as staged_file_rules
from compactor.features.imports.staged_files import (
    BrokerLiveLog,
    SegmentStagedForDeletion,
    StagedFileChoice,
    TierEnd,
    choose_staged_files,
    cleaned_log_problem,
    epochs_problem,
    gap_problem,
    longest_chain,
    not_below_problem,
    replaced_problem,
)


def lineage(*pairs: tuple[int, int]) -> Lineage:
    return tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in pairs)


FIRST = SegmentStagedForDeletion(20, 39, lineage((0, 20)))
SECOND = SegmentStagedForDeletion(40, 59, lineage((0, 40), (1, 50)))
LIVE = BrokerLiveLog((60, 80), first_epoch=1)
TIER = TierEnd(30, lineage((0, 0)))


def test_staged_files_that_lead_from_the_tiers_end_to_the_live_log_are_taken() -> None:
    assert choose_staged_files([SECOND, FIRST], LIVE, TIER) == StagedFileChoice((20, 40))
    assert choose_staged_files([SECOND], LIVE, replace(TIER, position=40)).taken == (40,)
    assert choose_staged_files([SECOND, FIRST], LIVE, TierEnd(None)).taken == (20, 40)


def test_nothing_is_taken_or_reported_that_the_tier_has_or_the_live_log_continues() -> None:
    assert choose_staged_files([FIRST, SECOND], LIVE, replace(TIER, position=60)) == StagedFileChoice()
    assert choose_staged_files([FIRST, SECOND], BrokerLiveLog((60,)), replace(TIER, position=75)) == StagedFileChoice()
    assert choose_staged_files([FIRST], BrokerLiveLog(()), TIER) == StagedFileChoice()
    assert choose_staged_files([FIRST, SECOND], LIVE, replace(TIER, position=40)) == StagedFileChoice((40,))


def test_an_empty_staged_file_is_passed_over() -> None:
    assert choose_staged_files([SegmentStagedForDeletion(60, 59), FIRST, SECOND], LIVE, TIER) == StagedFileChoice((20, 40))


def test_a_file_whose_base_is_live_was_replaced() -> None:
    assert replaced_problem(SECOND, BrokerLiveLog((40, 80)))
    assert not replaced_problem(SECOND, LIVE)


def test_a_truncated_or_merged_file_is_not_wholly_below_the_live_log() -> None:
    assert not not_below_problem(SECOND, LIVE)
    assert not_below_problem(SegmentStagedForDeletion(60, 70), BrokerLiveLog((40, 80)))
    assert not_below_problem(SegmentStagedForDeletion(50, 60), LIVE)


def test_a_chain_ends_where_two_files_end_at_one_offset() -> None:
    other = SegmentStagedForDeletion(30, 39)
    assert longest_chain([FIRST, SECOND], LIVE) == (FIRST, SECOND)
    assert longest_chain([FIRST, other, SECOND], LIVE) == (SECOND,)
    assert longest_chain([FIRST, replace(SECOND, last_offset=58)], LIVE) == ()
    assert longest_chain([FIRST], LIVE) == ()


def test_a_chain_begins_at_the_tiers_end_or_before() -> None:
    assert not gap_problem([FIRST, SECOND], replace(TIER, position=20))
    assert gap_problem([FIRST, SECOND], replace(TIER, position=19))
    assert not gap_problem([FIRST, SECOND], TierEnd(None))


@pytest.mark.parametrize(
    ("epochs", "live", "tier", "fits"),
    [
        pytest.param(((0, 20), (1, 50)), 1, ((0, 0),), True, id="a new epoch"),
        pytest.param(((0, 20), (1, 50)), -1, ((0, 0),), True, id="live epoch unknown"),
        pytest.param((), 1, ((0, 0),), True, id="no epoch named"),
        pytest.param(((-1, 20), (1, 50)), 1, ((0, 0),), True, id="legacy batches"),
        pytest.param(((0, 20), (1, 50)), 0, ((0, 0),), False, id="written after the live log"),
        pytest.param(((1, 20), (0, 50)), 1, ((1, 0),), False, id="epochs fall"),
        pytest.param(((0, 20),), 1, ((0, 0), (1, 25)), False, id="another branch below the tier's end"),
        pytest.param(((0, 20),), 1, ((0, 0), (1, 30)), False, id="an epoch that began at the tier's end"),
        pytest.param(((0, 30),), 1, ((1, 0),), False, id="older than the tier's last epoch"),
        pytest.param(((2, 20),), 2, ((0, 0),), False, id="a later leader disowns the tier's end"),
        pytest.param(((1, 30),), 1, ((0, 0),), True, id="a new epoch at the tier's end"),
    ],
)
def test_epochs_fit_the_tier_and_the_first_live_batch(
    epochs: tuple[tuple[int, int], ...], live: int, tier: tuple[tuple[int, int], ...], fits: bool
) -> None:
    chain = [SegmentStagedForDeletion(20, 59, lineage(*epochs))]
    assert bool(epochs_problem(chain, replace(LIVE, first_epoch=live), TierEnd(30, lineage(*tier)))) is not fits


def test_a_live_log_that_was_cleaned_later_may_lack_tombstones_for_what_is_staged() -> None:
    cleaned = replace(LIVE, cleaned=60)
    assert cleaned_log_problem([FIRST, SECOND], cleaned, TIER)
    assert not cleaned_log_problem([FIRST, SECOND], cleaned, replace(TIER, position=60))
    assert not cleaned_log_problem([FIRST, SECOND], replace(LIVE, cleaned=20), TierEnd(None))


def test_an_empty_tier_begins_with_the_staged_files_that_the_cleaner_has_not_reached() -> None:
    choice = choose_staged_files([FIRST, SECOND], replace(LIVE, cleaned=40), TierEnd(None))
    assert (choice.taken, list(choice.refusals)) == ((40,), [20])
    assert choose_staged_files([FIRST, SECOND], replace(LIVE, cleaned=40), TIER).taken == ()


WITHOUT_REASON: dict[str, Callable[..., Any]] = {
    "replaced_problem": lambda *_: "",
    "not_below_problem": lambda *_: "",
    "longest_chain": lambda segments, live: tuple(sorted(segments, key=lambda segment: segment.base)),
    "gap_problem": lambda *_: "",
    "epochs_problem": lambda *_: "",
    "cleaned_log_problem": lambda *_: "",
}
"""Each rule as it is when it is dropped."""

REFUSED: dict[str, tuple[list[SegmentStagedForDeletion], BrokerLiveLog, TierEnd]] = {
    "replaced_problem": ([SegmentStagedForDeletion(60, 70)], LIVE, TIER),
    "not_below_problem": ([SegmentStagedForDeletion(40, 65)], LIVE, TIER),
    "longest_chain": ([FIRST, replace(SECOND, last_offset=55)], LIVE, TIER),
    "gap_problem": ([SECOND], LIVE, TIER),
    "epochs_problem": ([FIRST, SECOND], LIVE, replace(TIER, lineage=lineage((1, 0)))),
    "cleaned_log_problem": ([FIRST, SECOND], replace(LIVE, cleaned=60), TierEnd(None)),
}
"""Files that this rule refuses."""


@pytest.mark.parametrize("rule", REFUSED)
def test_each_rule_refuses_by_itself(rule: str) -> None:
    choice = choose_staged_files(*REFUSED[rule])
    assert choice.taken == ()
    assert set(choice.refusals) == {segment.base for segment in REFUSED[rule][0]}
    with patch.object(staged_file_rules, rule, WITHOUT_REASON[rule]):
        dropped = choose_staged_files(*REFUSED[rule])
    assert dropped != choice, "a rule that is dropped must be noticed"
