"""What every publisher does: it switches readers exactly once, records it then, and can be asked again after a crash."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch
from compactor.errors import Unavailable, UsageError
from compactor.model.plan import Replacement
from compactor.model.segment import SegmentState
from compactor.tier.ports import AnnouncedSegment, ControlLogPublisher, SegmentIdAndStartOffset, SegmentPublisher
from tests.contract.test_segment_layout import NAME, contents_of, segment_of
from tests.support.kafka_publishing import BrokerWorld, introduced, named

OLD = [segment_of(start, contents_of(start)) for start in (0, 10)]
NEWEST = segment_of(20, contents_of(20))
NEW = segment_of(0, contents_of(77)).model_copy(update={"id": named(77), "end_offset": 19})
SWITCH = [Replacement(sources=tuple(segment.id for segment in OLD), segment=NEW)]


def over_brokers() -> SegmentPublisher:
    world = BrokerWorld()
    for each in (*OLD, NEWEST):
        segment = each.model_copy(update={"leader_epochs": (EpochEntry(LeaderEpoch(0), each.start_offset),)})
        world.write(introduced(segment, 1), world.said(segment.id, SegmentState.COPY_SEGMENT_FINISHED))
    return world.publisher()


PUBLISHERS: dict[str, Callable[[], SegmentPublisher]] = {"object-log": ControlLogPublisher, "kafka": over_brokers}


@dataclass
class Log:
    """Stands for the control log: how often a record was asked for, and whether it takes them."""

    records: list[str] = field(default_factory=list)
    down: bool = False

    def record(self, cut_off: Collection[str] = ()) -> None:
        if self.down:
            raise Unavailable("the store does not answer")
        assert not cut_off
        self.records.append("published")

    def begun(self) -> None:
        """It need not be; where it is, it is first."""
        assert self.records == []


@pytest.fixture(params=sorted(PUBLISHERS))
def publisher(request: pytest.FixtureRequest) -> SegmentPublisher:
    return PUBLISHERS[request.param]()


def test_a_publication_is_recorded_once(publisher: SegmentPublisher) -> None:
    log = Log()
    publisher.announce_segment(NAME, NEW)
    assert log.records == []
    publisher.publish_replacements(NAME, SWITCH, log.begun, log.record)
    assert log.records == ["published"]


def test_a_record_that_failed_is_the_callers_to_know_and_can_be_asked_for_again(publisher: SegmentPublisher) -> None:
    log = Log(down=True)
    publisher.announce_segment(NAME, NEW)
    with pytest.raises(Unavailable):
        publisher.publish_replacements(NAME, SWITCH, log.begun, log.record)
    log.down = False
    publisher.publish_replacements(NAME, SWITCH, log.begun, log.record)
    assert log.records == ["published"]


def test_the_way_back_is_recorded_once_or_refused(publisher: SegmentPublisher) -> None:
    log = Log()
    publisher.announce_segment(NAME, NEW)
    publisher.publish_replacements(NAME, SWITCH, lambda: None, lambda cut_off: None)
    try:
        publisher.restore_segments(NAME, OLD, [NEW], log.record)
    except UsageError:
        assert log.records == []
    else:
        assert log.records == ["published"]


def test_what_is_withdrawn_or_gone_records_nothing_and_may_be_said_twice(publisher: SegmentPublisher) -> None:
    log = Log()
    publisher.announce_segment(NAME, NEW)
    for _ in range(2):
        publisher.withdraw_segments(
            NAME, [AnnouncedSegment(NEW.id, NEW.start_offset, NEW.end_offset, NEW.leader_epochs)], include_unannounced=True
        )
        publisher.record_finished_segment_deletion(NAME, [SegmentIdAndStartOffset(NEW.id, NEW.start_offset)])
    assert log.records == []


def test_what_it_has_published_or_withdrawn_is_no_stray(publisher: SegmentPublisher) -> None:
    known = [segment.id for segment in (*OLD, NEW)]
    publisher.announce_segment(NAME, NEW)
    assert not publisher.find_unknown_segments(NAME, known)
    publisher.publish_replacements(NAME, SWITCH, lambda: None, lambda cut_off: None)
    assert not publisher.find_unknown_segments(NAME, known)
    assert publisher.withdraw_unknown_segments(NAME, [NEW], known) == 0
