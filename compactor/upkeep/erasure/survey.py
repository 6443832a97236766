"""Which objects of a partition hold a key, or could: one fold, everything that it names, and everything that it does not.

    fold < live segments, replaced ones < LIST < what the fold does not know < old versions

A key is looked for in the records of every segment whose object is there, whoever knows it. What cannot be looked into may hold it. The
answer is about the fold: what is imported after it is not in it, and what a round writes after it comes from segments that are.
Reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import numpy as np

from bloom.filter import Hashes
from bloom.siphash import hash_keys, key_halves
from checkpoint.lineage import EpochEntry
from compactor.bootstrap import Tier, open_tier
from compactor.control import grace, ordering
from compactor.control.logs import PartitionLog
from compactor.control.mirror import described
from compactor.control.records import RoundPublished
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError, NotFound, Refused
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.round.drive import scratch_prefix
from compactor.storage.versions import VersionStore, layers
from compactor.tier.ports import ListedObject
from compactor.tier.sidecars import segment_id_of, sidecar_prefix
from compactor.upkeep.erasure.holders import (
    ANY_KEY,
    Found,
    Holder,
    HolderState,
    NotCovered,
    PartitionSurvey,
    Removal,
    by_segment,
    held,
)
from compactor.upkeep.erasure.standing import KeyRules, latest_of
from compactor.upkeep.retire import since_ms
from compactor.views.search import Searcher

READS = 3
"""As for every reader: on a missing object fold again."""
ENDLESS = 2**62
NEXT_RETIRE = "the next `retire`"
NEW_FILTER = "`bloom rebuild`, or a round that reads the whole segment"
RECORD = "record"
CUT_OFF = "a round over its segment, of which this part is not read, and grace after it"


@dataclass(frozen=True)
class Question:
    """``keys``: those asked for. ``by_filters``: a live segment whose filter meets none of them is not read. ``past``: whether it is asked
    which rounds have replaced what (an earlier report is compared)."""

    keys: tuple[bytes, ...]
    now_ms: int
    by_filters: bool = False
    past: bool = False
    on_bytes: Callable[[int], None] = lambda size: None


def survey(opened: Tier, name: TopicPartition, asked: Question) -> PartitionSurvey:
    """Raises StoreError, OutOfBudget; BadData where the control log or brokers' metadata cannot be believed, or a live object is gone."""
    missing = ""
    for _ in range(READS):
        log = opened.open(name)
        state = log.check_whole()
        look = _KeyLook(opened, log, state, asked)
        try:
            return look.all()
        except NotFound as error:
            missing = error.message
    raise BadData(f"an object of the view is missing: {missing}", segment=str(name), hint="Run `verify`")


