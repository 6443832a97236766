"""Names and records of generations, the output for consumers of Pinterest's layout.

    <generation>/[<bits>/]<cluster>/<topic>-<partition>/...         objects of the layout; new ones are only appended
    .generations/<cluster>/<topic>-<partition>/<20 digits>.json     a step: what was done; never overwritten
    .generations/<cluster>/<topic>-<partition>/<20 digits>.told     readers were directed to the generation that this step began
    .generations/<cluster>/<topic>-<partition>/<generation>.begun   announcement of the process that writes, or has written, a generation
    .generations/<cluster>/<topic>-<partition>/current.json         pointer for readers: where the current generation lies

The last step of a deleted partition is a generation without parts, and its pointer is gone.

A generation is named after the number of the step that may begin it. Once another step has that number, the generation can no longer count.

A consumer's position is the offset of the last record it received, plus one. It reads the object with the greatest base at or below the
position. Therefore an object is named after the last record before it, plus one, and segments without records have no object. Then no
position exists, up to the last record of all, at which one object has nothing more to give and the next one is not yet due.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pydantic import ValidationError

from compactor.errors import BadData, NotFound
from compactor.model.base import StrictFrozenModel
from compactor.model.ids import TopicPartition
from compactor.model.policy import MAX32
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY
from compactor.storage.port import ObjectStore
from compactor.tier.layouts.pinterest.keys import PinterestObjectKeys
from compactor.tier.layouts.pinterest.metadata import SegmentTimestampBound

GENERATIONS_FOLDER: Final = ".generations"
CATALOG_VERSION: Final = 1
CATALOG_READ_ATTEMPTS: Final = 5
"""How often the steps are listed again if one of them was deleted between listing and reading."""
ENDLESS_SEARCH_ENTRIES: Final = 2
"""Number of index entries with which the consumer's search finds no end below the first one (S3OffsetIndexHandler)."""

WHOLE_EVERY: Final = 32
"""After this many steps, one step repeats the content of all earlier ones, so that readers need no older step."""

_STEP: Final = re.compile(r"(\d{20})\.(json|told)")
_BEGUN: Final = re.compile(r"(g(\d{20})(?:-\d+)?)\.begun")


class PublishedSegment(StrictFrozenModel):
    """One segment of the tier as a part of a generation (a published copy of a partition).

    base: first offset, which is in the name of its object; -1 if the segment has no records.
    last: offset of its last record; -1 if the segment has no records.
    timestamp_ms: largest timestamp of this part and of those before it.
    log_bytes: size of the log object.
    """

    segment: str
    base: int = -1
    last: int = -1
    timestamp_ms: int = 0
    log_bytes: int = 0


class SupersededGeneration(StrictFrozenModel):
    """A generation (copy of the partition) that a later one has replaced.

    began: number of its first step (a record of appended parts).
    ended: number of the first step of the generation that replaced it.
    """

    name: str
    began: int
    ended: int


class GenerationStepHistory(StrictFrozenModel):
    """Content of all earlier steps (records of appended parts) of a partition.

    began: number of the current generation's first step.
    before: parts that earlier steps have appended to the current generation.
    earlier: generations before the current one that are not deleted yet.
    """

    began: int
    before: tuple[PublishedSegment, ...] = ()
    earlier: tuple[SupersededGeneration, ...] = ()


class GenerationStep(StrictFrozenModel):
    """A recorded step: the list of parts that were appended to a generation at once.

    slot: position in the control log of the state from which the parts were copied.
    whole: content of all earlier steps; set in a generation's first step and every WHOLE_EVERY steps.
    """

    version: int = CATALOG_VERSION
    generation: str
    slot: int
    parts: tuple[PublishedSegment, ...]
    whole: GenerationStepHistory | None = None


