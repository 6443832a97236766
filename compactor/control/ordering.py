"""The ordering rules that keep data safe (I1 - I6), as code that refuses. All of them are here and nowhere else.

Three tables:

* ``STAGES``: what may follow what in the life of one round. ``Steps`` walks it where the steps are taken and refuses one out of turn.
* ``REQUIREMENTS``: for each control record the conditions under which it counts. The **fold** asks before it applies a record,
  so that a record which raced past its check changes nothing; the **writer** asks before it appends, so that it learns why.
* ``protected``: the segment ids whose objects must not be deleted in a given state. Everything that deletes asks here.

docs/publication.md shows these tables; tests/unit/test_control_ordering.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

from checkpoint import lineage, offsets
from compactor.control import mirror
from compactor.control import records as r
from compactor.control.records import Record
from compactor.control.state import Intent, PartitionState, Waiting
from compactor.errors import CompactorError, Fenced
from compactor.model.plan import CompactionPlan, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata


class Stage(StrEnum):
    """The life of a round (I4). What is durable in the log is in capitals in docs/publication.md."""

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


_T = Stage
STAGES: dict[Stage | None, frozenset[Stage]] = {
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
"""Before PUBLISHED a round can only go back (UNDONE), after it only forward; REVERTED is a publication of its own (``undo``).
PUBLISH_BEGUN comes between where readers are switched in several steps (brokers): no more way back from there either.
Of an undone intent there is nothing to retire: DELETED is where it ends. Grace lies between PUBLISHED or REVERTED and RETIRE_BEGUN.

