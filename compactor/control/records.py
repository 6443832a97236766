"""Records of control logs: one type of body per event, their encoding, and the checks that refuse an object which cannot be trusted.

An object is ``{"crc":"<8 hex>","record":{...}}``: strict JSON whose checksum covers exactly the bytes of ``record``, so that a truncated or
garbled object is recognized before any of it is used. Unknown fields are refused. A record of a later version is refused by name.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from compactor.constants import EMPTY_TOPIC_ID, CompactorEpoch, LeaderEpoch, Offset, TopicId
from compactor.errors import BadData
from compactor.model.ids import TopicPartition, partition_of_incarnation
from compactor.model.plan import CleanerOffset, CompactionPlan, CompactionReceipt, KeylessRecords, Replacement
from compactor.model.segment import Balance, CountAndDigestSum, EpochEntry, RemoteLogSegmentMetadata, StrictFrozenModel

VERSION = 8
"""Version of the records that this program writes. It reads all earlier ones:

* 1 had no truncations, deletions or prepended segments, no tails, and no lower bounds of slots;
* 2 had no records of broker-managed tiers;
* 3 had no pauses, requested rounds or retirement checks, and one partition per hint;
* 4 had no topic ids, adoptions, log start or delivery timeouts, and its truncations named neither the new branch nor an accepted loss. A
    program that read a later truncation without its segments would end the log at the cut;
* 5 could not raise the log start;
* 6 had one incarnation per topic name, no log start of brokers, and no groups that expired during their round;
* 7 did not record that a log cleaner had compacted a log before its import, dropped records without a key, and had no log start of
    brokers in plans and no settings of topics.
"""


class BadControlRecord(BadData):
    """A control record or snapshot that is corrupt, misplaced or of a later version. Exit code 3: the partition stops until a person has
    acted.
    """


class ScratchObject(StrictFrozenModel):
    """Reference to an object under the partition's scratch prefix."""

    key: str
    size: int
    sha256: str


class LeaderRecord(StrictFrozenModel):
    """Record that only the partition's leader may write, under its compactor epoch."""

    type: str
    leader_epoch: CompactorEpoch


class LeadershipAcquired(LeaderRecord):
    """Record: ``holder`` leads the partition from here on. It counts only if its epoch is one higher than the last.

    ttl_ms: time without a heartbeat after which other compactors may take over.
    delivery_timeout_ms: how long after its end this process's messages may still reach readers
        (``SegmentPublisher.max_delivery_delay_ms``); 0 if never, or if an earlier version wrote the record.
    """

    type: Literal["leadership_acquired"] = "leadership_acquired"
    holder: str
    ttl_ms: int
    delivery_timeout_ms: int = Field(default=0, exclude_if=lambda value: not value)


class LeadershipReleased(LeaderRecord):
    """Record: the leader has given up its leadership."""

    type: Literal["leadership_released"] = "leadership_released"


class SegmentIdsRegistered(StrictFrozenModel):
    """Record: an import or uploader is about to create objects under these segment ids. Needs no leadership."""

    type: Literal["ids_registered"] = "ids_registered"
    import_id: str
    ids: tuple[str, ...]
    holder: str


class LastImportedBatch(StrictFrozenModel):
    """One of the last batches. ``digest``: of the header as the broker wrote it, including the CRC of the batch."""

    base_offset: Offset
    last_offset: Offset
    digest: str


class SegmentsTiered(StrictFrozenModel):
    """Record: registered segments are uploaded; readers find them at the end of the log. Needs no leadership.

    lineage: the broker's leader-epoch lineage as far back as the broker has it, with epochs that begin after the last segment (earlier
        versions left those out); empty if unknown.
    tail: the last batches of these segments, by which the next import checks that it continues the same log, even when the segments are
        gone.
    log_start_offset: first offset that readers may see, if the broker has deleted records before it. Stated only with the first segments of
        a partition.
    source_cleaned_to: offset up to which a log cleaner had compacted the log before its import; 0 if unknown.
    accept_loss: a person has accepted that tombstones and transaction markers are missing after the tier's end.
    """

    type: Literal["segments_tiered"] = "segments_tiered"
    import_id: str
    segments: tuple[RemoteLogSegmentMetadata, ...]
    lineage: tuple[EpochEntry, ...] = ()
    tail: tuple[LastImportedBatch, ...] = ()
    topic_id: TopicId = Field(default=EMPTY_TOPIC_ID, exclude_if=lambda value: not value)
    log_start_offset: int | None = Field(default=None, exclude_if=lambda value: value is None)
    source_cleaned_to: int = Field(default=0, exclude_if=lambda value: not value)
    accept_loss: bool = Field(default=False, exclude_if=lambda value: not value)


