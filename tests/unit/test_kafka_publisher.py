"""Replacements on the metadata topic: the order of records, what stands against one, and the end of every crash."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compactor.adapters.brokers import chain as rules
from compactor.adapters.brokers.chain import lineage_from_segments
from compactor.adapters.brokers.publisher import MetadataTopicSegmentPublisher
from compactor.errors import Refused, Unavailable
from compactor.model.ids import COMPACTOR_BROKER_ID
from compactor.model.plan import Replacement
from compactor.model.remote_log import RemoteLogSegmentMetadataUpdateRecord, uuid_text
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from compactor.tier.ports import AnnouncedSegment, SegmentIdAndStartOffset
from tests.simulation.memory_topic import Loss
from tests.support.broker_lookups import highest_offset
from tests.support.kafka_publishing import NAME, BrokerWorld, described, introduced, named

S = SegmentState
TWO_EPOCHS = {0: 0, 1: 25}


def tiered(epochs: dict[int, int] | None = None) -> tuple[BrokerWorld, list[RemoteLogSegmentMetadata]]:
    """Five segments of ten offsets; with two leader epochs where one ends within the third."""
    world = BrokerWorld()
    parts = [{0: start} if start < 20 else {0: 20, 1: 25} if start == 20 else {1: start} for start in range(0, 50, 10)]
    return world, [world.tier(number, start, start + 9, parts[number] if epochs else None) for number, start in enumerate(range(0, 50, 10))]


def replacing(number: int, sources: list[RemoteLogSegmentMetadata], max_ms: int = 900) -> Replacement:
    epochs: dict[int, int] = {}
    for source in sources:
        for entry in source.leader_epochs:
            epochs.setdefault(entry.epoch, entry.start_offset)
    new = described(number, sources[0].start_offset, sources[-1].end_offset, epochs, max_ms=max_ms)
    return Replacement(sources=tuple(source.id for source in sources), segment=new)


class Control:
    """What the control log would have recorded."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.cut: list[str] = []

    def begun(self) -> None:
        self.said.append("publish begun")

    def record(self, cut_off: object) -> None:
        self.said.append("round published")
        self.cut += list(cut_off)  # type: ignore[call-overload]


def announced(
    epochs: dict[int, int] | None = None, first: int = 0
) -> tuple[BrokerWorld, list[RemoteLogSegmentMetadata], MetadataTopicSegmentPublisher, Control, list[Replacement]]:
    """A world with a round of two replacements, of the first segments and of the next two, that are announced and not published."""
    world, live = tiered(epochs)
    publisher, round_ = world.publisher(), [replacing(50, live[first:2]), replacing(51, live[2:4])]
    for new in round_:
        publisher.announce_segment(NAME, new.segment)
    return world, live, publisher, Control(), round_


def told(world: BrokerWorld, since: int) -> list[str]:
    """What compactors have written, in short: ``S 50`` introduces segment 50, ``F``, ``D`` and ``X`` are its next states."""
    letters = {S.COPY_SEGMENT_STARTED: "S", S.COPY_SEGMENT_FINISHED: "F", S.DELETE_SEGMENT_STARTED: "D", S.DELETE_SEGMENT_FINISHED: "X"}
    found = []
    for number, (record, _) in enumerate(world.steps()):
        if number >= since:
            assert record.broker_id == COMPACTOR_BROKER_ID
            raw_id = record.segment_id  # type: ignore[union-attr]
            small = int.from_bytes(raw_id, "big")
            found.append(f"{letters[record.state]} {small if small < 1000 else 'marker'}")  # type: ignore[index]
    return found


def test_a_round_in_its_order() -> None:
    world, live = tiered()
    publisher, control = world.publisher(), Control()
    round_ = [replacing(50, live[:2]), replacing(51, live[2:4])]
    for new in reversed(round_):
        publisher.announce_segment(NAME, new.segment)
    assert world.served() == [(one.id, one.start_offset, one.end_offset) for one in live]
    publisher.publish_replacements(NAME, list(reversed(round_)), control.begun, control.record)
    assert told(world, 10) == ["S 51", "S 50", "F 50", "D 0", "D 1", "F 51", "D 2", "D 3"]
    assert world.served() == [(named(50), 0, 19), (named(51), 20, 39), (live[4].id, 40, 49)]
    assert (control.said, control.cut) == (["publish begun", "round published"], [])
    publisher.record_finished_segment_deletion(NAME, [SegmentIdAndStartOffset(one.id, one.start_offset) for one in live[:4]])
    assert world.states() == {named(50): S.COPY_SEGMENT_FINISHED, named(51): S.COPY_SEGMENT_FINISHED, named(4): S.COPY_SEGMENT_FINISHED}


