"""Repair of a partition's live segments (``repair``): every object is compared with its recorded digest, and what differs is made good.

missing object     created again under its key, with bytes that have the recorded digest
damaged object     its segment is replaced one to one under a new id, by a round: announced, checked, published, kept for grace
compacted segment  likewise where a source has its bytes; else the round that wrote it is undone, while its sources wait for deletion

Sources are searched before the first change. An object is never overwritten, and a log is only ever replaced by bytes with its digest.
Other files are built from the log where no source has them, but never from guessed producer states.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from bloom.sidecar import Sidecar
from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.offsets import first_dirty_offset_in
from compactor.access.rounds import open_live_reader
from compactor.access.tier import Tier
from compactor.cleaner.retention import transaction_verdicts_by_source
from compactor.cleaner.rewrite import SidecarBuilder, add_segment
from compactor.cleaner.source import SourceSegment, open_source_segment
from compactor.cleaner.worker_threads import WorkerThreads
from compactor.constants import NEVER_MS, CompactorEpoch, Offset, TimestampMs
from compactor.control.leadership import Leadership, hold_leadership
from compactor.control.logs import write_snapshot_if_due
from compactor.control.ordering import round_restoration_problem
from compactor.control.publication import undo_round
from compactor.control.state import PartitionState, RoundIntent
from compactor.errors import AlreadyExists, BadData, NotFound, Unavailable
from compactor.local.budget import DiskBudget, spool_folder
from compactor.model.ids import RoundStatus, RunHistoryStatus, TopicPartition
from compactor.model.plan import REPAIR, CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import Balance, RemoteLogSegmentMetadata
from compactor.records.batches import memory_map_file, parse_batch_headers
from compactor.records.encode import BalanceDigestKey, segment_digest_sum
from compactor.records.indexes import encode_indexes
from compactor.records.producers import ProducerStates, format_producer_snapshot, parse_producer_snapshot_file
from compactor.round.drive import lead_round
from compactor.round.partial import is_key_directory_worthwhile
from compactor.round.pass_two import describe_file
from compactor.round.ports import (
    Job,
    Session,
    design_bloom_filter,
    expected_dirty_keys,
    filter_usage_of_runs,
)
from compactor.tier.contents import matches_recorded_content, read_verified_file
from compactor.tier.sidecars import SidecarHead
from compactor.upkeep.verify import download_intact_files, require_disk_budget

# ``bloom show`` and ``bloom rebuild``. A sidecar describes a segment that never changes, so neither needs leadership. A sidecar of a
# segment that is retired meanwhile is swept with it.


@dataclass(frozen=True)
class SidecarRebuildReport:
    written: tuple[str, ...]
    kept: int
    bytes_read: int
    bytes_written: int


def sidecars_json(tier: Tier, partition: TopicPartition, now_ms: int) -> dict[str, Any]:
    state = tier.open_partition_log(partition).refresh()
    cleaner = tier.cleaner_settings_for_topic(partition.topic)
    record = filter_usage_of_runs(state.runs)
    sidecars = tier.open_sidecar_store(partition)
    sizes = sidecars.stored_sidecar_sizes()
    heads = sidecars.load_sidecar_heads([segment.id for segment in state.live])
    probes = expected_dirty_keys(cleaner, state.runs, 0)
    return {
        "topic": partition.topic,
        "partition": partition.partition,
        "incarnation": partition.incarnation,
        "on": cleaner.bloom and record.are_bloom_filters_worthwhile,
        "reason": "bloom = false"
        if not cleaner.bloom
        else ""
        if record.are_bloom_filters_worthwhile
        else f"filters do not pay on this partition: {record.saved_reads_text()}",
        "design_keys": probes,
        "asked": record.asked,
        "skipped": record.skipped,
        "useless": record.useless,
        "useless_rate": record.false_positive_rate,
        "target_rate": cleaner.bloom_false_positive_rate,
        "filter_bytes": record.bytes_read,
        "segment_bytes_saved": record.bytes_saved,
        "segments": [
            _segment_json(
                segment,
                state,
                heads[segment.id],
                sizes.get(segment.id, 0),
                probes,
                now_ms,
                drops_keyless=cleaner.keyless_records == "drop",
            )
            for segment in state.live
        ],
    }


def _segment_json(
    segment: RemoteLogSegmentMetadata,
    state: PartitionState,
    head: SidecarHead,
    size: int,
    filter_probe_count: int,
    now_ms: int,
    *,
    drops_keyless: bool,
) -> dict[str, Any]:
    return {
        "id": segment.id,
        "start_offset": segment.start_offset,
        "end_offset": segment.end_offset,
        "bytes": segment.size_bytes,
        "clean": segment.end_offset < state.first_dirty_offset,
        "problem": head.problem,
        "sidecar": None
        if head.sidecar is None
        else _sidecar_json(head.sidecar, size, filter_probe_count, now_ms, drops_keyless=drops_keyless),
    }


def _sidecar_json(sidecar: Sidecar, size: int, filter_probe_count: int, now_ms: int, *, drops_keyless: bool) -> dict[str, Any]:
    made_for, due = sidecar.made_for, sidecar.due
    return {
        "bytes": size,
        "records": sidecar.records,
        "keys": sidecar.distinct_keys,
        "filter_bytes": made_for.bytes if made_for else 0,
        "bits_per_key": round(8 * made_for.bytes / max(1, made_for.keys), 1) if made_for else 0.0,
        "rate_per_key": made_for.rate if made_for else None,
        "made_for_keys": made_for.probes if made_for else None,
        "useless_rate": sidecar.useless_read_probability(filter_probe_count),
        "due": due.reason_to_read(now_ms, drops_keyless=drops_keyless),
        "tombstones": due.tombstones,
        "next_horizon_ms": due.earliest_tombstone_horizon_ms if due.earliest_tombstone_horizon_ms != NEVER_MS else None,
        "producer_runs": len(sidecar.producer_runs),
        "markers": len(sidecar.markers),
    }


def rebuild_sidecars(
    tier: Tier, partition: TopicPartition, budget: DiskBudget, *, unusable_only: bool, on_segment: Callable[[int], None] = lambda size: None
) -> SidecarRebuildReport:
    """Build sidecars of live segments again, with one segment on disk at a time.

    :param unusable_only: skip segments that have a usable sidecar.
    :raises BadData: if a segment is corrupt.
    :raises OutOfBudget: if a segment does not fit within the disk budget.
    """
    state = tier.open_partition_log(partition).refresh()
    cleaner = tier.cleaner_settings_for_topic(partition.topic)
    sidecars = tier.open_sidecar_store(partition)
    heads = sidecars.load_sidecar_heads([segment.id for segment in state.live])
    wanted = [n for n, segment in enumerate(state.live) if not unusable_only or heads[segment.id].sidecar is None]
    record, probes = filter_usage_of_runs(state.runs), expected_dirty_keys(cleaner, state.runs, 0)
    written, size = [], 0
    reading = open_live_reader(tier, state, budget, "bloom")
    try:
        with WorkerThreads(tier.settings.daemon.threads) as workers:
            for ordinal in wanted:
                segment = state.live[ordinal]
                try:
                    with reading.open_segment(ordinal) as source:
                        # A compressed v0/v1 wrapper does not show how many keys it has, so there is no filter; cleaning makes it v2.
                        records = segment.records or int(source.table.count.sum())  # brokers do not record it
                        counted = not np.any((source.table.magic < 2) & (source.table.codec_ids > 0))
                        design = design_bloom_filter(cleaner, record, probes, records, segment.size_bytes) if counted else None
                        directory = cleaner.splice and is_key_directory_worthwhile(
                            segment, len(source.table), tier.ports.layout.log_file_copy_limits
                        )
                        builder = SidecarBuilder(
                            source, design, tier.identity.hash_key(), counts_distinct_keys=True, collects_key_directory=directory
                        )
                        add_segment(builder, source, reading.inflate_limit, workers)
                        keys = builder.build_key_directory(segment.id) if directory else None
                except NotFound:
                    if segment.id in tier.open_partition_log(partition).refresh().live_segments_by_id():
                        raise
                    continue  # replaced and retired meanwhile
                reading.staging.delete_cached_copies([reading.log_file_to_stage(ordinal)])
                size += sidecars.save_sidecar(builder.build_sidecar(segment.id), keys)
                written.append(segment.id)
                on_segment(segment.size_bytes)
        return SidecarRebuildReport(tuple(written), len(state.live) - len(wanted), reading.staging.bytes_fetched, size)
    finally:
        reading.staging.close()


# Sources of ``repair``. Their segments may be cut at other offsets; the caller compares digests.


class RepairSource(Protocol):
    @property
    def description(self) -> str: ...

    def write_copies(self, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> Iterator[None]:
        """Write each copy of a file to ``path``, and yield after each."""


@dataclass(frozen=True)
class DirectoryRepairSource:
    folder: Path

    @property
    def description(self) -> str:
        return str(self.folder)

    def write_copies(self, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> Iterator[None]:
        if file_kind == "log":
            logs = sorted(one for one in self.folder.glob("*.log") if one.stem.isdecimal() and len(one.stem) == 20)
            bases = [int(one.stem) for one in logs]
            wanted = [
                one
                for one, base, after in zip(logs, bases, [*bases[1:], segment.end_offset + 1], strict=True)
                if base <= segment.end_offset and after > segment.start_offset
            ]
            _join_batches(wanted, segment, path)
            yield
        beside = self.folder / (
            f"{segment.end_offset + 1:020d}.snapshot" if file_kind == "snapshot" else f"{segment.start_offset:020d}.{file_kind}"
        )
        if file_kind != "log":
            with suppress(FileNotFoundError):
                shutil.copyfile(beside, path)
                yield


@dataclass(frozen=True)
class TierRepairSource:
    tier: Tier
    partition: TopicPartition

    @property
    def description(self) -> str:
        return self.tier.ports.layout.url

    def write_copies(self, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> Iterator[None]:
        state = self.tier.open_partition_log(self.partition).refresh()
        yield from download_each_copy(self.tier, state, segment, file_kind, path)
        overlapping = [one for one in state.live if one.end_offset >= segment.start_offset and one.start_offset <= segment.end_offset]
        if file_kind == "log" and overlapping:
            with suppress(NotFound, BadData):
                _join_batches(self._download_logs(overlapping, path.with_name("piece")), segment, path)
                yield

    def _download_logs(self, segments: Sequence[RemoteLogSegmentMetadata], path: Path) -> Iterator[Path]:
        for one in segments:
            path.unlink(missing_ok=True)
            self.tier.ports.layout.download_file(self.partition, one, "log", path)
            yield path
        path.unlink(missing_ok=True)


def download_each_copy(tier: Tier, state: PartitionState, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> Iterator[None]:
    """Download the files of one kind of all segments, live or replaced, with the offsets of ``segment``."""
    layout = tier.ports.layout
    for other in (*state.live, *(one for group in state.waiting for one in group.segments)):
        if (other.start_offset, other.end_offset) == (segment.start_offset, segment.end_offset):
            with suppress(NotFound, BadData):
                if file_kind in layout.segment_files(state.topic_partition, other):
                    layout.download_file(state.topic_partition, other, file_kind, path)
                    yield
            path.unlink(missing_ok=True)


def _join_batches(paths: Sequence[Path] | Iterator[Path], segment: RemoteLogSegmentMetadata, target: Path) -> None:
    """Join the batches whose last offsets lie within a segment's offsets. Logs that cannot be parsed are left out."""
    with target.open("wb") as file:
        for path in paths:
            with suppress(BadData, FileNotFoundError):  # a broker may delete its files meanwhile
                buf = memory_map_file(path)
                table = parse_batch_headers(buf, path.name)
                inside = np.flatnonzero((table.last_offset >= segment.start_offset) & (table.last_offset <= segment.end_offset))
                if len(inside):
                    last = inside[-1]
                    file.write(buf[int(table.position[inside[0]]) : int(table.position[last] + table.size[last])].data)


