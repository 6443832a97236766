"""Compiles every kernel, or loads it from the cache, before anybody looks at the clock."""

from __future__ import annotations

import struct
import tempfile
import zlib
from pathlib import Path

from compactor.cleaner.offline import CleanRequest, clean_directory
from compactor.records.build import Producer, Row, batch, marker
from compactor.records.codecs import GZIP, LZ4, compress


def warm_up(*, gate: bool = True) -> None:
    """Cleans a log that has a little of everything, with both kinds of map. Milliseconds where the cache is filled.

    :param gate: the equivalence gate's kernels, too.
    """
    budget = 1 if gate else 0
    with tempfile.TemporaryDirectory(prefix="compactor-") as scratch:
        log_dir = Path(scratch) / "log"
        log_dir.mkdir()
        (log_dir / f"{0:020d}.log").write_bytes(b"".join(_batches()))
        for number, (first_dirty, map_entries) in enumerate([(3, None), (3, 1), *([(0, None)] if gate else [])]):
            request = CleanRequest(now_ms=1, first_dirty_offset=first_dirty, map_entries=map_entries, gate_budget_bytes=budget)
            clean_directory(log_dir, Path(scratch) / f"out{number}", request)


def _batches() -> list[bytes]:
    old = _entry(0, b"key", b"value", 0)
    found = [old, _entry(1, None, compress(GZIP, old), GZIP)]
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


def _entry(offset: int, key: bytes | None, value: bytes, codec: int) -> bytes:
    """Magic 1."""
    parts = (struct.pack(">i", -1 if part is None else len(part)) + (part or b"") for part in (key, value))
    checked = struct.pack(">bbq", 1, codec, 1) + b"".join(parts)
    return struct.pack(">qiI", offset, len(checked) + 4, zlib.crc32(checked)) + checked
