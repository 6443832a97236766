"""Deletion of replaced segments after grace (retire), and of objects that no record names (sweep).

    complete unfinished retiring -> retire begun < delete < retired -> resolve the open intent -> void stale imports
        -> LIST < fold < delete orphans

What is due is deleted first, because the open intent may need the space. Grace counts from the store's modification time of the slot that
published (or undid) a round, and is compared with the store's own clock.

The LIST comes **before** the fold: an object in the LIST was registered or announced before it, so the fold knows its id, and what the
fold does not protect was closed for good. In the other order, a fresh upload would look like an orphan. Objects under void ids are deleted
at once. Objects of which the log knows nothing may be unknown because of an error elsewhere; they are deleted at ``orphan_age_ms``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from compactor.access.tier import Tier
from compactor.constants import HOUR_MS, NEVER_MS, TopicId
from compactor.control import log_start as grace, ordering
from compactor.control.incarnations import CONFIRMATION_MS, is_topic_deletion_confirmed, topic_ids_of_cluster
from compactor.control.leadership import Leadership, hold_leadership
from compactor.control.logs import CatalogLog, PartitionLog, open_catalog, write_snapshot_if_due
from compactor.control.ports import EnvironmentPorts, LeaseDurations, ObjectRetention
from compactor.control.publication import delete_partition, delete_segment_objects
from compactor.control.records import ImportVoided, SegmentDeletionBegun, SegmentDeletionEnded, TopicsInspected
from compactor.control.state import CatalogState, GroupAwaitingDeletion, OpenImport, PartitionState, RoundStage, RoundStageTracker
from compactor.errors import NotFound, Refused, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import ExistingAndMissingTopicIds
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.drive import SCOUTED, scratch_key_prefix, settle_intent
from compactor.round.ports import Job, Withdrawal
from compactor.storage.keys import RESERVED
from compactor.storage.port import ObjectStore, UnfinishedUpload
from compactor.tier.ports import AnnouncedSegment, ListedObject, SegmentIdAndStartOffset, SegmentLayout, SegmentRef
from compactor.tier.sidecars import segment_id_in_key, sidecar_key_prefix

# Unfinished uploads of dead writers, which no LIST shows and which are paid for. Only uploads to this tier's own keys count, because
# others may keep objects below the same prefix. Uploads of brokers are left to the brokers.


LEAST_AGE_MS = 3_600_000
"""Least age of an upload that is swept, whatever ``orphan_age_ms`` says: uploading a large segment over a slow line takes long."""

_CONTROL_PREFIXES: Final = ("catalog/", "partitions/", "probe/")
_PROBES: Final = ".tiered-compactor/probe/"


@dataclass(frozen=True)
class TierUpload:
    """Unfinished multipart upload. due: old enough to be aborted."""

    store: ObjectStore
    upload: UnfinishedUpload
    due: bool

    @property
    def object_url(self) -> str:
        return f"{self.store.url}/{self.upload.key}"


def find_unfinished_uploads(tier: Tier, now_ms: int) -> list[TierUpload]:
    """Raises Refused if listing uploads is forbidden."""
    age_ms = max(tier.retention.orphan_age_ms, LEAST_AGE_MS)
    found: dict[str, TierUpload] = {}
    for store in _written_stores(tier):
        for upload in store.unfinished_uploads(""):
            one = TierUpload(store, upload, now_ms - upload.begun_ms >= age_ms)
            if _is_upload_to_tier(tier, one):
                found.setdefault(f"{one.object_url} {upload.id}", one)
    return list(found.values())


def abort_stale_uploads(tier: Tier, now_ms: int, *, dry_run: bool = False) -> tuple[str, ...]:
    """URLs of the uploads' objects; none if listing uploads is forbidden."""
    try:
        due = [one for one in find_unfinished_uploads(tier, now_ms) if one.due]
    except Refused:
        return ()
    for one in () if dry_run else due:
        one.store.abort_uploads([one.upload])
    return tuple(one.object_url for one in due)


def _is_upload_to_tier(tier: Tier, upload: TierUpload) -> bool:
    key, known = upload.upload.key, tier.catalog.state
    if upload.store is tier.ports.control:
        return key.startswith((f"{RESERVED}/", *_CONTROL_PREFIXES))
    partition = tier.ports.layout.partition_in_key(key)
    return key.startswith((f"{RESERVED}/", _PROBES)) or partition in known.partitions or partition in known.reached


