"""Segments as the control log records them, and their files as a round hands them to a layout: nothing reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from compactor.constants import LeaderEpoch, Offset, TimestampMs
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile


def make_segment(
    name: str, start: int, end: int, *, size: int = 100, at_ms: int = 1, epochs: Sequence[tuple[int, int]] = (), **changes: Any
) -> RemoteLogSegmentMetadata:
    """A segment as the control log records it. ``at_ms``: its largest time, and its file's; ``epochs``: one, from ``start`` on."""
    return RemoteLogSegmentMetadata(
        id=name,
        start_offset=Offset(start),
        end_offset=Offset(end),
        size_bytes=size,
        max_timestamp_ms=TimestampMs(at_ms),
        mtime_ms=at_ms,
        leader_epochs=tuple(EpochEntry(LeaderEpoch(epoch), Offset(first)) for epoch, first in epochs or ((0, start),)),
        files={"log": SegmentFile(size=size)},
    ).model_copy(update=changes)


def files_of(log_bytes: int = 150_000, transactions: bool = True) -> dict[str, bytes]:
    lines = b"".join(b"%08d a line that repeats itself;" % number for number in range(log_bytes // 33 + 1))
    head = b"\0" * 16 + b"\x02" + b"\0" * 6  # of a v2 batch that is not compressed
    files = {
        "log": (head + lines)[:log_bytes],
        "index": bytes(range(80)),
        "timeindex": b"",
        "snapshot": b"s" * 56,
        "leader-epoch-checkpoint": b"0\n1\n0 0\n",
    }
    return files | ({"txnindex": b"t" * 34} if transactions else {})


def segment_of(files: Mapping[str, bytes], **changes: object) -> RemoteLogSegmentMetadata:
    described = {kind: SegmentFile(size=len(data), sha256=hashlib.sha256(data).hexdigest()) for kind, data in files.items()}
    return make_segment(
        "lZ6vvmajTWKDBUTV6SQAtQ", 100, 2000, size=len(files["log"]), at_ms=1_700_000_000_000, epochs=((0, 100), (3, 900)),
        **{"mtime_ms": 1_700_000_000_500, "files": described, **changes},
    )  # fmt: skip
