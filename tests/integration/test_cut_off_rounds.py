"""A round of which brokers delete something in its midst says so, and no more than it has done."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from compactor.access.rounds import compact
from compactor.control.state import RoundStage
from compactor.features.iceberg.plan import unfinished_round_end
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.model.remote_log import RemoteLogSegmentMetadataUpdateRecord, TopicIdPartition, uuid_bytes
from compactor.model.segment import SegmentState
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
