"""The loop that daemon and agent share: scan, start jobs in threads, process their results, until asked to stop."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from compactor.access.tier import Tier
from compactor.config.settings import Settings
from compactor.model.ids import TopicPartition
from compactor.service.journal import EventLogger
from compactor.service.stopping import InterruptibleStore, StopRequest

ResultT = TypeVar("ResultT")
JobT = TypeVar("JobT")

WAKE_S = 1.0
"""Shortest time between two scans, in seconds, however often ``request_scan`` is called."""


class PollingLoop(ABC, Generic[JobT, ResultT]):
    """Base class of services. One thread calls ``scan``, ``start_due_jobs`` and ``process_ended_jobs`` in turn; all other public methods
    may be called from any thread.

    :param log: receives one line for each event.
    """

    def __init__(self, tier: Tier, log: EventLogger) -> None:
        self.stop = StopRequest(threading.Event())
        tier = tier.with_stores(data=InterruptibleStore(tier.ports.data, self.stop))
        self._tier = replace(tier, ports=replace(tier.ports, sleep=self.stop.sleep_unless_stopped))
        self._log = log
        self._running: dict[TopicPartition, JobT] = {}
        self._done: queue.SimpleQueue[ResultT | None] = queue.SimpleQueue()
        self._started_ms = tier.ports.clock_ms()
        self._scans = 0
        self._scan_ms = 0
        self._new_settings: Settings | None = None
        self._woken = threading.Event()
        self._loop_s = time.monotonic()

    def run(self) -> None:
        """Run the service until ``request_stop`` is called, then return when all running jobs have ended. A stop interrupts the running
        jobs: each ends at one of its next two requests to the store.
        """
        last_scan = next_scan = time.monotonic()
        while not self.stop.event.is_set():
            self._loop_s = time.monotonic()
            settings, self._new_settings = self._new_settings, None
            if settings is not None:
                self._apply_settings(settings)
            if self._loop_s >= next_scan:
                self._woken.clear()
                self.scan()
                last_scan = time.monotonic()
                next_scan = last_scan + self._seconds_until_next_partition_scan()
            elif self._woken.is_set():
                next_scan = min(next_scan, last_scan + WAKE_S)
            self.start_due_jobs()
            self.process_ended_jobs(max(0.0, next_scan - time.monotonic()))
        while self._running:
            self.process_ended_jobs(None)

    def request_stop(self) -> None:
        """Ask the service to stop, and return at once. ``run`` returns when all running jobs have ended."""
        self.stop.event.set()
        self._done.put(None)

    def request_scan(self) -> None:
        """Ask the service to scan before the next regular time, at the earliest a second after the last scan, and return at once."""
        self._woken.set()
        self._done.put(None)

    def request_settings_change(self, settings: Settings) -> None:
        """Ask the service to use these settings for all jobs that begin from now on, and return at once. ``service.reloading`` makes the
        settings.
        """
        self._new_settings = settings
        self._done.put(None)

    def process_ended_jobs(self, max_wait_s: float | None) -> None:
        """Wait until a job ends, at most ``max_wait_s`` seconds (None: without limit), and process the results of all jobs that have ended.
        Returns early if a stop, a scan or new settings are requested.
        """
        try:
            done = self._done.get(timeout=max_wait_s) if max_wait_s is None or max_wait_s > 0 else self._done.get_nowait()
            while True:
                if done is not None:
                    self._process_job_result(done)
                done = self._done.get_nowait()
        except queue.Empty:
            return

    def ms_since_latest_loop_pass(self) -> int:
        """Return the milliseconds since the loop began its latest pass. A large value shows that the loop hangs."""
        return int((time.monotonic() - self._loop_s) * 1000)

    @abstractmethod
    def scan(self) -> None:
        """Find out which partitions need a job, and update what ``start_due_jobs`` chooses from."""

    @abstractmethod
    def start_due_jobs(self) -> Sequence[object]:
        """Start every due job for which a thread is free. Return the started jobs, or their partitions."""

    @abstractmethod
    def _process_job_result(self, result: ResultT) -> None:
        """Process the result of a job that has ended, and remove it from ``_running``."""

    @abstractmethod
    def _apply_settings(self, settings: Settings) -> None:
        """Use these settings for all jobs that begin from now on."""

    @abstractmethod
    def _seconds_until_next_partition_scan(self) -> float:
        """Return the seconds from the end of a scan to the next one."""
