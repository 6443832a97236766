"""What a control log's slots hold: one record each, one kind of body per event.

An object is ``{"crc":"<8 hex>","record":{...}}``: strict JSON whose checksum covers exactly the bytes of ``record``, so that
a truncated, garbled or half-written object is told from a real one before anything of it is believed. Values refuse
unknown fields; a record of a later version is named and refused, never half understood.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from compactor.errors import BadData
from compactor.model.balance import Balance, Sum
from compactor.model.base import Value
from compactor.model.plan import CleanerOffset, CompactionPlan, CompactionReceipt, Replacement
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata

VERSION = 4
"""What is written. Earlier ones are read too: 1 had no records of truncations, deletions and prepended segments, no tails, no bounds;
2 had none of tiers that brokers write; 3 had no pauses, no wanted rounds, no looks, and one partition a hint."""


class BadControlRecord(BadData):
    """A control record that cannot be read. Exit code 3: the partition stands still until a person has looked at it."""


class ScratchObject(Value):
    """One object under the partition's scratch prefix of the control store, for instance a segment's survivor bitmap."""

    key: str
    size: int
    sha256: str


class LeadershipAcquired(Value):
    """Compactor ``holder`` leads from here on; counts only if the epoch is one higher than the last."""

    type: Literal["leadership_acquired"] = "leadership_acquired"
    leader_epoch: int
    holder: str
    ttl_ms: int


class LeadershipReleased(Value):
    type: Literal["leadership_released"] = "leadership_released"
    leader_epoch: int


class IdsRegistered(Value):
    """An importer or uploader is about to create objects under these ids. Needs no leadership."""

    type: Literal["ids_registered"] = "ids_registered"
    import_id: str
    ids: tuple[str, ...]
    holder: str


class TailBatch(Value):
    """One of the last batches that were imported. ``digest``: of its header (with the CRC of the rest), as the broker wrote it."""

    base_offset: int
    last_offset: int
    digest: str


class SegmentsTiered(Value):
    """Registered segments are complete and stand at the end of the log. Needs no leadership.

    ``lineage`` is the broker's leader-epoch lineage up to the last segment's end, as far back as the broker has it; empty where it is
    unknown. ``tail``: the last batches of these segments. They stay known whatever becomes of the segments, so that the next import
    can tell whether it continues the same log.
    """

    type: Literal["segments_tiered"] = "segments_tiered"
    import_id: str
    segments: tuple[RemoteLogSegmentMetadata, ...]
    lineage: tuple[EpochEntry, ...] = ()
    tail: tuple[TailBatch, ...] = ()


class SegmentsPrepended(Value):
    """Registered segments are complete and stand before the beginning of the log. Needs no leadership."""

    type: Literal["segments_prepended"] = "segments_prepended"
    import_id: str
    segments: tuple[RemoteLogSegmentMetadata, ...]
    lineage: tuple[EpochEntry, ...] = ()


class TailTruncated(Value):
    """The broker's log was truncated at ``offset`` (an unclean election): what the tier has from there on never was. Needs no leadership.

    ``voided``: the live segments that end there or later. ``head``: what the first of them has below ``offset``, as a new segment,
    registered under ``cut_id``; None where it begins at ``offset``. ``epoch``: that of the leader who goes on at ``offset``, where it is
    known: a replica that has missed the truncation is told by it, also before anything of the new branch came.
    """

    type: Literal["tail_truncated"] = "tail_truncated"
    cut_id: str
    offset: int
    voided: tuple[str, ...]
    head: RemoteLogSegmentMetadata | None = None
    epoch: int | None = None
    grace_ms: int | None = None


class PartitionDeleted(Value):
    """The partition leaves the tier, all of it: the name is as good as new, the objects wait for grace."""

    type: Literal["partition_deleted"] = "partition_deleted"
    leader_epoch: int
    grace_ms: int | None = None


class LineageRecorded(Value):
    """The broker's lineage now, with its log end (exclusive); clamps the vector where it parts from the stored one."""

    type: Literal["lineage_recorded"] = "lineage_recorded"
    lineage: tuple[EpochEntry, ...]
    end_offset: int


class SegmentsMirrored(Value):
    """A tier that brokers write: what their metadata topic says is readable, where it differs from what the log has.

    ``gone`` leave the view, ``added`` stand in it, in order; one that is in both is read up to another offset than before.
    ``lineage`` ends at ``end_offset`` (exclusive). ``metadata_offset``: of the last record that was folded, for people.
    """

    type: Literal["segments_mirrored"] = "segments_mirrored"
    leader_epoch: int
    added: tuple[RemoteLogSegmentMetadata, ...]
    gone: tuple[str, ...]
    lineage: tuple[EpochEntry, ...]
    end_offset: int
    metadata_offset: int


