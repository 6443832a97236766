"""Compiles the kernels, or loads them from the cache, before anybody looks at the clock.

Without those that few logs need, which are compiled when they are met: of message formats v0 and v1, of snappy, and of a bounded map.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from compactor.cleaner.offline import CleanRequest, clean_directory
from compactor.records.build import Producer, Row, batch, marker
from compactor.records.codecs import LZ4


def warm_up() -> None:
    """Cleans a log that has a little of everything. A tenth of a second where the cache is filled."""
    with tempfile.TemporaryDirectory(prefix="compactor-") as scratch:
        log_dir = Path(scratch) / "log"
        log_dir.mkdir()
        (log_dir / f"{0:020d}.log").write_bytes(b"".join(_batches()))
        # In memory, and on disk with a handful of ranges: a budget of a byte would have thousands, which cost more than all the rest.
        for number, (first_dirty, budget) in enumerate([(3, 1 << 20), (3, 1 << 12)]):
            request = CleanRequest(now_ms=1, first_dirty_offset=first_dirty, gate_budget_bytes=budget)
            clean_directory(log_dir, Path(scratch) / f"out{number}", request)


def _batches() -> list[bytes]:
    found = []
    for offset, codec in ((2, 0), (5, LZ4), (8, 0)):
        headers = ((b"\xff", b"no UTF-8"),)
        rows = [Row(offset, 1, b"key", b"value", headers), Row(offset + 1, 1, b"key", None), Row(offset + 2, 2, b"another", b"", headers)]
        found.append(batch(rows, codec=codec))
    found.append(batch([Row(11, 1, b"key", b"value")], producer=Producer(1, 0, 0, True)))
    found.append(marker(12, 1, 1, 0, commit=False))
    found.append(
        batch([Row(offset, 1, str(offset).encode(), b"") for offset in range(13, 413)])
    )  # more than the smallest set of keys takes
    return found