def _written_stores(tier: Tier) -> Iterator[ObjectStore]:
    yield tier.ports.control
    if tier.ownership.ours:
        yield tier.ports.data


# Deletion of topics that their cluster has deleted (``[tier] on_topic_deletion = "delete"``):
# ask by id -> record what is new or contradicts -> delete what is confirmed, missing still, and past ``deleted_topic_retention_ms``


AskWhichTopicIdsExist = Callable[[Sequence[TopicId]], ExistingAndMissingTopicIds]
"""Asks the cluster about topic ids. Raises StoreError, UsageError."""


def delete_missing_topics(tier: Tier, ask_about_topics: AskWhichTopicIdsExist) -> list[TopicPartition]:
    """Delete the partitions of topics that no longer exist in their cluster, and return these.

    The cluster must have reported this twice, at least an hour apart and without a contrary answer, and deleted_topic_retention_ms has
    passed since the first report.

    :raises UsageError: if no brokers are configured, although on_topic_deletion requires them.
    :raises Leased: if another compactor is at work on a partition that is due.
    """
    if tier.settings.tier.on_topic_deletion == "keep":
        return []
    if not tier.settings.kafka.has_configured_brokers:
        what = "on_topic_deletion asks the cluster, and [kafka] bootstrap_servers names none"
        raise UsageError(what, hint='Set on_topic_deletion = "keep" under [tier]')
    catalog = open_catalog(tier.ports)
    topic_ids = sorted(catalog.refresh().topic_clusters)
    if not topic_ids:
        return []
    # Both clocks are read before the question, so that no answer is older. A first answer counts from the later one and is confirmed by
    # the earlier one, so that a wrong clock does not make two answers of one.
    earlier_ms, later_ms = sorted((tier.ports.clock_ms(), tier.ports.control.clock_ms()))
    answers = ask_about_topics(topic_ids)
    _record_answers(catalog, answers, later_ms, lambda state, topic_id: topic_id not in state.missing)
    state = _record_answers(catalog, answers, earlier_ms, partial(_is_first_confirmation, asked_ms=earlier_ms))
    write_snapshot_if_due(catalog)
    asked = topic_ids_of_cluster(state, answers.missing, answers.cluster_id)
    due = {topic_id for topic_id in asked if _is_topic_due(tier, state, topic_id, earlier_ms)}
    return _delete_topics(tier, due) if due else []


def _record_answers(
    catalog: CatalogLog, answers: ExistingAndMissingTopicIds, asked_ms: int, adds_information: Callable[[CatalogState, str], bool]
) -> CatalogState:
    """Record that a topic exists only if it was reported missing before.

    :param adds_information: whether recording a missing topic is worthwhile.
    """

    def decide_record_to_append(state: CatalogState) -> TopicsInspected | None:
        # The fold ignores what another cluster says: recorded, it would be decided again for ever.
        asked = topic_ids_of_cluster(state, (*answers.missing, *answers.present), answers.cluster_id)
        missing = tuple(topic_id for topic_id in answers.missing if topic_id in asked and adds_information(state, topic_id))
        present = tuple(topic_id for topic_id in answers.present if topic_id in asked and topic_id in state.missing)
        if not missing and not present:
            return None
        return TopicsInspected(cluster_id=answers.cluster_id, missing=missing, present=present, asked_ms=asked_ms)

    return catalog.append_due_records(decide_record_to_append)


def _is_first_confirmation(state: CatalogState, topic_id: TopicId, asked_ms: int) -> bool:
    """Return whether the topic was reported missing at least CONFIRMATION_MS before, and this is not confirmed yet."""
    known = state.missing.get(topic_id)
    return known is not None and not is_topic_deletion_confirmed(state, topic_id) and asked_ms - known.first_ms >= CONFIRMATION_MS


def _is_topic_due(tier: Tier, state: CatalogState, topic_id: TopicId, now_ms: int) -> bool:
    kept_ms = tier.settings.tier.deleted_topic_retention_ms
    return is_topic_deletion_confirmed(state, topic_id) and now_ms - state.missing[topic_id].first_ms >= kept_ms


