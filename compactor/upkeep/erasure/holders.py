"""What may hold a key: the values that a survey comes to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.views.search import Sighting

ANY_KEY = -1
"""In the place of a key's number: the object could not be looked into, and may hold each of them."""


class HolderState(StrEnum):
    """What an object that holds a key is to its tier."""

    LIVE = "live"
    REPLACED = "replaced"
    UNDONE = "undone"
    RETIRING = "retiring"
    OPEN_ROUND = "open round"
    IMPORTING = "importing"
    ORPHAN = "orphan"
    BROKERS = "brokers"
    OLD_VERSION = "old version"
    GENERATION = "generation"
    SIDECAR = "sidecar"
    SCRATCH = "scratch"
    UPLOAD = "unfinished upload"
    FORMER_TOPIC = "former topic"


@dataclass(frozen=True)
class Holder:
    """An object that holds a key, or could. ``key``: its number among those that were asked for, or ANY_KEY.

    ``what``: value (the latest one), tombstone, superseded, aborted, undecided, record (in a segment that readers do not get), keyed
    hash, or unknown. ``until_ms``: no earlier than that it can be gone; None where no time is known. ``waits_for``: what has to happen.
    ``sha256``: of the plain log, where it was recorded (not of one that was put together of copies). ``run_id``: of the round that took
    it from readers.
    """

    partition: str
    object: str
    state: HolderState
    key: int
    what: str
    waits_for: str
    until_ms: int | None = None
    segment: str = ""
    records: int = 0
    first_offset: int = -1
    last_offset: int = -1
    bytes: int = 0
    sha256: str = ""
    run_id: str = ""

    @property
    def certain(self) -> bool:
        """Whether a record with the key was seen in it."""
        return self.records > 0


@dataclass(frozen=True)
class NotCovered:
    """Where the key may be all the same, and why nothing is said about it."""

    what: str
    why: str


@dataclass(frozen=True)
class Removal:
    """A round that took records of a key from readers. ``at_ms``: by the store's clock."""

    partition: str
    run_id: str
    at_ms: int


@dataclass(frozen=True)
class PartitionSurvey:
    """One partition, as of ``slot`` of its control log. ``removals``: by number of the key. ``replaced``: id of a segment -> the round that
    took it from readers, as far as the log still has its record; asked for where an earlier report is at hand.

    ``movable``: ids of live segments that a round would free of a key now. ``listed``: all objects that were there.
    """

    name: TopicPartition
    slot: int
    holders: tuple[Holder, ...]
    removals: Mapping[int, tuple[Removal, ...]]
    movable: frozenset[str]
    listed: frozenset[str]
    not_covered: tuple[NotCovered, ...]
    segments: int
    filtered: int
    bytes: int = 0
    replaced: Mapping[str, Removal] = field(default_factory=dict)


@dataclass
class Found:
    """What one segment has of one key. ``newest``: its last record, ``latest``: the last one that counts, if any does."""

    segment: RemoteLogSegmentMetadata
    key: int
    newest: Sighting
    latest: Sighting | None = None
    records: int = 0
    first_offset: int = -1


def by_segment(sightings: Iterable[Sighting], keys: Sequence[bytes]) -> list[Found]:
    """:param sightings: newest first."""
    numbers = {key: number for number, key in enumerate(keys)}
    found: dict[tuple[str, int], Found] = {}
    for one in sightings:
        if one.key is not None and not one.control:
            key = numbers[one.key]
            entry = found.setdefault((one.segment.id, key), Found(one.segment, key, one))
            entry.records += 1
            entry.first_offset = one.offset
            if entry.latest is None and one.counts:
                entry.latest = one
    return list(found.values())


def held(partition: str, place: str, state: HolderState, one: Found, what: str, waits_for: str, **more: int | str | None) -> Holder:
    """The holder that a segment with sightings is."""
    log = one.segment.files.get("log")
    return Holder(
        partition, place, state, one.key, what, waits_for,
        segment=one.segment.id, records=one.records, first_offset=one.first_offset, last_offset=one.newest.offset,
        bytes=one.segment.size_bytes, sha256=log.sha256 if log else "", **more,  # type: ignore[arg-type]
    )  # fmt: skip
