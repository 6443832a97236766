"""Handle of one tier, which every command, the daemon, the agent and the Spark driver work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from compactor.access.changes import ChangeNotes
from compactor.access.identity import TierIdentity
from compactor.access.metadata import BrokerManagedMetadata, ListedMetadata, TierMetadata
from compactor.config.settings import Cleaner, Settings
from compactor.control.identity import Ownership
from compactor.control.logs import HASH_KEY_BYTES, CatalogLog, PartitionLog, open_catalog, open_partition
from compactor.control.ports import Lease, Ports, Retention
from compactor.control.state import PartitionState
from compactor.errors import CompactorError, UsageError
from compactor.local.cache import LocalState
from compactor.model.ids import TopicPartition
from compactor.storage.counting import Counters
from compactor.storage.port import ObjectStore
from compactor.tier.kinds import TierKind, tier_kind
from compactor.tier.sidecars import Sidecars

if TYPE_CHECKING:
    from compactor.brokers.view import BrokerMetadata
    from compactor.round.engines import Engine
    from compactor.tier.layouts.pinterest.listing import ListedTier

READER_THREADS = 16
"""Number of logs that are read at once. They wait for the store, not for each other."""


class Engines(Protocol):
    """Choice of the engine for a partition's rounds; None for this process."""

    def __call__(self, tier: Tier, name: TopicPartition) -> Engine | None: ...


@dataclass(frozen=True)
class Tier:
    """One process's access to one tier.

    counters: all requests and bytes, of data and control objects.
    local: cache on this machine, from which control logs are folded on; None to read everything from the tier.
    engines: chooses the engine for a partition's rounds; None if this process does the work.
    metadata: source of partitions and live segments.
    """

    settings: Settings
    ports: Ports
    catalog: CatalogLog
    counters: Counters
    local: LocalState | None = None
    engines: Engines | None = None
    ownership: Ownership = field(default_factory=Ownership)
    metadata: TierMetadata = field(default_factory=TierMetadata)

    @cached_property
    def kind(self) -> TierKind:
        """Capabilities of this kind of tier."""
        return tier_kind(self.settings)

    @property
    def identity(self) -> TierIdentity:
        """The tier's identity, its owner and its secret."""
        return TierIdentity(self.settings, self.ports, self.catalog, self.ownership, self.metadata, self.local)

    @property
    def changes(self) -> ChangeNotes:
        """Notes about folded logs, for other processes and for local state."""
        return ChangeNotes(self.ports, self.catalog, self.local, self.kind.has_complete_log)

    @property
    def lease(self) -> Lease:
        return Lease(self.settings.lease.ttl_ms, self.settings.lease.stall_ms)

    @property
    def retention(self) -> Retention:
        """Retention of replaced objects, as [publish] sets it."""
        return configured_retention(self.settings)

    @property
    def state_dir(self) -> Path:
        return Path(self.settings.tier.state_dir)

    @property
    def brokers(self) -> BrokerMetadata:
        """The brokers' metadata. Raises UsageError if the tier is not broker-managed."""
        if not isinstance(self.metadata, BrokerManagedMetadata):
            raise UsageError(f"no broker writes the tier at {self.ports.layout.url}", hint="That is for tiers of kind kafka")
        return self.metadata.brokers

    @property
    def listed(self) -> ListedTier:
        """The listing of a listed tier. Raises UsageError for another tier."""
        if not isinstance(self.metadata, ListedMetadata):
            raise UsageError(f"the segments of the tier at {self.ports.layout.url} are not found by listing")
        return self.metadata.listed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the local cache, so that the next process on this machine may write it."""
        if self.local is not None:
            self.local.close()

    def cleaner_for(self, topic: str) -> Cleaner:
        """Return [cleaner] as it holds for a topic. What brokers have set on the topic takes precedence. Raises UsageError."""
        return self.settings.cleaner_for(topic, self.metadata.topic_settings(topic) or {})

    def over(self, *, control: ObjectStore | None = None, data: ObjectStore | None = None) -> Tier:
        """Return the same tier over other stores, such as stores that refuse writes or can be interrupted."""
        ports = replace(self.ports, control=control or self.ports.control)
        if data is not None:
            ports = replace(ports, data=data, layout=self.kind.layout(self.settings, data, self.metadata.topic_id))
        return replace(self, ports=ports, catalog=open_catalog(ports) if control else self.catalog)

    def partitions(self, wanted: list[str] | None = None) -> list[TopicPartition]:
        """Return all partitions of the tier, or the named ones, each once. Raises UsageError for one that the tier does not hold."""
        known = self.metadata.partition_names(self.identity.read)
        if not wanted:
            return known
        named = list(dict.fromkeys(TopicPartition.parse(text) for text in wanted))
        for name in named:
            if name not in known:
                raise UsageError(f"the tier holds no partition {name}", hint="`topics` lists what it holds")
        return named

    def open(self, name: TopicPartition, *, leads: bool = False) -> PartitionLog:
        """Return a partition's control log, loaded from local state if possible. Every command gets a partition's state from here.

        The log must not end below what the catalog, as last folded, knows of it.

        :param leads: whether the caller runs a round. Rounds go by the log alone, into which their leader writes first what others have
            changed (*segments mirrored*); all others see it through the metadata source.
        """
        view = None if leads else self.metadata.view(name)
        log = open_partition(self.ports, name, self.floor(name), key=self.log_key(name), view=view)
        kept = self.local.state(name) if self.local and self.local.bound else None
        if kept:
            log.load(*kept)
        return log

    def log_key(self, name: TopicPartition) -> str:
        """Return the name of a partition's control log. It contains the brokers' topic id, because a recreated topic is another one."""
        topic_id = self.metadata.topic_id(name)
        return f"{name}-{topic_id}" if topic_id else str(name)

    def floor(self, name: TopicPartition) -> int:
        """Return the slot that a partition's log is known to have reached, by the catalog as last folded."""
        return self.catalog.state.reached.get(self.log_key(name), 0)

    def as_read(self, state: PartitionState) -> PartitionState:
        """Return the state that readers see."""
        view = self.metadata.view(state.name)
        return view(state) if view else state

    def first_readable_offset(self, state: PartitionState) -> int:
        """Return the first offset that readers may see. Segments below it may still be in the tier, although nobody may read them."""
        return max(state.log_start, self.metadata.log_start(state.name))

    def sidecars(self, name: TopicPartition) -> Sidecars:
        """Return the sidecars of a partition, of which there may be none. Raises UsageError if there is no tier."""
        hash_key = self.identity.hash_key() if self.identity.has_hash_key() else bytes(HASH_KEY_BYTES)
        kept = self.local if self.local and self.local.bound else None
        return Sidecars(self.ports.control, self.open(name).prefix, hash_key, kept)

    def read_logs(
        self, names: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None
    ) -> list[PartitionLog | CompactorError]:
        """Return each partition's folded log, or the error with which reading it failed, in the given order."""

        def read(name: TopicPartition) -> PartitionLog | CompactorError:
            log = self.open(name)
            try:
                log.refresh()
            except CompactorError as error:
                return error
            finally:
                on_partition()
            return log

        with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="logs") as pool:
            return list(pool.map(read, names))


def configured_retention(settings: Settings) -> Retention:
    """Return the retention of replaced objects that [publish] sets."""
    publish = settings.publish
    return Retention(publish.grace_ms, publish.undo_window_ms, publish.orphan_age_ms)
