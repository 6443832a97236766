"""Files staged for deletion (``NNN.log.deleted``), held open, because unlinking does not take a file's bytes from its readers; and the
steps by which segments enter the tier.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from bloom.sidecar import Sidecar
from checkpoint.lineage import EpochEntry, Lineage, first_contradicting_offset, leader_epoch_at, merge_segment_lineages
from compactor.access.tier import Tier
from compactor.cleaner.rewrite import build_sidecar
from compactor.cleaner.source import SourceSegment, open_source_segment
from compactor.cleaner.worker_threads import WorkerThreads
from compactor.constants import EMPTY_TOPIC_ID, LeaderEpoch, Offset, TopicId
from compactor.control.importing import (
    find_closed_import,
    record_prepended_segments,
    record_tail_truncation,
    record_tiered_segments,
    register_import,
)
from compactor.control.logs import PartitionLog
from compactor.control.ports import EnvironmentPorts
from compactor.control.records import LastImportedBatch, TailTruncated
from compactor.control.state import PartitionState
from compactor.errors import OutOfBudget, StoreError
from compactor.features.imports.log_directory import (
    DELETED,
    SegmentToImport,
    prepare_segment_upload,
    read_epoch_checkpoint,
    require_file_unchanged,
    segment_log_path,
    staged_segment_path,
)
from compactor.local.budget import spool_folder
from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.model.plan import CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import BatchTable, Bytes, read_only_view
from compactor.records.encode import BalanceDigestKey
from compactor.records.indexes import parse_txn_index
from compactor.storage.schemes import existing_folder
from compactor.tier.sidecars import SidecarStore

# ---- which staged files still belong to the log -------------------------------------------------------------------------------
#
# Kafka removes a segment by renaming its files, and unlinks them ``file.delete.delay.ms`` later (LocalLog.deleteSegmentFiles). Retention
# and DeleteRecords do so at the front of the log, and leave the same files: the two cannot be told apart. Truncations and the log cleaner
# do so, too, with records that the log does not have any more. So a staged file is taken only if every rule of ``choose_staged_files``
# holds.


@dataclass(frozen=True)
class FileStagedForDeletion:
    """Segment file renamed for deletion.

    changed_ms: when the broker renamed the file (inode change time).
    inode: device and inode number, because a later file may take the same name.
    """

    base: int
    size: int
    mtime_ms: int
    changed_ms: int
    inode: tuple[int, int]


@dataclass(frozen=True)
class SegmentStagedForDeletion:
    """Content of a staged file.

    last_offset: less than ``base`` if it has no batch.
    epochs: in the order of the batches.
    """

    base: int
    last_offset: int
    epochs: Lineage = ()


@dataclass(frozen=True)
class BrokerLiveLog:
    """The part of a broker's log that is not staged for deletion.

    bases: ascending, with the active segment.
    first_epoch: -1 if unknown.
    cleaned: first offset that no log cleaner has cleaned, of this broker or of a leader from which it has fetched.
    """

    bases: tuple[int, ...]
    first_epoch: int = -1
    cleaned: int = 0


@dataclass(frozen=True)
class TierEnd:
    """End of a partition in the tier.

    position: last offset + 1, or where the tier's end is to be cut; None for an empty tier.
    lineage: without the epochs that are to be cut.
    """

    position: int | None
    lineage: Lineage = ()


@dataclass(frozen=True)
class StagedFileChoice:
    """taken: base offsets, ascending. refusals: why a file with offsets that the tier lacks is not imported."""

    taken: tuple[int, ...] = ()
    refusals: Mapping[int, str] = field(default_factory=dict)


def choose_staged_files(segments: Sequence[SegmentStagedForDeletion], live_log: BrokerLiveLog, tier_end: TierEnd) -> StagedFileChoice:
    """Choose what continues the tier up to the live log. Nothing is taken if the live log continues it by itself; those without an offset
    at or after the tier's position are ignored.
    """
    position = 0 if tier_end.position is None else tier_end.position
    if not live_log.bases or (tier_end.position is not None and live_log.bases[0] <= position):
        return StagedFileChoice()
    missing = [segment for segment in segments if segment.last_offset >= max(segment.base, position)]
    refusals = {segment.base: replaced_problem(segment, live_log) or not_below_problem(segment, live_log) for segment in missing}
    chain = longest_chain([segment for segment in missing if not refusals[segment.base]], live_log)
    while tier_end.position is None and (reason := cleaned_log_problem(chain, live_log, tier_end)):
        refusals[chain[0].base], chain = reason, chain[1:]  # an empty tier may begin with what the cleaner has not reached
    problem = gap_problem(chain, tier_end) or epochs_problem(chain, live_log, tier_end) or cleaned_log_problem(chain, live_log, tier_end)
    linked_bases = {segment.base for segment in chain}
    for segment in missing:
        if not refusals[segment.base]:
            unlinked = f"it ends at offset {segment.last_offset}, and it is not the only one before a segment that is taken or live"
            refusals[segment.base] = problem if segment.base in linked_bases else unlinked
    taken = () if problem else tuple(segment.base for segment in chain)
    return StagedFileChoice(taken, {base: reason for base, reason in refusals.items() if reason})


def replaced_problem(segment: SegmentStagedForDeletion, live_log: BrokerLiveLog) -> str:
    """Empty: no problem. The log cleaner, and a roll over an empty active segment, replace a file by one of the same name."""
    return "a live segment has its base offset: it was replaced" if segment.base in live_log.bases else ""


def not_below_problem(segment: SegmentStagedForDeletion, live_log: BrokerLiveLog) -> str:
    """Retention removes segments from the front only, truncation and log cleaner others."""
    if segment.base < live_log.bases[0] and segment.last_offset < live_log.bases[0]:
        return ""
    return f"it is not wholly below offset {live_log.bases[0]}, where the live log begins: a truncation or the log cleaner removed it"


def longest_chain(segments: Sequence[SegmentStagedForDeletion], live_log: BrokerLiveLog) -> tuple[SegmentStagedForDeletion, ...]:
    """Longest chain, ascending, up to the live log. It stops where two segments end at the same offset, because nothing tells two branches
    of the log apart.
    """
    chain: list[SegmentStagedForDeletion] = []
    begin = live_log.bases[0]
    while len(before := [segment for segment in segments if segment.last_offset + 1 == begin]) == 1:
        chain.insert(0, before[0])
        begin = before[0].base
    return tuple(chain)


def gap_problem(chain: Sequence[SegmentStagedForDeletion], tier_end: TierEnd) -> str:
    """Any chain continues an empty tier."""
    if not chain or tier_end.position is None or chain[0].base <= tier_end.position:
        return ""
    return f"the tier ends before offset {tier_end.position}, and what is staged begins at {chain[0].base}: it leaves a gap"


def epochs_problem(chain: Sequence[SegmentStagedForDeletion], live_log: BrokerLiveLog, tier_end: TierEnd) -> str:
    """Epochs never decrease along a log. Batches of v0 and v1 have none."""
    named = [entry for segment in chain for entry in segment.epochs if entry.epoch >= 0]
    falls = next((after for before, after in pairwise(named) if after.epoch < before.epoch), None)
    if falls is not None:
        return f"leader epoch {falls.epoch} at offset {falls.start_offset} is lower than the one before it"
    if named and 0 <= live_log.first_epoch < named[-1].epoch:
        return f"it was written in leader epoch {named[-1].epoch}, and the live log begins with epoch {live_log.first_epoch}"
    given = merge_segment_lineages([named])
    if tier_end.position is None or not given:
        return ""
    older = given[0].epoch < leader_epoch_at(tier_end.lineage, given[0].start_offset)
    if older or first_contradicting_offset(tier_end.lineage, tier_end.position, given, chain[-1].last_offset + 1) is not None:
        both = f"{lineage_text(tier_end.lineage)} in the tier, {lineage_text(given)} in what is staged"
        return f"its leader epochs are not those of the tier's log: {both}"
    return ""


def cleaned_log_problem(chain: Sequence[SegmentStagedForDeletion], live_log: BrokerLiveLog, tier_end: TierEnd) -> str:
    """The cleaner may have dropped a tombstone after retention had staged the key's older records, which would bring the key back."""
    if not chain or live_log.cleaned <= max(chain[0].base, tier_end.position or 0):
        return ""
    return f"a log cleaner has cleaned the log up to offset {live_log.cleaned}: tombstones may be gone that delete keys in what is staged"


