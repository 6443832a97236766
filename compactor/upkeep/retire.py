"""Deleting what nobody can read any more, and sweeping what nobody will ever read.

    half-done retiring completed -> retire begun < delete < retired -> open intent resolved -> stale imports voided
        -> LIST < fold < orphans deleted

What is due goes first: an open intent may need the room. Grace counts from the store's modification time of the publishing (or
undoing) slot against the store's own clock. The LIST comes **before** the fold: what was uploaded before the LIST was registered
or announced before that, so that the fold knows its id; what the fold then does not protect was closed for good. The other way
round a fresh upload would look like an orphan. What the log remembers as void goes at once. What it does not know at all may be
what somebody else's mistake has made unknown, and goes when it is older than ``orphan_age_ms``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compactor.control import grace, ordering
from compactor.control.leadership import Leadership, lead
from compactor.control.logs import PartitionLog, tidy
from compactor.control.ordering import Stage, Steps
from compactor.control.ports import Lease, Ports, Retention
from compactor.control.publication import delete_objects
from compactor.control.records import ImportVoided, RetireBegun, Retired
from compactor.control.state import PartitionState, Registration, Waiting
from compactor.errors import NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.drive import SCOUTED, scratch_prefix, settle
from compactor.round.ports import RoundWork
from compactor.storage.deleting import delete_keys
from compactor.storage.port import ObjectStore
from compactor.tier.ports import Announced, ListedObject, Named, SegmentLayout, SegmentRef
from compactor.tier.sidecars import segment_id_of, sidecar_prefix

NEVER = 2**63 - 1

_HEARTBEAT = re.compile(r".*/(\d{20})\.json")


@dataclass(frozen=True)
class Clock:
    """The store's own clock, or ``given_ms`` in its place (``--now``), which counts only where it is earlier, or ``forced``.

    A later one would delete what others were promised to find. ``forced`` also means that orphans go whatever their age,
    unless it ``spares_young`` ones. ``asks`` False: for who only looks, and must not ask a directory for its clock.
    """

    given_ms: int | None = None
    forced: bool = False
    asks: bool = True
    spares_young: bool = False

    def now_ms(self, store: ObjectStore) -> int:
        if self.given_ms is not None and (self.forced or not self.asks):
            return self.given_ms
        own_ms = store.clock_ms()
        return own_ms if self.given_ms is None else min(own_ms, self.given_ms)


STORES_OWN = Clock()


@dataclass(frozen=True)
class Survey:
    """What there is to do, by one LIST and the fold after it. Keys of objects; segments where the fold knows them.

    ``unfinished``: retiring was begun by somebody who did not end it. ``orphans``: nobody can ever read them. ``young``: the log does not
    know them, and they are not old enough to go. ``strays``: what dead compactors told readers of, cut off longer ago than grace (not
    yet: ``open_intent``). ``strangers``: objects among the partition's whose names are none of ours; they are left alone.
    """

    due: tuple[RemoteLogSegmentMetadata, ...]
    waiting: tuple[RemoteLogSegmentMetadata, ...]
    unfinished: tuple[RemoteLogSegmentMetadata, ...]
    stale_imports: tuple[str, ...]
    orphans: tuple[ListedObject, ...]
    strays: tuple[Announced, ...]
    young: tuple[ListedObject, ...]
    strangers: tuple[str, ...]
    scratch: tuple[str, ...]
    open_intent: bool
    next_ms: int
    """No earlier than that there will be something to do, unless something is written; 0: now."""

    @property
    def idle(self) -> bool:
        return not (self.due or self.unfinished or self.stale_imports or self.orphans or self.strays or self.scratch or self.open_intent)


@dataclass(frozen=True)
class RetireReport:
    """Keys of objects; with ``dry_run`` what would be deleted. ``bytes``: of all that was deleted and swept.

    ``next_ms``: when something that waits now may go, by the store's clock; NEVER where nothing waits.
    """

    deleted: tuple[str, ...]
    swept: tuple[str, ...]
    waiting: tuple[str, ...]
    bytes: int
    next_ms: int


def retire(
    ports: Ports,
    log: PartitionLog,
    lease: Lease,
    retention: Retention,
    *,
    clock: Clock = STORES_OWN,
    dry_run: bool = False,
    work: RoundWork[Any] | None = None,
) -> RetireReport:
    """Deletes what is due and sweeps what is left over.

    ``work`` resumes an open intent; without it the intent is recorded undone. With ``dry_run`` nothing is written and no leadership is
    taken. Raises Leased, Fenced, StoreError, UsageError where the data is another tier's.
    """
    log.refresh()
    found = survey(ports, log, retention, clock)
    if dry_run or found.idle:
        return _report(ports.layout, log.state.name, found, done=dry_run)
    with lead(ports, log, lease) as leadership:
        report = led_retire(leadership, retention, clock=clock, work=work)
        tidy(log)
        return report


def led_retire(
    leadership: Leadership, retention: Retention, *, clock: Clock = STORES_OWN, work: RoundWork[Any] | None = None
) -> RetireReport:
    """The same under a leadership that is held already."""
    ports, log = leadership.ports, leadership.log
    ports.own(anew=True)
    gone = _delete_begun(leadership, Steps(Stage.RETIRE_BEGUN)) + _delete_due(leadership, retention, clock)
    if leadership.state.intent is not None:
        settle(leadership, work)
        gone += _delete_due(leadership, retention, clock)
    for import_id in _stale(ports, log, retention, clock):
        leadership.append(
            ImportVoided(leader_epoch=leadership.epoch, import_id=import_id, reason="its importer did not come back"),
            lambda state, import_id=import_id: import_id not in state.registrations,  # type: ignore[misc]
        )
    found = survey(ports, log, retention, clock)  # LIST, then fold
    leadership.require(log.state)
    left: list[SegmentRef] = [*dict.fromkeys(Named(item.segment_id, item.start_offset) for item in found.orphans)]
    told = {segment.id for segment in found.strays}
    left = [segment for segment in left if segment.id not in told] + list(found.strays)
    ordering.require_deletable(log.state, log.incarnation, leadership.epoch, [segment.id for segment in left])
    ports.layout.delete(log.state.name, left)
    ports.publisher.deleted(log.state.name, left)
    delete_keys(ports.control, found.scratch)
    return _report(ports.layout, log.state.name, found, gone=gone)


def survey(ports: Ports, log: PartitionLog, retention: Retention, clock: Clock = STORES_OWN) -> Survey:
    """What ``retire`` would do now. Reads only: LIST of the partition's objects first, then a fresh fold.

    Raises BadControlRecord for a log with a gap: to a fold that ends there, whatever came after it is an orphan.
    """
    listed = list(ports.layout.list(log.state.name))
    scratch = list(ports.control.list(scratch_prefix(log)))
    beats = [match for info in ports.control.list(f"{log.prefix}/heartbeat/") if (match := _HEARTBEAT.fullmatch(info.key))]
    sidecars = [info.key for info in ports.control.list(sidecar_prefix(log.prefix))]
    state = log.check_whole()
    due, waiting = _by_grace(ports, log, retention, clock)
    known = ordering.protected(state).union(segment.id for segment in state.retiring)
    unknown = [item for item in listed if item.segment_id and item.segment_id not in known]
    told = ports.publisher.strays(state.name, known)
    cut_off = [one for one in told or () if one.cut_off_ms >= 0]
    strays = tuple(one for one in cut_off if clock.now_ms(ports.control) >= one.cut_off_ms + retention.grace_ms)
    if told is None:
        orphans = _sweepable(ports, state, retention, clock, unknown)
    else:  # brokers write there, too: what compactors did not tell readers of is theirs
        unknown = [item for item in unknown if item.segment_id in {one.id for one in told}]
        orphans = tuple(item for item in unknown if item.segment_id in {one.id for one in strays})
    open_run = f"{scratch_prefix(log)}{state.intent.plan.run_id}/" if state.intent else None
    left = [info.key for info in scratch if open_run is None or not info.key.startswith(open_run)]
    begun = {info.key for info in scratch if info.key.startswith(f"{scratch_prefix(log)}{SCOUTED}")}
    if begun:  # whoever takes up a pass 1 that broke off goes on with it
        now = clock.now_ms(ports.control)
        old = {info.key for info in scratch if info.modified_ms + retention.orphan_age_ms <= now}
        left = [key for key in left if key not in begun or key in old]
    left += [key for key in sidecars if segment_id_of(key) and segment_id_of(key) not in known]
    young = tuple(item for item in unknown if item not in set(orphans))
    # Heartbeats of earlier epochs; the present one says itself when it is over.
    left += [match[0] for match in beats if int(match[1]) < state.last_epoch]
    return Survey(
        due=due,
        waiting=waiting,
        unfinished=state.retiring,
        stale_imports=_stale(ports, log, retention, clock),
        orphans=orphans,
        strays=strays,
        young=young,
        strangers=tuple(item.key for item in listed if not item.segment_id),
        scratch=tuple(left),
        open_intent=state.intent is not None or len(cut_off) < len(told or ()),
        next_ms=_next_ms(ports, log, retention, clock, young) if told is None else 0,
    )


def _next_ms(ports: Ports, log: PartitionLog, retention: Retention, clock: Clock, young: Sequence[ListedObject]) -> int:
    state = log.state
    if state.intent is not None or state.retiring:
        return 0
    moments = [item.modified_ms + retention.orphan_age_ms for item in young]
    if state.waiting or state.registrations:
        now, since = clock.now_ms(ports.control), since_ms(ports, log)
        moments += [grace.retire_ms(group, retention, since, now) for group in state.waiting]
        moments += [grace.stale_ms(entry, retention, since, now) for entry in state.registrations.values()]
    return min(moments, default=NEVER)


def _sweepable(
    ports: Ports, state: PartitionState, retention: Retention, clock: Clock, unknown: Sequence[ListedObject]
) -> tuple[ListedObject, ...]:
    """Which of these may go now: those under void ids, and segments of which every object is old enough."""
    voided = set(state.voided)
    rest = [item for item in unknown if item.segment_id not in voided]
    age = STORES_OWN if clock.spares_young else clock
    kept_since = age.now_ms(ports.data) - retention.orphan_age_ms if rest and not age.forced else None
    young = {item.segment_id for item in rest if kept_since is not None and item.modified_ms > kept_since}
    return tuple(item for item in unknown if item.segment_id not in young)


def _delete_due(leadership: Leadership, retention: Retention, clock: Clock) -> tuple[RemoteLogSegmentMetadata, ...]:
    """What has waited long enough: the record, then the objects."""
    due, _ = _by_grace(leadership.ports, leadership.log, retention, clock)
    if not due:
        return ()
    steps = Steps(Stage.PUBLISHED)
    steps.to(Stage.RETIRE_BEGUN)
    leadership.append(
        RetireBegun(leader_epoch=leadership.epoch, ids=tuple(segment.id for segment in due)),
        lambda state: not {segment.id for segment in due}.intersection(ordering.protected(state)),
    )
    return _delete_begun(leadership, steps)


def _delete_begun(leadership: Leadership, steps: Steps) -> tuple[RemoteLogSegmentMetadata, ...]:
    """Deletes the objects of everything whose retiring has begun, by us or by somebody who was interrupted; then the record."""
    state = leadership.state
    segments = state.retiring
    if segments:
        delete_objects(leadership, state, segments)
        steps.to(Stage.DELETED)
        ids = tuple(segment.id for segment in segments)
        leadership.append(
            Retired(leader_epoch=leadership.epoch, ids=ids), lambda state: not any(segment.id in ids for segment in state.retiring)
        )
        steps.to(Stage.RETIRED)
    return segments


def _by_grace(
    ports: Ports, log: PartitionLog, retention: Retention, clock: Clock
) -> tuple[tuple[RemoteLogSegmentMetadata, ...], tuple[RemoteLogSegmentMetadata, ...]]:
    """What waits: (due, not due yet), in whole groups."""
    due: list[RemoteLogSegmentMetadata] = []
    waiting: list[RemoteLogSegmentMetadata] = []
    if log.state.waiting:
        now = clock.now_ms(ports.control)
        since = since_ms(ports, log)
        for group in log.state.waiting:
            (due if now >= grace.retire_ms(group, retention, since, now) else waiting).extend(group.segments)
    return tuple(due), tuple(waiting)


def _stale(ports: Ports, log: PartitionLog, retention: Retention, clock: Clock) -> tuple[str, ...]:
    """Imports that were registered longer ago than anybody takes for one."""
    if not log.state.registrations:
        return ()
    now = (STORES_OWN if clock.spares_young else clock).now_ms(ports.control)
    since = since_ms(ports, log)
    entries = log.state.registrations.values()
    return tuple(entry.import_id for entry in entries if now >= grace.stale_ms(entry, retention, since, now))


def since_ms(ports: Ports, log: PartitionLog) -> dict[int, int]:
    """The store's time of each slot that something waits from. A slot that was cut has left its time in the snapshot."""
    try:
        return _times(ports, log)
    except NotFound:
        log.reload()
    try:
        return _times(ports, log)
    except NotFound:
        return {}  # cut again meanwhile; the next call will see


def _times(ports: Ports, log: PartitionLog) -> dict[int, int]:
    entries: list[Waiting | Registration] = [*log.state.waiting, *log.state.registrations.values()]
    return {entry.slot: _time_of(ports, log, entry) for entry in entries}


def _time_of(ports: Ports, log: PartitionLog, entry: Waiting | Registration) -> int:
    return ports.control.head(log.record_key(entry.slot)).modified_ms if entry.since_ms is None else entry.since_ms


def _report(
    layout: SegmentLayout, name: TopicPartition, found: Survey, *, gone: tuple[RemoteLogSegmentMetadata, ...] = (), done: bool = False
) -> RetireReport:
    """Of a survey (``done``: as if it had been carried out), or of what was carried out."""

    def keys(segments: Sequence[RemoteLogSegmentMetadata]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layout.where(name, segment, kind) for segment in segments for kind in segment.files))

    deleted = (*found.unfinished, *found.due) if done else gone
    size = sum(file.size for segment in deleted for file in segment.files.values()) + sum(item.size for item in found.orphans)
    return RetireReport(keys(deleted), tuple(item.key for item in found.orphans), keys(found.waiting), size, found.next_ms)
