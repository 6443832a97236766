"""A simulated world: one clock, an object store with faults, and processes that take turns at every store call.

Each process is a greenlet that runs the project's real code. A store call hands control to the hub, which lets the next one
go on in the order of simulated time, so that one seed gives one schedule, whatever the machine does.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet
from typing_extensions import override

from compactor.control.ports import EnvironmentPorts, ObjectRetention
from compactor.errors import AlreadyExists, NotFound, OutOfBudget, Unavailable
from compactor.storage.factory import PreconditionFailed
from compactor.storage.port import ComposeSource, CopyLimits, FileLease, FileRange, ObjectInfo, ObjectStore, UnfinishedUpload
from compactor.storage.settings import RetrySettings
from compactor.storage.wrappers import FirstAnswerTracker, Retrier, RetryingStore
from compactor.tier.plain import NativeLayout
from compactor.tier.ports import ControlLogPublisher

TTL_MS = 1_000
GRACE_MS = 500
UNDO_WINDOW_MS = 900
ORPHAN_AGE_MS = 3_000
RETENTION_MS = 300
MOST_CALLS = 50_000
"""Of one process that has the world to itself: an end phase makes some hundred."""
TRYING = RetrySettings(deadline_s=5, base_s=0.1)
"""Of requests to control logs: six times. What is asked of the data store fails at once, so that much is left undone."""
T = TypeVar("T")


class Unheard(FirstAnswerTracker):
    """Nobody wants to read of each request that is tried again: a schedule has hundreds, ``--trace`` tells them."""

    @override
    def claim_log_line(self, now: float) -> bool:
        return False


class Crash(BaseException):
    """The process is gone. Not an Exception: nothing in the project may catch it."""


@dataclass(frozen=True)
class Faults:
    """Probabilities per store call.

    ``vanish``: the store says that a round's output is created, and it is not there; ``full``: there is no room for it; ``hang``: a
    leader's work stands still for ever, while its heartbeats go on.
    """

    crash: float = 0.004
    throttle: float = 0.02
    lost: float = 0.02
    delay: float = 0.02
    duplicate: float = 0.02
    stop: float = 0.02
    jump: float = 0.005
    vanish: float = 0.0
    full: float = 0.0
    hang: float = 0.0


NO_FAULTS = Faults(0, 0, 0, 0, 0, 0, 0)


@dataclass
class Process:
    """One process: its clock, whether it still lives, and its heartbeat, which stops when the process does."""

    name: str
    holder: str
    clock_offset_ms: int = 0
    dead: bool = False
    beat: Callable[[], None] | None = None
    beat_every_ms: float = 0
    last_beat_ms: float = 0
    thread: greenlet | None = None


@dataclass
class Hung:
    """A process that stands still, but for the thread that beats for it."""

    beat: Callable[[], None]
    every_ms: float
    last_ms: float


class World:
    """Time, stores, processes. ``violations`` collects what must never happen, in words."""

    def __init__(self, seed: int, faults: Faults = Faults()) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.now_ms = 1_000_000.0
        self.steps = 0
        self.alone = 0
        self.queue: list[tuple[float, int, greenlet | Callable[[], None]]] = []
        self.sequence = 0
        self.violations: list[str] = []
        self.hazards = random.Random(f"hazards of {seed}")
        self.hung: list[Hung] = []
        self.may_vanish: Callable[[str], bool] = lambda key: False
        self.retention: ObjectRetention | None = None
        """What every process records with what it publishes."""
        self.control = SimStore(self, "control")
        self.data = SimStore(self, "data")
        self.mistyped = SimStore(self, "mistyped")
        self.processes: list[Process] = []
        self.owners: dict[greenlet, Process] = {}
        self.hub = getcurrent()
        self.trace: list[str] | None = None
        self.script: Callable[[str, Callable[[], Any]], Any] | None = None

    def note(self, text: str) -> None:
        if self.trace is not None:
            owner = self.owners.get(getcurrent())
            self.trace.append(f"{self.now_ms:12.1f} {owner.name if owner else '-':14} {text}")

    def violate(self, text: str) -> None:
        self.note(f"VIOLATION {text}")
        self.violations.append(text)

    # --- processes ---

    def spawn(self, name: str, body: Callable[[EnvironmentPorts], None], holder: str = "") -> Process:
        process = Process(name, holder or name, clock_offset_ms=self.rng.choice((0, 0, 700, -700)))
        ports = self.ports(process)

        def run() -> None:
            try:
                body(ports)
            except Crash:
                self.note("crashed")
            except Exception as error:  # noqa: BLE001 - whatever the code does not foresee is a finding
                self.violate(f"{name}: {type(error).__name__}: {error}")
            finally:
                process.dead = True

        process.thread = greenlet(run, parent=self.hub)
        self.owners[process.thread] = process
        self.processes.append(process)
        self.push(self.now_ms + self.rng.random() * 20, process.thread)
        return process

    def ports(self, process: Process, control: SimStore | None = None, data: SimStore | None = None) -> EnvironmentPorts:
        """What a process has of the world. ``control`` and ``data``: of another tier than the first one."""
        data = data or self.data

        @contextmanager
        def keep_alive(send_heartbeat: Callable[[], None], interval_s: float) -> Iterator[None]:
            process.beat, process.beat_every_ms, process.last_beat_ms = send_heartbeat, interval_s * 1000, self.now_ms
            try:
                yield
            finally:
                process.beat = None

        opened_data = self.opened(data, tries_again=False)
        return EnvironmentPorts(
            control=self.opened(control or self.control, tries_again=True),
            data=opened_data,
            layout=NativeLayout(opened_data),
            publisher=ControlLogPublisher(),
            clock_ms=lambda: int(self.now_ms) + process.clock_offset_ms,
            sleep=lambda seconds: self.wait(seconds * 1000),
            random_bytes=self.rng.randbytes,
            holder=process.holder,
            keep_alive=keep_alive,
            retention=self.retention,
        )

    def opened(self, store: SimStore, *, tries_again: bool) -> ObjectStore:
        """The store as a process gets it. ``store_kinds`` has other kinds of stores."""
        if not tries_again:
            return store
        return RetryingStore(store, Retrier(TRYING, lambda: self.now_ms / 1000, lambda s: self.wait(s * 1000), lambda: 1.0, Unheard()))

    # --- scheduling ---

    def push(self, time_ms: float, what: greenlet | Callable[[], None]) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (time_ms, self.sequence, what))

    def wait(self, delay_ms: float) -> None:
        """The current process gives way for this long (or for much longer: it may be stopped meanwhile)."""
        thread = getcurrent()
        process = self.owners.get(thread)
        if process is None:  # the test itself, before or after the schedule
            self.now_ms += delay_ms
            for hung in self.hung:
                self._beat_of(hung)
            return
        if process.dead:
            raise Crash
        rng = self.rng
        if self.faults.stop and rng.random() < self.faults.stop:
            delay_ms += rng.choice((GRACE_MS, TTL_MS * 1.5, TTL_MS * 3, ORPHAN_AGE_MS * 1.5))
        if self.faults.hang and process.beat is not None and not self.hung and self.hazards.random() < self.faults.hang:
            self.note("hangs, and its heartbeat goes on")
            self.hung.append(Hung(process.beat, process.beat_every_ms, self.now_ms))
            self._beats_of_the_hung()
            self.hub.switch()
            raise Crash
        self.push(self.now_ms + delay_ms, thread)
        self.hub.switch()
        if process.dead:
            raise Crash
        if self.faults.jump and rng.random() < self.faults.jump:
            process.clock_offset_ms += rng.choice((-ORPHAN_AGE_MS, -200, 200, ORPHAN_AGE_MS * 2))
        if process.beat is not None and self.now_ms - process.last_beat_ms >= process.beat_every_ms:
            process.last_beat_ms = self.now_ms
            beat, process.beat = process.beat, None
            self.control.quiet = True
            beat()
            self.control.quiet = False
            process.beat = beat

    def _beats_of_the_hung(self) -> None:
        for hung in self.hung:
            self._beat_of(hung)
            self.push(self.now_ms + hung.every_ms, self._beats_of_the_hung)

    def _beat_of(self, hung: Hung) -> None:
        if self.now_ms - hung.last_ms >= hung.every_ms:
            hung.last_ms = self.now_ms
            self.control.quiet = True
            hung.beat()
            self.control.quiet = False

    def run(self, max_steps: int) -> None:
        """Until nothing is left to happen or the steps are used up."""
        while self.queue and self.steps < max_steps and not self.violations:
            time_ms, _, what = heapq.heappop(self.queue)
            self.now_ms = max(self.now_ms, time_ms)
            self.steps += 1
            if isinstance(what, greenlet):
                if not what.dead:
                    what.switch()
            else:
                what()

    def stop(self) -> None:
        """Kills every process; what is under way to the store arrives."""
        for process in self.processes:
            process.dead = True
            if process.thread is not None and not process.thread.dead and process.thread:
                process.thread.throw(Crash)
        for _, _, what in sorted(self.queue, key=lambda entry: entry[:2]):
            if not isinstance(what, greenlet) and what != self._beats_of_the_hung:
                what()
        self.queue.clear()
        self.faults = NO_FAULTS

    def call(self, what: str, effect: Callable[[], T], *, changes: bool) -> T:
        """One request. ``effect`` happens at one instant; where it fails for the caller it may still happen, also later."""
        if self.owners.get(getcurrent()) is None:
            self.now_ms += 1
            self.alone += 1
            assert self.alone < MOST_CALLS, "it asks again and again, and does not end"
            self.note(what)
            return self.script(what, effect) if self.script else effect()
        rng, faults = self.rng, self.faults
        self.wait(rng.random() * (8 if rng.random() < 0.9 else 120))
        self.note(what)
        dice = rng.random()
        if dice < faults.crash:
            if changes and rng.random() < 0.5:
                self._quietly(effect)
            self.owners[getcurrent()].dead = True
            raise Crash
        dice -= faults.crash
        if dice < faults.throttle:
            raise Unavailable(f"{what}: throttled")
        dice -= faults.throttle
        if not changes:
            return effect()
        if dice < faults.lost:
            self._quietly(effect)
            raise Unavailable(f"{what}: the answer was lost")
        dice -= faults.lost
        if dice < faults.delay:
            self._later(what, effect)
            raise Unavailable(f"{what}: no answer")
        dice -= faults.delay
        if dice < faults.duplicate:
            self._later(what, effect)
        return effect()

    def _later(self, what: str, effect: Callable[[], Any]) -> None:
        def land() -> None:
            self.note(f"lands late: {what}")
            self._quietly(effect)

        delays = (5, 50, GRACE_MS * 1.2, TTL_MS * 1.5, ORPHAN_AGE_MS * 1.3)
        self.push(self.now_ms + self.rng.choice(delays), land)

    def _quietly(self, effect: Callable[[], Any]) -> None:
        try:
            effect()
        except (AlreadyExists, NotFound, PreconditionFailed):
            pass


@dataclass
class Stored:
    data: bytes
    modified_ms: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    """Of a store whose objects keep their version when their time is set."""


class SimStore:
    """An object store: linearisable, with the faults of its world. Watchers see every change at the instant it happens."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.objects: dict[str, Stored] = {}
        self.staged: dict[str, int] = {}
        """Files that are not published yet, with the time at which they were staged (``store_kinds``)."""
        self.quiet = False
        self.on_create: list[Callable[[str, bytes], None]] = []
        self.on_delete: list[Callable[[str], None]] = []
        self.on_put: list[Callable[[str], None]] = []

    @property
    def url(self) -> str:
        return f"s3://simulated/{self.name}"

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else start + length
        return self.world.call(f"get {key}", lambda: self._at(key).data[start:end], changes=False)

    def head(self, key: str) -> ObjectInfo:
        return self.world.call(f"head {key}", lambda: self._info(key), changes=False)

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        world = self.world
        if world.faults.full and getcurrent() in world.owners and world.hazards.random() < world.faults.full:
            raise OutOfBudget(f"{key}: the disk is full")
        vanishes = world.faults.vanish and world.may_vanish(key) and world.hazards.random() < world.faults.vanish

        def effect() -> ObjectInfo:
            if key in self.objects:
                raise AlreadyExists(f"{key} exists")
            self.objects[key] = Stored(data, int(world.now_ms), metadata or {})
            for told in self.on_create:
                told(key, data)
            info = self._info(key)
            if vanishes:
                world.note(f"vanishes: {key}")
                del self.objects[key]
            return info

        return self.world.call(f"create {key}", effect, changes=True)

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None, *, may_link: bool = False) -> ObjectInfo:
        return self.create(key, path.read_bytes(), metadata)

    @property
    def server_copy_limits(self) -> CopyLimits:
        return CopyLimits(min_run_bytes=0, max_bytes=1 << 30)

    def compose(self, key: str, pieces: Sequence[ComposeSource], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self.create(key, b"".join(self._content(piece) for piece in pieces), metadata)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        def effect() -> ObjectInfo:
            self.objects[key] = Stored(data, int(self.world.now_ms))
            for told in self.on_put:
                told(key)
            return self._info(key)

        return effect() if self.quiet else self.world.call(f"put {key}", effect, changes=True)

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        return path.write_bytes(self.get(key, start, length))

    def lend(self, key: str, path: Path) -> FileLease | None:
        return None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        def effect() -> list[ObjectInfo]:
            return [self._info(key) for key in sorted(self.objects) if key.startswith(prefix) and key > after]

        return iter(self.world.call(f"list {prefix}", effect, changes=False))

    def delete(self, keys: Iterable[str]) -> None:
        listed = tuple(keys)

        def effect() -> None:
            for key in listed:
                for told in self.on_delete:
                    told(key)
                self.objects.pop(key, None)

        self.world.call(f"delete {' '.join(listed)}", effect, changes=True)

    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        return iter(())

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        assert not list(uploads)

    def clock_ms(self) -> int:
        return self.world.call("clock", lambda: int(self.world.now_ms), changes=False)

    def _content(self, piece: ComposeSource) -> bytes:
        if isinstance(piece, FileRange):
            return piece.path.read_bytes()[piece.start : piece.start + piece.length]

        def effect() -> bytes:
            if self._info(piece.key).etag != piece.etag:
                raise Unavailable(f"{piece.key} is not the version that was to be copied")
            return self._at(piece.key).data[piece.start : piece.start + piece.length]

        return self.world.call(f"copy {piece.key}", effect, changes=False)

    def _at(self, key: str) -> Stored:
        if key not in self.objects:
            raise NotFound(f"{key} is not there")
        return self.objects[key]

    def _info(self, key: str) -> ObjectInfo:
        stored = self._at(key)
        version = stored.version or f"{stored.modified_ms}-{zlib.crc32(stored.data)}"
        return ObjectInfo(key, len(stored.data), stored.modified_ms, version, stored.metadata)
