"""Overview of all partitions: summaries from local state if they are recent enough, else from the tier.

A change hint can be lost when a process dies after its publication. Therefore each log is also checked once per ``MAX_AGE_MS``, and at
every call while a compactor or an import is at work. Commands for people also check that the log still has the
last known record: it may have been restored from a backup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from compactor.access.tier import Tier
from compactor.control.logs import open_partition_log
from compactor.control.state import PartitionState, RunHistoryEntry
from compactor.control.summary import PartitionSummary, summarize_state
from compactor.errors import CompactorError, UsageError
from compactor.local.cache import ControlLogReadProgress
from compactor.model.ids import RunHistoryStatus, TopicPartition

# Run history.


def run_document(state: PartitionState, run: RunHistoryEntry) -> dict[str, object]:
    """JSON fields of a round; None for unknown values.

    status: one of

    - running: not finished; `runs` shows it as interrupted until another process continues it;
    - published: its end was not recorded;
    - cleaned, resumed: finished by the process that began it, or by another one;
    - undone: abandoned before it was published;
    - reverted: undone by `undo`;
    - reverted_in_part: ``reason`` says what could not be undone;
    - restored: it undid another round;
    - repaired: it replaced damaged segments one to one;
    - quarantined: it failed on corrupt data.
    balance: batches and records read, removed and written.
    content: number and digest sum of the batches after the round.
    """
    return {
        "run_id": run.run_id,
        "topic": state.topic,
        "partition": state.partition,
        "incarnation": state.incarnation,
        "status": run.status,
        "leader_epoch": run.leader_epoch,
        "holder": run.holder,
        "started_ms": run.started_ms,
        "ended_ms": run.ended_ms if run.ended_ms >= 0 else None,
        "slot": run.slot,
        "published_slot": run.published_slot or None,
        "first_dirty_offset": run.first_dirty_offset if run.first_dirty_offset >= 0 else None,
        "next_dirty_offset": run.next_dirty_offset if run.next_dirty_offset >= 0 else None,
        "cleaner_offsets_before": run.vector_before,
        "cleaner_offsets": run.vector,
        "segments_in": run.sources,
        "segments_out": run.outputs,
        "reason": run.reason,
        "segment": run.segment,
        "undoable": undo_refusal(state, run.run_id) == "",
        "stats": run.stats,
        "balance": run.balance,
        "content": run.content,
    }


def search_run(
    tier: Tier, run_id: str, partitions: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None
) -> tuple[PartitionState, str] | None:
    """State of the partition that remembers a run, and the run's complete id.

    :param run_id: the id, or its first characters.
    :raises UsageError: if several runs have ids that begin so.
    :raises CompactorError: if no run was found and a partition could not be read.
    """
    logs = tier.read_logs(partitions, on_partition)
    states = [log.state for log in logs if not isinstance(log, CompactorError)]
    found = [(state, run.run_id) for state in states for run in state.runs if run.run_id.startswith(run_id)]
    exactly = [one for one in found if one[1] == run_id]
    if len(exactly or found) == 1:
        return (exactly or found)[0]
    if found:
        shown = ", ".join(sorted(each for _, each in found)[:4])
        raise UsageError(f"{len(found)} runs begin with {run_id!r}: {shown}", hint="Name more of it")
    for log in logs:
        if isinstance(log, CompactorError):
            raise log
    return None


def undo_refusal(state: PartitionState, run_id: str) -> str:
    """For information: ``control.ordering`` decides again. Empty if `undo` is possible."""
    if state.intent:
        return f"run {state.intent.plan.run_id} is open"
    if not state.published or state.published[-1] != run_id:
        return "it is not the latest published round"
    if not any(group.run_id == run_id and not group.undone for group in state.waiting):
        return "the segments that it replaced are deleted, or being deleted"
    if any(run.run_id == run_id and run.status == RunHistoryStatus.REPAIRED for run in state.runs):
        return "it replaced damaged segments"
    if not state.mirrored:
        return ""
    from compactor.round.restoring import groups_to_restore, problem_that_prevents_restoring  # loads numba

    return problem_that_prevents_restoring(groups_to_restore(state, run_id))


MAX_AGE_MS = 3_600_000
"""Largest age of a summary that is shown after a change hint was lost. Decisions are not made from it: `run` reads every partition."""
OVERVIEW_THREADS = 16
"""Partitions that are read at the same time."""

OnPartition = Callable[[], None]
CachedSummary = tuple[ControlLogReadProgress, PartitionSummary]


@dataclass(frozen=True)
class SummaryOrError:
    """Exactly one of both is set."""

    partition: TopicPartition
    summary: PartitionSummary | None = None
    error: CompactorError | None = None


def read_summaries(
    tier: Tier,
    partitions: Sequence[TopicPartition],
    *,
    max_age_ms: int = MAX_AGE_MS,
    check_for_restored_logs: bool = False,
    on_partition: OnPartition = lambda: None,
) -> list[SummaryOrError]:
    """In the given order. Raises StoreError only if the catalog cannot be read.

    :param max_age_ms: of a summary from local state; with 0 every partition's log is read.
    :param check_for_restored_logs: one request per summary from local state.
    """
    hints = tier.identity.read_catalog().partitions
    now = tier.ports.clock_ms()
    kept = tier.local.cached_summaries() if tier.local else {}
    found: dict[TopicPartition, SummaryOrError] = {}
    unread: list[TopicPartition] = []
    trusted: set[TopicPartition] = set()
    for name in partitions:
        known = kept.get(str(name))
        fresh = (
            known is not None and tier.min_log_slot(name) <= known[0].slot and is_fresh(*known, hints.get(str(name), 0), now, max_age_ms)
        )
        if fresh and check_for_restored_logs:
            trusted.add(name)
        if known and fresh and not check_for_restored_logs:
            found[name] = SummaryOrError(name, known[1])
            on_partition()
        else:
            unread.append(name)
    confirmed: dict[TopicPartition, ControlLogReadProgress] = {}

    def read_one(partition: TopicPartition) -> SummaryOrError:
        known = kept.get(str(partition))
        if known and partition in trusted and _still_has_last_record(tier, partition, known[0]):
            result = SummaryOrError(partition, known[1])
        else:
            result = _read_summary(tier, partition, hints.get(str(partition), 0), known, confirmed, now)
        on_partition()
        return result

    if unread:
        with ThreadPoolExecutor(min(OVERVIEW_THREADS, len(unread)), thread_name_prefix="summaries") as pool:
            found |= zip(unread, pool.map(read_one, unread), strict=True)
    if tier.local and confirmed:
        tier.local.save_read_progress(confirmed)
    return [found[name] for name in partitions]


def is_fresh(
    progress: ControlLogReadProgress, summary: PartitionSummary, latest_catalog_record_number: int, now_ms: int, max_age_ms: int
) -> bool:
    """False while an import or a round is open, because the next control record may then come without a change hint.

    :param max_age_ms: exclusive.
    """
    at_work = summary.current_leader or summary.open_run or summary.imports
    return progress.hint == latest_catalog_record_number and 0 <= now_ms - progress.checked_ms < max_age_ms and not at_work


def _still_has_last_record(tier: Tier, partition: TopicPartition, progress: ControlLogReadProgress) -> bool:
    """False if the store fails."""
    try:
        return bool(open_partition_log(tier.ports, partition).contains_state(progress.slot, progress.mark))
    except CompactorError:
        return False


def _read_summary(
    tier: Tier,
    partition: TopicPartition,
    latest_catalog_record_number: int,
    cached: CachedSummary | None,
    confirmed_progress: dict[TopicPartition, ControlLogReadProgress],
    now_ms: int,
) -> SummaryOrError:
    """:param cached: returned if the control log has no newer record.
    :param confirmed_progress: receives the time of this check if ``cached`` is returned.
    """
    try:
        if cached:
            seen, summary = cached
            if not open_partition_log(tier.ports, partition, tier.min_log_slot(partition)).has_changed_since(seen.slot, seen.mark):
                confirmed_progress[partition] = seen.model_copy(update={"hint": latest_catalog_record_number, "checked_ms": now_ms})
                return SummaryOrError(partition, summary)
        log = tier.open_partition_log(partition)
        state = log.refresh()
        tier.change_notifier.cache_state(log, latest_catalog_record_number)
        return SummaryOrError(partition, summarize_state(state))
    except CompactorError as error:
        return SummaryOrError(partition, error=error)
