"""A segment's files as a round hands them to a layout: nothing reads them, so they need not be a log."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from compactor.constants import LeaderEpoch, Offset, TimestampMs
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile


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
    return RemoteLogSegmentMetadata(
        id="lZ6vvmajTWKDBUTV6SQAtQ",
        start_offset=Offset(100),
        end_offset=Offset(2000),
        size_bytes=len(files["log"]),
        max_timestamp_ms=TimestampMs(1_700_000_000_000),
        mtime_ms=1_700_000_000_500,
        leader_epochs=(
            EpochEntry(epoch=LeaderEpoch(0), start_offset=Offset(100)),
            EpochEntry(epoch=LeaderEpoch(3), start_offset=Offset(900)),
        ),
        files={kind: SegmentFile(size=len(data), sha256=hashlib.sha256(data).hexdigest()) for kind, data in files.items()},
    ).model_copy(update=changes)
