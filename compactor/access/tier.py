"""Handle of one tier, with its identity and change notes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from compactor.access.metadata import BrokerManagedTierMetadataSource, ListedTierMetadataSource, TierMetadataSource
from compactor.config.sections import SegmentReplacementCosts
from compactor.config.settings import CleanerSettings, Settings
from compactor.constants import TopicId
from compactor.control.identity import DataRootOwnershipCheckByTierId, control_store_problem
from compactor.control.incarnations import latest_incarnation_among, latest_incarnations
from compactor.control.logs import (
    HASH_KEY_BYTES,
    CatalogLog,
    PartitionLog,
    create_tier,
    open_catalog,
    open_partition_log,
    publish_hints,
    record_control_log_lengths,
    record_deletion_checks,
    require_matching_tier_settings,
)
from compactor.control.ports import EnvironmentPorts, LeaseDurations, ObjectRetention
from compactor.control.records import DeletionCheckResult
from compactor.control.state import CatalogState, PartitionState
from compactor.errors import CompactorError, StoreError, UsageError
from compactor.local.cache import LocalState
from compactor.model.ids import TopicPartition
from compactor.storage.port import ObjectStore
from compactor.storage.schemes import store_kind
from compactor.storage.wrappers import RequestCounters
from compactor.tier.kinds import TierKind, read_only_tier_error, tier_kind
from compactor.tier.sidecars import SidecarStore

if TYPE_CHECKING:
    from compactor.adapters.brokers.view import BrokerMetadata
    from compactor.round.compaction import RoundReport, Runner
    from compactor.tier.ports import ListedTier


@dataclass(frozen=True)
class TierIdentity:
    settings: Settings
    ports: EnvironmentPorts
    catalog: CatalogLog
    ownership: DataRootOwnershipCheckByTierId
    metadata: TierMetadataSource
    local: LocalState | None

    def read_catalog(self) -> CatalogState:
        """Raises UsageError if there is no tier at the configured URL, or if its identity differs from the configuration."""
        if (recorded := self.metadata.catalog_from_object_listing()) is not None:
            return recorded
        local = self.local
        kept = local.cached_catalog() if local and not local.is_bound_to_tier else None
        if kept:
            self.catalog.continue_from_cached_state(kept.state, kept.mark)
        state = self.catalog.refresh()
        if not state.tier_id and self.metadata.exists_elsewhere:
            return state  # an identity is needed only by a process that writes into the control store
        if not state.tier_id:
            self.catalog.refresh_and_check_gaps()
            self.ownership.require_not_foreign_root(self.ports, state)
            self.ownership.require_no_broker_objects(self.ports)
            raise UsageError(
                f"there is no tier at {self.ports.layout.url} yet", hint="`import` makes one; check tier.url in the configuration"
            )
        self.ownership.tier_id = state.tier_id
        self._require_own_catalog(state)
        if local:
            if not local.is_bound_to_tier:
                local.bind_to_tier(
                    state.tier_id, is_from_diverged_copy=self.catalog.diverged or (kept is not None and state.slot < kept.state.slot)
                )
            local.cache_catalog(state, self.catalog.state_identity())
        return state

    def read_or_create_catalog(self, hash_key_of_new_tier: bytes = b"") -> CatalogState:
        """Raises UsageError if the data belong to another tier, or if tiers of this kind are never written.

        :param hash_key_of_new_tier: a random one if empty. An existing tier keeps its key.
        """
        tier = self.settings.tier
        if not tier_kind(self.settings).compacts:
            raise read_only_tier_error(self.settings)
        self._require_unowned_root()
        url = "" if self.ownership.ours else self.settings.tier_url
        cluster_id = self.metadata.cluster_id()
        state = create_tier(
            self.ports,
            kind=tier.kind,
            layout=tier.layout,
            key_entropy_bits=tier.key_entropy_bits,
            url=url,
            cluster_id=cluster_id,
            hash_key=hash_key_of_new_tier,
        )
        self.ownership.tier_id = state.tier_id
        self._require_own_catalog(state)
        self.ports.require_data_root_ownership(repeat_if_passed_before=True)
        return state

    def _require_unowned_root(self) -> None:
        if not self.catalog.refresh().tier_id:
            self.ownership.require_unowned_root(self.ports, self.catalog.refresh_and_check_gaps())

    def check_can_exist(self) -> None:
        """Raise UsageError if this tier neither exists at the configured URL nor may be created there."""
        self._require_unowned_root()
        if self.catalog.state.tier_id:
            self.require_root_not_foreign()

    def require_root_not_foreign(self) -> None:
        self.ownership.require_not_foreign_root(self.ports, self.read_catalog())

    def _require_own_catalog(self, state: CatalogState) -> None:
        tier = self.settings.tier
        require_matching_tier_settings(state, self.ports.layout.url, tier.kind, tier.layout, tier.key_entropy_bits)
        problem = control_store_problem(state, self.settings.tier_url, self.metadata.cluster_id() if state.cluster_id else "")
        if problem:
            raise UsageError(
                f"the control store {self.ports.control.url} belongs to another tier: {problem}",
                hint="Nothing was changed. Correct tier.url or tier.control_url: each tier needs its own control store",
            )

    def hash_key(self) -> bytes:
        """SipHash key of 16 bytes, which never changes. Raises UsageError if the tier has none."""
        if not tier_kind(self.settings).compacts:
            raise read_only_tier_error(self.settings)
        known = self.catalog.state
        found = known if known.tier_id else self.read_catalog()
        if not found.hash_key:
            raise UsageError(
                f"nothing was ever written for the tier at {self.ports.layout.url} into the control store",
                hint="Set control_url under [tier] to the control store; `bloom rebuild` creates one",
            )
        return bytes.fromhex(found.hash_key)

    def may_have_hash_key(self) -> bool:
        """Reads the catalog of a broker-managed tier."""
        return tier_kind(self.settings).compacts and (not self.metadata.exists_elsewhere or bool(self.read_catalog().hash_key))

    def temporary_hash_key(self) -> bytes:
        """For hashes that are not stored: if the tier has no key, one derived from its URL."""
        return self.hash_key() if self.may_have_hash_key() else hashlib.sha256(self.settings.tier_url.encode()).digest()[:HASH_KEY_BYTES]


@dataclass(frozen=True)
class ControlLogChangeNotifier:
    """Writer of notes in the tier-wide log and in the local cache.

    hints: whether other processes learn of changes from hints. If not, the brokers' metadata shows them, and only lengths are recorded.
    """

    ports: EnvironmentPorts
    catalog: CatalogLog
    local: LocalState | None
    hints: bool

    def latest_hint(self, partition: TopicPartition) -> int:
        """Return the hint's number, by the catalog as last read; 0 if there is none.

        Call this before reading the partition's control log: a hint that arrives during the read then has a greater number, and the log is
        read again.
        """
        return self.catalog.state.partitions.get(str(partition), 0)

    def cache_state(self, log: PartitionLog, hint_number: int) -> None:
        """:param hint_number: from ``latest_hint``, taken before the log was read."""
        mark = log.state_identity() if self.local and self.local.is_bound_to_tier else None
        if mark and self.local:
            self.local.cache_partition_state(log.state, mark, hint_number, self.ports.clock_ms())

    def announce_changed_control_logs(self, logs: Sequence[PartitionLog]) -> None:
        """In one record of the tier-wide log, with the length of each."""
        if self.hints:
            publish_hints(self.catalog, {log.state.topic_partition: log.confirmed_slot() for log in logs})
        else:
            self.record_lengths(logs)

    def record_lengths(self, logs: Sequence[PartitionLog]) -> None:
        """Later readers then notice lost records. Store errors are ignored."""
        with suppress(StoreError):
            record_control_log_lengths(self.catalog, logs)

    def record_deletion_checks(self, result_by_control_log_name: Mapping[str, DeletionCheckResult]) -> None:
        """By ``topic-partition``. Store errors are ignored."""
        with suppress(StoreError):
            record_deletion_checks(self.catalog, result_by_control_log_name)


READER_THREADS = 16
"""Number of logs that are read at once. They wait for the store, not for each other."""


class RemoteRoundRunner(Protocol):
    def run_round_remotely(
        self, tier: Tier, state: PartitionState, now_ms: int, *, force: bool, check_stop: Callable[[], None]
    ) -> RoundReport | str:
        """Return the report; if this process has to run the round, the reason, empty if there is none worth reporting.

        :param check_stop: raises an error to end the wait.

        Raises the round's error, Leased if the other process is busy, and the errors of ``check_stop``.
        """


@dataclass(frozen=True)
class Tier:
    """One process's access to one tier.

    local: None to read everything from the tier.
    runners: chooses where a partition is compacted; None, also as its answer: in this process.
    remote_rounds: for large partitions; None if this process runs all.
    """

    settings: Settings
    ports: EnvironmentPorts
    catalog: CatalogLog
    counters: RequestCounters
    local: LocalState | None = None
    runners: Callable[[Tier, TopicPartition], Runner | None] | None = None
    remote_rounds: RemoteRoundRunner | None = None
    ownership: DataRootOwnershipCheckByTierId = field(default_factory=DataRootOwnershipCheckByTierId)
    metadata: TierMetadataSource = field(default_factory=TierMetadataSource)

    @cached_property
    def kind(self) -> TierKind:
        return tier_kind(self.settings)

    @property
    def identity(self) -> TierIdentity:
        return TierIdentity(self.settings, self.ports, self.catalog, self.ownership, self.metadata, self.local)

    @property
    def change_notifier(self) -> ControlLogChangeNotifier:
        return ControlLogChangeNotifier(self.ports, self.catalog, self.local, self.kind.is_compactor_managed)

    @property
    def lease(self) -> LeaseDurations:
        return LeaseDurations(self.settings.lease.ttl_ms, self.settings.lease.stall_ms)

    @property
    def retention(self) -> ObjectRetention:
        return configured_object_retention(self.settings)

    @property
    def state_dir(self) -> Path:
        return Path(self.settings.tier.state_dir)

    @property
    def broker_metadata(self) -> BrokerMetadata:
        """Raises UsageError if the tier is not broker-managed."""
        if not isinstance(self.metadata, BrokerManagedTierMetadataSource):
            raise UsageError(f"no broker writes the tier at {self.ports.layout.url}", hint="That is for tiers of kind kafka")
        return self.metadata.brokers

    @property
    def listed_tier(self) -> ListedTier:
        """Raises UsageError if the tier is not a listed one."""
        if not isinstance(self.metadata, ListedTierMetadataSource):
            raise UsageError(f"the segments of the tier at {self.ports.layout.url} are not found by listing")
        return self.metadata.listed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Let the next process write the local cache."""
        if self.local is not None:
            self.local.close()

    def topic_settings_in_kafka(self, topic: str) -> Mapping[str, str] | None:
        """By Kafka's names; None if the tier has no such topic."""
        return self.metadata.topic_settings_in_kafka(topic, lambda: self.catalog.state)

    def source_of_topic_setting(self, topic: str, key: str) -> str:
        """Return a file, an environment variable, ``topic NAME`` (set on the topic in Kafka), or ``default``."""
        cleaner = self.settings.cleaner_settings_for_topic(topic)
        if key == "retention_ms" and cleaner.cleanup_policy != "compact" and self.metadata.broker_retention_ms(topic) is not None:
            return f"topic {topic}"
        return self.settings.source_of_topic_setting(topic, key, self.topic_settings_in_kafka(topic) or {})

    def cleaner_settings_for_topic(self, topic: str) -> CleanerSettings:
        """The topic's settings in Kafka override section [cleaner], and the matching [topics] table overrides both. Raises UsageError if
        they contradict each other.
        """
        cleaner = self.settings.cleaner_settings_for_topic(topic, self.topic_settings_in_kafka(topic) or {})
        expires_ms = self.metadata.broker_retention_ms(topic) if cleaner.cleanup_policy != "compact" else None
        cleaner = cleaner if expires_ms is None else cleaner.model_copy(update={"retention_ms": expires_ms})
        if cleaner.min_cleanable_dirty_ratio != "auto":
            return cleaner
        replaced_ms = max(self.retention.grace_ms, self.retention.undo_window_ms)
        return cleaner.with_segment_replacement_costs(SegmentReplacementCosts(store_kind(self.settings.tier_url).prices, replaced_ms))

    def with_stores(self, *, control: ObjectStore | None = None, data: ObjectStore | None = None) -> Tier:
        ports = replace(self.ports, control=control or self.ports.control)
        if data is not None:
            ports = replace(ports, data=data, layout=self.kind.layout(self.settings, data, self.metadata.topic_id))
        return replace(self, ports=ports, catalog=open_catalog(ports) if control else self.catalog)

    def list_partitions(self, names: list[str] | None = None) -> list[TopicPartition]:
        """In all incarnations, or the named ones, each once. ``orders-0`` names the latest incarnation, ``orders-0~1`` the first one.
        Raises UsageError for a partition that the tier does not hold.
        """
        known = self.metadata.list_topic_partitions(self.identity.read_catalog)
        if not names:
            return known

        withdrawn = self.catalog.state.withdrawn_partitions

        def parse_partition_name(text: str) -> TopicPartition:
            if text.endswith("~1"):
                return TopicPartition.parse(text.removesuffix("~1"))
            name = TopicPartition.parse_partition_store_prefix(text)
            return name if "~" in text else latest_incarnation_among(name, known, withdrawn)

        named = list(dict.fromkeys(map(parse_partition_name, names)))
        for name in named:
            if name not in known:
                raise no_such_partition_error(str(name), known)
        return named

    def list_latest_incarnations(self) -> list[TopicPartition]:
        return latest_incarnations(self.list_partitions(), self.catalog.state.withdrawn_partitions)

    def latest_incarnation(self, partition: TopicPartition) -> TopicPartition:
        state = self.catalog.state
        return latest_incarnation_among(partition, state.incarnations_of_partition(partition), state.withdrawn_partitions)

    def incarnation_with_topic_id(self, partition: TopicPartition, topic_id: TopicId) -> TopicPartition:
        known = [each for each in self.list_partitions() if each.first_incarnation == partition.first_incarnation]
        for each in reversed(known):
            if self.open_partition_log(each).refresh().topic_id == topic_id:
                return each
        raise UsageError(
            f"the tier holds no partition {partition.first_incarnation} of topic id {topic_id}", hint="`topics` lists the ids that it has"
        )

    def open_partition_log(self, partition: TopicPartition, *, caller_runs_round: bool = False) -> PartitionLog:
        """Use the local cache if possible.

        :param caller_runs_round: a round sees only the control log, because it records the brokers' changes there itself. For other callers
        the state contains these changes already.
        """
        view = None if caller_runs_round else self.metadata.reader_view(partition)
        log = open_partition_log(
            self.ports,
            partition,
            self.min_log_slot(partition),
            control_log_name=self.control_log_name(partition),
            convert_to_reader_state=view,
        )
        kept = self.local.cached_partition_state(partition) if self.local and self.local.is_bound_to_tier else None
        if kept:
            log.continue_from_cached_state(*kept)
        return log

    def control_log_name(self, partition: TopicPartition) -> str:
        """If brokers write the tier, the name contains their topic id, so that a recreated topic gets a log of its own."""
        topic_id = self.metadata.topic_id(partition)
        return f"{partition}-{topic_id}" if topic_id else str(partition)

    def min_log_slot(self, partition: TopicPartition) -> int:
        """By the catalog as last read; 0 if none is recorded. A shorter log has lost records."""
        return self.catalog.state.reached.get(self.control_log_name(partition), 0)

    def reader_state(self, state: PartitionState) -> PartitionState:
        view = self.metadata.reader_view(state.topic_partition)
        return view(state) if view else state

    def first_readable_offset(self, state: PartitionState) -> int:
        """Segments below it may still be in the tier."""
        return max(state.log_start, self.metadata.broker_log_start_offset(state.topic_partition))

    def open_sidecar_store(self, partition: TopicPartition) -> SidecarStore:
        hash_key = self.identity.hash_key() if self.identity.may_have_hash_key() else bytes(HASH_KEY_BYTES)
        kept = self.local if self.local and self.local.is_bound_to_tier else None
        log = open_partition_log(self.ports, partition, control_log_name=self.control_log_name(partition))  # without its cached state
        return SidecarStore(self.ports.control, log.prefix, hash_key, kept)

    def read_logs(
        self, partitions: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None
    ) -> list[PartitionLog | CompactorError]:
        """In parallel. Return for each partition, in the given order, its log or the error."""

        def read_log(partition: TopicPartition) -> PartitionLog | CompactorError:
            log = self.open_partition_log(partition)
            try:
                log.refresh()
            except CompactorError as error:
                return error
            finally:
                on_partition()
            return log

        with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="logs") as pool:
            return list(pool.map(read_log, partitions))


def no_such_partition_error(given_name: str, partitions: Sequence[TopicPartition]) -> UsageError:
    near = get_close_matches(given_name, dict.fromkeys([*map(str, partitions), *(name.topic for name in partitions)]), n=1)
    hint = f"Did you mean {near[0]}?" if near else "`topics` lists what it holds"
    return UsageError(f"the tier holds no partition {given_name}", hint=hint)


def configured_object_retention(settings: Settings) -> ObjectRetention:
    publish = settings.publish
    return ObjectRetention(publish.grace_ms, publish.undo_window_ms, publish.orphan_age_ms, publish.retire)
