"""Command ``clean``: cleans one Kafka log directory offline, with the results of Kafka's own cleaner."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from compactor.cleaner.gate.batch_checks import GateFailed
from compactor.cleaner.gate.gate import CleanedSegmentCheckParameters, Gate, NewSegmentBalanceBuilder
from compactor.cleaner.gate.parser import LatestRecordTable
from compactor.cleaner.keys import (
    BoundedOffsetMap,
    KeyHashSet,
    KeyScanParameters,
    SurvivorLookup,
    find_bounded_survivors,
    find_survivors_backwards,
)
from compactor.cleaner.retention import CleanedChunkCache, RetentionRules, transaction_verdicts_by_source
from compactor.cleaner.rewrite import CleanedSegment, GroupRewriter, GroupSourceOpener, group_segments
from compactor.cleaner.source import SourceSegment, open_source_segment
from compactor.cleaner.worker_threads import ReusableJobBuffers, WorkerThreads
from compactor.errors import BadData, OutOfBudget, UsageError
from compactor.model.plan import MAX32
from compactor.records.batches import UNKNOWN_OFFSET, BatchTable, Bytes, memory_map_file
from compactor.records.encode import BalanceDigestKey
from compactor.records.indexes import encode_indexes, read_txn_index
from compactor.records.producers import ProducerStates, parse_producer_snapshot_file

_LOG_NAME: Final = re.compile(r"(\d{20})\.log")
_SNAPSHOT_NAME: Final = re.compile(r"(\d{20})\.snapshot")
_CACHE_BYTES: Final = 1 << 29
_KEY_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class OfflineCleanOptions:
    """Options of ``clean``. None means Kafka's default for a log whose segments are all sealed.
    hash_key: 16 secret bytes for the offset map; the results do not depend on it.
    """

    now_ms: int
    first_dirty_offset: int | None = None
    first_uncleanable_offset: int | None = None
    delete_retention_ms: int = 86_400_000
    segment_bytes: int = 1 << 30
    segment_index_bytes: int = 10 * 1024 * 1024
    index_interval_bytes: int = 4096
    map_entries: int | None = None
    high_watermark: int | None = None
    threads: int = 1
    max_decompressed_batch_bytes: int = 1 << 30
    hash_key: bytes = bytes(16)
    gate_budget_bytes: int = 0
    """Memory for the gate's key table, beyond which it checks a part of the keys; 0: no gate and no balance."""
    drops_keyless: bool = True
    """Whether records without a key are removed. ``clean`` does what Kafka does; tests of both passes and of the gate set it to False."""


@dataclass(frozen=True, slots=True)
class OfflineCleanSummary:
    """Summary with (base offset, bytes) of each segment written."""

    next_dirty_offset: int
    segments: tuple[tuple[int, int], ...]
    records_read: int
    records_kept: int
    bytes_read: int
    bytes_written: int
    map_entries: int
    map_bytes: int


