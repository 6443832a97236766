"""Special values of offsets and times that several folders share. Importing this module loads nothing else."""

from __future__ import annotations

from typing import Final

MAX_OFFSET: Final = 2**63 - 1
"""Largest offset that a record can have. As an upper bound it means no bound."""
NO_TIMESTAMP: Final = -1
"""Value that stands for an absent timestamp (Kafka's RecordBatch.NO_TIMESTAMP)."""
NEVER_MS: Final = 2**63 - 1
"""Time in milliseconds that never comes."""
HOUR_MS: Final = 3_600_000
