"""What the pages show, as frozen values: the templates draw them, and ``/api`` gives them as JSON (docs/reference/status-api.md).

Times are milliseconds since 1970, UTC; sizes bytes; offsets as everywhere, ``end`` inclusive. A field is null where nobody knows.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from compactor.model.base import Value

SCHEMA = 1
"""Counts up when a field changes its meaning or goes; new ones may come at any time."""

Level = Literal["ok", "attention", "down", "starting", "stopping"]


class Verdict(Value):
    """``text``: a few words; ``detail``: why, or what is going on."""

    level: Level
    text: str
    detail: str


class NeedsAttention(Value):
    """A partition that does not get well by itself, or not soon. ``commands``: to begin with."""

    partition: str
    kind: str
    reason: str
    segment: str
    since_ms: int | None
    failures: int
    next_try_ms: int | None
    commands: tuple[str, ...]


class WorkItem(Value):
    """A job at work. ``done`` of ``total`` in ``unit``, ``share`` of the whole job; null as long as nobody can say."""

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


class PlannedStep(Value):
    """``action``: round, retire, generation, look, upload."""

    action: str
    at_ms: int | None
    why: str


class RoundOutcome(Value):
    """The last round that has ended."""

    run: str
    status: str
    ended_ms: int
    bytes_before: int | None
    bytes_after: int | None


class PartitionRow(Value):
    """``condition``: attention, working, due, waiting, paused, unseen, quiet. ``reason``: why it is due, or is not, or what is wrong."""

    partition: str
    condition: str
    reason: str
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
    next: PlannedStep


class UploadRow(Value):
    """``condition``: attention, working, due (something is to be uploaded), unseen, quiet. ``tier_end_offset``: inclusive."""

    partition: str
    condition: str
    reason: str
    leader_epoch: int | None
    tier_end_offset: int | None
    high_watermark: int | None
    lag_segments: int
    lag_bytes: int
    lag_since_ms: int | None
    next: PlannedStep


RowT = TypeVar("RowT", PartitionRow, UploadRow)


class PartitionList(Value, Generic[RowT]):
    """One page of the partitions. ``matching``: those that the search and the condition leave, of all."""

    search: str
    condition: str
    sort: str
    descending: bool
    page: int
    pages: int
    per_page: int
    matching: int
    rows: tuple[RowT, ...]


class LookInfo(Value):
    """``last_ms``: of the last look for work."""

    count: int
    last_ms: int | None
    interval_ms: int


class DaemonTotals(Value):
    """``reclaimed_24h_bytes``: of segments that rounds had replaced, deleted since ``reclaimed_since_ms``, whoever did it; by run history,
    to the hour. ``waiting_due_ms``: when the first of what waits may go.
    """

    partitions: int
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
    attention_partitions: int
    requests: int
    disk_used_bytes: int
    disk_budget_bytes: int


class AgentTotals(Value):
    """``partitions``: in the log directories, whose topics match; ``led``: those that this broker leads; lags are theirs."""

    partitions: int
    led: int
    lag_segments: int
    lag_bytes: int
    oldest_lag_ms: int | None
    uploaded_segments: int
    uploaded_bytes: int
    attention_partitions: int
    requests: int


TotalsT = TypeVar("TotalsT", DaemonTotals, AgentTotals)


class StatusDocument(Value, Generic[TotalsT, RowT]):
    """``/api/status``. ``needs_attention``: the first of ``totals.attention_partitions``; ``conditions``: how many are in which."""

    schema_version: int = SCHEMA
    kind: Literal["daemon", "agent"]
    version: str
    holder: str
    tier: str
    now_ms: int
    started_ms: int | None
    ready: bool
    verdict: Verdict
    looks: LookInfo
    totals: TotalsT
    needs_attention: tuple[NeedsAttention, ...]
    at_work: tuple[WorkItem, ...]
    conditions: dict[str, int]
    partitions: PartitionList[RowT]


class SegmentSpan(Value):
    """One segment, or neighbours drawn as one (``segments`` of them). ``state``: cleaned, dirty, uncleanable; ``decision``: left alone by
    the last round, and ``why``; empty where it was not, or nobody wrote it down.
    """

    start_offset: int
    end_offset: int
    segments: int
    bytes: int
    state: str
    decision: str
    why: str


class ReplacedSpan(Value):
    """Segments that readers do not see any more and that wait for deletion. ``run``: the round that replaced them, or was undone."""

    start_offset: int
    end_offset: int
    segments: int
    bytes: int
    run: str
    undone: bool


class OffsetBand(Value):
    """``state``: cleaned, dirty, uncleanable. ``end_offset`` exclusive."""

    state: str
    start_offset: int
    end_offset: int


class LeaderEpochSpan(Value):
    """A leader epoch of the broker. ``end_offset`` exclusive."""

    epoch: int
    start_offset: int
    end_offset: int


class OffsetAxis(Value):
    """Everything that lies on the offsets of a partition, from ``start_offset`` to ``end_offset``, exclusive."""

    start_offset: int
    end_offset: int
    first_dirty_offset: int
    first_uncleanable_offset: int
    bands: tuple[OffsetBand, ...]
    segments: tuple[SegmentSpan, ...]
    replaced: tuple[ReplacedSpan, ...]
    leader_epochs: tuple[LeaderEpochSpan, ...]


class RoundEntry(Value):
    """A round as run history has it. ``cost``: bytes read from the tier and written to it, time, and money by the document's ``prices``:
    ``cost_usd`` for its requests, by their usual number; ``saved_usd_month`` for what need not be stored any more.
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


class CompactorEpoch(Value):
    """Who led the partition when. ``ended``: released, replaced, or empty while it lasts."""

    epoch: int
    holder: str
    since_ms: int
    ended: str
    ended_ms: int | None


class PartitionDocument(Value):
    """``/api/partitions/T-P``. Rounds and epochs: newest first. ``prices``: which ones money is reckoned by; empty where the store bills
    nothing.
    """

    schema_version: int = SCHEMA
    version: str
    now_ms: int
    row: PartitionRow
    attention: NeedsAttention | None
    at_work: WorkItem | None
    axis: OffsetAxis | None
    leader_epoch: int | None
    fenced_appends: int | None
    rounds: tuple[RoundEntry, ...]
    prices: str
    compactor_epochs: tuple[CompactorEpoch, ...]
    commands: tuple[str, ...]


class PendingSegment(Value):
    """A sealed segment that is not in the tier yet. ``end_offset`` inclusive; ``sealed_ms``: when its broker wrote to it last."""

    start_offset: int
    end_offset: int
    bytes: int
    sealed_ms: int


class UploadDocument(Value):
    """``/api/partitions/T-P`` of an agent. ``directory``: where the broker has it, from ``first_offset`` on; from ``active_offset`` on it
    is still written. ``leads``: this broker does; others upload what theirs lead. ``pending``: the first of ``row.lag_segments``.
    """

    schema_version: int = SCHEMA
    version: str
    now_ms: int
    row: UploadRow
    attention: NeedsAttention | None
    at_work: WorkItem | None
    leads: bool
    directory: str
    first_offset: int | None
    active_offset: int | None
    pending: tuple[PendingSegment, ...]
    checked_ms: int | None
    commands: tuple[str, ...]
