"""Drives the product on one golden round and compares with Kafka's result."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData
from tests.compare import directories_differ
from tests.golden_cases import Round


def agrees(case: Round, out: Path, *, threads: int = 1, gate: int = 1 << 24) -> None:
    request = OfflineCleanOptions(**case.request(), threads=threads, gate_budget_bytes=gate)
    if case.refused:
        with pytest.raises(BadData):
            clean_log_directory(case.log_dir, out, request)
        return
    summary = clean_log_directory(case.log_dir, out, request)
    assert summary.next_dirty_offset == case.expected["next_dirty_offset"]
    assert directories_differ(case.expected_dir, out, index_interval_bytes=request.index_interval_bytes, mtimes=False) == ""
    assert list(summary.segments) == [(int(path.stem), path.stat().st_size) for path in sorted(out.glob("*.log"))]
    for base, time in case.mtimes_after().items():
        for suffix in (".log", ".index", ".timeindex"):
            assert (out / f"{base:020}{suffix}").stat().st_mtime_ns == time * 1_000_000
