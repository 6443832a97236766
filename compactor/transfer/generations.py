"""``generations``: what our tier's readers read, for consumers of Pinterest's layout.

    published view -> objects created < step recorded < _metadata, offset.wm < pointer < told

A round replaces segments of our tier as ever; what is written here is derived from the published view and read by nobody of ours. Segments
that follow a generation's last are appended to it; where anything before that was rewritten, undone or truncated, a new generation is
written beside it, and readers are told. Any number of processes may write: names come from the view, objects and steps are only
created, and whoever finds that another was faster begins anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from compactor.bootstrap import Tier, pinterest_keys
from compactor.cleaner.passes.describe import last_record
from compactor.cleaner.passes.source import open_source
from compactor.control.state import PartitionState
from compactor.errors import AlreadyExists, BadData, NotFound, OutOfBudget, Unavailable, UsageError
from compactor.local.budget import blocks
from compactor.local.spool import process_folder
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import disk_budget
from compactor.storage.deleting import delete_keys
from compactor.storage.factory import is_s3, open_store, s3_location
from compactor.storage.port import ObjectStore
from compactor.tier.contents import create
from compactor.tier.layouts.pinterest.generations import (
    ROOT,
    Generation,
    GenerationLog,
    GenerationStep,
    Part,
    Superseded,
    format_pointer,
    generation_name,
    shifted_index,
    shifted_timeindex,
    told_names,
)
from compactor.tier.layouts.pinterest.keys import METADATA, WATERMARK, PartitionKeys
from compactor.tier.layouts.pinterest.metadata import format_metadata, format_watermark
from compactor.tier.recorded import content, download

TRIES = 5
"""How often a partition is begun anew because segments were replaced, or another writer was faster, while it was written."""
NAMES = 100


@dataclass(frozen=True)
class GenerationReport:
    """``status``: written (a new generation), appended, up_to_date, or empty: a view without a record has no place in that layout.

    ``objects`` and ``bytes``: what was created now; offsets are those of the generation's first name and last record.
    """

    topic: str
    partition: int
    status: str
    generation: str = ""
    objects: int = 0
    bytes: int = 0
    start_offset: int = -1
    end_offset: int = -1


@dataclass(frozen=True)
class RetiredGeneration:
    topic: str
    partition: int
    generation: str
    deleted: bool
    objects: int
    bytes: int


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


def write_generation(
    tier: Tier, target: Target, name: TopicPartition, on_bytes: Callable[[int], None] = lambda n: None
) -> GenerationReport:
    """Brings a partition's current generation up to the published view.

    :raises BadData: an object is missing or damaged. :raises OutOfBudget: a segment that the disk budget has no room for.
    :raises Unavailable: others were faster, again and again. :raises StoreError:
    """
    log = target.log(name)
    for attempt in range(TRIES):
        try:
            # In this order: a view that is older than the generation is then that of a log that was begun anew, and no stale one.
            current, earlier = log.read()
            state = tier.open(name).check_whole()
            taken = {generation.name for generation in earlier} | ({current.name} if current else set())
            report = _Writer(tier, target, log, state, on_bytes).write(current, taken)
        except NotFound as error:
            if attempt == TRIES - 1:
                raise BadData(f"an object of the view is missing: {error.message}", segment=str(name), hint="See `verify`") from error
            continue  # replaced and retired meanwhile
        if report is not None:
            _tell(target, log)
            return report
    raise Unavailable(f"{name}: other processes were faster {TRIES} times", hint="Let one process write generations")


@dataclass(frozen=True)
class _Writer:
    tier: Tier
    target: Target
    log: GenerationLog
    state: PartitionState
    on_bytes: Callable[[int], None]

    def write(self, current: Generation | None, taken: Collection[str]) -> GenerationReport | None:
        """None: somebody was faster. ``taken``: names of generations that there are."""
        lacking = current.lacks(self.state.live) if current else None
        if current and lacking is not None:
            if not lacking:
                return self._report("up_to_date", current)
            parts = self._parts(lacking, current.name, current.parts)
            if parts is not None:
                return self._recorded("appended", current, current.name, parts)
        for attempt in range(NAMES):
            generation = generation_name(self.state.slot, attempt)
            if generation in taken:
                continue
            parts = self._parts(self.state.live, generation, ())
            if parts is None:
                continue  # what lies there under this name is of another release, or of a view that was taken back
            if all(part.base < 0 for part in parts):
                return GenerationReport(*self.state.name, "empty")
            return self._recorded("written", current, generation, parts)
        raise BadData(f"{NAMES} generations of slot {self.state.slot} differ", segment=str(self.state.name))

    def _recorded(self, status: str, current: Generation | None, generation: str, parts: Sequence[Part]) -> GenerationReport | None:
        number, anew = (current.number + 1 if current else 1), status == "written"
        step = GenerationStep(generation=generation, slot=self.state.slot, anew=anew, parts=tuple(parts))
        try:
            self.target.store.create(self.log.step_key(number), step.model_dump_json().encode())
        except AlreadyExists:
            return None
        before = () if anew or current is None else current.parts
        made = Generation(name=generation, number=number, began=number, slot=self.state.slot, parts=(*before, *parts))
        return self._report(status, made, [part for part in parts if part.base >= 0])

    def _report(self, status: str, generation: Generation, created: Sequence[Part] = ()) -> GenerationReport:
        objects = generation.objects
        size = sum(part.log_bytes for part in created)
        return GenerationReport(*self.state.name, status, generation.name, len(created), size, objects[0].base, objects[-1].last)

    def _parts(self, segments: Sequence[RemoteLogSegmentMetadata], generation: str, before: Sequence[Part]) -> list[Part] | None:
        """Creates the objects of these segments; None where something else lies under their names."""
        found: list[Part] = []
        ends = [part.last + 1 for part in before if part.base >= 0]
        base = ends[-1] if ends else self.state.start_offset
        latest = before[-1].timestamp_ms if before else 0
        for segment in segments:
            latest = max(latest, segment.max_timestamp_ms)
            part = self._part(segment, generation, base, latest)
            if part is None:
                return None
            found.append(part)
            base = part.last + 1 if part.base >= 0 else base
            self.on_bytes(segment.size_bytes)
        return found

    def _part(self, segment: RemoteLogSegmentMetadata, generation: str, base: int, latest: int) -> Part | None:
        name, layout = self.state.name, self.tier.ports.layout
        cleaner = self.tier.settings.cleaner_for(name.topic)
        room = disk_budget(cleaner, self.tier.state_dir)
        if blocks(segment.size_bytes) > room:
            raise OutOfBudget(
                f"segment {segment.id} takes {segment.size_bytes} bytes of local disk, and the disk budget is {room}",
                hint="Raise [cleaner] disk_budget_bytes",
            )
        with tempfile.TemporaryDirectory(prefix="generation-", dir=process_folder(self.tier.state_dir)) as scratch:
            path = Path(scratch) / "log"
            download(layout, name, segment, "log", path).require(layout.where(name, segment, "log"), segment.files["log"])
            limit = cleaner.max_decompressed_batch_bytes
            source = open_source(0, path, segment.start_offset, segment.end_offset + 1, segment.mtime_ms, -1, limit)
            last = last_record(source, limit)
            if last < 0:
                return Part(segment=segment.id, timestamp_ms=latest)
            distance = segment.start_offset - base
            contents: dict[str, bytes | Path] = {
                "log": path,
                "index": shifted_index(self._beside(segment, "index"), distance),
                "timeindex": shifted_timeindex(self._beside(segment, "timeindex"), distance),
            }
            keys = self.target.keys
            for kind, data in contents.items():
                if not create(self.target.store, f"{generation}/{keys.file(name, base, kind)}", data):
                    return None
        return Part(segment=segment.id, base=base, last=last, timestamp_ms=latest, log_bytes=segment.size_bytes)

    def _beside(self, segment: RemoteLogSegmentMetadata, kind: str) -> bytes:
        return content(self.tier.ports.layout, self.state.name, segment, kind) if kind in segment.files else b""


# ---- telling readers ----------------------------------------------------------------------------------------------------------


def _tell(target: Target, log: GenerationLog) -> Generation | None:
    """Brings what readers look at up to the steps. Repeated by every call: what a killed or a slow writer left behind is put right."""
    current, _ = log.read()
    if current is None:
        return None
    folder = target.folder(current.name, log.name)
    _put(target.store, folder + METADATA, format_metadata(log.name, current.times))
    _put(target.store, folder + WATERMARK, format_watermark(current.objects[-1].base))
    _put(target.store, log.pointer, target.pointer(log.name, current))
    create(target.store, log.told_key(current.began), b"")
    return current


def _put(store: ObjectStore, key: str, data: bytes) -> None:
    try:
        if store.get(key) == data:
            return
    except NotFound:
        pass
    store.put(key, data)


# ---- what there is, and what may go ----------------------------------------------------------------------------------------------


def names_in(target: Target) -> list[TopicPartition]:
    """Partitions of which there is a generation."""
    return told_names([info.key for info in target.store.list(f"{ROOT}/{target.keys.cluster}/")])


def generations_of(target: Target, name: TopicPartition) -> tuple[Generation | None, list[Superseded]]:
    """The current one and those that wait for their end. Raises BadData, StoreError."""
    return target.log(name).read()


def retire_generations(target: Target, name: TopicPartition, *, dry_run: bool = False) -> list[RetiredGeneration]:
    """Deletes generations that were superseded, and of whose successor readers were told, more than ``keep_ms`` ago by the store's clock.

    Objects go first, then the steps that tell of them. Raises BadData, StoreError.
    """
    log, store = target.log(name), target.store
    if not dry_run:
        _tell(target, log)
    current, earlier = log.read()
    found: list[RetiredGeneration] = []
    kept = not earlier
    for generation in earlier:
        objects = list(store.list(target.folder(generation.name, name)))
        due = not kept and _told_ms(store, log, generation.ended) + target.keep_ms <= (target.clock_ms if dry_run else store.clock_ms)()
        kept = kept or not due
        found.append(RetiredGeneration(*name, generation.name, due, len(objects), sum(info.size for info in objects)))
        if due and not dry_run and current is not None and generation.name != current.name:
            delete_keys(store, [info.key for info in objects])
            numbers = range(generation.began, generation.ended)
            # From the newest to the oldest, so that what is left begins a generation.
            delete_keys(store, [key for number in reversed(numbers) for key in (log.step_key(number), log.told_key(number))])
    return found


def _told_ms(store: ObjectStore, log: GenerationLog, number: int) -> int:
    try:
        return store.head(log.told_key(number)).modified_ms
    except NotFound:
        return 2**62
