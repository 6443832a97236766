"""An idle tier in memory: many partitions of one stand-in segment each, a clock that is moved by hand, a store that counts."""

from __future__ import annotations

from pathlib import Path

from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.config.settings import CleanerSettings, DaemonSettings, Settings, TierSettings
from compactor.constants import LeaderEpoch, Offset, TimestampMs
from compactor.control import importing
from compactor.control.logs import open_catalog
from compactor.daemon.daemon import Daemon
from compactor.local.cache import LocalState
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.wrappers import RequestCounters, StoreUsage
from tests.support.memory_store import Clock, MemoryStore, ports_on

HOUR = 3_600_000
INTERVAL = 15_000


class Idle:
    """A tier in memory. Every partition holds one segment, and nothing is due: ``min_cleanable_dirty_ratio`` is 1."""

    def __init__(self, folder: Path, partitions: int) -> None:
        self.clock = Clock()
        self.counters = RequestCounters()
        self.store = MemoryStore(self.clock, self.counters)
        self.folder = folder
        self.names = [TopicPartition("orders", number) for number in range(partitions)]
        tier = self.tier()
        tier.identity.read_or_create_catalog()
        for name in self.names:
            self.grow(tier, name)

    def tier(self, *, local: bool = False) -> Tier:
        ports = ports_on(self.store, self.clock)
        settings = Settings(
            tier=TierSettings(url="file:///nowhere", state_dir=str(self.folder / "state")),
            cleaner=CleanerSettings(min_cleanable_dirty_ratio=1.0, disk_budget_bytes=1 << 20),
            daemon=DaemonSettings(interval_ms=INTERVAL),
        )
        kept = LocalState(self.folder / "state" / "cache") if local else None
        return Tier(settings, ports, open_catalog(ports), self.counters, kept)

    def grow(self, tier: Tier, name: TopicPartition, *, hint: bool = True) -> None:
        """One more segment, as an import leaves it."""
        log = tier.open_partition_log(name)
        start = log.refresh().end_offset + 1
        new_id = tier.ports.new_id()
        segment = RemoteLogSegmentMetadata(
            id=new_id,
            start_offset=Offset(start),
            end_offset=Offset(start + 9),
            size_bytes=100,
            max_timestamp_ms=TimestampMs(self.clock.now_ms),
            mtime_ms=self.clock.now_ms,
            leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(0)),),
            files={"log": SegmentFile(size=100, sha256="")},
        )
        import_id = tier.ports.new_id()
        importing.register_import(tier.ports, log, import_id, [new_id])
        importing.record_tiered_segments(tier.ports, log, import_id, [segment])
        if hint:
            tier.change_notifier.announce_changed_control_logs([log])

    def pass_time(self, daemon: Daemon, milliseconds: int) -> StoreUsage:
        """What the daemon has asked for meanwhile."""
        before = self.counters.usage()
        until = self.clock.now_ms + milliseconds
        while self.clock.now_ms < until:
            self.clock.now_ms += INTERVAL
            daemon.scan()
            assert daemon.start_due_jobs() == []
        return self.counters.usage().usage_since(before)