def test_the_way_back_is_told_from_the_end_and_may_bring_back_what_was_known() -> None:
    world, live = tiered()
    publisher, control = world.publisher(), Control()
    round_ = [replacing(50, live[:2]), replacing(51, live[2:4])]
    back = [replacing(60 + number, [new.segment], max_ms=1000) for number, new in enumerate(round_)]
    with pytest.raises(Refused, match="R7"):
        publisher.announce_segment(NAME, back[0].segment.model_copy(update={"max_timestamp_ms": 1001}))
    for new in round_:
        publisher.announce_segment(NAME, new.segment)
    publisher.publish_replacements(NAME, round_, control.begun, control.record)
    since = sum(1 for _ in world.steps())
    for new in back:
        publisher.announce_segment(NAME, new.segment)
    publisher.publish_replacements(NAME, back, control.begun, control.record, last_group_first=True)
    assert told(world, since) == ["S 60", "S 61", "F 61", "D 51", "F 60", "D 50"]
    assert world.served() == [(named(60), 0, 19), (named(61), 20, 39), (live[4].id, 40, 49)]
    assert control.cut == []


def test_where_an_epoch_ends_a_highest_offset_marker_goes_first() -> None:
    world, live, publisher, control, round_ = announced(TWO_EPOCHS)
    publisher.publish_replacements(NAME, round_, control.begun, control.record)
    markers = ["S marker", "F marker", "D marker", "X marker"]
    assert told(world, 12) == ["F 50", "D 0", "D 1", *markers, "F 51", "D 2", "D 3"]
    cache = world.cache()
    assert highest_offset(cache, 0) == 25
    assert world.served() == [(named(50), 0, 19), (named(51), 20, 39), (live[4].id, 40, 49)]


def test_no_record_leaves_an_offset_without_a_segment_and_none_is_dropped() -> None:
    world, _, publisher, control, round_ = announced(TWO_EPOCHS)
    publisher.publish_replacements(NAME, round_, control.begun, control.record)
    for number, (_, cache) in enumerate(world.steps()):
        if number >= 10:
            lineage = lineage_from_segments(cache)
            assert [cache.find_segment(0 if offset < 25 else 1, offset) is None for offset in range(50)] == [False] * 50, lineage


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "lost answer"])
@pytest.mark.parametrize("at", range(12))
def test_whoever_comes_after_a_crash_ends_with_the_same(at: int, lost: bool) -> None:
    """Every append fails once: with and without the record standing."""
    world, live = tiered(TWO_EPOCHS)
    round_ = [replacing(50, live[:2]), replacing(51, live[2:4])]
    count = 0

    def fate() -> Loss:
        nonlocal count
        count += 1
        return Loss(before=not lost, lost=lost) if count == at + 1 else Loss()

    def whole(publisher_of: Callable[[], Loss]) -> Control:
        publisher, control = world.publisher(publisher_of), Control()
        for new in round_:
            publisher.announce_segment(NAME, new.segment)
        publisher.publish_replacements(NAME, round_, control.begun, control.record)
        return control

    with pytest.raises(Unavailable):
        whole(fate)
    begun = any(state is S.COPY_SEGMENT_FINISHED for name, state in world.states().items() if name in (named(50), named(51)))
    publisher, control = world.publisher(), Control()
    known = [segment.id for segment in (*live, *(new.segment for new in round_))]
    publisher.withdraw_unknown_segments(NAME, [], known)
    if not begun:
        for new in round_:
            publisher.announce_segment(NAME, new.segment)
    publisher.publish_replacements(NAME, round_, control.begun, control.record)
    assert (control.said, control.cut) == (["publish begun", "round published"], [])
    assert world.served() == [(named(50), 0, 19), (named(51), 20, 39), (live[4].id, 40, 49)]
    publisher.withdraw_unknown_segments(NAME, [], known)
    publisher.record_finished_segment_deletion(NAME, [*live[:4], *(publisher.find_unknown_segments(NAME, known) or ())])
    assert {name for name, state in world.states().items() if state is not S.COPY_SEGMENT_FINISHED} == set()


