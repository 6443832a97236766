"""Ranges and parts of one object in parallel: what happens to the others when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from compactor.errors import Refused
from compactor.storage.checks import run_in_parallel


def test_results_come_in_order() -> None:
    def task(number: int) -> Callable[[threading.Event], int]:
        return lambda stop: number

    assert run_in_parallel(3, [task(number) for number in range(20)]) == list(range(20))
    assert run_in_parallel(3, []) == []


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_after_a_refusal_no_thread_asks_again(threads: int) -> None:
    """Also while the caller still sleeps: every thread hears of it before its next request."""
    asked = []

    def refused(stop: threading.Event) -> None:
        if stop.is_set():
            raise CancelledError
        asked.append(threading.get_ident())
        raise Refused("no")

    for _ in range(50):
        asked.clear()
        with pytest.raises(Refused):
            run_in_parallel(threads, [refused] * 200)
        assert len(asked) == len(set(asked)) <= threads
