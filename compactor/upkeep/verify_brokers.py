"""``verify`` of a tier that brokers write: the fsck that such tiers lack. Reads only; brokers go on meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from checkpoint.files import parse_leader_epoch_checkpoint
from checkpoint.lineage import epoch_at
from compactor.bootstrap import Tier
from compactor.cleaner.passes.describe import content_of
from compactor.cleaner.passes.source import SourceSegment, open_source
from compactor.cleaner.passes.transactions import txnindex_misfit
from compactor.control.mirror import described
from compactor.errors import BadData, NotFound, OutOfBudget, Refused
from compactor.local.budget import blocks
from compactor.local.spool import process_folder
from compactor.metadata_topic.cache import lineage_of
from compactor.metadata_topic.chain import gaps
from compactor.metadata_topic.codec import RemoteLogSegmentMetadataRecord
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL
from compactor.records.indexes import index_misfit, parse_txn_index, timeindex_misfit
from compactor.records.producers import parse_snapshot
from compactor.round.compaction import disk_budget
from compactor.tier.brokers import effective
from compactor.tier.recorded import download
from compactor.upkeep.broker_findings import BrokerFinding, finding
from compactor.upkeep.broker_objects import PartitionObjects, look

SHOWN = 3
OnBytes = Callable[[int], None]


def verify_brokers_partition(
    opened: Tier, name: TopicPartition, *, fast: bool, on_bytes: OnBytes = lambda size: None
) -> list[BrokerFinding]:
    """All that is wrong or remarkable. ``fast``: without reading segments.

    :raises OutOfBudget: a segment that does not fit within ``disk_budget_bytes``.
    :raises StoreError: the store or the brokers do not answer.
    """
    try:
        seen = look(opened, name)
    except BadData as error:
        return [finding("unreadable-metadata", name, f"{error.segment} at offset {error.offset}", error.cause)]
    found = [*_of_metadata(opened, name, seen), *_of_objects(opened, name, seen), *_of_uploads(opened, name)]
    check = _Segments(opened, name)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=process_folder(opened.state_dir)) as scratch:
        for record in seen.readable:
            problems = list(_of_parts(opened, name, seen, record))
            if not problems and not fast:
                problems = check.run(record, Path(scratch))
            if problems and _went(opened, name, record):
                continue
            found += problems
            on_bytes(record.size_bytes)
    return found


def _went(opened: Tier, name: TopicPartition, record: RemoteLogSegmentMetadataRecord) -> bool:
    """Whether brokers have deleted it while we looked."""
    opened.metadata.refresh(within_s=0.0)
    now = opened.metadata.folded(name).cache.segments.get(record.segment_id)
    return now is None or now.state is not SegmentState.COPY_SEGMENT_FINISHED


def _of_metadata(opened: Tier, name: TopicPartition, seen: PartitionObjects) -> Iterator[BrokerFinding]:
    """What the metadata alone tells."""
    cache = seen.folded.cache
    view = effective(cache, name)
    for first, last in gaps(view.links):
        yield finding("gap", name, "", f"offsets {first} to {last} are in no segment that readers find")
    read = {link.segment.segment_id for link in view.links}
    now = opened.metadata.taken_ms if opened.metadata.taken_ms >= 0 else opened.ports.clock_ms()
    for segment in cache.list_all():
        span = f"offsets {segment.start_offset} to {segment.end_offset}"
        old = now - segment.event_timestamp_ms > opened.retention.orphan_age_ms
        if segment.state is SegmentState.COPY_SEGMENT_FINISHED and segment.segment_id not in read:
            yield finding("unread", name, segment.id, f"readers find its {span} elsewhere, or no longer")
        elif segment.state is SegmentState.COPY_SEGMENT_STARTED and old:
            yield finding("stuck-copy", name, segment.id, f"its copy ({span}) was begun by broker {segment.broker_id} and never finished")
        elif segment.state is SegmentState.DELETE_SEGMENT_STARTED and old:
            yield finding("stuck-delete", name, segment.id, f"its deletion ({span}) was begun by broker {segment.broker_id}")
    for dropped in seen.folded.findings:
        yield finding("dropped-record", name, f"offset {dropped.offset} of the metadata topic", dropped.said)


def _of_objects(opened: Tier, name: TopicPartition, seen: PartitionObjects) -> Iterator[BrokerFinding]:
    for one in seen.orphans:
        why = "its segment's deletion is recorded as finished" if one.finished else "no metadata has ever named its segment"
        yield finding("orphan", name, one.listed.key, why)
    for stranger in seen.strangers:
        yield finding("stranger", name, stranger.key, "its name is none that a broker gives")


def _of_uploads(opened: Tier, name: TopicPartition) -> Iterator[BrokerFinding]:
    store, now = opened.ports.data, opened.ports.clock_ms()
    prefix = opened.ports.layout.folder(name)
    try:
        for upload in store.unfinished(prefix):
            if now - upload.begun_ms > opened.retention.orphan_age_ms:
                yield finding(
                    "unfinished", name, upload.key, f"upload {upload.id} was begun {(now - upload.begun_ms) // 3_600_000} hours ago"
                )
    except Refused as error:
        yield finding("uploads-unknown", name, prefix, error.message)


def _of_parts(
    opened: Tier, name: TopicPartition, seen: PartitionObjects, record: RemoteLogSegmentMetadataRecord
) -> Iterator[BrokerFinding]:
    """Whether a readable segment's objects are all there, in their sizes."""
    layout, segment = opened.ports.layout, described(record)
    missing = seen.missing(record, layout.parts)
    for part in missing:
        yield finding("missing", name, layout.where(name, segment, part), f"it is not in the store (segment {record.id})")
    if missing:
        return
    try:
        problem = layout.problem(name, segment)
    except BadData as error:
        problem = error.cause
    if problem:
        kind = "missing" if "missing" in problem else "size" if " bytes" in problem else "object"
        yield finding(kind, name, layout.where(name, segment, "log"), problem)


