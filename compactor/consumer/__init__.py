"""Records of the tier for applications: ranges of offsets, last values of all keys, and tier and broker as one log."""

from __future__ import annotations

from compactor.consumer.last_values import latest as latest
from compactor.consumer.messages import OFFSET_BEGINNING as OFFSET_BEGINNING
from compactor.consumer.messages import OFFSET_END as OFFSET_END
from compactor.consumer.messages import MessageLike as MessageLike
from compactor.consumer.messages import Place as Place
from compactor.consumer.tiered import ConsumerOptions as ConsumerOptions
from compactor.consumer.tiered import TieredConsumer as TieredConsumer
from compactor.consumer.tiered import open_consumer as open_consumer