ReportSegmentBytesRead = Callable[[int], None]
_LOCAL_COPIES = 3
"""How many times a segment may lie on local disk at once: the source's, the joined one, the tier's."""


@dataclass(frozen=True)
class DamagedSegment:
    """A live segment with objects that are not as recorded. problems: by kind of file."""

    segment: RemoteLogSegmentMetadata
    problems: Mapping[str, str]
    missing: frozenset[str]


@dataclass(frozen=True)
class RepairDecision:
    """Repair of one segment: ``create`` the missing objects again, ``replace`` it, ``undo`` its run, or ``none``."""

    damage: DamagedSegment
    action: str
    reason: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class RepairedObject:
    """A damaged object that was repaired.

    how: created (again under its key), replaced (by an object of a new segment) or undone (with the run that wrote it).
    new_object: key of the object in its place; empty if undone, or not known yet.
    """

    object: str
    how: str
    new_object: str
    bytes: int


@dataclass(frozen=True)
class UnrepairedObject:
    object: str
    reason: str


@dataclass(frozen=True)
class RepairReport:
    repaired: tuple[RepairedObject, ...]
    unrepaired: tuple[UnrepairedObject, ...]


def find_damaged_segments(
    tier: Tier, state: PartitionState, segments: Sequence[RemoteLogSegmentMetadata], on_bytes: ReportSegmentBytesRead
) -> list[DamagedSegment]:
    """Segments with objects that are missing or differ from their recorded digests.

    :raises OutOfBudget: if a segment does not fit within ``disk_budget_bytes``.
    """
    found = []
    with _temporary_scratch_folder(tier) as scratch:
        for segment in segments:
            require_disk_budget(tier, state.topic_partition, segment, copies_on_disk=_LOCAL_COPIES)
            _, problems = download_intact_files(tier, state.topic_partition, segment, scratch)
            if problems:
                missing = frozenset(one.file for one in problems if one.kind == "missing")
                found.append(DamagedSegment(segment, {one.file: one.detail for one in problems}, missing))
            on_bytes(segment.size_bytes)
    return found


