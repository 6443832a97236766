"""Types and special values of offsets, epochs, times and ids that several folders share. Importing this module loads nothing else."""

from __future__ import annotations

from typing import Final, NewType

Offset = NewType("Offset", int)
"""Offset of a record in a partition, as stored values have it. Sums and differences of offsets are numbers."""
TimestampMs = NewType("TimestampMs", int)
"""Time in milliseconds since 1970, as stored values have it. Differences of times are numbers."""
LeaderEpoch = NewType("LeaderEpoch", int)
"""Kafka's leader epoch of a partition, which brokers count."""
NO_LEADER_EPOCH: Final = LeaderEpoch(-1)
"""Value that stands for an unknown leader epoch, as in Kafka."""
CompactorEpoch = NewType("CompactorEpoch", int)
"""Number under which one compactor leads a partition. Stored fields call it ``leader_epoch``."""
NO_COMPACTOR_EPOCH: Final = CompactorEpoch(-1)
"""Value that stands for no compactor epoch."""
TopicId = NewType("TopicId", str)
"""Id of a topic, as Kafka's class Uuid prints it."""
ByteCount = int
"""Number of bytes, as the result of a function whose name does not say so."""
EMPTY_TOPIC_ID: Final = TopicId("")
"""Value that stands for an unknown topic id, or for that of a topic that no broker has."""

MAX_OFFSET: Final = Offset(2**63 - 1)
"""Largest offset that a record can have. As an upper bound it means no bound."""
NO_TIMESTAMP: Final = -1
"""Value that stands for an absent timestamp (Kafka's RecordBatch.NO_TIMESTAMP)."""
NEVER_MS: Final = TimestampMs(2**63 - 1)
"""Time in milliseconds that never comes."""
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 86_400_000