UPLOADED: all groups have their receipts, that is, each was rewritten, passed the gate and was uploaded, in this order."""


def stage_of(intent: Intent) -> Stage:
    """How far an open intent has come by what the log says of it: where whoever takes it up begins."""
    if intent.begun_slot:
        return Stage.PUBLISH_BEGUN
    return Stage.ANNOUNCED if intent.pending else Stage.UPLOADED


class Steps:
    """A way through STAGES in this process: of one round, or of what is retired together.

    Raises CompactorError (a bug) for a step out of turn.
    """

    def __init__(self, stage: Stage | None = None) -> None:
        self.stage = stage

    def to(self, stage: Stage) -> None:
        """Takes the next step."""
        if stage not in STAGES[self.stage]:
            raise CompactorError(f"a round cannot go from {self.stage or 'nothing'} to {stage}", hint="This is a bug; please report it")
        self.stage = stage


# --- who may write -----------------------------------------------------------------------------------------------------------


def next_epoch(state: PartitionState, record: Record[Any]) -> str:
    """a compactor epoch one higher than the last"""
    if record.body.leader_epoch != state.last_epoch + 1:
        return f"epoch {record.body.leader_epoch} does not follow epoch {state.last_epoch}"
    return ""


def leads(state: PartitionState, record: Record[Any]) -> str:
    """its writer leads: the last acquired epoch, by this incarnation, not released"""
    return leadership_problem(state, record.incarnation, record.body.leader_epoch)


def leadership_problem(state: PartitionState, incarnation: str, epoch: int) -> str:
    """Why this incarnation does not lead with this epoch, or nothing. No clock: a late holder whom nobody replaced leads on."""
    leader = state.leader
    if leader is None:
        return f"epoch {epoch} was never acquired"
    if (leader.epoch, leader.incarnation) != (epoch, incarnation):
        return f"epoch {epoch} was fenced by {leader.holder}, which acquired epoch {leader.epoch} in slot {leader.slot}"
    if leader.released:
        return f"epoch {epoch} was released"
    return ""


def require_leadership(state: PartitionState, incarnation: str, epoch: int) -> None:
    """Raises Fenced. Asked before every act that only the leader may do, appends and deletions alike."""
    problem = leadership_problem(state, incarnation, epoch)
    if problem:
        raise Fenced(f"{state.name}: {problem}", hint="Nothing was changed since. Run the command again to continue after it")


# --- imports -----------------------------------------------------------------------------------------------------------------


def fresh_import(state: PartitionState, record: Record[Any]) -> str:
    """an import id and segment ids that were not used before"""
    body: r.IdsRegistered = record.body
    known = body.import_id in state.registrations or any(closed.import_id == body.import_id for closed in state.closed_imports)
    if known or not body.ids:
        return f"import {body.import_id} is known already, or registers nothing"
    return _fresh(state, body.ids)


def registered_ids(state: PartitionState, record: Record[Any]) -> str:
    """ids that are registered by this import and not voided"""
    body: r.SegmentsTiered = record.body
    entry = state.registrations.get(body.import_id)
    if entry is None:
        return f"import {body.import_id} is not open: it was voided, is complete, or was never registered"
    strange = {segment.id for segment in body.segments} - set(entry.ids)
    return f"import {body.import_id} has not registered {min(strange)}" if strange else ""


def continues_log(state: PartitionState, record: Record[Any]) -> str:
    """segments that start at the end + 1 and follow each other without a gap"""
    segments: tuple[RemoteLogSegmentMetadata, ...] = record.body.segments
    if not segments or len({segment.id for segment in segments}) != len(segments):
        return "no segments, or one of them twice"
    if state.live and segments[0].start_offset != state.end_offset + 1:
        return f"segment {segments[0].id} starts at {segments[0].start_offset}, the log ends at {state.end_offset}"
    return _unsound(segments) or _gap(segments)


def lineage_kept(state: PartitionState, record: Record[Any]) -> str:
    """a lineage that does not disown what the tier holds (asked of records that carry a tail: earlier programs wrote none)"""
    body: r.SegmentsTiered = record.body
    end = state.end_offset + 1
    parted = lineage.disowned(state.lineage, end, body.lineage, end) if body.tail and state.live else None
    return "" if parted is None else f"its lineage gives offset {parted} to another leader epoch than the tier's"


def precedes_log(state: PartitionState, record: Record[Any]) -> str:
    """segments that end at the start - 1 and follow each other without a gap"""
    segments: tuple[RemoteLogSegmentMetadata, ...] = record.body.segments
    if not segments or len({segment.id for segment in segments}) != len(segments):
        return "no segments, or one of them twice"
    if not state.live or segments[-1].end_offset != state.start_offset - 1:
        return f"segment {segments[-1].id} ends at {segments[-1].end_offset}, the log starts at {state.start_offset}"
    return _unsound(segments) or _gap(segments)


def whole_import(state: PartitionState, record: Record[Any]) -> str:
    """all segments of the import at once"""
    entry = state.registrations.get(record.body.import_id)
    return "" if entry and set(entry.ids) == {segment.id for segment in record.body.segments} else "not all that the import has registered"


def nothing_compacted(state: PartitionState, record: Record[Any]) -> str:
    """a partition of which nothing was compacted or is about to be"""
    return compacted(state)


def compacted(state: PartitionState) -> str:
    """Why nothing can come before the beginning of the log any more; empty where it can.

    A record is dropped because a later one has its key, and a tombstone once what it deletes is gone: older records that came after
    that would be read as values.
    """
    if state.intent:
        return f"run {state.intent.plan.run_id} is compacting the partition"
    rewritten = any(segment.id in state.published_by for segment in state.live)
    if rewritten or offsets.clean_up_to(state.vector) > 0:
        return f"the partition was compacted up to offset {offsets.clean_up_to(state.vector)}"
    return ""


def tail_of_view(state: PartitionState, record: Record[Any]) -> str:
    """exactly the live segments that end at the offset or later, and what the first of them has below it"""
    body: r.TailTruncated = record.body
    voided = tuple(segment for segment in state.live if segment.end_offset >= body.offset)
    if not voided or tuple(segment.id for segment in voided) != body.voided:
        return f"the segments that reach beyond offset {body.offset} are others"
    first, head = voided[0], body.head
    if head is None:
        return "" if first.start_offset == body.offset else f"segment {first.id} begins below offset {body.offset}"
    entry = state.registrations.get(body.cut_id)
    if entry is None or entry.ids != (head.id,):
        return f"{head.id} is not registered as what is left of segment {first.id}"
    if (head.start_offset, head.end_offset) != (first.start_offset, body.offset - 1):
        return f"segment {head.id} covers {head.start_offset}..{head.end_offset}, not {first.start_offset}..{body.offset - 1}"
    return _unsound([head])


def there_is_something(state: PartitionState, record: Record[Any]) -> str:
    """a partition that holds something or is about to"""
    return "" if state.live or state.registrations or state.intent else "the partition is empty"


def lineage_ascends(state: PartitionState, record: Record[Any]) -> str:
    """a lineage that ascends in epoch and offset"""
    entries = record.body.lineage
    rising = all(a.epoch < b.epoch and a.start_offset <= b.start_offset for a, b in pairwise(entries))
    return "" if entries and rising else "the lineage is empty or does not ascend"


def open_import(state: PartitionState, record: Record[Any]) -> str:
    """an import that is still open"""
    return "" if record.body.import_id in state.registrations else f"import {record.body.import_id} is not open"


def round_untouched(state: PartitionState, record: Record[Any]) -> str:
    """nothing taken away that the open round names"""
    lost = set(mirror.named_by_round(state)).intersection(record.body.gone)
    return f"run {state.intent.plan.run_id} needs segment {min(lost)}" if lost and state.intent else ""


def chain_without_gaps(state: PartitionState, record: Record[Any]) -> str:
    """ids that were live and segments that follow each other without a gap"""
    strange = set(record.body.gone) - {segment.id for segment in state.live}
    if strange:
        return f"segment {min(strange)} is not live"
    after = mirror.live_after(state, record.body)
    ids = [segment.id for segment in after]
    return "a segment is in the view twice" if len(set(ids)) != len(ids) else _unsound(after) or _gap(after)


# --- a round -----------------------------------------------------------------------------------------------------------------


def no_intent(state: PartitionState, record: Record[Any]) -> str:
    """no open intent"""
    return f"run {state.intent.plan.run_id} is still open" if state.intent else ""


def sound_plan(state: PartitionState, record: Record[Any]) -> str:
    """a plan of this partition and this leader, under a new run id, with tasks and new ids, whose cleaner offset does not go back"""
    plan: CompactionPlan = record.body.plan
    if (plan.topic, plan.partition, plan.leader_epoch) != (state.topic, state.partition, record.body.leader_epoch):
        return "the plan is another partition's or another epoch's"
    if state.run(plan.run_id) is not None or not plan.tasks or len(set(plan.sources)) != len(plan.sources):
        return f"run {plan.run_id} is known already, has no tasks, or names a source twice"
    back = plan.next_dirty_offset < offsets.clean_up_to(plan.vector) and not plan.restores
    if len({task.group for task in plan.tasks}) != len(plan.tasks) or back:
        return "two tasks are one group, or the cleaner offset goes back"
    return _fresh(state, [task.new_segment_id for task in plan.tasks])


def restored_latest(state: PartitionState, record: Record[Any]) -> str:
    """where it takes a round back: the latest, nothing built on it, as a whole, with all its sources still waiting for grace"""
    plan: CompactionPlan = record.body.plan
    if not plan.restores:
        return ""
    problem = restorable_problem(state, plan.restores, plan.leader_epoch)
    if problem:
        return problem
    group = next(group for group in state.waiting if group.run_id == plan.restores and not group.undone)
    whole = set(group.replaced_by.values()) == set(plan.sources) and all(len(task.sources) == 1 for task in plan.tasks)
    return "" if whole else f"the plan takes back a part of run {plan.restores}"


def vector_unchanged(state: PartitionState, record: Record[Any]) -> str:
    """the vector that the plan started from"""
    plan = _plan(state, record)
    return _vector_moved(state, plan) if plan else ""


def sources_live(state: PartitionState, record: Record[Any]) -> str:
    """every source live, and every segment that the plan skips"""
    plan = _plan(state, record)
    return _source_gone(state, plan) if plan else ""


def tasks_cover(state: PartitionState, record: Record[Any]) -> str:
    """tasks that cover exactly their sources (I1), in ascending order"""
    plan = _plan(state, record)
    if plan is None:
        return ""
    by_id = state.live_by_id()
    for task in plan.tasks:
        problem = task_problem(task, [by_id[name] for name in task.sources if name in by_id])
        if problem:
            return problem
    return "" if all(a.end_offset < b.start_offset for a, b in pairwise(plan.tasks)) else "the tasks do not ascend"


def intent_open(state: PartitionState, record: Record[Any]) -> str:
    """the intent still open"""
    run_id = _run_id(record)
    return "" if state.intent and state.intent.plan.run_id == run_id else f"run {run_id} is not open: it was undone or published"


def receipts_match(state: PartitionState, record: Record[Any]) -> str:
    """one receipt per task, for the announced id, covering exactly the sources (I1)"""
    intent = state.intent
    if intent is None:
        return ""
    tasks = {task.group: task for task in intent.pending}
    for receipt in record.body.receipts:
        task = tasks.pop(receipt.group, None)
        if task is None or receipt.run_id != intent.plan.run_id:
            return f"group {receipt.group} of run {receipt.run_id} has a receipt already, or is none of the plan"
        problem = segment_problem(task, receipt.segment)
        if problem:
            return problem
    return ""


def one_run(state: PartitionState, record: Record[Any]) -> str:
    """receipts of one run"""
    return "" if len({receipt.run_id for receipt in record.body.receipts}) == 1 else "no receipts, or receipts of several runs"


def all_receipts(state: PartitionState, record: Record[Any]) -> str:
    """a receipt for each group of the round"""
    pending = state.intent.pending if state.intent else ()
    return f"group {pending[0].group} has no receipt" if pending else ""


def not_begun(state: PartitionState, record: Record[Any]) -> str:
    """a round whose publication has not begun"""
    begun = state.intent is not None and state.intent.begun_slot
    return f"readers are being switched since slot {begun}" if begun else ""


def whole_round(state: PartitionState, record: Record[Any]) -> str:
    """all outputs of the round, each as its receipt has it, in ascending order (I5); without those cut off after publication had begun"""
    intent = state.intent
    if intent is None:
        return ""
    cut = set(record.body.cut_off)
    if cut and (not intent.begun_slot or cut - {task.group for task in intent.plan.tasks}):
        return "groups are cut off of a publication that has not begun, or that has no such group"
    receipts = {receipt.group: receipt for receipt in intent.receipts}
    expected = [(task.sources, receipts[task.group].segment) for task in intent.plan.tasks if task.group not in cut]
    given = [(new.sources, new.segment) for new in record.body.replacements]
    return "" if given == expected else "the replacements are not what the receipts say"


def coverage_kept(state: PartitionState, record: Record[Any]) -> str:
    """each replacement covering exactly its sources (I1)"""
    by_id = state.live_by_id()
    for new in record.body.replacements:
        problem = coverage_problem([by_id[name] for name in new.sources if name in by_id], new.segment)
        if problem:
            return problem
    return ""


def vector_ends_round(state: PartitionState, record: Record[Any]) -> str:
    """the vector before; after it the plan's end under the leader's epoch (what there was if cut off, cut there if taken back)"""
    body: r.RoundPublished = record.body
    intent = state.intent
    if intent is None:
        return ""
    after = vector_after(state, intent.plan, body.leader_epoch, cut_off=bool(body.cut_off))
    if body.vector_before != state.vector or body.vector != after:
        return "the new cleaner offsets are not the end of this round"
    return ""


# --- retire and undo ---------------------------------------------------------------------------------------------------------


def whole_groups(state: PartitionState, record: Record[Any]) -> str:
    """whole groups of segments that wait for grace"""
    ids = set(record.body.ids)
    for group in _groups(state, ids):
        ids -= {segment.id for segment in group.segments}
    if ids or not record.body.ids:
        return f"segment {min(ids, default='')} does not wait for grace, or only a part of its group"
    return ""


def granted_groups(state: PartitionState, record: Record[Any]) -> str:
    """publications that the current vector grants"""
    for group in _groups(state, set(record.body.ids)):
        if not group.undone and not offsets.granted(state.vector, group.leader_epoch, offsets.clean_up_to(group.vector)):
            return f"the current cleaner offsets do not grant what run {group.run_id} published"
    return ""


def retire_was_begun(state: PartitionState, record: Record[Any]) -> str:
    """segments whose retiring has begun"""
    strange = set(record.body.ids) - {segment.id for segment in state.retiring}
    return f"retiring {min(strange)} was not begun" if strange else ""


def latest_round(state: PartitionState, record: Record[Any]) -> str:
    """the latest round, which nothing was built on, by a higher epoch, with all its sources still waiting for grace"""
    return restorable_problem(state, record.body.run_id, record.body.leader_epoch)


def restorable_problem(state: PartitionState, run_id: str, leader_epoch: int) -> str:
    """Why nobody with this epoch can go back to what the run replaced, or nothing."""
    if not state.published or state.published[-1] != run_id:
        return f"run {run_id} is not the latest round that readers have"
    group = next((group for group in state.waiting if group.run_id == run_id and not group.undone), None)
    if group is None:
        return f"retiring what run {run_id} replaced has begun"
    if leader_epoch <= group.leader_epoch:
        return f"epoch {leader_epoch} is not above the epoch that published run {run_id}"
    live = {segment.id for segment in state.live}
    return "" if live.issuperset(group.replaced_by.values()) else f"something was built on run {run_id}"


# --- the table ---------------------------------------------------------------------------------------------------------------

Requirement = Callable[[PartitionState, Record[Any]], str]

REQUIREMENTS: dict[type, tuple[Requirement, ...]] = {
    r.LeadershipAcquired: (next_epoch,),
    r.LeadershipReleased: (leads,),
    r.IdsRegistered: (fresh_import,),
    r.SegmentsTiered: (registered_ids, continues_log, lineage_kept),
    r.SegmentsPrepended: (registered_ids, whole_import, precedes_log, nothing_compacted),
    r.TailTruncated: (tail_of_view,),
    r.PartitionDeleted: (leads, there_is_something),
    r.LineageRecorded: (lineage_ascends,),
    r.SegmentsMirrored: (leads, round_untouched, chain_without_gaps),
    r.ImportVoided: (leads, open_import),
    r.PlanAnnounced: (leads, no_intent, sound_plan, restored_latest, vector_unchanged, sources_live, tasks_cover),
    r.ReceiptsAdded: (leads, one_run, intent_open, receipts_match),
    r.SurvivorsStored: (leads, intent_open),
    r.IntentUndone: (leads, intent_open, not_begun),
    r.PublishBegun: (leads, intent_open, not_begun, vector_unchanged, sources_live, all_receipts),
    r.RoundPublished: (leads, intent_open, vector_unchanged, sources_live, all_receipts, whole_round, coverage_kept, vector_ends_round),
    r.RetireBegun: (leads, whole_groups, granted_groups),
    r.Retired: (leads, retire_was_begun),
    r.RoundUndone: (leads, no_intent, latest_round),
    r.RunEnded: (leads,),
}
"""Each function's docstring is its condition in words."""


