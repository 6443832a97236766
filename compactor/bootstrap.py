"""The composition root: settings -> stores, ports, catalog. Every command, the daemon and the Spark driver begin here."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from compactor.config import Cleaner, Limits, Settings
from compactor.control.identity import Ownership, foreign_problem
from compactor.control.leadership import background_beats
from compactor.control.logs import (
    HASH_KEY_BYTES,
    CatalogLog,
    PartitionLog,
    create_tier,
    note_change,
    note_looks,
    note_slots,
    open_catalog,
    open_partition,
    take_in_inbox,
)
from compactor.control.mirror import BrokersView, mirrored
from compactor.control.ports import Lease, Ports, Retention
from compactor.control.records import LookedAt
from compactor.control.state import CatalogState, PartitionState
from compactor.errors import CompactorError, StoreError, UsageError
from compactor.kinds import kind_of, pinterest_keys
from compactor.local.cache import LocalState
from compactor.local.rocks import Rocks
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.storage.counting import Counters
from compactor.storage.factory import open_store
from compactor.storage.nothing import NothingStore
from compactor.storage.port import ObjectStore
from compactor.storage.readonly import ReadOnly
from compactor.storage.retrying import Contact
from compactor.storage.settings import Retries, Transfers
from compactor.tier.names import TopicIdOf, TopicIds
from compactor.tier.ports import SegmentPublisher
from compactor.tier.sidecars import Sidecars

if TYPE_CHECKING:
    from compactor.local.budget import Budget
    from compactor.metadata_topic.connection import KafkaConnection
    from compactor.round.compaction import AssessWith, OnStage, Round, RoundReport
    from compactor.round.engines import Engine
    from compactor.round.sources import Reading
    from compactor.tier.brokers import BrokersMetadata
    from compactor.tier.layouts.pinterest.listing import ListedTier

READERS = 16
"""Logs that are read at once: they wait for the store, not for each other."""


class Engines(Protocol):
    """None: this process does the work by itself."""

    def __call__(self, tier: Tier, name: TopicPartition) -> Engine | None: ...


@dataclass(frozen=True)
class Tier:
    """One process's access to one tier. ``counters``: all requests and bytes, of data and control objects.

    With ``local`` (a cache on this machine) control logs begin from where they were last folded; without it everything is read from
    the tier itself. ``engines`` names who works on a partition's rounds where that is not this process.
    """

    settings: Settings
    ports: Ports
    catalog: CatalogLog
    counters: Counters
    local: LocalState | None = None
    engines: Engines | None = None
    ownership: Ownership = field(default_factory=Ownership)
    brokers: BrokersMetadata | None = None
    """What brokers say of a tier that they write; None for a tier of this program's own."""
    listed: ListedTier | None = None
    """LIST, where nothing else says what there is: a tier of Pinterest's layout, which is only read."""

    @property
    def lease(self) -> Lease:
        return Lease(self.settings.lease.ttl_ms, self.settings.lease.stall_ms)

    @property
    def retention(self) -> Retention:
        return _retention(self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Gives back what this machine remembers, so that the next one may write it."""
        if self.local is not None:
            self.local.close()

    def cleaner_for(self, topic: str) -> Cleaner:
        """[cleaner] as it holds for a topic; what brokers have set on it goes before [cleaner]. Raises UsageError."""
        return self.settings.cleaner_for(topic, self.chosen(topic))

    def chosen(self, topic: str) -> Mapping[str, str]:
        """What is set on a topic of brokers itself, by Kafka's names."""
        return self.brokers.topic(topic).chosen if self.brokers is not None and topic in self.brokers.topic_ids() else {}

    @property
    def state_dir(self) -> Path:
        return Path(self.settings.tier.state_dir)

    def over(self, *, control: ObjectStore | None = None, data: ObjectStore | None = None) -> Tier:
        """The same tier through other stores: such that refuse writes, or that can be interrupted."""
        kind, settings = kind_of(self.settings), self.settings
        ports = replace(self.ports, control=control or self.ports.control)
        if data is not None:
            layout = kind.layout(settings, data, topic_ids(self.brokers))
            publisher = kind.publisher(settings, data) if self.brokers is None else ports.publisher
            ports = replace(ports, data=data, layout=layout, publisher=publisher)
        return replace(self, ports=ports, catalog=open_catalog(ports) if control else self.catalog)

    def identity(self) -> CatalogState:
        """The folded catalog. Raises UsageError where no tier was made at this URL yet."""
        if self.listed is not None:
            return CatalogState(layout=self.settings.tier.layout, partitions=dict.fromkeys(map(str, self.listed.names()), 0))
        local = self.local
        kept = local.catalog() if local and not local.bound else None
        if kept:
            self.catalog.load(kept.state, kept.mark)
        state = self.catalog.refresh()
        if not state.tier_id and self.brokers is not None:
            return state  # brokers made the tier; an identity is needed by whoever writes into the control store
        if not state.tier_id:
            self.catalog.check_whole()
            self.ownership.check(self.ports, state)
            self.ownership.refuse_foreign(self.ports)
            raise UsageError(
                f"there is no tier at {self.ports.layout.url} yet", hint="`import` makes one; check tier.url in the configuration"
            )
        self.ownership.tier_id = state.tier_id
        self._check_foreign(state)
        if local:
            if not local.bound:
                local.bind(state.tier_id, diverged=self.catalog.diverged or (kept is not None and state.slot < kept.state.slot))
            local.keep_catalog(state, self.catalog.mark())
        return state

    def create(self, hash_key: bytes = b"") -> CatalogState:
        """Makes the tier's identity where there is none. Raises UsageError where the data is another tier's, or is only read.

        ``hash_key``: what is to be its secret; random where it is empty.
        """
        if self.listed is not None:
            raise self._only_read()
        tier = self.settings.tier
        self._check_free()
        url = "" if self.ownership.ours else self.settings.tier_url
        cluster_id = self.brokers.cluster_id() if self.brokers else ""
        state = create_tier(self.ports, kind=tier.kind, layout=tier.layout, url=url, cluster_id=cluster_id, hash_key=hash_key)
        self.ownership.tier_id = state.tier_id
        self._check_foreign(state)
        self.ports.own(anew=True)
        return state

    def _check_free(self) -> None:
        if not self.catalog.refresh().tier_id:
            self.ownership.before_creation(self.ports, self.catalog.check_whole())

    def check_place(self) -> None:
        """Raises UsageError where neither this tier is nor one may be made, such as over one whose catalog is lost. Changes nothing."""
        self._check_free()
        if self.catalog.state.tier_id:
            self.check_owner()

    def _only_read(self) -> UsageError:
        return UsageError(
            f"a tier of layout {self.settings.tier.layout} is only read", hint="`import --from-tier` takes it into one of our own"
        )

    def check_owner(self) -> None:
        """Raises UsageError where the data root is another tier's. Changes nothing."""
        self.ownership.check(self.ports, self.identity())

    def _check_foreign(self, state: CatalogState) -> None:
        tier = self.settings.tier
        if (state.kind, state.layout) != (tier.kind, tier.layout):
            raise UsageError(
                f"the tier at {self.ports.layout.url} is of kind {state.kind} and layout {state.layout}, not {tier.kind} and {tier.layout}",
                hint="Nothing was changed. Correct tier.kind and tier.layout in the configuration",
            )
        cluster_id = self.brokers.cluster_id() if self.brokers is not None and state.cluster_id else ""
        problem = foreign_problem(state, self.settings.tier_url, cluster_id)
        if problem:
            raise UsageError(
                f"the control store {self.ports.control.url} belongs to another tier: {problem}",
                hint="Nothing was changed. Correct tier.url or tier.control_url: each tier needs a control store of its own",
            )

    def hash_key(self) -> bytes:
        """The tier's secret SipHash key, 16 bytes; it never changes. Raises UsageError where there is no tier, or only a listed one."""
        if self.listed is not None:
            raise self._only_read()
        known = self.catalog.state
        found = known if known.tier_id else self.identity()
        if not found.hash_key:
            raise UsageError(
                f"nothing was ever written for the tier at {self.ports.layout.url} into the control store",
                hint="Set control_url under [tier] to where it lies; `bloom rebuild` begins one",
            )
        return bytes.fromhex(found.hash_key)

    def reading_key(self) -> bytes:
        """For hashes that nobody keeps: the tier's own where it has one, else one that every reader of this tier makes alike."""
        if self.listed is not None or (self.brokers is not None and not self.identity().hash_key):
            return hashlib.sha256(self.settings.tier_url.encode()).digest()[:HASH_KEY_BYTES]
        return self.hash_key()

    def topic_id(self, name: TopicPartition) -> str:
        """Of a topic of brokers; empty for a tier of this program's own."""
        return "" if self.brokers is None else topic_ids(self.brokers)(name)

    def log_start(self, name: TopicPartition) -> int:
        """What brokers no longer serve ends here (DeleteRecords, retention), its segments may still stand; 0 where nobody says so."""
        return 0 if self.brokers is None else max(0, self.brokers.topic(name.topic).log_starts.get(name.partition, 0))

    def partitions(self, wanted: list[str] | None = None) -> list[TopicPartition]:
        """All partitions of the tier, or the named ones, each once. Raises UsageError for one that it does not hold."""
        known = self.identity().names if self.brokers is None else self.brokers.names()
        if not wanted:
            return known
        named = list(dict.fromkeys(TopicPartition.parse(text) for text in wanted))
        for name in named:
            if name not in known:
                raise UsageError(f"the tier holds no partition {name}", hint="`topics` lists what it holds")
        return named

    def open(self, name: TopicPartition, *, leads: bool = False) -> PartitionLog:
        """Its control log, begun from what is kept of it. It must not end below what the tier-wide log, as last folded, has seen of it.

        Every command gets a partition's state from here. Of a tier that brokers write it is the log's with what brokers say; a round
        goes by the log alone (``leads``), into which its leader has written that before (*segments mirrored*).
        """
        if self.brokers is not None:
            view = None if leads else self._mirror()
            return open_partition(self.ports, name, self.floor(name), key=self.log_key(name), view=view)
        if self.listed is not None:
            return open_partition(self.ports, name, view=_listed_view(self.listed, name))
        log = open_partition(self.ports, name, self.floor(name))
        kept = self.local.state(name) if self.local and self.local.bound else None
        if kept:
            log.load(*kept)
        return log

    def log_key(self, name: TopicPartition) -> str:
        """What the partition's control log is called: of a topic of brokers with its id, as a topic made anew is another one."""
        return str(name) if self.brokers is None else f"{name}-{self.topic_id(name)}"

    @property
    def metadata(self) -> BrokersMetadata:
        """What brokers say. Raises UsageError where no broker writes this tier."""
        if self.brokers is None:
            raise UsageError(f"no broker writes the tier at {self.ports.layout.url}", hint="That is for tiers of kind kafka")
        return self.brokers

    def brokers_view(self, name: TopicPartition) -> BrokersView:
        """What the brokers' readers find of a partition: as it was a second ago, so that many can be asked about at once.

        Raises UsageError where no broker writes this tier.
        """
        from compactor.tier.brokers import FRESH_S

        return brokers_view(self.metadata, name, FRESH_S)

    def as_read(self, state: PartitionState) -> PartitionState:
        """What readers find: with what brokers say, where they write the tier."""
        return state if self.brokers is None else mirrored(state, self.brokers_view(state.name))

    def _mirror(self) -> Callable[[PartitionState], PartitionState]:
        """Made once for each state of the log: whoever reads sees one view of it until it is folded on."""
        made: list[tuple[PartitionState, PartitionState]] = []

        def view(state: PartitionState) -> PartitionState:
            if not made or made[0][0] is not state:
                made[:] = [(state, self.as_read(state))]
            return made[0][1]

        return view

    def hint(self, name: TopicPartition) -> int:
        """The latest hint about a partition in the catalog as last folded: for ``keep``, asked before the partition's log is read."""
        return self.catalog.state.partitions.get(str(name), 0)

    def floor(self, name: TopicPartition) -> int:
        """The slot that the partition's log has had, by the catalog as last folded."""
        return self.catalog.state.reached.get(self.log_key(name), 0)

    def keep(self, log: PartitionLog, hint: int) -> None:
        """Remembers a log as it was last folded."""
        mark = log.mark() if self.local and self.local.bound else None
        if mark and self.local:
            self.local.keep(log.state, mark, hint, self.ports.clock_ms())

    def note_change(self, log: PartitionLog) -> None:
        """Others are told that this log has something new, as far as it was folded, and that it must not be shorter again."""
        if self.brokers is None:
            note_change(self.catalog, log.state.name, log.reached())
        else:  # brokers say which partitions there are
            self.note_slots([log])

    def note_slots(self, logs: Sequence[PartitionLog]) -> None:
        """Folded logs must not be shorter again. One record for all of them; a store that fails is asked again by the next command."""
        try:
            note_slots(self.catalog, logs)
        except StoreError:
            pass

    def note_looks(self, looks: Mapping[str, LookedAt]) -> None:
        """Where there is nothing to retire, and until when; lost where the store fails."""
        try:
            note_looks(self.catalog, looks)
        except StoreError:
            pass

    def take_in_inbox(self) -> int:
        """Hints that found no slot in the tier-wide log come in. Raises StoreError."""
        return take_in_inbox(self.catalog)

    def sidecars(self, name: TopicPartition) -> Sidecars:
        """Those of a partition. Raises UsageError where there is no tier; one that brokers write need not have any."""
        known = self.listed is None and (self.brokers is None or self.identity().hash_key)
        hash_key = self.hash_key() if known else bytes(HASH_KEY_BYTES)
        kept = self.local if self.local and self.local.bound else None
        return Sidecars(self.ports.control, self.open(name).prefix, hash_key, kept)

    def reading(self, state: PartitionState, budget: Budget, purpose: str) -> Reading:
        """A partition's segments, staged in a new folder of this process. Whoever asked for it closes ``staging``."""
        from compactor.round.sources import reading_of

        return reading_of(self.ports, self.cleaner_for(state.topic), self.state_dir, state, budget, purpose)

    def opening(self, name: TopicPartition, segments: Sequence[RemoteLogSegmentMetadata], purpose: str) -> AbstractContextManager[Reading]:
        """Any of a partition's segments, one after the other within ``disk_budget_bytes`` (I10): for whoever looks into them."""
        from compactor.local.budget import Budget
        from compactor.round.compaction import disk_budget
        from compactor.round.sources import closing, reading_over

        cleaner = self.cleaner_for(name.topic)
        budget = Budget(disk_budget(cleaner, self.state_dir))
        return closing(reading_over(self.ports, cleaner, self.state_dir, name, segments, budget, purpose))

    def round(
        self,
        name: TopicPartition,
        now_ms: int,
        *,
        force: bool = False,
        on_stage: OnStage = lambda s, p: None,
        disk: Budget | None = None,
        engine: Engine | None = None,
        assess_with: AssessWith | None = None,
    ) -> Round:
        """As Round takes them. ``force``: whatever the dirty ratio says; ``engine``: None for the one that the tier names."""
        from compactor.round.compaction import Round, RoundContext
        from compactor.round.plan import assess

        if engine is None and self.engines is not None:
            engine = self.engines(self, name)
        cleaner = self.cleaner_for(name.topic)
        context = RoundContext(
            ports=self.ports,
            lease=self.lease,
            cleaner=cleaner,
            hash_key=self.hash_key(),
            sidecars=self.sidecars(name) if cleaner.bloom else None,
            threads=self.settings.daemon.threads,
            state_dir=self.state_dir,
            records_per_hour=self.settings.publish.metadata_records_per_hour,
        )
        return Round(context, now_ms, assess_with=assess_with or partial(assess, force=force), on_stage=on_stage, disk=disk, engine=engine)

    def compact(self, name: TopicPartition, now_ms: int, *, force: bool = False, on_stage: OnStage = lambda s, p: None) -> RoundReport:
        """A round over one partition; other processes are told that something changed. Raises as Round.run."""
        log, hint = self.open(name, leads=True), self.hint(name)
        report = self.round(name, now_ms, force=force, on_stage=on_stage).run(log)
        self.keep(log, hint)
        if self.local:
            self.local.forget_heads([segment.id for segment in report.segments if segment.action == "rewritten"])
        if report.status in ("cleaned", "resumed"):
            self.note_change(log)
        return report

    def read_logs(
        self, names: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None
    ) -> list[PartitionLog | CompactorError]:
        """Each partition's log, folded, or why it could not be; in their order."""

        def read(name: TopicPartition) -> PartitionLog | CompactorError:
            log = self.open(name)
            try:
                log.refresh()
            except CompactorError as error:
                return error
            finally:
                on_partition()
            return log

        with ThreadPoolExecutor(READERS, thread_name_prefix="logs") as pool:
            return list(pool.map(read, names))


def _retention(settings: Settings) -> Retention:
    publish = settings.publish
    return Retention(publish.grace_ms, publish.undo_window_ms, publish.orphan_age_ms)


def open_tier(settings: Settings, *, local_state: bool = False, topics: Mapping[str, str] | None = None) -> Tier:
    """Opens the stores that the settings name. Makes no request. Raises UsageError.

    ``local_state``: with the cache in ``state_dir``, which is opened by its first use. ``topics``: ids of brokers' topics where somebody
    has asked for them already.
    """
    counters = Counters()
    contact = Contact()

    def store(url: str, limits: Limits, retries: Retries | None = None) -> ObjectStore:
        return open_store(url, s3=settings.s3, limits=limits, retries=retries, counters=counters, contact=contact, records=True)

    tier, control_url, ownership = settings.tier, settings.control_url, Ownership(ours=kind_of(settings).ours)
    transfers = Transfers(storage_class=tier.aiven.storage_class * (tier.layout == "aiven"))
    kind = kind_of(settings)
    data = open_store(settings.tier_url, s3=settings.s3, limits=settings.limits, transfers=transfers, counters=counters, contact=contact)
    listed = None
    if tier.layout == "pinterest":
        from compactor.tier.layouts.pinterest.listing import ListedTier

        data = ReadOnly(data)
        listed = ListedTier(data, pinterest_keys(settings))
    needed = "control_url under [tier] is not set" if listed is None else f"a tier of layout {tier.layout} is only read"
    control: ObjectStore = NothingStore(needed)
    urgent = control
    if control_url:
        control = store(control_url, settings.limits)
        urgent = store(control_url, Limits(), Retries(deadline_s=settings.lease.ttl_ms / 3000))
    brokers = brokers_of(settings, control) if tier.kind == "kafka" else None
    ports = Ports(
        control=control,
        data=data,
        layout=kind.layout(settings, data, TopicIds(topics) if topics else topic_ids(brokers)),
        publisher=publisher_of(settings, brokers) or kind.publisher(settings, data),
        brokers=partial(brokers_view, brokers) if brokers is not None else None,
        clock_ms=lambda: int(time.time() * 1000),
        sleep=time.sleep,
        random_bytes=secrets.token_bytes,
        holder=f"{socket.gethostname()}:{os.getpid()}",
        keep_alive=background_beats,
        urgent=urgent,
        ownership=ownership,
        retention=_retention(settings),
    )
    place = hashlib.sha256(control_url.encode()).hexdigest()[:16]
    # What brokers change in their metadata is in no control log: what was kept of one would be believed.
    local = LocalState(Path(tier.state_dir) / "cache" / place) if local_state and brokers is None and listed is None else None
    return Tier(settings, ports, open_catalog(ports), counters, local, ownership=ownership, brokers=brokers, listed=listed)


def _listed_view(listed: ListedTier, name: TopicPartition) -> Callable[[PartitionState], PartitionState]:
    """Listed once for each log that is opened: whoever reads sees one view."""
    live: list[tuple[RemoteLogSegmentMetadata, ...]] = []

    def view(state: PartitionState) -> PartitionState:
        if not live:
            live.append(listed.live(name))
        return state.model_copy(update={"live": live[0]})

    return view


def brokers_of(settings: Settings, control: ObjectStore) -> BrokersMetadata:
    """What brokers say of the tier: from the metadata topic, or from the latest snapshot of it where no broker is named.

    Makes no request to brokers yet. Raises UsageError, StoreError for a snapshot that is not there.
    """
    kafka = settings.kafka
    if not kafka.bootstrap_servers.strip():
        from compactor.tier.metadata_snapshot import SnapshotBrokers, latest

        return SnapshotBrokers(latest(control), kafka.topics, f"the metadata snapshot in {control.url}")
    from compactor.metadata_topic.admin import KafkaAdmin
    from compactor.metadata_topic.confluent_topic import ConfluentMetadataTopic
    from compactor.metadata_topic.follow import FollowedTopic
    from compactor.metadata_topic.kept import KeptStates
    from compactor.tier.brokers import FollowedBrokers
    from compactor.tier.cluster import AdminCluster

    connection = connection_of(settings)
    place = hashlib.sha256(kafka.bootstrap_servers.encode()).hexdigest()[:16]
    topic = ConfluentMetadataTopic(connection)
    kept = KeptStates(Rocks(Path(settings.tier.state_dir) / "metadata" / place))
    followed = FollowedTopic(topic, kept, clock_ms=lambda: int(time.time() * 1000))
    where = f"{topic.name} at {kafka.bootstrap_servers}"
    return FollowedBrokers(followed, AdminCluster(KafkaAdmin(connection)), kafka.topics, where)


def brokers_view(brokers: BrokersMetadata, name: TopicPartition, within_s: float = 0.0) -> BrokersView:
    """What the brokers' readers find of a partition now."""
    from compactor.tier.brokers import TOPICS_FRESH_S, effective

    brokers.refresh(within_s=within_s, topics_within_s=TOPICS_FRESH_S)
    folded = brokers.folded(name)
    view = effective(folded.cache, name)
    return BrokersView(view.links, view.lineage, folded.cache.applied)


def publisher_of(settings: Settings, brokers: BrokersMetadata | None) -> SegmentPublisher | None:
    """Of a tier whose brokers can be told something. Makes no request."""
    if brokers is None:
        return None
    from compactor.tier.brokers import FollowedBrokers

    if not isinstance(brokers, FollowedBrokers):
        return None
    from compactor.metadata_topic.admin import KafkaAdmin
    from compactor.metadata_topic.confluent_topic import ConfluentMetadataTopic
    from compactor.tier.conditions import BrokerConditions
    from compactor.tier.publishers.kafka import KafkaPublisher

    connection = connection_of(settings)
    return KafkaPublisher(
        brokers.followed,
        ConfluentMetadataTopic(connection),
        topic_ids(brokers),
        conditions=BrokerConditions(KafkaAdmin(connection)),
        clock_ms=lambda: int(time.time() * 1000),
        late_ms=connection.delivery_timeout_ms,
    )


def connection_of(settings: Settings) -> KafkaConnection:
    """How [kafka] says that brokers are reached. Raises UsageError."""
    from compactor.metadata_topic.connection import KafkaConnection

    properties = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.kafka.properties.items()}
    return KafkaConnection(settings.kafka.bootstrap_servers, properties)


def topic_ids(brokers: BrokersMetadata | None) -> TopicIdOf:
    """Of a tier's topics, asked when they are needed."""

    def topic_id(name: TopicPartition) -> str:
        return TopicIds(brokers.topic_ids() if brokers else {})(name)

    return topic_id
