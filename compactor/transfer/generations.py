"""``generations``: what our tier's readers read, for consumers of Pinterest's layout.

    published view -> objects created < step recorded < _metadata < offset.wm < pointer < told

A round replaces segments of our tier as ever; what is written here is derived from the published view and read by nobody of ours. Segments
that follow a generation's last are appended to it; where anything before that was rewritten, undone or truncated, a new generation is
written beside it, and readers are told. Any number of processes may write: names come from the view, objects and steps are only
created, and whoever finds that another was faster begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from compactor.bootstrap import Tier
from compactor.cleaner.passes.describe import last_record
from compactor.cleaner.passes.source import open_source
from compactor.control.state import PartitionState
from compactor.errors import AlreadyExists, BadData, Leased, NotFound, Unavailable, UsageError
from compactor.kinds import pinterest_keys
from compactor.local.budget import Budget
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import disk_budget
from compactor.round.sources import Reading, closing, reading_over
from compactor.storage.deleting import delete_keys
from compactor.storage.factory import is_s3, open_store, s3_location
from compactor.storage.port import ObjectStore
from compactor.tier.contents import FileContent, create
from compactor.tier.layouts.pinterest.generations import (
    Generation,
    GenerationLog,
    Generations,
    GenerationStep,
    Part,
    format_pointer,
    generation_name,
    shifted_index,
    shifted_timeindex,
)
from compactor.tier.layouts.pinterest.keys import METADATA, WATERMARK, PartitionKeys
from compactor.tier.layouts.pinterest.metadata import format_metadata, format_watermark
from compactor.tier.recorded import content

TRIES = 5
"""How often a partition is begun anew because segments were replaced, or another writer was faster, while it was written."""
NAMES = 100
AT_WORK_MS = 300_000
"""Whoever writes a new generation says so at least so often; who was silent for longer is gone."""
SAY_MS = 60_000


@dataclass(frozen=True)
class GenerationReport:
    """``status``: written (a new generation), appended, up_to_date, empty: a view without a record has no place in that layout; removed:
    the partition was deleted, and readers are led nowhere; or superseded: a new generation is due, and only appending was asked for.

    ``objects`` and ``bytes``: what was created now; offsets are those of the generation's first name and last record. ``slot``: of the
    control log whose view it is now.
    """

    topic: str
    partition: int
    status: str
    generation: str = ""
    objects: int = 0
    bytes: int = 0
    start_offset: int = -1
    end_offset: int = -1
    slot: int = -1


@dataclass(frozen=True)
class Target:
    """Where generations go. ``keep_ms``: how long one stays after readers were told of the next."""

    store: ObjectStore
    keys: PartitionKeys
    url: str
    keep_ms: int
    clock_ms: Callable[[], int]

    def log(self, name: TopicPartition) -> GenerationLog:
        return GenerationLog(self.store, self.keys, name)

    def folder(self, generation: str, name: TopicPartition) -> str:
        return f"{generation}/{self.keys.folder(name)}"

    def pointer(self, name: TopicPartition, generation: Generation) -> bytes:
        bucket, prefix = s3_location(self.url) if is_s3(self.url) else ("", "")
        return format_pointer(prefix, bucket, self.keys, name, generation)


def target_of(tier: Tier) -> Target:
    """Where [tier.pinterest] says. Raises UsageError where it says nothing, or names a place in which others write."""
    settings, pinterest = tier.settings, tier.settings.tier.pinterest
    if tier.listed is not None or tier.brokers is not None:
        raise UsageError("generations are made of a tier of our own", hint="`import --from-tier` takes an upstream tier into one")
    if not pinterest.target:
        raise UsageError("no target is configured", hint="Set target under [tier.pinterest], for example s3://bucket/compacted")
    for url in (settings.tier_url, settings.control_url):
        if _within(pinterest.target, url) or _within(url, pinterest.target):
            raise UsageError(f"target under [tier.pinterest] and {url} lie within each other", hint="Name a prefix of its own")
    store = open_store(pinterest.target, s3=settings.s3, limits=settings.limits, counters=tier.counters)
    return Target(store, pinterest_keys(settings), pinterest.target, pinterest.keep_ms, tier.ports.clock_ms)


def _within(url: str, other: str) -> bool:
    return f"{url.rstrip('/')}/".startswith(f"{other.rstrip('/')}/")


@dataclass(frozen=True)
class Writing:
    """How a generation is written. ``disk``: what local disk its segments may take; None: ``disk_budget_bytes``.

    ``append_only``: a new generation is left to others, but for the first one. ``yields``: so is one that somebody else is at, who has said
    so lately (Leased).
    """

    disk: Budget | None = None
    append_only: bool = False
    yields: bool = False
    on_bytes: Callable[[int], None] = field(default=lambda size: None)


def write_generation(tier: Tier, target: Target, name: TopicPartition, how: Writing | None = None) -> GenerationReport:
    """Brings a partition's current generation up to the published view.

    :raises BadData: an object is missing or damaged. :raises OutOfBudget: a segment that the disk budget has no room for.
    :raises Leased: as ``yields`` says. :raises Unavailable: others were faster, again and again. :raises StoreError:
    """
    return brought_up(tier, target, name, how or Writing())[0]


def brought_up(tier: Tier, target: Target, name: TopicPartition, how: Writing) -> tuple[GenerationReport, Generations]:
    """The same, with what there is then."""
    log = target.log(name)
    for attempt in range(TRIES):
        try:
            # In this order: a view that is older than the generation is then that of a log that was begun anew, and no stale one.
            known = log.read()
            state = tier.open(name).check_whole()
            with _reading(tier, state, how) as reading:
                report = _Writer(tier, target, log, state, known, how, reading).write()
        except NotFound as error:
            if attempt == TRIES - 1:
                raise BadData(f"an object of the view is missing: {error.message}", segment=str(name), hint="See `verify`") from error
            continue  # replaced and retired meanwhile
        if report is not None:
            return report, tell(target, log)
    raise Unavailable(f"{name}: other processes were faster {TRIES} times", hint="Let one process write generations")


@contextmanager
def _reading(tier: Tier, state: PartitionState, how: Writing) -> Iterator[Reading]:
    cleaner = tier.cleaner_for(state.topic)
    disk = how.disk or Budget(disk_budget(cleaner, tier.state_dir))
    with closing(reading_over(tier.ports, cleaner, tier.state_dir, state.name, state.live, disk, "generation")) as reading:
        yield reading


@dataclass(frozen=True)
class _Writer:
    tier: Tier
    target: Target
    log: GenerationLog
    state: PartitionState
    known: Generations
    how: Writing
    reading: Reading

    def write(self) -> GenerationReport | None:
        """None: somebody was faster."""
        current = self.known.current
        lacking = current.lacks(self.state.live) if current else None
        if current and lacking is not None:
            if not lacking:
                return self._report("up_to_date", current)
            parts = self._parts(lacking, current.name, current.parts)
            if parts is not None:
                return self._recorded("appended", self.known.next_step(current, self.state.slot, parts), (*current.parts, *parts), parts)
        if current and self.how.append_only:
            return self._report("superseded", current)
        if current and self.state.deleted_slot and not self.state.live:
            return self._removed()
        for attempt in range(NAMES):
            generation = generation_name(self.known.next_number, attempt)
            self._say_begun(generation)
            parts = self._parts(self.state.live, generation, ())
            if parts is None:
                continue  # what lies there under this name is of a view that was taken back
            if all(part.base < 0 for part in parts):
                return GenerationReport(*self.state.name, "empty", slot=self.state.slot)
            return self._recorded("written", self.known.first_step(generation, self.state.slot, parts), parts, parts)
        raise BadData(f"{NAMES} generations of step {self.known.next_number} differ", segment=str(self.state.name))

    def _removed(self) -> GenerationReport | None:
        """A generation of nothing follows. Its step stays when all others are deleted: names and numbers are not given out again."""
        taken = {one.generation for one in self.known.begun}
        names = (generation_name(self.known.next_number, attempt) for attempt in range(len(taken) + 1))
        generation = next(name for name in names if name not in taken)
        return self._recorded("removed", self.known.first_step(generation, self.state.slot, ()), (), ())

    def _say_begun(self, generation: str) -> None:
        """What nobody may ever record is found by it. Raises Leased where somebody else is at this step, and that is to be respected."""
        here = [one for one in self.known.begun if one.number == self.known.next_number]
        begun = max(here, key=lambda one: one.modified_ms, default=None)
        if self.how.yields and begun and self.target.store.clock_ms() < begun.modified_ms + AT_WORK_MS:
            key = self.log.begun_key(begun.generation)
            holder = self.target.store.get(key).decode("utf-8", "replace")
            if holder != self.tier.ports.holder:
                raise Leased(f"{self.state.name}: {holder} writes generation {begun.generation}", hint="It is looked at again later")
        self.target.store.put(self.log.begun_key(generation), self.tier.ports.holder.encode())

    def _recorded(self, status: str, step: GenerationStep, parts: Sequence[Part], made: Sequence[Part]) -> GenerationReport | None:
        number = self.known.next_number
        try:
            self.target.store.create(self.log.step_key(number), step.model_dump_json(exclude_none=True).encode())
        except AlreadyExists:
            return None
        began = step.whole.began if step.whole else self.known.current.began if self.known.current else number
        generation = Generation(name=step.generation, number=number, began=began, whole=began, slot=step.slot, parts=tuple(parts))
        return self._report(status, generation, [part for part in made if part.base >= 0])

    def _report(self, status: str, generation: Generation, created: Sequence[Part] = ()) -> GenerationReport:
        objects = generation.objects
        size = sum(part.log_bytes for part in created)
        offsets = (objects[0].base, objects[-1].last) if objects else (-1, -1)
        return GenerationReport(*self.state.name, status, generation.name, len(created), size, *offsets, self.state.slot)

    def _parts(self, segments: Sequence[RemoteLogSegmentMetadata], generation: str, before: Sequence[Part]) -> list[Part] | None:
        """Creates the objects of these segments, the last ones of the view; None where something else lies under their names."""
        found: list[Part] = []
        ends = [part.last + 1 for part in before if part.base >= 0]
        base = ends[-1] if ends else self.state.start_offset
        latest = before[-1].timestamp_ms if before else 0
        said_ms = self.target.clock_ms()
        for ordinal in range(len(self.state.live) - len(segments), len(self.state.live)):
            segment = self.state.live[ordinal]
            latest = max(latest, segment.max_timestamp_ms)
            part = self._part(ordinal, generation, base, latest)
            if part is None:
                return None
            found.append(part)
            base = part.last + 1 if part.base >= 0 else base
            self.how.on_bytes(segment.size_bytes)
            if not before and self.target.clock_ms() - said_ms > SAY_MS:
                said_ms = self.target.clock_ms()
                self.target.store.put(self.log.begun_key(generation), self.tier.ports.holder.encode())
        return found

    def _part(self, ordinal: int, generation: str, base: int, latest: int) -> Part | None:
        """Indexes before the log: who sees a log finds the other two."""
        segment, reading = self.state.live[ordinal], self.reading
        name, limit = self.state.name, reading.inflate_limit
        with reading.staging.opened(reading.log(ordinal)) as path:
            source = open_source(ordinal, path, segment.start_offset, segment.end_offset + 1, segment.mtime_ms, -1, limit)
            source.name = reading.name(ordinal)
            last = last_record(source, limit)
            if last < 0:
                return Part(segment=segment.id, timestamp_ms=latest)
            distance = segment.start_offset - base
            contents: dict[str, FileContent] = {
                "index": shifted_index(self._beside(segment, "index"), distance),
                "timeindex": shifted_timeindex(self._beside(segment, "timeindex"), distance),
                "log": path,
            }
            for kind, data in contents.items():
                if not create(self.target.store, f"{generation}/{self.target.keys.file(name, base, kind)}", data):
                    return None
        reading.staging.forget([reading.log(ordinal)])
        return Part(segment=segment.id, base=base, last=last, timestamp_ms=latest, log_bytes=segment.size_bytes)

    def _beside(self, segment: RemoteLogSegmentMetadata, kind: str) -> bytes:
        return content(self.tier.ports.layout, self.state.name, segment, kind) if kind in segment.files else b""


# ---- telling readers ----------------------------------------------------------------------------------------------------------


def tell(target: Target, log: GenerationLog) -> Generations:
    """Brings what readers look at up to the steps. Repeated by every call: what a killed or a slow writer left behind is put right.

    It looks again after it has written: of two writers at once the one that is behind goes on until it has seen the other's step.
    """
    while True:
        known = log.read()
        current = known.current
        if current is None:
            return known
        folder = target.folder(current.name, log.name)
        if current.objects:
            changed = _put(target.store, folder + METADATA, format_metadata(log.name, current.times))
            changed |= _put(target.store, folder + WATERMARK, format_watermark(current.objects[-1].base))
            changed |= _put(target.store, log.pointer, target.pointer(log.name, current))
        else:
            changed = _take_away(target.store, log.pointer)
        if current.began not in known.told_ms:
            create(target.store, log.told_key(current.began), b"")
        delete_keys(target.store, [log.step_key(number) for number in known.needless()])
        if not changed:
            return known


def _take_away(store: ObjectStore, key: str) -> bool:
    """Whether it was there."""
    try:
        store.get(key)
    except NotFound:
        return False
    delete_keys(store, [key])
    return True


def _put(store: ObjectStore, key: str, data: bytes) -> bool:
    """Whether it had to be written."""
    try:
        if store.get(key) == data:
            return False
    except NotFound:
        pass
    store.put(key, data)
    return True
