"""Orphans of a broker-managed tier, objects that no metadata names: one command finds them, another one deletes them.

A person reads the list in between. ``purge_orphans`` trusts nothing in it: an entry is deleted only if the object is unchanged, is old
enough, and is not named by metadata read from the brokers *after* the LIST. Brokers record a segment before they upload its first object,
so an object that later metadata does not name is not a broker's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compactor.access.rounds import create_round
from compactor.access.tier import Tier
from compactor.adapters.brokers.cluster import UnsuitableCluster
from compactor.control import publication
from compactor.control.leadership import RecordRefused, hold_leadership
from compactor.control.logs import PartitionLog, write_snapshot_if_due
from compactor.control.ordering import round_restoration_problem
from compactor.control.publication import raise_log_start
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError, Unavailable, UsageError
from compactor.model.ids import PUBLISHING, RoundStatus, RunHistoryStatus, TopicPartition
from compactor.round.drive import lead_round, settle_intent
from compactor.round.mirroring import record_broker_segments
from compactor.round.restoring import Restoration, groups_to_restore
from compactor.storage.port import ObjectStore
from compactor.upkeep.broker_verify import list_partition_objects
from compactor.upkeep.retire import require_deletion_configured

# ``topics delete-records``, and ``undo`` of a round on a broker-managed tier.


def delete_records(tier: Tier, partition: TopicPartition, new_log_start: int) -> tuple[PartitionState, PartitionState]:
    """Raise a partition's log start, as Kafka's DeleteRecords does, and return the states before and after. A higher log start stays. An
    interrupted round is finished or undone first. Segments wholly below are deleted after their grace.

    :raises UsageError: if ``new_log_start`` lies beyond the log's end or a rule forbids it.
    :raises Leased: if another compactor is at work; Fenced if one takes over.
    """
    log = tier.open_partition_log(partition, caller_runs_round=True)

    def choose_log_start(state: PartitionState) -> int | None:
        return None if new_log_start < state.log_start else new_log_start

    with hold_leadership(tier.ports, log, tier.lease) as leadership:
        before = leadership.state
        if leadership.state.intent is not None:
            settle_intent(leadership, create_round(tier, partition, tier.ports.clock_ms()))
        if not before.has_segments or new_log_start > before.end_offset + 1:
            end = f"it ends at {before.end_offset}" if before.has_segments else "it holds nothing"
            raise UsageError(
                f"offset {new_log_start} lies beyond {partition}: {end}", hint="Nothing was changed. `topics` lists what the tier holds"
            )
        try:
            after = raise_log_start(leadership, choose_log_start)
        except RecordRefused as refused:
            raise UsageError(f"the log start of {partition} cannot be raised: {refused}", hint="Nothing was changed") from refused
        write_snapshot_if_due(log)
    tier.change_notifier.announce_changed_control_logs([log])
    return before, after


def undo_by_copies(tier: Tier, log: PartitionLog, run_id: str) -> PartitionState:
    """Undo a run: publish copies of the segments that it replaced, with the earlier cleaner offsets. An interrupted undo is completed.

    :raises UsageError: if the rules do not allow it.
    :raises BadData: if a replaced segment was lost.
    :raises CompactorError: if brokers deleted some of the run's segments meanwhile, so that the run is undone in part.
    :raises Leased: if another compactor is at work; Fenced if one takes over.
    :raises OutOfBudget: if the copies do not fit on disk.
    """
    name = log.refresh().topic_partition
    cleaner, hash_key = tier.cleaner_settings_for_topic(name.topic), tier.identity.hash_key()
    job = Restoration(tier.ports, cleaner, hash_key, tier.state_dir, run_id, tier.ports.clock_ms())
    _require_undoable(log.state, run_id)
    with hold_leadership(tier.ports, log, tier.lease) as leadership:
        if leadership.state.intent is None:
            record_broker_segments(leadership)  # what brokers have expired since is not taken back
        _require_undoable(leadership.state, run_id)
        sources = [source for one in groups_to_restore(leadership.state, run_id) for source in one.sources]
        damage = publication.stored_segments_problem(tier.ports, leadership.state, sources)
        if damage:
            hint = "Nothing was changed, readers have what the run made. Restore the object from the store's versions, then undo"
            raise BadData(f"what run {run_id} replaced is damaged: {damage}", segment=str(name), hint=hint)
        result = lead_round(leadership, job)
        write_snapshot_if_due(log)
    if result.status == RoundStatus.QUARANTINED:
        raise BadData(result.reason, segment=result.segment or str(name), hint="Readers have what the run made")
    if result.status not in PUBLISHING:
        raise Unavailable(f"run {run_id} of {name} was not undone: {result.undone}", hint="Readers have what the run made; try again")
    made = set(result.plan.source_segment_ids) if result.plan else set()
    left = [segment for segment in log.state.live if segment.id in made]
    if left:
        raise CompactorError(
            f"run {run_id} of {name} is undone in part: brokers have deleted some of its segments meanwhile, and up to offset "
            f"{left[-1].end_offset} readers keep what the run made",
            hint="Nothing more of it can be taken back",
        )
    return log.state


def _require_undoable(state: PartitionState, run_id: str) -> None:
    run = state.find_run(run_id)
    if run is None:
        raise UsageError(f"{state.topic_partition} has no run {run_id} that is remembered", hint="`runs list` shows those that are")
    if state.intent is not None and state.intent.plan.restores == run_id:
        return
    if run.status == RunHistoryStatus.REVERTED_IN_PART:
        raise UsageError(
            f"run {run_id} of {state.topic_partition} was undone in part: {run.reason}", hint="Nothing more of it can be taken back"
        )
    problem = (
        f"run {state.intent.plan.run_id} is still open"
        if state.intent
        else round_restoration_problem(state, run_id, state.next_compactor_epoch)
    )
    if problem:
        raise UsageError(f"run {run_id} of {state.topic_partition} cannot be undone: {problem}", hint="Nothing was changed")


ORPHAN_LIST_FORMAT = 1
SURE = "sure"
LIKELY = "likely"
"""SURE: the segment's deletion is recorded as finished. LIKELY: no metadata ever named the segment, as is also the case if the metadata
topic has lost records.
"""


@dataclass(frozen=True)
class Orphan:
    """An object that no metadata names. Times are by the store's clock. object: key below the tier's URL. certainty: SURE or LIKELY."""

    partition: str
    object: str
    bytes: int
    modified_ms: int
    age_ms: int
    certainty: str
    reason: str


@dataclass(frozen=True)
class OrphanList:
    url: str
    layout: str
    cluster_id: str
    found_ms: int
    orphans: tuple[Orphan, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": ORPHAN_LIST_FORMAT, **asdict(self)}


@dataclass(frozen=True)
class OrphanPurgeReport:
    deleted: Sequence[Orphan]
    kept: dict[str, str]


def find_orphans(tier: Tier, partitions: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None) -> OrphanList:
    """Objects younger than ``orphan_age_ms`` may belong to an upload in progress."""
    now = tier.ports.clock_ms()
    found: list[Orphan] = []
    for name in partitions:
        found += (one for one in _orphans_of_partition(tier, name, now) if one.age_ms >= tier.retention.orphan_age_ms)
        on_partition()
    return OrphanList(tier.settings.tier_url, tier.settings.tier.layout, tier.broker_metadata.cluster_id(), now, tuple(found))


def purge_orphans(tier: Tier, orphan_list: OrphanList, store: ObjectStore, *, dry_run: bool = False) -> OrphanPurgeReport:
    """Delete listed objects that are still orphans.

    :param store: the tier's store, opened for writing.
    :raises UsageError: if the list belongs to another tier, the brokers cannot be asked, or the settings forbid this process to delete
        segments.
    """
    _require_same_tier(tier, orphan_list)
    if not dry_run:
        require_deletion_configured(tier.retention)
    if not dry_run and (problem := tier.broker_metadata.cluster_problem()):  # what another manager records would look like an orphan
        raise UnsuitableCluster(f"nothing is deleted under these brokers: {problem.message}", hint=problem.hint, cause=problem.cause)
    deleted: list[Orphan] = []
    kept: dict[str, str] = {}
    now = tier.ports.clock_ms()
    known = {str(name): name for name in tier.broker_metadata.list_topic_partitions()}
    for partition in dict.fromkeys(one.partition for one in orphan_list.orphans):
        mine = [one for one in orphan_list.orphans if one.partition == partition]
        if partition not in known:
            kept |= {one.object: "the tier holds no such partition any more" for one in mine}
            continue
        if not dry_run:
            tier.with_stores(data=store).ports.require_topic_ownership(known[partition])
        still = {one.object: one for one in _orphans_of_partition(tier, known[partition], now)}
        for one in mine:
            if reason := _reason_to_keep(one, still.get(one.object), tier.retention.orphan_age_ms):
                kept[one.object] = reason
            else:
                deleted.append(one)
    if not dry_run:
        store.delete([one.object for one in deleted])
    return OrphanPurgeReport(deleted, kept)


def _reason_to_keep(listed: Orphan, current: Orphan | None, min_age_ms: int) -> str:
    if current is None:
        return "metadata names it now, or it was deleted"
    if (current.bytes, current.modified_ms) != (listed.bytes, listed.modified_ms):
        return "it has changed since it was listed"
    return f"it is younger than orphan_age_ms ({min_age_ms})" if current.age_ms < min_age_ms else ""


def _orphans_of_partition(tier: Tier, partition: TopicPartition, now_ms: int) -> Iterator[Orphan]:
    for one in list_partition_objects(tier, partition).orphans:
        why = "its segment's deletion is recorded as finished" if one.finished else "no metadata has ever named its segment"
        listed = one.listed
        certainty = SURE if one.finished else LIKELY
        yield Orphan(str(partition), listed.key, listed.size, listed.modified_ms, max(0, now_ms - listed.modified_ms), certainty, why)


def _require_same_tier(tier: Tier, orphan_list: OrphanList) -> None:
    layout = tier.settings.tier.layout
    if (orphan_list.url, orphan_list.layout) != (tier.settings.tier_url, layout):
        raise UsageError(
            f"the list is of the tier at {orphan_list.url}, layout {orphan_list.layout}; configured is {tier.settings.tier_url}, {layout}",
            hint="Nothing was deleted. Name the configuration that the list was made with",
        )
    if tier.broker_metadata.taken_ms >= 0:
        raise UsageError(
            "orphans are deleted by the brokers' current metadata, and there is only a snapshot", hint="Set bootstrap_servers under [kafka]"
        )
    if (cluster := tier.broker_metadata.cluster_id()) != orphan_list.cluster_id:
        raise UsageError(f"the list is of the cluster {orphan_list.cluster_id}, this one is {cluster}", hint="Nothing was deleted")
    if tier.broker_metadata.is_metadata_incomplete():
        raise UsageError(
            f"{tier.broker_metadata.source_name} has lost records, so that objects it does not name may be segments",
            hint="Nothing was deleted. Its cleanup.policy must be delete, without a limit of time and size",
        )


def write_orphan_list(orphan_list: OrphanList, path: Path) -> None:
    """Raises UsageError if the file exists."""
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(orphan_list.to_json(), file, indent=1)
    except FileExistsError:
        raise UsageError(f"{path} exists already", hint="Name a new file") from None


def read_orphan_list(path: Path) -> OrphanList:
    """Raises UsageError if the file cannot be read, and BadData if it has another format."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        known = document.pop("format") == ORPHAN_LIST_FORMAT
        found = OrphanList(**document | {"orphans": tuple(Orphan(**one) for one in document["orphans"])})
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadData(f"it is not a list of orphans: {error}", segment=str(path), hint="`orphans find --to FILE` writes one") from error
    if not known:
        raise BadData("it is a list of another version of this program", segment=str(path), hint="`orphans find --to FILE` writes one")
    return found
