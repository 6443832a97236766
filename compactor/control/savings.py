"""What a round will save, by what the rounds before have saved: learned from run history. Pure.

Two kinds of rounds save in different ways. Where something is dirty, each new record supersedes an older one of its key, wherever that
lies: the saving goes with the *dirty* bytes. Where only delete horizons have passed, tombstones and markers go, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from compactor.control.state import Run
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata

ROUNDS = 5
"""The last ones of a kind are learned from; each counts half as much as the one after it."""
TOMBSTONE_BYTES = 128
"""A tombstone takes no more, unless its key is long: what is left of a record without its value."""


class SavingRates(NamedTuple):
    """Bytes saved per dirty byte, and per byte that was rewritten for horizons alone; -1 where no such round is remembered.

    Below zero only by that: a round that made a segment larger counts as one that saved nothing.
    """

    per_dirty_byte: float = -1.0
    per_horizon_byte: float = -1.0
    rounds: int = 0
    horizon_rounds: int = 0


class Expectation(NamedTuple):
    """``saving_bytes`` None where nothing tells; ``why`` says what it rests on, or why it is unknown."""

    saving_bytes: int | None
    why: str


def learned(runs: Iterable[Run]) -> SavingRates:
    """From rounds that were published, the latest last."""
    done = [run for run in runs if run.published_slot and int(run.stats.get("bytes_before", 0)) > 0]
    dirty = list(islice((run for run in reversed(done) if _dirty(run)), ROUNDS))
    horizons = list(islice((run for run in reversed(done) if not _dirty(run)), ROUNDS))
    return SavingRates(
        _rate([(_saved(run), _dirty(run)) for run in dirty]),
        _rate([(_saved(run), int(run.stats["bytes_before"])) for run in horizons]),
        len(dirty),
        len(horizons),
    )


def expected(rates: SavingRates, dirty_bytes: int, horizon_bytes: int, tombstones: int | None = None) -> Expectation:
    """
    :param dirty_bytes: of the dirty segments that a round rewrites, 0 for one that is due for horizons alone.
    :param horizon_bytes: of all segments that it rewrites, where nothing is dirty.
    :param tombstones: as many lie in them, by their sidecars; None where that is not known.
    """
    if dirty_bytes:
        if rates.per_dirty_byte < 0:
            return Expectation(None, "no round of this partition is remembered to judge by")
        last = f"its last {rates.rounds} rounds" if rates.rounds > 1 else "its last round"
        return Expectation(round(dirty_bytes * rates.per_dirty_byte), f"{last} saved {rates.per_dirty_byte:.2f} bytes per dirty byte")
    if not horizon_bytes:
        return Expectation(0, "nothing is rewritten")
    if rates.per_horizon_byte >= 0:
        why = f"only delete horizons are due; such rounds saved {100 * rates.per_horizon_byte:.2g} % of what they rewrote"
        return Expectation(round(horizon_bytes * rates.per_horizon_byte), why)
    if tombstones is None:
        return Expectation(None, "only delete horizons are due, and no such round is remembered")
    most = min(horizon_bytes, tombstones * TOMBSTONE_BYTES)
    return Expectation(most, f"only delete horizons are due: {tombstones} tombstones, {TOMBSTONE_BYTES} bytes each at most")


def expected_of(plan: CompactionPlan, live: Iterable[RemoteLogSegmentMetadata], runs: Iterable[Run]) -> tuple[int, int | None]:
    """(dirty bytes that the plan rewrites, what it is expected to save), when its sources are known and nothing is written yet."""
    sources = set(plan.sources)
    mine = [segment for segment in live if segment.id in sources]
    dirty = sum(segment.size_bytes for segment in mine if segment.end_offset >= plan.first_dirty_offset)
    return dirty, expected(learned(runs), dirty, sum(segment.size_bytes for segment in mine)).saving_bytes


def _dirty(run: Run) -> int:
    """Earlier programs did not say how much was dirty: then all of it was."""
    return int(run.stats.get("bytes_dirty", run.stats["bytes_before"]))


def _saved(run: Run) -> int:
    return max(0, int(run.stats["bytes_before"]) - int(run.stats.get("bytes_written", 0)))


def _rate(pairs: list[tuple[int, int]]) -> float:
    """Saved per byte, the latest first and counting most."""
    weights = [0.5**age for age in range(len(pairs))]
    size = sum(weight * of for weight, (_, of) in zip(weights, pairs, strict=True))
    return sum(weight * saved for weight, (saved, _) in zip(weights, pairs, strict=True)) / size if size else -1.0