@dataclass
class _KeyLook:
    """One look, as of one fold."""

    opened: Tier
    log: PartitionLog
    state: PartitionState
    asked: Question
    holders: list[Holder] = field(default_factory=list)
    removals: dict[int, dict[str, Removal]] = field(default_factory=dict)
    not_covered: list[NotCovered] = field(default_factory=list)
    movable: set[str] = field(default_factory=set)
    segments: int = 0
    filtered: int = 0
    bytes: int = 0

    @property
    def name(self) -> TopicPartition:
        return self.state.name

    def all(self) -> PartitionSurvey:
        self._live()
        since = since_ms(self.opened.ports, self.log) if self.state.waiting else {}
        self._kept(since)
        listed = list(self.opened.ports.layout.list(self.name))
        self._unknown(listed)
        self._old_versions()
        self._beside()
        self._behind(listed)
        return PartitionSurvey(
            name=self.name,
            slot=self.state.slot,
            holders=tuple(self.holders),
            removals={key: tuple(found.values()) for key, found in self.removals.items()},
            movable=frozenset(self.movable),
            listed=frozenset(item.key for item in listed),
            not_covered=tuple(self.not_covered),
            segments=self.segments,
            filtered=self.filtered,
            bytes=self.bytes,
            replaced=self._replaced() if self.asked.past else {},
        )

    def _replaced(self) -> dict[str, Removal]:
        """By the records that the log still has, and by what waits."""
        found = {
            segment.id: Removal(str(self.name), group.run_id, group.since_ms or self.asked.now_ms)
            for group in self.state.waiting
            for segment in group.segments
            if not group.undone
        }
        _, steps = self.opened.open(self.name).history()
        for record, _ in steps:
            if isinstance(record.body, RoundPublished):
                removal = Removal(str(self.name), record.body.run_id, record.at_ms)
                found |= {source: removal for new in record.body.replacements for source in new.sources}
        return found

    # --- what the fold names ---

    def _live(self) -> None:
        """Newest first: a transaction is decided by markers that come later. Raises NotFound where an object is gone: fold anew."""
        searcher = self._searcher(self.opened)
        ruled_out = self._ruled_out()
        found: list[Found] = []
        for segment in reversed(self.state.live):
            if segment.id in ruled_out:
                self.filtered += 1
                continue
            try:
                found += by_segment(searcher.search([segment], keys=self.asked.keys), self.asked.keys)
            except BadData as error:
                self._look_into(self.opened, segment, HolderState.LIVE, f"the next round ({error.cause})")
        latest = latest_of(found)
        cleaner = self.opened.cleaner_for(self.name.topic)
        rules = KeyRules.of(self.state, cleaner, self.asked.now_ms, compacts=self.opened.listed is None)
        for one in found:
            standing = rules.standing(one, latest.get(one.key))
            if standing.movable:
                self.movable.add(one.segment.id)
            place = self._where(one.segment)
            more = {"until_ms": standing.until_ms}
            self.holders.append(held(str(self.name), place, HolderState.LIVE, one, standing.what, standing.waits_for, **more))
        self._cut_off(rules)

    def _cut_off(self, rules: KeyRules) -> None:
        """What lies in live objects behind the end up to which they are read: brokers go on in another segment there."""
        seen = {(holder.segment, holder.key) for holder in self.holders}
        for segment in self.state.live:
            if segment.is_cut:
                before, movable = len(self.holders), rules.compacts and segment.start_offset < rules.end
                self._look_into(self.opened, segment, HolderState.LIVE, CUT_OFF)
                self.holders[before:] = [one for one in self.holders[before:] if (segment.id, one.key) not in seen]
                self.movable |= {segment.id} if movable and len(self.holders) > before else set()

    def _ruled_out(self) -> set[str]:
        """Live segments whose filter knows that they have none of the keys: it is wrong in the other direction only."""
        if not self.asked.by_filters or self.opened.listed is not None:
            return set()
        sidecars = self.opened.sidecars(self.name)
        hashes = hashed(self.asked.keys, sidecars.hash_key)
        met, _ = sidecars.meeting([segment.id for segment in self.state.live], lambda: [hashes])
        return {segment.id for segment in self.state.live if segment.id not in met}

    def _kept(self, since: Mapping[int, int]) -> None:
        """What readers do not get any more and the store still has."""
        now, retention = self.asked.now_ms, self.opened.retention
        for group in self.state.waiting:
            state = HolderState.UNDONE if group.undone else HolderState.REPLACED
            until = grace.retire_ms(group, retention, since, now)
            waits_for = NEXT_RETIRE if until <= now else f"its grace, then {NEXT_RETIRE[4:]}"
            for segment in group.segments:
                for one in self._look_into(self.opened, segment, state, waits_for, until, group.run_id):
                    if not group.undone:
                        at_ms = since.get(group.slot, now)
                        self.removals.setdefault(one.key, {})[group.run_id] = Removal(str(self.name), group.run_id, at_ms)
        for segment in self.state.retiring:
            self._look_into(self.opened, segment, HolderState.RETIRING, NEXT_RETIRE)
        if self.state.intent is not None:
            run_id = self.state.intent.plan.run_id
            for receipt in self.state.intent.receipts:
                self._look_into(self.opened, receipt.segment, HolderState.OPEN_ROUND, f"the end of run {run_id}", None, run_id)

    # --- what the fold does not know ---

    def _unknown(self, listed: Sequence[ListedObject]) -> None:
        state = self.state
        receipts = {receipt.segment.id for receipt in state.intent.receipts} if state.intent else set()
        known = {segment.id for segment in (*state.live, *state.retiring)} | receipts
        known |= {segment.id for group in state.waiting for segment in group.segments}
        told = self._told_by_brokers()
        for item in listed:
            if item.kind == "log" and item.segment_id not in known:
                why, waits_for, until = self._whose(item, told)
                segment = told.get(item.segment_id) or _guessed(item)
                self._look_into(self.opened, segment, why, waits_for, until, place=item.key)
        strangers = [item.key for item in listed if not item.segment_id]
        if strangers and self.opened.listed is None:
            what = f"{len(strangers)} objects among those of {self.name}, {strangers[0]} for one"
            self.not_covered.append(NotCovered(what, "their names are none of a segment's, so that nobody knows what they are"))

    def _told_by_brokers(self) -> dict[str, RemoteLogSegmentMetadata]:
        if self.opened.brokers is None:
            return {}
        return {record.id: described(record) for record in self.opened.brokers.folded(self.name).cache.list_all()}

    def _whose(self, item: ListedObject, told: Mapping[str, RemoteLogSegmentMetadata]) -> tuple[HolderState, str, int | None]:
        state, identity = self.state, item.segment_id
        if any(identity in entry.ids for entry in state.registrations.values()):
            return HolderState.IMPORTING, "the end of its import, which makes it live, or orphan_age_ms and `retire`", None
        if identity in ordering.protected(state):
            return HolderState.OPEN_ROUND, "the end of the open round, then `retire`", None
        if identity in told:
            return HolderState.BROKERS, "the brokers, which copy or delete it", None
        if self.opened.brokers is not None:
            return HolderState.ORPHAN, "`orphans find` and `orphans purge`: no metadata names it", None
        if identity in state.voided:
            return HolderState.ORPHAN, NEXT_RETIRE, None
        until = item.modified_ms + self.opened.retention.orphan_age_ms
        return HolderState.ORPHAN, "orphan_age_ms, then `retire`: its control log does not know it", until

    def _old_versions(self) -> None:
        """What a bucket keeps of objects that were deleted."""
        folder = self.opened.ports.layout.folder(self.name)
        try:
            found = layers(open_tier(self.opened.settings).ports.data, folder)
        except Refused as error:
            why = f"these credentials may not ask (s3:ListBucketVersions): {error.message}"
            self.not_covered.append(NotCovered(f"old versions of the objects of {self.name}", why))
            return
        for layer in found:
            shadow = self.opened.over(data=layer)
            for item in shadow.ports.layout.list(self.name):
                if item.kind == "log":
                    self._look_into_version(shadow, layer, item)

    def _look_into_version(self, shadow: Tier, layer: VersionStore, item: ListedObject) -> None:
        version = layer.versions[item.key].version
        waits_for = f"the bucket: a lifecycle rule NoncurrentVersionExpiration, or who deletes version {version}"
        place = f"{item.key} (version {version})"
        self._look_into(shadow, _guessed(item), HolderState.OLD_VERSION, waits_for, place=place)

    # --- what is beside the segments ---

    def _beside(self) -> None:
        """Keyed hashes, which are no keys: in filters, and in what a round keeps between its passes."""
        control, state = self.opened.ports.control, self.state
        holding = {holder.segment: holder for holder in self.holders if holder.certain}
        known = ordering.known(state)
        listed = list(control.list(sidecar_prefix(self.log.prefix)))
        inherited = self._inherited({segment_id_of(info.key) for info in listed} & known - holding.keys())
        for info in listed:
            segment_id = segment_id_of(info.key)
            if segment_id in holding:
                self._trace(info.key, info.size, HolderState.SIDECAR, holding[segment_id].waits_for, holding[segment_id].until_ms)
            elif segment_id and segment_id not in known and self._filter_meets(segment_id):
                self._trace(info.key, info.size, HolderState.SIDECAR, NEXT_RETIRE)
            elif segment_id in inherited and info.key == self.opened.sidecars(self.name).key(segment_id) and self._filter_meets(segment_id):
                self._trace(info.key, info.size, HolderState.SIDECAR, NEW_FILTER)
        for info in control.list(scratch_prefix(self.log)):
            waits_for = "the end of its run, then `retire`" if state.intent else NEXT_RETIRE
            self._trace(info.key, info.size, HolderState.SCRATCH, waits_for)

    def _inherited(self, segment_ids: AbstractSet[str]) -> set[str]:
        """Those whose filters are of the segments that they were put together from, with keys that are gone."""
        heads = self.opened.sidecars(self.name).heads(sorted(segment_ids))
        return {name for name, head in heads.items() if head.sidecar is not None and head.sidecar.inherited}

    def _filter_meets(self, segment_id: str) -> bool:
        sidecars = self.opened.sidecars(self.name)
        whole = sidecars.load(segment_id)
        if whole is None:
            return True
        return whole.filter is not None and bool(whole.filter.contains_all(hashed(self.asked.keys, sidecars.hash_key)).any())

    def _trace(self, key: str, size: int, state: HolderState, waits_for: str, until_ms: int | None = None) -> None:
        self.holders.append(
            Holder(str(self.name), f"control: {key}", state, ANY_KEY, "keyed hash", waits_for, until_ms=until_ms, bytes=size)
        )

    def _behind(self, listed: Sequence[ListedObject]) -> None:
        """What is not in the tier (yet)."""
        end = self.state.end_offset + 1
        brokers = "what its brokers hold from offset {} on, and have not uploaded" if self.opened.brokers else ""
        what = brokers.format(end) or f"what the brokers of {self.name} hold from offset {end} on, and nobody has imported"
        self.not_covered.append(NotCovered(f"{self.name}: {what}" if brokers else what, "only the brokers' own logs have it"))

    # --- looking ---

    def _look_into(
        self,
        opened: Tier,
        segment: RemoteLogSegmentMetadata,
        state: HolderState,
        waits_for: str,
        until_ms: int | None = None,
        run_id: str = "",
        place: str = "",
    ) -> list[Found]:
        """Any record of the keys in it, whatever became of its transaction; what is gone holds nothing."""
        place = place or self._where(segment)
        try:
            # Whatever lies behind the offset up to which it is read is in the object all the same.
            whole = replace_end(segment)
            found = by_segment(self._searcher(opened).search([whole], keys=self.asked.keys), self.asked.keys)
        except NotFound:
            return []
        except BadData as error:
            what = f"{waits_for} (it cannot be looked into: {error.message})"
            log = segment.files.get("log")
            self.holders.append(
                Holder(
                    str(self.name), place, state, ANY_KEY, "unknown", what, until_ms=until_ms, segment=segment.id,
                    bytes=segment.size_bytes, sha256=log.sha256 if log else "", run_id=run_id,
                )
            )  # fmt: skip
            return []
        more = {"until_ms": until_ms, "run_id": run_id}
        self.holders += [held(str(self.name), place, state, one, RECORD, waits_for, **more) for one in found]
        return found

    def _searcher(self, opened: Tier) -> Searcher:
        return Searcher(opened, self.name, self._read, "erasure")

    def _read(self, size: int) -> None:
        self.segments += 1
        self.bytes += size
        self.asked.on_bytes(size)

    def _where(self, segment: RemoteLogSegmentMetadata) -> str:
        return self.opened.ports.layout.where(self.name, segment, "log")


