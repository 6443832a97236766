"""Folded states of control logs."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from pydantic import Field

from checkpoint.offsets import CleanerOffset, first_dirty_offset_in
from compactor.constants import EMPTY_TOPIC_ID, NO_COMPACTOR_EPOCH, CompactorEpoch, TopicId
from compactor.control.records import DeletionCheckResult, LastImportedBatch, ScratchObject
from compactor.errors import CompactorError
from compactor.model.ids import RunHistoryStatus, TopicPartition, partition_of_incarnation
from compactor.model.plan import CompactionPlan, CompactionReceipt, CompactionTask, KeylessRecords
from compactor.model.segment import (
    Balance,
    CountAndDigestSum,
    EpochEntry,
    RemoteLogSegmentMetadata,
    StrictFrozenModel,
    total_digest_sum,
)

# Stages of a round (announce before upload before publish before retire, I4). docs/reference/control-records.md shows the table
# (compared by tests/unit/test_control_ordering.py).


class RoundStage(StrEnum):
    """Stage of a round, in the order of STAGES."""

    ANNOUNCED = "announced"
    UPLOADED = "uploaded"
    VERIFIED = "verified"
    PUBLISH_BEGUN = "publish begun"
    PUBLISHED = "published"
    RETIRE_BEGUN = "retire begun"
    DELETED = "deleted"
    RETIRED = "retired"
    UNDONE = "undone"
    REVERTED = "reverted"


_T = RoundStage
STAGES: dict[RoundStage | None, frozenset[RoundStage]] = {
    None: frozenset({_T.ANNOUNCED}),
    _T.ANNOUNCED: frozenset({_T.UPLOADED, _T.UNDONE}),
    _T.UPLOADED: frozenset({_T.VERIFIED, _T.UNDONE}),
    _T.VERIFIED: frozenset({_T.PUBLISH_BEGUN, _T.PUBLISHED, _T.UNDONE}),
    _T.PUBLISH_BEGUN: frozenset({_T.PUBLISHED}),
    _T.PUBLISHED: frozenset({_T.RETIRE_BEGUN, _T.REVERTED}),
    _T.REVERTED: frozenset({_T.RETIRE_BEGUN}),
    _T.UNDONE: frozenset({_T.DELETED}),
    _T.RETIRE_BEGUN: frozenset({_T.DELETED}),
    _T.DELETED: frozenset({_T.RETIRED}),
    _T.RETIRED: frozenset(),
}
"""Before PUBLISHED a round can only be undone (UNDONE), after it only go forward; REVERTED is a publication of its own (``undo``).
PUBLISH_BEGUN comes between them where readers are switched in several steps (brokers), and cannot be undone either. An undone intent has
nothing to retire, so it ends with DELETED. Grace lies between PUBLISHED or REVERTED and RETIRE_BEGUN.

