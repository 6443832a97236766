"""Ten rounds over a growing log: both cleaners live with their own results, from a fresh start each time."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compactor.cleaner.offline import clean_log_directory
from tests.builders import next_directory
from tests.compare import batches_differ
from tests.conformance.judge import STALE, Verdict, gated, judge_product
from tests.conformance.kafka import Kafka
from tests.plain_format import Batch, read_batches, segment_paths

HOUR = 3_600_000


@dataclass
class Lives:
    """The two logs as they have become, and the clock that they share."""

    theirs: Path
    ours: Path
    now: int
    dirty: int | None = None


def live_through_rounds(kafka: Kafka, seed: int, profile: str, rounds: int, scratch: Path) -> Verdict:
    """Part after part of one log is added to both logs, and both are cleaned.

    In every round the same input (Kafka's) must give the same output, files and all; and what each has made of its own earlier
    outputs must stay the same log, batch by batch.
    """
    made = kafka.generate(seed, profile, scratch / "source", parts=rounds)
    dice = random.Random(seed)
    settings = _settings(dice, profile, made["request"])
    lives = Lives(scratch / "theirs-0", scratch / "ours-0", made["request"]["now_ms"])
    lives.theirs.mkdir()
    lives.ours.mkdir()
    begun, notes = -1, set()
    for number, part in enumerate(made["parts"], start=1):
        for folder in (lives.theirs, lives.ours):
            _add(scratch / "source", begun, part["end"], folder)
        begun = part["end"]
        verdict = _round(kafka, lives, number, part, settings, dice, scratch)
        if verdict.note:
            notes.add(verdict.note)
        if verdict.difference:
            return Verdict(f"round {number}: {verdict.difference}", verdict.note)
        if verdict.note == STALE:
            break  # we keep fewer duplicates than Kafka from here on
    return Verdict(note=", ".join(sorted(notes)))


def _settings(dice: random.Random, profile: str, drawn: dict[str, Any]) -> dict[str, Any]:
    """Recompressed batches have other sizes than Kafka's, so the grouping must not depend on sizes where there are any."""
    sizes = [1 << 30, 1] + ([drawn["segment_bytes"], 2000] if profile == "growing-plain" else [])
    return {
        "segment_bytes": dice.choice(sizes),
        "index_interval_bytes": drawn["index_interval_bytes"],
        "delete_retention_ms": dice.choice([0, 1000, HOUR]),
    }


def _round(
    kafka: Kafka, lives: Lives, number: int, part: dict[str, int], settings: dict[str, Any], dice: random.Random, scratch: Path
) -> Verdict:
    retention = settings["delete_retention_ms"]
    lives.now += dice.choice([0, 1, retention // 2, retention, retention + 1, 2 * retention + HOUR])
    bases = list(segment_paths(lives.theirs))
    decided = part["end"] if part["stable"] == part["end"] else max((base for base in bases if base <= part["stable"]), default=bases[0])
    first = max(bases[0], lives.dirty or 0)
    if first >= decided:
        return Verdict()
    request = {"now_ms": lives.now, "first_dirty_offset": first, "first_uncleanable_offset": decided, **settings}
    if dice.random() < 0.25:
        request["map_entries"] = dice.randrange(1, 30)
    step = scratch / f"round-{number}"
    step.mkdir()
    verdict = judge_product(kafka, lives.theirs, request, step)
    if verdict.difference or verdict.next_dirty_offset is None:
        return verdict
    summary = clean_log_directory(lives.ours, step / "chained", gated(request))
    if summary.next_dirty_offset != verdict.next_dirty_offset:
        return Verdict(f"next dirty offset over the rounds: Kafka {verdict.next_dirty_offset}, ours {summary.next_dirty_offset}")
    lives.dirty = summary.next_dirty_offset
    lives.theirs = next_directory(lives.theirs, step / "kafka", lives.dirty, scratch / f"theirs-{number}")
    lives.ours = next_directory(lives.ours, step / "chained", lives.dirty, scratch / f"ours-{number}")
    difference = batches_differ(_batches(lives.theirs), _batches(lives.ours))
    return Verdict(difference and f"the logs after it: {difference}", verdict.note)


def _batches(folder: Path) -> Iterator[Batch]:
    return (batch for path in segment_paths(folder).values() for batch in read_batches(path.read_bytes()))


def _add(source: Path, begin: int, end: int, folder: Path) -> None:
    """The segments of one part, with the snapshots taken while it was written."""
    for path in sorted(source.iterdir()):
        number = int(path.stem) if path.stem.isdecimal() else None
        if number is None or max(begin, 0) <= number < end or (path.suffix == ".snapshot" and begin < number <= end):
            shutil.copy2(path, folder / path.name)