class TestTheBrokerDeletes:
    def test_a_source_before_the_switch_cuts_its_group_off_and_those_behind_it(self) -> None:
        world, live, publisher, control, round_ = announced()
        world.delete(live[0].id)
        publisher.publish_replacements(NAME, round_, control.begun, control.record)
        assert control.cut == [named(50), named(51)]
        assert told(world, 14) == ["D 50", "D 51"]
        assert world.served() == [(one.id, one.start_offset, one.end_offset) for one in live[1:]]

    def test_the_started_segment_itself(self) -> None:
        world, live, publisher, control, round_ = announced()
        world.delete(live[2].id, named(51))
        publisher.publish_replacements(NAME, round_, control.begun, control.record)
        assert control.cut == [named(51)]

    def test_a_source_after_the_switch_is_no_harm(self) -> None:
        world, live = tiered()
        publisher, control = world.publisher(), Control()
        new = replacing(50, live[:3])
        publisher.announce_segment(NAME, new.segment)
        world.write(world.said(named(50), S.COPY_SEGMENT_FINISHED, COMPACTOR_BROKER_ID))
        world.delete(live[0].id)
        publisher.publish_replacements(NAME, [new], control.begun, control.record)
        assert control.cut == []
        assert world.served() == [(named(50), 0, 29), (live[3].id, 30, 39), (live[4].id, 40, 49)]


class TestTheBrokerTiersBetweenLookAndRecord:
    """A compactor that was stopped there, or died with its COPY_SEGMENT_FINISHED on its way."""

    def test_what_an_earlier_leader_tiered_across_the_end_is_found_again(self) -> None:
        world, _, publisher, control, round_ = announced(first=1)
        late = world.tier(9, 0, 55)
        world.write(world.said(named(50), S.COPY_SEGMENT_FINISHED, COMPACTOR_BROKER_ID))
        assert world.served() == [(late.id, 0, 9), (named(50), 10, 19)], "20 to 55 are not found"
        publisher.publish_replacements(NAME, round_, control.begun, control.record)
        assert control.cut == [named(50), named(51)]
        assert world.served() == [(late.id, 0, 55)]

    def test_a_round_that_has_begun_and_said_nothing_yet_is_cut_off_where_one_that_has_not_is_refused(self) -> None:
        world, _, publisher, control, round_ = announced(first=1)
        late = world.tier(9, 0, 55)
        with pytest.raises(Refused, match="R4: offset .* would have no segment"):
            publisher.publish_replacements(NAME, round_, control.begun, control.record)
        assert control.said == []
        publisher.publish_replacements(NAME, round_, control.begun, control.record, is_begun_recorded=True)
        assert (control.said, control.cut) == (["publish begun", "round published"], [named(50), named(51)])
        assert world.served() == [(late.id, 0, 55)]


def test_a_group_that_cannot_be_finished_any_more_is_cut_off() -> None:
    """It reaches to the end of a leader epoch, and what came behind it is gone: no highest-offset marker is permitted. The round goes
    on.
    """
    world = BrokerWorld()
    live = [world.tier(number, start, start + 9, {int(start >= 20): start}) for number, start in enumerate(range(0, 50, 10))]
    publisher, control = world.publisher(), Control()
    new = replacing(50, live[:2])
    publisher.announce_segment(NAME, new.segment)
    world.delete(live[2].id)
    publisher.publish_replacements(NAME, [new], control.begun, control.record, is_begun_recorded=True)
    assert (control.said, control.cut) == (["publish begun", "round published"], [named(50)])
    assert [first for _, first, _ in world.served()] == [0, 10, 30, 40]


