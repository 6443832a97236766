"""Documents of the pages, as frozen values. Templates draw them, and ``/api`` returns them as JSON (docs/reference/status-api.md).

Times are milliseconds since 1970, UTC. Sizes are in bytes. ``end_offset`` is inclusive unless a class says otherwise. A field is null if
its value is unknown.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from compactor.model.segment import StrictFrozenModel

DOCUMENT_SCHEMA_VERSION = 1
"""Version of the documents. It rises when a field changes its meaning or is removed, not when a field is added."""

Level = Literal["ok", "attention", "down", "starting", "stopping"]


class ServiceVerdict(StrictFrozenModel):
    """Condition of the service at a glance.

    ``text``: the condition in a few words.
    ``detail``: the reason for it, or else the work that runs or is due.
    """

    level: Level
    text: str
    detail: str


STATE_WORDS = {
    "attention": "Needs you", "working": "At work", "due": "Due", "waiting": "Clean, in grace", "paused": "Paused",
    "unseen": "Not seen yet", "quiet": "Clean",
}  # fmt: skip
"""Conditions as people read them."""


class PartitionVerdictEntry(StrictFrozenModel):
    """Verdict on a partition.

    ``kind``: clean, due, waiting (ends by itself), blocked (no round can clean it until a person acts) or paused (by a person).
    ``until_ms``: when a wait ends at the latest; null if unknown.
    ``waiting_bytes``: bytes of segments with dirty offsets, whether or not a round may clean them now.
    ``cause``: of a blocked partition: settings, budget, transaction, timestamps, keyless, damage, rights, brokers, location or failing
        (jobs or polls fail and are retried); otherwise empty.
    ``since_ms``: since when it is known to be blocked; null if unknown.
    ``next_step``: what a person can do about a block.
    """

    kind: str
    reason: str
    until_ms: int | None
    waiting_bytes: int
    cause: str
    since_ms: int | None
    next_step: str


class PartitionNeedingAttention(StrictFrozenModel):
    """A partition that is blocked: no round can clean it until a person acts.

    ``kind``: unreadable, failing, quarantined or blocked.
    ``cause``, ``waiting_bytes``, ``next_step``: as in the verdict on the partition; empty and 0 for an agent's partition.
    ``since_ms``: time of the first failure, in milliseconds.
    ``commands``: the first commands to run.
    ``runbook``: link to a section of the runbook: an absolute URL if ``runbook_url`` is set, else a file of the documentation.
    """

    partition: str
    kind: str
    reason: str
    segment: str
    since_ms: int | None
    failures: int
    next_try_ms: int | None
    commands: tuple[str, ...]
    runbook: str
    cause: str = ""
    waiting_bytes: int = 0
    next_step: str = ""


class RunningJobProgress(StrictFrozenModel):
    """A running job with its progress.

    ``done``, ``total``: completed and expected amount of work, in ``unit``.
    ``share``: completed fraction of the whole job, from 0 to 1; null while unknown.
    """

    partition: str
    action: str
    phase: str
    run: str
    begun_ms: int | None
    elapsed_ms: int | None
    done: int | None
    total: int | None
    unit: str
    share: float | None
    expected_end_ms: int | None


class NextPartitionAction(StrictFrozenModel):
    """The next action on a partition.

    ``action``: round, retire, output, poll or upload.
    ``at_ms``: earliest time of the action; null if none is known.
    """

    action: str
    at_ms: int | None
    why: str


class RoundOutcome(StrictFrozenModel):
    """The latest ended round of a partition.

    ``bytes_before``: size of the segments that it rewrote.
    ``bytes_after``: size of the segments that it wrote.
    """

    run: str
    status: str
    ended_ms: int
    bytes_before: int | None
    bytes_after: int | None


class PartitionListRow(StrictFrozenModel):
    """A partition's row on the page that lists partitions.

    ``reason``: message of its failure, or why it has this condition.
    """

    partition: str
    condition: str
    reason: str
    next: NextPartitionAction


class DaemonPartitionRow(PartitionListRow):
    """A partition in the daemon's list.

    ``condition``: attention (it is blocked), working (a job runs), due (for a round), waiting (replaced segments are in grace), paused,
    unseen (not polled yet) or quiet (clean, or dirty and not cleanable yet).
    ``state``: the condition for people, with the time until which replaced segments stay, or until which what is dirty has to wait.
    ``verdict``: whether the partition is clean, due, waiting, blocked or paused; null if it was not polled yet.
    ``reason``: message of its failure, or why a round is due or not.
    ``cleaner_offsets``: pairs of compactor epoch and offset.
    """

    state: str
    segments: int | None
    bytes: int | None
    start_offset: int | None
    end_offset: int | None
    cleaner_offsets: tuple[tuple[int, int], ...]
    first_dirty_offset: int | None
    dirty_bytes: int | None
    dirty_ratio: float | None
    waiting_bytes: int | None
    leader: str
    last_round: RoundOutcome | None
    verdict: PartitionVerdictEntry | None


class PartitionUploadRow(PartitionListRow):
    """A partition in the agent's list.

    ``condition``: attention (it fails), working (an upload runs), due (segments wait for upload), unseen (state unknown) or quiet (up to
        date).
    ``tier_end_offset``: last offset in the tier, inclusive.
    ``lag_staged_segments``: number of segments not yet uploaded that the broker has renamed for deletion.
    ``lag_deadline_ms``: when the broker will delete the first of them.
    """

    leader_epoch: int | None
    tier_end_offset: int | None
    high_watermark: int | None
    lag_segments: int
    lag_bytes: int
    lag_since_ms: int | None
    lag_staged_segments: int
    lag_deadline_ms: int | None


RowT = TypeVar("RowT", DaemonPartitionRow, PartitionUploadRow)


class PartitionListPage(StrictFrozenModel, Generic[RowT]):
    """One page of the list of partitions.

    ``matching``: number of partitions that match the search and the condition, on all pages.
    ``conditions``: number of partitions that match the search, by condition.
    """

    search: str
    condition: str
    sort: str
    descending: bool
    page: int
    pages: int
    per_page: int
    matching: int
    conditions: dict[str, int]
    rows: tuple[RowT, ...]


class WorkScanTimes(StrictFrozenModel):
    """Number and times of the service's scans, in which it looks for work.

    ``last_ms``: time of the latest scan.
    ``interval_ms``: time between two scans.
    """

    count: int
    last_ms: int | None
    interval_ms: int


class HourlyStorageBytes(StrictFrozenModel):
    """Bytes of the tier in one hour of the last seven days.

    ``stored_bytes``: stored bytes, including segments that wait for deletion.
    ``reclaimed_bytes``: bytes that were deleted in this hour.
    """

    hour_ms: int
    stored_bytes: int
    dirty_bytes: int
    reclaimed_bytes: int


class RecentRound(StrictFrozenModel):
    """The latest ended round of one partition, as the list of recent rounds shows it."""

    partition: str
    round: RoundOutcome


class ServiceTotals(StrictFrozenModel):
    """Totals that every service has.

    ``partitions``: number of partitions that the service knows.
    ``attention_partitions``: number of failing partitions.
    ``requests``: requests to the store since the service started.
    """

    partitions: int
    attention_partitions: int
    requests: int


class DaemonTotals(ServiceTotals):
    """Totals of a daemon.

    ``reclaimed_24h_bytes``: bytes of replaced segments that any process has deleted since ``reclaimed_since_ms``. Computed from the run
        history in steps of an hour.
    ``waiting_due_ms``: when the first replaced segment may be deleted.
    ``blocked_bytes``: bytes that wait in blocked partitions, whose number is ``attention_partitions``.
    ``queue_empty_ms``: when all due rounds will be done if they go on as fast as this process's rounds so far; null if nothing is due or no
        round has ended.
    ``week``: stored, dirty and deleted bytes of each hour of the last seven days, oldest first.
    ``recent_rounds``: the latest round of each partition, newest first.
    """

    segments: int
    stored_bytes: int
    dirty_bytes: int
    reclaimed_24h_bytes: int
    reclaimed_since_ms: int
    waiting_bytes: int
    waiting_partitions: int
    waiting_due_ms: int | None
    due_partitions: int
    due_bytes: int
    blocked_bytes: int
    queue_empty_ms: int | None
    disk_used_bytes: int
    disk_budget_bytes: int
    week: tuple[HourlyStorageBytes, ...]
    recent_rounds: tuple[RecentRound, ...]


class AgentTotals(ServiceTotals):
    """Totals of an agent (uploader on a broker).

    ``partitions``: number of partitions in the log directories whose topics match.
    ``led``: number of those partitions that this broker leads. The fields about lag count only these.
    """

    led: int
    lag_segments: int
    lag_bytes: int
    oldest_lag_ms: int | None
    uploaded_segments: int
    uploaded_bytes: int


TotalsT = TypeVar("TotalsT", DaemonTotals, AgentTotals)


class ServiceStatusDocument(StrictFrozenModel, Generic[TotalsT, RowT]):
    """Document of the start page and of ``/api/status``.

    ``needs_attention``: the first few failing partitions; ``totals.attention_partitions`` counts all of them.
    ``conditions``: number of partitions in each condition.
    ``looks``: number and times of the scans, in which the service looks for work.
    """

    schema_version: int = DOCUMENT_SCHEMA_VERSION
    kind: Literal["daemon", "agent"]
    version: str
    holder: str
    tier: str
    now_ms: int
    started_ms: int | None
    ready: bool
    verdict: ServiceVerdict
    looks: WorkScanTimes
    totals: TotalsT
    needs_attention: tuple[PartitionNeedingAttention, ...]
    at_work: tuple[RunningJobProgress, ...]
    conditions: dict[str, int]
    partitions: PartitionListPage[RowT]


class EffectiveCleanerSettings(StrictFrozenModel):
    """Settings of the cleaner that apply to a topic."""

    cleanup_policy: str
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    delete_retention_ms: int
    retention_ms: int
    retention_bytes: int


class TopicTotalsRow(StrictFrozenModel):
    """Totals of one topic.

    ``saved_bytes``: bytes saved by the latest round of each partition.
    ``week``: stored, dirty and deleted bytes of each hour of the last seven days; empty unless the topic is one of the largest.
    """

    topic: str
    partitions: int
    attention_partitions: int
    due_partitions: int
    segments: int
    bytes: int
    dirty_bytes: int
    waiting_bytes: int
    saved_bytes: int
    policy: EffectiveCleanerSettings
    week: tuple[HourlyStorageBytes, ...]


class TopicsDocument(StrictFrozenModel):
    """Document of the page of topics and of ``/api/topics``. Topics come largest first."""

    schema_version: int = DOCUMENT_SCHEMA_VERSION
    version: str
    tier: str
    now_ms: int
    topics: tuple[TopicTotalsRow, ...]


class OffsetRange(StrictFrozenModel):
    """A range of offsets from ``start_offset`` to ``end_offset``. Each kind of range states whether the end is included."""

    start_offset: int
    end_offset: int


class OffsetAxisSegmentSpan(OffsetRange):
    """A segment on the offset axis, or several similar neighbours drawn as one.

    ``segments``: number of these segments.
    ``end_offset``: inclusive.
    ``state``: cleaned, dirty or uncleanable.
    ``decision``: "left alone" if the latest round skipped the segments, otherwise empty.
    ``why``: why they were skipped. Both texts are also empty if this was not recorded.
    """

    segments: int
    bytes: int
    state: str
    decision: str
    why: str


class ReplacedSegmentsSpan(OffsetRange):
    """Segments on the offset axis that readers no longer use and that wait for deletion.

    ``end_offset``: inclusive.
    ``run``: id of the round that replaced the segments or, if ``undone``, wrote them.
    ``undone``: whether these are the outputs of a round that was undone.
    """

    segments: int
    bytes: int
    run: str
    undone: bool


class OffsetStateBand(OffsetRange):
    """A range of the offset axis in one state.

    ``state``: cleaned, dirty or uncleanable.
    ``end_offset``: exclusive.
    """

    state: str


class LeaderEpochSpan(OffsetRange):
    """A leader epoch of the broker on the offset axis. ``end_offset`` is exclusive."""

    epoch: int


class OffsetAxis(OffsetRange):
    """All that is drawn on a partition's offset axis, which extends from ``start_offset`` to ``end_offset`` (exclusive)."""

    first_dirty_offset: int
    first_uncleanable_offset: int
    bands: tuple[OffsetStateBand, ...]
    segments: tuple[OffsetAxisSegmentSpan, ...]
    replaced: tuple[ReplacedSegmentsSpan, ...]
    leader_epochs: tuple[LeaderEpochSpan, ...]