class SegmentsPrepended(StrictFrozenModel):
    """Record: registered segments are uploaded and stand before the first segment of the log. Needs no leadership."""

    type: Literal["segments_prepended"] = "segments_prepended"
    import_id: str
    segments: tuple[RemoteLogSegmentMetadata, ...]
    lineage: tuple[EpochEntry, ...] = ()
    topic_id: TopicId = Field(default=EMPTY_TOPIC_ID, exclude_if=lambda value: not value)


class TailTruncated(StrictFrozenModel):
    """Record: the broker's log was truncated at ``offset`` (an unclean election), so a new branch replaces the end of the log. Needs no
    leadership.

    cut_id: id of the import under which the new segments are registered. It also names the discarded segments while they wait for grace.
    offset: first offset that the new leader's log does not share with the tier.
    voided: the live segments that end at ``offset`` or later.
    head: new segment with the batches that the first discarded segment has below ``offset``; None if that segment begins at ``offset``.
    epoch: leader epoch of the new branch at ``offset``. Set only in records of earlier versions, which have no ``lineage``.
    segments: the first segments of the new branch; empty if the broker has sealed none of it yet. tail: their last batches.
    lineage: all leader epochs of the broker, which identify a replica that has missed the truncation; empty if unknown.
    accept_loss: a person has accepted that rounds beyond ``offset`` cannot be undone, so that some keys lose their last value.
    """

    type: Literal["tail_truncated"] = "tail_truncated"
    cut_id: str
    offset: Offset
    voided: tuple[str, ...]
    head: RemoteLogSegmentMetadata | None = None
    epoch: LeaderEpoch | None = None
    grace_ms: int | None = None
    topic_id: TopicId = Field(default=EMPTY_TOPIC_ID, exclude_if=lambda value: not value)
    segments: tuple[RemoteLogSegmentMetadata, ...] = Field(default=(), exclude_if=lambda value: not value)
    lineage: tuple[EpochEntry, ...] = Field(default=(), exclude_if=lambda value: not value)
    tail: tuple[LastImportedBatch, ...] = Field(default=(), exclude_if=lambda value: not value)
    accept_loss: bool = False

    @property
    def new_segments(self) -> tuple[RemoteLogSegmentMetadata, ...]:
        return self.segments if self.head is None else (self.head, *self.segments)


class TopicAdopted(StrictFrozenModel):
    """Record: the log in the tier is declared to be that of a topic, or to continue at an offset. Needs no leadership.

    topic_id: id of the broker's topic from here on; empty if only the seam is declared.
    previous_id: the topic id that the tier had when this was decided; the record is void if the tier has another one by now.
    seam: the tier's end offset + 1. The next import that begins there needs no comparison; -1 if only the id is declared.
    """

    type: Literal["topic_adopted"] = "topic_adopted"
    topic_id: TopicId = EMPTY_TOPIC_ID
    previous_id: TopicId = EMPTY_TOPIC_ID
    seam: int = -1
    by: str = ""
    why: str = ""


class IncarnationOpened(StrictFrozenModel):
    """Record: this log holds a later incarnation of its topic name, with this topic id. It comes before the first import. Needs no
    leadership.
    """

    type: Literal["incarnation_opened"] = "incarnation_opened"
    topic_id: TopicId
    by: str = ""


class PartitionDeleted(LeaderRecord):
    """Record: the whole partition leaves the tier. Its name is free again, and its objects wait for grace.

    deleted_topic_id: id of the topic, if the cluster has deleted it. The control log keeps it, because a later topic of this name is a new
        incarnation.
    """

    type: Literal["partition_deleted"] = "partition_deleted"
    grace_ms: int | None = None
    deleted_topic_id: TopicId = Field(default=EMPTY_TOPIC_ID, exclude_if=lambda value: not value)


class LogStartRaised(LeaderRecord):
    """Record: readers begin at ``offset`` from here on.

    offset: at most one above the last offset in the tier.
    ids: the live segments wholly below it, never the newest. They are deleted after grace, and cannot be restored.
    removed, content: digest sums of the batches of these segments, and of all batches that readers still see; None if one segment has no
        recorded sum.
    """

    type: Literal["log_start_raised"] = "log_start_raised"
    offset: Offset
    ids: tuple[str, ...]
    grace_ms: int | None = None
    removed: CountAndDigestSum | None = Field(default=None, exclude_if=lambda value: value is None)
    content: CountAndDigestSum | None = Field(default=None, exclude_if=lambda value: value is None)


