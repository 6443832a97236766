"""Verification of broker-managed tiers (``verify``). Read-only; brokers may continue to write.

The metadata is read before and after LIST: segments that were replaced, tiered or deleted in between are ignored. A broker records a
segment before it uploads the first object, so an object that the later metadata lacks belongs to no segment.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from checkpoint.lineage import leader_epoch_at
from compactor.access.tier import Tier
from compactor.adapters.brokers.cache import FoldedPartitionMetadata
from compactor.adapters.brokers.chain import broker_view, offset_gaps
from compactor.cleaner.retention import txn_index_problem
from compactor.cleaner.source import SourceSegment, open_source_segment, summarize_timestamps
from compactor.config.times import format_iso_time
from compactor.control.mirror import segment_from_broker_record
from compactor.errors import BadData, NotFound, Refused
from compactor.local.budget import spool_folder
from compactor.model.finding import Finding
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord, segment_lineage, uuid_bytes
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL, BatchTable
from compactor.records.indexes import parse_txn_index
from compactor.tier.contents import download_segment_file
from compactor.tier.ports import ListedObject
from compactor.upkeep.verify import (
    ProblemKindAndText,
    require_disk_budget,
    segment_file_problems,
)
from compactor.views.verdict import is_beyond_now

SNAPSHOT_SLACK_MS = 3_600_000
"""With a metadata snapshot, only objects older than the snapshot by more than this are judged by it."""


@dataclass(frozen=True)
class OrphanObject:
    """An object that no metadata names. finished: brokers recorded that its segment is deleted; otherwise no metadata ever named it."""

    listed: ListedObject
    finished: bool


@dataclass(frozen=True)
class BrokerPartitionListing:
    """Metadata and objects of one partition.

    folded: read after LIST.
    readable: segments that were complete both before and after LIST.
    there: listed objects by segment id and kind of file.
    strangers: objects whose names are not of the layout.
    """

    folded: FoldedPartitionMetadata
    readable: Sequence[RemoteLogSegmentMetadataRecord]
    there: dict[str, dict[str, ListedObject]]
    orphans: Sequence[OrphanObject]
    strangers: Sequence[ListedObject]

    def missing_kinds(self, segment: RemoteLogSegmentMetadataRecord, expected_parts: frozenset[str]) -> list[str]:
        return sorted(expected_parts - self.there.get(segment.id, {}).keys())


def list_partition_objects(tier: Tier, partition: TopicPartition) -> BrokerPartitionListing:
    """Raises StoreError, BadData if the metadata topic is corrupt, and UsageError if the partition no longer exists."""
    brokers = tier.broker_metadata
    brokers.refresh(max_age_s=0.0)
    before = brokers.partition_metadata_from_records(partition)
    states = {segment.segment_id: segment.state for segment in before.cache.list_segments()}
    gone = set(before.cache.finished)
    listed = list(tier.ports.layout.list_objects(partition))
    brokers.refresh(max_age_s=0.0)
    folded = brokers.partition_metadata_from_records(partition)
    finished = SegmentState.COPY_SEGMENT_FINISHED
    readable = [one for one in folded.cache.list_segments() if one.state is finished and states.get(one.segment_id) is finished]
    there: dict[str, dict[str, ListedObject]] = defaultdict(dict)
    orphans, strangers = [], []
    latest_ms = brokers.taken_ms - SNAPSHOT_SLACK_MS if brokers.taken_ms >= 0 else None
    for one in listed:
        if not one.segment_id:
            strangers.append(one)
            continue
        there[one.segment_id][one.kind] = one
        raw_id = uuid_bytes(one.segment_id)
        known = raw_id in states or raw_id in folded.cache.segments
        if not known and (latest_ms is None or one.modified_ms < latest_ms):
            orphans.append(OrphanObject(one, raw_id in gone))
    return BrokerPartitionListing(folded, sorted(readable, key=lambda one: one.start_offset), there, orphans, strangers)


_RESTORE_HINT = "Restore the object from the store's versions or a backup, or let retention pass over it"


@dataclass(frozen=True)
class FindingKindDescription:
    """Severity, consequence and recommended action of a kind of finding.

    severity: error (consumers get other records than were written), warning (it costs, or becomes an error) or note.
    """

    severity: str
    means: str
    todo: str


FINDING_KINDS = {
    "missing": FindingKindDescription("error", "a fetch from these offsets fails until retention passes them", _RESTORE_HINT),
    "size": FindingKindDescription("error", "a fetch from these offsets fails, or ends early", _RESTORE_HINT),
    "object": FindingKindDescription("error", "a fetch from these offsets fails: the plug-in cannot read it", _RESTORE_HINT),
    "log": FindingKindDescription("error", "consumers stop at a corrupt batch", _RESTORE_HINT),
    "metadata": FindingKindDescription(
        "error", "brokers search offsets and times in the wrong segment", "Report it: this was not written by a stock broker"
    ),
    "epochs": FindingKindDescription(
        "error", "a fetch by leader epoch gets another segment, or none", "Report it; do not delete the segment"
    ),
    "end-hole": FindingKindDescription(
        "warning",
        "consumers that reach these offsets get nothing and no error, once their leader no longer has the segment locally, until the next"
        " one is tiered",
        "Let the next segment be closed and tiered, or let consumers seek to the offset after the hole (docs/migrating.md, holes)",
    ),
    "gap": FindingKindDescription(
        "error",
        "a consumer that asks for these offsets is reset (OFFSET_OUT_OF_RANGE)",
        "Restore the missing segments, or inform consumers",
    ),
    "index": FindingKindDescription(
        "error", "a fetch begins at an incorrect position, or reads far too much", _RESTORE_HINT + "; it can be rebuilt from the log"
    ),
    "timeindex": FindingKindDescription(
        "error", "a search by time finds an incorrect offset", _RESTORE_HINT + "; it can be rebuilt from the log"
    ),
    "txnindex": FindingKindDescription(
        "error",
        "read_committed consumers get records of aborted transactions",
        "Read it with this program, which uses the control records, or compact the partition: a round rewrites the index",
    ),
    "snapshot": FindingKindDescription(
        "error", "a broker that rebuilds its state from it fails, or forgets producers", _RESTORE_HINT + "; it can be rebuilt from the log"
    ),
    "leader-epoch-checkpoint": FindingKindDescription(
        "error", "a broker that rebuilds its state from it gets another lineage, and reads other segments", _RESTORE_HINT
    ),
    "future-timestamp": FindingKindDescription(
        "note",
        "neither retention.ms nor min.compaction.lag.ms passes for the segment until then",
        "Correct the unit or the clock of the producer",
    ),
    "unread": FindingKindDescription(
        "warning",
        "no effect on consumers: another segment is read instead, and this one costs money",
        "Brokers delete it with their retention",
    ),
    "stuck-copy": FindingKindDescription(
        "warning",
        "no effect on consumers: its upload was begun and never finished, and brokers do not resume it",
        "It is deleted with the topic. `orphans` lists objects that no metadata names",
    ),
    "stuck-delete": FindingKindDescription(
        "warning", "no effect on consumers: its deletion was begun long ago", "Check the logs of the partition's leader"
    ),
    "orphan": FindingKindDescription(
        "warning",
        "no effect on consumers: no metadata names it, and it costs money",
        "`orphans find` lists such objects, `orphans purge` deletes them",
    ),
    "stranger": FindingKindDescription(
        "note", "no effect on consumers: it is not an object of a segment", "Find out who wrote it; it is never touched"
    ),
    "unfinished": FindingKindDescription(
        "warning",
        "no effect on consumers: an upload was begun and never finished, and its parts cost money",
        "Set a lifecycle rule that aborts them",
    ),
    "dropped-record": FindingKindDescription(
        "note", "brokers drop a record of the metadata topic, with an ERROR line at each start", "Nothing can be done about it"
    ),
    "uploads-unknown": FindingKindDescription(
        "note", "unfinished uploads cannot be listed with these credentials", "Allow s3:ListBucketMultipartUploads"
    ),
    "unreadable-metadata": FindingKindDescription(
        "error", "brokers stop reading the metadata topic there, too", "Find out which program wrote it; see docs/broker-tiers.md"
    ),
}


def finding_of_kind(finding_kind: str, partition: TopicPartition, object_name: str, detail: str) -> Finding:
    about = FINDING_KINDS[finding_kind]
    return Finding(about.severity, finding_kind, object_name, detail, about.todo, where=partition, means=about.means)


MAX_TRANSACTIONS_SHOWN = 3
OnSegmentBytesChecked = Callable[[int], None]


def verify_broker_partition(
    tier: Tier, partition: TopicPartition, on_bytes: OnSegmentBytesChecked = lambda size: None, *, skips_segment_contents: bool
) -> list[Finding]:
    """Raises OutOfBudget if a segment does not fit within ``disk_budget_bytes``."""
    try:
        seen = list_partition_objects(tier, partition)
    except BadData as error:
        return [finding_of_kind("unreadable-metadata", partition, f"{error.segment} at offset {error.offset}", error.cause)]
    found = [
        *_metadata_topic_findings(tier, partition, seen),
        *_unknown_object_findings(tier, partition, seen),
        *_abandoned_upload_findings(tier, partition),
    ]
    check = _SegmentContentChecker(tier, partition)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=spool_folder(tier.state_dir)) as scratch:
        newest = max((one.end_offset for one in seen.readable), default=-1)
        for record in seen.readable:
            problems = list(_segment_object_findings(tier, partition, seen, record))
            if not problems and not skips_segment_contents:
                problems = check.check_segment(record, Path(scratch), is_newest=record.end_offset == newest)
            if problems and _was_deleted(tier, partition, record):
                continue
            found += problems
            on_bytes(record.size_bytes)
    return found


def _was_deleted(tier: Tier, partition: TopicPartition, record: RemoteLogSegmentMetadataRecord) -> bool:
    tier.broker_metadata.refresh(max_age_s=0.0)
    now = tier.broker_metadata.partition_metadata_from_records(partition).cache.segments.get(record.segment_id)
    return now is None or now.state is not SegmentState.COPY_SEGMENT_FINISHED


def _metadata_topic_findings(tier: Tier, partition: TopicPartition, objects: BrokerPartitionListing) -> Iterator[Finding]:
    cache = objects.folded.cache
    view = broker_view(cache, partition)
    for first, last in offset_gaps(view.links):
        yield finding_of_kind("gap", partition, "", f"offsets {first} to {last} are in no segment that readers find")
    read = {link.segment.segment_id for link in view.links}
    now = tier.broker_metadata.taken_ms if tier.broker_metadata.taken_ms >= 0 else tier.ports.clock_ms()
    for segment in cache.list_segments():
        span = f"offsets {segment.start_offset} to {segment.end_offset}"
        old = now - segment.event_timestamp_ms > tier.retention.orphan_age_ms
        if segment.state is SegmentState.COPY_SEGMENT_FINISHED and segment.segment_id not in read:
            yield finding_of_kind("unread", partition, segment.id, f"readers find its {span} elsewhere, or no longer")
        elif segment.state is SegmentState.COPY_SEGMENT_STARTED and old:
            yield finding_of_kind(
                "stuck-copy", partition, segment.id, f"its copy ({span}) was begun by broker {segment.broker_id} and never finished"
            )
        elif segment.state is SegmentState.DELETE_SEGMENT_STARTED and old:
            yield finding_of_kind("stuck-delete", partition, segment.id, f"its deletion ({span}) was begun by broker {segment.broker_id}")
    for dropped in objects.folded.findings:
        yield finding_of_kind("dropped-record", partition, f"offset {dropped.offset} of the metadata topic", dropped.detail)


def _unknown_object_findings(tier: Tier, partition: TopicPartition, objects: BrokerPartitionListing) -> Iterator[Finding]:
    for one in objects.orphans:
        why = "its segment's deletion is recorded as finished" if one.finished else "no metadata has ever named its segment"
        yield finding_of_kind("orphan", partition, one.listed.key, why)
    for stranger in objects.strangers:
        yield finding_of_kind("stranger", partition, stranger.key, "no broker makes this name")


def _abandoned_upload_findings(tier: Tier, partition: TopicPartition) -> Iterator[Finding]:
    store, now = tier.ports.data, tier.ports.clock_ms()
    prefix = tier.ports.layout.partition_folder(partition)
    try:
        for upload in store.unfinished_uploads(prefix):
            if now - upload.begun_ms > tier.retention.orphan_age_ms:
                yield finding_of_kind(
                    "unfinished", partition, upload.key, f"upload {upload.id} was begun {(now - upload.begun_ms) // 3_600_000} hours ago"
                )
    except Refused as error:
        yield finding_of_kind("uploads-unknown", partition, prefix, error.message)


def _segment_object_findings(
    tier: Tier, partition: TopicPartition, objects: BrokerPartitionListing, record: RemoteLogSegmentMetadataRecord
) -> Iterator[Finding]:
    layout, segment = tier.ports.layout, segment_from_broker_record(record)
    missing = objects.missing_kinds(record, layout.required_kinds)
    for part in missing:
        yield finding_of_kind(
            "missing", partition, layout.object_name(partition, segment, part), f"it is not in the store (segment {record.id})"
        )
    if missing:
        return
    try:
        problem = layout.stored_segment_problem(partition, segment)
    except BadData as error:
        problem = error.cause
    if problem:
        kind = "missing" if "missing" in problem else "size" if " bytes" in problem else "object"
        yield finding_of_kind(kind, partition, layout.object_name(partition, segment, "log"), problem)


@dataclass
class _SegmentContentChecker:
    """Segments are passed in ascending order: a transaction may begin in one segment and be aborted in a later one."""

    tier: Tier
    partition: TopicPartition
    open: dict[int, int] = field(default_factory=dict)
    """Producer id -> first offset of its open transaction."""

    def check_segment(self, record: RemoteLogSegmentMetadataRecord, scratch_folder: Path, *, is_newest: bool) -> list[Finding]:
        layout = self.tier.ports.layout
        segment = segment_from_broker_record(record)
        try:
            segment = segment.model_copy(update={"files": dict(layout.segment_files(self.partition, segment))})
            require_disk_budget(self.tier, self.partition, segment, ", or use --fast")
            paths = self._download_segment_files(segment, scratch_folder)
        except NotFound as error:
            return [self._segment_finding("missing", segment, "log", error.message)]
        except BadData as error:
            return [
                finding_of_kind("object", self.partition, error.segment or layout.object_name(self.partition, segment, "log"), error.cause)
            ]
        limit = self.tier.settings.cleaner_settings_for_topic(self.partition.topic).max_decompressed_batch_bytes
        try:
            source = open_source_segment(0, paths["log"], record.start_offset, record.end_offset + 1, segment.mtime_ms, -1, limit)
            source.name = layout.object_name(self.partition, segment, "log")
            source.verify_batches(0, len(source.table))
        except BadData as error:
            self.open.clear()  # its transactions are not known
            return [
                self._segment_finding("log", segment, "log", f"{error.cause}{f' at byte {error.position}' if error.position >= 0 else ''}")
            ]
        log_start = self.tier.broker_metadata.topic_status(self.partition.topic).log_starts.get(self.partition.partition, 0)
        found = [self._segment_finding(kind, segment, "log", detail) for kind, detail in _log_mismatches(record, source, log_start)]
        if is_newest and (hole := end_hole(record, source.table)):
            found.append(self._segment_finding("end-hole", segment, "log", end_hole_text(hole)))
        latest_ms = int(source.table.max_timestamp.max(initial=-1))
        if is_beyond_now(latest_ms, self.tier.ports.clock_ms()):
            detail = f"it holds records of times more than a day ahead, the latest {format_iso_time(latest_ms)}"
            found.append(self._segment_finding("future-timestamp", segment, "log", detail))
        beside = {kind: path.read_bytes() for kind, path in paths.items() if kind != "log"}
        txn_index = beside.pop("txnindex", b"")
        found += [
            self._segment_finding(kind, segment, kind, detail)
            for kind, detail in segment_file_problems(source, beside, segment_lineage(record), log_start)
        ]
        if detail := self._txn_index_problem(source, txn_index):
            found.append(self._segment_finding("txnindex", segment, "txnindex", detail))
        return found

    def _download_segment_files(self, segment: RemoteLogSegmentMetadata, scratch_folder: Path) -> dict[str, Path]:
        paths = {}
        for kind, file in segment.files.items():
            path = scratch_folder / kind
            path.unlink(missing_ok=True)
            arrived = download_segment_file(self.tier.ports.layout, self.partition, segment, kind, path)
            if arrived.size != file.size:
                where = self.tier.ports.layout.object_name(self.partition, segment, kind)
                raise BadData(f"it has {arrived.size} bytes, {file.size} are expected", segment=where)
            paths[kind] = path
        return paths

    def _txn_index_problem(self, source: SourceSegment, index_bytes: bytes) -> str:
        expected = self._abort_markers(source)
        try:
            entries = parse_txn_index(index_bytes, "")
        except BadData as error:
            return error.cause
        reported = {(int(entry["producer_id"]), int(entry["last_offset"])) for entry in entries}
        lacking = [one for one in expected if one not in reported]
        if lacking:
            some = ", ".join(f"producer {producer} at offset {offset}" for producer, offset in lacking[:MAX_TRANSACTIONS_SHOWN])
            some += " ..." * (len(lacking) > MAX_TRANSACTIONS_SHOWN)
            return f"{len(lacking)} of {len(expected)} aborted transactions are not in it ({some})"
        return txn_index_problem(entries, source)

    def _abort_markers(self, source: SourceSegment) -> list[tuple[int, int]]:
        table, found = source.table, []
        for batch in np.flatnonzero(table.transactional_flags).tolist():
            producer, control = int(table.producer_id[batch]), int(table.control[batch])
            if control == NOT_CONTROL:
                self.open.setdefault(producer, int(table.base_offset[batch]))
            elif control in (ABORT, COMMIT) and self.open.pop(producer, None) is not None and control == ABORT:
                found.append((producer, int(table.base_offset[batch])))
        return found

    def _segment_finding(self, finding_kind: str, segment: RemoteLogSegmentMetadata, file_kind: str, detail: str) -> Finding:
        return finding_of_kind(finding_kind, self.partition, self.tier.ports.layout.object_name(self.partition, segment, file_kind), detail)


def end_hole(record: RemoteLogSegmentMetadataRecord, table: BatchTable) -> tuple[int, int] | None:
    """First and last offset, both inclusive, by which a broker's log ends below its recorded end offset, if it does. A log that brokers
    compacted before may end there.
    """
    if record.broker_id == COMPACTOR_BROKER_ID:
        return None  # rule R5
    last = int(table.last_offset[-1]) if len(table) else record.start_offset - 1
    return (last + 1, record.end_offset) if last < record.end_offset else None


def end_hole_text(hole: tuple[int, int]) -> str:
    return f"its last batch ends before offset {hole[0]}; offsets {hole[0]} to {hole[1]} were compacted away, and no tiered segment follows"


def _log_mismatches(record: RemoteLogSegmentMetadataRecord, source: SourceSegment, log_start: int) -> Iterator[ProblemKindAndText]:
    table = source.table
    if not len(table) and not record.size_bytes and record.broker_id != COMPACTOR_BROKER_ID:
        return  # brokers had compacted all of it away before they tiered it
    if not len(table):
        yield "log", "it has no batch"
        return
    # Brokers count the timestamps of markers, too; this program does not (docs/broker-protocol.md, R7).
    ours = record.broker_id == COMPACTOR_BROKER_ID
    latest = summarize_timestamps(table).max_timestamp_ms if ours else int(table.max_timestamp.max())
    # A round leaves out batches below the log start that brokers had then, which is the present one or a lower one.
    earliest = summarize_timestamps(table, log_start).max_timestamp_ms if ours else latest
    if source.size != record.size_bytes:
        yield "size", f"it has {source.size} bytes, metadata says {record.size_bytes}"
    # What brokers tiered may end below: they had compacted the topic before (``end_hole``). Rule R5 forbids it in ours.
    if ours and int(table.last_offset[-1]) != record.end_offset:
        yield "metadata", f"its last offset is {int(table.last_offset[-1])}, metadata says {record.end_offset}"
    if not earliest <= record.max_timestamp_ms <= latest:
        yield "metadata", f"its latest record is of {latest}, metadata says {record.max_timestamp_ms}"
    lineage = segment_lineage(record)
    named = np.flatnonzero(table.magic == 2)
    starts = np.array([entry.start_offset for entry in lineage])
    epochs = np.array([entry.epoch for entry in lineage])
    place = np.searchsorted(starts, table.base_offset[named], side="right") - 1
    wrong = named[(place < 0) | (epochs[np.maximum(place, 0)] != table.leader_epoch[named])]
    if len(wrong):
        first = int(wrong[0])
        explanation = leader_epoch_at(lineage, int(table.base_offset[first]))
        yield (
            "epochs",
            f"the batch at {int(table.base_offset[first])} is of epoch {int(table.leader_epoch[first])}, metadata says {explanation}",
        )
