"""The loop of daemon and agent: scan, start jobs in threads, process their results, until asked to stop."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import override

from compactor.access.tier import Tier
from compactor.config.settings import SECTION_TYPES, CleanerSettings, Settings, setting_keys, topic_override_key
from compactor.control.state import RoundStage
from compactor.errors import CompactorError
from compactor.model.ids import TopicPartition
from compactor.storage.port import FileLease, ObjectInfo, ObjectStore
from compactor.storage.wrappers import ForwardingStore, StoreUsage

T = TypeVar("T")


class Stopped(CompactorError):
    """Raised to interrupt work because the service is stopping. The next run resumes the round."""


@dataclass(frozen=True)
class StopRequest:
    event: threading.Event

    def raise_if_stopped(self) -> None:
        if self.event.is_set():
            raise Stopped("the daemon is stopping")

    def sleep_unless_stopped(self, seconds: float) -> None:
        if self.event.wait(seconds):
            self.raise_if_stopped()

    def check_stage(self, stage: RoundStage) -> None:
        """Raise Stopped if the service is stopping and the round is not published: then only statistics are left to record."""
        if stage is not RoundStage.PUBLISHED:
            self.raise_if_stopped()


class InterruptibleStore(ForwardingStore):
    """Object store whose next request raises Stopped once the service is stopping."""

    def __init__(self, store: ObjectStore, stop: StopRequest, record_transferred_bytes: Callable[[int], None] = lambda size: None) -> None:
        super().__init__(store)
        self._stop = stop
        self._moved = record_transferred_bytes

    @override
    def _forward_read_request(self, key: str, request: Callable[[], T]) -> T:
        self._stop.raise_if_stopped()
        return request()

    @override
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, start, length)
        self._moved(len(data))
        return data

    @override
    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        size = super().download(key, path, start, length)
        self._moved(size)
        return size

    @override
    def lend(self, key: str, path: Path) -> FileLease | None:
        lease = super().lend(key, path)
        if lease is not None:
            self._moved(path.stat().st_size)
        return lease

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._stop.raise_if_stopped()
        return super().list(prefix, after)

    @override
    def clock_ms(self) -> int:
        return self._store.clock_ms()


class EventLogger(Protocol):
    def __call__(self, text: str, *, level: int = logging.INFO, **fields: str) -> None: ...


class ServiceEventLogger:
    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __call__(self, text: str, *, level: int = logging.INFO, **fields: str) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", text, extra={"fields": {name: value for name, value in fields.items() if value}})


# Delays before a service retries a failed partition.


RETRY_MS = 60_000
"""Delay after the first failure."""
MAX_RETRY_MS = 6 * 3_600_000
"""Longest delay. The delay doubles with every failure up to this."""


def backoff_ms(failures: int, first_ms: int = RETRY_MS, max_ms: int = MAX_RETRY_MS) -> int:
    """Delay after consecutive failures: ``first_ms``, doubled by each further one, at most ``max_ms``; 0 after none."""
    return 0 if failures <= 0 else min(max_ms, first_ms << min(failures - 1, 40))


@dataclass(frozen=True)
class ServiceStatus:
    """Status of a service at one moment.

    scan_ms: time of the latest scan, 0 before the first.
    ready: whether the latest scan was complete and nothing is wrong. False when the service is stopping.
    problem: what is wrong, or an empty string.
    """

    holder: str
    tier: str
    now_ms: int
    started_ms: int
    scans: int
    scan_ms: int
    interval_ms: int
    ready: bool
    stopping: bool
    problem: str
    usage: StoreUsage


# Comparison of a reread configuration with the one in force. Pure.


LIVE = frozenset({"cleaner", "topics", "publish", "lease", "agent"})
"""Sections that take effect with the next job. Stores, sockets and sessions that are open depend on the others."""
LIVE_KEYS = frozenset({"daemon.threads"})
BOUND_KEYS = frozenset({"agent.listen", "agent.host_names"})
"""Keys of live sections that take effect at the next start because an open socket depends on them."""
FIXED = ("disk_budget_bytes", "map_engine")
"""Keys of [cleaner] and its overrides that take effect at the next start: the process has one disk budget and one Spark session."""


@dataclass(frozen=True)
class ReloadedSettings:
    """Result of rereading a configuration. changed: takes effect now; waiting: at the next start. Lines such as ``cleaner.bloom: true ->
    false``.
    """

    settings: Settings
    changed: tuple[str, ...]
    waiting: tuple[str, ...]


def settings_after_reload(current: Settings, reread: Settings) -> ReloadedSettings:
    before, after = _flatten_settings(current), _flatten_settings(reread)
    changed: list[str] = []
    waiting: list[str] = []
    for key in [*before, *(key for key in after if key not in before)]:
        was, becomes = before.get(key), after.get(key)
        if was != becomes:
            # Properties of a client may hold secrets.
            line = key if isinstance(becomes, dict) else f"{key}: {_format_setting_value(was)} -> {_format_setting_value(becomes)}"
            (changed if _is_live(key) else waiting).append(line)
    topics = {pattern: _keep_fixed(cleaner, current.topics.get(pattern, current.cleaner)) for pattern, cleaner in reread.topics.items()}
    fixed_sections = {section: getattr(current, section) for section in SECTION_TYPES if "." not in section and section not in LIVE}
    daemon = current.daemon.model_copy(update={"threads": reread.daemon.threads})
    agent = reread.agent.model_copy(update={"listen": current.agent.listen, "host_names": current.agent.host_names})
    settings = reread.model_copy(
        update=fixed_sections
        | {
            "daemon": daemon,
            "agent": agent,
            "cleaner": _keep_fixed(reread.cleaner, current.cleaner),
            "topics": topics,
        }
    )
    return ReloadedSettings(settings, tuple(changed), tuple(waiting))


def _keep_fixed(new: CleanerSettings, old: CleanerSettings) -> CleanerSettings:
    return new.model_copy(update={name: getattr(old, name) for name in FIXED})


def _is_live(key: str) -> bool:
    section, _, rest = key.partition(".")
    if key in BOUND_KEYS:
        return False
    return key in LIVE_KEYS or (section in LIVE and rest.rpartition(".")[2] not in FIXED)


def _flatten_settings(settings: Settings) -> dict[str, Any]:
    """Settings by dotted key. A [topics] table contributes only the values that it sets."""
    found = {
        f"{section}.{key}": value
        for section, kind in SECTION_TYPES.items()
        for key, value in settings.settings_of_section(section).model_dump(mode="json", include=set(setting_keys(kind))).items()
    }
    for pattern, cleaner in settings.topics.items():
        values = cleaner.model_dump(mode="json")
        found |= {topic_override_key(pattern, name): values[name] for name in settings.overridden_setting_names(pattern)}
    return found


def _format_setting_value(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)


ResultT = TypeVar("ResultT")
JobT = TypeVar("JobT")

WAKE_S = 1.0
"""Shortest time between two scans, however often ``request_scan`` is called."""


class PollingLoop(ABC, Generic[JobT, ResultT]):
    """Base class of services. One thread calls ``scan``, ``start_due_jobs`` and ``process_ended_jobs`` in turn; other public methods may be
    called from any thread.
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
        """Run until ``request_stop`` is called and all jobs have ended: each ends at one of its next two requests to the store."""
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
                next_scan = last_scan + self._scan_interval_s()
            elif self._woken.is_set():
                next_scan = min(next_scan, last_scan + WAKE_S)
            self.start_due_jobs()
            self.process_ended_jobs(max(0.0, next_scan - time.monotonic()))
        while self._running:
            self.process_ended_jobs(None)

    def request_stop(self) -> None:
        self.stop.event.set()
        self._done.put(None)

    def request_scan(self) -> None:
        """Ask for a scan, at the earliest WAKE_S after the last one."""
        self._woken.set()
        self._done.put(None)

    def request_settings_change(self, settings: Settings) -> None:
        """Use these settings (``settings_after_reload``) for all jobs that begin from now on."""
        self._new_settings = settings
        self._done.put(None)

    def process_ended_jobs(self, max_wait_s: float | None) -> None:
        """Wait until a job ends, at most ``max_wait_s`` (None: without limit), and process all results. Returns early at a request."""
        try:
            done = self._done.get(timeout=max_wait_s) if max_wait_s is None or max_wait_s > 0 else self._done.get_nowait()
            while True:
                if done is not None:
                    self._process_job_result(done)
                done = self._done.get_nowait()
        except queue.Empty:
            return

    def loop_age_ms(self) -> int:
        """Age of the latest pass. A large value shows that the loop hangs."""
        return int((time.monotonic() - self._loop_s) * 1000)

    @abstractmethod
    def scan(self) -> None: ...

    @abstractmethod
    def start_due_jobs(self) -> Sequence[object]: ...

    @abstractmethod
    def _process_job_result(self, result: ResultT) -> None: ...

    @abstractmethod
    def _apply_settings(self, settings: Settings) -> None: ...

    @abstractmethod
    def _scan_interval_s(self) -> float:
        """Seconds from the end of a scan to the next one."""
