"""Records of the tier for applications: ranges of offsets, last values of all keys, and tier and broker as one log."""

from __future__ import annotations

from compactor.consumer.messages import (
    OFFSET_BEGINNING as OFFSET_BEGINNING,
    OFFSET_END as OFFSET_END,
    OFFSET_INVALID as OFFSET_INVALID,
    MessageLike as MessageLike,
    Place as Place,
)
from compactor.consumer.opening import open_consumer as open_consumer
from compactor.consumer.sources import ConsumerOptions as ConsumerOptions
from compactor.consumer.tiered import TieredConsumer as TieredConsumer