class ImportVoided(Value):
    """The ids of this import that are not tiered are unusable for ever."""

    type: Literal["import_voided"] = "import_voided"
    leader_epoch: int
    import_id: str
    reason: str


class PlanAnnounced(Value):
    """The intent: the whole plan with the ids of everything it may create."""

    type: Literal["plan_announced"] = "plan_announced"
    leader_epoch: int
    plan: CompactionPlan


class ReceiptsAdded(Value):
    type: Literal["receipts_added"] = "receipts_added"
    leader_epoch: int
    receipts: tuple[CompactionReceipt, ...]


class SurvivorsStored(Value):
    """Pass 1 of the open intent is done; these scratch objects hold its answer."""

    type: Literal["survivors_stored"] = "survivors_stored"
    leader_epoch: int
    run_id: str
    objects: tuple[ScratchObject, ...]


class IntentUndone(Value):
    """The plan will never be published; its ids are unusable for ever."""

    type: Literal["intent_undone"] = "intent_undone"
    leader_epoch: int
    run_id: str
    reason: str


class PublishBegun(Value):
    """Readers are about to be switched, in more than one step: from here the round only goes forward. Never without a broker."""

    type: Literal["publish_begun"] = "publish_begun"
    leader_epoch: int
    run_id: str


class RoundPublished(Value):
    """All replacements of a round and the cleaner offsets it ends with: all or nothing.

    ``cut_off``: groups that are not among the replacements, because a broker had deleted what they replace; the cleaner offset then stays.
    ``grace_ms``, ``undo_window_ms``: [publish] of who published, here and in other records after which something waits; nobody may keep it
    for less. None: a record of version 1, which did not say. ``balance``: of all its groups, ``content``: of all batches that readers
    have after it; None where they are not known of every group or segment. ``status``, ``stats``: as *run ended* says them of a run that
    published nothing; of a record without them it follows.
    """

    type: Literal["round_published"] = "round_published"
    leader_epoch: int
    run_id: str
    replacements: tuple[Replacement, ...]
    vector_before: tuple[CleanerOffset, ...]
    vector: tuple[CleanerOffset, ...]
    grace_ms: int | None = None
    undo_window_ms: int | None = None
    cut_off: tuple[int, ...] = Field(default=(), exclude_if=lambda groups: not groups)
    balance: Balance | None = Field(default=None, exclude_if=lambda value: value is None)
    content: Sum | None = Field(default=None, exclude_if=lambda value: value is None)
    status: str = Field(default="", exclude_if=lambda value: not value)
    stats: dict[str, int | float | str] = Field(default_factory=dict, exclude_if=lambda value: not value)


class RetireBegun(Value):
    """The objects of these replaced or undone segments are about to be deleted; their ids are unusable for ever."""

    type: Literal["retire_begun"] = "retire_begun"
    leader_epoch: int
    ids: tuple[str, ...]


class Retired(Value):
    type: Literal["retired"] = "retired"
    leader_epoch: int
    ids: tuple[str, ...]


class RoundUndone(Value):
    """Readers go back to what the run replaced; its outputs wait for grace, the vector returns to its earlier value."""

    type: Literal["round_undone"] = "round_undone"
    leader_epoch: int
    run_id: str
    grace_ms: int | None = None


class RunEnded(Value):
    """Run history: how a run ended and what it cost.

    ``status`` is one of section "status" of docs/publication.md; ``stats`` is for people and scripts, nothing depends on it.
    ``reason`` and ``segment`` say why and where a run was quarantined.
    """

    type: Literal["run_ended"] = "run_ended"
    leader_epoch: int
    run_id: str
    status: str
    reason: str = ""
    segment: str = ""
    stats: dict[str, int | float | str] = Field(default_factory=dict)


PartitionBody = Annotated[
    LeadershipAcquired
    | LeadershipReleased
    | IdsRegistered
    | SegmentsTiered
    | SegmentsPrepended
    | TailTruncated
    | PartitionDeleted
    | LineageRecorded
    | SegmentsMirrored
    | ImportVoided
    | PlanAnnounced
    | ReceiptsAdded
    | SurvivorsStored
    | IntentUndone
    | PublishBegun
    | RoundPublished
    | RetireBegun
    | Retired
    | RoundUndone
    | RunEnded,
    Field(discriminator="type"),
]


class TierCreated(Value):
    """The tier's identity, made once. ``hash_key``: 32 hex digits, the SipHash key of everything that hashes record keys.

    ``url`` and ``cluster_id``: of a broker's tier, into which nothing can be written that says whose it is.
    """

    type: Literal["tier_created"] = "tier_created"
    tier_id: str
    hash_key: str
    kind: str
    layout: str
    created_by: str
    url: str = ""
    cluster_id: str = ""


