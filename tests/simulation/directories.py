"""Directories of one partition as its brokers have them, on a real disk: replicas, elections, retention, cleaning, deletion, damage.

A record's number is its timestamp, and no two records ever written share one: it names the record and everything before it.
"""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from typing_extensions import override

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers.chain import LeaderReportedLogEnd
from compactor.constants import EMPTY_TOPIC_ID, LeaderEpoch, Offset, TopicId
from compactor.model.ids import encode_segment_id
from compactor.model.remote_log import TopicIdPartition
from compactor.records.encode import RecordToEncode as BuiltRow, encode_batch
from tests.simulation.symbolic import NAME, Row
from tests.support.replicas import Record, Replica, Replicas

DELETED = ".deleted"
KEYS = "abcdefghijklmnop"


@dataclass(frozen=True)
class Written:
    """A record's key, its value (None: a tombstone), the number of the record before it, or 0, and which life of the topic it is of."""

    record: Record
    key: str
    value: str | None
    before: int
    incarnation: int


def shared(one: Replica, other: Replica) -> int:
    """The offset up to which both have the same log."""
    pairs = zip(one.log, other.log, strict=False)
    return next((at for at, (mine, its) in enumerate(pairs) if mine != its), min(len(one.log), len(other.log)))


@dataclass(frozen=True)
class StagedRecords:
    """What a file staged for deletion holds: offset -> number. ``expired``: retention staged it; else a truncation or the cleaner."""

    base: int
    records: Mapping[int, int]
    expired: bool
    damaged: bool
    changed_ms: int

    @property
    def end(self) -> int:
        """The offset after its last record."""
        return max(self.records, default=self.base - 1) + 1


@dataclass
class DiskReplica(Replica):
    """A replica with its directory. ``log`` is all that it ever held; on the disk is what lies at or after ``start`` and was not removed.

    start: first offset of the local log.
    removed: offsets that the broker's own cleaner has removed.
    clean_to: up to where its own cleaner has been.
    has_checkpoint: whether a cleaner-offset-checkpoint lies beside the directory; a copy has none.
    away_until: number of records that are written before it is back; it fetches nothing till then.
    damaged: base offset of a segment with a flipped bit, -1 where there is none.
    version: changes with every change of the directory.
    restarted: a truncation has removed the whole log since the last write (LocalLog.truncateFullyAndStartAt).
    swapped: the cleaner was at work since the last write.
    held: base offset -> offset -> number, of each segment as it was written last.
    staged: base offset -> the file staged for deletion.
    """

    folder: Path = Path()
    rolls: float = 0.1
    start: int = 0
    removed: set[int] = field(default_factory=set)
    clean_to: int = 0
    has_checkpoint: bool = True
    away_until: int = 0
    topic_id: TopicId = EMPTY_TOPIC_ID
    has_epochs: bool = True
    damaged: int = -1
    version: int = 0
    written: dict[str, bytes] = field(default_factory=dict)
    shape: tuple[object, ...] = ()
    restarted: bool = False
    swapped: bool = False
    held: dict[int, dict[int, int]] = field(default_factory=dict)
    staged: dict[int, StagedRecords] = field(default_factory=dict)

    @override
    def append(self, record: Record, rng: random.Random) -> None:
        if len(self.log) > self.bases[-1] and rng.random() < self.rolls:
            self.bases.append(len(self.log))
        self.log.append(record)

    @override
    def follow(self, leader: Replica, count: int, rng: random.Random) -> None:
        same = shared(self, leader)
        start = leader.start if isinstance(leader, DiskReplica) else 0
        if same < start:  # what it lacks, the leader has no more
            super().follow(leader, start - same, rng)
            self.bases, self.start, self.restarted = [start], start, True
            self.removed, self.clean_to, same = set(), min(self.clean_to, start), start
        super().follow(leader, count, rng)
        cleaned = leader.removed if isinstance(leader, DiskReplica) else set()  # what its leader's cleaner has removed, it never gets
        self.removed = {offset for offset in self.removed if offset < same} | {o for o in cleaned if same <= o < len(self.log)}
        self.clean_to = min(self.clean_to, same)
        if self.bases[0] < self.start:  # truncated before its beginning: it begins anew
            self.start = self.bases[0] = same

    def present(self) -> dict[int, int]:
        """Offset -> number of every record on the disk."""
        return {offset: number for offset, _, number in self.log[self.start :] if offset not in self.removed}

    def takeable(self, is_taken: Callable[[int], bool]) -> dict[int, int]:
        """Offset -> number of the staged records that lead to the live log without a hole, and are of it.

        :param is_taken: of a file's change time.
        """
        found: dict[int, int] = {}
        begin = self.bases[0]
        while len(before := [each for each in self.staged.values() if each.records and each.end == begin]) == 1:
            (each,) = before
            of_log = all(self.log[offset][2] == number for offset, number in each.records.items())
            if not (each.expired and of_log and is_taken(each.changed_ms)) or each.damaged or len(each.records) < each.end - each.base:
                break
            found |= each.records
            begin = each.base
        return found

    def epochs(self) -> tuple[EpochEntry, ...]:
        """Its leader-epoch-checkpoint: an epoch that began before the local log begins there now."""
        entries = self.lineage()
        later = [entry for entry in entries if entry.start_offset > self.start]
        earlier = [EpochEntry(entry.epoch, Offset(self.start)) for entry in entries if entry.start_offset <= self.start]
        return (*earlier[-1:], *later)


