"""Judge of what a consumer read of a log that is being compacted, against what its producers were told.

Used by the simulation of broker-managed tiers and by the broker soak. No store, clock, client or randomness.

``PartitionHistory`` is what producers know. ``judge_read`` compares one read with it and returns every violation:

* out of order: offsets do not ascend
* invented: no producer sent the record
* discarded: the surviving leader's log had disowned the record
* not committed: a read_committed consumer got a record of an aborted transaction
* lost: a record is missing that compaction may not remove
* came back: a key was deleted, its tombstone is gone, and an older value is still there
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """What is known of a record's transaction. A record without one is committed as soon as it is acknowledged."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class SentRecord:
    """A record as a producer sent it.

    value: None for a tombstone.
    identity: distinguishes the record from every other record of the partition, equal or not.
    """

    key: Hashable
    value: Hashable | None
    identity: Hashable


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record as a consumer got it."""

    offset: int
    record: SentRecord


@dataclass(frozen=True)
class Read:
    """One pass of a consumer over a part of the log.

    start: first offset that was asked for.
    end: position after the last record, exclusive; for read_committed at most the last stable offset.
    is_committed: whether the isolation level was read_committed.
    cleaned_below: exclusive upper bound of what any round can have compacted when the pass ended.
    is_slow: whether the pass took longer than tombstones are retained, so that it may have met a value and missed its tombstone.
    """

    start: int
    end: int
    found: Sequence[FoundRecord]
    is_committed: bool = False
    cleaned_below: int = 1 << 62
    is_slow: bool = False


@dataclass(frozen=True)
class Violation:
    """kind: one of those that the module's docstring lists. text: which record, and what is known of it. offset: the record's."""

    kind: str
    text: str
    offset: int


@dataclass
class PartitionHistory:
    """What producers were told of one partition, without what an unclean election discarded.

    sent: records whose acknowledgement has not arrived, or never will, by identity.
    records: acknowledged records of the surviving log, by offset.
    outcomes: offsets of records whose transaction was aborted, or is not known to be committed.
    disowned: acknowledged records that an unclean election discarded, as (offset, record).
    log_start: first offset that the log may still have; rises before records are deleted.
    excused: records that were missing because a disowned record had superseded them before it was discarded.
    transactions: offsets of a decided transaction, by each of them.
    """

    sent: dict[Hashable, SentRecord] = field(default_factory=dict)
    records: dict[int, SentRecord] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    disowned: set[tuple[int, SentRecord]] = field(default_factory=set)
    log_start: int = 0
    excused: int = 0
    transactions: dict[int, Sequence[int]] = field(default_factory=dict)
    _offsets: list[int] = field(default_factory=list)
    _by_key: dict[Hashable, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(records: Iterable[tuple[int, SentRecord]]) -> PartitionHistory:
        """Return the history of a log that holds exactly these committed records; offsets ascend."""
        made = PartitionHistory()
        for offset, record in records:
            made.records[offset] = record
            made._offsets.append(offset)
            made._by_key.setdefault(record.key, []).append(offset)
        return made

    def announce(self, record: SentRecord) -> None:
        """Note a record before it is sent: from now on a consumer may get it."""
        self.sent[record.identity] = record

    def acknowledge(self, identity: Hashable, offset: int, outcome: Outcome = Outcome.COMMITTED) -> None:
        """Note the offset that the broker confirmed for an announced record."""
        record = self.sent.pop(identity)
        self.records[offset] = record
        _insert(self._offsets, offset)
        _insert(self._by_key.setdefault(record.key, []), offset)
        if outcome is not Outcome.COMMITTED:
            self.outcomes[offset] = outcome

    def decide(self, offsets: Sequence[int], outcome: Outcome) -> None:
        """Note how the transaction of these acknowledged records ended."""
        self.transactions.update(dict.fromkeys(offsets, tuple(offsets)))
        for offset in offsets:
            if outcome is Outcome.COMMITTED:
                self.outcomes.pop(offset, None)
            elif offset in self.records:
                self.outcomes[offset] = outcome

    def disown_from(self, end: int) -> None:
        """Discard what was acknowledged at or after ``end``: the surviving leader's log ended there.

        The surviving log may lack the marker of the last transaction of which a record survives, because a producer hears of the end of
        its transaction before the marker is written. The producer's next transaction then decides over these records as well, whatever
        the producer was told of them. A transaction before the last one has its marker: a producer begins the next one only then.
        """
        cut = bisect_left(self._offsets, end)
        last = next((offset for offset in reversed(self._offsets[:cut]) if offset in self.transactions), -1)
        for offset in self.transactions.get(last, ()):
            if offset in self.records:
                self.outcomes[offset] = Outcome.UNDECIDED
        for offset in self._offsets[cut:]:
            record = self.records.pop(offset)
            self.outcomes.pop(offset, None)
            self.disowned.add((offset, record))
            self._by_key[record.key].remove(offset)
        del self._offsets[cut:]

    def between(self, start: int, end: int) -> list[int]:
        """Return the offsets of surviving acknowledged records in [start, end), ascending."""
        return self._offsets[bisect_left(self._offsets, start) : bisect_left(self._offsets, end)]

    def outcome_of(self, offset: int) -> Outcome:
        return self.outcomes.get(offset, Outcome.COMMITTED)

    def is_superseded(self, key: Hashable, offset: int, below: int) -> bool:
        """Return whether a later record of the key may have removed the one at ``offset``.

        The later record is not aborted and has an offset less than ``below``; one without an acknowledgement may be anywhere.
        """
        later = self._by_key.get(key, [])
        for candidate in later[bisect_right(later, offset) :]:
            if candidate >= below:
                break
            if self.outcome_of(candidate) is not Outcome.ABORTED:
                return True
        return any(record.key == key for record in self.sent.values())

    def is_superseded_by_disowned(self, key: Hashable, offset: int) -> bool:
        """Return whether a record that was later discarded had the key and a higher offset."""
        return any(record.key == key and place > offset for place, record in self.disowned)


def judge_read(history: PartitionHistory, read: Read) -> list[Violation]:
    """Return what is wrong with one read; empty if the log's promises hold."""
    found: dict[int, SentRecord] = {}
    violations: list[Violation] = []
    last = read.start - 1
    for each in read.found:
        if each.offset <= last:
            violations.append(Violation("out of order", f"offset {each.offset} came after {last}", each.offset))
        last = max(last, each.offset)
        found[each.offset] = each.record
        violations += _found_violations(history, read, each)
    present: dict[Hashable, int] = {}
    for offset in sorted(found, reverse=True):
        if history.outcome_of(offset) is not Outcome.ABORTED:
            present[found[offset].key] = offset  # of each key the first offset that the read has
    discarded = {one.offset for one in violations if one.kind == "discarded"}
    unseen = sorted({offset for offset, _ in history.disowned}) if read.is_committed else sorted(discarded)
    surviving = sorted(found.keys() - discarded)
    for offset in history.between(max(read.start, history.log_start), read.end):
        if offset not in found and not _is_stood_in_for(offset, surviving, unseen):
            violations += _missing_violations(history, read, offset, present)
    return violations


