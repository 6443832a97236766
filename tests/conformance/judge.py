"""One log, two cleaners: is what we made of it what Kafka makes of it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compactor.cleaner.gate.batch_checks import GateFailed
from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData
from tests import naive_cleaner
from tests.compare import directories_differ, segments_differ
from tests.conformance.kafka import Kafka, KafkaFailed
from tests.plain_format import Batch, Unreadable, read_batches, segment_paths

STALE = "stale aborted producer"
AMPLE_INDEX = {"segment_index_bytes": 10_485_760}
KNOWN_REFUSALS = {
    "Attempt to append to a full time index": "index full",
    "Attempt to append to a full index": "index full",
    "Empty batches are only supported for magic v2 and above": "emptied legacy last batch",
    "EndTransactionMarker.deserializeValue": "control record without a value",
}


@dataclass(frozen=True)
class Verdict:
    """``difference``: empty when all is well. ``note``: a documented deviation, or that both refuse the log.

    ``next_dirty_offset``: Kafka's, where it cleaned.
    """

    difference: str = ""
    note: str = ""
    next_dirty_offset: int | None = None


Judge = Callable[[Kafka, Path, dict[str, Any], Path], Verdict]


def judge_product(kafka: Kafka, log_dir: Path, request: dict[str, Any], scratch: Path) -> Verdict:
    """Kafka's cleaner against `clean_log_directory`; the outputs stay in ``scratch`` as ``kafka`` and ``ours``."""
    theirs = _kafkas(kafka, log_dir, scratch / "kafka", request)
    try:
        summary = clean_log_directory(log_dir, scratch / "ours", gated(request))
    except BadData as error:
        return Verdict(note="both refuse") if "refused" in theirs else Verdict(f"we refuse: {error}")
    except GateFailed as error:
        return Verdict(str(error))
    if "refused" in theirs:
        known = next((name for words, name in KNOWN_REFUSALS.items() if words in theirs["refused"]), "")
        if not known:
            return Verdict(f"Kafka refuses: {theirs['refused']}")
        return Verdict(_naive_differs(log_dir, request, summary.next_dirty_offset, scratch / "ours"), known)
    difference = _differs(theirs, scratch / "kafka", summary.next_dirty_offset, scratch / "ours", request)
    if difference and _is_stale_producer(kafka, log_dir, request, scratch):
        return Verdict(_naive_differs(log_dir, request, summary.next_dirty_offset, scratch / "ours"), STALE)
    return Verdict(difference, next_dirty_offset=theirs["next_dirty_offset"])


def gated(request: dict[str, Any]) -> OfflineCleanOptions:
    """Under the eyes of the equivalence gate, whose refusal is raised; in every third case it has room for a part of the keys only."""
    turn = request["now_ms"] % 3
    return OfflineCleanOptions(**request, threads=1 + turn, gate_budget_bytes=(1 << 24, 1 << 24, 500)[turn])


def judge_naive(kafka: Kafka, log_dir: Path, request: dict[str, Any], scratch: Path) -> Verdict:
    """Kafka's cleaner against the naive one."""
    theirs = _kafkas(kafka, log_dir, scratch / "kafka", request)
    try:
        result = naive_cleaner.clean(log_dir, naive_cleaner.Request(**request))
    except Unreadable as error:
        return Verdict(note="both refuse") if "refused" in theirs else Verdict(f"the naive cleaner refuses: {error}")
    if "refused" in theirs:
        known = next((name for words, name in KNOWN_REFUSALS.items() if words in theirs["refused"]), "")
        return Verdict(note=known) if known else Verdict(f"Kafka refuses: {theirs['refused']}")
    difference = _naive_against(theirs, scratch / "kafka", result)
    if difference:
        again = kafka.clean(log_dir, scratch / "kafka-again", request | AMPLE_INDEX | {"ignore_dirty_index": True})
        result = naive_cleaner.clean(log_dir, naive_cleaner.Request(**(request | AMPLE_INDEX)))
        if "refused" not in again and not _naive_against(again, scratch / "kafka-again", result):
            return Verdict(note=STALE)
    return Verdict(difference)


def _kafkas(kafka: Kafka, log_dir: Path, out_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Kafka's answer; it may refuse the log before any cleaning, when it rebuilds a missing index or loads the producers."""
    try:
        return kafka.clean(log_dir, out_dir, request)
    except KafkaFailed as failure:
        if any(words in str(failure) for words in KNOWN_REFUSALS):
            return {"refused": str(failure)}
        raise


def _naive_against(theirs: dict[str, Any], expected: Path, result: naive_cleaner.Cleaned) -> str:
    if theirs["next_dirty_offset"] != result.next_dirty_offset:
        return f"next dirty offset: Kafka {theirs['next_dirty_offset']}, naive {result.next_dirty_offset}"
    return segments_differ(_read(expected), result.segments)


def _read(folder: Path) -> dict[int, list[Batch]]:
    return {base: list(read_batches(path.read_bytes())) for base, path in segment_paths(folder).items()}


def _differs(theirs: dict[str, Any], expected: Path, next_dirty_offset: int, actual: Path, request: dict[str, Any]) -> str:
    if theirs["next_dirty_offset"] != next_dirty_offset:
        return f"next dirty offset: Kafka {theirs['next_dirty_offset']}, ours {next_dirty_offset}"
    return directories_differ(expected, actual, index_interval_bytes=request.get("index_interval_bytes", 4096))


def _is_stale_producer(kafka: Kafka, log_dir: Path, request: dict[str, Any], scratch: Path) -> bool:
    """Does Kafka agree once its map pass starts at the segment's head? (An emptied index changes the grouping by index size.)"""
    ample = request | AMPLE_INDEX
    again = kafka.clean(log_dir, scratch / "kafka-again", ample | {"ignore_dirty_index": True})
    summary = clean_log_directory(log_dir, scratch / "ours-again", gated(ample))
    return "refused" not in again and not _differs(again, scratch / "kafka-again", summary.next_dirty_offset, scratch / "ours-again", ample)


def _naive_differs(log_dir: Path, request: dict[str, Any], next_dirty_offset: int, ours: Path) -> str:
    """Where Kafka gives no answer, or one that we deviate from knowingly, the naive cleaner judges."""
    expected = naive_cleaner.clean(log_dir, naive_cleaner.Request(**request))
    if expected.next_dirty_offset != next_dirty_offset:
        return f"next dirty offset: naive {expected.next_dirty_offset}, ours {next_dirty_offset}"
    difference = segments_differ(expected.segments, _read(ours))
    return f"against the naive cleaner: {difference}" if difference else ""
