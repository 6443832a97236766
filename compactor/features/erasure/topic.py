"""Erasure of keys from a topic, within the rules of rounds and `retire`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from compactor import __version__
from compactor.access.rounds import create_round
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import CleanerSettings
from compactor.config.times import format_iso_time
from compactor.config.units import count_noun, format_size
from compactor.control.log_start import grace_period_ms
from compactor.control.state import PartitionState
from compactor.errors import CompactorError, Refused, UsageError
from compactor.extras import require_pip_extra
from compactor.features.erasure.partition import (
    ANY_KEY,
    RECORD,
    KeyHoldingObjectState,
    KeyRemovalRound,
    KeySearchRequest,
    ObjectHoldingRecordKey,
    PartitionKeySearchResult,
    UnsearchedKeyLocation,
    survey_partition,
)
from compactor.model.ids import PUBLISHING, RoundStatus, TopicPartition
from compactor.model.remote_log import uuid_text
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import RoundAssessmentFunction
from compactor.round.plan import RoundAssessment, assess_round
from compactor.storage.factory import open_store
from compactor.upkeep.retire import (
    LEAST_AGE_MS,
    STORES_OWN,
    GraceClock,
    find_unfinished_uploads,
    require_deletion_configured,
    retire_partition,
)

ERASURE_SCHEMA = "tiered-compactor/erasure/1"
NEVER_COVERED = (
    UnsearchedKeyLocation("values and headers of records", "a record is found by its key alone"),
    UnsearchedKeyLocation("consumers, exports, backups and replicas of the store", "they are not part of the tier"),
    UnsearchedKeyLocation("old versions of sidecars in the control store", "they contain keyed hashes of keys, not the keys"),
    UnsearchedKeyLocation("local disks of compactors (tier.state_dir)", "staged data is deleted when the round ends"),
)
OLD_GENERATIONS = UnsearchedKeyLocation(
    "old versions of generations that were deleted, and unfinished uploads beside them ([tier.pinterest] target)",
    "no record of them is left; in a bucket, a lifecycle rule deletes them",
)
FILES_WITHOUT_SNAPSHOT = UnsearchedKeyLocation(
    "data files of Iceberg tables that no snapshot names ([outputs.iceberg])",
    "a killed writer left them; they are swept after orphan_age_ms, unless gc.enabled=false or another table at the location forbids it",
)
NEXT_GENERATION = "`generations write`, and `generations retire` after [tier.pinterest] keep_ms"
MAX_EXPEDITED_ROUNDS = 3
"""Most rounds of one erasure. The first drops superseded records and gives tombstones their horizon; later ones drop expired tombstones."""

KeyNumberAndRemoval = tuple[int, KeyRemovalRound]
"""Index of a key among those that are searched for, and a round that took records of it from readers."""


@dataclass(frozen=True)
class TopicKeySearchResult:
    """Objects of a topic that contain the keys, and what was not searched.

    beside: objects outside the tier's partitions, such as unfinished uploads and exports.
    failed: partitions that could not be searched.
    """

    surveys: tuple[PartitionKeySearchResult, ...]
    beside: tuple[ObjectHoldingRecordKey, ...]
    not_covered: tuple[UnsearchedKeyLocation, ...]
    failed: tuple[tuple[TopicPartition, CompactorError], ...]

    @property
    def holders(self) -> tuple[ObjectHoldingRecordKey, ...]:
        return (*(holder for one in self.surveys for holder in one.holders), *self.beside)

    @property
    def removals(self) -> list[KeyNumberAndRemoval]:
        return [(key, one) for found in self.surveys for key, some in found.removals.items() for one in some]


def partitions_of_topic(tier: Tier, topic_or_partition: str) -> list[TopicPartition]:
    """Raises UsageError if the tier does not hold the topic or partition."""
    names = tier.list_partitions()
    found = [name for name in names if name.topic == topic_or_partition] or [name for name in names if str(name) == topic_or_partition]
    if not found:
        raise UsageError(f"the tier holds no partition of a topic {topic_or_partition}", hint="`topics` lists what it holds")
    return found


def survey_topic(
    tier: Tier,
    partitions: Sequence[TopicPartition],
    request: KeySearchRequest,
    on_partition: Callable[[TopicPartition], None] = lambda name: None,
) -> TopicKeySearchResult:
    """Partitions that cannot be searched are listed in ``failed`` and do not stop the others (isolation, I9)."""
    surveys: list[PartitionKeySearchResult] = []
    failed: list[tuple[TopicPartition, CompactorError]] = []
    for name in partitions:
        on_partition(name)
        try:
            surveys.append(survey_partition(tier, name, request))
        except CompactorError as error:
            failed.append((name, error))
    not_covered = [one for found in surveys for one in found.not_covered]
    beside = [
        *_holding_uploads(tier, partitions, request, not_covered),
        *_holding_deleted_topics(tier, partitions),
    ]
    if tier.settings.tier.pinterest.target and tier.kind.owns_root:
        beside += [holder for name in partitions for holder in _holding_generation_objects(tier, name, request)]
        not_covered.append(OLD_GENERATIONS)
    if tier.settings.outputs.iceberg.topics:
        beside += [holder for topic in sorted({name.topic for name in partitions}) for holder in _holding_table_files(tier, topic, request)]
        not_covered.append(FILES_WITHOUT_SNAPSHOT)
    return TopicKeySearchResult(tuple(surveys), tuple(beside), (*not_covered, *NEVER_COVERED), tuple(failed))


def _holding_uploads(
    tier: Tier, partitions: Sequence[TopicPartition], request: KeySearchRequest, not_covered: list[UnsearchedKeyLocation]
) -> Iterator[ObjectHoldingRecordKey]:
    """Yield unfinished uploads to these partitions, and those of no known partition, such as staged files of a directory."""
    wanted = {str(name) for name in partitions}
    age_ms = max(tier.retention.orphan_age_ms, LEAST_AGE_MS)
    try:
        found = find_unfinished_uploads(tier, request.now_ms)
    except Refused as error:
        not_covered.append(UnsearchedKeyLocation("unfinished uploads", f"these credentials may not ask: {error.message}"))
        return
    if not tier.kind.owns_root:
        not_covered.append(UnsearchedKeyLocation("unfinished uploads of brokers", "they are the brokers' own"))
    for one in found:
        of = tier.ports.layout.partition_in_key(one.upload.key)
        if one.store is tier.ports.data and (not of or of in wanted):
            until, waits_for = one.upload.begun_ms + age_ms, "the end of who uploads it, or orphan_age_ms and `retire`"
            yield ObjectHoldingRecordKey(of, one.object_url, KeyHoldingObjectState.UPLOAD, ANY_KEY, "unknown", waits_for, until_ms=until)


def _holding_deleted_topics(tier: Tier, partitions: Sequence[TopicPartition]) -> Iterator[ObjectHoldingRecordKey]:
    topics = {name.topic for name in partitions}
    for one in tier.metadata.deleted_partitions():
        if one.topic in topics:
            name, waits_for = str(one.topic_partition), "the brokers, which delete the tier of a deleted topic"
            place = f"{name} under topic id {uuid_text(one.topic_id)}"
            yield ObjectHoldingRecordKey(name, place, KeyHoldingObjectState.FORMER_TOPIC, ANY_KEY, "unknown", waits_for)


def _holding_table_files(tier: Tier, topic: str, request: KeySearchRequest) -> Iterator[ObjectHoldingRecordKey]:
    require_pip_extra("iceberg", "[outputs.iceberg]")
    from compactor.features.iceberg.output import find_files_holding_keys

    try:
        found = find_files_holding_keys(tier, topic, request.keys)
    except CompactorError as error:
        yield ObjectHoldingRecordKey(
            topic, "the Iceberg table", KeyHoldingObjectState.TABLE, ANY_KEY, "unknown", f"it cannot be read: {error.message}"
        )
        return
    for one in found:
        cause = f"which does not come: {one.kept_because}" if one.kept_because else "[outputs.iceberg] keep_ms"
        snapshots = f"the expiry of snapshots {', '.join(map(str, one.snapshots))} ({cause})"
        waits_for = f"a round without the key and `outputs write`, then {snapshots}" if one.is_current else snapshots
        key, what = (ANY_KEY, "unknown") if one.key is None else (request.keys.index(one.key), RECORD)
        yield ObjectHoldingRecordKey(
            f"{topic}-{one.partition}", one.path, KeyHoldingObjectState.TABLE, key, what, waits_for, records=0 if one.key is None else 1
        )


def _holding_generation_objects(tier: Tier, partition: TopicPartition, request: KeySearchRequest) -> Iterator[ObjectHoldingRecordKey]:
    from compactor.features.pinterest.generations import GenerationStepLog
    from compactor.features.pinterest.layout import configured_object_keys

    settings, target = tier.settings, tier.settings.tier.pinterest.target
    store = open_store(target, settings=settings, limits=settings.limits, counters=tier.counters)
    known = GenerationStepLog(store, configured_object_keys(settings), partition).read_generations()
    for generation in sorted(known.recorded_generation_names | {one.generation for one in known.begun}):
        url = f"{target.rstrip('/')}/{generation}"
        copy_settings = settings.tier.model_copy(update={"url": url, "layout": "pinterest", "control_url": ""})
        copy = open_tier(settings.model_copy(update={"tier": copy_settings}))
        if partition not in copy.list_partitions():
            continue
        try:
            holders = survey_partition(copy, partition, request).holders
        except CompactorError as error:
            waits_for = f"it cannot be read: {error.message}"
            yield ObjectHoldingRecordKey(str(partition), url, KeyHoldingObjectState.GENERATION, ANY_KEY, "unknown", waits_for)
            continue
        for holder in holders:
            place = f"{url}/{holder.object}"
            yield replace(holder, object=place, state=KeyHoldingObjectState.GENERATION, waits_for=NEXT_GENERATION, what=RECORD)


# --- bringing it forward ---


def expedite_erasure(
    tier: Tier, survey: PartitionKeySearchResult, request: KeySearchRequest, *, shorten_grace: bool, report_step: Callable[[str], None]
) -> PartitionKeySearchResult:
    """Run rounds over the segments with the keys until they make no more progress, then `retire`. Return a new survey, whose ``removals``
    include rounds whose replaced segments `retire` has deleted.

    Delete horizons of tombstones are never shortened, because slow readers rely on them. Raises Leased, Fenced, StoreError, OutOfBudget,
    and UsageError if the settings forbid this process to delete segments.

    :param shorten_grace: delete replaced segments although readers may still use them.
    """
    require_deletion_configured(tier.retention)
    for _ in range(MAX_EXPEDITED_ROUNDS):
        if not survey.movable or not _run_erasing_round(tier, survey, request.now_ms, report_step):
            break
        before, survey = survey.movable, survey_partition(tier, survey.partition, request)
        if survey.movable == before:
            break
    if not survey.holders:
        return survey
    _retire_replaced_segments(tier, survey, request.now_ms, shorten_grace=shorten_grace, report_step=report_step)
    return replace(survey_partition(tier, survey.partition, request), removals=survey.removals)


def create_including_assessor(segment_ids: frozenset[str]) -> RoundAssessmentFunction:
    """Return a function that assesses a round as usual and adds these segments, if they lie below the round's end offset. If it adds any,
    the round is due.
    """

    def assess_round_with_segments(
        state: PartitionState, cleaner: CleanerSettings, now_ms: int
    ) -> RoundAssessment[RemoteLogSegmentMetadata]:
        usual = assess_round(state, cleaner, now_ms, force=True)
        due = {segment.id for segment in usual.covered_segments if segment.id in segment_ids}.union(usual.horizon_due)
        reason = (
            usual.reason if usual.due or not due else f"{count_noun(len(due), 'segment holds', 'segments hold')} keys that are to be erased"
        )
        return replace(usual, due=usual.due or bool(due), reason=reason, horizon_due=tuple(sorted(due)))

    return assess_round_with_segments


def _run_erasing_round(tier: Tier, survey: PartitionKeySearchResult, now_ms: int, report_step: Callable[[str], None]) -> bool:
    name = survey.partition
    log, hint = (
        tier.open_partition_log(name, caller_runs_round=True),
        tier.change_notifier.latest_hint(name),
    )
    report = create_round(tier, name, now_ms, assess_with=create_including_assessor(survey.movable)).run(log)
    tier.change_notifier.cache_state(log, hint)
    if report.status in PUBLISHING:
        tier.change_notifier.announce_changed_control_logs([log])
        report_step(
            f"{name}: {report.status}, {count_noun(report.records_read, 'record')} -> {report.records_kept:,}, "
            f"clean up to {report.next_dirty_offset}"
        )
    elif report.status == RoundStatus.QUARANTINED:
        report_step(f"{name}: quarantined: {report.reason}")
    return report.status in PUBLISHING


def _retire_replaced_segments(
    tier: Tier, survey: PartitionKeySearchResult, now_ms: int, *, shorten_grace: bool, report_step: Callable[[str], None]
) -> None:
    log = tier.open_partition_log(survey.partition, caller_runs_round=True)
    clock = STORES_OWN
    if shorten_grace:
        kept = [grace_period_ms(group, tier.retention) for group in log.refresh().waiting]
        ahead = max(kept, default=0) + tier.retention.grace_ms + 1
        clock = GraceClock(tier.ports.control.clock_ms() + ahead, forced=True, spares_young=True)
    report = retire_partition(tier.ports, log, tier.lease, tier.retention, clock=clock, job=create_round(tier, survey.partition, now_ms))
    tier.change_notifier.record_lengths([log])
    if report.deleted or report.swept:
        early = ", grace cut short" if shorten_grace else ""
        objects = count_noun(len(report.deleted) + len(report.swept), "object")
        report_step(f"{survey.partition}: {objects} deleted, {format_size(report.deleted_bytes)}{early}")


# --- the report ---


@dataclass(frozen=True)
class ErasureReportHeader:
    tier: Mapping[str, str]
    topic: str
    at_ms: int
    digests: tuple[str, ...]


def keyed_key_digest(key: bytes, secret: bytes) -> str:
    """By the tier's hash key, so that a filed report does not contain the record key."""
    return "hmac-sha256:" + hmac.new(secret, b"tiered-compactor erasure\0" + key, hashlib.sha256).hexdigest()