def _delete_topics(tier: Tier, topic_ids: set[TopicId]) -> list[TopicPartition]:
    """A topic that was created again has another id, and its partitions stay."""
    deleted = []
    for name in tier.list_partitions():
        log = tier.open_partition_log(name, caller_runs_round=True)
        state = log.refresh()
        if state.topic_id in topic_ids and (state.has_segments or state.registrations or state.intent):
            delete_partition(tier.ports, log, tier.lease, deleted_topic_id=state.topic_id)
            tier.change_notifier.announce_changed_control_logs([log])
            deleted.append(name)
    return deleted


_HEARTBEAT = re.compile(r".*/(\d{20})\.json")


@dataclass(frozen=True)
class GraceClock:
    """Clock for grace periods: the store's clock, or ``given_ms`` (``--now``).

    given_ms: a time later than the store's clock counts only if ``forced``, because grace would be cut short.
    forced: also delete orphans whatever their age, unless ``spares_young``.
    asks_store: False for callers that only inspect: asking a directory for its clock writes to it.
    spares_young: apply the age limits of orphans and imports even if ``forced``.
    """

    given_ms: int | None = None
    forced: bool = False
    asks_store: bool = True
    spares_young: bool = False

    def now_ms(self, store: ObjectStore) -> int:
        if self.given_ms is not None and (self.forced or not self.asks_store):
            return self.given_ms
        own_ms = store.clock_ms()
        return own_ms if self.given_ms is None else min(own_ms, self.given_ms)


STORES_OWN = GraceClock()
WITHDRAWAL = Withdrawal()


@dataclass(frozen=True)
class PendingDeletions:
    """Objects and segments that `retire` deletes now or later, found by one LIST and a later read of the control log.

    due, waiting: replaced segments whose grace is over, or not.
    unfinished: segments whose deletion another process began.
    stale_imports: ids of imports that are too old to be in progress.
    strays: segments that a dead compactor announced to brokers, withdrawn so long ago that their grace is over.
    young: objects that the control log does not mention and that are younger than ``orphan_age_ms``.
    strangers: keys that this program does not make; never deleted.
    scratch: scratch objects, sidecars and heartbeats that are no longer needed.
    open_intent: whether an open round, or an announced segment that is not withdrawn yet, must be resolved first.
    """

    due: tuple[RemoteLogSegmentMetadata, ...]
    waiting: tuple[RemoteLogSegmentMetadata, ...]
    unfinished: tuple[RemoteLogSegmentMetadata, ...]
    stale_imports: tuple[str, ...]
    orphans: tuple[ListedObject, ...]
    strays: tuple[AnnouncedSegment, ...]
    young: tuple[ListedObject, ...]
    strangers: tuple[str, ...]
    scratch: tuple[str, ...]
    open_intent: bool
    next_ms: int
    """No earlier than this there will be something to do, unless the log changes; 0 means now."""

    @property
    def has_nothing_to_delete(self) -> bool:
        return not (self.due or self.unfinished or self.stale_imports or self.orphans or self.strays or self.scratch or self.open_intent)


@dataclass(frozen=True)
class RetireReport:
    """Keys of deleted objects, swept orphans, and waiting objects; with ``dry_run`` the deletions to come. next_ms: by the store's clock; 0
    for now, NEVER_MS if nothing waits.
    """

    deleted: tuple[str, ...]
    swept: tuple[str, ...]
    waiting: tuple[str, ...]
    sizes: Mapping[str, int]
    next_ms: int

    @property
    def deleted_bytes(self) -> int:
        return sum(self.sizes[key] for key in (*self.deleted, *self.swept))


def require_deletion_configured(retention: ObjectRetention) -> None:
    """Raise UsageError if ``publish.retire`` leaves the objects of segments to another process."""
    if not retention.deletes_segments:
        raise UsageError(
            "this configuration deletes no segments: retire under [publish] is false",
            hint="Nothing was changed. Use the configuration and the credentials of the process that deletes",
        )


def retire_partition(
    ports: EnvironmentPorts,
    log: PartitionLog,
    lease: LeaseDurations,
    retention: ObjectRetention,
    *,
    clock: GraceClock = STORES_OWN,
    dry_run: bool = False,
    job: Job[Any] = WITHDRAWAL,
) -> RetireReport:
    """Delete the replaced segments whose grace is over, and the objects that no record names.

    :param dry_run: write nothing and acquire no leadership.
    :param job: can finish an interrupted round; by default it is undone.
    :raises Leased: if another compactor leads; Fenced if one takes over.
    :raises UsageError: if the data belongs to another tier, or the settings forbid this process to delete segments.
    """
    if not dry_run:
        require_deletion_configured(retention)
    log.refresh()
    found = find_deletions(ports, log, retention, clock)
    if dry_run or found.has_nothing_to_delete:
        return _retire_report(ports.layout, log.state.topic_partition, found, is_dry_run=dry_run)
    with hold_leadership(ports, log, lease) as leadership:
        report = retire_as_leader(leadership, retention, clock=clock, job=job)
        write_snapshot_if_due(log)
        return report


