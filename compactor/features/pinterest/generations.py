"""Writer of generations: complete compacted copies of a partition for consumers of Pinterest's layout.

    published view -> objects created < step recorded < _metadata < offset.wm < pointer < told

Segments that follow a generation's last one are appended to it. If an earlier part of the log was rewritten, undone or truncated, a new
generation is written beside it, and readers are directed to that one. Any number of processes may write: names follow from the view, and
objects and steps are never overwritten. A slower process starts again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import ValidationError

from compactor.access.tier import Tier
from compactor.cleaner.source import batch_bytes_from_offset, open_source_segment, read_last_record_offset
from compactor.control.state import PartitionState
from compactor.errors import AlreadyExists, BadData, Leased, NotFound, Unavailable, UsageError
from compactor.features.pinterest.layout import (
    ENDLESS_SEARCH_ENTRIES,
    METADATA_FILE,
    WATERMARK,
    PinterestObjectKeys,
    SegmentTimestampBound,
    configured_object_keys,
    encode_metadata_file,
    format_watermark_file,
)
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.model.plan import MAX32
from compactor.model.segment import RemoteLogSegmentMetadata, StrictFrozenModel
from compactor.records.batches import parse_batch_headers
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY, encode_indexes
from compactor.round.compaction import disk_budget_bytes
from compactor.round.sources import StagedSegmentReader, open_reader_of_segments, use_and_close_reader
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.storage.schemes import bucket_and_prefix
from compactor.tier.contents import FileContent, create_or_match, read_verified_file
from compactor.tier.kinds import control_url

# ---- names and records of generations -----------------------------------------------------------------------------------------
#
#     <generation>/[<bits>/]<cluster>/<topic>-<partition>/...         objects of the layout; new ones are only appended
#     .generations/<cluster>/<topic>-<partition>/<20 digits>.json     a step: what was done; never overwritten
#     .generations/<cluster>/<topic>-<partition>/<20 digits>.told     readers were directed to the generation that this step began
#     .generations/<cluster>/<topic>-<partition>/<generation>.begun   announcement of the process that writes, or has written, a generation
#     .generations/<cluster>/<topic>-<partition>/current.json         pointer for readers: where the current generation lies
#
# The last step of a deleted partition is a generation without parts, and its pointer is gone.
#
# A generation is named after the number of the step that may begin it. Once another step has that number, the generation can no longer
# count.
#
# A consumer's position is the offset of the last record it received, plus one. It reads the object with the greatest base at or below the
# position. Therefore an object is named after the last record before it, plus one, and segments without records have no object. Then no
# position exists, up to the last record of all, at which one object has nothing more to give and the next one is not yet due.


GENERATIONS_FOLDER: Final = ".generations"
CATALOG_VERSION: Final = 1
CATALOG_READ_ATTEMPTS: Final = 5
"""How often the steps are listed again if one of them was deleted between listing and reading."""

WHOLE_EVERY: Final = 32
"""After this many steps, one step repeats the content of all earlier ones, so that readers need no older step."""

_STEP: Final = re.compile(r"(\d{20})\.(json|told)")
_BEGUN: Final = re.compile(r"(g(\d{20})(?:-\d+)?)\.begun")


class PublishedSegment(StrictFrozenModel):
    """One segment of the tier as a part of a generation.

    base, last: offsets of first (in the object's name) and last record; -1 if there are no records.
    timestamp_ms: largest timestamp of this part and of those before it.
    """

    segment: str
    base: int = -1
    last: int = -1
    timestamp_ms: int = 0
    log_bytes: int = 0


class SupersededGeneration(StrictFrozenModel):
    """began, ended: number of its first step, and of its successor's."""

    name: str
    began: int
    ended: int


class GenerationStepHistory(StrictFrozenModel):
    """Content of all earlier steps of a partition.

    began: number of the current generation's first step.
    before: the current generation's.
    earlier: generations before it that are not deleted yet.
    """

    began: int
    before: tuple[PublishedSegment, ...] = ()
    earlier: tuple[SupersededGeneration, ...] = ()


class GenerationStep(StrictFrozenModel):
    """Parts that were appended to a generation at once.

    slot: position in the control log of the copied state.
    whole: content of all earlier steps; set in a generation's first step and every WHOLE_EVERY steps.
    """

    version: int = CATALOG_VERSION
    generation: str
    slot: int
    parts: tuple[PublishedSegment, ...]
    whole: GenerationStepHistory | None = None


class Generation(StrictFrozenModel):
    """The current generation, by its recorded steps.

    number, began: number of its last step, and of its first.
    whole: its last step that repeats all earlier ones, where reading can begin.
    slot: as in GenerationStep.
    """

    name: str
    number: int
    began: int
    whole: int
    slot: int
    parts: tuple[PublishedSegment, ...]

    @property
    def published_segments_with_objects(self) -> tuple[PublishedSegment, ...]:
        """Ascending."""
        return tuple(part for part in self.parts if part.base >= 0)

    @property
    def timestamp_bounds(self) -> tuple[SegmentTimestampBound, ...]:
        return tuple(SegmentTimestampBound(part.timestamp_ms, part.base) for part in self.published_segments_with_objects)

    def segments_to_append(
        self, live_segments: Sequence[RemoteLogSegmentMetadata], log_start_offset: int
    ) -> Sequence[RemoteLogSegmentMetadata] | None:
        """Return None if a new generation is due: the parts are not the first live segments, or the first object begins below the log
        start.
        """
        known = [part.segment for part in self.parts]
        is_prefix = [segment.id for segment in live_segments[: len(known)]] == known
        return (
            live_segments[len(known) :]
            if is_prefix and all(one.base >= log_start_offset for one in self.published_segments_with_objects[:1])
            else None
        )


@dataclass(frozen=True)
class AnnouncedGeneration:
    """Announcement. Readers use the generation once its first step (``number``) is recorded. modified_ms: latest announcement, by the
    store's clock.
    """

    generation: str
    number: int
    modified_ms: int


@dataclass(frozen=True)
class PartitionGenerations:
    """All generations of one partition.

    earlier: generations that are not deleted yet, oldest first.
    begun: announced generations, which may be incomplete.
    numbers: of the stored step objects, ascending.
    recorded_ms: by number of the first step, when readers were directed to the generation, by the store's clock.
    """

    current: Generation | None = None
    earlier: tuple[SupersededGeneration, ...] = ()
    begun: tuple[AnnouncedGeneration, ...] = ()
    numbers: tuple[int, ...] = ()
    recorded_ms: Mapping[int, int] = field(default_factory=dict)

    @property
    def next_generation_step_number(self) -> int:
        return self.current.number + 1 if self.current else 1

    @property
    def recorded_generation_names(self) -> frozenset[str]:
        return frozenset([one.name for one in self.earlier] + [one.name for one in [self.current] if one])

    def new_generation_step(self, generation: str, slot: int, parts: Sequence[PublishedSegment]) -> GenerationStep:
        """Step ``next_generation_step_number``, which makes a new generation valid."""
        earlier = self.earlier
        if self.current:
            earlier = (
                *earlier,
                SupersededGeneration(name=self.current.name, began=self.current.began, ended=self.next_generation_step_number),
            )
        whole = GenerationStepHistory(began=self.next_generation_step_number, earlier=earlier)
        return GenerationStep(generation=generation, slot=slot, parts=tuple(parts), whole=whole)

    def appending_step(self, current: Generation, slot: int, parts: Sequence[PublishedSegment]) -> GenerationStep:
        """Step ``next_generation_step_number``."""
        due = self.next_generation_step_number - current.whole >= WHOLE_EVERY
        whole = GenerationStepHistory(began=current.began, before=current.parts, earlier=self.earlier) if due else None
        return GenerationStep(generation=current.name, slot=slot, parts=tuple(parts), whole=whole)

    def deletable_generation_step_numbers(self) -> list[int]:
        """A later step repeats their content."""
        one = self.current
        # The last steps before the full one stay for readers that have listed the steps earlier, and so does a generation's first step.
        return [number for number in self.numbers if one.began < number < one.whole - WHOLE_EVERY] if one else []


class GenerationStepLog:
    """Steps of one partition, numbered without gaps, read once. Not thread-safe."""

    def __init__(self, store: ObjectStore, keys: PinterestObjectKeys, partition: TopicPartition) -> None:
        self._store = store
        self._steps: dict[int, GenerationStep] = {}
        self.name = partition
        self.folder = f"{GENERATIONS_FOLDER}/{keys.cluster}/{partition}/"

    @property
    def pointer_object_key(self) -> str:
        """Directs readers to the current generation."""
        return f"{self.folder}current.json"

    def generation_step_object_key(self, step_number: int) -> str:
        return f"{self.folder}{step_number:020d}.json"

    def pointer_written_marker_key(self, first_step_number: int) -> str:
        """Marks that readers were directed to a generation."""
        return f"{self.folder}{first_step_number:020d}.told"

    def generation_announcement_key(self, generation: str) -> str:
        return f"{self.folder}{generation}.begun"

    def read_generations(self) -> PartitionGenerations:
        """One LIST request, and a GET request for each step from the last full one on. If a listed step is deleted meanwhile, the steps are
        listed again. Raises BadData if steps are missing or invalid, StoreError.
        """
        for _ in range(CATALOG_READ_ATTEMPTS - 1):
            try:
                return self._try_read_generations()
            except NotFound:
                continue
        return self._try_read_generations()

    def _try_read_generations(self) -> PartitionGenerations:
        """Raises NotFound if a listed step was deleted before it was read."""
        numbers: list[int] = []
        begun: list[AnnouncedGeneration] = []
        reported: dict[int, int] = {}
        for info in self._store.list(self.folder):
            file = info.key.removeprefix(self.folder)
            if match := _STEP.fullmatch(file):
                if match[2] == "json":
                    numbers.append(int(match[1]))
                else:
                    reported[int(match[1])] = info.modified_ms
            elif match := _BEGUN.fullmatch(file):
                begun.append(AnnouncedGeneration(match[1], int(match[2]), info.modified_ms))
        if not numbers:
            return PartitionGenerations(begun=tuple(begun))
        steps, whole = self._read_recent_steps(numbers)
        current = Generation(
            name=steps[-1].generation,
            number=numbers[-1],
            began=whole.began,
            whole=numbers[-1] - len(steps) + 1,
            slot=steps[-1].slot,
            parts=(*whole.before, *(part for step in steps for part in step.parts)),
        )
        left = set(numbers)  # those that were deleted have no steps any more
        earlier = tuple(one for one in whole.earlier if one.began in left)
        return PartitionGenerations(current, earlier, tuple(begun), tuple(numbers), reported)

    def _read_recent_steps(self, step_numbers: Sequence[int]) -> tuple[list[GenerationStep], GenerationStepHistory]:
        """Steps from the last full one on, ascending, and its history. Raises BadData if one is missing."""
        steps: list[GenerationStep] = []
        expected = step_numbers[-1]
        for number in reversed(step_numbers):
            if number != expected:
                break
            steps.insert(0, self._read_generation_step(number))
            if steps[0].whole:
                return steps, steps[0].whole
            expected -= 1
        missing = self.generation_step_object_key(expected + 1)
        raise BadData("the steps before it are missing", segment=missing, hint="Restore them from the store's versions")

    def _read_generation_step(self, step_number: int) -> GenerationStep:
        """Cached. Raises BadData if it is invalid or of another version."""
        key = self.generation_step_object_key(step_number)
        if step_number in self._steps:
            return self._steps[step_number]
        try:
            step = GenerationStep.model_validate_json(self._store.get(key))
        except ValidationError as error:
            raise BadData(f"it is not a valid step of a generation: {error.errors()[0]['msg']}", segment=key) from None
        if step.version != CATALOG_VERSION:
            raise BadData(f"it is of version {step.version}", segment=key, hint="A newer release wrote it")
        self._steps[step_number] = step
        return step


def partitions_of_object_keys(keys: Sequence[str]) -> list[TopicPartition]:
    return sorted({TopicPartition.parse(key.split("/")[2]) for key in keys if key.count("/") >= 3})


def generation_name(first_step_number: int, attempt: int = 0) -> str:
    """Parameter ``attempt``: higher than 0 if objects with other content exist under the previous name."""
    return f"g{first_step_number:020d}" + (f"-{attempt}" if attempt else "")


def format_generation_pointer(
    base_prefix: str, bucket: str, keys: PinterestObjectKeys, partition: TopicPartition, generation: Generation
) -> bytes:
    """JSON with bucket and base prefix for S3StorageServiceEndpoint.Builder."""
    document = {
        "version": CATALOG_VERSION,
        "bucket": bucket,
        "basePrefix": f"{base_prefix}{generation.name}",
        "cluster": keys.cluster,
        "entropyBits": keys.entropy_bits,
        "topic": partition.topic,
        "partition": partition.partition,
        "step": generation.number,
    }
    return json.dumps(document, indent=1).encode()


def rebase_offset_index(index_bytes: bytes, offset_distance: int) -> bytes:
    """Lower the base offset by ``offset_distance``. Offsets that no longer fit are left out; readers find them by scanning."""
    entries = np.frombuffer(index_bytes, OFFSET_ENTRY).copy()
    offsets = entries["offset"].astype(np.int64) + offset_distance
    entries = entries[offsets <= MAX32]
    entries["offset"] = offsets[offsets <= MAX32]
    return (entries[1:] if len(entries) == ENDLESS_SEARCH_ENTRIES else entries).tobytes()


def rebase_time_index(index_bytes: bytes, offset_distance: int) -> bytes:
    """Lower the base offset by ``offset_distance``. Offsets that no longer fit become the largest one. No entry is left out, because
    consumers read the last one.
    """
    entries = np.frombuffer(index_bytes, TIME_ENTRY).copy()
    entries["offset"] = np.minimum(entries["offset"].astype(np.int64) + offset_distance, MAX32)
    return entries.tobytes()


PUBLISH_ATTEMPTS = 5
"""Attempts per partition. An attempt fails if segments were replaced while it ran, or another writer was faster."""
MAX_NAMED_PARTITIONS = 100
"""Largest number of names tried for one step's generation."""
AT_WORK_MS = 300_000
"""Age of a writer's latest announcement, in milliseconds, from which on other writers assume that it has died."""
SAY_MS = 60_000
"""How often the writer of a new generation renews its announcement, in milliseconds."""


@dataclass(frozen=True)
class GenerationReport:
    """Result of one update.

    status: one of

    - written: a new generation;
    - appended: segments;
    - up_to_date: nothing had to be written;
    - empty: the partition has no records, for which the layout has no form;
    - removed: the partition was deleted, and with it the pointer object;
    - superseded: a new generation is due, but only appending was allowed.

    objects, bytes: created by this update.
    start_offset: first offset of the generation; -1 if it has no records.
    end_offset: inclusive; -1 if it has no records.
    slot: as in GenerationStep.
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
class GenerationTarget:
    """Store for generations. keep_ms: for a superseded one after readers were directed to the next."""

    store: ObjectStore
    keys: PinterestObjectKeys
    url: str
    keep_ms: int
    clock_ms: Callable[[], int]

    def generation_step_log(self, partition: TopicPartition) -> GenerationStepLog:
        return GenerationStepLog(self.store, self.keys, partition.first_incarnation)

    def generation_folder(self, generation: str, partition: TopicPartition) -> str:
        return f"{generation}/{self.keys.partition_folder(partition.first_incarnation)}"

    def pointer_object_content(self, partition: TopicPartition, generation: Generation) -> bytes:
        bucket, prefix = bucket_and_prefix(self.url)
        return format_generation_pointer(prefix, bucket, self.keys, partition.first_incarnation, generation)


def configured_generation_target(tier: Tier) -> GenerationTarget:
    """Target of ``[tier.pinterest]``.

    :raises UsageError: if none is configured, if the tier is not compactor-managed, or if the target overlaps the tier or its control
        store.
    """
    settings, pinterest = tier.settings, tier.settings.tier.pinterest
    if not tier.kind.owns_root:
        raise UsageError(
            "generations are written from compactor-managed tiers only", hint="`import --from-tier` takes an upstream tier into one"
        )
    if not pinterest.target:
        raise UsageError("no target is configured", hint="Set target under [tier.pinterest] to another prefix")
    for url in (settings.tier_url, control_url(settings)):
        if _is_within(pinterest.target, url) or _is_within(url, pinterest.target):
            raise UsageError(f"target under [tier.pinterest] and {url} lie within each other", hint="Name a prefix of its own")
    store = open_store(pinterest.target, settings=settings, limits=settings.limits, counters=tier.counters)
    return GenerationTarget(store, configured_object_keys(settings), pinterest.target, pinterest.keep_ms, tier.ports.clock_ms)


def _is_within(url: str, parent_url: str) -> bool:
    return f"{url.rstrip('/')}/".startswith(f"{parent_url.rstrip('/')}/")


@dataclass(frozen=True)
class GenerationWriteOptions:
    """Options.

    disk: for staged segments; None for ``disk_budget_bytes``.
    append_only: leave new generations, except a partition's first one, to other processes.
    yields: raise Leased if another process has announced recently that it writes this generation.
    """

    disk: DiskBudget | None = None
    append_only: bool = False
    yields: bool = False
    on_bytes: Callable[[int], None] = field(default=lambda size: None)


def write_generation(
    tier: Tier, target: GenerationTarget, partition: TopicPartition, options: GenerationWriteOptions | None = None
) -> GenerationReport:
    """Copy published segments to the current generation, or to a new one if needed.

    :raises BadData: if an object is missing or damaged.
    :raises OutOfBudget: if a segment does not fit the disk budget.
    :raises Leased: if another process writes the generation, and ``options.yields`` is set.
    :raises Unavailable: if other processes were faster PUBLISH_ATTEMPTS times. Raises StoreError.
    """
    return update_generation(tier, target, partition, options or GenerationWriteOptions())[0]


def update_generation(
    tier: Tier, target: GenerationTarget, partition: TopicPartition, options: GenerationWriteOptions
) -> tuple[GenerationReport, PartitionGenerations]:
    """Same as ``write_generation``."""
    log = target.generation_step_log(partition)
    # Generations are of the latest topic: if the name means another topic by now, this generation would replace that topic's.
    if partition != tier.latest_incarnation(partition):
        return GenerationReport(*partition, "empty", slot=tier.open_partition_log(partition).refresh().slot), log.read_generations()
    for attempt in range(PUBLISH_ATTEMPTS):
        try:
            # In this order: a view that is older than the generation is then that of a log that was begun anew, and no stale one.
            known = log.read_generations()
            state = tier.open_partition_log(partition).refresh_and_check_gaps()
            with _open_segments(tier, state, options) as reading:
                report = _GenerationWriter(tier, target, log, state, known, options, reading).try_write()
        except NotFound as error:
            if attempt == PUBLISH_ATTEMPTS - 1:
                raise BadData(f"an object of the view is missing: {error.message}", segment=str(partition), hint="See `verify`") from error
            continue  # replaced and retired meanwhile
        if report is not None:
            return report, switch_readers(target, log)
    raise Unavailable(f"{partition}: other processes were faster {PUBLISH_ATTEMPTS} times", hint="Let one process write generations")


@contextmanager
def _open_segments(tier: Tier, state: PartitionState, options: GenerationWriteOptions) -> Iterator[StagedSegmentReader]:
    cleaner = tier.cleaner_settings_for_topic(state.topic)
    disk = options.disk or DiskBudget(disk_budget_bytes(cleaner, tier.state_dir))
    with use_and_close_reader(
        open_reader_of_segments(tier.ports, cleaner, tier.state_dir, state.topic_partition, state.live, disk, "generation")
    ) as reading:
        yield reading


@dataclass(frozen=True)
class _GenerationWriter:
    tier: Tier
    target: GenerationTarget
    log: GenerationStepLog
    state: PartitionState
    known: PartitionGenerations
    options: GenerationWriteOptions
    reading: StagedSegmentReader

    def try_write(self) -> GenerationReport | None:
        """Append to the current generation, or write a new one if due. Return None if another writer was faster."""
        current = self.known.current
        lacking = current.segments_to_append(self.state.live, self.state.log_start) if current else None
        if current and lacking is not None:
            if not lacking:
                return self._generation_report("up_to_date", current)
            parts = self._try_create_segments(lacking, current.name, current.parts)
            if parts is not None:
                return self._try_record_generation_step(
                    "appended", self.known.appending_step(current, self.state.slot, parts), (*current.parts, *parts), parts
                )
        if current and self.options.append_only:
            return self._generation_report("superseded", current)
        if current and self.state.deleted_slot and not self.state.has_segments:
            return self._try_record_empty_generation()
        for attempt in range(MAX_NAMED_PARTITIONS):
            generation = generation_name(self.known.next_generation_step_number, attempt)
            self._announce_generation(generation)
            parts = self._try_create_segments(self.state.live, generation, ())
            if parts is None:
                continue  # what lies there under this name is of a view that was taken back
            if all(part.base < 0 for part in parts):
                is_read = current is not None and current.published_segments_with_objects
                return (
                    self._try_record_empty_generation()
                    if is_read
                    else GenerationReport(*self.state.topic_partition, "empty", slot=self.state.slot)
                )
            return self._try_record_generation_step(
                "written", self.known.new_generation_step(generation, self.state.slot, parts), parts, parts
            )
        raise BadData(
            f"{MAX_NAMED_PARTITIONS} generations of step {self.known.next_generation_step_number} differ",
            segment=str(self.state.topic_partition),
        )

    def _try_record_empty_generation(self) -> GenerationReport | None:
        """Only if the partition was deleted or has no readable record. Return None if another writer was faster. The record remains after
        all other objects are deleted, so that names and numbers are never used twice.
        """
        taken = {one.generation for one in self.known.begun}
        names = (generation_name(self.known.next_generation_step_number, attempt) for attempt in range(len(taken) + 1))
        generation = next(name for name in names if name not in taken)
        return self._try_record_generation_step("removed", self.known.new_generation_step(generation, self.state.slot, ()), (), ())

    def _announce_generation(self, generation: str) -> None:
        """The announcement lets its objects be deleted if the generation is never completed. Raises Leased if another process has recently
        announced one with the same step number and ``yields`` is set.
        """
        here = [one for one in self.known.begun if one.number == self.known.next_generation_step_number]
        begun = max(here, key=lambda one: one.modified_ms, default=None)
        if self.options.yields and begun and self.target.store.clock_ms() < begun.modified_ms + AT_WORK_MS:
            key = self.log.generation_announcement_key(begun.generation)
            holder = self.target.store.get(key).decode("utf-8", "replace")
            if holder != self.tier.ports.holder:
                raise Leased(
                    f"{self.state.topic_partition}: {holder} writes generation {begun.generation}", hint="The daemon tries again later"
                )
        self.target.store.put(self.log.generation_announcement_key(generation), self.tier.ports.holder.encode())

    def _try_record_generation_step(
        self, status: str, step: GenerationStep, parts: Sequence[PublishedSegment], created: Sequence[PublishedSegment]
    ) -> GenerationReport | None:
        """Return None if another writer has recorded a step with this number before."""
        number = self.known.next_generation_step_number
        try:
            self.target.store.create(self.log.generation_step_object_key(number), step.model_dump_json(exclude_none=True).encode())
        except AlreadyExists:
            return None
        began = step.whole.began if step.whole else self.known.current.began if self.known.current else number
        generation = Generation(name=step.generation, number=number, began=began, whole=began, slot=step.slot, parts=tuple(parts))
        return self._generation_report(status, generation, [part for part in created if part.base >= 0])

    def _generation_report(self, status: str, generation: Generation, created: Sequence[PublishedSegment] = ()) -> GenerationReport:
        objects = generation.published_segments_with_objects
        size = sum(part.log_bytes for part in created)
        offsets = (objects[0].base, objects[-1].last) if objects else (-1, -1)
        return GenerationReport(*self.state.topic_partition, status, generation.name, len(created), size, *offsets, self.state.slot)

    def _try_create_segments(
        self, segments: Sequence[RemoteLogSegmentMetadata], generation: str, earlier_parts: Sequence[PublishedSegment]
    ) -> list[PublishedSegment] | None:
        """Return None if an object of the same name has other content."""
        found: list[PublishedSegment] = []
        ends = [part.last + 1 for part in earlier_parts if part.base >= 0]
        base = ends[-1] if ends else self.state.log_start
        latest = earlier_parts[-1].timestamp_ms if earlier_parts else 0
        stated_ms = self.target.clock_ms()
        for ordinal in range(len(self.state.live) - len(segments), len(self.state.live)):
            segment = self.state.live[ordinal]
            latest = max(latest, segment.max_timestamp_ms)
            part = self._try_create_segment(ordinal, generation, base, latest)
            if part is None:
                return None
            found.append(part)
            base = part.last + 1 if part.base >= 0 else base
            self.options.on_bytes(segment.size_bytes)
            if not earlier_parts and self.target.clock_ms() - stated_ms > SAY_MS:
                stated_ms = self.target.clock_ms()
                self.target.store.put(self.log.generation_announcement_key(generation), self.tier.ports.holder.encode())
        return found

    def _try_create_segment(
        self, segment_ordinal: int, generation: str, base_offset: int, latest_timestamp_ms: int
    ) -> PublishedSegment | None:
        """Indexes before the log, so that a reader of the log finds them. Return None if an object of that name has other content."""
        segment, reading, log_start = self.state.live[segment_ordinal], self.reading, self.state.log_start
        name, limit = self.state.topic_partition, reading.inflate_limit
        if segment.end_offset < log_start:
            return PublishedSegment(segment=segment.id, timestamp_ms=latest_timestamp_ms)
        with reading.staging.local_copy(reading.log_file_to_stage(segment_ordinal)) as path:
            source = open_source_segment(segment_ordinal, path, segment.start_offset, segment.end_offset + 1, segment.mtime_ms, -1, limit)
            source.name = reading.object_key_of_log(segment_ordinal)
            last = read_last_record_offset(source, limit)
            if last < log_start:
                return PublishedSegment(segment=segment.id, timestamp_ms=latest_timestamp_ms)
            distance, size = segment.start_offset - base_offset, segment.size_bytes
            contents: dict[str, FileContent] = {
                "index": rebase_offset_index(self._read_segment_index(segment, "index"), distance),
                "timeindex": rebase_time_index(self._read_segment_index(segment, "timeindex"), distance),
                "log": path,
            }
            if segment.start_offset < log_start:
                log = batch_bytes_from_offset(source, log_start, limit)
                table, size = parse_batch_headers(np.frombuffer(log, np.uint8), source.name), len(log)
                interval = self.tier.cleaner_settings_for_topic(name.topic).index_interval_bytes
                index, timeindex = encode_indexes(base_offset, table.size, table.last_offset, table.max_timestamp, interval)
                contents = {"index": rebase_offset_index(index, 0), "timeindex": timeindex, "log": log}
            for kind, data in contents.items():
                if not create_or_match(self.target.store, f"{generation}/{self.target.keys.file_key(name, base_offset, kind)}", data):
                    return None
        reading.staging.delete_cached_copies([reading.log_file_to_stage(segment_ordinal)])
        return PublishedSegment(segment=segment.id, base=base_offset, last=last, timestamp_ms=latest_timestamp_ms, log_bytes=size)

    def _read_segment_index(self, segment: RemoteLogSegmentMetadata, index_kind: str) -> bytes:
        return (
            read_verified_file(self.tier.ports.layout, self.state.topic_partition, segment, index_kind)
            if index_kind in segment.files
            else b""
        )


# ---- telling readers ----------------------------------------------------------------------------------------------------------


def switch_readers(target: GenerationTarget, log: GenerationStepLog) -> PartitionGenerations:
    """Write metadata, watermark and the pointer object, and delete steps that no reader needs. Return all generations.

    Every call writes what is missing after a killed or slow writer. A call that has changed an object reads the steps again, so that the
    later of two simultaneous writers sees the other one's step.
    """
    while True:
        known = log.read_generations()
        current = known.current
        if current is None:
            return known
        folder = target.generation_folder(current.name, log.name)
        if current.published_segments_with_objects:
            changed = _write_object_if_changed(
                target.store, folder + METADATA_FILE, encode_metadata_file(log.name, current.timestamp_bounds)
            )
            changed |= _write_object_if_changed(
                target.store, folder + WATERMARK, format_watermark_file(current.published_segments_with_objects[-1].base)
            )
            changed |= _write_object_if_changed(target.store, log.pointer_object_key, target.pointer_object_content(log.name, current))
        else:
            changed = _delete_if_exists(target.store, log.pointer_object_key)
        if current.began not in known.recorded_ms:
            create_or_match(target.store, log.pointer_written_marker_key(current.began), b"")
        target.store.delete([log.generation_step_object_key(number) for number in known.deletable_generation_step_numbers()])
        if not changed:
            return known


def _delete_if_exists(store: ObjectStore, object_key: str) -> bool:
    try:
        store.get(object_key)
    except NotFound:
        return False
    store.delete([object_key])
    return True


def _write_object_if_changed(store: ObjectStore, object_key: str, data: bytes) -> bool:
    try:
        if store.get(object_key) == data:
            return False
    except NotFound:
        pass
    store.put(object_key, data)
    return True