def lineage_text(lineage: Lineage) -> str:
    return ", ".join(f"{entry.epoch} from {entry.start_offset}" for entry in lineage) or "none"


STAGED_NAME = re.compile(r"(\d{20})\.log\.deleted")
_MAGIC, _EPOCH = 16, slice(12, 16)


@dataclass(frozen=True)
class HeldFileStagedForDeletion:
    """A staged file that this process holds open."""

    file: FileStagedForDeletion
    descriptor: int
    txn_index: bytes

    @property
    def is_unlinked(self) -> bool:
        """True if the broker has deleted the file."""
        return os.fstat(self.descriptor).st_nlink == 0

    def map_bytes(self) -> Bytes:
        if not self.file.size:
            return read_only_view(np.empty(0, np.uint8))
        return np.frombuffer(mmap.mmap(self.descriptor, self.file.size, access=mmap.ACCESS_READ), np.uint8)

    def open_segment(self, log_dir: Path, next_base_offset: int | None, policy: CleanerPolicy) -> SourceSegment:
        file, limit, path = self.file, policy.max_decompressed_batch_bytes, staged_segment_path(log_dir, self.file.base)
        entries = parse_txn_index(self.txn_index, path.name.replace(".log", ".txnindex"))

        def read_from_open_file(path: Path) -> Bytes:
            return self.map_bytes()

        return open_source_segment(
            0, path, file.base, next_base_offset, file.mtime_ms, -1, limit, txn_entries=entries, read_bytes=read_from_open_file
        )

    def describe_segment(self, log_dir: Path, policy: CleanerPolicy) -> SegmentStagedForDeletion:
        """From the batch headers. Raises BadData."""
        table = self.open_segment(log_dir, None, policy).table
        last = int(table.last_offset[-1]) if len(table) else self.file.base - 1
        return SegmentStagedForDeletion(self.file.base, last, epochs_of_batches(table))


