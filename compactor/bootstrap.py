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

from compactor.config import Limits, Settings
from compactor.control.identity import NATIVE, Ownership, foreign_problem
from compactor.control.leadership import background_beats
from compactor.control.logs import CatalogLog, PartitionLog, create_tier, note_change, note_slots, open_catalog, open_partition
from compactor.control.ports import Lease, Ports, Retention
from compactor.control.state import CatalogState, PartitionState
from compactor.errors import CompactorError, StoreError, UsageError
from compactor.local.cache import LocalState
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.storage.counting import Counters
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.storage.retrying import Contact
from compactor.storage.settings import Retries, Transfers
from compactor.tier.layouts.aiven.layout import AivenLayout
from compactor.tier.layouts.kafka_local import KafkaLocalLayout
from compactor.tier.layouts.native import NativeLayout
from compactor.tier.names import TopicIdOf
from compactor.tier.ports import SegmentLayout, SegmentPublisher
from compactor.tier.publishers.object_log import ObjectLogPublisher
from compactor.tier.sidecars import Sidecars

if TYPE_CHECKING:
    from compactor.local.budget import Budget
    from compactor.round.compaction import AssessWith, OnStage, Round, RoundReport
    from compactor.round.engines import Engine
    from compactor.round.sources import Reading

READERS = 16
"""Logs that are read at once: they wait for the store, not for each other."""


@dataclass(frozen=True)
class KindOfTier:
    """How the ports of one kind and layout are made from settings and the store that holds the segments. Makes no request."""

    layout: Callable[[Settings, ObjectStore], SegmentLayout]
    publisher: Callable[[Settings, ObjectStore], SegmentPublisher]


KINDS: Mapping[tuple[str, str], KindOfTier] = {
    ("object-log", "native"): KindOfTier(layout=lambda _, store: NativeLayout(store), publisher=lambda *_: ObjectLogPublisher()),
}
"""By ``tier.kind`` and ``tier.layout``. A new kind of tier is one row here."""

BROKER_LAYOUTS: Mapping[str, Callable[[Settings, ObjectStore, TopicIdOf], SegmentLayout]] = {
    "kafka-local": lambda _, store, topic_id: KafkaLocalLayout(store, topic_id),
    "aiven": lambda settings, store, topic_id: AivenLayout(store, topic_id, settings.tier.aiven),
}
"""By ``tier.layout``: those of brokers' plug-ins, whose names hold the ids of topics."""