class LineageRecorded(StrictFrozenModel):
    """Record: the broker's leader-epoch lineage, with the end of its log (exclusive). Cleaner offsets above a divergence are lowered to
    it.
    """

    type: Literal["lineage_recorded"] = "lineage_recorded"
    lineage: tuple[EpochEntry, ...]
    end_offset: int


class SegmentsMirrored(LeaderRecord):
    """Record: changes in the brokers' metadata, relative to the control log.

    added: segments that readers find now, in order. One that is also in ``gone`` is now read up to a different offset than before.
    gone: ids of segments that readers no longer find.
    lineage: the brokers' leader epochs, up to ``end_offset`` (exclusive).
    metadata_offset: offset of the last metadata record that was read; informational only.
    """

    type: Literal["segments_mirrored"] = "segments_mirrored"
    added: tuple[RemoteLogSegmentMetadata, ...]
    gone: tuple[str, ...]
    lineage: tuple[EpochEntry, ...]
    end_offset: int
    metadata_offset: int


class BrokerLogStartSeen(LeaderRecord):
    """Record: brokers have reported this log start offset. Written before a missing segment below it is regarded as expired."""

    type: Literal["broker_log_start_seen"] = "broker_log_start_seen"
    offset: Offset


class ImportVoided(LeaderRecord):
    """Record: the import's ids that are not tiered are unusable for ever."""

    type: Literal["import_voided"] = "import_voided"
    import_id: str
    reason: str


class PlanAnnounced(LeaderRecord):
    """Record: the intent of a round, with the ids of all segments that it may create."""

    type: Literal["plan_announced"] = "plan_announced"
    plan: CompactionPlan


class ReceiptsAdded(LeaderRecord):
    """Record: these groups are rewritten, checked and uploaded by the open round."""

    type: Literal["receipts_added"] = "receipts_added"
    receipts: tuple[CompactionReceipt, ...]


class SurvivorsStored(LeaderRecord):
    """Record: the result of pass 1 of the open round is in these objects."""

    type: Literal["survivors_stored"] = "survivors_stored"
    run_id: str
    objects: tuple[ScratchObject, ...]


class IntentUndone(LeaderRecord):
    """Record: the plan will never be published; its ids are unusable for ever."""

    type: Literal["intent_undone"] = "intent_undone"
    run_id: str
    reason: str


class PublicationBegun(LeaderRecord):
    """Record: readers are about to change over in several steps, so the round can no longer be undone. Broker-managed tiers only."""

    type: Literal["publish_begun"] = "publish_begun"
    run_id: str


class RoundPublished(LeaderRecord):
    """Record: all replacements of a round and its new cleaner offsets become effective together, all or nothing.

    cut_off: groups that are not among the replacements, because a broker had deleted one of their sources. The cleaner offset stays.
    expired: groups that are not among the replacements, because brokers have deleted all of their sources from the front of the log. The
        cleaner offset advances.
    grace_ms, undo_window_ms: the publishing process's [publish] settings. Every process keeps the replaced segments at least this long.
        None in records of version 1.
    balance: sums of the records that all groups read and wrote; None if a receipt states none.
    content: digest sum of all batches that readers have; None if one segment has none.
    status, stats: for the run history; empty in records of earlier versions, where *run ended* has them.
    """

    type: Literal["round_published"] = "round_published"
    run_id: str
    replacements: tuple[Replacement, ...]
    vector_before: tuple[CleanerOffset, ...]
    vector: tuple[CleanerOffset, ...]
    grace_ms: int | None = None
    undo_window_ms: int | None = None
    cut_off: tuple[int, ...] = Field(default=(), exclude_if=lambda groups: not groups)
    expired: tuple[int, ...] = Field(default=(), exclude_if=lambda groups: not groups)
    balance: Balance | None = Field(default=None, exclude_if=lambda value: value is None)
    content: CountAndDigestSum | None = Field(default=None, exclude_if=lambda value: value is None)
    status: str = Field(default="", exclude_if=lambda value: not value)
    stats: dict[str, int | float | str] = Field(default_factory=dict, exclude_if=lambda value: not value)


class SegmentDeletionBegun(LeaderRecord):
    """Record: the objects of these replaced or undone segments are about to be deleted; their ids are unusable for ever."""

    type: Literal["retire_begun"] = "retire_begun"
    ids: tuple[str, ...]


class SegmentDeletionEnded(LeaderRecord):
    type: Literal["retired"] = "retired"
    ids: tuple[str, ...]


