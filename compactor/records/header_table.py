"""The batch table of a segment of v2 whose bytes are not at hand, made of its batches' headers."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.records.batches import FRAME, BatchTable, Bytes, Int64s

_FIELDS: Final[np.dtype[np.void]] = np.dtype(
    {  # type: ignore[call-overload]
        "base": (">i8", 0),
        "length": (">i4", 8),
        "leader_epoch": (">i4", 12),
        "magic": ("i1", 16),
        "attributes": (">i2", 21),
        "delta": (">i4", 23),
        "base_ms": (">i8", 27),
        "max_ms": (">i8", 35),
        "producer": (">i8", 43),
        "epoch": (">i2", 51),
        "sequence": (">i4", 53),
        "count": (">i4", 57),
    }
)


def table_of(headers: Bytes, control: npt.NDArray[np.int8], coordinator_epoch: npt.NDArray[np.int32]) -> BatchTable:
    """What ``scan_batches`` makes of batches that lie one behind the other. ``headers``: shape (batches, 61)."""
    rows = np.ascontiguousarray(headers).view(_FIELDS).reshape(-1)
    size: Int64s = rows["length"].astype(np.int64) + FRAME
    base: Int64s = rows["base"].astype(np.int64)
    return BatchTable(
        position=np.cumsum(size) - size,
        size=size,
        base_offset=base,
        last_offset=base + rows["delta"].astype(np.int64),
        base_timestamp=rows["base_ms"].astype(np.int64),
        max_timestamp=rows["max_ms"].astype(np.int64),
        producer_id=rows["producer"].astype(np.int64),
        magic=rows["magic"].astype(np.int8),
        attributes=rows["attributes"].astype(np.int16),
        leader_epoch=rows["leader_epoch"].astype(np.int32),
        producer_epoch=rows["epoch"].astype(np.int16),
        base_sequence=rows["sequence"].astype(np.int32),
        count=rows["count"].astype(np.int32),
        control=control.copy(),
        coordinator_epoch=coordinator_epoch.copy(),
    )


def part_of(table: BatchTable, rows: Int64s) -> BatchTable:
    """Some of its batches, ascending, as they lie one behind the other in a file of their own."""
    columns = {name: getattr(table, name)[rows] for name in BatchTable.__slots__}
    columns["position"] = np.cumsum(columns["size"]) - columns["size"]
    return BatchTable(**columns)