def erasure_report_json(
    header: ErasureReportHeader, survey: TopicKeySearchResult, done_steps: Sequence[str] = (), removals: Sequence[KeyNumberAndRemoval] = ()
) -> dict[str, Any]:
    """Parameter ``removals``: in addition to those in ``survey``."""
    known = [*removals, *survey.removals]
    since = [_last_removal_of_key(number, survey, known) for number in range(len(header.digests))]
    last = max((one for one in since if one is not None), key=lambda one: one.at_ms, default=None)
    return {
        "schema": ERASURE_SCHEMA,
        "erased": not survey.holders and not survey.failed,
        "topic": header.topic,
        "tier": dict(header.tier),
        "at": format_iso_time(header.at_ms),
        "at_ms": header.at_ms,
        "version": __version__,
        "keys": [
            {"digest": digest, "gone_since": _key_removal_round_json(since[number])} | _key_erasure_json(number, survey)
            for number, digest in enumerate(header.digests)
        ],
        "gone_since": _key_removal_round_json(last),
        "holders": [_key_holding_object_json(one, header.digests) for one in survey.holders],
        "waits_for": list(dict.fromkeys(one.waits_for for one in survey.holders)),
        "done": list(done_steps),
        "partitions": [
            {"partition": str(one.partition), "slot": one.slot, "segments_read": one.segments, "ruled_out_by_filters": one.filtered,
             "bytes_read": one.bytes}
            for one in survey.surveys
        ],
        "failed": [{"partition": str(name), "reason": error.message} for name, error in survey.failed],
        "not_covered": [asdict(one) for one in survey.not_covered],
    }  # fmt: skip