def kind_of(settings: Settings) -> KindOfTier:
    """Raises UsageError for a kind and a layout that do not go together."""
    tier = settings.tier
    try:
        return KINDS[tier.kind, tier.layout]
    except KeyError:
        raise UsageError(
            f"a tier of kind {tier.kind} cannot have the layout {tier.layout}",
            hint="Possible are " + ", ".join(f"{kind} with {layout}" for kind, layout in KINDS),
        ) from None


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

    @property
    def state_dir(self) -> Path:
        return Path(self.settings.tier.state_dir)

    def over(self, *, control: ObjectStore | None = None, data: ObjectStore | None = None) -> Tier:
        """The same tier through other stores: such that refuse writes, or that can be interrupted."""
        kind, settings = kind_of(self.settings), self.settings
        ports = replace(self.ports, control=control or self.ports.control)
        if data is not None:
            ports = replace(ports, data=data, layout=kind.layout(settings, data), publisher=kind.publisher(settings, data))
        return replace(self, ports=ports, catalog=open_catalog(ports) if control else self.catalog)

    def identity(self) -> CatalogState:
        """The folded catalog. Raises UsageError where no tier was made at this URL yet."""
        local = self.local
        kept = local.catalog() if local and not local.bound else None
        if kept:
            self.catalog.load(kept.state, kept.mark)
        state = self.catalog.refresh()
        if not state.tier_id:
            self.catalog.check_whole()
            self.ownership.check(self.ports, state)
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

    def create(self) -> CatalogState:
        """Makes the tier's identity where there is none. Raises UsageError where the data is another tier's."""
        tier = self.settings.tier
        if not self.catalog.refresh().tier_id:
            self.ownership.before_creation(self.ports, self.catalog.check_whole())
        url = "" if tier.layout == NATIVE else self.settings.tier_url
        state = create_tier(self.ports, kind=tier.kind, layout=tier.layout, url=url)
        self.ownership.tier_id = state.tier_id
        self._check_foreign(state)
        self.ports.own(anew=True)
        return state

    def check_owner(self) -> None:
        """Raises UsageError where the data root is another tier's. Changes nothing."""
        self.ownership.check(self.ports, self.identity())

    def _check_foreign(self, state: CatalogState) -> None:
        problem = foreign_problem(state, self.settings.tier_url, "")
        if problem:
            raise UsageError(
                f"the control store {self.ports.control.url} belongs to another tier: {problem}",
                hint="Nothing was changed. Correct tier.url or tier.control_url: each tier needs a control store of its own",
            )

    def hash_key(self) -> bytes:
        """The tier's secret SipHash key, 16 bytes; it never changes. Raises UsageError where there is no tier."""
        known = self.catalog.state
        return bytes.fromhex((known if known.tier_id else self.identity()).hash_key)

    def partitions(self, wanted: list[str] | None = None) -> list[TopicPartition]:
        """All partitions of the tier, or the named ones, each once. Raises UsageError for one that it does not hold."""
        known = self.identity().names
        if not wanted:
            return known
        named = list(dict.fromkeys(TopicPartition.parse(text) for text in wanted))
        for name in named:
            if name not in known:
                raise UsageError(f"the tier holds no partition {name}", hint="`topics` lists what it holds")
        return named

    def open(self, name: TopicPartition) -> PartitionLog:
        """Its control log, begun from what is kept of it. It must not end below what the tier-wide log, as last folded, has seen of it.

        Every command and every round gets a partition's state from here: where a LiveView (compactor.tier.ports) says what is live,
        this is where it enters.
        """
        log = open_partition(self.ports, name, self.floor(name))
        kept = self.local.state(name) if self.local and self.local.bound else None
        if kept:
            log.load(*kept)
        return log

    def hint(self, name: TopicPartition) -> int:
        """The latest hint about a partition in the catalog as last folded: for ``keep``, asked before the partition's log is read."""
        return self.catalog.state.partitions.get(str(name), 0)

    def floor(self, name: TopicPartition) -> int:
        """The slot that the partition's log has had, by the catalog as last folded."""
        return self.catalog.state.reached.get(str(name), 0)

    def keep(self, log: PartitionLog, hint: int) -> None:
        """Remembers a log as it was last folded."""
        mark = log.mark() if self.local and self.local.bound else None
        if mark and self.local:
            self.local.keep(log.state, mark, hint, self.ports.clock_ms())

    def note_change(self, log: PartitionLog) -> None:
        """Others are told that this log has something new, as far as it was folded, and that it must not be shorter again."""
        note_change(self.catalog, log.state.name, log.reached())

    def note_slots(self, logs: Sequence[PartitionLog]) -> None:
        """Folded logs must not be shorter again. One record for all of them; a store that fails is asked again by the next command."""
        try:
            note_slots(self.catalog, logs)
        except StoreError:
            pass

    def sidecars(self, name: TopicPartition) -> Sidecars:
        """Those of a partition. Raises UsageError where there is no tier."""
        hash_key = self.hash_key()
        kept = self.local if self.local and self.local.bound else None
        return Sidecars(self.ports.control, self.open(name).prefix, hash_key, kept)

    def reading(self, state: PartitionState, budget: Budget, purpose: str) -> Reading:
        """A partition's segments, staged in a new folder of this process. Whoever asked for it closes ``staging``."""
        from compactor.round.sources import reading_of

        return reading_of(self.ports, self.settings.cleaner_for(state.topic), self.state_dir, state, budget, purpose)

    def opening(self, name: TopicPartition, segments: Sequence[RemoteLogSegmentMetadata], purpose: str) -> AbstractContextManager[Reading]:
        """Any of a partition's segments, one after the other within ``disk_budget_bytes`` (I10): for whoever looks into them."""
        from compactor.local.budget import Budget
        from compactor.round.compaction import disk_budget
        from compactor.round.sources import closing, reading_over

        cleaner = self.settings.cleaner_for(name.topic)
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
        cleaner = self.settings.cleaner_for(name.topic)
        context = RoundContext(
            ports=self.ports,
            lease=self.lease,
            cleaner=cleaner,
            hash_key=self.hash_key(),
            sidecars=self.sidecars(name) if cleaner.bloom else None,
            threads=self.settings.daemon.threads,
            state_dir=self.state_dir,
        )
        return Round(context, now_ms, assess_with=assess_with or partial(assess, force=force), on_stage=on_stage, disk=disk, engine=engine)

    def compact(self, name: TopicPartition, now_ms: int, *, force: bool = False, on_stage: OnStage = lambda s, p: None) -> RoundReport:
        """A round over one partition; other processes are told that something changed. Raises as Round.run."""
        log, hint = self.open(name), self.hint(name)
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


def open_tier(settings: Settings, *, local_state: bool = False) -> Tier:
    """Opens the stores that the settings name. Makes no request. Raises UsageError.

    ``local_state``: with the cache in ``state_dir``, which is opened by its first use.
    """
    counters = Counters()
    contact = Contact()

    def store(url: str, limits: Limits, retries: Retries | None = None) -> ObjectStore:
        return open_store(url, s3=settings.s3, limits=limits, retries=retries, counters=counters, contact=contact, records=True)

    tier, ownership = settings.tier, Ownership(settings.tier.layout)
    transfers = Transfers(storage_class=tier.aiven.storage_class * (tier.layout == "aiven"))
    kind = kind_of(settings)
    data = open_store(settings.tier_url, s3=settings.s3, limits=settings.limits, transfers=transfers, counters=counters, contact=contact)
    ports = Ports(
        control=store(settings.control_url, settings.limits),
        data=data,
        layout=kind.layout(settings, data),
        publisher=kind.publisher(settings, data),
        clock_ms=lambda: int(time.time() * 1000),
        sleep=time.sleep,
        random_bytes=secrets.token_bytes,
        holder=f"{socket.gethostname()}:{os.getpid()}",
        keep_alive=background_beats,
        urgent=store(settings.control_url, Limits(), Retries(deadline_s=settings.lease.ttl_ms / 3000)),
        ownership=ownership,
        retention=_retention(settings),
    )
    place = hashlib.sha256(settings.control_url.encode()).hexdigest()[:16]
    local = LocalState(Path(settings.tier.state_dir) / "cache" / place) if local_state else None
    return Tier(settings, ports, open_catalog(ports), counters, local, ownership=ownership)