UPLOADED means that all groups have receipts: each was rewritten, passed the gate and was uploaded, in this order.
"""


def stage_of_intent(intent: RoundIntent) -> RoundStage:
    """A resumed round continues from this stage."""
    if intent.begun_slot:
        return RoundStage.PUBLISH_BEGUN
    return RoundStage.ANNOUNCED if intent.pending_tasks else RoundStage.UPLOADED


class RoundStageTracker:
    def __init__(self, stage: RoundStage | None = None) -> None:
        self.stage = stage

    def advance_to_stage(self, stage: RoundStage) -> None:
        """Raises CompactorError (a bug) if STAGES does not allow it."""
        if stage not in STAGES[self.stage]:
            raise CompactorError(f"a round cannot go from {self.stage or 'nothing'} to {stage}", hint="This is a bug; please report it")
        self.stage = stage


HISTORY = 100
"""Number of past runs, fenced appends, epochs and closed imports that a state keeps. Older ones are lost when their slots are deleted."""


class ControlLogState(StrictFrozenModel):
    """Base of folded states. ``slot``: that of the last record included; 0 for an empty log."""

    slot: int = 0


class CompactorLeader(StrictFrozenModel):
    """The last acquired leadership. It ends when it is released or when a higher epoch is acquired, never by time.

    since_ms: the store's modification time of the record at ``slot``; None as long as that record exists.
    """

    epoch: CompactorEpoch
    incarnation: str
    holder: str
    slot: int
    at_ms: int
    ttl_ms: int
    released: bool = False
    since_ms: int | None = None


class CompactorEpochAndEnding(StrictFrozenModel):
    """One epoch. ``ended``: released, replaced, or empty while the epoch lasts.

    delivery_timeout_ms: as in LeadershipAcquired.
    """

    epoch: CompactorEpoch
    holder: str
    incarnation: str
    slot: int
    at_ms: int
    ended: str = ""
    ended_ms: int = -1
    delivery_timeout_ms: int = Field(default=0, exclude_if=lambda value: not value)


class RoundIntent(StrictFrozenModel):
    """The open intent: a plan that was announced and neither published nor undone.

    survivors: scratch objects with the result of pass 1; empty until it is complete.
    begun_slot: slot of the *publish begun* record; 0 as long as the round can be undone.
    """

    plan: CompactionPlan
    slot: int
    at_ms: int
    receipts: tuple[CompactionReceipt, ...] = ()
    survivors: tuple[ScratchObject, ...] = ()
    begun_slot: int = 0

    @property
    def pending_tasks(self) -> tuple[CompactionTask, ...]:
        done = {receipt.group for receipt in self.receipts}
        return tuple(task for task in self.plan.tasks if task.group not in done)


class OpenImport(StrictFrozenModel):
    """Import. ``ids``: registered segment ids that are not tiered yet. ``since_ms``: as in CompactorLeader.

    tiered_end: last offset that it has tiered, inclusive; -1 for none.
    """

    import_id: str
    ids: tuple[str, ...]
    holder: str
    slot: int
    since_ms: int | None = None
    tiered_end: int = -1


class ClosedImport(StrictFrozenModel):
    """An import that is complete (``voided`` empty) or void (``voided`` has the reason). ``tiered_end``: as in OpenImport."""

    import_id: str
    slot: int
    tiered_end: int
    voided: str = ""


class GroupAwaitingDeletion(StrictFrozenModel):
    """Segments that readers no longer use and whose objects wait for grace: a round's sources, or the outputs of an undone round.

    slot: of the record that published or undid the round. ``since_ms``: as in CompactorLeader.
    undone: whether the segments can no longer be restored by ``undo``.
    replaced_by: source id -> new id; empty for an undone round.
    why: what removed the segments, if not a round (truncation, deletion, retention); empty otherwise.
    """

    slot: int
    since_ms: int | None = None
    run_id: str
    leader_epoch: CompactorEpoch
    undone: bool = False
    segments: tuple[RemoteLogSegmentMetadata, ...]
    replaced_by: dict[str, str] = Field(default_factory=dict)
    vector_before: tuple[CleanerOffset, ...]
    vector: tuple[CleanerOffset, ...]
    why: str = ""
    grace_ms: int | None = None
    undo_window_ms: int | None = None
    """Recorded by the process that removed the segments from the view; None if the record did not state it."""


class RunHistoryEntry(StrictFrozenModel):
    """One run in a partition's run history.

    status: a value of RunHistoryStatus.
    balance, content: as in RoundPublished.
    cut_off_offset: where the cleaner offset would be if brokers had not deleted sources of the round; -1 if they had not.
    """

    run_id: str
    leader_epoch: CompactorEpoch
    holder: str
    slot: int
    started_ms: int
    ended_ms: int = -1
    status: str = RunHistoryStatus.RUNNING
    reason: str = ""
    segment: str = ""
    published_slot: int = 0
    first_dirty_offset: int = -1
    next_dirty_offset: int = -1
    vector_before: tuple[CleanerOffset, ...] = ()
    vector: tuple[CleanerOffset, ...] = ()
    sources: int = 0
    outputs: int = 0
    stats: dict[str, int | float | str] = Field(default_factory=dict)
    balance: Balance | None = Field(default=None, exclude_if=lambda value: value is None)
    content: CountAndDigestSum | None = Field(default=None, exclude_if=lambda value: value is None)
    cut_off_offset: int = Field(default=-1, exclude_if=lambda value: value < 0)

    @property
    def is_still_published(self) -> bool:
        return bool(self.published_slot) and self.status not in (RunHistoryStatus.REVERTED, RunHistoryStatus.REVERTED_IN_PART)


class Quarantine(StrictFrozenModel):
    """Reason why no rounds are started. ``failures``: failed rounds in a row.

    keyless: the records without a key that were refused; None if the reason is another.
    """

    reason: str
    segment: str
    failures: int
    slot: int
    at_ms: int
    keyless: KeylessRecords | None = Field(default=None, exclude_if=lambda value: value is None)


class FencedAppend(StrictFrozenModel):
    """A record that is in the control log but has no effect. ``offset``: the cleaner offset in it; -1 if it has none."""

    slot: int
    type: str
    leader_epoch: CompactorEpoch
    offset: int
    by: str
    reason: str
    at_ms: int


class PartitionState(ControlLogState):
    """State of a partition after its control log's records up to and including ``slot``."""

    topic: str
    partition: int
    incarnation: int = Field(default=1, exclude_if=lambda value: value == 1)
    live: tuple[RemoteLogSegmentMetadata, ...] = ()
    """Segments that readers use, ascending. Each begins at the offset after the end of the one before."""
    published_by: dict[str, CompactorEpoch] = Field(default_factory=dict)
    """Id of a live or waiting segment that a round wrote -> the compactor epoch that published it."""
    vector: tuple[CleanerOffset, ...] = ()
    leader: CompactorLeader | None = None
    intent: RoundIntent | None = None
    registrations: dict[str, OpenImport] = Field(default_factory=dict)
    closed_imports: tuple[ClosedImport, ...] = ()
    waiting: tuple[GroupAwaitingDeletion, ...] = ()
    retiring: tuple[RemoteLogSegmentMetadata, ...] = ()
    """Segments whose deletion has begun and is not yet recorded as complete. Their objects may be gone."""
    lineage: tuple[EpochEntry, ...] = ()
    """The broker's leader-epoch lineage of the partition, as last imported or recorded."""
    lineage_end: int = -1
    """End of the broker's log (exclusive) that was known with the lineage."""
    tail: tuple[LastImportedBatch, ...] = ()
    """The last imported batches, as the broker wrote them; empty if an earlier version imported them."""
    topic_id: TopicId = Field(default=EMPTY_TOPIC_ID, exclude_if=lambda value: not value)
    """Id of the broker's topic whose log this is, as Kafka prints it; empty if unknown."""
    adopted_seam: int = Field(default=-1, exclude_if=lambda value: value < 0)
    """Offset at which a person has declared that the next import continues this log; -1 for none. Valid while it equals the end offset +
    1.
    """
    source_cleaned_to: int = Field(default=0, exclude_if=lambda value: not value)
    """The offset up to which a log cleaner had compacted the log before its import, as far as the log showed it; 0 if it showed nothing."""
    opened_slot: int = Field(default=0, exclude_if=lambda value: not value)
    """Slot of the import that filled the empty partition. It distinguishes this log from one before `topics delete`. 0 if unknown."""
    log_start_offset: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """First offset that readers may read, if retention or a person has raised it above the first segment; None if not."""
    log_start_slot: int = Field(default=0, exclude_if=lambda value: not value)
    """Slot of the record that last raised the log start; 0 for none. Programs that cannot raise it refuse a snapshot with this field."""
    broker_log_start: int = Field(default=0, exclude_if=lambda value: not value)
    """The highest log start offset that brokers have reported. Segments below it may still be live: a new leader may start lower."""
    voided: tuple[str, ...] = ()
    """The most recent ids that became unusable for ever. Objects under them may be deleted at once."""
    deleted_slot: int = 0
    """Slot in which the partition was deleted; 0 once something was imported under its name again."""
    mirrored: bool = False
    """Whether brokers decide which segments are live. The newest segment is then left to them."""
    quarantine: Quarantine | None = None
    runs: tuple[RunHistoryEntry, ...] = ()
    published: tuple[str, ...] = ()
    """Ids of the rounds whose outputs readers have now, oldest first. Only the last one can be undone."""
    epochs: tuple[CompactorEpochAndEnding, ...] = ()
    fenced: tuple[FencedAppend, ...] = ()

    @property
    def topic_partition(self) -> TopicPartition:
        return partition_of_incarnation(self.topic, self.partition, self.incarnation)

    @property
    def has_segments(self) -> bool:
        """The records of live segments may all be below the log start."""
        return bool(self.live)

    @property
    def start_offset(self) -> int:
        """First live offset; 0 for an empty partition."""
        return self.live[0].start_offset if self.has_segments else 0

    @property
    def log_start(self) -> int:
        """First offset that readers may read; if all records were deleted, the offset after the last one."""
        return max(self.start_offset, self.log_start_offset or 0)

    @property
    def end_offset(self) -> int:
        """Inclusive; -1 for an empty partition."""
        return self.live[-1].end_offset if self.has_segments else -1

    @property
    def first_dirty_offset(self) -> int:
        """First offset that rounds have not cleaned, never below the log start, as Kafka's LogCleanerManager computes it."""
        return max(first_dirty_offset_in(self.vector), self.log_start)

    @property
    def saved_per_dirty_byte(self) -> float | None:
        """Bytes that the latest published round with dirty input saved per byte of that input; None if no such round is known. In records
        that do not state the dirty bytes, all input counts as dirty.
        """
        for run in reversed(self.runs):
            before = int(run.stats.get("bytes_before", 0))
            if run.published_slot and (dirty := int(run.stats.get("bytes_dirty", before))):
                return max(0, before - int(run.stats.get("bytes_written", 0))) / dirty
        return None

    @property
    def latest_quarantined_run(self) -> RunHistoryEntry | None:
        """Return None if the partition is not quarantined, or the history has lost the run."""
        failed = (run for run in reversed(self.runs) if run.status == RunHistoryStatus.QUARANTINED)
        return next(failed, None) if self.quarantine is not None else None

    @property
    def last_round_ms(self) -> int:
        """Duration by the writers' clocks; 0 if none is known."""
        return next((max(0, run.ended_ms - run.started_ms) for run in reversed(self.runs) if run.published_slot), 0)

    @property
    def last_compactor_epoch(self) -> CompactorEpoch:
        """-1 before the first epoch."""
        return self.leader.epoch if self.leader else NO_COMPACTOR_EPOCH

    @property
    def next_compactor_epoch(self) -> CompactorEpoch:
        return CompactorEpoch(self.last_compactor_epoch + 1)

    @property
    def latest_takeover(self) -> CompactorEpochAndEnding | None:
        """The last epoch whose former leader had not released its own, and may not know that it no longer leads."""
        pairs = list(zip(self.epochs, self.epochs[1:], strict=False))
        return next((later for earlier, later in reversed(pairs) if earlier.ended == "replaced"), None)

    def live_segments_by_id(self) -> dict[str, RemoteLogSegmentMetadata]:
        return {segment.id: segment for segment in self.live}

    @property
    def bytes(self) -> int:
        """Size of the live .log files."""
        return sum(segment.size_bytes for segment in self.live)

    def find_run(self, run_id: str) -> RunHistoryEntry | None:
        return next((run for run in reversed(self.runs) if run.run_id == run_id), None)