def refusal(state: PartitionState, record: Record[Any]) -> str:
    """Why this record does not count in this state, or an empty string. The fold's question, and the writer's before it appends."""
    for requirement in REQUIREMENTS[type(record.body)]:
        problem = requirement(state, record)
        if problem:
            return problem
    return ""


def vector_after(state: PartitionState, plan: CompactionPlan, leader_epoch: int, *, cut_off: bool = False) -> offsets.Vector:
    """The vector at the end of this plan's round, published by this epoch (a resumed plan may be an earlier epoch's).

    Where groups were ``cut_off`` the offset stays, under this epoch: the other groups are granted, and what they replace retires.
    """
    if plan.restores:
        return offsets.clamp(state.vector, plan.next_dirty_offset)
    return offsets.advance(state.vector, leader_epoch, offsets.clean_up_to(state.vector) if cut_off else plan.next_dirty_offset)


def resume_problem(state: PartitionState, intent: Intent) -> str:
    """Why the open intent cannot be published any more: a source went or the vector moved; empty where it can be resumed.

    Once its publication has begun it can be published, whatever happens: there is no way back.
    """
    if intent.begun_slot:
        return ""
    return _source_gone(state, intent.plan) or _vector_moved(state, intent.plan)


def coverage_problem(sources: Sequence[RemoteLogSegmentMetadata], new: RemoteLogSegmentMetadata) -> str:
    """I1: exactly the sources' start offset, end offset and union of leader epochs, never zero bytes. Empty where it holds."""
    if not sources:
        return f"segment {new.id} replaces nothing that is live"
    gap = _gap(sources)
    if gap:
        return gap
    if (new.start_offset, new.end_offset) != (sources[0].start_offset, sources[-1].end_offset):
        return (
            f"segment {new.id} covers {new.start_offset}..{new.end_offset}, its sources {sources[0].start_offset}..{sources[-1].end_offset}"
        )
    if new.leader_epochs != lineage.union([source.leader_epochs for source in sources]):
        return f"segment {new.id} does not carry the leader epochs of its sources"
    log = new.files.get("log")
    if new.size_bytes <= 0 or log is None or log.size != new.size_bytes:
        return f"segment {new.id} has no bytes"
    return ""


