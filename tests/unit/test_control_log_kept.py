"""A control log that goes on from a state that was kept elsewhere: the same end as from the beginning, and nothing of another log's."""

from __future__ import annotations

import pytest

from compactor.control.control_log import StateIdentity
from compactor.control.logs import CatalogLog, open_catalog
from compactor.control.records import PartitionChanged
from compactor.control.state import CatalogState
from tests.simulation.play import Play


def catalog(play: Play) -> CatalogLog:
    return open_catalog(play.process().ports)


def append(log: CatalogLog, times: int) -> CatalogState:
    for _ in range(times):
        before = log.state.slot
        log.append_due_records(lambda state, before=before: None if state.slot > before else PartitionChanged(topic="t", partition=before))  # type: ignore[misc]
    return log.state


def kept(log: CatalogLog) -> tuple[CatalogState, StateIdentity]:
    mark = log.state_identity()
    assert mark is not None
    return log.state, StateIdentity.model_validate_json(mark.model_dump_json())


def after(play: Play, known: tuple[CatalogState, StateIdentity]) -> CatalogLog:
    """Another process that goes on from there."""
    log = catalog(play)
    log.continue_from_cached_state(*known)
    play.requests.clear()
    log.refresh()
    return log


def test_it_costs_three_gets_where_nothing_is_new(play: Play) -> None:
    writer = catalog(play)
    append(writer, 5)
    log = after(play, kept(writer))
    assert log.state == writer.state
    assert [what.split()[0] for what in play.requests] == ["get", "get", "get"]


def test_only_what_is_new_is_read(play: Play) -> None:
    writer = catalog(play)
    append(writer, 30)
    known = kept(writer)
    append(writer, 2)
    log = after(play, known)
    assert log.state == writer.state
    assert len(play.requests) == 5
    assert not log.diverged


def test_every_state_of_a_log_with_cuts_leads_to_its_end(play: Play) -> None:
    writer = catalog(play)
    states = []
    for turn in range(12):
        append(writer, 1 + turn % 3)
        states.append(kept(writer))
        if turn % 4 == 3:
            writer.snapshot_and_cut(1)
            states.append(kept(writer))
    for known in states:
        log = after(play, known)
        assert log.state == writer.state
        assert not log.diverged
        assert kept(log)[0] == writer.state, "what was loaded can be kept again"


def test_a_state_that_is_a_snapshot_is_tied_to_its_boundary(play: Play) -> None:
    writer = catalog(play)
    append(writer, 4)
    writer.snapshot_and_cut(1)
    reader = catalog(play)
    reader.refresh()
    known = kept(reader)
    assert known[1].incarnation == ""
    log = after(play, known)
    assert log.state == writer.state
    assert len(play.requests) == 3


def test_an_empty_log_is_not_kept(play: Play) -> None:
    log = catalog(play)
    log.refresh()
    assert log.state_identity() is None


@pytest.mark.parametrize("cut", [False, True])
def test_a_state_of_another_log_is_not_believed(play: Play, cut: bool) -> None:
    writer = catalog(play)
    append(writer, 4)
    if cut:
        writer.snapshot_and_cut(1)
    known = kept(writer)
    play.world.control.objects.clear()
    other = catalog(play)
    append(other, 4)
    log = after(play, known)
    assert log.state == other.state
    assert log.diverged


def test_a_log_that_was_set_back_is_believed_and_not_what_was_kept(play: Play) -> None:
    writer = catalog(play)
    append(writer, 3)
    backup = dict(play.world.control.objects)
    append(writer, 3)
    known = kept(writer)
    play.world.control.objects.clear()
    play.world.control.objects.update(backup)
    assert after(play, known).state.slot == 3
    append(catalog(play), 5)
    log = after(play, known)
    assert log.state.slot == 8
    assert log.diverged


def test_an_idle_look_needs_the_last_slot_and_the_next_one_only(play: Play) -> None:
    writer = catalog(play)
    append(writer, 4)
    state, mark = kept(writer)
    play.requests.clear()
    assert not catalog(play).has_changed_since(state.slot, mark)
    assert len(play.requests) == 2
    append(writer, 1)
    assert catalog(play).has_changed_since(state.slot, mark)
    writer.snapshot_and_cut(1)
    assert catalog(play).has_changed_since(state.slot, mark)


@pytest.mark.parametrize("cut", [False, True])
def test_a_log_that_was_set_back_is_news(play: Play, cut: bool) -> None:
    """It has nothing behind what is known, and yet is not what is known."""
    writer = catalog(play)
    append(writer, 3)
    backup = dict(play.world.control.objects)
    append(writer, 2)
    if cut:
        writer.snapshot_and_cut(1)
    state, mark = kept(writer)
    assert not catalog(play).has_changed_since(state.slot, mark)
    play.world.control.objects.clear()
    play.world.control.objects.update(backup)
    assert catalog(play).has_changed_since(state.slot, mark)
    assert writer.has_new_records(), "a process that has folded it notices, too"
    assert writer.refresh().slot == 3
    append(catalog(play), 2)
    assert catalog(play).has_changed_since(state.slot, mark), "other records in the same slots"