@dataclass
class _Segments:
    """Segments one after the other, as what a transaction begins in one may be aborted in a later one."""

    opened: Tier
    name: TopicPartition
    open: dict[int, int] = field(default_factory=dict)
    """Producer id -> first offset of its open transaction."""

    def run(self, record: RemoteLogSegmentMetadataRecord, scratch: Path) -> list[BrokerFinding]:
        layout = self.opened.ports.layout
        segment = described(record)
        try:
            segment = segment.model_copy(update={"files": dict(layout.files(self.name, segment))})
            self._check_room(segment)
            paths = self._fetched(segment, scratch)
        except NotFound as error:
            return [self._finding("missing", segment, "log", error.message)]
        except BadData as error:
            return [finding("object", self.name, error.segment or layout.where(self.name, segment, "log"), error.cause)]
        limit = self.opened.settings.cleaner_for(self.name.topic).max_decompressed_batch_bytes
        try:
            source = open_source(0, paths["log"], record.start_offset, record.end_offset + 1, segment.mtime_ms, -1, limit)
            source.name = layout.where(self.name, segment, "log")
            source.verify(0, len(source.table))
        except BadData as error:
            self.open.clear()  # what it holds of transactions is not known
            return [self._finding("log", segment, "log", f"{error.cause}{f' at byte {error.position}' if error.position >= 0 else ''}")]
        found = [self._finding(kind, segment, "log", detail) for kind, detail in _of_log(record, source)]
        beside = {kind: path.read_bytes() for kind, path in paths.items() if kind != "log"}
        found += [self._finding(kind, segment, kind, detail) for kind, detail in _beside(record, source, beside)]
        if detail := self._aborted(source, beside.get("txnindex", b"")):
            found.append(self._finding("txnindex", segment, "txnindex", detail))
        return found

    def _fetched(self, segment: RemoteLogSegmentMetadata, scratch: Path) -> dict[str, Path]:
        paths = {}
        for kind, file in segment.files.items():
            path = scratch / kind
            path.unlink(missing_ok=True)
            arrived = download(self.opened.ports.layout, self.name, segment, kind, path)
            if arrived.size != file.size:
                where = self.opened.ports.layout.where(self.name, segment, kind)
                raise BadData(f"it has {arrived.size} bytes, {file.size} are expected", segment=where)
            paths[kind] = path
        return paths

    def _check_room(self, segment: RemoteLogSegmentMetadata) -> None:
        needed = sum(blocks(file.size) for file in segment.files.values())
        budget = disk_budget(self.opened.settings.cleaner_for(self.name.topic), self.opened.state_dir)
        if needed > budget:
            raise OutOfBudget(
                f"segment {segment.id} takes {needed} bytes of local disk, and the disk budget is {budget}",
                hint=f"Set disk_budget_bytes to at least {needed}, or use --fast",
            )

    def _aborted(self, source: SourceSegment, data: bytes) -> str:
        """Whether the transaction index names every transaction that was aborted in this segment, and no other."""
        expected = self._aborted_here(source)
        try:
            entries = parse_txn_index(data, "")
        except BadData as error:
            return error.cause
        told = {(int(entry["producer_id"]), int(entry["last_offset"])) for entry in entries}
        lacking = [one for one in expected if one not in told]
        if lacking:
            some = ", ".join(f"producer {producer} at offset {offset}" for producer, offset in lacking[:SHOWN])
            return f"{len(lacking)} of {len(expected)} aborted transactions are not in it ({some}{' ...' if len(lacking) > SHOWN else ''})"
        return txnindex_misfit(entries, source)

    def _aborted_here(self, source: SourceSegment) -> list[tuple[int, int]]:
        """(producer, offset of the marker) of transactions with records that are aborted in this segment."""
        table, found = source.table, []
        for batch in np.flatnonzero(table.is_transactional).tolist():
            producer, control = int(table.producer_id[batch]), int(table.control[batch])
            if control == NOT_CONTROL:
                self.open.setdefault(producer, int(table.base_offset[batch]))
            elif control in (ABORT, COMMIT) and self.open.pop(producer, None) is not None and control == ABORT:
                found.append((producer, int(table.base_offset[batch])))
        return found

    def _finding(self, kind: str, segment: RemoteLogSegmentMetadata, part: str, detail: str) -> BrokerFinding:
        return finding(kind, self.name, self.opened.ports.layout.where(self.name, segment, part), detail)