def _objects_holding_key(key_number: int, survey: TopicKeySearchResult) -> list[ObjectHoldingRecordKey]:
    return [holder for holder in survey.holders if holder.key in (key_number, ANY_KEY)]


def _last_removal_of_key(key_number: int, survey: TopicKeySearchResult, removals: Sequence[KeyNumberAndRemoval]) -> KeyRemovalRound | None:
    """Last round that removed records of the key; None if a live segment still has one, or no such round is known."""
    if any(holder.state is KeyHoldingObjectState.LIVE and holder.has_found_record for holder in _objects_holding_key(key_number, survey)):
        return None
    return max((one for key, one in removals if key == key_number), key=lambda one: one.at_ms, default=None)


def _key_erasure_json(key_number: int, survey: TopicKeySearchResult) -> dict[str, Any]:
    mine = _objects_holding_key(key_number, survey)
    until = max((holder.until_ms for holder in mine if holder.until_ms is not None), default=None)
    return {"erased": not mine and not survey.failed, "until_ms": until}


def _key_removal_round_json(removal: KeyRemovalRound | None) -> dict[str, Any] | None:
    return None if removal is None else asdict(removal) | {"at": format_iso_time(removal.at_ms)}


def _key_holding_object_json(holder: ObjectHoldingRecordKey, digests: Sequence[str]) -> dict[str, Any]:
    unknown = {} if holder.has_found_record else {"first_offset": None, "last_offset": None}
    return asdict(holder) | unknown | {
        "state": holder.state.value,
        "key": None if holder.key == ANY_KEY else digests[holder.key],
        "certain": holder.has_found_record,
        "until": None if holder.until_ms is None else format_iso_time(holder.until_ms),
    }  # fmt: skip
