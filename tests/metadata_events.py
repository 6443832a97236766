"""Random scripts of one user partition's metadata records: what brokers and compactors write, in the right order and in any other."""

from __future__ import annotations

import random
from typing import NamedTuple

from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset
from compactor.model.remote_log import (
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    TopicIdPartition,
)
from compactor.model.segment import SegmentState

S = SegmentState
PARTITION = TopicIdPartition(b"topic-id-of-16-b", "orders", 7)
LAST_OFFSET = 63
EPOCHS = range(5)
STATES = (S.COPY_SEGMENT_STARTED, S.COPY_SEGMENT_FINISHED, S.DELETE_SEGMENT_STARTED, S.DELETE_SEGMENT_FINISHED)
LINEAGES = (
    ((0, 0), (1, 20), (3, 40)),
    ((0, 0),),
    ((1, 10), (2, 16), (4, 30)),
    ((0, 0), (1, 8), (2, 16), (3, 24), (4, 32)),
    ((2, 25), (3, 40)),
)


class Span(NamedTuple):
    start: int
    end: int


def raw_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def segment(
    number: int, start: int, end: int, epochs: dict[int, int] | None = None, *, max_ms: int = 1000
) -> RemoteLogSegmentMetadataRecord:
    entries = tuple(EpochEntry(LeaderEpoch(epoch), Offset(offset)) for epoch, offset in (epochs or {0: start}).items())
    return RemoteLogSegmentMetadataRecord(PARTITION, raw_id(number), start, end, 1, max_ms, 5, entries, 100)


def update(number: int, state: SegmentState, custom: bytes | None = None) -> RemoteLogSegmentMetadataUpdateRecord:
    return RemoteLogSegmentMetadataUpdateRecord(PARTITION, raw_id(number), 2, 6, state, custom)


def finished(number: int, start: int, end: int, epochs: dict[int, int] | None = None) -> list[MetadataRecord]:
    return [segment(number, start, end, epochs), update(number, S.COPY_SEGMENT_FINISHED)]


def script(rng: random.Random, length: int = 40) -> list[MetadataRecord]:
    """Half of the scripts keep to a lineage; the others know no rules but what the decoder accepts."""
    lineage = rng.choice(LINEAGES) if rng.random() < 0.5 else ()
    events: list[MetadataRecord] = []
    states: dict[int, SegmentState] = {}
    for _ in range(rng.randint(1, length)):
        number = rng.randint(1, 9)
        if number not in states or rng.random() < 0.1:
            span = _span(rng)
            events.append(segment(number, *span, _epochs(rng, span, lineage), max_ms=rng.choice((-1, 10, 20, 30))))
            states.setdefault(number, STATES[0])
            continue
        following = STATES[min(STATES.index(states[number]) + rng.choice((1, 1, 1, 2)), 3)]
        state = following if rng.random() < 0.8 else rng.choice(STATES)
        states[number] = state
        events.append(update(number, state, rng.choice((None, b"", b"\x01\x02"))))
    return events


def lineage_entries(lineage: tuple[tuple[int, int], ...]) -> tuple[EpochEntry, ...]:
    return tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in lineage)


def _span(rng: random.Random) -> Span:
    if rng.random() < 0.6:  # on a grid, so that starts and ends meet
        first, last = sorted((rng.randint(0, 7), rng.randint(0, 7)))
        return Span(first * 8, last * 8 + 7)
    return Span(*sorted((rng.randint(0, LAST_OFFSET), rng.randint(0, LAST_OFFSET))))


def _epochs(rng: random.Random, span: Span, lineage: tuple[tuple[int, int], ...]) -> dict[int, int]:
    if lineage:
        ends = [start - 1 for _, start in lineage[1:]] + [10**6]
        named = {
            e: max(start, span.start) for (e, start), end in zip(lineage, ends, strict=True) if start <= span.end and end >= span.start
        }
        if named and rng.random() < 0.95:
            return named
    epochs = sorted(rng.sample(EPOCHS, rng.randint(1, 3)))
    offsets = sorted(rng.randint(span.start, span.end) for _ in epochs)
    return dict(zip(epochs, [span.start, *offsets[1:]], strict=True))
