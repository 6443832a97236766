"""Where `retire` looks by the tier-wide log, and that no hint which is lost or late leaves anything due for ever."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from compactor.constants import HOUR_MS, NEVER_MS
from compactor.control.fold import apply_catalog_record
from compactor.control.logs import (
    collect_queued_hints,
    open_catalog,
    pause_reason,
    pause_rounds,
    publish_hints,
    request_round,
    resume_rounds,
)
from compactor.control.records import (
    CatalogRecord,
    DeletionCheckResult,
    PartitionChanged,
    PartitionsInspected,
    SlotsReached,
    append_checksum,
)
from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.upkeep.retire import MAX_UNHINTED_INSPECTIONS, partitions_to_inspect
from tests.support.idle_tier import Idle

NOW = 1_770_000_000_000
NAMES = [TopicPartition("t", number) for number in range(3 * MAX_UNHINTED_INSPECTIONS)]


def folded(*bodies: Any) -> CatalogState:
    state = CatalogState()
    for slot, body in enumerate(bodies, start=1):
        state = apply_catalog_record(
            state, CatalogRecord(version=4, log="catalog", slot=slot, incarnation="x", attempt=slot, at_ms=NOW, body=body)
        )
    return state


def looked(slot: int = 5, next_ms: int = NEVER_MS, at_ms: int = NOW - 2 * HOUR_MS) -> dict[str, DeletionCheckResult]:
    return {str(name): DeletionCheckResult(slot, next_ms, at_ms) for name in NAMES}


class TestWhere:
    def test_what_was_never_looked_at_is(self) -> None:
        assert partitions_to_inspect(CatalogState(), NAMES, NOW) == NAMES

    def test_a_few_are_looked_at_every_time(self) -> None:
        state = folded(PartitionsInspected(looks=looked(at_ms=NOW)))
        assert partitions_to_inspect(state, NAMES[:MAX_UNHINTED_INSPECTIONS], NOW) == NAMES[:MAX_UNHINTED_INSPECTIONS]

    def test_of_many_idle_ones_some_an_hour_the_oldest_first(self) -> None:
        oldest = {str(name): DeletionCheckResult(5, NEVER_MS, NOW - 9 * HOUR_MS) for name in NAMES[7:20]}
        state = folded(PartitionsInspected(looks=looked() | oldest))
        found = partitions_to_inspect(state, NAMES, NOW)
        assert len(found) == MAX_UNHINTED_INSPECTIONS
        assert set(NAMES[7:20]) <= set(found)
        again = folded(
            PartitionsInspected(looks=looked()),
            PartitionsInspected(looks={str(name): DeletionCheckResult(5, NEVER_MS, NOW) for name in found}),
        )
        assert partitions_to_inspect(again, NAMES, NOW + 1) == []
        later = set(partitions_to_inspect(again, NAMES, NOW + HOUR_MS))
        assert len(later) == MAX_UNHINTED_INSPECTIONS
        assert not later & set(found)

    def test_all_have_had_their_turn_after_as_many_hours_as_it_takes(self) -> None:
        state, seen, now = folded(PartitionsInspected(looks=looked())), set(), NOW
        for slot in range(2, 6):
            now += HOUR_MS
            found = partitions_to_inspect(state, NAMES, now)
            seen.update(found)
            body = PartitionsInspected(looks={str(name): DeletionCheckResult(5, NEVER_MS, now) for name in found})
            state = apply_catalog_record(
                state, CatalogRecord(version=4, log="catalog", slot=slot, incarnation="x", attempt=1, at_ms=now, body=body)
            )
        assert seen == set(NAMES)

    def test_looks_that_hints_asked_for_do_not_put_off_the_others_for_ever(self) -> None:
        busy = {str(name): DeletionCheckResult(5, NEVER_MS, NOW) for name in NAMES[:MAX_UNHINTED_INSPECTIONS]}
        state = folded(PartitionsInspected(looks=looked(at_ms=NOW - 9 * HOUR_MS) | busy))
        assert partitions_to_inspect(state, NAMES, NOW) == NAMES[MAX_UNHINTED_INSPECTIONS : 2 * MAX_UNHINTED_INSPECTIONS]

    def test_what_is_due_by_its_time(self) -> None:
        due = {
            str(NAMES[40]): DeletionCheckResult(5, NOW - 1, NOW),
            str(NAMES[41]): DeletionCheckResult(5, 0, NOW),
            str(NAMES[42]): DeletionCheckResult(5, NOW + 1, NOW),
        }
        state = folded(PartitionsInspected(looks=looked(at_ms=NOW) | due))
        assert partitions_to_inspect(state, NAMES, NOW) == NAMES[40:42]

    @pytest.mark.parametrize("hint", [PartitionChanged(topic="t", partition=3, slot=6), SlotsReached(slots={"t-3": 6})])
    def test_what_was_written_to_since(self, hint: Any) -> None:
        looks = PartitionsInspected(looks=looked(at_ms=NOW))
        assert partitions_to_inspect(folded(looks, hint), NAMES, NOW) == [NAMES[3]]
        assert partitions_to_inspect(folded(hint, looks), NAMES, NOW) == [NAMES[3]]  # a look that was overtaken does not hide it

    def test_a_hint_that_does_not_say_how_far(self) -> None:
        looks = PartitionsInspected(looks=looked(at_ms=NOW))
        assert partitions_to_inspect(folded(looks, PartitionChanged(topic="t", partition=3)), NAMES, NOW) == [NAMES[3]]


def test_a_catalog_without_anything_new_reads_as_before() -> None:
    """Programs of the version before refuse unknown fields: what is empty is not written."""
    assert {"looks", "paused", "wanted"}.isdisjoint(folded(PartitionChanged(topic="t", partition=3)).model_dump())


def test_a_crowd_of_writers_does_not_wait_for_each_other_and_is_heard(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 60)
    ports = idle.tier().ports
    base = open_catalog(ports).refresh()
    logs = [open_catalog(ports) for _ in idle.names]
    for log in logs:
        log.continue_from_cached_state(base)
    before = idle.counters.usage()
    together = threading.Barrier(len(logs))

    def hint(number: int) -> None:
        together.wait()
        publish_hints(logs[number], {idle.names[number]: 99})

    threads = [threading.Thread(target=hint, args=(number,)) for number in range(len(logs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert idle.counters.usage().usage_since(before).total_requests < 60 * 120  # each folds FAR_BEHIND slots at most
    catalog = open_catalog(ports)
    collect_queued_hints(catalog)
    assert set(catalog.refresh().reached.values()) == {99}
    assert collect_queued_hints(catalog) == 0


def test_who_is_far_behind_leaves_a_hint_in_the_inbox(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 50)
    ports = idle.tier().ports
    late = open_catalog(ports)
    late.refresh()
    busy = open_catalog(ports)
    for number in range(40):
        publish_hints(busy, {idle.names[number]: 7 + number})
    before = idle.counters.usage()
    publish_hints(late, {idle.names[49]: 77})
    assert idle.counters.usage().usage_since(before).total_requests == 2  # is it far behind? the hint
    assert busy.refresh().reached["orders-49"] != 77
    idle.store.put("catalog/inbox/garbage.json", b"{}")
    assert collect_queued_hints(busy) == 2
    assert busy.refresh().reached["orders-49"] == 77
    assert not list(idle.store.list("catalog/inbox/"))


def test_a_partition_that_nobody_has_listed_never_goes_by_the_inbox(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 2)
    ports = idle.tier().ports
    late, busy = open_catalog(ports), open_catalog(ports)
    late.refresh()
    for slot in range(40):
        publish_hints(busy, {idle.names[0]: 7 + slot})
    publish_hints(late, {TopicPartition("new", 0): 1})
    assert not list(idle.store.list("catalog/inbox/"))
    assert "new-0" in busy.refresh().partitions


def test_pauses_are_by_pattern_and_everybody_sees_them(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 2)
    ports = idle.tier().ports
    mine, other = open_catalog(ports), open_catalog(ports)
    assert pause_rounds(mine, "ord.*", "ann", "a migration")
    assert not pause_rounds(other, "ord.*", "ben", "")
    assert pause_rounds(other, "orders-1", "ben", "")
    state = open_catalog(ports).refresh()
    assert pause_reason(state, TopicPartition("orders", 0)) == "paused by ann: a migration (ord.*)"
    assert pause_reason(state, TopicPartition("payments", 0)) == ""
    resume_rounds(mine, "ord.*", "ann")
    state = mine.refresh()
    assert (
        pause_reason(state, TopicPartition("orders", 0)),
        pause_reason(state, TopicPartition("orders", 1)),
    ) == ("", "paused by ben")
    with pytest.raises(UsageError, match=r"nothing was paused by 'ord\.\*'"):
        resume_rounds(other, "ord.*", "ben")
    with pytest.raises(UsageError, match="not a valid regular expression"):
        pause_rounds(mine, "*", "ann", "")


def test_the_last_wishes_are_kept(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 2)
    catalog = open_catalog(idle.tier().ports)
    request_round(catalog, idle.names[1], "ann")
    first = catalog.refresh().wanted["orders-1"]
    request_round(catalog, idle.names[1], "ann")
    assert catalog.refresh().wanted["orders-1"].slot > first.slot


def test_a_hint_from_the_inbox_counts_where_another_one_comes_that_knows_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle(tmp_path, 1)
    ports, (name, *_) = idle.tier().ports, idle.names
    catalog, other = open_catalog(ports), open_catalog(ports)
    left = PartitionChanged(topic=name.topic, partition=name.partition, slot=9)
    catalog.store.put(f"{catalog.prefix}/inbox/x-9-0.json", append_checksum(left.model_dump_json().encode()))
    refresh = catalog.refresh

    def overtaken() -> CatalogState:
        state = refresh()
        publish_hints(other, {name: 7})
        return state

    monkeypatch.setattr(catalog, "refresh", overtaken)
    assert collect_queued_hints(catalog) == 1
    assert refresh().reached[str(name)] == 9
