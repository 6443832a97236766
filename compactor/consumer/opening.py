"""A consumer from a configuration file: the composition root for applications."""

from __future__ import annotations

from collections.abc import Mapping

from compactor import config
from compactor.bootstrap import open_tier
from compactor.consumer.broker import ConfluentBroker
from compactor.consumer.tiered import ConsumerOptions, TieredConsumer
from compactor.metadata_topic.connection import KafkaConnection, load
from compactor.views.checkpoints import read_only


def open_consumer(
    settings: str | None = None,
    *,
    bootstrap_servers: str = "",
    properties: Mapping[str, str] | None = None,
    options: ConsumerOptions | None = None,
) -> TieredConsumer:
    """A consumer over the tier of a configuration file (None: where the commands look for one). It cannot write to the tier.

    :param bootstrap_servers: of the broker that is read where the tier ends; empty: the tier alone.
    :param properties: librdkafka's own (security.protocol, sasl.* ...).
    :raises UsageError: also where confluent-kafka is needed and missing.
    """
    options = options or ConsumerOptions()
    tier = read_only(open_tier(config.load(settings)))
    if not bootstrap_servers:
        return TieredConsumer(tier, options=options)
    load()
    connection = KafkaConnection(bootstrap_servers, dict(properties or {}))
    return TieredConsumer(tier, ConfluentBroker(connection, committed=options.committed), options)