def retire_as_leader(
    leadership: Leadership, retention: ObjectRetention, *, clock: GraceClock = STORES_OWN, job: Job[Any] = WITHDRAWAL
) -> RetireReport:
    """Raises Fenced if another compactor has become the leader."""
    ports, log = leadership.ports, leadership.log
    ports.require_data_root_ownership(repeat_if_passed_before=True)
    ports.publisher.check_deletion_allowed()
    gone = _complete_begun_deletions(leadership, RoundStageTracker(RoundStage.RETIRE_BEGUN)) + _delete_segments_after_grace(
        leadership, retention, clock
    )
    if leadership.state.intent is not None:
        settle_intent(leadership, job)
        gone += _delete_segments_after_grace(leadership, retention, clock)
    for import_id in _stale_import_ids(ports, log, retention, clock):
        leadership.append_record(
            ImportVoided(leader_epoch=leadership.epoch, import_id=import_id, reason="its importer did not come back"),
            lambda state, import_id=import_id: import_id not in state.registrations,  # type: ignore[misc]
        )
    found = find_deletions(ports, log, retention, clock)  # the LIST comes before the fold
    leadership.require_leadership_in_state(log.state)
    left: list[SegmentRef] = [*dict.fromkeys(SegmentIdAndStartOffset(item.segment_id, item.start_offset) for item in found.orphans)]
    reported = {segment.id for segment in found.strays}
    left = [segment for segment in left if segment.id not in reported] + list(found.strays)
    ordering.require_segments_deletable(log.state, log.incarnation, leadership.epoch, [segment.id for segment in left])
    ports.layout.delete_segments(log.state.topic_partition, left)
    ports.publisher.record_finished_segment_deletion(log.state.topic_partition, left)
    ports.control.delete(found.scratch)
    return _retire_report(ports.layout, log.state.topic_partition, found, deleted_segments=gone)


def find_deletions(
    ports: EnvironmentPorts, log: PartitionLog, retention: ObjectRetention, clock: GraceClock = STORES_OWN
) -> PendingDeletions:
    """List objects first and read the control log afterwards. Raises BadControlRecord if the log has a gap: everything after it would look
    like an orphan.
    """
    listed = list(ports.layout.list_objects(log.state.topic_partition))
    scratch = list(ports.control.list(scratch_key_prefix(log)))
    beats = [match for info in ports.control.list(f"{log.prefix}/heartbeat/") if (match := _HEARTBEAT.fullmatch(info.key))]
    sidecars = [info.key for info in ports.control.list(sidecar_key_prefix(log.prefix))]
    state = log.refresh_and_check_gaps()
    due, waiting = _split_by_grace(ports, log, retention, clock)
    known = ordering.protected_segment_ids(state).union(segment.id for segment in state.retiring)
    unknown = [item for item in listed if item.segment_id and item.segment_id not in known]
    reported = ports.publisher.find_unknown_segments(state.topic_partition, known)
    cut_off = [one for one in reported or () if one.cut_off_ms >= 0]
    strays = tuple(one for one in cut_off if clock.now_ms(ports.control) >= one.cut_off_ms + retention.grace_ms)
    if reported is None:
        orphans = _deletable_orphan_objects(ports, state, retention, clock, unknown)
    else:  # brokers write there, too: objects that no compactor announced belong to brokers
        unknown = [item for item in unknown if item.segment_id in {one.id for one in reported}]
        orphans = tuple(item for item in unknown if item.segment_id in {one.id for one in strays})
    open_run = f"{scratch_key_prefix(log)}{state.intent.plan.run_id}/" if state.intent else None
    left = [info.key for info in scratch if open_run is None or not info.key.startswith(open_run)]
    begun = {info.key for info in scratch if info.key.startswith(f"{scratch_key_prefix(log)}{SCOUTED}")}
    if begun:  # an interrupted pass 1 may be resumed with these objects
        now = clock.now_ms(ports.control)
        old = {info.key for info in scratch if info.modified_ms + retention.orphan_age_ms <= now}
        left = [key for key in left if key not in begun or key in old]
    left += [key for key in sidecars if segment_id_in_key(key) and segment_id_in_key(key) not in known]
    young = tuple(item for item in unknown if item not in set(orphans))
    # Heartbeats of earlier epochs are deleted; that of the present epoch may still be in use.
    left += [match[0] for match in beats if int(match[1]) < state.last_compactor_epoch]
    return PendingDeletions(
        due=due,
        waiting=waiting,
        unfinished=state.retiring,
        stale_imports=_stale_import_ids(ports, log, retention, clock),
        orphans=orphans,
        strays=strays,
        young=young,
        strangers=tuple(item.key for item in listed if not item.segment_id),
        scratch=tuple(left),
        open_intent=state.intent is not None or len(cut_off) < len(reported or ()),
        next_ms=_next_deletion_due_ms(ports, log, retention, clock, young) if reported is None else 0,
    )


