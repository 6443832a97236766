"""``explain``: why a partition is not cleaned, what the last round did to each segment, what became of an offset or a key.

Decisions are asked of the code that makes them (``assess``, the folded state); nothing is decided here. Reads only.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from compactor.bootstrap import Tier
from compactor.config import Cleaner
from compactor.control.grace import keep_ms
from compactor.control.leadership import LeaseInfo, lease_of
from compactor.control.pauses import pause_of
from compactor.control.records import PlanAnnounced
from compactor.control.state import PartitionState, Waiting
from compactor.errors import BadData, NotFound, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import Assessment, assess
from compactor.views.difference import Past, iso
from compactor.views.search import Searcher, Sighting

READS = 3
"""As for every reader: on a missing object fold again."""

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Fact:
    """``kind`` is one word for scripts, ``text`` a line for people, ``values`` the numbers in it."""

    kind: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    topic: str
    partition: int
    answer: str
    facts: tuple[Fact, ...]


# --- the partition ---


def explain_partition(opened: Tier, name: TopicPartition, now_ms: int) -> Explanation:
    """Why it is not cleaned now, or that it would be."""
    if opened.listed is not None:
        return _explain_listed(opened, name)
    log = opened.open(name)
    past = Past(log)
    state = log.state
    cleaner = opened.cleaner_for(name.topic)
    lease = lease_of(opened.ports, log)
    found = assess(state, cleaner, now_ms)
    facts = (
        *_standing_facts(state, lease, now_ms),
        *_due_facts(state, found, cleaner, now_ms),
        *_leftover_facts(state, opened, now_ms),
        *_last_round_facts(past, state),
    )
    why = pause_of(opened.catalog.state, name)
    answer = f"It is {why}. What is open goes on." if why and state.live and state.intent is None else _answer(state, lease, found, now_ms)
    return Explanation(name.topic, name.partition, answer, facts)


def _explain_listed(opened: Tier, name: TopicPartition) -> Explanation:
    """No round comes to a tier that is only read: nothing of what makes one due is said of it."""
    state = opened.open(name).refresh()
    if not state.live:
        return Explanation(name.topic, name.partition, "It holds no segments yet.", ())
    answer = f"Nothing cleans it here: a tier of layout {opened.settings.tier.layout} is only read."
    held = f"{len(state.live)} segments hold offsets {state.start_offset} to {state.end_offset}, {state.bytes} bytes"
    values = {"start_offset": state.start_offset, "end_offset": state.end_offset, "bytes": state.bytes}
    how = "`import --from-tier` takes it into a tier of our own, where rounds clean it; `generations` makes this layout of that"
    return Explanation(name.topic, name.partition, answer, (Fact("offsets", held, values), Fact("only_read", how)))


def _answer(state: PartitionState, lease: LeaseInfo | None, found: Assessment[RemoteLogSegmentMetadata], now_ms: int) -> str:
    """The one reason that counts, gravest first."""
    led = lease is not None and lease.expires_ms >= now_ms
    if not state.live:
        return "It holds no segments yet."
    if state.intent is not None:
        run_id = state.intent.plan.run_id
        if led and lease is not None:
            return f"It is being cleaned now: {lease.holder} works on run {run_id}."
        return f"Run {run_id} was begun and its process has gone; the next `run` finishes or undoes it."
    if state.quarantine is not None:
        return f"It is quarantined: {state.quarantine.reason}. The next `run` tries again."
    if led and lease is not None:
        return f"{lease.holder} holds its lease (epoch {lease.epoch}) until {iso(lease.expires_ms)}."
    if found.due:
        return f"Nothing keeps it: {found.reason}. The next `run` cleans it."
    return f"It is not due: {found.reason}."


def _standing_facts(state: PartitionState, lease: LeaseInfo | None, now_ms: int) -> Iterator[Fact]:
    clean = " ".join(f"{entry.leader_epoch}:{entry.offset}" for entry in state.vector) or "none"
    yield Fact(
        "offsets",
        f"{len(state.live)} segments hold offsets {state.start_offset} to {state.end_offset}; dirty from {state.first_dirty_offset} "
        f"(cleaner offsets {clean})",
        {"start_offset": state.start_offset, "end_offset": state.end_offset, "first_dirty_offset": state.first_dirty_offset},
    )
    if lease is not None:
        over = "" if lease.expires_ms >= now_ms else "; it is over, anybody may take over"
        values = {"holder": lease.holder, "epoch": lease.epoch, "expires_ms": lease.expires_ms}
        yield Fact("lease", f"{lease.holder} leads as epoch {lease.epoch}, its lease runs until {iso(lease.expires_ms)}{over}", values)
    if state.intent is not None:
        plan = state.intent.plan
        done = len(state.intent.receipts)
        text = f"run {plan.run_id} is open since {iso(state.intent.at_ms)}: {done} of {len(plan.tasks)} groups are done"
        yield Fact("open_round", text, {"run_id": plan.run_id, "groups": len(plan.tasks), "groups_done": done})
    if state.quarantine is not None:
        why = state.quarantine
        where = f" ({why.segment})" if why.segment else ""
        text = f"failed {why.failures} times in a row, last at {iso(why.at_ms)}: {why.reason}{where}"
        yield Fact("quarantine", text, {"failures": why.failures, "at_ms": why.at_ms, "reason": why.reason, "segment": why.segment})


def _due_facts(state: PartitionState, found: Assessment[RemoteLogSegmentMetadata], cleaner: Cleaner, now_ms: int) -> Iterator[Fact]:
    if not state.live:
        return
    yield Fact(
        "dirty",
        f"{len(found.dirty)} dirty segments up to offset {found.end - 1}, dirty ratio {found.dirty_ratio:.2f}; "
        f"above {cleaner.min_cleanable_dirty_ratio:g} a round is due",
        {"dirty_ratio": found.dirty_ratio, "min_cleanable_dirty_ratio": cleaner.min_cleanable_dirty_ratio, "uncleanable_from": found.end},
    )
    undecided = state.live[-1].open_txn_offset
    if undecided >= 0:
        text = f"a transaction is open since offset {undecided}: its segment and what follows has to wait for its end"
        yield Fact("open_transaction", text, {"offset": undecided})
    if cleaner.min_compaction_lag_ms > 0:
        text = f"min_compaction_lag_ms keeps records younger than {cleaner.min_compaction_lag_ms} ms from being cleaned"
        yield Fact("min_compaction_lag", text, {"min_compaction_lag_ms": cleaner.min_compaction_lag_ms})
    horizons = sorted(segment.due_ms for segment in state.live if segment.due_ms >= 0)
    passed = sum(horizon <= now_ms for horizon in horizons)
    if horizons:
        text = f"{passed} segments hold tombstones or markers whose delete horizon has passed"
        ahead = next((horizon for horizon in horizons if horizon > now_ms), None)
        text += f"; the next horizon is {iso(ahead)}" if ahead is not None else ""
        yield Fact("horizons", text, {"passed": passed, "next_ms": ahead})


def _leftover_facts(state: PartitionState, opened: Tier, now_ms: int) -> Iterator[Fact]:
    for group in state.waiting:
        size = sum(segment.size_bytes for segment in group.segments)
        keep = keep_ms(group, opened.retention)
        what = "the outputs of undone run" if group.undone else "what was replaced by run"
        named = f"what left because {group.why}" if group.why else f"{what} {group.run_id}"
        text = f"{named} ({len(group.segments)} segments, {size} bytes) is kept for {keep} ms, then `retire` deletes it"
        yield Fact("waiting", text, {"run_id": group.run_id, "segments": len(group.segments), "bytes": size})
    for entry in state.registrations.values():
        text = f"import {entry.import_id} by {entry.holder} is unfinished: {len(entry.ids)} segments are still to come"
        yield Fact("import", text, {"import_id": entry.import_id, "holder": entry.holder, "segments": len(entry.ids)})


def _last_round_facts(past: Past, state: PartitionState) -> Iterator[Fact]:
    """Why each segment was read or skipped, as long as the plan is still in the log."""
    plans = [record.body.plan for record in past.records if isinstance(record.body, PlanAnnounced)]
    plan = next((plan for plan in reversed(plans) if (run := state.run(plan.run_id)) is not None and run.status != "undone"), None)
    if plan is None:
        if state.runs:
            yield Fact("last_round", f"the plan of run {state.runs[-1].run_id} is not in the log any more; `runs show` has its figures")
        return
    run = state.run(plan.run_id)
    status = run.status if run else ""
    dirty = plan.first_dirty_offset < plan.end_offset
    what = f"over offsets {plan.first_dirty_offset} to {plan.end_offset - 1}" if dirty else f"over what was clean, below {plan.end_offset}"
    text = f"run {plan.run_id} ({status}) {what}"
    yield Fact("last_round", text, {"run_id": plan.run_id, "status": status})
    yield from _segment_facts(plan)


def _segment_facts(plan: CompactionPlan) -> Iterator[Fact]:
    read = {segment.id: segment.reason for segment in plan.read}
    for task in plan.tasks:
        why = "; ".join(dict.fromkeys(read.get(name, "dirty") for name in task.sources))
        what = f"{len(task.sources)} segments -> {task.new_segment_id}"
        text = f"offsets {task.start_offset} to {task.end_offset} were rewritten ({why}): {what}"
        yield Fact("rewritten", text, {"sources": list(task.sources), "id": task.new_segment_id, "reason": why})
    for skipped in plan.skipped:
        yield Fact("skipped", f"segment {skipped.id} was not read: {skipped.reason}", {"id": skipped.id, "reason": skipped.reason})


# --- a key or an offset ---


def parse_key(text: str) -> bytes:
    """A key as `segments dump` prints it: text, or ``base64:...``. Raises UsageError."""
    if not text.startswith("base64:"):
        return text.encode()
    try:
        return base64.b64decode(text.removeprefix("base64:"), validate=True)
    except binascii.Error as error:
        raise UsageError(f"{text} is not base64: {error}", hint="Write the key as text, or as base64:...") from error


def explain_key(opened: Tier, name: TopicPartition, key: bytes, now_ms: int, on_bytes: OnBytes = lambda size: None) -> Explanation:
    """Which offsets hold the key, which one counts, and what was removed as far as it can still be seen. Reads every live segment."""

    def look(state: PartitionState) -> Explanation:
        found = list(_searcher(opened, name, on_bytes).search(state.live, key=key))
        facts = _Outlook(state, now_ms, opened.listed is None).facts(found)
        facts += _removed_facts(_removed(opened, state, found, on_bytes, key=key), found)
        return Explanation(name.topic, name.partition, _key_answer(_shown(key), found, facts), tuple(facts))

    return _reading(opened, name, look)


def explain_offset(opened: Tier, name: TopicPartition, offset: int, now_ms: int, on_bytes: OnBytes = lambda size: None) -> Explanation:
    """What is at that offset and why it is still there, or what became of it. Reads the segments from there on."""

    def look(state: PartitionState) -> Explanation:
        if not state.live or not state.start_offset <= offset <= state.end_offset:
            where = f"offsets {state.start_offset} to {state.end_offset}" if state.live else "nothing"
            return Explanation(name.topic, name.partition, f"Offset {offset} is not in the tier, which holds {where}.", ())
        behind = [segment for segment in state.live if segment.end_offset >= offset]
        here = next(_searcher(opened, name, on_bytes).search(behind, offset=offset), None)
        if here is None:
            return _gone(opened, state, behind, offset, on_bytes)
        later: list[Sighting] = []
        if here.key is not None and not here.control:
            later = [s for s in _searcher(opened, name, on_bytes).search(behind, key=here.key) if s.offset >= offset]
        outlook = _Outlook(state, now_ms, opened.listed is None)
        return Explanation(name.topic, name.partition, outlook.answer(here, later), tuple(outlook.facts(later or [here])))

    return _reading(opened, name, look)


def _reading(opened: Tier, name: TopicPartition, look: Callable[[PartitionState], Explanation]) -> Explanation:
    log = opened.open(name)
    missing = ""
    for _ in range(READS):
        try:
            return look(log.refresh())
        except NotFound as error:
            missing = error.message
    raise BadData(f"an object of the view is missing: {missing}", segment=str(name), hint="Run `verify`")


def _searcher(opened: Tier, name: TopicPartition, on_bytes: OnBytes) -> Searcher:
    return Searcher(opened, name, on_bytes)


def _gone(opened: Tier, state: PartitionState, behind: Sequence[RemoteLogSegmentMetadata], offset: int, on_bytes: OnBytes) -> Explanation:
    segment = behind[0]
    epoch = state.published_by.get(segment.id)
    if epoch is None:
        came = "imported" if opened.listed is None else "uploaded"
        answer = f"Offset {offset} held nothing when segment {segment.id} was {came}: the broker's log had no record there any more."
        return Explanation(*state.name, answer, ())
    found = _removed(opened, state, [], on_bytes, offset=offset)
    answer = f"Offset {offset} holds no record any more: it was cleaned away when epoch {epoch} wrote segment {segment.id}."
    if not found:
        return Explanation(*state.name, f"{answer} What it held is deleted.", ())
    group, old = found[0]
    if old.key is None:
        return Explanation(*state.name, answer, (Fact("removed", _one(old), _values(old)),))
    later = [s for s in _searcher(opened, state.name, on_bytes).search(behind, key=old.key) if s.counts and s.offset > offset]
    answer = f"Offset {offset} held {_shown(old.key)} and was cleaned away by run {group.run_id}: "
    if old.outcome == "abort":
        answer += "its transaction was aborted."
    elif later:
        answer += f"offset {later[-1].offset} supersedes it."
    elif old.is_tombstone:
        answer += "it was a tombstone whose delete horizon had passed."
    else:
        answer += "a later record superseded it, which is gone as well."
    facts = [Fact("removed", _one(old), _values(old)), *(Fact("superseded_by", _one(s), _values(s)) for s in later)]
    return Explanation(*state.name, answer, tuple(facts))


def _removed(
    opened: Tier, state: PartitionState, live: Iterable[Sighting], on_bytes: OnBytes, *, key: bytes | None = None, offset: int = -1
) -> list[tuple[Waiting, Sighting]]:
    """What replaced segments that are still kept show of the key or offset, and the view does not."""
    still = {sighting.offset for sighting in live}
    found = []
    for group in state.waiting:
        if group.undone:
            continue
        segments = [s for s in group.segments if offset < 0 or s.start_offset <= offset <= s.end_offset]
        try:
            # Markers further on are not passed here, so that outcomes of transactions may be unknown.
            seen = list(_searcher(opened, state.name, on_bytes).search(segments, key=key, offset=offset))
        except NotFound:
            continue  # retired meanwhile
        found += [(group, sighting) for sighting in seen if sighting.offset not in still]
    return found


def _removed_facts(removed: Iterable[tuple[Waiting, Sighting]], live: Sequence[Sighting]) -> list[Fact]:
    facts = {}
    for group, sighting in removed:
        text = f"{_one(sighting)}: removed by run {group.run_id}"
        facts[sighting.offset] = Fact("removed", text, _values(sighting) | {"run_id": group.run_id})
    return [facts[offset] for offset in sorted(facts, reverse=True)]


@dataclass(frozen=True)
class _Outlook:
    """Why a record is still there. ``rounds``: whether any come to this tier."""

    state: PartitionState
    now_ms: int
    rounds: bool

    def facts(self, found: Sequence[Sighting]) -> list[Fact]:
        """Newest first: which one counts, and why the others are still there."""
        facts = []
        latest: Sighting | None = None
        for sighting in found:
            if not sighting.counts:
                facts.append(Fact(_uncounted(sighting), f"{_one(sighting)}: {self.uncounted(sighting)}", _values(sighting)))
            elif latest is None:
                latest = sighting
                why = f", {self.tombstone(sighting)}" if sighting.is_tombstone else ""
                facts.append(Fact("latest", f"{_one(sighting)}: the latest word{why}", _values(sighting)))
            else:
                text = f"{_one(sighting)}: superseded by offset {latest.offset}, {self.superseded(sighting, latest)}"
                facts.append(Fact("superseded", text, _values(sighting) | {"superseded_by": latest.offset}))
        return facts

    def uncounted(self, sighting: Sighting) -> str:
        if sighting.control:
            what, then = "a marker", "; it goes with a round after its delete horizon, once no record of its transaction is left"
        elif sighting.outcome == "abort":
            what, then = "its transaction was aborted", "; the next round that reads it drops it"
        elif sighting.outcome == "open":
            what, then = "its transaction is not decided within the tier", ""
        else:
            what, then = "it has no key", "; the next round that reads it drops it"
        return what + then * self.rounds

    def tombstone(self, sighting: Sighting) -> str:
        """Kafka sets a delete horizon when a round first sees a tombstone, and drops it in a round after that."""
        if not self.rounds:
            return "a tombstone, which nothing takes away here"
        if sighting.horizon_ms is not None:
            if sighting.horizon_ms > self.now_ms:
                return f"a tombstone that is kept until its delete horizon {iso(sighting.horizon_ms)}, so that slow readers see it"
            return f"a tombstone whose delete horizon {iso(sighting.horizon_ms)} has passed: the next round that reads it drops it"
        if sighting.offset >= self.state.first_dirty_offset:
            return "a tombstone that no round has seen yet: the first one gives it a delete horizon, delete_retention_ms ahead"
        why = "an old record format, or no round has rewritten it"
        return f"a tombstone without a delete horizon: {why}; the next one that reads it sees to it"

    def superseded(self, sighting: Sighting, latest: Sighting) -> str:
        if not self.rounds:
            return "and nothing takes it away here"
        if latest.offset >= self.state.first_dirty_offset:
            return "which no round has cleaned yet"
        return f"and still there because its segment {sighting.segment.id} was not rewritten since"

    def answer(self, here: Sighting, later: Sequence[Sighting]) -> str:
        """What is at an offset, and what became of its key since."""
        what = "O" + _one(here).removeprefix("o")
        if not here.counts:
            return f"{what}: {self.uncounted(here)}."
        latest = next((sighting for sighting in later if sighting.counts), here)
        if latest.offset > here.offset:
            return f"{what}: superseded by offset {latest.offset}, {self.superseded(here, latest)}."
        why = self.tombstone(here) if here.is_tombstone else "the latest value of its key: it stays"
        return f"{what}: {why}."


def _uncounted(sighting: Sighting) -> str:
    if sighting.control:
        return "marker"
    return {"abort": "aborted", "open": "undecided"}.get(sighting.outcome, "keyless")


def _key_answer(key: str, found: Sequence[Sighting], facts: Sequence[Fact]) -> str:
    latest = next((sighting for sighting in found if sighting.counts), None)
    if latest is not None:
        what = "deleted, by the tombstone" if latest.is_tombstone else f"a value of {latest.value_bytes} bytes,"
        more = len(found) - 1
        behind = f"; {more} other records of it are still there" if more else ""
        return f"The key {key} is {what} at offset {latest.offset}{behind}."
    if found:
        return f"The key {key} has no committed record; {len(found)} aborted or undecided ones are at hand."
    if facts:
        return f"The key {key} is not in the partition any more; replaced segments that are still kept show what it was."
    return f"The key {key} is not in the partition."


def _one(sighting: Sighting) -> str:
    if sighting.control:
        return f"offset {sighting.offset}, {sighting.control} marker of producer {sighting.producer_id}"
    value = "tombstone" if sighting.value_bytes < 0 else f"{sighting.value_bytes} bytes"
    key = _shown(sighting.key) if sighting.key is not None else "no key"
    return f"offset {sighting.offset}, {key}, {value}, of {iso(sighting.timestamp) if sighting.timestamp >= 0 else 'no time'}"


def _values(sighting: Sighting) -> dict[str, Any]:
    return {
        "offset": sighting.offset,
        "timestamp": sighting.timestamp,
        "tombstone": sighting.is_tombstone,
        "value_bytes": sighting.value_bytes,
        "segment": sighting.segment.id,
        "delete_horizon_ms": sighting.horizon_ms,
        "transaction": sighting.outcome or None,
    }


def _shown(key: bytes) -> str:
    """As `segments dump` prints it."""
    try:
        text = key.decode()
        if text.isprintable():
            return repr(text)
    except UnicodeDecodeError:
        pass
    return "base64:" + base64.b64encode(key).decode()
