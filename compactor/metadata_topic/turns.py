"""Whose turn it is to begin a round, where [publish] metadata_records_per_hour bounds what rounds say. Pure.

First come, first served: a round that the last hour has no room for is not overtaken by smaller ones, so that each gets its turn. One that
is larger than the budget of a whole hour is begun once the last hour has nothing of anybody: it is alone in the hour that it fills.
Reserved is what the rounds that were begun have still to say, the end of what they replaced (DELETE_SEGMENT_FINISHED) included, so that
no hour gets more than the budget, or than one round. That holds for the rounds of one process; of others it sees what they have said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from compactor.metadata_topic.spending import HOUR, MINUTE_MS, last_hour
from compactor.model.ids import TopicPartition

RESERVED_MS = HOUR * MINUTE_MS
"""So long what is reserved for a partition stands after the last that was heard of it: its round may be another process's by now."""
SILENT_MS = 15 * MINUTE_MS
"""Whoever has not asked again so long after its time holds up nobody: its partition may be paused. Its place it keeps, for a day."""
ASKED_MS = HOUR * MINUTE_MS
"""Whoever waits asks again at least so often: those before it may have no need any more, as others have done their rounds."""
FORGOTTEN_MS = 24 * HOUR * MINUTE_MS


@dataclass(frozen=True)
class Queued:
    """A round that may not be begun yet. ``since_ms``: when it came; ``again_ms``: when it was told to ask again."""

    records: int
    since_ms: int
    again_ms: int


@dataclass(frozen=True)
class Underway:
    """``records``: what the round has still to say, until what it replaces is being deleted; ``deletions``: what is to be said after that,
    of this and earlier rounds. ``since_ms``: when it came; ``heard_ms``: when it was last heard of."""

    records: int
    since_ms: int
    heard_ms: int
    deletions: int = 0


@dataclass(frozen=True)
class Turns:
    """By partition. A partition whose round was begun is not among those that wait."""

    waiting: Mapping[TopicPartition, Queued] = field(default_factory=dict)
    begun: Mapping[TopicPartition, Underway] = field(default_factory=dict)


@dataclass(frozen=True)
class Admission:
    """``until_ms``: when to ask again; 0: it is begun. ``records``: by which it was judged; ``ahead``: how many rounds come before it."""

    until_ms: int
    records: int
    ahead: int = 0


def asked(turns: Turns, said: Mapping[int, int], name: TopicPartition, records: int, per_hour: int, now_ms: int) -> tuple[Turns, Admission]:
    """A round over this partition would say so many records. It may ask again, as more is known of it: what it knew best counts."""
    waiting = {of: one for of, one in turns.waiting.items() if of != name and now_ms < one.again_ms + FORGOTTEN_MS}
    begun = {of: one for of, one in turns.begun.items() if now_ms < one.heard_ms + RESERVED_MS}
    waited, mine = turns.waiting.get(name), begun.get(name, Underway(0, now_ms, now_ms))
    wanted = max(records, waited.records) if waited else records
    since = waited.since_ms if waited else mine.since_ms if mine.records else now_ms
    place = (since, name)
    before = sorted(
        (one.since_ms, of, one.records) for of, one in waiting.items() if (one.since_ms, of) < place and now_ms <= one.again_ms + SILENT_MS
    )
    if mine.records:
        before = []  # it was begun, and only asks whether it may be as large as it has come to know
    used = last_hour(said, now_ms)
    reserved = sum(one.records + one.deletions for one in begun.values()) - mine.records
    standing = sum(used.values()) + reserved
    if not before and (not standing or standing + wanted <= per_hour):
        begun[name] = replace(mine, records=wanted, since_ms=since, heard_ms=now_ms)
        return Turns(waiting, begun), Admission(0, wanted)
    room = _room_ms(used, [*(one[2] for one in before), wanted], per_hour, now_ms)
    until = min(max(room, now_ms + MINUTE_MS), now_ms + ASKED_MS)
    waiting[name] = Queued(wanted, since, until)
    return Turns(waiting, _ended(begun, name)), Admission(until, wanted, len(before))


def spoken(turns: Turns, name: TopicPartition, records: int, deletions: int, now_ms: int) -> Turns:
    """So many were appended: they stand in the topic now."""
    known = turns.begun.get(name)
    if known is None:
        return turns
    left = replace(known, records=max(0, known.records - records), deletions=max(0, known.deletions - deletions), heard_ms=now_ms)
    return replace(turns, begun={**turns.begun, name: left})


def published(turns: Turns, name: TopicPartition, deletions: int, now_ms: int) -> Turns:
    """Its round has said all but so many, which follow grace."""
    known = turns.begun.get(name)
    if known is None:
        return turns
    left = replace(known, records=0, deletions=known.deletions + deletions, heard_ms=now_ms)
    return replace(turns, begun={**turns.begun, name: left})


def forgone(turns: Turns, name: TopicPartition, *, due: bool) -> Turns:
    """Its round has ended, whether or not anything was published. ``due``: there is to be another one, which keeps its place."""
    waiting = turns.waiting if due else {of: one for of, one in turns.waiting.items() if of != name}
    return Turns(waiting, _ended(turns.begun, name))


def _ended(begun: Mapping[TopicPartition, Underway], name: TopicPartition) -> dict[TopicPartition, Underway]:
    others = {of: one for of, one in begun.items() if of != name}
    known = begun.get(name)
    return others | {name: replace(known, records=0)} if known is not None and known.deletions else others


def _room_ms(said: Mapping[int, int], rounds: Sequence[int], per_hour: int, now_ms: int) -> int:
    """The earliest moment for the last of these, one behind the other, if each says at once what it has to say."""
    standing, used, at = deque(said.items()), sum(said.values()), now_ms
    for wanted in rounds:
        while used and used + wanted > per_hour:
            minute, count = standing.popleft()
            used -= count
            at = max(at, (minute + HOUR) * MINUTE_MS)
        standing.append((at // MINUTE_MS, wanted))
        used += wanted
    return at
