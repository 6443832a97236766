"""Opening a consumer from a configuration file, or from one dictionary like that of confluent_kafka.Consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from compactor.bootstrap import open_tier
from compactor.brokers.metadata_topic.connection import KafkaConnection, load_confluent_kafka
from compactor.config import settings as config
from compactor.consumer.broker import ConfluentBrokerClient
from compactor.consumer.group import GROUP_PROPERTIES, ConfluentGroupClient
from compactor.consumer.membership import AutoCommitOptions
from compactor.consumer.sources import ConsumerOptions
from compactor.consumer.tiered import TieredConsumer
from compactor.errors import UsageError
from compactor.views.checkpoints import read_only_copy_of_tier

_RESETS: Final = {
    **dict.fromkeys(("earliest", "smallest", "beginning"), "earliest"),
    **dict.fromkeys(("latest", "largest", "end"), "latest"),
    **dict.fromkeys(("error", "none"), "error"),
}
_GROUP_CALLBACKS: Final = ("on_commit", "stats_cb")
_CONNECTION_CALLBACKS: Final = ("oauth_cb",)


@dataclass(frozen=True)
class ConsumerSettings:
    """A consumer's settings, sorted by the part of the program that uses them.

    tier_config: path of the tier's configuration file; None to search for it in the same places as the command-line tools.
    properties: settings of librdkafka for all connections.
    group_properties: further settings of librdkafka for the membership in a group, and callbacks.
    """

    tier_config: str | None = None
    bootstrap_servers: str = ""
    group_id: str = ""
    options: ConsumerOptions = field(default_factory=ConsumerOptions)
    commits: AutoCommitOptions = field(default_factory=AutoCommitOptions)
    properties: Mapping[str, Any] = field(default_factory=dict)
    group_properties: Mapping[str, Any] = field(default_factory=dict)


def parse_consumer_settings(properties: Mapping[str, Any]) -> ConsumerSettings:
    """Parse a consumer's dictionary of settings, and return it sorted by use. Names and defaults are those of Kafka; names of this library
    begin with ``tier.``.

    Raises UsageError for a setting that is not known or not valid.
    """
    left = dict(properties)
    reset = str(left.pop("auto.offset.reset", "latest"))
    if reset not in _RESETS:
        raise UsageError(f"auto.offset.reset cannot be {reset!r}", hint="Use earliest, latest or error")
    isolation = str(left.pop("isolation.level", "read_committed"))
    view = str(left.pop("tier.view", "all"))
    for name, value, known in (
        ("isolation.level", isolation, ("read_committed", "read_uncommitted")),
        ("tier.view", view, ("all", "latest")),
    ):
        if value not in known:
            raise UsageError(f"{name} cannot be {value!r}", hint=f"Use {' or '.join(known)}")
    options = ConsumerOptions(
        isolation="read_committed" if isolation == "read_committed" else "read_uncommitted",
        view="latest" if view == "latest" else "all",
        threads=_pop_integer_setting(left, "tier.threads", 4),
        queue_bytes=_pop_integer_setting(left, "tier.queue.bytes", 64 << 20),
        refresh_s=_pop_integer_setting(left, "tier.refresh.ms", 1000) / 1000,
        offset_reset=_RESETS[reset],  # type: ignore[arg-type]
        mode=left.pop("tier.mode", "remote_preferred"),
        skip_damaged=_pop_bool_setting(left, "tier.skip.damaged", default=False),
    )
    commits = AutoCommitOptions(
        auto_commit=_pop_bool_setting(left, "enable.auto.commit", default=True),
        interval_s=_pop_integer_setting(left, "auto.commit.interval.ms", 5000) / 1000,
        auto_store=_pop_bool_setting(left, "enable.auto.offset.store", default=True),
    )
    tier_config, servers, group_id = left.pop("tier.config", None), left.pop("bootstrap.servers", ""), left.pop("group.id", "")
    of_group = {name: left.pop(name) for name in list(left) if name in GROUP_PROPERTIES or name in _GROUP_CALLBACKS}
    for name, value in left.items():
        if name.startswith("tier."):
            names = ("tier.config", "tier.mode", "tier.view", "tier.threads", "tier.queue.bytes", "tier.refresh.ms", "tier.skip.damaged")
            raise UsageError(f"there is no setting {name}", hint=f"Did you mean {(get_close_matches(name, names, 1, 0) or names)[0]}?")
        if callable(value) and name not in _CONNECTION_CALLBACKS:
            raise UsageError(f"{name} is not supported", hint="Errors are raised, or returned by poll as messages")
    return ConsumerSettings(tier_config, servers, group_id, options, commits, left, of_group)


def open_consumer(
    settings: str | Mapping[str, Any] | None = None,
    *,
    bootstrap_servers: str = "",
    properties: Mapping[str, str] | None = None,
    options: ConsumerOptions | None = None,
) -> TieredConsumer:
    """Open a consumer of the tier that a configuration file describes. The consumer cannot write to the tier.

    :param settings: path of the configuration file; None to look for the file where the commands do. Or a dictionary like
        confluent_kafka's, with the path under ``tier.config``; the other parameters are then not allowed.
    :param bootstrap_servers: brokers to read where the tier ends; empty to read the tier alone.
    :param properties: properties of librdkafka (security.protocol, sasl.* ...).
    :raises UsageError: the configuration is invalid, or confluent-kafka is needed and not installed.
    """
    if isinstance(settings, Mapping):
        if bootstrap_servers or properties or options:
            raise UsageError("settings are given twice", hint="A dictionary holds all of them")
        return _open_consumer_from_settings(parse_consumer_settings(settings))
    return _open_consumer_from_settings(
        ConsumerSettings(settings, bootstrap_servers, "", options or ConsumerOptions(), properties=properties or {})
    )


def _open_consumer_from_settings(settings: ConsumerSettings) -> TieredConsumer:
    """Return a consumer with these settings. Raises UsageError if they contradict each other or confluent-kafka is needed and missing."""
    options, servers = settings.options, settings.bootstrap_servers
    if settings.group_id and not servers:
        why = "a group needs brokers, even with tier.mode remote_only: its coordinator assigns partitions and keeps committed offsets"
        raise UsageError(why, hint="Set bootstrap.servers, or leave out group.id and use assign")
    if not servers and options.mode.startswith("kafka"):
        raise UsageError(f"tier.mode {options.mode} needs brokers", hint="Set bootstrap.servers")
    tier = read_only_copy_of_tier(open_tier(config.load_settings(settings.tier_config)))
    if not servers:
        return TieredConsumer(tier, options=options)
    load_confluent_kafka()
    connection = KafkaConnection(servers, settings.properties)
    broker = None if options.mode == "remote_only" else ConfluentBrokerClient(connection, read_committed=options.is_read_committed)
    group = ConfluentGroupClient(connection, settings.group_id, settings.group_properties) if settings.group_id else None
    return TieredConsumer(tier, broker, options, group, settings.commits)


def _pop_integer_setting(remaining_settings: dict[str, Any], name: str, default: int) -> int:
    """Remove a setting from ``remaining_settings`` and return it as a whole number. Raises UsageError if it is not one."""
    value = remaining_settings.pop(name, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} cannot be {value!r}", hint="Use a whole number") from None


def _pop_bool_setting(remaining_settings: dict[str, Any], name: str, *, default: bool) -> bool:
    """Remove a setting from ``remaining_settings`` and return it as a bool. Raises UsageError if it is not one."""
    value = str(remaining_settings.pop(name, default)).lower()
    if value not in ("true", "false"):
        raise UsageError(f"{name} cannot be {value!r}", hint="Use true or false")
    return value == "true"