def _next_deletion_due_ms(
    ports: EnvironmentPorts, log: PartitionLog, retention: ObjectRetention, clock: GraceClock, young: Sequence[ListedObject]
) -> int:
    state = log.state
    if state.intent is not None or state.retiring:
        return 0
    moments = [item.modified_ms + retention.orphan_age_ms for item in young]
    if state.waiting or state.registrations:
        now, since = clock.now_ms(ports.control), grace_starts_ms(ports, log)
        moments += [grace.earliest_deletion_time_ms(group, retention, since, now) for group in state.waiting]
        moments += [grace.import_abandoned_at_ms(entry, retention, since, now) for entry in state.registrations.values()]
    return min(moments, default=NEVER_MS)


def _deletable_orphan_objects(
    ports: EnvironmentPorts, state: PartitionState, retention: ObjectRetention, clock: GraceClock, unknown: Sequence[ListedObject]
) -> tuple[ListedObject, ...]:
    """Objects under void ids, and segments of which every object is older than ``orphan_age_ms``."""
    voided = set(state.voided)
    rest = [item for item in unknown if item.segment_id not in voided]
    age = STORES_OWN if clock.spares_young else clock
    kept_since = age.now_ms(ports.data) - retention.orphan_age_ms if rest and not age.forced else None
    young = {item.segment_id for item in rest if kept_since is not None and item.modified_ms > kept_since}
    return tuple(item for item in unknown if item.segment_id not in young)


def _delete_segments_after_grace(
    leadership: Leadership, retention: ObjectRetention, clock: GraceClock
) -> tuple[RemoteLogSegmentMetadata, ...]:
    due, _ = _split_by_grace(leadership.ports, leadership.log, retention, clock)
    if not due:
        return ()
    steps = RoundStageTracker(RoundStage.PUBLISHED)
    steps.advance_to_stage(RoundStage.RETIRE_BEGUN)
    leadership.append_record(
        SegmentDeletionBegun(leader_epoch=leadership.epoch, ids=tuple(segment.id for segment in due)),
        lambda state: not {segment.id for segment in due}.intersection(ordering.protected_segment_ids(state)),
    )
    return _complete_begun_deletions(leadership, steps)


def _complete_begun_deletions(leadership: Leadership, steps: RoundStageTracker) -> tuple[RemoteLogSegmentMetadata, ...]:
    state = leadership.state
    segments = state.retiring
    if segments:
        delete_segment_objects(leadership, state, segments)
        steps.advance_to_stage(RoundStage.DELETED)
        ids = tuple(segment.id for segment in segments)
        leadership.append_record(
            SegmentDeletionEnded(leader_epoch=leadership.epoch, ids=ids),
            lambda state: not any(segment.id in ids for segment in state.retiring),
        )
        steps.advance_to_stage(RoundStage.RETIRED)
    return segments


def _split_by_grace(
    ports: EnvironmentPorts, log: PartitionLog, retention: ObjectRetention, clock: GraceClock
) -> tuple[tuple[RemoteLogSegmentMetadata, ...], tuple[RemoteLogSegmentMetadata, ...]]:
    """Due and waiting segments. Segments replaced together become due together."""
    due: list[RemoteLogSegmentMetadata] = []
    waiting: list[RemoteLogSegmentMetadata] = []
    if log.state.waiting:
        now = clock.now_ms(ports.control)
        since = grace_starts_ms(ports, log)
        for group in log.state.waiting:
            (due if now >= grace.earliest_deletion_time_ms(group, retention, since, now) else waiting).extend(group.segments)
    return tuple(due), tuple(waiting)