def task_problem(task: CompactionTask, sources: Sequence[RemoteLogSegmentMetadata]) -> str:
    """Whether a task says of its future segment what I1 demands of it."""
    if tuple(source.id for source in sources) != task.sources or not sources:
        return f"group {task.group} does not list live sources"
    epochs = lineage.union([source.leader_epochs for source in sources])
    if (task.start_offset, task.end_offset, task.leader_epochs) != (sources[0].start_offset, sources[-1].end_offset, epochs):
        return f"group {task.group} does not cover its sources exactly"
    return _gap(sources)


def segment_problem(task: CompactionTask, segment: RemoteLogSegmentMetadata) -> str:
    """Whether a receipt's segment is the one that its task announced."""
    announced = (task.new_segment_id, task.start_offset, task.end_offset, task.leader_epochs)
    if (segment.id, segment.start_offset, segment.end_offset, segment.leader_epochs) != announced:
        return f"group {task.group} made another segment than it announced"
    return "" if segment.size_bytes > 0 and "log" in segment.files else f"segment {segment.id} has no bytes"


def protected(state: PartitionState) -> set[str]:
    """Ids whose objects must not be deleted: live, in grace, registered, or in the open intent.

    Whatever is not here and was uploaded before this state was folded can never come back: ids are registered or announced
    before the first upload, and the record that took them out of this set has closed them for good.
    """
    ids = {segment.id for segment in state.live}
    ids.update(segment.id for group in state.waiting for segment in group.segments)
    ids.update(name for entry in state.registrations.values() for name in entry.ids)
    if state.intent:
        ids.update(task.new_segment_id for task in state.intent.plan.tasks)
    return ids


