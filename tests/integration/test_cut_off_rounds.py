"""A round of which brokers delete something in its midst says so, and no more than it has done."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from compactor.access.rounds import compact
from compactor.control.leadership import hold_leadership
from compactor.control.state import RoundStage
from compactor.features.iceberg.plan import unfinished_round_end
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.model.remote_log import RemoteLogSegmentMetadataUpdateRecord, TopicIdPartition, uuid_bytes
from compactor.model.segment import SegmentState
from compactor.round.drive import settle_intent
from compactor.round.ports import Withdrawal
from compactor.upkeep.retire import retire_partition
from tests.support.deployment import GrowingLog
from tests.support.memory_brokers import BROKER, MemoryBrokers

NAME = TopicPartition("orders", 0)


@pytest.mark.parametrize("deleted", [0, 1])
def test_a_round_that_was_cut_off_says_so(tmp_path: Path, deleted: int) -> None:
    brokers = MemoryBrokers(tmp_path / "brokers", {"cleaner": {"min_cleanable_dirty_ratio": 0.0, "segment_bytes": 4_096}})
    brokers.topic("orders")
    brokers.tier(NAME, GrowingLog(*NAME, tmp_path, random.Random(0)).write_part(4))
    opened = brokers.opened()
    before = {segment.id: segment.size_bytes for segment in opened.open_partition_log(NAME).refresh().live}

    def reached(stage: RoundStage, plan: Any) -> None:
        if stage is RoundStage.PUBLISH_BEGUN:
            plans.append(plan)
            where = TopicIdPartition(brokers.cluster.known[NAME.topic].topic_id, *NAME)
            for name in plan.tasks[-1].sources[:deleted]:
                for state in (SegmentState.DELETE_SEGMENT_STARTED, SegmentState.DELETE_SEGMENT_FINISHED):
                    brokers.write(RemoteLogSegmentMetadataUpdateRecord(where, uuid_bytes(name), BROKER, 6, state))

    plans: list[CompactionPlan] = []
    report = compact(opened, NAME, int(time.time() * 1000), on_stage=reached)
    state = opened.open_partition_log(NAME).refresh()
    assert (report.status, report.next_dirty_offset) == ("cleaned", state.first_dirty_offset)
    assert report.segments_out == len(state.published_by) > 0
    published = {segment.id: segment.size_bytes for segment in state.live if segment.id in state.published_by}
    replaced = [before[name] for task in plans[0].tasks if task.new_segment_id in published for name in task.sources]
    assert report.saved_bytes == sum(replaced) - sum(published.values())
    assert (state.first_dirty_offset == 0) is bool(deleted)
    assert report.reason.startswith("brokers had deleted what 1 of " if deleted else "")
    assert bool(report.reason) is bool(deleted)
    # A table of the last values waits until a round has cleaned as far as this one would have.
    assert unfinished_round_end(state) == (plans[0].next_dirty_offset if deleted else -1)


class Killed(BaseException):
    """The process ends here."""


def test_objects_of_an_undone_round_are_left_to_the_process_that_retires(tmp_path: Path) -> None:
    """A compactor without the right to delete tells brokers that the segments go, and leaves "finished" to who deletes the objects."""
    apart = {"publish": {"retire": False, "grace_ms": 0}, "lease": {"ttl_ms": 100}}
    brokers = MemoryBrokers(tmp_path / "brokers", {"cleaner": {"min_cleanable_dirty_ratio": 0.0, "segment_bytes": 4_096}, **apart})
    brokers.topic("orders")
    brokers.tier(NAME, GrowingLog(*NAME, tmp_path, random.Random(0)).write_part(4))
    plans: list[CompactionPlan] = []

    def die(stage: RoundStage, plan: CompactionPlan) -> None:
        if stage is RoundStage.VERIFIED:
            plans.append(plan)
            raise Killed

    with pytest.raises(Killed):
        compact(brokers.opened(), NAME, int(time.time() * 1000), on_stage=die)
    time.sleep(0.2)
    opened = brokers.opened()
    log = opened.open_partition_log(NAME)
    with hold_leadership(opened.ports, log, opened.lease) as leads:
        settle_intent(leads, Withdrawal())
    made = {task.new_segment_id for task in plans[0].tasks}

    def ids_of_objects() -> set[str]:
        return {one.segment_id for one in opened.ports.layout.list_objects(NAME) if one.segment_id}

    def announced_to_brokers() -> set[str]:
        return {one.id for one in opened.ports.publisher.find_unknown_segments(NAME, ()) or ()}

    assert log.refresh().intent is None
    assert made <= ids_of_objects() & announced_to_brokers()
    with_right = brokers.opened(publish={"retire": True, "grace_ms": 0})
    retire_partition(with_right.ports, with_right.open_partition_log(NAME), with_right.lease, with_right.retention)
    assert not made & (ids_of_objects() | announced_to_brokers())
