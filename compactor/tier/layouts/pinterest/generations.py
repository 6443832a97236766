"""Compacted partitions for consumers of Pinterest's layout: what they are called, and what is remembered of them.

    <generation>/[<bits>/]<cluster>/<topic>-<partition>/...         objects of the layout; new ones are only appended
    .generations/<cluster>/<topic>-<partition>/<20 digits>.json     what was done, one step a record, never overwritten
    .generations/<cluster>/<topic>-<partition>/<20 digits>.told     readers were told of the generation that this step began
    .generations/<cluster>/<topic>-<partition>/<generation>.begun   somebody writes, or has written, a generation: who
    .generations/<cluster>/<topic>-<partition>/current.json         for readers: where the current generation lies

Of a partition that was deleted the last step is one of a generation without parts; there is no pointer then.

A generation is called after the number of the step that may begin it. Once another step has that number, nobody can make it count any more.

The consumer's position is the last record that it was given, plus one, and it reads the object with the greatest base at or below that.
So an object is named after the last record before it plus one, and there is none for a segment without records: there is no position,
up to the last record of all, at which an object has nothing more to give and the next one is not yet due.
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
from compactor.model.base import Value
from compactor.model.ids import TopicPartition
from compactor.model.policy import MAX32
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY
from compactor.storage.port import ObjectStore
from compactor.tier.layouts.pinterest.keys import PartitionKeys
from compactor.tier.layouts.pinterest.metadata import SegmentTime

ROOT: Final = ".generations"
VERSION: Final = 1
READS: Final = 5
"""How often steps are listed anew where one of them has gone meanwhile."""
ENDLESS: Final = 2
"""Of so many index entries the consumer's search finds no end below the first one (S3OffsetIndexHandler)."""

WHOLE_EVERY: Final = 32
"""After so many steps one says everything that the ones before it say: nobody reads more of them."""

_STEP: Final = re.compile(r"(\d{20})\.(json|told)")
_BEGUN: Final = re.compile(r"(g(\d{20})(?:-\d+)?)\.begun")


class Part(Value):
    """One segment of our tier in a generation. ``base`` and ``last``: its object's name and last record; -1 where it holds no record.

    ``timestamp_ms``: no record of this part or of those before it is younger.
    """

    segment: str
    base: int = -1
    last: int = -1
    timestamp_ms: int = 0
    log_bytes: int = 0


class Superseded(Value):
    """An earlier generation. ``ended``: the number of the step that began the next one."""

    name: str
    began: int
    ended: int


class Whole(Value):
    """What the steps before this one came to. ``began``: the first step of its generation; ``before``: the parts of those between."""

    began: int
    before: tuple[Part, ...] = ()
    earlier: tuple[Superseded, ...] = ()


class GenerationStep(Value):
    """A record. ``slot``: of our control log, by whose state it was made. ``whole``: in a generation's first step, and now and then."""

    version: int = VERSION
    generation: str
    slot: int
    parts: tuple[Part, ...]
    whole: Whole | None = None


class Generation(Value):
    """The fold of a partition's steps: what its current generation consists of. ``number``: of the last step, ``began`` of its first.

    ``whole``: the last step that said everything.
    """

    name: str
    number: int
    began: int
    whole: int
    slot: int
    parts: tuple[Part, ...]

    @property
    def objects(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.base >= 0)

    @property
    def times(self) -> tuple[SegmentTime, ...]:
        return tuple(SegmentTime(part.timestamp_ms, part.base) for part in self.objects)

    def lacks(self, live: Sequence[RemoteLogSegmentMetadata]) -> Sequence[RemoteLogSegmentMetadata] | None:
        """What is to be appended; None where it is no beginning of these segments any more, so that a new generation is due."""
        known = [part.segment for part in self.parts]
        return live[len(known) :] if [segment.id for segment in live[: len(known)]] == known else None


@dataclass(frozen=True)
class Begun:
    """Of a generation that somebody has begun to write. ``number``: of the step that would make it count."""

    generation: str
    number: int
    modified_ms: int


@dataclass(frozen=True)
class Generations:
    """What there is of a partition. ``earlier``: those before the current one that were not deleted yet, oldest first.

    ``numbers``: of the steps that are left, ascending; ``told_ms``: first step of a generation -> when readers were told of it, by the
    store's clock.
    """

    current: Generation | None = None
    earlier: tuple[Superseded, ...] = ()
    begun: tuple[Begun, ...] = ()
    numbers: tuple[int, ...] = ()
    told_ms: Mapping[int, int] = field(default_factory=dict)

    @property
    def next_number(self) -> int:
        return self.current.number + 1 if self.current else 1

    @property
    def recorded(self) -> frozenset[str]:
        """The names of all that count or have counted."""
        return frozenset([one.name for one in self.earlier] + [one.name for one in [self.current] if one])

    def first_step(self, generation: str, slot: int, parts: Sequence[Part]) -> GenerationStep:
        """That makes a new generation count, under ``next_number``."""
        earlier = self.earlier
        if self.current:
            earlier = (*earlier, Superseded(name=self.current.name, began=self.current.began, ended=self.next_number))
        whole = Whole(began=self.next_number, earlier=earlier)
        return GenerationStep(generation=generation, slot=slot, parts=tuple(parts), whole=whole)

    def next_step(self, current: Generation, slot: int, parts: Sequence[Part]) -> GenerationStep:
        """That appends to the current one."""
        due = self.next_number - current.whole >= WHOLE_EVERY
        whole = Whole(began=current.began, before=current.parts, earlier=self.earlier) if due else None
        return GenerationStep(generation=current.name, slot=slot, parts=tuple(parts), whole=whole)

    def needless(self) -> list[int]:
        """Steps that nobody reads any more, not even who listed them before the last whole one came: all but the first one tell nothing."""
        one = self.current
        return [number for number in self.numbers if one.began < number < one.whole - WHOLE_EVERY] if one else []