class RoundEntryWithCosts(StrictFrozenModel):
    """A round of the run history.

    ``cost_bytes_read``, ``cost_bytes_written``: bytes that the round read from the tier and wrote to it.
    ``cost_usd``: price of the round's requests, estimated from the number that such a round usually makes.
    ``saved_usd_month``: monthly price of the storage that the round saves.

    Both prices are computed from the price table that the document names in ``prices``.
    """

    run: str
    status: str
    holder: str
    started_ms: int
    ended_ms: int | None
    first_dirty_offset: int | None
    next_dirty_offset: int | None
    segments_in: int
    segments_out: int
    bytes_before: int | None
    bytes_after: int | None
    records_read: int | None
    records_kept: int | None
    cost_bytes_read: int | None
    cost_bytes_written: int | None
    cost_ms: int | None
    cost_usd: float | None
    saved_usd_month: float | None
    reason: str
    segment: str


class CompactorEpochSpan(StrictFrozenModel):
    """One compactor epoch: one process's period of leadership of the partition.

    ``ended``: released, replaced, or empty while it lasts.
    """

    epoch: int
    holder: str
    since_ms: int
    ended: str
    ended_ms: int | None


class PartitionPageDocument(StrictFrozenModel):
    """Fields of a partition's page that daemon and agent have in common.

    ``commands``: command lines about the partition, for people to copy.
    """

    schema_version: int = DOCUMENT_SCHEMA_VERSION
    version: str
    now_ms: int
    attention: PartitionNeedingAttention | None
    at_work: RunningJobProgress | None
    commands: tuple[str, ...]