class RoundUndone(LeaderRecord):
    """Record: readers go back to the segments that the run replaced. The run's outputs wait for grace, and the cleaner offsets return to
    their earlier value.
    """

    type: Literal["round_undone"] = "round_undone"
    run_id: str
    grace_ms: int | None = None


BLOCKED_BY_STAT = "blocked_by"
NEXT_STEP_STAT = "next_step"


class RunEnded(LeaderRecord):
    """Record: outcome and cost of a run that published nothing.

    status: a value of RunHistoryStatus.
    reason, segment: why and where a run was quarantined.
    stats: no decision depends on them. Of a quarantined run, BLOCKED_BY_STAT is the cause (a BlockedCause; damaged data if it is missing)
        and NEXT_STEP_STAT what a person can do.
    """

    type: Literal["run_ended"] = "run_ended"
    run_id: str
    status: str
    reason: str = ""
    segment: str = ""
    stats: dict[str, int | float | str] = Field(default_factory=dict)
    keyless: KeylessRecords | None = Field(default=None, exclude_if=lambda value: value is None)


PartitionBody = Annotated[
    LeadershipAcquired
    | LeadershipReleased
    | SegmentIdsRegistered
    | SegmentsTiered
    | SegmentsPrepended
    | TailTruncated
    | TopicAdopted
    | IncarnationOpened
    | PartitionDeleted
    | LogStartRaised
    | LineageRecorded
    | SegmentsMirrored
    | BrokerLogStartSeen
    | ImportVoided
    | PlanAnnounced
    | ReceiptsAdded
    | SurvivorsStored
    | IntentUndone
    | PublicationBegun
    | RoundPublished
    | SegmentDeletionBegun
    | SegmentDeletionEnded
    | RoundUndone
    | RunEnded,
    Field(discriminator="type"),
]


BodyT = TypeVar("BodyT")


class ControlRecord(StrictFrozenModel, Generic[BodyT]):
    """One record of a control log.

    A process takes a stored record for its own only if incarnation and attempt are those with which it tried to create the record. Equal
    content proves nothing, because two processes of one host write the same content.

    incarnation: random id of the writer.
    attempt: running number of the writer's attempts to create a record.
    at_ms: the writer's clock, for people only.
    """

    version: int
    log: str
    slot: int
    incarnation: str
    attempt: int
    at_ms: int
    body: BodyT


PartitionRecord = ControlRecord[PartitionBody]


def append_checksum(json_document: bytes) -> bytes:
    return b'{"crc":"%08x","record":%s}' % (zlib.crc32(json_document), json_document)


def verify_and_strip_checksum(data: bytes, source_name: str) -> bytes:
    """Raises BadControlRecord if the checksum does not match."""
    if not (data.startswith(b'{"crc":"') and data[16:27] == b'","record":' and data.endswith(b"}")):
        raise _corrupt_record_error(source_name, "it is not a control record, or it is cut short")
    document = data[27:-1]
    if data[8:16] != b"%08x" % zlib.crc32(document):
        raise _corrupt_record_error(source_name, "its checksum does not match")
    return document