def _is_stood_in_for(offset: int, surviving: Sequence[int], discarded: Sequence[int]) -> bool:
    """Return whether the reader passed ``offset`` in a discarded segment: between the surviving records that it found before and after
    the offset there is a discarded one. A read_committed consumer does not see the discarded ones whose transaction never ended.
    """
    after = bisect_right(surviving, offset)
    first = surviving[after - 1] if after else -1
    last = surviving[after] if after < len(surviving) else 1 << 62
    return bisect_left(discarded, last) > bisect_right(discarded, first)


def _found_violations(history: PartitionHistory, read: Read, each: FoundRecord) -> list[Violation]:
    known = history.records.get(each.offset)
    if known is None:
        known = history.sent.get(each.record.identity)
    if known != each.record:
        was = "nothing was acknowledged there" if known is None else f"{_short(known)} was acknowledged there"
        kind = "discarded" if (each.offset, each.record) in history.disowned else "invented"
        return [Violation(kind, f"offset {each.offset}: {_short(each.record)} was read, {was}", each.offset)]
    if read.is_committed and history.outcome_of(each.offset) is Outcome.ABORTED:
        text = f"offset {each.offset}: {_short(each.record)} belongs to an aborted transaction"
        return [Violation("not committed", text, each.offset)]
    return []


def _missing_violations(history: PartitionHistory, read: Read, offset: int, present: dict[Hashable, int]) -> list[Violation]:
    """Judge a surviving acknowledged record that the read lacks."""
    record, outcome = history.records[offset], history.outcome_of(offset)
    if outcome is Outcome.ABORTED and (read.is_committed or offset < read.cleaned_below):
        return []
    if outcome is Outcome.UNDECIDED:
        return []
    if offset < read.cleaned_below:
        if history.is_superseded(record.key, offset, read.cleaned_below):
            return []
        if history.is_superseded_by_disowned(record.key, offset):
            history.excused += 1
            return []
        if record.value is None:
            first = present.get(record.key, offset)
            if first < offset and not read.is_slow:
                text = f"{record.key!r}: its tombstone at offset {offset} is gone, and its value at offset {first} is still read"
                return [Violation("came back", text, offset)]
            return []
    text = f"offset {offset}: {_short(record)} is missing, and nothing up to {read.cleaned_below} supersedes it"
    return [Violation("lost", text, offset)]


def _short(record: SentRecord) -> str:
    value = "tombstone" if record.value is None else repr(record.value)[:24]
    return f"{record.key!r} = {value} ({record.identity!r})"


def _insert(offsets: list[int], offset: int) -> None:
    """Insert in order; offsets are acknowledged almost in order."""
    at = len(offsets)
    while at and offsets[at - 1] > offset:
        at -= 1
    offsets.insert(at, offset)