class PartitionOutputState(StrictFrozenModel):
    """State of a partition's output, such as its Iceberg table.

    ``end_offset``: end of the offsets that the output contains, exclusive; null if unknown.
    ``lag_offsets``: number of offsets from ``end_offset`` to the cleaner offset; negative after an undo.
    ``lag_since_ms``: when the latest round ended, if the output does not contain its result yet.
    ``files``: number of the partition's files in the output.
    ``snapshots``: number of versions of the output that can be read.
    ``problem``: why the output lags behind; empty if nothing prevents an update.
    """

    end_offset: int | None
    lag_offsets: int | None
    lag_since_ms: int | None
    files: int | None
    snapshots: int | None
    problem: str


class DaemonPartitionPageDocument(PartitionPageDocument):
    """Document of a partition's page and of ``/api/partitions/T-P``. Rounds and epochs come newest first.

    ``prices``: the price table that was used; empty if the store costs nothing.
    ``output``: null if no output is configured, or its state is not known yet.
    """

    row: DaemonPartitionRow
    output: PartitionOutputState | None
    axis: OffsetAxis | None
    leader_epoch: int | None
    fenced_appends: int | None
    rounds: tuple[RoundEntryWithCosts, ...]
    prices: str
    compactor_epochs: tuple[CompactorEpochSpan, ...]


class SegmentPendingUpload(OffsetRange):
    """A sealed segment that is not in the tier yet.

    ``end_offset``: inclusive.
    ``sealed_ms``: when the broker last wrote to the segment.
    """

    bytes: int
    sealed_ms: int


class PartitionUploadDocument(PartitionPageDocument):
    """Document of a partition's page and of ``/api/partitions/T-P`` of an agent.

    ``directory``: the broker's directory of the partition.
    ``first_offset``: first offset in that directory.
    ``active_offset``: first offset of the active segment, to which the broker still appends.
    ``leads``: whether this broker leads the partition. Only the leader's agent uploads it.
    ``pending``: the first few segments that wait for upload; ``row.lag_segments`` counts all of them.
    """

    row: PartitionUploadRow
    leads: bool
    directory: str
    first_offset: int | None
    active_offset: int | None
    pending: tuple[SegmentPendingUpload, ...]
    checked_ms: int | None