def clean_log_directory(
    log_dir: Path, out_dir: Path, request: OfflineCleanOptions, report_phase: Callable[[str], None] = lambda phase: None
) -> OfflineCleanSummary:
    """Clean ``log_dir`` into ``out_dir``, which appears complete or not at all.
    :param report_phase: called when a phase begins: "index", "rewrite", "done".
    :raises UsageError: if ``log_dir`` is missing, ``out_dir`` exists or cannot be written, or the range is not valid.
    :raises BadData: if Kafka refuses the log, or it fails further checks (docs/compatibility.md).
    :raises OutOfBudget: if the disk is full.
    """
    if out_dir.exists():
        raise UsageError(f"{out_dir} exists already", hint="Name a directory that does not exist; nothing is overwritten")
    partial = out_dir.with_name(out_dir.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        summary = _clean_log(log_dir, partial, request, report_phase)
        partial.rename(out_dir)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfBudget(f"no space left for {out_dir}", hint="Free space or choose another disk, then run it again") from error
        raise UsageError(
            f"cannot write {error.filename or out_dir}: {error.strerror}", hint="Check the path and its permissions"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


@dataclass(frozen=True, slots=True)
class LogDirectoryWithRangeToClean:
    """Opened log directory, the range to clean [first_dirty, upper), and the rules if the map covers all of it."""

    sources: list[SourceSegment]
    first_dirty: int
    upper: int
    rules: RetentionRules


def open_for_round(log_dir: Path, request: OfflineCleanOptions, workers: WorkerThreads | None = None) -> LogDirectoryWithRangeToClean:
    """Raises UsageError if the directory or the range is not valid, BadData if
    the log is not.
    """
    sources = open_log_directory(log_dir, request.index_interval_bytes, request.max_decompressed_batch_bytes, workers)
    log_start = sources[0].base
    end = max(sources[-1].end, request.first_uncleanable_offset or 0)
    sources[-1].end = end  # the last segment covers what is said to be the log's end, as in Kafka
    upper = _segment_base_of(sources, end if request.first_uncleanable_offset is None else request.first_uncleanable_offset)
    first_dirty = log_start if request.first_dirty_offset is None else request.first_dirty_offset
    if first_dirty > max(upper, log_start) or first_dirty < 0:
        raise UsageError(
            f"the first dirty offset {first_dirty} lies above the first uncleanable offset {upper}",
            hint=f"The log covers [{log_start}, {end}); an uncleanable offset inside a segment counts as the segment's base",
        )
    rules = RetentionRules(
        now_ms=request.now_ms,
        delete_retention_ms=request.delete_retention_ms,
        legacy_horizon_ms=_legacy_horizon_ms(sources, first_dirty, request.delete_retention_ms),
        high_watermark=end if request.high_watermark is None else request.high_watermark,
        latest_offset=upper - 1,
        producers=_producer_states_at_offset(log_dir, sources, end),
        balance_key=BalanceDigestKey(request.hash_key) if request.gate_budget_bytes else None,
        drops_keyless=request.drops_keyless,
    )
    return LogDirectoryWithRangeToClean(sources, first_dirty, upper, rules)


def _clean_log(log_dir: Path, out_folder: Path, request: OfflineCleanOptions, report_phase: Callable[[str], None]) -> OfflineCleanSummary:
    report_phase("index")
    finished = CleanedChunkCache(_CACHE_BYTES)
    limit = request.max_decompressed_batch_bytes
    bounded = request.map_entries is not None
    with WorkerThreads(request.threads) as workers:
        offline_round = open_for_round(log_dir, request, workers)
        sources, first_dirty, upper, rules = offline_round.sources, offline_round.first_dirty, offline_round.upper, offline_round.rules
        verdicts = transaction_verdicts_by_source(sources)
        gate = None if bounded else _create_gate(request, offline_round, rules)
        key_scan = KeyScanParameters(
            sources, verdicts, first_dirty, upper, request.hash_key, limit, finished, None if bounded else rules, gate
        )
        if gate is not None:
            for source in reversed([source for source in sources if source.base >= upper]):
                gate.collect_later_outcomes(source)
        survivors = _find_survivors(key_scan, request.map_entries, workers)
        if gate is not None:
            gate.compute_txn_outcomes(sources)
        next_dirty = survivors.last_mapped_offset + 1 if first_dirty < upper else 0
        rules = replace(rules, latest_offset=next_dirty - 1)
        report_phase("rewrite")
        rewriting = GroupRewriter(survivors, rules, request.index_interval_bytes, limit, finished, gate)
        inputs = group_segments([s for s in sources if s.base < next_dirty], request.segment_bytes, request.segment_index_bytes, upper)
        cleaned = [
            rewriting.rewrite_group(members[0].base, [GroupSourceOpener(s, verdicts[s.ordinal]) for s in members], out_folder, workers)
            for members in inputs
        ]
    if bounded:
        gate = _create_gate(request, offline_round, rules)
        if gate is not None:
            gate.read_dirty_range(sources)
    if gate is not None:
        _check_cleaned_groups(gate, inputs, cleaned, limit, rules.balance_key)
    report_phase("done")
    return OfflineCleanSummary(
        next_dirty_offset=next_dirty,
        segments=tuple((segment.base, segment.size) for segment in cleaned),
        records_read=sum(segment.records_read for segment in cleaned),
        records_kept=sum(segment.records_kept for segment in cleaned),
        bytes_read=sum(source.size for source in sources if source.base < next_dirty),
        bytes_written=sum(segment.size for segment in cleaned),
        map_entries=survivors.key_count,
        map_bytes=survivors.peak_bytes,
    )


def _create_gate(
    request: OfflineCleanOptions, opened_directory: LogDirectoryWithRangeToClean, retention_rules: RetentionRules
) -> Gate | None:
    if not request.gate_budget_bytes:
        return None
    terms = CleanedSegmentCheckParameters(
        retention_rules, opened_directory.first_dirty, request.hash_key, request.max_decompressed_batch_bytes
    )
    rows = sum(source.record_count_bound for source in opened_directory.sources if terms.has_dirty_offsets(source))
    return Gate(terms, LatestRecordTable(request.gate_budget_bytes, rows))


def _find_survivors(key_scan: KeyScanParameters, max_map_entries: int | None, workers: WorkerThreads) -> SurvivorLookup:
    if max_map_entries is not None:
        return find_bounded_survivors(key_scan, BoundedOffsetMap(max_map_entries, max_record_count=max_map_entries), workers)
    most = sum(source.record_count_bound for source, _ in key_scan.dirty_segments())
    return find_survivors_backwards(key_scan, KeyHashSet((most + 1024) * _KEY_BYTES, expected_key_count=min(most // 4, 1 << 20)), workers)


def _check_cleaned_groups(
    gate: Gate,
    source_groups: Sequence[Sequence[SourceSegment]],
    cleaned_segments: Sequence[CleanedSegment],
    max_inflated_bytes: int,
    balance_key: BalanceDigestKey | None,
) -> None:
    """Raises GateFailed, BadData."""
    for members, segment in zip(source_groups, cleaned_segments, strict=True):
        tally = None if balance_key is None else NewSegmentBalanceBuilder(segment, balance_key, max_inflated_bytes)
        gate.check_cleaned_group(members, segment.paths, end_offset=None, new_segment_balance=tally)
        problem = tally.compute_balance().imbalance_problem() if tally else ""
        if problem:
            raise GateFailed(f"the balance: {problem}", segment=members[0].name)


# ---- reading a log directory ------------------------------------------------------------------------------------------------


def open_log_directory(
    log_dir: Path, index_interval_bytes: int, inflate_limit: int, workers: WorkerThreads | None = None
) -> list[SourceSegment]:
    """Raises UsageError, BadData."""
    return open_segments_of_directory(
        log_dir, list_segment_base_offsets(log_dir), None, index_interval_bytes, inflate_limit, workers=workers
    )


def list_segment_base_offsets(log_dir: Path, *, is_written_by_broker: bool = False) -> list[int]:
    """Ascending. Raises UsageError, BadData.
    :param is_written_by_broker: a broker may be writing, so that unfinished files are no error.
    """
    if not log_dir.is_dir():
        raise UsageError(f"{log_dir} is not a directory", hint="Name a Kafka log directory, such as /var/lib/kafka/orders-0")
    bases = []
    for path in log_dir.iterdir():
        match = _LOG_NAME.fullmatch(path.name)
        if match and int(match[1]) < 2**63:
            bases.append(int(match[1]))
        elif not is_written_by_broker and (path.suffix == ".log" or path.name.endswith((".log.cleaned", ".log.swap"))):
            raise BadData(
                "not the name of a sealed segment",
                segment=path.name,
                hint="Segments are called <20 digits>.log; a broker that is shut down cleanly leaves no .cleaned or .swap files",
            )
    return sorted(bases)


def open_segments_of_directory(
    log_dir: Path,
    base_offsets: Sequence[int],
    end_offset: int | None,
    index_interval_bytes: int,
    inflate_limit: int,
    read_file: Callable[[Path], Bytes] = memory_map_file,
    workers: WorkerThreads | None = None,
) -> list[SourceSegment]:
    """Raises UsageError, BadData.
    :param end_offset: base offset of the next segment; None if the last one is the newest.
    :param workers: parse the headers; None for the caller's thread.
    """
    if not base_offsets:
        raise UsageError(f"{log_dir} holds no segments", hint="Segments are called <20 digits>.log")

    def open_segment(segment_number: int, previous_last_offset: int) -> SourceSegment:
        path, following = (
            log_dir / f"{base_offsets[segment_number]:020d}.log",
            base_offsets[segment_number + 1] if segment_number + 1 < len(base_offsets) else end_offset,
        )
        mtime_ms = path.stat().st_mtime_ns // 1_000_000
        txn_entries = read_txn_index(path.with_suffix(".txnindex"))
        source = open_source_segment(
            segment_number,
            path,
            base_offsets[segment_number],
            following,
            mtime_ms,
            previous_last_offset,
            inflate_limit,
            txn_entries=txn_entries,
            read_bytes=read_file,
        )
        if len(source.table) and int(source.table.last_offset[-1]) - source.base > MAX32:
            raise BadData(
                "its last offset lies more than 2147483647 above its base, which no index can hold",
                segment=path.name,
                position=int(source.table.position[-1]),
                offset=int(source.table.last_offset[-1]),
                hint="Kafka splits such a segment when it cleans it; let a broker do that first",
            )
        source.index_bytes, source.timeindex_bytes = _usable_index_sizes(path, source, index_interval_bytes)
        return source

    def open_segment_in_worker(buffers: ReusableJobBuffers, segment_number: int) -> SourceSegment | None:
        try:
            return open_segment(segment_number, -1)
        except BadData:
            return None

    sources: list[SourceSegment] = []
    previous_last = -1
    with nullcontext(workers) if workers is not None else WorkerThreads(1) as at_work:
        for number, found in enumerate(at_work.run_jobs(open_segment_in_worker, range(len(base_offsets)))):
            # What is wrong is said by one who knows what lies before it.
            source = found if found is not None and _begins_after(found.table, previous_last) else open_segment(number, previous_last)
            sources.append(source)
            if len(source.table):
                previous_last = int(source.table.last_offset[-1])
    return sources


def _begins_after(table: BatchTable, previous_last_offset: int) -> bool:
    if not len(table):
        return True
    base = int(table.base_offset[0])
    return (int(table.last_offset[0]) if base == UNKNOWN_OFFSET else base) > previous_last_offset


def _usable_index_sizes(path: Path, source: SourceSegment, index_interval_bytes: int) -> tuple[int, int]:
    """Sizes of whole entries: as in Kafka, without an offset index those after a rebuild of both; a missing time index alone counts as
    empty.
    """
    index, timeindex = path.with_suffix(".index"), path.with_suffix(".timeindex")
    if index.exists():
        return index.stat().st_size // 8 * 8, timeindex.stat().st_size // 12 * 12 if timeindex.exists() else 0
    table = source.table
    built = encode_indexes(source.base, table.size, table.last_offset, table.max_timestamp, index_interval_bytes)
    return len(built[0]), len(built[1])


def _segment_base_of(sources: list[SourceSegment], offset: int) -> int:
    """Kafka: LogCleanerManager.calculateCleanableBytes."""
    if offset >= sources[-1].end:
        return offset
    return max((source.base for source in sources if source.base <= offset), default=sources[0].base)


def _legacy_horizon_ms(sources: list[SourceSegment], first_dirty: int, delete_retention_ms: int) -> int:
    """Tombstones of v0/v1 stay in segments modified after this time: that of the last segment below ``first_dirty``, minus the retention; 0
    without such a segment.
    """
    clean = [source for source in sources if source.base < first_dirty]
    return clean[-1].mtime_ms - delete_retention_ms if clean else 0


def _producer_states_at_offset(log_dir: Path, sources: list[SourceSegment], end_offset: int) -> ProducerStates:
    """No producer id expires here. As
    in Kafka, only snapshots at the base offset of a segment other than the first, or at ``end_offset``, are used.
    """
    places = {source.base for source in sources[1:]} | {end_offset}
    found = sorted((int(m[1]), path) for path in log_dir.iterdir() if (m := _SNAPSHOT_NAME.fullmatch(path.name)))
    states, covered = ProducerStates.empty_producer_states(), 0
    for offset, path in reversed(found):
        if offset not in places:
            continue
        try:
            states, covered = parse_producer_snapshot_file(path.read_bytes(), path.name), offset
            break
        except BadData:
            continue  # as Kafka: an older snapshot and more of the log say the same
    for source in sources:
        if source.end > covered:
            states = states.replay_batches(source.table, covered)
    return states