def sum_batch_digests(segments: Iterable[RemoteLogSegmentMetadata]) -> CountAndDigestSum | None:
    """Return None if a segment has no recorded sum, or if readers read only a part of it."""
    known = [None if segment.has_unread_tail else segment.content for segment in segments]
    return None if None in known else total_digest_sum(content for content in known if content)


class RoundPause(StrictFrozenModel):
    """A recorded request that no round begins. ``at_ms``: the writer's clock."""

    by: str
    reason: str
    at_ms: int


class RequestedRound(NamedTuple):
    slot: int
    at_ms: int


def _is_field_empty(value: object) -> bool:
    # Empty fields are omitted, so that older versions can still read the snapshot.
    return not value


class MissingTopicReports(NamedTuple):
    """Reports of a cluster that a topic id does not exist."""

    first_ms: int
    last_ms: int


class CatalogState(ControlLogState):
    """State of the tier-wide log."""

    tier_id: str = ""
    hash_key: str = ""
    kind: str = ""
    layout: str = ""
    key_entropy_bits: int = Field(default=0, exclude_if=lambda value: not value)
    url: str = ""
    cluster_id: str = ""
    """URL and cluster id of a broker-managed tier when this control store was created; empty for a compactor-managed tier."""
    partitions: dict[str, int] = Field(default_factory=dict)
    """``topic-partition`` -> slot of the latest hint that the partition has changed."""
    reached: dict[str, int] = Field(default_factory=dict)
    """``topic-partition`` -> a slot that its own control log has had, as a lower bound of where that log may end."""
    looks: dict[str, DeletionCheckResult] = Field(default_factory=dict, exclude_if=_is_field_empty)
    """``topic-partition`` -> the last check by `retire`. Valid as long as ``reached`` is not above its slot."""
    paused: dict[str, RoundPause] = Field(default_factory=dict, exclude_if=_is_field_empty)
    """Pattern (control.pauses) -> the pause."""
    wanted: dict[str, RequestedRound] = Field(default_factory=dict, exclude_if=_is_field_empty)
    """``topic-partition`` -> the latest request for a round. Only the most recent requests are kept."""

    topic_clusters: dict[TopicId, str] = Field(default_factory=dict, exclude_if=_is_field_empty)
    """Topic id -> id of the cluster that has said that a topic name has this id. No other cluster can say what becomes of the topic."""
    topic_settings: dict[str, dict[str, str]] = Field(default_factory=dict, exclude_if=_is_field_empty)
    """Topic name -> what is set for its compaction on the topic itself, by Kafka's names, as its cluster has last reported."""
    superseded: dict[str, dict[TopicId, TopicId]] = Field(default_factory=dict, exclude_if=_is_field_empty)
    """Topic name -> former topic id -> the topic id that superseded it."""
    withdrawn: dict[str, tuple[str, ...]] = Field(default_factory=dict, exclude_if=_is_field_empty)
    """Topic name -> ``topic-partition~number`` of incarnations that were opened by mistake, so that the name does not mean them."""
    missing: dict[TopicId, MissingTopicReports] = Field(default_factory=dict, exclude_if=_is_field_empty)
    """Topic id -> since when its cluster has said that there is no such topic, without contradiction."""

    @property
    def withdrawn_partitions(self) -> frozenset[str]:
        return frozenset(name for names in self.withdrawn.values() for name in names)

    @property
    def topic_partitions(self) -> list[TopicPartition]:
        return sorted(map(TopicPartition.parse_partition_store_prefix, self.partitions), key=lambda name: (*name, name.incarnation))

    def incarnations_of_partition(self, partition: TopicPartition) -> list[TopicPartition]:
        """Ascending, without a pass over all partitions."""
        found = [partition.first_incarnation] if str(partition.first_incarnation) in self.partitions else []
        number = 2
        while str(later := partition_of_incarnation(*partition, number)) in self.partitions:
            found.append(later)
            number += 1
        return found