def inode_change_ms(stat: os.stat_result) -> int:
    """For a staged file: its renaming."""
    return stat.st_ctime_ns // 1_000_000


def describe_staged_file(base_offset: int, stat: os.stat_result) -> FileStagedForDeletion:
    return FileStagedForDeletion(
        base_offset, stat.st_size, stat.st_mtime_ns // 1_000_000, inode_change_ms(stat), (stat.st_dev, stat.st_ino)
    )


def list_staged_files(log_dir: Path, live_base_offsets: Sequence[int]) -> list[FileStagedForDeletion]:
    """Files that begin before the live log, ascending. Raises OSError."""
    found = []
    with os.scandir(log_dir) as entries:
        for entry in entries:
            match = STAGED_NAME.fullmatch(entry.name)
            if match and int(match[1]) < min(live_base_offsets, default=0):
                with suppress(FileNotFoundError):
                    found.append(describe_staged_file(int(match[1]), entry.stat()))
    return sorted(found, key=lambda file: file.base)


def epochs_of_batches(table: BatchTable) -> Lineage:
    epochs = table.leader_epoch
    changes = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist()] if len(epochs) else []
    return tuple(EpochEntry(LeaderEpoch(int(epochs[batch])), Offset(int(table.base_offset[batch]))) for batch in changes)


def first_live_epoch(log_dir: Path, live_base_offsets: Sequence[int]) -> LeaderEpoch:
    """Epoch of the first batch, or of the checkpoint if no segment has a batch; -1 if unknown. Raises BadData, OSError."""
    for base in live_base_offsets:
        with segment_log_path(log_dir, base).open("rb") as file:
            header = file.read(_MAGIC + 1)
        if len(header) > _MAGIC:
            return LeaderEpoch(int.from_bytes(header[_EPOCH], "big", signed=True) if header[_MAGIC] == 2 else -1)
    return leader_epoch_at(read_epoch_checkpoint(log_dir), live_base_offsets[0])