def repair_partition(
    tier: Tier,
    partition: TopicPartition,
    sources: Sequence[RepairSource],
    on_bytes: ReportSegmentBytesRead = lambda size: None,
    *,
    dry_run: bool = False,
) -> RepairReport:
    """Repair damaged objects of live segments for which a source, or the tier itself, has bytes with the recorded digest.

    :raises Leased: if another compactor is at work; Fenced if one takes over.
    :raises BadData: if a round that was to replace segments failed.
    :raises OutOfBudget: if the disk is too small.
    """
    log = tier.open_partition_log(partition, caller_runs_round=True)
    state = log.refresh_and_check_gaps()
    finder = _IntactFileFinder(tier, state, sources)
    decisions = _plan_repairs(tier, state, find_damaged_segments(tier, state, state.live, on_bytes), finder)
    if dry_run or all(one.action == "none" for one in decisions):
        return _repair_report(tier, state, decisions, {})
    for run_id in dict.fromkeys(one.run_id for one in decisions if one.action == "undo"):
        undo_round(tier.ports, log, tier.lease, run_id)
    new_ids: Mapping[str, str] = {}
    created: frozenset[str] = frozenset()
    if any(one.action in ("create", "replace") for one in decisions):
        with hold_leadership(tier.ports, log, tier.lease) as leadership:
            created = _create_missing_objects(tier, leadership, [one.damage for one in decisions if one.action == "create"], finder)
            replaced = [one.damage for one in decisions if one.action == "replace"]
            new_ids = _replace_damaged_segments(tier, leadership, replaced, finder) if replaced else {}
            write_snapshot_if_due(log)
    tier.change_notifier.announce_changed_control_logs([log])
    done = {"create": created, "replace": new_ids.keys()}  # a segment that has expired meanwhile is neither
    decisions = [one for one in decisions if one.action not in done or one.damage.segment.id in done[one.action]]
    return _repair_report(tier, state, decisions, new_ids)


