"""Compacted partitions for consumers of Pinterest's layout: what they are called, and what is remembered of them.

    <generation>/[<bits>/]<cluster>/<topic>-<partition>/...        objects of the layout; new ones are only appended
    .generations/<cluster>/<topic>-<partition>/<20 digits>.json    what was done, one step a record, never overwritten
    .generations/<cluster>/<topic>-<partition>/<20 digits>.told    readers were told of the generation that this step began
    .generations/<cluster>/<topic>-<partition>/current.json        for readers: where the current generation lies

The consumer's position is the last record that it was given, plus one, and it reads the object with the greatest base at or below that.
So an object is named after the last record before it plus one, and there is none for a segment without records: there is no position,
up to the last record of all, at which an object has nothing more to give and the next one is not yet due.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from pydantic import ValidationError

from compactor.errors import BadData
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
ENDLESS: Final = 2
"""Of so many index entries the consumer's search finds no end below the first one (S3OffsetIndexHandler)."""

_STEP: Final = re.compile(r"(\d{20})\.(json|told)")


class Part(Value):
    """One segment of our tier in a generation. ``base`` and ``last``: its object's name and last record; -1 where it holds no record.

    ``timestamp_ms``: no record of this part or of those before it is younger.
    """

    segment: str
    base: int = -1
    last: int = -1
    timestamp_ms: int = 0
    log_bytes: int = 0


class GenerationStep(Value):
    """A record. ``slot``: of our control log, by whose state it was made. ``anew``: it begins a generation, else parts are appended."""

    version: int = VERSION
    generation: str
    slot: int
    anew: bool
    parts: tuple[Part, ...]


class Generation(Value):
    """The fold of a partition's steps: what its current generation consists of. ``number``: of the last step, ``began`` of its first."""

    name: str
    number: int
    began: int
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


class Superseded(Value):
    """An earlier generation. ``ended``: the number of the step that began the next one."""

    name: str
    began: int
    ended: int


class GenerationLog:
    """A partition's steps. Steps are numbered without gaps; the lowest that is left begins a generation."""

    def __init__(self, store: ObjectStore, keys: PartitionKeys, name: TopicPartition) -> None:
        self._store = store
        self.name = name
        self.folder = f"{ROOT}/{keys.cluster}/{name}/"

    @property
    def pointer(self) -> str:
        return f"{self.folder}current.json"

    def step_key(self, number: int) -> str:
        return f"{self.folder}{number:020d}.json"

    def told_key(self, number: int) -> str:
        return f"{self.folder}{number:020d}.told"

    def read(self) -> tuple[Generation | None, list[Superseded]]:
        """The current generation and those before it that were not deleted yet, oldest first. Raises BadData, StoreError."""
        current: Generation | None = None
        earlier: list[Superseded] = []
        for number in self.numbers():
            step = self._step(number)
            if step.anew:
                if current:
                    earlier.append(Superseded(name=current.name, began=current.began, ended=number))
                current = Generation(name=step.generation, number=number, began=number, slot=step.slot, parts=step.parts)
            elif current is None or current.number + 1 != number:
                raise BadData(
                    "the steps before it are missing", segment=self.step_key(number), hint="Restore them from the store's versions"
                )
            else:
                current = current.model_copy(update={"number": number, "slot": step.slot, "parts": (*current.parts, *step.parts)})
        return current, earlier

    def numbers(self) -> list[int]:
        found = (_STEP.fullmatch(info.key.removeprefix(self.folder)) for info in self._store.list(self.folder))
        return [int(match[1]) for match in found if match and match[2] == "json"]

    def _step(self, number: int) -> GenerationStep:
        key = self.step_key(number)
        try:
            step = GenerationStep.model_validate_json(self._store.get(key))
        except ValidationError as error:
            raise BadData(f"it is no step of a generation: {error.errors()[0]['msg']}", segment=key) from None
        if step.version != VERSION:
            raise BadData(f"it is of version {step.version}", segment=key, hint="A newer release wrote it")
        return step


def told_names(keys: Sequence[str]) -> list[TopicPartition]:
    """The partitions to which objects below ROOT belong."""
    return sorted({TopicPartition.parse(key.split("/")[2]) for key in keys if key.count("/") >= 3})


def generation_name(slot: int, attempt: int = 0) -> str:
    return f"g{slot:020d}" + (f"-{attempt}" if attempt else "")


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
