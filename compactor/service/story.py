"""What a control log remembers of a partition, as much of it as a page shows; made when the log is folded, and small enough to be kept."""

from __future__ import annotations

import zlib

from checkpoint.lineage import EpochEntry
from compactor.control.state import EpochHistory, Leader, PartitionState, Run
from compactor.model.base import Value

RUNS = 20
EPOCHS = 12
RANGES = 400
LINEAGE = 100


class ReplacedRange(Value):
    """Neighbouring segments that left the view and wait for deletion. Offsets inclusive; ``run_id`` empty where no round did it."""

    start_offset: int
    end_offset: int
    segments: int
    bytes: int
    run_id: str
    undone: bool


class PartitionStory(Value):
    """Newest last, the latest RUNS, EPOCHS and so on. ``fenced``: appends that did not count."""

    slot: int
    leader: Leader | None
    runs: tuple[Run, ...]
    epochs: tuple[EpochHistory, ...]
    lineage: tuple[EpochEntry, ...]
    replaced: tuple[ReplacedRange, ...]
    fenced: int


def story_of(state: PartitionState) -> PartitionStory:
    return PartitionStory(
        slot=state.slot,
        leader=state.leader,
        runs=state.runs[-RUNS:],
        epochs=state.epochs[-EPOCHS:],
        lineage=state.lineage[-LINEAGE:],
        replaced=tuple(_ranges(state))[:RANGES],
        fenced=len(state.fenced),
    )


def packed(story: PartitionStory) -> bytes:
    """About 1 KB."""
    return zlib.compress(story.model_dump_json().encode(), 1)


def unpacked(data: bytes) -> PartitionStory:
    return PartitionStory.model_validate_json(zlib.decompress(data))


def _ranges(state: PartitionState) -> list[ReplacedRange]:
    found: list[ReplacedRange] = []
    for group in state.waiting:
        begun = len(found)
        for segment in sorted(group.segments, key=lambda each: each.start_offset):
            last = found[-1] if len(found) > begun else None
            if last is not None and segment.start_offset <= last.end_offset + 1:
                grown = {"end_offset": segment.end_offset, "segments": last.segments + 1, "bytes": last.bytes + segment.size_bytes}
                found[-1] = last.model_copy(update=grown)
            else:
                one = {"start_offset": segment.start_offset, "end_offset": segment.end_offset, "bytes": segment.size_bytes}
                found.append(ReplacedRange(**one, segments=1, run_id=group.run_id, undone=group.undone))
    return found