def _plan_repairs(tier: Tier, state: PartitionState, damaged: Sequence[DamagedSegment], finder: _IntactFileFinder) -> list[RepairDecision]:
    decisions = []
    for damage in damaged:
        is_recorded, unknown = True, []
        for kind in damage.problems:
            with _temporary_scratch_folder(tier) as scratch:
                is_recorded &= finder.fetch_or_build(damage.segment, kind, scratch / kind)
                unknown += [] if (scratch / kind).exists() else [kind]
        if unknown:
            decisions.append(_decide_without_source(tier, state, damage, unknown, finder))
        else:
            # A companion file can be built from the log, but not with the recorded digest, so that it needs another id.
            can_create = is_recorded and damage.missing == damage.problems.keys()
            decisions.append(RepairDecision(damage, "create" if can_create else "replace"))
    undone = {one.run_id for one in decisions if one.action == "undo"}
    return [one if one.action == "undo" else _with_run_undone(state, one, undone) for one in decisions]


def _with_run_undone(state: PartitionState, decision: RepairDecision, undone_run_ids: set[str]) -> RepairDecision:
    run_id = _reversible_run_id(state, decision.damage.segment)
    return RepairDecision(decision.damage, "undo", run_id=run_id) if run_id in undone_run_ids else decision


def _decide_without_source(
    tier: Tier, state: PartitionState, damage: DamagedSegment, kinds_without_source: Sequence[str], finder: _IntactFileFinder
) -> RepairDecision:
    """kinds_without_source: the log, or files that cannot be built from the log alone."""
    nowhere = (
        f"no source has its bytes: {finder.description_of_sources}" if finder.sources else "no source was named: say --from LOG_DIR|CONFIG"
    )
    if "log" not in kinds_without_source:
        nowhere = (
            f"its {' and '.join(kinds_without_source)} cannot be built, because the producer states before it are not known, and {nowhere}"
        )
    epoch = state.published_by.get(damage.segment.id)
    if epoch is None or any(run.leader_epoch == epoch and run.status == RunHistoryStatus.REPAIRED for run in state.runs):
        return RepairDecision(damage, "none", f"{nowhere}. Restore it from the store's versions or a backup")
    run_id = _reversible_run_id(state, damage.segment)
    nowhere = f"{nowhere}. It is compacted, and so it is in no broker's log directory"
    if not run_id:
        return RepairDecision(damage, "none", f"{nowhere}; what it replaced is deleted")
    problem = (
        f"run {state.intent.plan.run_id} is open" if state.intent else round_restoration_problem(state, run_id, state.next_compactor_epoch)
    )
    if not problem:
        sources = [segment for group in state.waiting if group.run_id == run_id and not group.undone for segment in group.segments]
        bad = find_damaged_segments(tier, state, sources, lambda size: None)
        problem = f"segment {bad[0].segment.id}, which it replaced, is damaged as well" if bad else ""
    if problem:
        return RepairDecision(damage, "none", f"{nowhere}; run {run_id}, which wrote it, cannot be undone: {problem}")
    return RepairDecision(damage, "undo", run_id=run_id)


