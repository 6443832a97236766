"""Two leaders tier the same offsets: what a round makes of it, and what becomes of copies that come to their end late."""

from __future__ import annotations

from checkpoint.offsets import CleanerOffset
from compactor.adapters.brokers.chain import chained_read_ranges, lineage_from_segments, segment_read_ranges
from compactor.constants import CompactorEpoch, Offset
from compactor.control.mirror import build_broker_changes_record, state_with_broker_view
from compactor.control.state import PartitionState
from compactor.model.ids import COMPACTOR_BROKER_ID
from compactor.model.plan import Replacement
from compactor.model.remote_log import BrokerView
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from tests.support.kafka_publishing import NAME, BrokerWorld, described, introduced, named

S = SegmentState


def replace(world: BrokerWorld, number: int, *sources: RemoteLogSegmentMetadata, last: int | None = None) -> RemoteLogSegmentMetadata:
    """A round of one group."""
    end = sources[-1].end_offset if last is None else last
    epochs: dict[int, int] = {}
    for source in sources:
        for entry in source.leader_epochs:
            if entry.start_offset <= end:
                epochs.setdefault(entry.epoch, entry.start_offset)
    new = described(number, sources[0].start_offset, end, epochs, max_ms=900)
    publisher = world.publisher()
    publisher.announce_segment(NAME, new)
    round_ = [Replacement(sources=tuple(source.id for source in sources), segment=new)]
    publisher.publish_replacements(NAME, round_, lambda: None, lambda cut_off: None)
    return new


def view(world: BrokerWorld) -> BrokerView:
    cache = world.cache()
    lineage = lineage_from_segments(cache)
    return BrokerView(chained_read_ranges(segment_read_ranges(cache, lineage), lineage), lineage, cache.applied)


def spans(world: BrokerWorld) -> list[tuple[str, int, int]]:
    return [(link.segment.id, link.first, link.last) for link in view(world).links]


def test_a_segment_is_read_up_to_where_a_later_leader_begins_and_so_it_is_replaced() -> None:
    world = BrokerWorld()
    first, second = world.tier(0, 0, 99), world.tier(1, 100, 199)
    later = world.tier(2, 160, 260, {0: 160, 1: 250})
    newest = world.tier(3, 261, 300, {1: 261})
    new = replace(world, 50, first, second, last=159)
    assert world.served() == [(new.id, 0, 159), (later.id, 160, 260), (newest.id, 261, 300)]
    assert {name for name, state in world.states().items() if state is S.DELETE_SEGMENT_STARTED} == {first.id, second.id}


def test_a_segment_that_brokers_come_back_to_is_one_in_the_chain() -> None:
    """A copy of an earlier leader, late: it ends where the next epoch begins, in the middle of the later leader's segment."""
    world = BrokerWorld()
    whole = world.tier(0, 50, 199, {0: 50, 1: 100})
    late = world.tier(1, 80, 99)
    newest = world.tier(2, 200, 260, {1: 200})
    assert world.served() == [(whole.id, 50, 79), (late.id, 80, 99), (whole.id, 100, 199), (newest.id, 200, 260)]
    assert spans(world) == [(whole.id, 50, 199), (newest.id, 200, 260)]
    new = replace(world, 50, whole)
    assert world.served() == [(new.id, 50, 199), (newest.id, 200, 260)]
    assert world.states()[late.id] is S.DELETE_SEGMENT_STARTED


def test_what_an_unclean_election_has_discarded_stays() -> None:
    world = BrokerWorld()
    first = world.tier(0, 0, 99)
    lost = world.tier(1, 100, 199, {1: 100})
    again = world.tier(2, 90, 189, {0: 90, 2: 150})
    newest = world.tier(3, 190, 260, {2: 190})
    assert spans(world) == [(first.id, 0, 89), (again.id, 90, 189), (newest.id, 190, 260)]
    new = replace(world, 50, first, last=89)
    second = replace(world, 51, again)
    assert world.served() == [(new.id, 0, 89), (second.id, 90, 189), (newest.id, 190, 260)]
    assert world.states()[lost.id] is S.COPY_SEGMENT_FINISHED


def test_a_copy_that_an_earlier_leader_has_begun_does_not_come_to_its_end() -> None:
    world = BrokerWorld()
    first, second = world.tier(0, 0, 99), world.tier(1, 100, 199)
    slow, reaching = described(7, 40, 79), described(8, 150, 290)
    newest = world.tier(2, 200, 260)
    world.write(introduced(slow, 2), introduced(reaching, 2))
    new = replace(world, 50, first, second)
    assert world.states()[slow.id] is S.DELETE_SEGMENT_STARTED
    assert world.states()[reaching.id] is S.COPY_SEGMENT_STARTED
    world.write(world.said(slow.id, S.COPY_SEGMENT_FINISHED))
    assert world.served() == [(new.id, 0, 199), (newest.id, 200, 260)]
    known = [new.id, first.id, second.id, newest.id]
    assert [one.id for one in world.publisher().find_unknown_segments(NAME, known) or ()] == [slow.id]


def test_a_copy_that_came_to_its_end_within_what_was_compacted_goes_again() -> None:
    world = BrokerWorld()
    first, second = world.tier(0, 0, 99), world.tier(1, 100, 199)
    newest = world.tier(2, 200, 260)
    new = [replace(world, 50, first), replace(world, 51, second)]
    inside, across = world.tier(7, 0, 79), world.tier(8, 90, 149)
    assert {(inside.id, 0, 79), (across.id, 90, 99)} <= set(world.served())
    known = [*(one.id for one in new), first.id, second.id, newest.id]
    after = len(list(world.steps()))
    assert world.publisher().withdraw_unknown_segments(NAME, new, known) == 2
    said = [record.broker_id for record, _ in list(world.steps())[after:]]
    assert set(said) == {COMPACTOR_BROKER_ID}
    assert world.served() == [(named(50), 0, 99), (named(51), 100, 199), (newest.id, 200, 260)]
    assert world.publisher().withdraw_unknown_segments(NAME, new, known) == 0


def test_one_that_reaches_beyond_what_was_compacted_is_read_and_is_dirty() -> None:
    world = BrokerWorld()
    first, second = world.tier(0, 0, 99), world.tier(1, 100, 199)
    state = state_with_broker_view(PartitionState(topic=NAME.topic, partition=NAME.partition), view(world))
    new = replace(world, 50, first)
    state = state.model_copy(update={"live": (new, *state.live[1:]), "vector": (CleanerOffset(CompactorEpoch(0), Offset(100)),)})
    assert build_broker_changes_record(state, view(world)) is None
    across = world.tier(7, 60, 250)
    assert world.publisher().withdraw_unknown_segments(NAME, [new], [new.id, first.id, second.id]) == 0
    after = state_with_broker_view(state, view(world))
    assert [(one.id, one.start_offset, one.end_offset, one.last_copied_offset) for one in after.live] == [
        (new.id, 0, 59, 99),
        (across.id, 60, 250, 250),
    ]
    assert [(entry.leader_epoch, entry.offset) for entry in after.vector] == [(0, 60)]
