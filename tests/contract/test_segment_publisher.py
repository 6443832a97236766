"""What every publisher does: it switches readers exactly once, records it then, and can be asked again after a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from compactor.errors import Unavailable
from compactor.model.plan import Replacement
from compactor.tier.ports import Named, SegmentPublisher
from compactor.tier.publishers.object_log import ObjectLogPublisher
from tests.contract.test_segment_layout import NAME, contents_of, segment_of

PUBLISHERS: dict[str, Callable[[], SegmentPublisher]] = {"object-log": ObjectLogPublisher}

OLD = [segment_of(start, contents_of(start)) for start in (0, 10)]
NEW = segment_of(0, contents_of(77)).model_copy(update={"id": "N" * 22, "end_offset": 19})
SWITCH = [Replacement(sources=tuple(segment.id for segment in OLD), segment=NEW)]


@dataclass
class Log:
    """Stands for the control log: how often a record was asked for, and whether it takes them."""

    records: list[str] = field(default_factory=list)
    down: bool = False

    def record(self) -> None:
        if self.down:
            raise Unavailable("the store does not answer")
        self.records.append("published")


@pytest.fixture(params=sorted(PUBLISHERS))
def publisher(request: pytest.FixtureRequest) -> SegmentPublisher:
    return PUBLISHERS[request.param]()


def test_a_publication_is_recorded_once(publisher: SegmentPublisher) -> None:
    log = Log()
    publisher.begin(NAME, NEW)
    assert log.records == []
    publisher.publish(NAME, SWITCH, log.record)
    assert log.records == ["published"]


def test_a_record_that_failed_is_the_callers_to_know_and_can_be_asked_for_again(publisher: SegmentPublisher) -> None:
    log = Log(down=True)
    publisher.begin(NAME, NEW)
    with pytest.raises(Unavailable):
        publisher.publish(NAME, SWITCH, log.record)
    log.down = False
    publisher.publish(NAME, SWITCH, log.record)
    assert log.records == ["published"]


def test_the_way_back_is_recorded_once(publisher: SegmentPublisher) -> None:
    log = Log()
    publisher.begin(NAME, NEW)
    publisher.publish(NAME, SWITCH, lambda: None)
    publisher.restore(NAME, OLD, [NEW], log.record)
    assert log.records == ["published"]


def test_what_is_withdrawn_or_gone_records_nothing_and_may_be_said_twice(publisher: SegmentPublisher) -> None:
    log = Log()
    publisher.begin(NAME, NEW)
    for _ in range(2):
        publisher.withdraw(NAME, [Named(NEW.id, NEW.start_offset)])
        publisher.deleted(NAME, [Named(NEW.id, NEW.start_offset)])
    assert log.records == []