class OpenFilesStagedForDeletion:
    """Staged files of one partition, held open so that they can be read after the broker deletes them.

    Any thread may open files; only their reader, or a thread that knows that nothing reads them, may close any.

    refusals: why the latest import did not take a file.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.refusals: dict[int, str] = {}
        self._directory = -1
        self._held: dict[tuple[int, int], HeldFileStagedForDeletion] = {}
        self._changing = threading.RLock()

    @property
    def held_files(self) -> tuple[HeldFileStagedForDeletion, ...]:
        with self._changing:
            return tuple(sorted(self._held.values(), key=lambda held: held.file.base))

    def open_files(self, files: Sequence[FileStagedForDeletion]) -> None:
        """Files that are not open yet, except those that were deleted or replaced meanwhile."""
        for file in files:
            with self._changing, suppress(OSError):
                if file.inode not in self._held:
                    self._open_file(file)

    def close_outdated_files(self, listed_files: Sequence[FileStagedForDeletion]) -> None:
        """Close files whose names other files have taken; all if the log directory was replaced, because the topic was created again.
        Raises OSError if the directory is gone.
        """
        moved = self._directory >= 0 and not os.path.samestat(os.fstat(self._directory), self.log_dir.stat())
        inodes = {file.base: file.inode for file in listed_files}
        self.close_unwanted_files(lambda held: not moved and inodes.get(held.file.base, held.file.inode) == held.file.inode)

    def close_unwanted_files(self, is_wanted: Callable[[HeldFileStagedForDeletion], bool]) -> None:
        with self._changing:
            for inode, held in list(self._held.items()):
                if not is_wanted(held):
                    del self._held[inode]
                    os.close(held.descriptor)
            if not self._held and self._directory >= 0:
                os.close(self._directory)
                self._directory = -1

    def close(self) -> None:
        self.close_unwanted_files(lambda held: False)

    def _open_file(self, file: FileStagedForDeletion) -> None:
        """Raises OSError, also if the file is not the one that was listed."""
        descriptor = os.open(staged_segment_path(self.log_dir, file.base), os.O_RDONLY)
        try:
            stat = os.fstat(descriptor)
            if stat.st_nlink == 0 or describe_staged_file(file.base, stat) != file:
                raise FileNotFoundError(file.base)
            index = segment_log_path(self.log_dir, file.base).with_suffix(f".txnindex{DELETED}")
            txn_index = index.read_bytes() if index.exists() else b""
            if self._directory < 0:
                self._directory = os.open(self.log_dir, os.O_RDONLY)
        except OSError:
            os.close(descriptor)
            raise
        self._held[file.inode] = HeldFileStagedForDeletion(file, descriptor, txn_index)


# ---- upload of one segment: its files and its sidecar -------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentUploadSettings:
    """threads: for the sidecar of one segment. advance: called from threads with the size of each uploaded segment."""

    tier: Tier
    partition: TopicPartition
    policy: CleanerPolicy
    threads: int
    sidecars: SidecarStore | None
    advance: Callable[[int], None]


@dataclass(frozen=True)
class SegmentUpload:
    """Segment that an import adds to the tier. identity_check: raises BadData if the directory's topic was recreated."""

    how: SegmentUploadSettings
    member: SegmentToImport
    lineage: Lineage
    identity_check: Callable[[], None]

    @property
    def content_identity(self) -> str:
        return f"{self.member.start} {self.member.end} {self.member.checked.sha256}"

    def upload_under_id(self, segment_id: str) -> RemoteLogSegmentMetadata | None:
        how = self.how
        with tempfile.TemporaryDirectory(prefix="import-", dir=spool_folder(how.tier.state_dir)) as scratch:
            key = BalanceDigestKey(how.tier.identity.hash_key())
            metadata, paths = prepare_segment_upload(self.member, segment_id, self.lineage, how.policy, key, Path(scratch))
            if how.tier.ports.layout.upload_segment(how.partition, metadata, paths):
                return None
        if how.sidecars is not None:
            how.sidecars.add_sidecar(self._build_sidecar(metadata.id, how.sidecars.hash_key))
        how.advance(metadata.size_bytes)
        return metadata

    def _build_sidecar(self, segment_id: str, hash_key: bytes) -> Sidecar:
        builder = self.member.checked.builder
        if builder is not None and builder.hash_key == hash_key:
            return builder.build_sidecar(segment_id)
        # Another process has created the tier meanwhile, so the builder hashed the keys with another hash key.
        with WorkerThreads(self.how.threads) as workers:
            return build_sidecar(
                segment_id,
                self.member.source,
                None,
                hash_key,
                self.how.policy.max_decompressed_batch_bytes,
                workers,
                counts_distinct_keys=True,
            )

    def check_source_unchanged(self) -> None:
        require_file_unchanged(self.member)
        self.identity_check()


