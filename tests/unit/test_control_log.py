"""The control log over years: taken slots, snapshots, boundaries, and starting up."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compactor.control import control_log
from compactor.control.leadership import send_heartbeats_in_background
from compactor.control.logs import CatalogLog, create_tier, open_catalog, publish_hints
from compactor.control.ports import EnvironmentPorts
from compactor.control.records import BadControlRecord, PartitionChanged
from compactor.control.state import CatalogState
from compactor.errors import Unavailable
from compactor.model.ids import TopicPartition
from compactor.storage.local import LocalStore
from compactor.tier.plain import NativeLayout
from compactor.tier.ports import ControlLogPublisher
from tests.simulation.play import Play


def catalog(play: Play) -> CatalogLog:
    return open_catalog(play.process().ports)


def append(log: CatalogLog, times: int) -> CatalogState:
    for _ in range(times):
        before = log.state.slot
        log.append_due_records(lambda state, before=before: None if state.slot > before else PartitionChanged(topic="t", partition=before))  # type: ignore[misc]
    return log.state


def test_an_empty_log_is_its_empty_state(play: Play) -> None:
    assert catalog(play).refresh() == CatalogState()


def test_an_append_against_a_taken_slot_folds_on_and_decides_anew(play: Play) -> None:
    first, second = catalog(play), catalog(play)
    append(first, 1)
    second.refresh()
    append(first, 2)
    seen: list[int] = []

    def decide(state: CatalogState) -> PartitionChanged | None:
        seen.append(state.slot)
        return PartitionChanged(topic="other", partition=1) if "other-1" not in state.partitions else None

    second.append_due_records(decide)
    assert seen == [1, 3, 4]


def test_an_uncertain_append_is_tried_in_the_same_slot_again(play: Play) -> None:
    log = catalog(play)
    append(log, 1)
    play.hold("create catalog/log/")
    append(log, 1)
    assert [what for what in play.requests if what.startswith("create catalog/log/")][1:] == [
        f"create {log.control_record_object_key(2)}"
    ] * 2
    play.land()
    assert catalog(play).refresh() == log.state


def test_a_store_that_never_answers_ends_in_unavailable_and_the_record_may_still_count(play: Play) -> None:
    log = catalog(play)
    append(log, 1)
    for _ in range(6):
        play.hold("create catalog/log/")
    with pytest.raises(Unavailable):
        append(log, 1)
    play.land()
    assert log.refresh().slot == 2


class TestCut:
    def test_start_up_after_a_cut_is_the_same_state(self, play: Play) -> None:
        log = catalog(play)
        append(log, 9)
        assert log.snapshot_and_cut(4)
        append(log, 3)
        assert catalog(play).refresh() == log.state
        assert not [key for key in play.world.control.objects if "/log/" in key and key <= log.control_record_object_key(9)]

    def test_start_up_reads_what_is_recent_and_never_lists(self, play: Play) -> None:
        log = catalog(play)
        for _ in range(40):
            append(log, 8)
            assert log.snapshot_and_cut(8)
        append(log, 3)
        play.requests.clear()
        assert catalog(play).refresh() == log.state
        assert len(play.requests) <= 3 + 1 + 2 * 6 + 3
        assert not [what for what in play.requests if what.startswith("list")]

    def test_an_idle_look_costs_two_gets(self, play: Play) -> None:
        log, other = catalog(play), catalog(play)
        append(other, 70)
        other.snapshot_and_cut()
        log.refresh()
        play.requests.clear()
        assert not log.has_new_records()
        # What a snapshot stands for is tied to the log by its boundary.
        assert [what.partition(" ")[0] for what in play.requests] == ["get", "get", "get"]
        append(other, 1)
        assert log.has_new_records()
        log.refresh()
        play.requests.clear()
        assert not log.has_new_records()
        assert [what.partition(" ")[0] for what in play.requests] == ["get", "get"]

    def test_a_sleeper_notices_that_its_slots_were_cut(self, play: Play) -> None:
        log, other = catalog(play), catalog(play)
        append(log, 2)
        other.refresh()
        append(other, 70)
        other.snapshot_and_cut()
        assert log.has_new_records()
        assert log.refresh() == other.state

    def test_too_few_slots_are_not_worth_a_cut(self, play: Play) -> None:
        log = catalog(play)
        append(log, 63)
        assert not log.snapshot_and_cut()
        append(log, 1)
        assert log.snapshot_and_cut()
        assert not log.snapshot_and_cut()

    def test_boundaries_are_never_overwritten_or_deleted(self, play: Play) -> None:
        log = catalog(play)
        for _ in range(3):
            append(log, 2)
            log.snapshot_and_cut(1)
        boundaries = [key for key in play.world.control.objects if "/boundary/" in key]
        assert [int(key[-25:-5]) for key in boundaries] == [1, 2, 3]
        assert not [what for what in play.requests if what.startswith(("put", "delete catalog/boundary"))]
        assert len([key for key in play.world.control.objects if "/snapshot/" in key]) == 1

    def test_a_snapshot_that_is_gone_is_named(self, play: Play) -> None:
        log = catalog(play)
        append(log, 2)
        log.snapshot_and_cut(1)
        play.world.control.objects.pop("catalog/snapshot/00000000000000000002.json")
        with pytest.raises(BadControlRecord, match="snapshot") as error:
            catalog(play).refresh()
        assert error.value.segment.endswith("catalog/snapshot/00000000000000000002.json")


class TestShortLogs:
    """A log that is known to be short is begun from its first slot, and whether it was cut is asked once, behind the last."""

    def opened(self, play: Play, floor: int) -> CatalogLog:
        log = catalog(play)
        log.floor = floor
        return log

    def test_it_is_read_without_a_search_for_the_boundary(self, play: Play) -> None:
        append(catalog(play), 3)
        play.requests.clear()
        assert self.opened(play, 2).refresh().slot == 3
        assert [what.rpartition("/")[0] for what in play.requests] == [*["get catalog/log"] * 4, "get catalog/boundary"]

    def test_it_was_cut_nevertheless(self, play: Play) -> None:
        log = catalog(play)
        append(log, 5)
        log.snapshot_and_cut(1)
        append(log, 2)
        assert self.opened(play, 5).refresh() == log.state
        assert self.opened(play, 5).refresh_and_check_gaps() == log.state

    def test_what_a_sleeper_writes_below_the_boundary_is_not_believed(self, play: Play) -> None:
        log, sleeper = catalog(play), catalog(play)
        sleeper.refresh()
        for _ in range(6):
            play.hold("create catalog/log/")
        with pytest.raises(Unavailable):
            append(sleeper, 1)
        append(log, 5)
        log.snapshot_and_cut(1)
        play.land()
        assert log.control_record_object_key(1) in play.world.control.objects
        assert self.opened(play, 5).refresh() == log.refresh()


def test_a_cut_that_is_not_due_asks_for_nothing(play: Play) -> None:
    log = catalog(play)
    append(log, 63)
    play.requests.clear()
    assert not log.snapshot_and_cut()
    assert play.requests == []


class TestLostObjects:
    """A fold takes a gap for the tail; ``refresh_and_check_gaps`` does not."""

    @pytest.mark.parametrize("lost", [3, 4, 6])
    def test_a_slot_before_others(self, lost: int, play: Play) -> None:
        append(catalog(play), 7)
        play.world.control.objects.pop(f"catalog/log/{lost:020d}.json")
        assert catalog(play).refresh().slot == lost - 1
        with pytest.raises(BadControlRecord, match=f"what can be read ends at catalog/log/{lost - 1:020d}.json") as error:
            catalog(play).refresh_and_check_gaps()
        assert error.value.segment.endswith("catalog/log/00000000000000000007.json")

    @pytest.mark.parametrize("lost", [1, 2])
    def test_a_boundary(self, lost: int, play: Play) -> None:
        log = catalog(play)
        for _ in range(2):
            append(log, 2)
            log.snapshot_and_cut(1)
        play.world.control.objects.pop(f"catalog/boundary/{lost:020d}.json")
        with pytest.raises(BadControlRecord, match="missing"):
            catalog(play).refresh_and_check_gaps()

    def test_all_boundaries(self, play: Play) -> None:
        """What is left is a snapshot that nothing names."""
        log = catalog(play)
        append(log, 2)
        log.snapshot_and_cut(1)
        play.world.control.objects.pop("catalog/boundary/00000000000000000001.json")
        assert catalog(play).refresh() == CatalogState()
        with pytest.raises(BadControlRecord, match="missing") as error:
            catalog(play).refresh_and_check_gaps()
        assert error.value.segment.endswith("catalog/snapshot/00000000000000000002.json")

    def test_an_identity_is_not_made_a_second_time(self, play: Play) -> None:
        ports = play.process().ports
        create_tier(ports, kind="object-log", layout="native")
        append(catalog(play), 1)
        play.world.control.objects.pop("catalog/log/00000000000000000001.json")
        with pytest.raises(BadControlRecord, match="missing"):
            create_tier(ports, kind="object-log", layout="native")

    def test_a_log_that_grows_meanwhile_has_no_gap(self, play: Play) -> None:
        log, other = catalog(play), catalog(play)
        append(log, 3)

        def grow() -> None:
            append(other, 70)
            other.snapshot_and_cut(1)
            append(other, 2)

        play.before("list catalog/", grow)
        assert log.refresh_and_check_gaps() == other.state

    def test_a_folded_state_costs_one_list(self, play: Play) -> None:
        log = catalog(play)
        append(log, 3)
        play.requests.clear()
        log.refresh_and_check_gaps()
        assert play.requests == ["list catalog/"]

    def test_where_other_objects_fill_the_page_each_kind_is_listed(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control_log, "PAGE", 4)
        log = catalog(play)
        append(log, 7)
        for number in range(4):
            play.world.control.objects[f"catalog/inbox/{number}.json"] = play.world.control.objects[log.control_record_object_key(1)]
        assert catalog(play).refresh_and_check_gaps().slot == 7
        play.world.control.objects.pop("catalog/log/00000000000000000005.json")
        with pytest.raises(BadControlRecord, match="what can be read ends at catalog/log/00000000000000000004.json"):
            catalog(play).refresh_and_check_gaps()

    def test_what_is_no_object_of_ours_is_none_of_ours(self, play: Play) -> None:
        append(catalog(play), 2)
        play.world.control.objects["catalog/log/README"] = play.world.control.objects["catalog/log/00000000000000000001.json"]
        assert catalog(play).refresh_and_check_gaps().slot == 2


def test_racing_writers_on_a_directory_lose_nothing_and_write_nothing_twice(tmp_path: Path) -> None:
    """The real store, with its own atomicity: threads that append and cut against each other."""
    writers, each = 4, 12
    store = LocalStore(tmp_path / "control")

    def ports(name: str) -> EnvironmentPorts:
        return EnvironmentPorts(
            store,
            store,
            NativeLayout(store),
            ControlLogPublisher(),
            lambda: 0,
            lambda seconds: None,
            os.urandom,
            name,
            send_heartbeats_in_background,
        )

    def write(number: int) -> None:
        log = open_catalog(ports(str(number)))
        for turn in range(each):
            body = PartitionChanged(topic=f"t{number}", partition=turn)
            log.append_due_records(lambda state, body=body: None if f"{body.topic}-{body.partition}" in state.partitions else body)  # type: ignore[misc]
            log.snapshot_and_cut(10)

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))
    state = open_catalog(ports("reader")).refresh()
    assert state.slot == writers * each
    assert sorted(state.partitions.values()) == list(range(1, writers * each + 1))


class TestBadRecords:
    @pytest.mark.parametrize("what", ["cut short", "garbage", "another slot's", "another log's"])
    def test_a_bad_slot_is_named_and_never_skipped(self, play: Play, what: str) -> None:
        log = catalog(play)
        append(log, 3)
        objects = play.world.control.objects
        key = log.control_record_object_key(2)
        play.importing(1)
        objects[key].data = {
            "cut short": objects[key].data[:-9],
            "garbage": b"garbage",
            "another slot's": objects[log.control_record_object_key(3)].data,
            "another log's": objects["partitions/t-0/log/00000000000000000002.json"].data,
        }[what]
        with pytest.raises(BadControlRecord) as error:
            catalog(play).refresh()
        assert key in str(error.value)
        assert error.value.exit_code == 3

    def test_a_body_that_was_garbled_on_its_way_is_fetched_again(self, play: Play) -> None:
        log = catalog(play)
        append(log, 3)
        good = play.world.control.objects[log.control_record_object_key(2)].data
        play.world.control.objects[log.control_record_object_key(2)].data = good[:-4]

        def heal() -> None:
            play.world.control.objects[log.control_record_object_key(2)].data = good

        play.before(f"get {log.control_record_object_key(2)}", heal, skip=1)
        assert catalog(play).refresh() == log.state


class TestTier:
    def test_the_first_identity_counts(self, play: Play) -> None:
        first, second = play.process("a").ports, play.process("b").ports
        made: list[CatalogState] = []
        play.before("create catalog/log/", lambda: made.append(create_tier(second, kind="object-log", layout="native")))
        state = create_tier(first, kind="object-log", layout="native")
        assert state.tier_id == made[0].tier_id
        assert state.hash_key == made[0].hash_key
        assert len(bytes.fromhex(state.hash_key)) == 16

    def test_partitions_are_listed_without_a_list(self, play: Play) -> None:
        ports = play.process().ports
        create_tier(ports, kind="object-log", layout="native")
        play.requests.clear()
        log = open_catalog(ports)
        for name in (TopicPartition("b", 1), TopicPartition("a", 10), TopicPartition("a", 9), TopicPartition("b", 1)):
            publish_hints(log, {name: 0})
        state = open_catalog(ports).refresh()
        assert state.topic_partitions == [TopicPartition("a", 9), TopicPartition("a", 10), TopicPartition("b", 1)]
        assert state.partitions["b-1"] == 5  # the slot of the latest hint
        assert not [what for what in play.requests if what.startswith("list")]
