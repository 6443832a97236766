"""Trying again, waiting and counting, on a clock of our own."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from compactor.config.sections import S3Settings
from compactor.config.settings import RateLimitSettings
from compactor.errors import NotFound, Refused, Unavailable
from compactor.storage.factory import RateLimitingRequestMeter, RateLimits, TokenBucket, open_store
from compactor.storage.port import ObjectInfo
from compactor.storage.settings import RetrySettings, TransferSettings
from compactor.storage.wrappers import FirstAnswerTracker, RequestCounters, Retrier, RetryingStore, StoreUsage
from tests.support.memory_store import Clock as MemoryClock, MemoryStore


class Clock:
    """Sleeping moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self._lock = threading.Lock()

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds
            self.slept.append(seconds)


class TestRetrier:
    def retrier(self, clock: Clock, fraction: float = 1.0, **policy: float) -> Retrier:
        contact = FirstAnswerTracker()
        contact.record_answer()
        return Retrier(RetrySettings(**policy), clock.time, clock.sleep, lambda: fraction, contact)

    def test_pauses_double_up_to_the_cap_and_the_attempt_knows_its_number(self) -> None:
        clock, numbers = Clock(), []

        def attempt(number: int) -> str:
            numbers.append(number)
            if number < 6:
                raise Unavailable("busy")
            return "done"

        assert self.retrier(clock, base_s=1, cap_s=8).call_with_retries(attempt) == "done"
        assert clock.slept == [1, 2, 4, 8, 8, 8]
        assert numbers == [0, 1, 2, 3, 4, 5, 6]

    def test_full_jitter(self) -> None:
        clock = Clock()
        with pytest.raises(Unavailable):
            self.retrier(clock, fraction=0.25, deadline_s=5, base_s=1).call_with_retries(fail)
        assert clock.slept[:3] == [0.25, 0.5, 1.0]

    def test_a_minute_of_503_is_survived_and_a_store_that_is_gone_is_given_up_in_time(self) -> None:
        clock = Clock()

        def back_after_a_minute(_: int) -> str:
            if clock.now < 60:
                raise Unavailable("503")
            return "back"

        assert self.retrier(clock).call_with_retries(back_after_a_minute) == "back"
        clock = Clock()
        with pytest.raises(Unavailable, match=r"down \(tried \d+ times in 1\d\d\.\d s\)") as caught:
            self.retrier(clock).call_with_retries(fail)
        assert 100 <= clock.now <= 120
        assert caught.value.hint == "wait"

    def test_an_attempt_that_took_longer_than_the_deadline_is_tried_again(self) -> None:
        """A part of 8 MiB at 50 kB a second, for example, whose connection breaks at its end."""
        clock = Clock()

        def slow(number: int) -> str:
            clock.now += 160
            if number == 0:
                raise Unavailable("reset")
            return "done"

        assert self.retrier(clock).call_with_retries(slow) == "done"

    @pytest.mark.parametrize("kind", [NotFound, Refused])
    def test_an_answer_is_not_tried_again(self, kind: type[Exception]) -> None:
        clock = Clock()

        def answered(_: int) -> None:
            raise kind("no")

        with pytest.raises(kind):
            self.retrier(clock).call_with_retries(answered)
        assert clock.slept == []


class TestAStoreThatNeverAnswered:
    def retrier(self, clock: Clock, contact: FirstAnswerTracker) -> Retrier:
        return Retrier(RetrySettings(deadline_s=120, first_answer_s=60), clock.time, clock.sleep, lambda: 1.0, contact)

    def test_is_waited_for_once_and_not_again_by_every_request(self) -> None:
        clock, contact = Clock(), FirstAnswerTracker()
        with pytest.raises(Unavailable, match="tried"):
            self.retrier(clock, contact).call_with_retries(fail)
        assert 50 <= clock.now <= 60
        before = clock.now
        for _ in range(8):
            clock.now += 1
            with pytest.raises(Unavailable):
                self.retrier(clock, contact).call_with_retries(fail)
        assert clock.now - before <= 60 - before + 8

    def test_once_it_has_answered_it_has_its_two_minutes(self) -> None:
        clock, contact = Clock(), FirstAnswerTracker()
        retrier = self.retrier(clock, contact)
        assert retrier.call_with_retries(lambda _: "hello") == "hello"
        with pytest.raises(Unavailable):
            retrier.call_with_retries(fail)
        assert 100 <= clock.now <= 120

    def test_repetitions_are_said_from_the_second_on(self, caplog: pytest.LogCaptureFixture) -> None:
        clock, contact = Clock(), FirstAnswerTracker()
        failures = iter([True, True, True, False])

        def attempt(_: int) -> None:
            if next(failures):
                raise Unavailable("cannot read s3://bucket/k: no answer")

        Retrier(RetrySettings(base_s=2), clock.time, clock.sleep, lambda: 1.0, contact).call_with_retries(attempt)
        assert [record.getMessage() for record in caplog.records] == [
            "cannot read s3://bucket/k: no answer; try 3 in 4.0 s",
            "cannot read s3://bucket/k: no answer; try 4 in 8.0 s",
        ]