class TestStrays:
    def test_announced_ids_of_a_dead_compactor_are_introduced_and_cut_off(self) -> None:
        world, live = tiered()
        late = world.publisher()
        new = replacing(50, live[:2]).segment
        publisher = world.publisher()
        publisher.withdraw_segments(
            NAME, [AnnouncedSegment(new.id, new.start_offset, new.end_offset, new.leader_epochs)], include_unannounced=True
        )
        assert told(world, 10) == ["S 50", "D 50"]
        with pytest.raises(Refused, match="was cut off"):
            late.announce_segment(NAME, new)
        publisher.record_finished_segment_deletion(NAME, [SegmentIdAndStartOffset(new.id, 0)])
        assert world.states() == {one.id: S.COPY_SEGMENT_FINISHED for one in live}

    def test_a_withdrawn_one_of_this_process_is_cut_off_only_where_it_was_introduced(self) -> None:
        world, live = tiered()
        publisher = world.publisher()
        begun, never = replacing(50, live[:2]).segment, replacing(51, live[2:4]).segment
        publisher.announce_segment(NAME, begun)
        publisher.withdraw_segments(
            NAME, [AnnouncedSegment(one.id, one.start_offset, one.end_offset, one.leader_epochs) for one in (begun, never)]
        )
        assert told(world, 10) == ["S 50", "D 50"]

    def test_a_zombie_that_takes_its_place_back_loses_it_again_without_a_hole(self) -> None:
        world, live = tiered()
        publisher, control = world.publisher(), Control()
        first, second = replacing(50, live[:1]), replacing(51, live[1:3])
        for new in (first, second):
            publisher.announce_segment(NAME, new.segment)
        publisher.publish_replacements(NAME, [first, second], control.begun, control.record)
        bigger = replacing(60, [first.segment, second.segment])
        publisher.announce_segment(NAME, bigger.segment)
        world.write(introduced(described(50, 0, 9), COMPACTOR_BROKER_ID)._replace(segment_id=b"\7" * 16))  # another one's START
        publisher.publish_replacements(NAME, [bigger], control.begun, control.record)
        publisher.record_finished_segment_deletion(
            NAME, [SegmentIdAndStartOffset(first.segment.id, 0), SegmentIdAndStartOffset(second.segment.id, 10)]
        )
        # A producer that comes back: START and COPY_SEGMENT_FINISHED of what is finished.
        world.write(introduced(first.segment, COMPACTOR_BROKER_ID), world.said(named(50), S.COPY_SEGMENT_FINISHED, COMPACTOR_BROKER_ID))
        assert world.served()[0] == (named(50), 0, 9)
        known = [bigger.segment.id, *(one.id for one in live)]
        after = len(list(world.steps()))
        assert publisher.withdraw_unknown_segments(NAME, [bigger.segment], known) == 2
        assert told(world, after) == ["F 60", f"D {'marker'}", "D 50"] or told(world, after)[0] == "F 60"
        assert world.served()[0] == (named(60), 0, 29)
        assert {one.id for one in publisher.find_unknown_segments(NAME, known) or ()} == {named(50), uuid_text(b"\7" * 16)}


class TestTheRulesRefuse:
    def test_deletes_out_of_order_and_before_the_replacement_counts(self) -> None:
        world, live = tiered()
        publisher = world.publisher()
        new = replacing(50, live[:3])
        publisher.announce_segment(NAME, new.segment)
        cache = world.cache()
        lineage = lineage_from_segments(cache)
        early = world.said(live[0].id, S.DELETE_SEGMENT_STARTED, COMPACTOR_BROKER_ID)
        assert rules.record_refusal(cache, lineage, early) == "R3b: offset 0 would have no segment"
        world.write(world.said(named(50), S.COPY_SEGMENT_FINISHED, COMPACTOR_BROKER_ID))
        cache = world.cache()
        wrong = world.said(live[2].id, S.DELETE_SEGMENT_STARTED, COMPACTOR_BROKER_ID)
        assert rules.record_refusal(cache, lineage, wrong) == "R3b: offset 20 would have no segment"
        assert rules.record_refusal(cache, lineage, world.said(live[1].id, S.DELETE_SEGMENT_STARTED, COMPACTOR_BROKER_ID)) == ""

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"size_bytes": 0}, "R6"),
            ({"end_offset": 18}, "R4"),
            ({"start_offset": 1}, "R4"),
            ({"max_timestamp_ms": 1001}, "R7"),
            ({"leader_epochs": described(1, 0, 9, {0: 0, 1: 5}).leader_epochs}, "R4"),
            ({"end_offset": 49}, "R8"),
        ],
    )
    def test_what_does_not_fit(self, change: dict[str, object], why: str) -> None:
        world, live = tiered()
        segment = replacing(50, live[:2]).segment.model_copy(update=change)
        with pytest.raises(Refused, match=f"topic: {why}"):
            world.publisher().announce_segment(NAME, segment)
        assert told(world, 10) == []

    def test_other_peoples_marks(self) -> None:
        world, live = tiered()
        cache = world.cache()
        lineage = lineage_from_segments(cache)
        finished = world.said(live[0].id, S.COPY_SEGMENT_FINISHED)
        assert rules.record_refusal(cache, lineage, finished) == "R1: the record says that broker 1 wrote it"
        again = finished._replace(broker_id=COMPACTOR_BROKER_ID)
        assert rules.record_refusal(cache, lineage, again).startswith("R1: segment")
        wiped = RemoteLogSegmentMetadataUpdateRecord(*again[:4], S.DELETE_SEGMENT_STARTED, b"x")
        assert rules.record_refusal(cache, lineage, wiped).startswith("R1: custom metadata")
        unknown = world.said(named(99), S.COPY_SEGMENT_FINISHED, COMPACTOR_BROKER_ID)
        assert rules.record_refusal(cache, lineage, unknown).startswith("R3: segment")

    def test_the_end_of_an_epoch_without_its_marker(self) -> None:
        world, live = tiered(TWO_EPOCHS)
        with pytest.raises(Refused, match="ascending: leader epoch 1 begins behind the first source"):
            world.publisher().announce_segment(NAME, replacing(50, live[1:3]).segment)
        new = replacing(50, live[2:4]).segment
        world.publisher().announce_segment(NAME, new)
        cache = world.cache()
        finished = world.said(new.id, S.COPY_SEGMENT_FINISHED, COMPACTOR_BROKER_ID)
        assert rules.record_refusal(cache, lineage_from_segments(cache), finished).startswith("R8: while segment")


