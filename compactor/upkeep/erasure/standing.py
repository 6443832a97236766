"""What a live segment has of a key, and what has to pass until it has not: the cleaner's rules, told of one key. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compactor.config import Cleaner
from compactor.control.state import PartitionState
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import assess
from compactor.upkeep.erasure.holders import Found
from compactor.views.search import Sighting

READ_ONLY = "its tier is only read: nothing is compacted there"


@dataclass(frozen=True)
class KeyStanding:
    """``movable``: a round that is forced now would free the segment of the key, or bring it a step nearer."""

    what: str
    waits_for: str
    until_ms: int | None = None
    movable: bool = False


@dataclass(frozen=True)
class KeyRules:
    """The partition as it is now. ``end``: offsets from there on are not cleaned; ``compacts``: whether anybody may compact it at all."""

    state: PartitionState
    cleaner: Cleaner
    now_ms: int
    end: int
    compacts: bool

    @staticmethod
    def of(state: PartitionState, cleaner: Cleaner, now_ms: int, *, compacts: bool) -> KeyRules:
        return KeyRules(state, cleaner, now_ms, assess(state, cleaner, now_ms, force=True).end, compacts)

    def standing(self, one: Found, latest: Sighting | None) -> KeyStanding:
        """:param latest: the newest record that counts for this key in the partition."""
        here = latest if latest is not None and latest.segment.id == one.segment.id else None
        if here is not None and not here.is_tombstone:
            return KeyStanding("value", "a tombstone of the key: this is its latest value")
        what = "tombstone" if here is not None else _word(one.newest)
        if not self.compacts:
            return KeyStanding(what, READ_ONLY)
        if bound := self._bound(one.segment):
            return KeyStanding(what, bound)
        if here is not None:
            return self._tombstone(here)
        if what == "undecided":
            return KeyStanding(what, "the end of its transaction, and a round after that")
        return KeyStanding(what, f"the next round{self._quarantine()}, and grace after it", movable=True)

    def _tombstone(self, here: Sighting) -> KeyStanding:
        after = f"a round{self._quarantine()}, and grace after it"
        if here.horizon_ms is None:
            more = f"a round, which gives it a delete horizon (delete_retention_ms, {self.cleaner.delete_retention_ms} ms ahead)"
            return KeyStanding("tombstone", f"{more}; then {after}", self.now_ms + self.cleaner.delete_retention_ms, movable=True)
        passed = here.horizon_ms <= self.now_ms
        text = "its delete horizon has passed; " if passed else "its delete horizon, so that slow readers see it; then "
        return KeyStanding("tombstone", text + after, None if passed else here.horizon_ms, movable=passed)

    def _bound(self, segment: RemoteLogSegmentMetadata) -> str:
        """Why no round touches this segment now, or nothing."""
        state = self.state
        if segment.start_offset < self.end:
            return ""
        if state.mirrored and segment.id == state.live[-1].id:
            return "the next segment of its partition: the newest one is the brokers', and nobody touches it"
        undecided = state.live[-1].open_txn_offset
        if 0 <= undecided <= segment.end_offset:
            return f"the end of the transaction that is open since offset {undecided}"
        return f"min_compaction_lag_ms ({self.cleaner.min_compaction_lag_ms} ms)"

    def _quarantine(self) -> str:
        why = self.state.quarantine
        return f" (the partition is quarantined: {why.reason})" if why else ""


def _word(newest: Sighting) -> str:
    return {"abort": "aborted", "open": "undecided"}.get(newest.outcome, "superseded")


def latest_of(found: list[Found]) -> Mapping[int, Sighting]:
    """By key: the newest record that counts. ``found``: newest segment first."""
    latest: dict[int, Sighting] = {}
    for one in found:
        if one.latest is not None:
            latest.setdefault(one.key, one.latest)
    return latest
