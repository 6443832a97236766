"""`checkpoints verify`: a sound log, and every way in which one can be unsound."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.offsets import CleanerOffset
from compactor.access.tier import Tier
from compactor.config.settings import Settings, TierSettings
from compactor.constants import CompactorEpoch, Offset
from compactor.control import records
from compactor.control.control_log import StateSnapshot
from compactor.control.logs import open_catalog
from compactor.control.state import PartitionState
from compactor.model.finding import Finding
from compactor.upkeep.verify import (
    cleaner_offset_problems,
    differing_field,
    live_segment_problems,
    open_round_problems,
    uncleaned_segment_problems,
    verify_control_log,
)
from compactor.views.checkpoints import read_only_copy
from tests.support.crafted import ORDERS, Author, Crafted, kip_table, segment, vector


@pytest.fixture
def crafted() -> Crafted:
    return kip_table()[0]


def verify(crafted: Crafted) -> list[Finding]:
    ports = crafted.author("viewer").ports
    tier = Tier(Settings(tier=TierSettings(url="file:///nowhere")), ports, open_catalog(ports), crafted.counters)
    return verify_control_log(read_only_copy(tier), ORDERS)


def errors(crafted: Crafted) -> list[tuple[str, str]]:
    return [(finding.kind, finding.object) for finding in verify(crafted) if finding.severity == "error"]


def keep(crafted: Crafted, state: PartitionState) -> str:
    """Writes a snapshot as a damaged process might have."""
    key = f"partitions/{ORDERS}/snapshot/{state.slot:020d}.json"
    made = StateSnapshot[PartitionState](version=records.VERSION, log=str(ORDERS), state=state)
    crafted.store.put(key, records.append_checksum(made.model_dump_json().encode()))
    return key


def test_a_sound_log_with_a_fenced_record(crafted: Crafted) -> None:
    assert [(finding.severity, finding.kind) for finding in verify(crafted)] == [("note", "fenced")]


def test_a_sound_log_after_a_cut(crafted: Crafted) -> None:
    assert crafted.author("cutter").log.snapshot_and_cut(1)
    crafted.author("host-c:3").lead()
    assert errors(crafted) == []


def test_snapshots_are_held_against_what_their_slots_fold_to(crafted: Crafted) -> None:
    state = crafted.log().state
    key = keep(crafted, state)
    assert errors(crafted) == []
    keep(crafted, state.model_copy(update={"vector": vector((0, 100), (1, 150))}))
    assert errors(crafted) == [("snapshot", key)]


def test_a_snapshot_that_breaks_the_rules_by_itself(crafted: Crafted) -> None:
    assert crafted.author("cutter").log.snapshot_and_cut(1)
    state = crafted.log().state
    key = keep(
        crafted,
        state.model_copy(update={"vector": (CleanerOffset(CompactorEpoch(1), Offset(100)), CleanerOffset(CompactorEpoch(0), Offset(155)))}),
    )
    found = errors(crafted)
    assert ("snapshot", key) in found
    assert ("cleaner-offsets", "") in found


def test_a_snapshot_ahead_of_the_log(crafted: Crafted) -> None:
    state = crafted.log().state
    key = keep(crafted, state.model_copy(update={"slot": state.slot + 3}))
    assert errors(crafted) == [("snapshot", key)]


def test_a_slot_behind_a_gap(crafted: Crafted) -> None:
    log = crafted.log()
    stray = log.control_record_object_key(log.state.slot + 2)
    crafted.store.put(stray, crafted.store.get(log.control_record_object_key(1)))
    assert errors(crafted) == [("gap", stray)]


def test_a_record_that_cannot_be_read_is_named(crafted: Crafted) -> None:
    key = crafted.log().control_record_object_key(4)
    crafted.store.put(key, crafted.store.get(key)[:-5])
    ((kind, where),) = errors(crafted)
    assert (kind, where.endswith(key)) == ("control-log", True)


def test_what_a_cut_left_over_is_a_note(crafted: Crafted) -> None:
    first = crafted.log().control_record_object_key(1)
    data = crafted.store.get(first)
    assert crafted.author("cutter").log.snapshot_and_cut(1)
    crafted.store.put(first, data)
    assert ("note", "left-over") in [(finding.severity, finding.kind) for finding in verify(crafted)]
    assert errors(crafted) == []


def state_of(**changes: Any) -> PartitionState:
    crafted, _, _ = kip_table()
    return crafted.log().state.model_copy(update=changes)


@pytest.mark.parametrize(
    "broken",
    [
        vector((0, 100), (0, 155)),
        vector((0, 155), (1, 100)),
        vector((0, 100), (1, 156)),
        vector((0, 100), (7, 155)),
    ],
)
def test_cleaner_offsets_that_break_a_rule(broken: tuple[CleanerOffset, ...]) -> None:
    assert list(cleaner_offset_problems(state_of())) == []
    assert list(cleaner_offset_problems(state_of(vector=broken)))


def test_segments_that_do_not_follow_each_other() -> None:
    assert list(live_segment_problems(state_of())) == []
    assert list(live_segment_problems(state_of(live=(segment("a", 0, 9), segment("b", 11, 20)))))
    assert list(live_segment_problems(state_of(live=(segment("a", 0, 9), segment("b", 5, 20)))))
    assert list(live_segment_problems(state_of(retiring=(segment("run-a-out", 0, 99),))))


def test_an_open_round_whose_source_is_gone_is_a_note() -> None:
    """Somebody truncates while a round is open, or before it is resumed: nothing is wrong with such a log."""
    crafted = Crafted()
    (only,) = crafted.import_segments((0, 99))
    a: Author = crafted.author("host-a:1")
    a.lead()
    a.announce("run-a", [only], 100)
    state = crafted.log().state
    assert list(open_round_problems(state)) == []
    gone = state.model_copy(update={"live": ()})
    (told,) = open_round_problems(gone)
    assert "run-a" in told
    assert only in told
    assert list(live_segment_problems(gone)) == []


def test_what_an_epoch_is_not_granted_any_more() -> None:
    assert list(uncleaned_segment_problems(state_of())) == []
    (told,) = uncleaned_segment_problems(state_of(vector=vector((0, 50), (1, 155))))
    assert "run-a-out" in told


def test_times_that_only_a_snapshot_knows_make_no_difference() -> None:
    crafted = Crafted()
    (only,) = crafted.import_segments((0, 99))
    a: Author = crafted.author("host-a:1")
    a.lead()
    state = a.publish("run-a", [only], (0, 100))
    assert state.leader
    timed = state.model_copy(
        update={
            "waiting": tuple(group.model_copy(update={"since_ms": 5}) for group in state.waiting),
            "leader": state.leader.model_copy(update={"since_ms": 5}),
        }
    )
    assert differing_field(timed, state) == ""
    assert differing_field(state.model_copy(update={"slot": 3}), state) == "slot"