class _FormatVersion(StrictFrozenModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int


def require_known_format_version(document: bytes, source_name: str) -> None:
    """Raise BadControlRecord if a document that cannot be read has a later version than this program knows."""
    try:
        version = _FormatVersion.model_validate_json(document).version
    except ValidationError as error:
        raise _corrupt_record_error(source_name, "it has no version") from error
    if version > VERSION:
        raise BadControlRecord(
            f"it is of format version {version}, this program knows version {VERSION}",
            segment=source_name,
            hint="Upgrade tiered-compactor on this machine to the version that writes this tier",
        )


ValueT = TypeVar("ValueT", bound=StrictFrozenModel)


def decode_checksummed_json(kind: type[ValueT], data: bytes, source_name: str) -> ValueT:
    document = verify_and_strip_checksum(data, source_name)
    try:
        return kind.model_validate_json(document)
    except ValidationError as error:
        require_known_format_version(document, source_name)
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise _corrupt_record_error(source_name, f"field {field}: {first['msg']}") from error


def _corrupt_record_error(source_name: str, cause: str) -> BadControlRecord:
    return BadControlRecord(
        cause,
        segment=source_name,
        hint="Nothing was changed. Restore this object from the store's versions or a backup; do not delete it",
    )


# Records of the tier-wide log.


class TierCreated(StrictFrozenModel):
    """Record: the tier's identity. ``hash_key``: 32 hex digits, the SipHash key with which all record keys are hashed.

    key_entropy_bits: versions of the program without this setting refuse the field.
    url, cluster_id: location and cluster of a broker-managed tier, which identify it, because no object for this may be stored among
        brokers' objects. Empty for other tiers.
    """

    type: Literal["tier_created"] = "tier_created"
    tier_id: str
    hash_key: str
    kind: str
    layout: str
    created_by: str
    key_entropy_bits: int = Field(default=0, exclude_if=lambda value: value == 0)
    url: str = ""
    cluster_id: str = ""


class _RecordAboutPartition(StrictFrozenModel):
    topic: str
    partition: int
    incarnation: int = Field(default=1, exclude_if=lambda value: value == 1)

    @property
    def topic_partition(self) -> TopicPartition:
        return partition_of_incarnation(self.topic, self.partition, self.incarnation)


class PartitionChanged(_RecordAboutPartition):
    """Record: this partition exists, and its control log has new records.

    slot: a slot that its log has reached; 0 if not stated.
    """

    type: Literal["partition_changed"] = "partition_changed"
    slot: int = 0


class SlotsReached(StrictFrozenModel):
    """Record: for each control log, a slot that it has reached, confirmed by reading it back. A log that ends before it was damaged."""

    type: Literal["slots_reached"] = "slots_reached"
    slots: dict[str, int]


class PartitionsChanged(StrictFrozenModel):
    """Record: PartitionChanged for many partitions."""

    type: Literal["partitions_changed"] = "partitions_changed"
    slots: dict[str, int]


class DeletionCheckResult(NamedTuple):
    """The partition's control log ended at ``slot``, and no object can be deleted before ``next_ms``."""

    slot: int
    next_ms: int
    at_ms: int


class PartitionsInspected(StrictFrozenModel):
    """Record: results by partition. No decision depends on them."""

    type: Literal["partitions_looked"] = "partitions_looked"
    looks: dict[str, DeletionCheckResult]


class RoundsPaused(StrictFrozenModel):
    """Record: no compactor begins a round over partitions that ``pattern`` matches. Open rounds and deletions continue."""

    type: Literal["rounds_paused"] = "rounds_paused"
    pattern: str
    by: str
    reason: str = ""


class RoundsResumed(StrictFrozenModel):
    """Record: the pause with this pattern has ended."""

    type: Literal["rounds_resumed"] = "rounds_resumed"
    pattern: str
    by: str


class RoundRequested(_RecordAboutPartition):
    """Record: a round is requested over this partition whatever its dirty ratio."""

    type: Literal["round_wanted"] = "round_wanted"
    by: str


class TopicsConfirmed(StrictFrozenModel):
    """Record: a cluster has reported these topic names with their ids. From then on only this cluster can report whether these topics
    exist.

    settings: topic name -> what applies to its compaction and is set on the topic itself, by Kafka's names; empty for a topic that the
        cluster does not compact. A topic that is not named keeps what is recorded. Earlier versions refuse this field.
    """

    type: Literal["topics_confirmed"] = "topics_confirmed"
    cluster_id: str
    topic_ids: dict[str, TopicId]
    settings: dict[str, dict[str, str]] = Field(default_factory=dict, exclude_if=lambda value: not value)


class TopicRecreated(StrictFrozenModel):
    """Record: the topic of ``superseded_id`` was deleted and created again as ``topic_id``. The former id does not become current again,
    unless a person takes back what a person has reported.

    cluster_id: the cluster that reported this; empty if a person did.
    withdrawn: given if a person takes back that ``topic_id`` was superseded: the incarnations that the name does not mean any more. Earlier
        versions refuse this field.
    """

    type: Literal["topic_recreated"] = "topic_recreated"
    topic: str
    superseded_id: TopicId
    topic_id: TopicId
    cluster_id: str = ""
    by: str = ""
    withdrawn: tuple[str, ...] | None = Field(default=None, exclude_if=lambda value: value is None)


class TopicsInspected(StrictFrozenModel):
    """Record: the answers of a cluster that was asked about topics by their ids.

    missing: ids for which the cluster answered UNKNOWN_TOPIC_ID.
    asked_ms: when the cluster was asked, by the earlier of the process's clock and the store's.
    """

    type: Literal["topics_inspected"] = "topics_inspected"
    cluster_id: str
    missing: tuple[TopicId, ...] = ()
    present: tuple[TopicId, ...] = ()
    asked_ms: int


CatalogBody = Annotated[
    TierCreated
    | PartitionChanged
    | SlotsReached
    | PartitionsChanged
    | PartitionsInspected
    | RoundsPaused
    | RoundsResumed
    | RoundRequested
    | TopicsConfirmed
    | TopicRecreated
    | TopicsInspected,
    Field(discriminator="type"),
]

CatalogRecord = ControlRecord[CatalogBody]