def test_segments_that_later_leaders_shadow_go_with_the_group_that_covers_them() -> None:
    world = BrokerWorld()
    first = world.tier(0, 0, 9)
    again = world.tier(1, 0, 19)
    newest = world.tier(2, 20, 29)
    assert world.served() == [(again.id, 0, 19), (newest.id, 20, 29)]
    publisher, control = world.publisher(), Control()
    new = replacing(50, [again])
    publisher.announce_segment(NAME, new.segment)
    publisher.publish_replacements(NAME, [new], control.begun, control.record)
    assert world.states()[first.id] is S.DELETE_SEGMENT_STARTED
    assert world.served() == [(named(50), 0, 19), (newest.id, 20, 29)]


@pytest.mark.parametrize("introduced_too", [False, True], ids=["before its rewrite is introduced", "afterwards"])
def test_a_group_that_has_expired_is_withdrawn_and_those_behind_it_are_switched(introduced_too: bool) -> None:
    world, live = tiered()
    publisher, control = world.publisher(), Control()
    round_ = [replacing(50, live[:2]), replacing(51, live[2:4])]
    for new in round_ if introduced_too else round_[1:]:
        publisher.announce_segment(NAME, new.segment)
    gone = [one.id for one in live[:2]]
    world.delete(*gone)
    since = sum(1 for _ in world.steps())
    publisher.publish_replacements(
        NAME, round_, control.begun, control.record, select_expired=lambda asked: [one for one in asked if one in gone]
    )
    assert told(world, since) == ["D 50"] * introduced_too + ["F 51", "D 2", "D 3"]
    assert control.cut == [named(50)]
    assert world.served() == [(named(51), 20, 39), (live[4].id, 40, 49)]


def test_a_group_of_which_a_part_has_expired_is_switched_as_if_it_were_whole() -> None:
    world, live = tiered()
    publisher, control = world.publisher(), Control()
    new = replacing(50, live[:3])
    publisher.announce_segment(NAME, new.segment)
    world.delete(live[0].id)
    since = sum(1 for _ in world.steps())
    publisher.publish_replacements(
        NAME,
        [new],
        control.begun,
        control.record,
        select_expired=lambda asked: [one for one in asked if one == live[0].id],
    )
    assert told(world, since) == ["F 50", "D 1", "D 2"]
    assert control.cut == []


def test_a_group_that_was_switched_and_has_expired_since_cuts_off_none_behind_it() -> None:
    world, live, publisher, control, round_ = announced()
    publisher.publish_replacements(NAME, round_[:1], control.begun, lambda cut_off: None)
    world.delete(named(50))
    publisher.publish_replacements(
        NAME, round_, control.begun, control.record, select_expired={named(50)}.intersection, is_begun_recorded=True
    )
    assert control.cut == [named(50)]
    assert world.served() == [(named(51), 20, 39), (live[4].id, 40, 49)]


def test_only_deletions_by_brokers_are_told_as_theirs() -> None:
    world, live = tiered()
    publisher = world.publisher()
    world.write(world.said(live[0].id, S.DELETE_SEGMENT_STARTED))
    world.delete(live[1].id)
    world.write(world.said(live[2].id, S.DELETE_SEGMENT_STARTED, COMPACTOR_BROKER_ID))
    assert publisher.find_deleted_segments(NAME, [one.id for one in live]) == {live[0].id, live[1].id}
