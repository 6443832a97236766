"""Compiles every kernel, or loads it from the cache, before anybody looks at the clock."""

from __future__ import annotations

import tempfile
from pathlib import Path

from compactor.cleaner.offline import CleanRequest, clean_directory
from compactor.records.build import Row, batch


def warm_up() -> None:
    """Cleans a log of a few records, with both kinds of map. Milliseconds where the cache is filled."""
    with tempfile.TemporaryDirectory(prefix="compactor-") as scratch:
        log_dir = Path(scratch) / "log"
        log_dir.mkdir()
        batches = [batch([Row(offset, 1, b"key", value) for offset, value in ((2 * i, b"value"), (2 * i + 1, None))], codec=i % 2) for i in range(4)]
        (log_dir / f"{0:020d}.log").write_bytes(b"".join(batches))
        for number, map_entries in enumerate((None, 1)):
            clean_directory(log_dir, Path(scratch) / f"out{number}", CleanRequest(now_ms=1, first_dirty_offset=2, map_entries=map_entries))