class TestRetryingStore:
    def test_a_listing_goes_on_where_it_was(self) -> None:
        store = MemoryStore(MemoryClock(), RequestCounters())
        for name in "abc":
            store.create(name, b"")
        clock, failures = Clock(), iter([False, True, False, True, False])
        retrying = RetryingStore(Shaky(store, failures), Retrier(RetrySettings(), clock.time, clock.sleep, lambda: 1.0))
        assert [info.key for info in retrying.list("")] == ["a", "b", "c"]
        assert len(clock.slept) == 2

    def test_a_directory_that_answers_again_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = open_store(tmp_path.as_uri(), retries=RetrySettings(base_s=0.001))
        store.create("k", b"hello")
        real, failures = os.open, iter([OSError(errno.ESTALE, "stale file handle")])

        def stale(*arguments: Any, **options: Any) -> int:
            for failure in failures:
                raise failure
            return real(*arguments, **options)

        monkeypatch.setattr(os, "open", stale)
        assert store.get("k") == b"hello"


class Shaky(MemoryStore):
    """A listing that breaks off where the next of ``failures`` says so."""

    def __init__(self, store: MemoryStore, failures: Iterator[bool]) -> None:
        super().__init__(MemoryClock(), RequestCounters())
        self._inner = store
        self._failures = failures

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        for info in self._inner.list(prefix, after):
            if next(self._failures, False):
                raise Unavailable("broke off")
            yield info


def fail(_: int) -> None:
    raise Unavailable("down", hint="wait")


class TestThrottle:
    def test_a_second_s_worth_is_free_and_then_the_rate_holds(self) -> None:
        clock = Clock()
        bucket = TokenBucket(100, clock.time, clock.sleep)
        for _ in range(20):
            bucket.take_tokens(50)
        assert clock.now == pytest.approx((20 * 50 - 100) / 100)

    def test_a_request_larger_than_the_rate_waits_once(self) -> None:
        clock = Clock()
        bucket = TokenBucket(100, clock.time, clock.sleep)
        bucket.take_tokens(1000)
        assert clock.slept == [9.0]

    def test_idle_time_saves_up_no_more_than_a_second(self) -> None:
        clock = Clock()
        bucket = TokenBucket(100, clock.time, clock.sleep)
        clock.now = 1000
        bucket.take_tokens(100)
        bucket.take_tokens(100)
        assert clock.slept == [1.0]

    def test_threads_share_the_debt(self) -> None:
        """On a clock that stands still every later taker waits longer: together they pay for all."""
        slept: list[float] = []
        bucket = TokenBucket(10, lambda: 0.0, slept.append)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(bucket.take_tokens, [10] * 8))
        assert sorted(slept) == [1, 2, 3, 4, 5, 6, 7]

    def test_each_limit_is_its_own_and_zero_is_none(self, tmp_path: Path) -> None:
        clock, counters = Clock(), RequestCounters()
        buckets = RateLimits(RateLimitSettings(max_read_bytes_per_s=100, max_requests_per_s=1), clock.time, clock.sleep)
        meter = RateLimitingRequestMeter(counters, buckets)
        meter.record_bytes_written(10**9)
        assert clock.slept == []
        meter.record_bytes_read(300)
        assert clock.slept == [2.0]
        meter.record_request("get")
        meter.record_request("get")
        meter.record_request("get")
        assert clock.slept == [2.0, 1.0, 1.0]
        waited_s = {"max_read_bytes_per_s": 2.0, "max_requests_per_s": 2.0}
        assert counters.usage() == StoreUsage(requests={"get": 3}, bytes_read=300, bytes_written=10**9, waited_s=waited_s)
        earlier = counters.usage()
        meter.record_request("get")
        assert counters.usage().usage_since(earlier).waited_s["max_requests_per_s"] == 1.0


def test_a_directory_counts_what_it_does(tmp_path: Path) -> None:
    counters = RequestCounters()
    store = open_store(str(tmp_path / "tier"), counters=counters)
    store.create("k", b"12345", {"a": "b"})
    before = counters.usage()
    store.get("k", 1, 2)
    store.download("k", tmp_path / "out")
    list(store.list(""))
    store.delete(["k"])
    assert before == StoreUsage(requests={"put": 1}, bytes_written=5)
    assert counters.usage().usage_since(before) == StoreUsage(requests={"delete": 1, "get": 2, "list": 1}, bytes_read=7)


def test_settings_travel_and_stores_are_opened_where_they_arrive(tmp_path: Path) -> None:
    settings = (
        S3Settings(endpoint_url="http://x", region="r"),
        RateLimitSettings(max_requests_per_s=5),
        RetrySettings(deadline_s=1),
        TransferSettings(threads=2),
    )
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(ValueError, match="greater than or equal"):
        TransferSettings(part_bytes=1000)