def require_free_space(url: str, needed_bytes: int) -> None:
    """Raise OutOfBudget if the tier is a directory on a disk without space for ``needed_bytes``."""
    disk = existing_folder(url)
    if disk is None:
        return
    free = shutil.disk_usage(disk).free
    if free < needed_bytes:
        raise OutOfBudget(
            f"this import needs {needed_bytes} bytes, and the disk of {disk} has {free} left",
            hint="Free space, or move the tier to a larger disk",
        )


# ---- steps by which segments enter the tier: ids registered < objects created < sources checked again < segments tiered -------
#
# An interrupted import is resumed: its id is derived from what it brings, and the ids of its segments are in the control log.


MOST_ATTEMPTS = 1000


class IncomingSegment(Protocol):
    @property
    def content_identity(self) -> str:
        """Equal if and only if offsets and bytes are equal."""

    def upload_under_id(self, segment_id: str) -> RemoteLogSegmentMetadata | None:
        """Create the objects. Return None if objects with other content have the id."""

    def check_source_unchanged(self) -> None:
        """Raise BadData if the source has changed since ``upload_under_id`` read it."""


@dataclass(frozen=True)
class SegmentAddition:
    """Data recorded together with new segments, and callbacks.

    tail: the last batches, by which the next import recognises the log.
    before: add at the log's start, not at its end.
    at_once: number of segments uploaded at the same time.
    fits: raises an error if the segments do not continue the tier's state.
    listed: called before anything is created, so that a sweep finds what a killed import leaves.
    log_start: for the first segments of a partition; 0 if the log begins with them.
    source_cleaned_to: offset up to which the log was compacted; 0 if it shows no sign.
    accept_loss: a person has accepted that tombstones and transaction markers are missing after the tier's end.
    cut: the truncation, if the segments replace the tier's end. A segment that begins before it is the rest of the cut segment.
    """

    lineage: Lineage
    tail: tuple[LastImportedBatch, ...] = ()
    before: bool = False
    at_once: int = 1
    topic_id: TopicId = EMPTY_TOPIC_ID
    fits: Callable[[PartitionState], None] = lambda state: None
    listed: Callable[[], None] = lambda: None
    noted: Callable[[], None] = lambda: None
    log_start: int = 0
    source_cleaned_to: int = 0
    accept_loss: bool = False
    cut: TailTruncated | None = None


def add_segments_once(ports: EnvironmentPorts, log: PartitionLog, incoming: Sequence[IncomingSegment], addition: SegmentAddition) -> bool:
    """All segments become readable, or none. Return False if the same import was complete already, also by another process.

    :raises BadData: if a source changed meanwhile, or the segments no longer fit the tier because another process has changed it.
    :raises Fenced: if the import was voided because it paused too long.
    :raises StoreError: the next attempt finds created objects again, or a sweep deletes them.
    """
    for import_id in _import_ids_by_attempt(incoming, addition.cut):
        if find_closed_import(log.state, import_id) is None and _try_import(ports, log, import_id, incoming, addition):
            return True
        closed = find_closed_import(log.state, import_id)
        if closed is not None and not closed.voided and closed.tiered_end <= log.state.end_offset:
            return False
    raise StoreError("this import was voided too often", hint="See why with `explain`, or raise publish.orphan_age_ms")


