"""Types and special values of offsets, epochs, times and ids. Loads nothing else."""

from __future__ import annotations

from typing import Final, NewType

Offset = NewType("Offset", int)
"""Stored offset of a record in a partition. Sums and differences of offsets are numbers."""
TimestampMs = NewType("TimestampMs", int)
"""Stored time in milliseconds since 1970. Differences of times are numbers."""
LeaderEpoch = NewType("LeaderEpoch", int)
"""Kafka's leader epoch of a partition."""
NO_LEADER_EPOCH: Final = LeaderEpoch(-1)
"""Unknown leader epoch, as in Kafka."""
CompactorEpoch = NewType("CompactorEpoch", int)
"""Number under which one compactor leads a partition. Stored fields call it ``leader_epoch``."""
NO_COMPACTOR_EPOCH: Final = CompactorEpoch(-1)
TopicId = NewType("TopicId", str)
"""Id of a topic, as Kafka's class Uuid prints it."""
EMPTY_TOPIC_ID: Final = TopicId("")
"""Unknown topic id, or that of a topic that no broker has."""

MAX_OFFSET: Final = Offset(2**63 - 1)
"""As an upper bound it means no bound."""
NO_TIMESTAMP: Final = -1
"""Kafka's RecordBatch.NO_TIMESTAMP."""
NEVER_MS: Final = TimestampMs(2**63 - 1)
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 86_400_000
