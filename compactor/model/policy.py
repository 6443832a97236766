"""Cleaning settings that decide the bytes of a round, as one value (I7)."""

from __future__ import annotations

from pydantic import Field

from compactor.model.base import StrictFrozenModel
from compactor.model.keyless import KeylessPolicy

MAX32 = 2**31 - 1


class CleanerPolicy(StrictFrozenModel):
    """Topic settings of Kafka's cleaner, in milliseconds and bytes.

    keyless_records: the default is what plans of versions without this setting did.
    """

    delete_retention_ms: int = 86_400_000
    segment_bytes: int = 1 << 30
    segment_index_bytes: int = 10 * 1024 * 1024
    index_interval_bytes: int = 4096
    max_decompressed_batch_bytes: int = 1 << 30
    keyless_records: KeylessPolicy = Field(default="drop", exclude_if=lambda value: value == "drop")
