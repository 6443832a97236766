"""One log through the fast cleaner and the naive one: what differs, in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData
from tests import naive_cleaner
from tests.builders import read
from tests.compare import segments_differ
from tests.plain_format import Unreadable
from tests.plain_log import indexes_of, transaction_index


@dataclass(frozen=True)
class Outcome:
    """``ours`` and ``naive``: why each refused the log, empty where it did not. ``difference``: between their results."""

    ours: str = ""
    naive: str = ""
    difference: str = ""
    error: BadData | None = None


def compare_with_naive(log_dir: Path, out_dir: Path, request: dict[str, Any], *, threads: int = 1, gate: int = 1 << 20) -> Outcome:
    """``gate``: the budget of the equivalence gate, whose refusal is raised: it must agree, whatever it can hold."""
    expected, refused = None, ""
    try:
        expected = naive_cleaner.clean(log_dir, naive_cleaner.Request(**request))
    except Unreadable as error:
        refused = str(error) or "unreadable"
    try:
        summary = clean_log_directory(log_dir, out_dir, OfflineCleanOptions(**request, threads=threads, gate_budget_bytes=gate))
    except BadData as error:
        return Outcome(str(error), refused, error=error)
    if expected is None:
        return Outcome(naive=refused)
    if summary.next_dirty_offset != expected.next_dirty_offset:
        return Outcome(difference=f"next dirty offset: naive {expected.next_dirty_offset}, ours {summary.next_dirty_offset}")
    return Outcome(difference=segments_differ(expected.segments, read(out_dir)) or _files_differ(expected, out_dir, request))


def _files_differ(expected: naive_cleaner.Cleaned, out_dir: Path, request: dict[str, Any]) -> str:
    if transaction_index(out_dir) != {int.from_bytes(e[18:26], "big"): e for entries in expected.txn_index.values() for e in entries}:
        return "transaction index"
    for base, batches in read(out_dir).items():
        log = out_dir / f"{base:020}.log"
        built = indexes_of(batches, base, request.get("index_interval_bytes", 4096))
        for suffix, data in zip((".index", ".timeindex"), built, strict=True):
            if log.with_suffix(suffix).read_bytes() != data:
                return f"segment {base}: {suffix} is not the index of its log"
        if log.stat().st_mtime_ns // 1_000_000 != expected.mtimes_ms[base]:
            return f"segment {base}: modification time"
    return ""