def _reversible_run_id(state: PartitionState, segment: RemoteLogSegmentMetadata) -> str:
    return next((one.run_id for one in state.waiting if not one.undone and segment.id in one.replaced_by.values()), "")


def _repair_report(
    tier: Tier, state: PartitionState, decisions: Sequence[RepairDecision], new_segment_id_by_damaged_id: Mapping[str, str]
) -> RepairReport:
    layout = tier.ports.layout
    repaired: list[RepairedObject] = []
    unrepaired: list[UnrepairedObject] = []
    for one in decisions:
        segment = one.damage.segment
        for kind, problem in one.damage.problems.items():
            key = layout.object_name(state.topic_partition, segment, kind)
            if one.action == "none":
                unrepaired.append(UnrepairedObject(key, f"{problem}; {one.reason}"))
                continue
            how = {"create": "created", "replace": "replaced", "undo": "undone"}[one.action]
            new = segment.model_copy(update={"id": new_segment_id_by_damaged_id.get(segment.id, segment.id)})
            new_key = (
                ""
                if how == "undone" or (how == "replaced" and not new_segment_id_by_damaged_id)
                else layout.object_name(state.topic_partition, new, kind)
            )
            repaired.append(RepairedObject(key, how, new_key, segment.recorded_size_and_digests(kind).size))
    return RepairReport(tuple(repaired), tuple(unrepaired))