class GenerationLog:
    """A partition's steps, numbered without gaps. What was read is remembered: steps do not change. For one thread."""

    def __init__(self, store: ObjectStore, keys: PartitionKeys, name: TopicPartition) -> None:
        self._store = store
        self._steps: dict[int, GenerationStep] = {}
        self.name = name
        self.folder = f"{ROOT}/{keys.cluster}/{name}/"

    @property
    def pointer(self) -> str:
        return f"{self.folder}current.json"

    def step_key(self, number: int) -> str:
        return f"{self.folder}{number:020d}.json"

    def told_key(self, number: int) -> str:
        return f"{self.folder}{number:020d}.told"

    def begun_key(self, generation: str) -> str:
        return f"{self.folder}{generation}.begun"

    def read(self) -> Generations:
        """One LIST, and a GET for each step since the last whole one that was not read before. Raises BadData, StoreError.

        A step that is listed and gone was needless by then (``Generations.needless``): what is there now is listed anew.
        """
        for _ in range(READS - 1):
            try:
                return self._read()
            except NotFound:
                continue
        return self._read()

    def _read(self) -> Generations:
        numbers: list[int] = []
        begun: list[Begun] = []
        told: dict[int, int] = {}
        for info in self._store.list(self.folder):
            file = info.key.removeprefix(self.folder)
            if match := _STEP.fullmatch(file):
                if match[2] == "json":
                    numbers.append(int(match[1]))
                else:
                    told[int(match[1])] = info.modified_ms
            elif match := _BEGUN.fullmatch(file):
                begun.append(Begun(match[1], int(match[2]), info.modified_ms))
        if not numbers:
            return Generations(begun=tuple(begun))
        steps, whole = self._since_whole(numbers)
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
        return Generations(current, earlier, tuple(begun), tuple(numbers), told)

    def _since_whole(self, numbers: Sequence[int]) -> tuple[list[GenerationStep], Whole]:
        """The last steps, ascending, and what the first of them says of all before it."""
        steps: list[GenerationStep] = []
        expected = numbers[-1]
        for number in reversed(numbers):
            if number != expected:
                break
            steps.insert(0, self._step(number))
            if steps[0].whole:
                return steps, steps[0].whole
            expected -= 1
        missing = self.step_key(expected + 1)
        raise BadData("the steps before it are missing", segment=missing, hint="Restore them from the store's versions")

    def _step(self, number: int) -> GenerationStep:
        key = self.step_key(number)
        if number in self._steps:
            return self._steps[number]
        try:
            step = GenerationStep.model_validate_json(self._store.get(key))
        except ValidationError as error:
            raise BadData(f"it is no step of a generation: {error.errors()[0]['msg']}", segment=key) from None
        if step.version != VERSION:
            raise BadData(f"it is of version {step.version}", segment=key, hint="A newer release wrote it")
        self._steps[number] = step
        return step


def told_names(keys: Sequence[str]) -> list[TopicPartition]:
    """The partitions to which objects below ROOT belong."""
    return sorted({TopicPartition.parse(key.split("/")[2]) for key in keys if key.count("/") >= 3})


def generation_name(number: int, attempt: int = 0) -> str:
    """Of the generation that step ``number`` begins; ``attempt``: where something else lies there under the name before."""
    return f"g{number:020d}" + (f"-{attempt}" if attempt else "")


def format_pointer(base_prefix: str, bucket: str, keys: PartitionKeys, name: TopicPartition, generation: Generation) -> bytes:
    """What an endpoint provider needs: bucket and base prefix of S3StorageServiceEndpoint.Builder."""
    document = {
        "version": VERSION,
        "bucket": bucket,
        "basePrefix": f"{base_prefix}{generation.name}",
        "cluster": keys.cluster,
        "entropyBits": keys.entropy_bits,
        "topic": name.topic,
        "partition": name.partition,
        "step": generation.number,
    }
    return json.dumps(document, indent=1).encode()


def shifted_index(data: bytes, distance: int) -> bytes:
    """An offset index as it is for a base offset that lies ``distance`` lower. What no entry can say is found by scanning."""
    entries = np.frombuffer(data, OFFSET_ENTRY).copy()
    offsets = entries["offset"].astype(np.int64) + distance
    entries = entries[offsets <= MAX32]
    entries["offset"] = offsets[offsets <= MAX32]
    return (entries[1:] if len(entries) == ENDLESS else entries).tobytes()


def shifted_timeindex(data: bytes, distance: int) -> bytes:
    """The same of a time index, whose last entry consumers look at: what no entry can say begins earlier."""
    entries = np.frombuffer(data, TIME_ENTRY).copy()
    entries["offset"] = np.minimum(entries["offset"].astype(np.int64) + distance, MAX32)
    return entries.tobytes()