def _try_import(
    ports: EnvironmentPorts, log: PartitionLog, import_id: str, incoming: Sequence[IncomingSegment], addition: SegmentAddition
) -> bool:
    """Return False if new ids are needed: the id is closed, or an attempt with other settings left other objects."""
    segments: list[RemoteLogSegmentMetadata] | None = []
    if incoming:
        state = register_import(ports, log, import_id, [ports.new_id() for _ in incoming], addition.fits)
        addition.listed()
        entry = state.registrations.get(import_id)
        if entry is None or len(entry.ids) != len(incoming):
            return False
        segments = _upload_segments(incoming, entry.ids, addition.at_once)
    if segments is None:
        return False
    if addition.cut is not None:
        record_tail_truncation(ports, log, _complete_truncation_record(addition.cut, import_id, segments, addition))
    elif addition.before:
        record_prepended_segments(ports, log, import_id, segments, addition.lineage, addition.topic_id)
    else:
        start = min(addition.log_start, segments[-1].end_offset + 1)
        log_start = start if start > segments[0].start_offset else None
        record_tiered_segments(
            ports,
            log,
            import_id,
            segments,
            addition.lineage,
            addition.tail,
            addition.topic_id,
            log_start,
            addition.source_cleaned_to,
            addition.accept_loss,
        )
    addition.noted()
    return True


def _complete_truncation_record(
    truncation: TailTruncated, cut_id: str, segments: Sequence[RemoteLogSegmentMetadata], addition: SegmentAddition
) -> TailTruncated:
    head = segments[0] if segments and segments[0].start_offset < truncation.offset else None
    new = tuple(segments if head is None else segments[1:])
    known = {"lineage": addition.lineage, "tail": addition.tail, "topic_id": addition.topic_id}
    return truncation.model_copy(update={"cut_id": cut_id, "head": head, "segments": new, **known})


def _upload_segments(incoming: Sequence[IncomingSegment], ids: Sequence[str], max_parallel: int) -> list[RemoteLogSegmentMetadata] | None:
    """Return None if objects with other content have one of the ids. After an error no further upload is begun."""

    def upload_one(segment: IncomingSegment, segment_id: str) -> RemoteLogSegmentMetadata | None:
        metadata = segment.upload_under_id(segment_id)
        if metadata is not None:
            require_source_unchanged(segment)
        return metadata

    found = []
    for metadata in _upload_in_order(upload_one, incoming, ids, max_parallel):
        if metadata is None:
            return None
        found.append(metadata)
    return found


def _upload_in_order(
    upload: Callable[[IncomingSegment, str], RemoteLogSegmentMetadata | None],
    incoming: Sequence[IncomingSegment],
    ids: Sequence[str],
    max_parallel: int,
) -> Iterator[RemoteLogSegmentMetadata | None]:
    if min(max_parallel, len(incoming)) < 2:
        yield from map(upload, incoming, ids)
        return
    pool = ThreadPoolExecutor(max_parallel, "upload")
    try:
        yield from pool.map(upload, incoming, ids)
    finally:
        pool.shutdown(cancel_futures=True)


def require_source_unchanged(segment: IncomingSegment) -> None:
    """Raise BadData if a source changed: the created objects must not become readable."""
    segment.check_source_unchanged()


def _import_ids_by_attempt(incoming: Sequence[IncomingSegment], truncation: TailTruncated | None) -> Iterator[str]:
    """Derived from the offsets, the bytes and the replaced segments."""
    replaced = () if truncation is None else (f"cut {truncation.offset}", *truncation.voided)
    identity = "\n".join([*replaced, *(one.content_identity for one in incoming)]).encode()
    for attempt in range(MOST_ATTEMPTS):
        yield encode_segment_id(hashlib.sha256(identity + attempt.to_bytes(4, "big")).digest()[:16])