def known(state: PartitionState) -> set[str]:
    """Ids of which this log says what becomes of them."""
    return protected(state).union(segment.id for segment in state.retiring)


def require_deletable(state: PartitionState, incarnation: str, epoch: int, ids: Iterable[str]) -> None:
    """Raises Fenced for a process that does not lead, CompactorError (a bug) for an id that is protected."""
    require_leadership(state, incarnation, epoch)
    wrong = protected(state).intersection(ids)
    if wrong:
        raise CompactorError(f"segment {min(wrong)} of {state.name} must not be deleted", hint="This is a bug; please report it")


def _plan(state: PartitionState, record: Record[Any]) -> CompactionPlan | None:
    if isinstance(record.body, r.PlanAnnounced):
        return record.body.plan
    return state.intent.plan if state.intent else None


def _vector_moved(state: PartitionState, plan: CompactionPlan) -> str:
    return "" if plan.vector == state.vector else "the cleaner offsets are not those that the plan started from"


def _source_gone(state: PartitionState, plan: CompactionPlan) -> str:
    live = {segment.id for segment in state.live}
    names = (*plan.sources, *(skipped.id for skipped in plan.skipped))
    gone = next((name for name in names if name not in live), "")
    return f"segment {gone} is not live any more" if gone else ""


def _run_id(record: Record[Any]) -> str:
    body = record.body
    run_id: str = body.receipts[0].run_id if isinstance(body, r.ReceiptsAdded) else body.run_id
    return run_id


def _groups(state: PartitionState, ids: set[str]) -> list[Waiting]:
    """Groups that lie wholly within these ids."""
    return [group for group in state.waiting if ids.issuperset(segment.id for segment in group.segments)]


def _fresh(state: PartitionState, ids: Sequence[str]) -> str:
    """Ids are never reused."""
    used = protected(state).union(segment.id for segment in state.retiring)
    old = next((name for name in ids if name in used), "")
    if old or len(set(ids)) != len(ids):
        return f"segment id {old or ids[0]} is in use already"
    return ""


def _unsound(segments: Sequence[RemoteLogSegmentMetadata]) -> str:
    for segment in segments:
        if segment.end_offset < segment.start_offset or segment.size_bytes <= 0 or not segment.leader_epochs:
            return f"segment {segment.id} is empty or has no leader epoch"
    return ""


def _gap(segments: Sequence[RemoteLogSegmentMetadata]) -> str:
    for before, after in pairwise(segments):
        if after.start_offset != before.end_offset + 1:
            return f"segment {after.id} starts at {after.start_offset}, the one before it ends at {before.end_offset}"
    return ""