def _of_log(record: RemoteLogSegmentMetadataRecord, source: SourceSegment) -> Iterator[tuple[str, str]]:
    """A sound log against what brokers decide by without a look into it."""
    table = source.table
    if not len(table):
        yield "log", "there is no batch in it"
        return
    # Brokers count markers, too; what this program writes is found by the time of its records (docs/broker-protocol.md, R7).
    ours = record.broker_id == COMPACTOR_BROKER_ID
    latest = content_of(table).max_timestamp_ms if ours else int(table.max_timestamp.max())
    if source.size != record.size_bytes:
        yield "size", f"it has {source.size} bytes, metadata says {record.size_bytes}"
    if int(table.last_offset[-1]) != record.end_offset:
        yield "metadata", f"its last offset is {int(table.last_offset[-1])}, metadata says {record.end_offset}"
    if latest != record.max_timestamp_ms:
        yield "metadata", f"its latest record is of {latest}, metadata says {record.max_timestamp_ms}"
    lineage = lineage_of(record)
    named = np.flatnonzero(table.magic == 2)
    starts = np.array([entry.start_offset for entry in lineage])
    epochs = np.array([entry.epoch for entry in lineage])
    place = np.searchsorted(starts, table.base_offset[named], side="right") - 1
    wrong = named[(place < 0) | (epochs[np.maximum(place, 0)] != table.leader_epoch[named])]
    if len(wrong):
        first = int(wrong[0])
        said = epoch_at(lineage, int(table.base_offset[first]))
        yield "epochs", f"the batch at {int(table.base_offset[first])} is of epoch {int(table.leader_epoch[first])}, metadata says {said}"


def _beside(record: RemoteLogSegmentMetadataRecord, source: SourceSegment, files: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """The files beside a sound log, the transaction index apart."""
    problems: dict[str, Callable[[bytes], str]] = {
        "index": lambda data: index_misfit(data, source.base, source.table),
        "timeindex": lambda data: timeindex_misfit(data, source.base, source.table),
        "snapshot": _snapshot_problem,
        "leader-epoch-checkpoint": lambda data: _checkpoint_problem(data, record),
    }
    for kind, problem in problems.items():
        if kind in files and (detail := problem(files[kind])):
            yield kind, detail


def _snapshot_problem(data: bytes) -> str:
    try:
        parse_snapshot(data, "snapshot")
    except BadData as error:
        return error.cause
    return ""


def _checkpoint_problem(data: bytes, record: RemoteLogSegmentMetadataRecord) -> str:
    """A broker takes its lineage from it: it must have the segment's epochs."""
    try:
        known = {entry.epoch: entry.start_offset for entry in parse_leader_epoch_checkpoint(data.decode())}
    except (BadData, UnicodeDecodeError) as error:
        return error.cause if isinstance(error, BadData) else "it is not text"
    for entry in lineage_of(record):
        if known.get(entry.epoch, entry.start_offset + 1) > entry.start_offset:
            return f"epoch {entry.epoch} begins at {known.get(entry.epoch, 'no offset')} in it, metadata says {entry.start_offset}"
    return ""
