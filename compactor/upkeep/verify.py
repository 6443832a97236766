"""Verification of compactor-managed tiers (``verify``): reads every live object; changes nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint import offsets
from checkpoint.files import parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.access.tier import READER_THREADS, Tier
from compactor.cleaner.retention import txn_index_problem
from compactor.cleaner.source import (
    SourceSegment,
    count_implausible_timestamps,
    open_source_segment,
    summarize_timestamps,
)
from compactor.config.times import format_iso_time
from compactor.config.units import count_noun
from compactor.constants import DAY_MS
from compactor.control import ordering
from compactor.control.logs import PartitionLog
from compactor.control.records import BadControlRecord
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound, OutOfBudget, Refused
from compactor.local.budget import round_up_to_blocks, spool_folder
from compactor.model.finding import Finding
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.encode import BalanceDigestKey, segment_digest_sum
from compactor.records.indexes import offset_index_problem, parse_txn_index, time_index_problem
from compactor.records.producers import parse_producer_snapshot_file
from compactor.round.compaction import disk_budget_bytes
from compactor.tier.contents import download_segment_file
from compactor.upkeep.retire import GraceClock, find_deletions, find_unfinished_uploads

# Checks of one segment's files, for all kinds of tier.


ProblemKindAndText = tuple[str, str]
"""Kind of a problem in one word, and its description."""


class SegmentFileProblem(NamedTuple):
    """File that is not as recorded. kind: ``missing``, ``size`` or ``digest``."""

    file: str
    kind: str
    detail: str


def download_intact_files(
    tier: Tier, partition: TopicPartition, segment: RemoteLogSegmentMetadata, folder: Path
) -> tuple[dict[str, Path], list[SegmentFileProblem]]:
    """Paths, by kind, of the files with the recorded size and digest, and problems of the others."""
    paths: dict[str, Path] = {}
    problems = []
    for kind, file in segment.files.items():
        path = folder / kind
        path.unlink(missing_ok=True)
        try:
            arrived = download_segment_file(tier.ports.layout, partition, segment, kind, path)
        except NotFound:
            problems.append(SegmentFileProblem(kind, "missing", "the object is not in the store"))
            continue
        if arrived.matches_recorded_content(file):
            paths[kind] = path
        elif arrived.size != file.size:
            problems.append(SegmentFileProblem(kind, "size", f"it has {arrived.size} bytes, recorded are {file.size}"))
        else:
            problems.append(SegmentFileProblem(kind, "digest", "its bytes are not those that were recorded"))
    return paths, problems


def require_disk_budget(
    tier: Tier, partition: TopicPartition, segment: RemoteLogSegmentMetadata, other_remedy: str = "", *, copies_on_disk: int = 1
) -> None:
    """Raise OutOfBudget if a segment does not fit. other_remedy: appended to the hint."""
    needed = copies_on_disk * sum(round_up_to_blocks(file.size) for file in segment.files.values())
    budget = disk_budget_bytes(tier.cleaner_settings_for_topic(partition.topic), tier.state_dir)
    if needed > budget:
        message = f"segment {segment.id} takes {needed} bytes of local disk, and the disk budget is {budget}"
        raise OutOfBudget(message, hint=f"Set disk_budget_bytes to at least {needed}{other_remedy}")


def segment_file_problems(
    source: SourceSegment, files: Mapping[str, bytes], lineage: Sequence[EpochEntry] = (), log_start: int = 0
) -> Iterator[ProblemKindAndText]:
    """Yield (kind, problem) for each invalid index, snapshot or checkpoint file of a segment whose log is valid.

    :param lineage: leader epochs that the checkpoint must have.
    :param log_start: brokers drop leader epochs below it from later checkpoints.
    """
    checks: dict[str, Callable[[bytes], str]] = {
        "index": lambda data: offset_index_problem(data, source.base, source.table),
        "timeindex": lambda data: time_index_problem(data, source.base, source.table),
        "txnindex": lambda data: txn_index_problem(parse_txn_index(data, ""), source),
        "snapshot": _producer_snapshot_problem,
        "leader-epoch-checkpoint": lambda data: _epoch_checkpoint_problem(data, lineage, log_start),
    }
    for kind, check in checks.items():
        if kind in files:
            try:
                detail = check(files[kind])
            except BadData as error:
                detail = error.cause
            if detail:
                yield kind, detail


def _producer_snapshot_problem(snapshot_bytes: bytes) -> str:
    parse_producer_snapshot_file(snapshot_bytes, "snapshot")
    return ""


def _epoch_checkpoint_problem(checkpoint_bytes: bytes, lineage: Sequence[EpochEntry], log_start: int) -> str:
    """Brokers drop epochs that end before the log start, and let the epoch that contains it begin there."""
    try:
        known = {entry.epoch: entry.start_offset for entry in parse_leader_epoch_checkpoint(checkpoint_bytes.decode())}
    except UnicodeDecodeError:
        return "it is not text"
    for entry, following in zip_longest(lineage, lineage[1:]):
        if following is not None and following.start_offset <= log_start:
            continue
        latest = max(entry.start_offset, log_start)
        if known.get(entry.epoch, latest + 1) > latest:
            return f"epoch {entry.epoch} begins at {known.get(entry.epoch, 'no offset')} in it, metadata says {entry.start_offset}"
    return ""


# Verification of cleaner offsets and control logs (``checkpoints verify``).


def verify_control_logs(tier: Tier, partitions: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None) -> list[Finding]:
    def verify_one(partition: TopicPartition) -> list[Finding]:
        found = verify_control_log(tier, partition)
        on_partition()
        return found

    with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="verify") as pool:
        return [finding for found in pool.map(verify_one, partitions) for finding in found]


def verify_control_log(tier: Tier, partition: TopicPartition) -> list[Finding]:
    log = tier.open_partition_log(partition)
    found: list[Finding] = []

    def add_finding(kind: str, detail: str, object_key: str = "", severity: str = "error") -> None:
        found.append(Finding(severity, kind, object_key, detail, where=partition))

    # LIST before the fold, as in ``retire``: a listed object that a later fold does not know belongs to no writer.
    slots = _list_slots(tier, f"{log.prefix}/log/")
    snapshots = _list_slots(tier, f"{log.prefix}/snapshot/")
    try:
        base, steps = log.read_history()
    except BadControlRecord as error:
        add_finding("control-log", error.cause, error.segment)
        return found
    for detail in cleaner_offset_problems(log.state):
        add_finding("cleaner-offsets", detail)
    for detail in live_segment_problems(log.state):
        add_finding("segments", detail)
    for detail in uncleaned_segment_problems(log.state):
        add_finding("not-granted", detail, severity="note")
    for detail in open_round_problems(log.state):
        add_finding("intent", detail, severity="note")
    for entry in log.state.fenced:
        add_finding(
            "fenced",
            f"{entry.type} of epoch {entry.leader_epoch} by {entry.by}: {entry.reason}",
            log.control_record_object_key(entry.slot),
            "note",
        )
    for slot in slots:
        if slot > log.state.slot:
            add_finding("gap", f"slot {slot} comes after a gap: the log ends at slot {log.state.slot}", log.control_record_object_key(slot))
        elif slot <= base.slot:
            add_finding("left-over", "a boundary has passed it; the next cut deletes it", log.control_record_object_key(slot), "note")
    for kind, detail, where in _snapshot_problems(log, base, {base.slot: base} | {state.slot: state for _, state in steps}, snapshots):
        add_finding(kind, detail, where, "error" if kind == "snapshot" else "note")
    return found


def cleaner_offset_problems(state: PartitionState) -> Iterator[str]:
    problem = offsets.cleaner_vector_problem(state.vector)
    if problem:
        yield problem
    clean = offsets.first_dirty_offset_in(state.vector)
    if state.has_segments and clean > state.end_offset + 1:
        yield f"they state clean data up to {clean}, the log ends at {state.end_offset}"
    if state.vector and state.vector[-1].leader_epoch > state.last_compactor_epoch:
        yield f"they name epoch {state.vector[-1].leader_epoch}, the last that was acquired is {state.last_compactor_epoch}"


def uncleaned_segment_problems(state: PartitionState) -> Iterator[str]:
    """Yield live segments that end after the cleaner offset of their compactor epoch, lowered when the broker's log was truncated."""
    for segment in state.live:
        epoch = state.published_by.get(segment.id)
        if epoch is not None and not offsets.has_epoch_cleaned_below(state.vector, epoch, segment.end_offset + 1):
            yield f"segment {segment.id} up to {segment.end_offset} was published by epoch {epoch}, whose cleaner offset is lower by now"