def _stale_import_ids(ports: EnvironmentPorts, log: PartitionLog, retention: ObjectRetention, clock: GraceClock) -> tuple[str, ...]:
    if not log.state.registrations:
        return ()
    now = (STORES_OWN if clock.spares_young else clock).now_ms(ports.control)
    since = grace_starts_ms(ports, log)
    entries = log.state.registrations.values()
    return tuple(entry.import_id for entry in entries if now >= grace.import_abandoned_at_ms(entry, retention, since, now))


def grace_starts_ms(ports: EnvironmentPorts, log: PartitionLog) -> dict[int, int]:
    """Store's time of each control-log record that starts a grace period, by slot. Empty if records are being deleted meanwhile."""
    try:
        return _read_grace_starts(ports, log)
    except NotFound:
        log.reload_from_snapshot()
    try:
        return _read_grace_starts(ports, log)
    except NotFound:
        return {}  # cut again meanwhile; the next call reads them


def _read_grace_starts(ports: EnvironmentPorts, log: PartitionLog) -> dict[int, int]:
    entries: list[GroupAwaitingDeletion | OpenImport] = [*log.state.waiting, *log.state.registrations.values()]
    return {entry.slot: _grace_start_ms(ports, log, entry) for entry in entries}


def _grace_start_ms(ports: EnvironmentPorts, log: PartitionLog, entry: GroupAwaitingDeletion | OpenImport) -> int:
    return ports.control.head(log.control_record_object_key(entry.slot)).modified_ms if entry.since_ms is None else entry.since_ms


def _retire_report(
    layout: SegmentLayout,
    partition: TopicPartition,
    survey: PendingDeletions,
    *,
    deleted_segments: tuple[RemoteLogSegmentMetadata, ...] = (),
    is_dry_run: bool = False,
) -> RetireReport:
    sizes = {item.key: item.size for item in survey.orphans}

    def object_keys(segments: Sequence[RemoteLogSegmentMetadata]) -> tuple[str, ...]:
        found: dict[str, int] = defaultdict(int)  # one object may hold several of a segment's files
        for segment in segments:
            for kind, file in segment.files.items():
                found[layout.object_name(partition, segment, kind)] += file.size
        sizes.update(found)
        return tuple(found)

    deleted = object_keys((*survey.unfinished, *survey.due) if is_dry_run else deleted_segments)
    swept = tuple(item.key for item in survey.orphans)
    return RetireReport(deleted, swept, object_keys(survey.waiting), sizes, survey.next_ms)


MAX_UNHINTED_INSPECTIONS = 64
"""Partitions inspected per hour although no hint asks for it. In a tier with at most this many partitions, all are inspected every time."""


def partitions_to_inspect(
    state: CatalogState, partitions: Sequence[TopicPartition], now_ms: int, log_name_of: Callable[[TopicPartition], str] = str
) -> list[TopicPartition]:
    """Partitions whose control log has grown or whose next deletion is due, and some of those that have waited longest.

    :param now_ms: the store's clock, as in the recorded inspections.
    """
    if len(partitions) <= MAX_UNHINTED_INSPECTIONS:
        return list(partitions)
    chosen: set[TopicPartition] = set()
    idle: list[tuple[int, TopicPartition]] = []
    for name in partitions:
        inspection = state.looks.get(log_name_of(name))
        if inspection is None or inspection.slot < state.reached.get(log_name_of(name), 0) or inspection.next_ms <= now_ms:
            chosen.add(name)
        else:
            idle.append((inspection.at_ms, name))
    # Inspections that hints asked for count for that hour, too, but they do not delay partitions that have waited a whole cycle.
    lately = sum(now_ms - HOUR_MS < at_ms <= now_ms for at_ms, _ in idle)
    overdue = sum(at_ms <= now_ms - HOUR_MS * len(partitions) // MAX_UNHINTED_INSPECTIONS for at_ms, _ in idle)
    idle.sort()
    chosen.update(name for _, name in idle[: max(MAX_UNHINTED_INSPECTIONS - lately, min(MAX_UNHINTED_INSPECTIONS, overdue))])
    return [name for name in partitions if name in chosen]