class PartitionChanged(Value):
    """This partition exists, and something in its control log is worth a look. Its log has had ``slot`` (0: not said)."""

    type: Literal["partition_changed"] = "partition_changed"
    topic: str
    partition: int
    slot: int = 0


class SlotsReached(Value):
    """Slots that control logs have had, read back before this was written: a log that ends below its own was damaged."""

    type: Literal["slots_reached"] = "slots_reached"
    slots: dict[str, int]


class PartitionsChanged(Value):
    """PartitionChanged of many partitions, each with a slot that its log has had: hints that had waited in the inbox."""

    type: Literal["partitions_changed"] = "partitions_changed"
    slots: dict[str, int]


class LookedAt(NamedTuple):
    """A look at a partition whose log ended at ``slot``: nothing can be deleted in it before ``next_ms``. ``at_ms``: when that was."""

    slot: int
    next_ms: int
    at_ms: int


class PartitionsLooked(Value):
    """Where `retire` has nothing to do, and until when, unless a hint says that something was written. Only where to look depends on it."""

    type: Literal["partitions_looked"] = "partitions_looked"
    looks: dict[str, LookedAt]


class RoundsPaused(Value):
    """No compactor begins a round over partitions that ``pattern`` matches (control.pauses); what is open goes on, and so does retiring."""

    type: Literal["rounds_paused"] = "rounds_paused"
    pattern: str
    by: str
    reason: str = ""


class RoundsResumed(Value):
    type: Literal["rounds_resumed"] = "rounds_resumed"
    pattern: str
    by: str


class RoundWanted(Value):
    """Somebody wants a round over this partition now, whatever its dirty ratio says: a daemon takes it up at its next scan."""

    type: Literal["round_wanted"] = "round_wanted"
    topic: str
    partition: int
    by: str


CatalogBody = Annotated[
    TierCreated | PartitionChanged | SlotsReached | PartitionsChanged | PartitionsLooked | RoundsPaused | RoundsResumed | RoundWanted,
    Field(discriminator="type"),
]

BodyT = TypeVar("BodyT")


class Record(Value, Generic[BodyT]):
    """One slot. ``log`` names the control log it belongs to, ``at_ms`` is its writer's clock, for people only.

    ``incarnation`` is random per writer and ``attempt`` counts its creates: a slot is ours only if both are equal. Content
    proves nothing, as two processes of one host write alike.
    """

    version: int
    log: str
    slot: int
    incarnation: str
    attempt: int
    at_ms: int
    body: BodyT


PartitionRecord = Record[PartitionBody]
CatalogRecord = Record[CatalogBody]


def seal(document: bytes) -> bytes:
    """``document`` (JSON text) with its checksum around it."""
    return b'{"crc":"%08x","record":%s}' % (zlib.crc32(document), document)


def unseal(data: bytes, where: str) -> bytes:
    """The JSON text inside. ``where`` names the object. Raises BadControlRecord."""
    if not (data.startswith(b'{"crc":"') and data[16:27] == b'","record":' and data.endswith(b"}")):
        raise _bad(where, "it is not a control record, or it is cut short")
    document = data[27:-1]
    if data[8:16] != b"%08x" % zlib.crc32(document):
        raise _bad(where, "its checksum does not match")
    return document


class _Versioned(Value):
    """Just enough of a record to tell its version; the only value here that looks past unknown fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int


def check_version(document: bytes, where: str) -> None:
    """Raises BadControlRecord for a document of a later version, before its fields are looked at."""
    try:
        version = _Versioned.model_validate_json(document).version
    except ValidationError as error:
        raise _bad(where, "it has no version") from error
    if version > VERSION:
        raise BadControlRecord(
            f"it is of format version {version}, this program knows version {VERSION}",
            segment=where,
            hint="Upgrade tiered-compactor on this machine to the version that writes this tier",
        )


ValueT = TypeVar("ValueT", bound=Value)


def decode(kind: type[ValueT], data: bytes, where: str) -> ValueT:
    """A sealed object as a value of this kind. Raises BadControlRecord that names the object and what is wrong."""
    document = unseal(data, where)
    try:
        return kind.model_validate_json(document)
    except ValidationError as error:
        check_version(document, where)
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise _bad(where, f"field {field}: {first['msg']}") from error


def _bad(where: str, cause: str) -> BadControlRecord:
    return BadControlRecord(
        cause,
        segment=where,
        hint="Nothing was changed. Restore this object from the store's versions or a backup; do not delete it",
    )
