"""Records of the tier for applications: ranges of offsets, last values of all keys, and tier and broker as one log."""

from __future__ import annotations

from compactor.features.consumer.sources import ConsumerOptions as ConsumerOptions
from compactor.features.consumer.tiered import TieredConsumer as TieredConsumer, open_consumer as open_consumer
from compactor.read.records import (
    OFFSET_BEGINNING as OFFSET_BEGINNING,
    OFFSET_END as OFFSET_END,
    OFFSET_INVALID as OFFSET_INVALID,
    MessageLike as MessageLike,
    Place as Place,
)
