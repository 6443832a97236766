"""Verification of compactor-managed tiers (``verify``): metadata against objects. Reads every live object; changes nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from compactor.access.tier import Tier
from compactor.cleaner.passes.describe import count_implausible_timestamps, summarize_timestamps_and_record_count
from compactor.cleaner.passes.source import SourceSegment, open_source_segment
from compactor.constants import DAY_MS
from compactor.control.logs import PartitionLog
from compactor.control.state import PartitionState
from compactor.errors import BadData, Refused
from compactor.local.spool import spool_folder_of_this_process
from compactor.model.base import ReasonOrEmpty
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.balance import BalanceDigestKey, batch_digest_sum_of_segment
from compactor.upkeep.retire import GraceClock, find_objects_to_delete_now_or_later
from compactor.upkeep.segment_check import (
    SegmentProblem,
    download_intact_files,
    index_and_checkpoint_file_problems,
    raise_if_segment_exceeds_disk_budget,
)
from compactor.upkeep.uploads import find_unfinished_uploads
from compactor.views.time_formats import count_noun, format_iso_time

ProblemsAndLastOffset = tuple[list[SegmentProblem], int]
"""Problems of a segment, and the last offset of its batches (-1 for none)."""


def verify_tier_wide_control_log(tier: Tier) -> list[SegmentProblem]:
    """Return one problem if the tier-wide log, which names the partitions, cannot be read to its end; else an empty list. Partitions that
    it does not name are not verified.
    """
    try:
        tier.identity.require_data_root_not_of_other_tier()
        tier.catalog.refresh_and_check_gaps()
    except BadData as error:
        return [SegmentProblem("error", "control-log", "", -1, error.segment, error.cause)]
    return []


def find_stale_upload_problems(tier: Tier) -> list[SegmentProblem]:
    """Return a note on each unfinished upload that is too old to be in progress, or a single note if the store does not allow listing
    uploads.
    """
    try:
        found = [one for one in find_unfinished_uploads(tier, tier.ports.clock_ms()) if one.due]
    except Refused as error:
        return [
            SegmentProblem("note", "uploads-unknown", "", -1, tier.ports.data.url, f"unfinished uploads cannot be listed: {error.message}")
        ]
    detail = "an unfinished upload; `retire` sweeps it"
    return [SegmentProblem("note", "unfinished", "", -1, one.object_url, detail) for one in found]


def verify_partition(
    tier: Tier, partition: TopicPartition, on_bytes: Callable[[int], None] = lambda size: None, *, compares_batch_digest_sums: bool = False
) -> list[SegmentProblem]:
    """Return all problems and notes of one partition. Corrupt data is reported, not raised.

    :param on_bytes: called with the size of each segment when it was checked.
    :param compares_batch_digest_sums: also sum up each segment's batches and compare with the sum recorded when it was written.
    :raises OutOfBudget: if a segment does not fit within ``disk_budget_bytes``.
    :raises StoreError: if the store fails.
    """
    log = tier.open_control_log_of_partition(partition)
    try:
        state = log.refresh_and_check_gaps()
    except BadData as error:
        return [SegmentProblem("error", "control-log", partition.topic, partition.partition, error.segment, error.message)]
    found = list(_offset_gap_problems(state))
    found += _uneven_round_balance_problems(state) if compares_batch_digest_sums else []
    key = BalanceDigestKey(tier.identity.hash_key()) if compares_batch_digest_sums and state.has_segments else None
    cleaner = tier.cleaner_settings_for_topic(partition.topic)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=spool_folder_of_this_process(tier.state_dir)) as scratch:
        previous_last = -1
        for segment in state.live:
            raise_if_segment_exceeds_disk_budget(tier, partition, segment)
            check = _SegmentVerifier(tier, partition, segment, Path(scratch), cleaner.max_decompressed_batch_bytes, key)
            problems, last = check.verify_segment(previous_last)
            previous_last = max(previous_last, last)
            if problems and log.refresh().slot != state.slot and segment.id not in log.state.live_segments_by_id():
                continue  # replaced and retired during the check
            found += problems
            on_bytes(segment.size_bytes)
    return found + list(_pending_deletion_notes(tier, partition, log))


def _offset_gap_problems(state: PartitionState) -> Iterator[SegmentProblem]:
    for before, after in zip(state.live, state.live[1:], strict=False):
        if after.start_offset != before.end_offset + 1:
            kind = "gap" if after.start_offset > before.end_offset else "overlap"
            detail = f"it begins at {after.start_offset}, the segment before ends at {before.end_offset}"
            yield SegmentProblem("error", kind, *state.topic_partition, after.id, detail)


class _SegmentVerifier(NamedTuple):
    """Check of one segment against its recorded metadata."""

    tier: Tier
    partition: TopicPartition
    segment: RemoteLogSegmentMetadata
    scratch: Path
    inflate_limit: int
    balance_key: BalanceDigestKey | None

    def verify_segment(self, previous_last_offset: int) -> ProblemsAndLastOffset:
        """Return two values: the segment's problems, and the last offset of its batches (-1 if it has none). If its log cannot be read, the
        second value is the recorded end offset.

        :param previous_last_offset: last offset of the batches before the segment.
        """
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
            source.verify_batch_crcs_unless_verified(0, len(source.table))
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
        if detail := _batch_digest_sum_mismatch(segment, source, self.balance_key):
            found.append(self._segment_problem("balance", "log", detail))
        if detail := _metadata_mismatch(segment, source):
            found.append(self._segment_problem("metadata", "log", detail))
        for kind, detail in index_and_checkpoint_file_problems(
            source, {kind: path.read_bytes() for kind, path in paths.items() if kind != "log"}
        ):
            found.append(self._segment_problem(kind, kind, detail))
        return found, int(source.table.last_offset[-1]) if len(source.table) else -1

    def _segment_problem(self, finding_kind: str, file: str, detail: str, severity: str = "error") -> SegmentProblem:
        return SegmentProblem(severity, finding_kind, *self.partition, self._object_key_of_file(file), detail)

    def _object_key_of_file(self, file_kind: str) -> str:
        return self.tier.ports.layout.object_name(self.partition, self.segment, file_kind)


def _metadata_mismatch(segment: RemoteLogSegmentMetadata, source: SourceSegment) -> ReasonOrEmpty:
    """Return how a log differs from the recorded metadata that readers use without opening the log, or an empty string."""
    latest = summarize_timestamps_and_record_count(source.table).max_timestamp_ms
    if segment.size_bytes != source.size:
        return f"its metadata says {segment.size_bytes} bytes, it has {source.size}"
    if segment.max_timestamp_ms != latest:
        recorded, found = format_iso_time(segment.max_timestamp_ms), format_iso_time(latest)
        return f"its metadata says that its latest record is of {recorded}, it is of {found}"
    return ""


def _batch_digest_sum_mismatch(segment: RemoteLogSegmentMetadata, source: SourceSegment, key: BalanceDigestKey | None) -> ReasonOrEmpty:
    """Return how a log's batches differ from the number and digest sum recorded when it was written, or an empty string. It is also empty
    if no key is given or no sum was recorded.
    """
    if key is None or segment.content is None:
        return ""
    held = batch_digest_sum_of_segment(source.buf, key)
    return "" if held == segment.content else f"it holds {held} batches, and {segment.content} were recorded when it was written"


def _uneven_round_balance_problems(state: PartitionState) -> Iterator[SegmentProblem]:
    """Yield a problem for each recorded round whose balance (sums over its batches and records before and after) does not add up, and a
    note if the digest sum of a live segment was not recorded.
    """
    for run in state.runs:
        if run.balance is not None and (problem := run.balance.imbalance_problem()):
            yield SegmentProblem("error", "balance", *state.topic_partition, run.run_id, problem)
    unknown = sum(segment.content is None for segment in state.live)
    if unknown:
        detail = f"of {unknown} segments no sum is recorded: an earlier version or a broker wrote them"
        yield SegmentProblem("note", "balance-unknown", *state.topic_partition, "", detail)


def _pending_deletion_notes(tier: Tier, partition: TopicPartition, log: PartitionLog) -> Iterator[SegmentProblem]:
    # This machine's clock is used because asking a directory for its own writes to it, and nothing is deleted here.
    found = find_objects_to_delete_now_or_later(tier.ports, log, tier.retention, GraceClock(tier.ports.clock_ms(), asks_store=False))
    for segment in (*found.due, *found.waiting, *found.unfinished):
        yield SegmentProblem("note", "waiting", *partition, segment.id, "replaced; its objects wait for grace or for `retire`")
    for key in (*(item.key for item in found.orphans), *found.scratch):
        yield SegmentProblem("note", "orphan", *partition, key, "no reader uses it; `retire` sweeps it")
    for key in (item.key for item in found.young):
        yield SegmentProblem(
            "note", "orphan", *partition, key, "the control log does not know it; `retire` sweeps it once it is older than orphan_age_ms"
        )
    for key in found.strangers:
        yield SegmentProblem("note", "stranger", *partition, key, "this program did not write it, and never touches it")
    for import_id in found.stale_imports:
        yield SegmentProblem("note", "import", *partition, import_id, "an unfinished import; `retire` sweeps its objects")
    if found.open_intent:
        yield SegmentProblem("note", "intent", *partition, "", "a round was begun and not finished; the next `run` finishes or undoes it")
