"""WorkerThreads: what runs where, in which order results come, and what happens when somebody fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from compactor.cleaner.worker_threads import BARRIER, JobBarrier, ReusableJobBuffers, WorkerThreads

pytestmark = pytest.mark.parametrize("threads", [1, 2, 3])


def test_results_come_in_the_order_of_the_jobs(threads: int) -> None:
    def work(buffers: ReusableJobBuffers, job: int) -> int:
        threading.Event().wait(0.001 * (job % 3))
        return job * job

    with WorkerThreads(threads) as workers:
        assert list(workers.run_jobs(work, range(30))) == [job * job for job in range(30)]


def test_decisions_are_made_one_by_one_and_in_order(threads: int) -> None:
    decided: list[int] = []
    at_it = threading.Lock()

    def prepare(buffers: ReusableJobBuffers, job: int) -> int:
        threading.Event().wait(0.001 * (job % 3))
        return job

    def decide(job: int) -> int:
        assert at_it.acquire(blocking=False)
        threading.Event().wait(0.001 * (job % 2))
        decided.append(job)
        at_it.release()
        return len(decided)

    with WorkerThreads(threads) as workers:
        assert list(workers.run_ordered_jobs(prepare, decide, lambda buffers, count: -count, range(30))) == [-n for n in range(1, 31)]
    assert decided == list(range(30))


@pytest.mark.parametrize("steps", [False, True])
def test_behind_a_drain_nothing_is_asked_for_before_the_rest_was_consumed(threads: int, steps: bool) -> None:
    consumed: list[int] = []
    asked: list[tuple[int, int]] = []

    def jobs() -> Iterator[int | JobBarrier]:
        for segment in range(4):
            asked.append((segment, len(consumed)))
            yield from range(5 * segment, 5 * segment + 5)
            yield BARRIER
            yield BARRIER

    with WorkerThreads(threads) as workers:
        results = (
            workers.run_ordered_jobs(lambda buffers, job: job, lambda job: job, lambda buffers, job: job, jobs())
            if steps
            else workers.run_jobs(lambda buffers, job: job, jobs())
        )
        for job in results:
            consumed.append(job)  # noqa: PERF402 - jobs() looks at it meanwhile
    assert consumed == list(range(20))
    # A consumer is done with a result when it asks for the next one.
    assert asked == [(segment, 5 * segment) for segment in range(4)]


def test_while_the_first_result_is_waited_for_others_are_made(threads: int) -> None:
    others = threading.Semaphore(0)
    waited_for = 2 * threads - 1 if threads > 1 else 0

    def work(buffers: ReusableJobBuffers, job: int) -> int:
        if job == 0:
            assert all(others.acquire(timeout=60) for _ in range(waited_for))
        others.release()
        return job

    with WorkerThreads(threads) as workers:
        assert list(workers.run_jobs(work, range(20))) == list(range(20))


def test_what_fails_is_raised_and_every_lane_is_free_again(threads: int) -> None:
    def work(buffers: ReusableJobBuffers, job: int) -> int:
        if job == 7:
            raise ValueError(job)
        return job

    with WorkerThreads(threads) as workers:
        for _ in range(3):
            with pytest.raises(ValueError, match="7"):
                list(workers.run_jobs(work, range(30)))
            with pytest.raises(ValueError, match="7"):
                list(workers.run_ordered_jobs(lambda buffers, job: job, lambda job: job, work, range(30)))
            with pytest.raises(ValueError, match="7"):
                list(workers.run_ordered_jobs(work, lambda job: job, lambda buffers, job: job, range(30)))
            decided: list[int] = []

            def decide(job: int, decided: list[int] = decided) -> int:
                decided.append(work(ReusableJobBuffers(), job))
                return job

            with pytest.raises(ValueError, match="7"):
                list(workers.run_ordered_jobs(lambda buffers, job: job, decide, lambda buffers, job: job, range(30)))
            assert decided == list(range(7))  # what comes behind it is not decided on
            for results in (
                workers.run_jobs(work, range(5)),
                workers.run_ordered_jobs(work, lambda job: job, lambda buffers, job: job, range(5)),
            ):
                assert next(results) == 0
                results.close()
        assert list(workers.run_jobs(work, range(7))) == list(range(7))