@contextmanager
def _temporary_scratch_folder(tier: Tier) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="repair-", dir=spool_folder(tier.state_dir)) as scratch:
        yield Path(scratch)


@dataclass(frozen=True)
class _IntactFileFinder:
    tier: Tier
    state: PartitionState
    sources: Sequence[RepairSource]
    snapshots: dict[str, bytes | None] = field(default_factory=dict)
    """Producer snapshots that were built, by segment id; None for those that could not be built with the recorded digest."""

    @property
    def description_of_sources(self) -> str:
        return ", ".join(one.description for one in self.sources)

    def fetch_or_build(self, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> bool:
        """Write a segment's file, from the tier or a source, else built from the log. Return whether it has the recorded digest; if not,
        ``path`` holds a built file that differs, or nothing.
        """
        recorded = segment.recorded_size_and_digests(file_kind)
        # What an earlier repair replaced may be whole again.
        replaced = download_each_copy(self.tier, self.state, segment, file_kind, path)
        for _ in chain(replaced, *(source.write_copies(segment, file_kind, path) for source in self.sources)):
            if matches_recorded_content(path, recorded):
                return True
            path.unlink(missing_ok=True)
        if file_kind == "log":
            return False
        with _temporary_scratch_folder(self.tier) as scratch:
            built = (
                self.build_file_from_log(segment, file_kind, scratch / "log") if self._fetch_intact_log(segment, scratch / "log") else None
            )
        if built is None:
            return False
        path.write_bytes(built)
        return matches_recorded_content(path, recorded)

    def _fetch_intact_log(self, segment: RemoteLogSegmentMetadata, path: Path) -> bool:
        only_log = segment.model_copy(update={"files": {"log": segment.recorded_size_and_digests("log")}})
        intact, _ = download_intact_files(self.tier, self.state.topic_partition, only_log, path.parent)
        return "log" in intact or self.fetch_or_build(segment, "log", path)

    def fetch_or_build_all(self, segment: RemoteLogSegmentMetadata, folder: Path) -> dict[str, Path]:
        """Files by kind. Raises BadData if one cannot be obtained."""
        intact, problems = download_intact_files(self.tier, self.state.topic_partition, segment, folder)
        paths = dict(intact)
        for kind in [one.file for one in problems]:
            path = folder / kind
            path.unlink(missing_ok=True)
            self.fetch_or_build(segment, kind, path)
            if not path.exists():
                where = self.tier.ports.layout.object_name(self.state.topic_partition, segment, kind)
                raise BadData("no source has its recorded bytes any more, and it cannot be built", segment=where)
            paths[kind] = path
        return paths

    def build_file_from_log(self, segment: RemoteLogSegmentMetadata, file_kind: str, log_path: Path) -> bytes | None:
        """Return None if the file depends on unknown producer states before the segment."""
        cleaner = self.tier.cleaner_settings_for_topic(self.state.topic)
        source = self.open_segment_log(segment, log_path)
        table = source.table
        if file_kind in ("index", "timeindex"):
            made = encode_indexes(segment.start_offset, table.size, table.last_offset, table.max_timestamp, cleaner.index_interval_bytes)
            return made[file_kind == "timeindex"]
        if file_kind == "leader-epoch-checkpoint":
            lineage = self.state.lineage or segment.leader_epochs
            return format_leader_epoch_checkpoint(tuple(one for one in lineage if one.start_offset <= segment.end_offset)).encode()
        before = self._producer_states_before_segment(segment)
        if before is None:
            return None
        if file_kind == "snapshot":
            after = before.replay_batches(table)
            undecided = after.first_open_offset()
            return format_producer_snapshot(after) if segment.open_txn_offset == (-1 if undecided is None else undecided) else None
        open_entries = before.entries[before.entries["txn_first_offset"] >= 0]
        since = {int(entry["producer_id"]): int(entry["txn_first_offset"]) for entry in open_entries}
        return transaction_verdicts_by_source([source], since)[0].txn_entries.tobytes()

    def open_segment_log(self, segment: RemoteLogSegmentMetadata, log_path: Path) -> SourceSegment:
        limit = self.tier.cleaner_settings_for_topic(self.state.topic).max_decompressed_batch_bytes
        return open_source_segment(0, log_path, segment.start_offset, segment.end_offset + 1, segment.mtime_ms, -1, limit)

    def _producer_states_before_segment(self, segment: RemoteLogSegmentMetadata) -> ProducerStates | None:
        """States of the previous segment's snapshot. None if unknown: guessed states would end open transactions and forget producers."""
        if segment.start_offset == 0:
            return ProducerStates.empty_producer_states()
        before = next((one for one in self.state.live if one.end_offset == segment.start_offset - 1), None)
        if before is None or "snapshot" not in before.files:
            return None
        with suppress(NotFound, BadData):
            return parse_producer_snapshot_file(
                read_verified_file(self.tier.ports.layout, self.state.topic_partition, before, "snapshot"), "snapshot"
            )
        if before.id not in self.snapshots:  # kept, because the next segment's snapshot may be damaged as well
            with _temporary_scratch_folder(self.tier) as scratch:
                path = scratch / "snapshot"
                self.snapshots[before.id] = path.read_bytes() if self.fetch_or_build(before, "snapshot", path) else None
        known = self.snapshots[before.id]
        return None if known is None else parse_producer_snapshot_file(known, "snapshot")


def _create_missing_objects(
    tier: Tier, leadership: Leadership, damaged_segments: Sequence[DamagedSegment], finder: _IntactFileFinder
) -> frozenset[str]:
    """Ids of the segments with created objects, not of those that expired or were replaced meanwhile. Only the leader runs `retire`. Raises
    Unavailable if a source no longer has a file.
    """
    layout, created = tier.ports.layout, set[str]()
    for damage in damaged_segments:
        segment = damage.segment
        if segment.id not in leadership.refresh_and_require_leadership().live_segments_by_id():
            continue  # expired or replaced since
        with _temporary_scratch_folder(tier) as scratch:
            paths = {kind: scratch / kind for kind in damage.missing}
            for kind, path in paths.items():
                if not finder.fetch_or_build(segment, kind, path):
                    raise Unavailable(
                        f"{finder.description_of_sources} no longer has the {kind} of segment {segment.id}", hint="Run it again"
                    )
            leadership.refresh_and_require_leadership()
            if taken := layout.upload_segment(leadership.state.topic_partition, segment, paths):
                raise AlreadyExists(taken)
        if problem := layout.stored_segment_problem(leadership.state.topic_partition, segment):
            raise BadData(f"the store did not keep what was created again: {problem}", segment=segment.id)
        created.add(segment.id)
    return frozenset(created)


def _replace_damaged_segments(
    tier: Tier, leadership: Leadership, damaged_segments: Sequence[DamagedSegment], finder: _IntactFileFinder
) -> dict[str, str]:
    """New segment ids by damaged ones. Raises BadData if the round failed."""
    result = lead_round(leadership, Repair(tier, finder, tuple(damaged_segments)))
    if result.status == "quarantined":
        raise BadData(result.reason, segment=result.segment or str(leadership.state.topic_partition), hint="Readers are not affected")
    if result.status != RoundStatus.CLEANED or result.plan is None:
        what = result.undone or result.reason or result.status
        raise Unavailable(f"the damaged segments of {leadership.state.topic_partition} were not replaced: {what}", hint="Try again")
    return {task.sources[0]: task.new_segment_id for task in result.plan.tasks}


@dataclass(frozen=True)
class Repair(Job[PartitionState]):
    """Job of a round that replaces each damaged segment by a new one with the recorded bytes.

    An interrupted repair round is undone: a later run knows neither the damaged segments nor the sources.
    """

    tier: Tier
    finder: _IntactFileFinder
    damaged: tuple[DamagedSegment, ...]

    @override
    def resumption_problem(self, intent: RoundIntent) -> str:
        return "a repair makes a plan of its own"

    @override
    @contextmanager
    def gather(self, session: Session) -> Iterator[PartitionState | None]:
        yield session.state if self._live_damaged_segments(session.state) else None

    @override
    def plan(self, facts: PartitionState, leader_epoch: CompactorEpoch, new_id: Callable[[], str]) -> CompactionPlan:
        targets = self._live_damaged_segments(facts)
        clean = first_dirty_offset_in(facts.vector)
        return CompactionPlan(
            run_id=new_id(),
            topic=facts.topic,
            partition=facts.partition,
            incarnation=facts.incarnation,
            leader_epoch=leader_epoch,
            now_ms=TimestampMs(self.tier.ports.clock_ms()),
            first_dirty_offset=Offset(facts.first_dirty_offset),
            end_offset=Offset(targets[-1].end_offset + 1),
            next_dirty_offset=Offset(clean),
            high_watermark=facts.end_offset + 1,
            legacy_horizon_ms=0,
            vector=facts.vector,
            policy=self.tier.cleaner_settings_for_topic(facts.topic).cleaner_policy(),
            map_engine=REPAIR,
            fingerprint=REPAIR,
            producers=(),
            tasks=tuple(
                CompactionTask(
                    group=number,
                    sources=(one.id,),
                    new_segment_id=new_id(),
                    start_offset=one.start_offset,
                    end_offset=one.end_offset,
                    leader_epochs=one.leader_epochs,
                    mtime_ms=one.mtime_ms,
                )
                for number, one in enumerate(targets)
            ),
        )

    @override
    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, facts: PartitionState | None
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        for task in tasks:
            session.check()
            yield self._replace_segment(plan, task, session.state.live_segments_by_id()[task.sources[0]])

    def _live_damaged_segments(self, state: PartitionState) -> list[RemoteLogSegmentMetadata]:
        wanted = {one.segment.id for one in self.damaged}
        return [segment for segment in state.live if segment.id in wanted]

    def _replace_segment(
        self, plan: CompactionPlan, task: CompactionTask, segment: RemoteLogSegmentMetadata
    ) -> CompactionReceipt | CompactionFailure:
        """CompactionFailure if an object of the new id exists already. Raises BadData if no source has the recorded bytes."""
        layout = self.tier.ports.layout
        with _temporary_scratch_folder(self.tier) as scratch:
            paths = self.finder.fetch_or_build_all(segment, scratch)
            source = self.finder.open_segment_log(segment, paths["log"])
            source.verify_batches(0, len(source.table))
            held = segment_digest_sum(source.buf, BalanceDigestKey(self.tier.identity.hash_key()))
            # What the broker or a round recorded of the log stays true, because the log is the same.
            others = {kind: describe_file(path) for kind, path in paths.items() if kind != "log"}
            made = segment.model_copy(
                update={
                    "id": task.new_segment_id,
                    "files": {"log": segment.recorded_size_and_digests("log"), **others},
                    "content": held,
                }
            )
            if taken := layout.upload_segment(plan.topic_partition, made, paths):
                return CompactionFailure(run_id=plan.run_id, group=task.group, kind="upload", message=f"{taken} exists already")
        return CompactionReceipt(
            run_id=plan.run_id,
            group=task.group,
            segment=made,
            records_read=segment.records,
            records_kept=segment.records,
            bytes_read=segment.size_bytes,
            bytes_written=segment.size_bytes,
            balance=Balance(sources=held, left=held, result=held),  # compared with what was recorded of the source
        )
