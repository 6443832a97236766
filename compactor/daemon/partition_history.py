"""A partition's history as its page shows it: recent rounds, compactor epochs, lineage and replaced ranges. About 1 KB each."""

from __future__ import annotations

import zlib

from checkpoint.lineage import EpochEntry
from compactor.control.state import CompactorEpochAndEnding, CompactorLeader, PartitionState, RunHistoryEntry
from compactor.model.base import StrictFrozenModel

MOST_RUNS = 20
MOST_EPOCHS = 12
MAX_HISTORY_RANGES = 400
MOST_LINEAGE = 100


class ReplacedOffsetRange(StrictFrozenModel):
    """Offset range of adjacent segments that were replaced together and wait for deletion. Offsets are inclusive.

    run_id: the round that replaced them; empty if no round did (a truncation, a deleted partition).
    """

    start_offset: int
    end_offset: int
    segments: int
    bytes: int
    run_id: str
    undone: bool


class PartitionHistory(StrictFrozenModel):
    """A partition's past for its web page: the newest runs, compactor epochs and leader epochs, newest last.

    fenced: number of records in the control log that have no effect, because they were refused when it was replayed.
    """

    slot: int
    leader: CompactorLeader | None
    runs: tuple[RunHistoryEntry, ...]
    epochs: tuple[CompactorEpochAndEnding, ...]
    lineage: tuple[EpochEntry, ...]
    replaced: tuple[ReplacedOffsetRange, ...]
    fenced: int


def partition_history(state: PartitionState) -> PartitionHistory:
    """Return what a partition's page shows of its past: recent rounds, compactor epochs, lineage and replaced ranges."""
    return PartitionHistory(
        slot=state.slot,
        leader=state.leader,
        runs=state.runs[-MOST_RUNS:],
        epochs=state.epochs[-MOST_EPOCHS:],
        lineage=state.lineage[-MOST_LINEAGE:],
        replaced=tuple(_replaced_ranges(state))[:MAX_HISTORY_RANGES],
        fenced=len(state.fenced),
    )


def serialize_history(history: PartitionHistory) -> bytes:
    """Serialize a partition's history as compressed JSON, about 1 KB."""
    return zlib.compress(history.model_dump_json().encode(), 1)


def deserialize_history(data: bytes) -> PartitionHistory:
    """Parse the compressed JSON of a partition's history."""
    return PartitionHistory.model_validate_json(zlib.decompress(data))


def _replaced_ranges(state: PartitionState) -> list[ReplacedOffsetRange]:
    """Return the replaced segments that wait for deletion. Adjacent segments that were replaced together are one range."""
    found: list[ReplacedOffsetRange] = []
    for group in state.waiting:
        begun = len(found)
        for segment in sorted(group.segments, key=lambda each: each.start_offset):
            last = found[-1] if len(found) > begun else None
            if last is not None and segment.start_offset <= last.end_offset + 1:
                grown = {"end_offset": segment.end_offset, "segments": last.segments + 1, "bytes": last.bytes + segment.size_bytes}
                found[-1] = last.model_copy(update=grown)
            else:
                one = {"start_offset": segment.start_offset, "end_offset": segment.end_offset, "bytes": segment.size_bytes}
                found.append(ReplacedOffsetRange(**one, segments=1, run_id=group.run_id, undone=group.undone))
    return found