def live_segment_problems(state: PartitionState) -> Iterator[str]:
    for before, after in pairwise(state.live):
        if after.start_offset != before.end_offset + 1:
            yield f"segment {after.id} begins at {after.start_offset}, the one before it ends at {before.end_offset}"
    ids = [segment.id for segment in state.live]
    if len(set(ids)) != len(ids):
        yield "a segment is live twice"
    both = set(ids).intersection(segment.id for segment in state.retiring)
    if both:
        yield f"segment {min(both)} is live, and its deletion has begun"


def open_round_problems(state: PartitionState) -> Iterator[str]:
    if state.intent and (reason := ordering.round_resumption_problem(state, state.intent)):
        yield f"the open round {state.intent.plan.run_id} can only be undone: {reason}"


def _snapshot_problems(
    log: PartitionLog, base_state: PartitionState, state_by_slot: dict[int, PartitionState], snapshot_slots: list[int]
) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, description, object key). ``snapshot`` is an error: it differs from the folded log. ``left-over`` is a note: a newer
    snapshot has replaced it.
    """
    for slot in snapshot_slots:
        key = f"{log.prefix}/snapshot/{slot:020d}.json"
        try:
            stored = log.read_snapshot(slot)
        except BadData as error:
            yield "snapshot", error.message, key
            continue
        if stored is None:
            continue  # deleted since the LIST
        problem = next(iter((*cleaner_offset_problems(stored), *live_segment_problems(stored))), "")
        if problem:
            yield "snapshot", problem, key
        elif slot < base_state.slot:
            yield "left-over", "a newer snapshot has replaced it; the next cut deletes it", key
        elif slot not in state_by_slot:
            yield "snapshot", f"it is ahead of the log, which ends at slot {log.state.slot}", key
        elif slot > base_state.slot and (field := differing_field(stored, state_by_slot[slot])):
            yield "snapshot", f"its {field} is not what slots {base_state.slot + 1} to {slot} fold to", key


def differing_field(stored: PartitionState, folded: PartitionState) -> str:
    """First field in which two states differ; empty if none. Only a state from a snapshot has store times, which are not compared."""
    one, two = (_state_without_store_times(state) for state in (stored, folded))
    return next((field for field in PartitionState.model_fields if getattr(one, field) != getattr(two, field)), "")


def _state_without_store_times(state: PartitionState) -> PartitionState:
    def without_store_time(entry: Any) -> Any:
        return entry.model_copy(update={"since_ms": None})

    return state.model_copy(
        update={
            "leader": without_store_time(state.leader) if state.leader else None,
            "waiting": tuple(without_store_time(group) for group in state.waiting),
            "registrations": {name: without_store_time(entry) for name, entry in state.registrations.items()},
        }
    )


def _list_slots(tier: Tier, key_prefix: str) -> list[int]:
    names = (info.key.removeprefix(key_prefix).removesuffix(".json") for info in tier.ports.control.list(key_prefix))
    return [int(name) for name in names if name.isascii() and name.isdigit()]


def verify_catalog(tier: Tier) -> list[Finding]:
    try:
        tier.identity.require_root_not_foreign()
        tier.catalog.refresh_and_check_gaps()
    except BadData as error:
        return [Finding("error", "control-log", error.segment, error.cause)]
    return []


def stale_upload_notes(tier: Tier) -> list[Finding]:
    try:
        found = [one for one in find_unfinished_uploads(tier, tier.ports.clock_ms()) if one.due]
    except Refused as error:
        return [Finding("note", "uploads-unknown", tier.ports.data.url, f"unfinished uploads cannot be listed: {error.message}")]
    detail = "an unfinished upload; `retire` sweeps it"
    return [Finding("note", "unfinished", one.object_url, detail) for one in found]


def verify_partition(
    tier: Tier, partition: TopicPartition, on_bytes: Callable[[int], None] = lambda size: None, *, compares_batch_digest_sums: bool = False
) -> list[Finding]:
    """All problems and notes of one partition. Corrupt data is reported, not raised.

    :param compares_batch_digest_sums: also compare batches with the sum recorded when the segment was written.
    :raises OutOfBudget: if a segment does not fit within ``disk_budget_bytes``.
    """
    log = tier.open_partition_log(partition)
    try:
        state = log.refresh_and_check_gaps()
    except BadData as error:
        return [Finding("error", "control-log", error.segment, error.message, where=partition)]
    found = list(_offset_gap_problems(state))
    found += _balance_problems(state) if compares_batch_digest_sums else []
    key = BalanceDigestKey(tier.identity.hash_key()) if compares_batch_digest_sums and state.has_segments else None
    cleaner = tier.cleaner_settings_for_topic(partition.topic)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=spool_folder(tier.state_dir)) as scratch:
        previous_last = -1
        for segment in state.live:
            require_disk_budget(tier, partition, segment)
            check = _SegmentVerifier(tier, partition, segment, Path(scratch), cleaner.max_decompressed_batch_bytes, key)
            problems, last = check.verify_segment(previous_last)
            previous_last = max(previous_last, last)
            if problems and log.refresh().slot != state.slot and segment.id not in log.state.live_segments_by_id():
                continue  # replaced and retired during the check
            found += problems
            on_bytes(segment.size_bytes)
    return found + list(_pending_deletion_notes(tier, partition, log))


def _offset_gap_problems(state: PartitionState) -> Iterator[Finding]:
    for before, after in zip(state.live, state.live[1:], strict=False):
        if after.start_offset != before.end_offset + 1:
            kind = "gap" if after.start_offset > before.end_offset else "overlap"
            detail = f"it begins at {after.start_offset}, the segment before ends at {before.end_offset}"
            yield Finding("error", kind, after.id, detail, where=state.topic_partition)


class _SegmentVerifier(NamedTuple):
    tier: Tier
    partition: TopicPartition
    segment: RemoteLogSegmentMetadata
    scratch: Path
    inflate_limit: int
    balance_key: BalanceDigestKey | None

    def verify_segment(self, previous_last_offset: int) -> tuple[list[Finding], int]:
        """Problems, and the last offset of the batches (-1: none; the recorded one if the log cannot be read)."""
        segment = self.segment
        paths, problems = download_intact_files(self.tier, self.partition, segment, self.scratch)
        found = [self._segment_problem(one.kind, one.file, one.detail) for one in problems]
        if "log" not in paths:
            return found, segment.end_offset
        try:
            source = open_source_segment(
                0, paths["log"], segment.start_offset, segment.end_offset + 1, segment.mtime_ms, previous_last_offset, self.inflate_limit
            )
            source.name = self._object_key_of_file("log")
            source.verify_batches(0, len(source.table))
            now_ms = self.tier.ports.clock_ms()
            times = count_implausible_timestamps(source, self.inflate_limit, now_ms + DAY_MS)
        except BadData as error:
            return [*found, self._segment_problem("log", "log", error.cause)], segment.end_offset
        if times.negative:
            detail = f"{times.negative} records have negative timestamps: "
            detail += "a round does not rewrite a batch that keeps one, like Kafka's cleaner"
            found.append(self._segment_problem("negative-timestamp", "log", detail, severity="note"))
        if times.late:
            detail = f"{count_noun(times.late, 'record is', 'records are')} of times more than a day ahead, "
            detail += f"the latest {format_iso_time(times.latest_ms)}: neither retention.ms nor "
            detail += "min.compaction.lag.ms passes for the segment until then, as in Kafka"
            found.append(self._segment_problem("future-timestamp", "log", detail, severity="note"))
        if detail := _digest_mismatch(segment, source, self.balance_key):
            found.append(self._segment_problem("balance", "log", detail))
        if detail := _metadata_mismatch(segment, source):
            found.append(self._segment_problem("metadata", "log", detail))
        for kind, detail in segment_file_problems(source, {kind: path.read_bytes() for kind, path in paths.items() if kind != "log"}):
            found.append(self._segment_problem(kind, kind, detail))
        return found, int(source.table.last_offset[-1]) if len(source.table) else -1

    def _segment_problem(self, finding_kind: str, file: str, detail: str, severity: str = "error") -> Finding:
        return Finding(severity, finding_kind, self._object_key_of_file(file), detail, where=self.partition)

    def _object_key_of_file(self, file_kind: str) -> str:
        return self.tier.ports.layout.object_name(self.partition, self.segment, file_kind)


def _metadata_mismatch(segment: RemoteLogSegmentMetadata, source: SourceSegment) -> str:
    latest = summarize_timestamps(source.table).max_timestamp_ms
    if segment.size_bytes != source.size:
        return f"its metadata says {segment.size_bytes} bytes, it has {source.size}"
    if segment.max_timestamp_ms != latest:
        recorded, found = format_iso_time(segment.max_timestamp_ms), format_iso_time(latest)
        return f"its metadata says that its latest record is of {recorded}, it is of {found}"
    return ""


def _digest_mismatch(segment: RemoteLogSegmentMetadata, source: SourceSegment, key: BalanceDigestKey | None) -> str:
    if key is None or segment.content is None:
        return ""
    held = segment_digest_sum(source.buf, key)
    return "" if held == segment.content else f"it holds {held} batches, and {segment.content} were recorded when it was written"


def _balance_problems(state: PartitionState) -> Iterator[Finding]:
    for run in state.runs:
        if run.balance is not None and (problem := run.balance.imbalance_problem()):
            yield Finding("error", "balance", run.run_id, problem, where=state.topic_partition)
    unknown = sum(segment.content is None for segment in state.live)
    if unknown:
        detail = f"of {unknown} segments no sum is recorded: an earlier version or a broker wrote them"
        yield Finding("note", "balance-unknown", "", detail, where=state.topic_partition)


def _pending_deletion_notes(tier: Tier, partition: TopicPartition, log: PartitionLog) -> Iterator[Finding]:
    # This machine's clock is used because asking a directory for its own writes to it, and nothing is deleted here.
    found = find_deletions(tier.ports, log, tier.retention, GraceClock(tier.ports.clock_ms(), asks_store=False))
    for segment in (*found.due, *found.waiting, *found.unfinished):
        yield Finding("note", "waiting", segment.id, "replaced; its objects wait for grace or for `retire`", where=partition)
    for key in (*(item.key for item in found.orphans), *found.scratch):
        yield Finding("note", "orphan", key, "no reader uses it; `retire` sweeps it", where=partition)
    for key in (item.key for item in found.young):
        yield Finding(
            "note",
            "orphan",
            key,
            "the control log does not know it; `retire` sweeps it once it is older than orphan_age_ms",
            where=partition,
        )
    for key in found.strangers:
        yield Finding("note", "stranger", key, "this program did not write it, and never touches it", where=partition)
    for import_id in found.stale_imports:
        yield Finding("note", "import", import_id, "an unfinished import; `retire` sweeps its objects", where=partition)
    if found.open_intent:
        yield Finding("note", "intent", "", "a round was begun and not finished; the next `run` finishes or undoes it", where=partition)
