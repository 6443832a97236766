"""A numbered log in an object store: appends by create-if-absent, a fold of what is there, and the removal of what is old.

    <prefix>/log/<slot>.json         one record each, slots from 1 without gaps
    <prefix>/snapshot/<slot>.json    the folded state up to and including that slot
    <prefix>/boundary/<n>.json       numbered from 1: "slots <= B may be gone"; never overwritten, never deleted

Why each rule is here (every one closes a hole that a randomised search has found):

* A create that failed may still land, so an empty slot proves nothing: the same slot is tried again (by the store's adapter:
  nobody else repeats a request), or another record takes it. A create that was refused may be our own, whose answer was lost:
  a slot is ours only if incarnation *and* attempt are equal.
* A deleted slot can be created again by a process that slept. Therefore the boundary is read **after** the last GET of a
  fold and after each successful create. If it lies above where the fold began, some of what was read may be such a late
  record, and the fold is thrown away and restarted from the snapshot; for an append this means *answer unknown*, and what
  became of it is read from the new fold.
* A slot that is absent is the tail, or was lost by somebody else's doing. Folding cannot tell: ``floor`` is a slot that the log is
  known to have had, by what the tier-wide log says, and a fold that ends below it is refused. ``check_whole`` finds what is left
  behind a gap.
* Snapshot created and read back < boundary created and read back < old slots and older snapshots deleted. Boundaries are
  numbered without gaps and only created after the one before, so the last one is the highest and is found without a LIST.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from compactor.control import records
from compactor.control.records import BadControlRecord, Record
from compactor.control.state import LogState
from compactor.errors import AlreadyExists, NotFound, Unavailable
from compactor.model.base import Value
from compactor.storage.port import ObjectStore

TRIES = 6
"""How often a fold is begun again from a snapshot that was cut away meanwhile."""
CUT_EVERY = 64
"""Slots after which a snapshot pays: starting up then reads at most about this many records, one after the other."""
DELETE_BATCH = 1000
KINDS = ("boundary", "log", "snapshot")
PAGE = 1000
"""Keys that a store lists at once."""
_NUMBERED = re.compile(r"\d{20}\.json")


S = TypeVar("S", bound=LogState)
Body = Any


class Boundary(Value):
    """Slots up to and including ``slot`` may be gone; snapshot ``slot`` stands in for them."""

    version: int
    log: str
    number: int
    slot: int


class Snapshot(Value, Generic[S]):
    version: int
    log: str
    state: S


class Crowded(Exception):
    """Others have taken the next slot again and again, and what was to be appended can be said in another way."""


class Mark(Value):
    """What ties a folded state to its log: the record that it ends with, or the boundary whose snapshot it is (no incarnation).

    ``boundary`` is the highest that was known to the fold. With it a state that was kept elsewhere is told from one of another log,
    and folding on needs no search for the boundary.
    """

    boundary: Boundary
    incarnation: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class LogFormat(Generic[S]):
    """What distinguishes one kind of control log from another.

    ``apply`` is the pure fold of one record. ``with_times`` fills in the store's modification times of slots that the state
    still refers to; it runs before those slots may be deleted and is given a function slot -> milliseconds.
    """

    record: type[Record[Any]]
    snapshot: type[Snapshot[S]]
    apply: Callable[[S, Record[Any]], S]
    with_times: Callable[[S, Callable[[int], int]], S]


class ControlLog(Generic[S]):
    """One process's view of one control log. Not for several threads at once; one incarnation each.

    Reading methods raise BadControlRecord for an object that cannot be believed and StoreError for a store that fails.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        name: str,
        empty: S,
        form: LogFormat[S],
        *,
        incarnation: str,
        clock_ms: Callable[[], int],
        floor: int = 0,
        view: Callable[[S], S] | None = None,
    ) -> None:
        """``view``: what ``state`` makes of the folded state for whoever only reads. ``transact`` goes by the fold itself."""
        self.store = store
        self.floor = floor
        self.prefix = prefix
        self.name = name
        self.incarnation = incarnation
        self._form = form
        self._empty = empty
        self._clock_ms = clock_ms
        self._view = view
        self._state: S | None = None
        self._last: tuple[str, int] | None = None
        self._kept: tuple[S, Mark] | None = None
        self._attempt = 0
        self._boundary = self._nothing = Boundary(version=records.VERSION, log=name, number=0, slot=0)
        self.diverged = False
        """Whether a kept state was of another log (or of a later copy of this one) and was thrown away."""

    @property
    def state(self) -> S:
        """As last folded; call ``refresh`` first."""
        return self._seen(self._folded)

    @property
    def _folded(self) -> S:
        if self._state is not None:
            return self._state
        if not self._take_kept():
            self._restart()
        return self._settle(None)

    def _seen(self, state: S) -> S:
        return state if self._view is None else self._view(state)

    def load(self, state: S, mark: Mark | None = None) -> None:
        """Begins from a state folded earlier. Where a boundary has passed it, the next fold starts over.

        With its ``mark`` the state need not be of this process: the next fold asks whether the log still has what ties it there.
        """
        self._state, self._kept = (state, None) if mark is None else (None, (state, mark))
        self._last = None

    def mark(self) -> Mark | None:
        """What ``load`` wants to know of the present state in another process; None where nothing ties it to the log."""
        state = self.state
        if self._boundary.slot == state.slot:
            return Mark(boundary=self._boundary) if state.slot else None
        return Mark(boundary=self._boundary, incarnation=self._last[0], attempt=self._last[1]) if self._last else None

    def record_key(self, slot: int) -> str:
        return f"{self.prefix}/log/{slot:020d}.json"

    def candidate(self, body: Body) -> Record[Any]:
        """The record that an append of ``body`` would make now: what the rules are asked about before the append."""
        return self._form.record(
            version=records.VERSION,
            log=self.name,
            slot=self.state.slot + 1,
            incarnation=self.incarnation,
            attempt=self._attempt,
            at_ms=self._clock_ms(),
            body=body,
        )

    def refresh(self) -> S:
        """Folds on to the tail and returns the state."""
        if self._state is None and not self._take_kept():
            self._restart()
        self._settle(None)
        return self.state

    def check_whole(self) -> S:
        """Folds on to the tail by way of a LIST, and returns the state. Raises BadControlRecord where an object is missing.

        Nobody leaves a number out, so what is listed is within what a later fold reaches, unless something before it was lost: a fold
        takes the gap for the tail. Asked before anything is decided that could not be taken back, and where no record is known at all.
        A state that was folded before is the tail's, where nothing is listed behind it.
        """
        beyond = self._beyond()
        if beyond:
            self.refresh()
        for kind, key in beyond.items():
            if key > self._last_key(kind):
                cause = f"an object before it is missing: what can be read ends at {self._last_key(kind)}"
                hint = "Nothing was changed. Restore the missing objects from the store's versions or a backup"
                raise BadControlRecord(cause, segment=f"{self.store.url}/{key}", hint=hint)
        return self.state

    def _beyond(self) -> dict[str, str]:
        """By kind the last key that is listed behind what the present state knows. One page, unless other objects fill it."""
        last = {kind: self._last_key(kind) for kind in KINDS}
        keys = [info.key for info in islice(self.store.list(f"{self.prefix}/", after=min(last.values())), PAGE)]
        if len(keys) == PAGE:  # scratch and sidecars of a large partition
            keys += [info.key for kind in KINDS for info in self.store.list(f"{self.prefix}/{kind}/", after=last[kind])]
        found: dict[str, str] = {}
        for key in keys:
            kind, _, name = key.removeprefix(f"{self.prefix}/").partition("/")
            if kind in last and key > last[kind] and _NUMBERED.fullmatch(name):
                found[kind] = max(key, found.get(kind, ""))
        return found

    def _last_key(self, kind: str) -> str:
        number = self._boundary.number if kind == "boundary" else self.state.slot
        return f"{self.prefix}/{kind}/{number:020d}.json"

    def reload(self) -> S:
        """Folds again from the snapshot: it knows the times of slots that are gone, which a state folded before does not."""
        self._restart()
        self._settle(None)
        return self.state

    def history(self) -> tuple[S, list[tuple[Record[Any], S]]]:
        """For people: the state that the log still begins from, and each record behind it with the state after it. Reads only."""
        while True:
            self._restart()
            base = state = self._folded
            steps: list[tuple[Record[Any], S]] = []
            for record in self._behind(base.slot):
                state = self._form.apply(state, record)
                steps.append((record, state))
            if self._read_boundary().slot <= base.slot:
                self._check_floor(state)
                self._state = state
                return base, steps

    def poll(self) -> bool:
        """Whether there is anything that the last fold has not seen; two requests where there is nothing.

        Where the log was set back meanwhile, the next fold starts over.
        """
        state, mark = self.state, self.mark()
        if mark is None:
            return self._get(self.record_key(state.slot + 1)) is not None or self._read_boundary().slot > state.slot
        if not self.poll_from(state.slot, mark):
            return False
        tied = self.ties(state.slot, mark)
        if not tied:
            self._state, self._last, self._boundary = None, None, self._nothing
            self.diverged = tied is False
        return True

    def poll_from(self, slot: int, mark: Mark) -> bool:
        """The same for a fold that was made elsewhere, up to and including ``slot``. A log that it is not tied to any more is news, too."""
        self._boundary = mark.boundary
        if self.floor > slot or not self.ties(slot, mark):
            return True
        # Where the record still stands nobody has cut beyond it; a snapshot's own slot is gone, so that the boundary has to be asked.
        return self._get(self.record_key(slot + 1)) is not None or (not mark.incarnation and self._read_boundary().slot > slot)

    def is_far_behind(self, slots: int) -> bool:
        """Whether so many slots have come since the present state: to fold them one by one would take as many requests."""
        return self._get(self.record_key(self.state.slot + slots)) is not None

    def reached(self) -> int:
        """The slot that the present state ends with, once it was read back from the store; 0 where it is not there to be read."""
        state, mark = self.state, self.mark()
        return state.slot if mark is not None and self.ties(state.slot, mark) else 0

    def transact(self, decide: Callable[[S], Body | None], *, most_lost: int = 0) -> S:
        """Appends what ``decide`` asks for until it asks for nothing; returns the folded state in which it did.

        ``decide`` is asked again after every append and whenever the log has grown, so it must see from the state whether
        its record has counted; that is the only way to know. It may raise to give up. After StoreError the last record may
        or may not be in the log: the caller changes nothing that depends on it.

        ``most_lost``: slots that may be lost to others before Crowded is raised; 0: any number.
        """
        lost = 0
        while True:
            state = self._folded
            body = decide(state)
            if body is None:
                return state
            self._attempt += 1
            record = self.candidate(body)
            try:
                self.store.create(self.record_key(record.slot), records.seal(record.model_dump_json().encode()))
            except AlreadyExists:
                pass
            else:
                self._settle(record)
                continue
            stored = self._read_slot(record.slot)
            if stored is not None and is_ours(stored, record):
                self._settle(record)
            elif stored is not None:
                self._settle(None)
                lost += 1
                if lost == most_lost:
                    raise Crowded

    def cut(self, minimum: int = CUT_EVERY) -> bool:
        """Snapshot, boundary, deletion; where at least ``minimum`` slots have come since the last boundary.

        Anybody may do this, at any time, in any number. Returns whether old slots were deleted. Whether it is time yet is asked of the
        present state first: who has made the log longer knows it.
        """
        if self._folded.slot - self._boundary.slot < max(minimum, 1):
            return False
        self.refresh()
        state, known = self._folded, self._boundary
        if state.slot - known.slot < max(minimum, 1):
            return False
        try:
            timed = self._form.with_times(state, lambda slot: self.store.head(self.record_key(slot)).modified_ms)
        except NotFound:
            return False  # somebody else has cut meanwhile
        if self._read_boundary() != known or not self._keep_snapshot(timed):
            return False
        self._create_boundary(state.slot)
        self._delete_old()
        self._state = timed
        return True

    def start_over(self, empty: Callable[[int], S]) -> S:
        """Gives up a log that is damaged for good: a snapshot of ``empty`` at a slot beyond everything that was ever there.

        Whatever is found again below it later, or written by a process that slept, does not count.
        """
        self._read_boundary()
        listed = [key for kind in ("log", "snapshot") for key in (self._highest(kind),) if key]
        state = empty(max([self.floor, self._boundary.slot, *listed]) + 1)
        if not self._keep_snapshot(state):
            raise Unavailable(f"{self.store.url}/{self._snapshot_key(state.slot)} cannot be read back", hint="Try again")
        self._create_boundary(state.slot)
        self._delete_old()
        return self.reload()

    def _highest(self, kind: str) -> int:
        prefix = f"{self.prefix}/{kind}/"
        names = (info.key.removeprefix(prefix) for info in self.store.list(prefix))
        return max((int(name[:20]) for name in names if _NUMBERED.fullmatch(name)), default=0)

    def _settle(self, appended: Record[Any] | None) -> S:
        """Folds on (from a record that was just created, or by GETs to the tail), then looks at the boundary."""
        while True:
            base = self._folded
            state, last = base, self._last
            for record in [appended] if appended else self._behind(base.slot):
                state, last = self._form.apply(state, record), (record.incarnation, record.attempt)
            if self._read_boundary().slot <= base.slot:
                self._check_floor(state)
                self._state, self._last = state, last
                return state
            self._restart()
            appended = None

    def _check_floor(self, state: S) -> None:
        """A log that ends below what it is known to have had was damaged or set back: nothing may be read from it or built on it."""
        if state.slot < self.floor:
            cause = (
                f"{self.name} ends at slot {state.slot}, and the tier-wide log has seen its slot {self.floor}: what came between is missing"
            )
            hint = (
                "Nothing was changed. Restore the missing objects of this control log from the store's versions or a backup; "
                f"if they are lost for good, `topics delete {self.name}` takes the partition out of the tier"
            )
            raise BadControlRecord(cause, segment=f"{self.store.url}/{self.record_key(state.slot + 1)}", hint=hint)

    def ties(self, slot: int, mark: Mark) -> bool | None:
        """Whether the log still has what this mark names; None where the record is gone, which a cut does as well as a loss."""
        if not mark.incarnation:
            return self._decode(Boundary, self._boundary_key(mark.boundary.number)) == mark.boundary
        record = self._read_slot(slot)
        return None if record is None else (record.incarnation, record.attempt) == (mark.incarnation, mark.attempt)

    def _behind(self, slot: int) -> Iterator[Record[Any]]:
        while (record := self._read_slot(slot + 1)) is not None:
            yield record
            slot = record.slot

    def _take_kept(self) -> bool:
        """Takes the state that was kept elsewhere, if the log still has what it ends with."""
        if self._kept is None:
            return False
        (state, mark), self._kept = self._kept, None
        found = self.ties(state.slot, mark)
        self.diverged = found is False  # a slot that is gone was cut
        if found:
            self._state, self._boundary = state, mark.boundary
            self._last = (mark.incarnation, mark.attempt) if mark.incarnation else None
        return bool(found)

    def _restart(self) -> None:
        """From the snapshot of the highest boundary, or from nothing.

        A log that is known to be short is begun from nothing without that question: it is asked after the fold in any case, and where
        the log was cut nevertheless, the fold starts over.
        """
        self._last = None
        boundary = self._boundary
        if boundary.slot == 0 and 0 < self.floor < CUT_EVERY:
            self._state = self._empty
            return
        for _ in range(TRIES):
            boundary = self._read_boundary()
            if boundary.slot == 0:
                self._state = self._empty
                return
            state = self.read_snapshot(boundary.slot)
            if state is not None:
                self._state = state
                return
        where = f"{self.store.url}/{self._snapshot_key(boundary.slot)}"
        raise BadControlRecord(f"the snapshot that boundary {boundary.number} names is missing", segment=where, hint="Restore it")

    def _read_slot(self, slot: int) -> Record[Any] | None:
        key = self.record_key(slot)
        record = self._decode(self._form.record, key)
        if record is not None and (record.slot != slot or record.log != self.name):
            cause = f"it is slot {record.slot} of {record.log}, in the place of slot {slot} of {self.name}"
            raise BadControlRecord(cause, segment=f"{self.store.url}/{key}", hint="Restore the object that belongs here")
        return record

    def _snapshot_key(self, slot: int) -> str:
        return f"{self.prefix}/snapshot/{slot:020d}.json"

    def read_snapshot(self, slot: int) -> S | None:
        """The snapshot of this slot; None where there is none."""
        key = self._snapshot_key(slot)
        snapshot = self._decode(self._form.snapshot, key)
        if snapshot is None:
            return None
        if snapshot.state.slot != slot or snapshot.log != self.name:
            cause = f"it is the snapshot of slot {snapshot.state.slot} of {snapshot.log}"
            raise BadControlRecord(cause, segment=f"{self.store.url}/{key}", hint="Restore the object that belongs here")
        return snapshot.state

    def _keep_snapshot(self, state: S) -> bool:
        """Creates it and reads it back; what another process wrote for the same slot is as good."""
        snapshot = self._form.snapshot(version=records.VERSION, log=self.name, state=state)
        try:
            self.store.create(self._snapshot_key(state.slot), records.seal(snapshot.model_dump_json().encode()))
        except (AlreadyExists, Unavailable):
            pass
        return self.read_snapshot(state.slot) is not None

    def _boundary_key(self, number: int) -> str:
        return f"{self.prefix}/boundary/{number:020d}.json"

    def _read_boundary(self) -> Boundary:
        """The highest boundary. One request where there is no new one; the first time a search by doubling and halving."""
        known = self._boundary
        step = 1
        while (found := self._decode(Boundary, self._boundary_key(known.number + step))) is not None:
            known, step = found, step * 2
        while step > 1:
            step //= 2
            found = self._decode(Boundary, self._boundary_key(known.number + step))
            if found is not None:
                known = found
        self._boundary = known
        return known

    def _create_boundary(self, slot: int) -> None:
        number = self._boundary.number + 1
        boundary = Boundary(version=records.VERSION, log=self.name, number=number, slot=slot)
        try:
            self.store.create(self._boundary_key(number), records.seal(boundary.model_dump_json().encode()))
        except (AlreadyExists, Unavailable):
            pass

    def _delete_old(self) -> None:
        """What the highest boundary (read back here) allows to go; includes what latecomers have left below it."""
        bound = self._read_boundary().slot
        for kind, beyond in (("log", bound + 1), ("snapshot", bound)):
            limit = f"{self.prefix}/{kind}/{beyond:020d}.json"
            keys: list[str] = []
            for info in self.store.list(f"{self.prefix}/{kind}/"):
                if info.key >= limit:
                    break
                keys.append(info.key)
            for start in range(0, len(keys), DELETE_BATCH):
                self.store.delete(keys[start : start + DELETE_BATCH])

    def _decode(self, kind: type[records.ValueT], key: str) -> records.ValueT | None:
        """The object at ``key``, None where there is none. One that cannot be read is fetched once more before it is refused."""
        data = self._get(key)
        if data is None:
            return None
        where = f"{self.store.url}/{key}"
        try:
            return records.decode(kind, data, where)
        except BadControlRecord:
            again = self._get(key)
            return records.decode(kind, data if again is None else again, where)

    def _get(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except NotFound:
            return None


def is_ours(stored: Record[Any], attempted: Record[Any]) -> bool:
    """Whether the record in a slot is the one that we tried to create there: our incarnation and this very attempt."""
    return stored.incarnation == attempted.incarnation and stored.attempt == attempted.attempt