class Directories(Replicas):
    """The brokers of one partition. Events change replicas; ``write`` brings their directories up to date.

    cleaned: whether the topic's brokers compact it themselves.
    """

    def __init__(self, rng: random.Random, root: Path, *, cleaned: bool) -> None:
        super().__init__(rng, TopicIdPartition(bytes(16), NAME.topic, NAME.partition), unclean=0.5, follows=0.6)
        self.root = root
        self.cleaned = cleaned
        self.known: dict[int, Written] = {}
        self.raw: dict[int, bytes] = {}
        self.incarnation = 0
        self.topic_id = EMPTY_TOPIC_ID
        self.rolls = [rng.choice((0.03, 0.06, 0.1)) for _ in self.replicas]
        self.disks: list[DiskReplica] = []
        self.clock: Callable[[], float] = lambda: 0
        self.renamed: dict[tuple[int, int], int] = {}
        self.create()

    @property
    def led(self) -> DiskReplica:
        """The replica that leads."""
        return self.disks[self.leader.number]

    def create(self) -> None:
        """The topic, for the first time or again: brokers rename what they are about to delete."""
        for disk in self.disks:
            if disk.folder.exists():
                disk.folder.rename(disk.folder.with_name(f"{NAME}.{self.incarnation:032x}-delete"))
            (disk.folder.parent / "cleaner-offset-checkpoint").unlink(missing_ok=True)
        self.incarnation += 1
        self.epoch = 0
        self.topic_id = TopicId(encode_segment_id(uuid.UUID(int=self.rng.getrandbits(128)).bytes) if self.rng.random() < 0.6 else "")
        has_epochs = self.rng.random() < 0.95
        self.disks = []
        for number, rolls in enumerate(self.rolls):
            disk = DiskReplica(number, folder=self.root / f"broker-{number}" / str(NAME), rolls=rolls, has_epochs=has_epochs)
            disk.topic_id = self.topic_id if self.rng.random() < 0.9 else EMPTY_TOPIC_ID
            disk.has_checkpoint = not self.cleaned or self.rng.random() < 0.6
            self.disks.append(disk)
        self.replicas = list(self.disks)
        self.leader = self.replicas[self.rng.randrange(len(self.replicas))]
        self.produce(self.rng.choice((5, 20, 40)))

    # --- what happens ---

    def happen(self) -> str:
        """One random event, in words."""
        dice = self.rng.random()
        led = self.led
        if dice < 0.42:
            count = self.rng.choice((1, 4, 10, 25))
            self.produce(count)
            return f"{count} records are written to broker {led.number}, up to {len(led.log) - 1}"
        if dice < 0.56:
            self.elect()
            return f"broker {self.leader.number} leads from {self.led.epochs()[-1]}"
        if dice < 0.66:
            disk = self.choose()
            if self.cleaned and self.rng.random() < 0.4:
                return self.lose(disk)
            disk.away_until = 0
            disk.follow(self.leader, 1000, self.rng)
            return f"broker {disk.number} catches up"
        if dice < 0.77:
            return self.retain(self.led if self.rng.random() < 0.5 else self.choose())
        if dice < 0.89:
            return self.clean(self.choose(), self.rng.choice((1, 2))) if self.cleaned else "nothing"
        if dice < 0.91:
            self.create()
            return f"the topic was deleted and created again, with id {self.topic_id or 'unknown'}"
        if dice < 0.96:
            disk = self.choose()
            disk.damaged = self.rng.choice(disk.bases) if disk.damaged < 0 else -1
            return f"broker {disk.number}: damage at {disk.damaged}"
        for disk in self.disks:
            disk.version += bool(disk.staged)
            disk.staged = {}
            for path in disk.folder.glob(f"*{DELETED}"):
                path.unlink()
        return "files staged for deletion go"

    def choose(self) -> DiskReplica:
        return self.disks[self.rng.randrange(len(self.disks))]

    @override
    def produce(self, count: int) -> None:
        """The leader writes so many records; a follower may fetch some of them, or all."""
        log = self.leader.log
        for _ in range(count):
            self.made += 1
            record, before = (len(log), self.epoch, self.made), log[-1][2] if log else 0
            value = (self.rng.choice(KEYS), None if self.rng.random() < 0.3 else str(self.made))
            if self.cleaned and self.rng.random() < 0.8:  # most keys are written once: the last batches of a tier outlive a cleaning
                value = (f"once-{self.made}", str(self.made))
            self.known[self.made] = Written(record, *value, before, self.incarnation)
            self.leader.append(record, self.rng)
        for replica in self.replicas:
            is_away = isinstance(replica, DiskReplica) and self.made < replica.away_until
            if replica is not self.leader and not is_away and self.rng.random() < self.follows:
                replica.follow(self.leader, self.rng.choice((count, 1000)), self.rng)

    def lose(self, disk: DiskReplica) -> str:
        """A broker that is away for long, a disk that is built anew from the leader, or a copy of a directory without its checkpoint."""
        dice = self.rng.random()
        if dice < 0.5:
            disk.away_until = self.made + self.rng.choice((50, 150, 400))
            return f"broker {disk.number} is away"
        if dice < 0.8 and disk is not self.led:
            disk.log, disk.bases, disk.removed, disk.clean_to, disk.start = [], [0], set(), 0, 0
            disk.follow(self.leader, 1000, self.rng)
            return f"broker {disk.number} is built anew up to {len(disk.log) - 1}"
        disk.has_checkpoint = not disk.has_checkpoint
        return f"broker {disk.number}: {'a' if disk.has_checkpoint else 'no'} checkpoint"

    def retain(self, disk: DiskReplica) -> str:
        """Retention: the first segments leave the local log, or all of them, the active one rolled in the same pass."""
        if self.rng.random() < 0.5:
            disk.start = len(disk.log)
            disk.bases = [disk.start]
            return f"broker {disk.number} rolls and expires all of its log, up to {disk.start - 1}"
        disk.start = self.rng.choice([*disk.bases[: len(disk.bases) // 2 + 1], disk.start])
        disk.bases = [base for base in disk.bases if base >= disk.start]
        return f"broker {disk.number} begins at {disk.start}"

    def clean(self, disk: DiskReplica, times: int) -> str:
        """The broker's cleaner: superseded records go, and tombstones that were there at the cleaning before."""
        end = disk.bases[-1]
        for _ in range(times):
            present = {offset: self.known[number] for offset, number in disk.present().items() if offset < end}
            last = {written.key: offset for offset, written in present.items()}
            for offset, written in present.items():
                if offset < last[written.key] or (written.value is None and offset < disk.clean_to):
                    disk.removed.add(offset)
            disk.clean_to = max(disk.clean_to, end)
        merged = [base for base in disk.bases[1:-1] if self.rng.random() < 0.3]
        disk.bases = [base for base in disk.bases if base not in merged]
        disk.swapped = True
        return f"broker {disk.number} has cleaned up to {disk.clean_to}"

    # --- what is asked ---

    def end(self) -> LeaderReportedLogEnd:
        """What the leader says of its log's end: all of it is committed, or what every replica has."""
        log = self.leader.log
        return LeaderReportedLogEnd(LeaderEpoch(self.epoch), len(log) if self.rng.random() < 0.6 else max(self.shared(), self.led.clean_to))

    def shared(self) -> int:
        """The offset up to which all replicas have the leader's log."""
        return min(shared(replica, self.leader) for replica in self.replicas)

    def chain(self, number: int) -> dict[int, int]:
        """Offset -> number of the record and all that were written before it, in the log that it was written to."""
        found = {}
        while number:
            written = self.known[number]
            found[written.record[0]] = number
            number = written.before
        return found

    def row(self, number: int) -> Row:
        """A record as the simulation compares it; its number stands where symbolic rows have a horizon."""
        written = self.known[number]
        return written.record[0], written.key, None if written.value is None else int(written.value), number

    # --- on the disk ---

    def write(self) -> None:
        for disk in self.disks:
            self._write(disk)

    def _write(self, disk: DiskReplica) -> None:
        cleaned = (disk.clean_to, disk.has_checkpoint, len(disk.removed))
        shape = (len(disk.log), disk.log[-1:], disk.start, cleaned, disk.damaged, tuple(disk.bases))
        if shape == disk.shape:
            return
        disk.shape = shape
        wanted = {f"{base:020}.log": self._segment(disk, base, end) for base, end in pairwise([*disk.bases, len(disk.log)])}
        if disk.has_epochs:
            lines = [f"{entry.epoch} {entry.start_offset}\n" for entry in disk.epochs()]
            wanted["leader-epoch-checkpoint"] = "".join(("0\n", f"{len(lines)}\n", *lines)).encode()
        if disk.topic_id:
            wanted["partition.metadata"] = f"version: 0\ntopic_id: {disk.topic_id}".encode()
        checkpoint = disk.folder.parent / "cleaner-offset-checkpoint"
        line = f"0\n1\n{NAME.topic} {NAME.partition} {disk.clean_to}\n" if disk.clean_to and disk.has_checkpoint else ""
        if wanted == disk.written and line == (checkpoint.read_text() if checkpoint.exists() else ""):
            return
        disk.version += 1
        disk.folder.mkdir(parents=True, exist_ok=True)
        for name in disk.written.keys() - wanted.keys():
            self._stage(disk, int(name[:20]), expired=int(name[:20]) < disk.start and not disk.restarted)
        for name, data in wanted.items():
            if disk.written.get(name) != data:
                path = disk.folder / name
                if disk.swapped and name.endswith(".log") and name in disk.written and int(name[:20]) < disk.clean_to:
                    self._stage(disk, int(name[:20]), expired=False)
                path.write_bytes(data)
                times = (1_600_000_000_000 + self.made * 100 + disk.version) * 1_000_000
                os.utime(path, ns=(times, times))
        checkpoint.write_text(line) if line else checkpoint.unlink(missing_ok=True)
        disk.written = wanted
        disk.restarted = disk.swapped = False
        present = disk.present()
        disk.held = {
            base: {offset: present[offset] for offset in range(base, end) if offset in present}
            for base, end in pairwise([*disk.bases, len(disk.log)])
        }

    def _stage(self, disk: DiskReplica, base: int, *, expired: bool) -> None:
        """Rename a segment's file, as brokers do before they delete it."""
        path = disk.folder / f"{base:020}.log"
        renamed = path.rename(path.with_name(path.name + DELETED))
        stat, now_ms = renamed.stat(), int(self.clock())
        self.renamed[stat.st_dev, stat.st_ino] = now_ms
        disk.staged[base] = StagedRecords(base, disk.held[base], expired, self._data(disk.held[base]) != disk.written[path.name], now_ms)

    def _data(self, records: Mapping[int, int]) -> bytes:
        return b"".join(self.raw[number] for number in records.values())

    def inode_change_ms(self, stat: os.stat_result) -> int:
        """When a file was renamed, by the clock of the life."""
        return self.renamed.get((stat.st_dev, stat.st_ino), 0)

    def _segment(self, disk: DiskReplica, base: int, end: int) -> bytes:
        data = b"".join(self._batch(record) for record in disk.log[base:end] if record[0] not in disk.removed)
        if disk.damaged != base or not data:
            return data
        return data[:-1] + bytes([data[-1] ^ 1])

    def _batch(self, record: Record) -> bytes:
        offset, epoch, number = record
        if number not in self.raw:
            written = self.known[number]
            value = None if written.value is None else written.value.encode()
            self.raw[number] = encode_batch([BuiltRow(offset, number, written.key.encode(), value)], leader_epoch=epoch)
        return self.raw[number]

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
