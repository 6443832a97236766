"""Costs by stage: nested stages, threads, failures; nobody recording."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from compactor.profiling import SegmentWorkStage, StageCost, StageCostRecorder, measure_stage, record_stage_costs


def recorder() -> StageCostRecorder:
    """Each look at a clock finds it one further, the clock on the wall ten."""
    cpu, wall = count(), count(step=10)
    return StageCostRecorder(lambda: float(next(cpu)), lambda: float(next(wall)))


@measure_stage(SegmentWorkStage.DEFLATE, len)
def deflated(data: bytes) -> bytes:
    return data[:1]


@measure_stage(SegmentWorkStage.ENCODE, lambda data: 2 * len(data))
def encoded(data: bytes) -> bytes:
    return deflated(data)


def test_what_is_inside_counts_for_itself_only() -> None:
    found = recorder()
    with record_stage_costs(found):
        assert encoded(b"abc") == b"a"
    assert found.costs[SegmentWorkStage.ENCODE] == StageCost(2, 20, 6)  # before and behind the inner stage
    assert found.costs[SegmentWorkStage.DEFLATE] == StageCost(1, 10, 3)
    assert found.costs[SegmentWorkStage.PARSE] == StageCost()


def test_nobody_records() -> None:
    found = recorder()
    with record_stage_costs(found):
        pass
    assert encoded(b"abc") == b"a"
    assert set(map(repr, found.costs.values())) == {repr(StageCost())}


def test_a_failure_is_time_without_bytes() -> None:
    @measure_stage(SegmentWorkStage.PARSE, lambda: 7)
    def parse() -> None:
        raise ValueError("torn")

    found = recorder()
    with record_stage_costs(found):
        with pytest.raises(ValueError, match="torn"):
            parse()
        deflated(b"")
    assert found.costs[SegmentWorkStage.PARSE] == StageCost(1, 10, 0)
    assert found.costs[SegmentWorkStage.DEFLATE] == StageCost(1, 10, 0)  # the stage that failed is over


def test_threads_have_stages_of_their_own() -> None:
    found = StageCostRecorder(lambda: 0.0, lambda: 0.0)
    inside, go_on = threading.Event(), threading.Event()

    @measure_stage(SegmentWorkStage.FETCH, lambda: 5)
    def fetch() -> None:
        inside.set()
        go_on.wait(10)

    with record_stage_costs(found):
        other = threading.Thread(target=fetch)
        other.start()
        inside.wait(10)
        deflated(b"ab")
        go_on.set()
        other.join()
    assert (found.costs[SegmentWorkStage.FETCH].bytes, found.costs[SegmentWorkStage.DEFLATE].bytes) == (5, 2)