def replace_end(segment: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadata:
    """The segment as if it were the last one: nothing says where it ends."""
    return segment.model_copy(update={"end_offset": ENDLESS})


def hashed(keys: Sequence[bytes], hash_key: bytes) -> Hashes:
    """What filters know keys by."""
    lengths = np.array([len(key) for key in keys], np.int32)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths[:-1], dtype=np.int64)))
    out = np.empty((len(keys), 2), np.uint64)
    hash_keys(np.frombuffer(b"".join(keys) + bytes(8), np.uint8), starts, lengths, *key_halves(hash_key), out)
    return out


def _guessed(item: ListedObject) -> RemoteLogSegmentMetadata:
    """What can be said of a segment whose log was only listed."""
    return RemoteLogSegmentMetadata(
        id=item.segment_id,
        start_offset=item.start_offset,
        end_offset=ENDLESS,
        size_bytes=item.size,
        max_timestamp_ms=-1,
        mtime_ms=item.modified_ms,
        leader_epochs=(EpochEntry(0, max(0, item.start_offset)),),
        files={"log": SegmentFile(size=item.size)},
    )


def of_other_tier(opened: Tier, name: TopicPartition, asked: Question, state: HolderState, folder: str) -> Iterator[Holder]:
    """What a tier that holds copies of this one's segments (generations for Pinterest's consumers) has of the keys."""
    if name not in opened.partitions():
        return
    try:
        found = survey(opened, name, asked)
    except CompactorError as error:
        yield Holder(str(name), folder, state, ANY_KEY, "unknown", f"it cannot be looked into: {error.message}")
        return
    for holder in found.holders:
        waits_for = "`generations write`, and `generations retire` after [tier.pinterest] keep_ms"
        yield replace(holder, object=f"{folder}/{holder.object}", state=state, waits_for=waits_for, what=RECORD)