class Generation(StrictFrozenModel):
    """The current generation (copy) of a partition, as its recorded steps (records of appended parts) state it.

    number: number of its last step.
    began: number of its first step.
    whole: number of its last step that repeats the content of all earlier ones, so that reading can begin there.
    slot: position in the control log of the state that the generation copies.
    """

    name: str
    number: int
    began: int
    whole: int
    slot: int
    parts: tuple[PublishedSegment, ...]

    @property
    def published_segments_with_objects(self) -> tuple[PublishedSegment, ...]:
        """Return the parts that have an object because they have records, ascending."""
        return tuple(part for part in self.parts if part.base >= 0)

    @property
    def largest_timestamp_of_each_object(self) -> tuple[SegmentTimestampBound, ...]:
        """Return largest timestamp and name of each object, as the layout's metadata lists them."""
        return tuple(SegmentTimestampBound(part.timestamp_ms, part.base) for part in self.published_segments_with_objects)

    def segments_to_append_unless_new_generation_due(
        self, live_segments: Sequence[RemoteLogSegmentMetadata], log_start_offset: int
    ) -> Sequence[RemoteLogSegmentMetadata] | None:
        """Return the live segments that are to be appended; None if the generation's parts are not the first of the live segments, or if
        its first object begins below the log start, so that a new generation is due.
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
    """Announcement of a process that it writes a generation (copy of the partition). Readers use the generation once its first step is
    recorded.

    number: number of this first step.
    modified_ms: time of the latest announcement, in milliseconds of the store's clock.
    """

    generation: str
    number: int
    modified_ms: int


@dataclass(frozen=True)
class PartitionGenerations:
    """All generations (copies) of one partition.

    current: the newest generation that is valid; None if there was none yet.
    earlier: generations before the current one that are not deleted yet, oldest first.
    begun: announced generations, which may be incomplete.
    numbers: numbers of the stored step objects, each of which records the parts that were appended to a generation; ascending.
    recorded_ms: by number of a generation's first step object, when readers were directed to the generation, in milliseconds of the store's
        clock.
    """

    current: Generation | None = None
    earlier: tuple[SupersededGeneration, ...] = ()
    begun: tuple[AnnouncedGeneration, ...] = ()
    numbers: tuple[int, ...] = ()
    recorded_ms: Mapping[int, int] = field(default_factory=dict)

    @property
    def next_generation_step_number(self) -> int:
        """Return the number under which the next step is stored. A step is an object that records which parts were appended to a
        generation.
        """
        return self.current.number + 1 if self.current else 1

    @property
    def recorded_generation_names(self) -> frozenset[str]:
        """Return the names of the current generation and of earlier ones that are not deleted yet."""
        return frozenset([one.name for one in self.earlier] + [one.name for one in [self.current] if one])

    def make_step_of_new_generation(self, generation: str, slot: int, parts: Sequence[PublishedSegment]) -> GenerationStep:
        """Return the step (a record of appended parts) that makes a new generation valid, to be recorded under
        ``next_generation_step_number``.

        :param generation: name of the new generation.
        :param slot: position in the control log of the state from which the parts were copied.
        """
        earlier = self.earlier
        if self.current:
            earlier = (
                *earlier,
                SupersededGeneration(name=self.current.name, began=self.current.began, ended=self.next_generation_step_number),
            )
        whole = GenerationStepHistory(began=self.next_generation_step_number, earlier=earlier)
        return GenerationStep(generation=generation, slot=slot, parts=tuple(parts), whole=whole)

    def make_step_that_appends_parts(self, current: Generation, slot: int, parts: Sequence[PublishedSegment]) -> GenerationStep:
        """Return the step (a record of appended parts) that appends parts to the current generation, to be recorded under
        ``next_generation_step_number``.

        :param slot: position in the control log of the state from which the parts were copied.
        """
        due = self.next_generation_step_number - current.whole >= WHOLE_EVERY
        whole = GenerationStepHistory(began=current.began, before=current.parts, earlier=self.earlier) if due else None
        return GenerationStep(generation=current.name, slot=slot, parts=tuple(parts), whole=whole)

    def deletable_generation_step_numbers(self) -> list[int]:
        """Return the numbers of steps (records of appended parts) that may be deleted, because a later step repeats their content.

        The last WHOLE_EVERY steps before that later one stay, for readers that have listed the steps earlier, and so does a generation's
        first step.
        """
        one = self.current
        return [number for number in self.numbers if one.began < number < one.whole - WHOLE_EVERY] if one else []


class GenerationStepLog:
    """Log of one partition's steps (the parts appended to its generations), numbered without gaps.

    Steps never change, so each is read once. Not thread-safe.
    """

    def __init__(self, store: ObjectStore, keys: PinterestObjectKeys, partition: TopicPartition) -> None:
        self._store = store
        self._steps: dict[int, GenerationStep] = {}
        self.name = partition
        self.folder = f"{GENERATIONS_FOLDER}/{keys.cluster}/{partition}/"

    @property
    def pointer_object_key(self) -> str:
        """Return the key of the pointer object, which directs readers to the current generation."""
        return f"{self.folder}current.json"

    def generation_step_object_key(self, step_number: int) -> str:
        """Return the object key of a step, by its number."""
        return f"{self.folder}{step_number:020d}.json"

    def pointer_written_marker_key(self, first_step_number: int) -> str:
        """Return the key of the marker object which states that readers were directed to the generation whose first step has this
        number.
        """
        return f"{self.folder}{first_step_number:020d}.told"

    def generation_announcement_key(self, generation: str) -> str:
        """Return the key of the object that announces a generation before it is written."""
        return f"{self.folder}{generation}.begun"

    def read_generations(self) -> PartitionGenerations:
        """Read all generations of the partition.

        Takes one LIST request, and a GET request for each step (record of appended parts) from the last full step on; a full step repeats
        all earlier steps. If a writer deletes a listed step meanwhile, the steps are listed again.

        :raises BadData: if steps are missing or invalid.
        :raises StoreError: if a store fails.
        """
        for _ in range(CATALOG_READ_ATTEMPTS - 1):
            try:
                return self._try_read_generations()
            except NotFound:
                continue
        return self._try_read_generations()

    def _try_read_generations(self) -> PartitionGenerations:
        """Read all generations of the partition. Raises NotFound if a listed generation step was deleted before it was read."""
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
        steps, whole = self._read_generation_steps_since_full_one(numbers)
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

    def _read_generation_steps_since_full_one(self, step_numbers: Sequence[int]) -> tuple[list[GenerationStep], GenerationStepHistory]:
        """Return two values: the steps from the last full one on, ascending, and the history that the full one holds. A full step repeats
        all steps before it. Raises BadData if a step is missing.
        """
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
        """Return one step, from memory if it was read before. Raises BadData if it is invalid or of another version."""
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
    """Return the partitions to which objects below ROOT belong, sorted."""
    return sorted({TopicPartition.parse(key.split("/")[2]) for key in keys if key.count("/") >= 3})


def generation_name(first_step_number: int, attempt: int = 0) -> str:
    """Return the name of the generation whose first step has this number.

    :param attempt: 0, or a higher number if objects with other content exist under the previous attempt's name.
    """
    return f"g{first_step_number:020d}" + (f"-{attempt}" if attempt else "")


def format_generation_pointer(
    base_prefix: str, bucket: str, keys: PinterestObjectKeys, partition: TopicPartition, generation: Generation
) -> bytes:
    """Return the content of the object that directs readers to a generation, as JSON. It holds what an endpoint provider needs: bucket and
    base prefix of S3StorageServiceEndpoint.Builder.
    """
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


def rebase_offset_index_to_lower_offset(index_bytes: bytes, offset_distance: int) -> bytes:
    """Return the content of an offset index, converted to a base offset that is lower by ``offset_distance``. Offsets that no longer fit an
    entry are left out; readers find these offsets by scanning.
    """
    entries = np.frombuffer(index_bytes, OFFSET_ENTRY).copy()
    offsets = entries["offset"].astype(np.int64) + offset_distance
    entries = entries[offsets <= MAX32]
    entries["offset"] = offsets[offsets <= MAX32]
    return (entries[1:] if len(entries) == ENDLESS_SEARCH_ENTRIES else entries).tobytes()


def rebase_time_index_to_lower_offset(index_bytes: bytes, offset_distance: int) -> bytes:
    """Return the content of a time index, converted to a base offset that is lower by ``offset_distance``. Offsets that no longer fit an
    entry are replaced by the largest one. No entry is left out, because consumers read the last one.
    """
    entries = np.frombuffer(index_bytes, TIME_ENTRY).copy()
    entries["offset"] = np.minimum(entries["offset"].astype(np.int64) + offset_distance, MAX32)
    return entries.tobytes()
