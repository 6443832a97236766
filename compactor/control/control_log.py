"""Numbered log of records in an object store: append by create-if-absent, fold (replay to a state), snapshot, and removal of old slots.

  <prefix>/log/<slot>.json         one record each, slots from 1 without gaps
  <prefix>/snapshot/<slot>.json    the folded state up to and including that slot
  <prefix>/boundary/<n>.json       numbered from 1: "slots <= B may be gone"; never overwritten, never deleted

The rules (a randomised search found a counterexample for each rule that is left out):

1. A create that failed may still take effect later, so an empty slot proves nothing. The store's adapter retries the same slot, or another
   record takes it. A create that was refused may be this process's own, whose answer was lost. A slot belongs to a process only if
   incarnation *and* attempt are equal.
2. A process that slept can create a deleted slot again. The boundary is therefore read **after** the last GET of a fold and after each
   successful create. If it lies above the slot where the fold began, some of the records read may be such late records: the fold is
   discarded and restarted from the snapshot. For an append this means *answer unknown*, and the new fold shows whether the record counts.
3. An absent slot is the tail of the log, or an object that was lost. Folding cannot tell the two apart. ``floor`` is a slot that the log is
   known to have had, according to the tier-wide log; a fold that ends below it is refused. ``refresh_and_check_gaps`` finds objects after a
   gap.
4. Order: snapshot created and read back < boundary created and read back < old slots and older snapshots deleted. Boundaries are numbered
   without gaps, each created only after the one before was seen, so that the last one is the highest and is found without a LIST.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from compactor.control import records
from compactor.control.records import BadControlRecord, ControlRecord
from compactor.control.state import ControlLogState
from compactor.errors import AlreadyExists, NotFound, Unavailable
from compactor.model.segment import StrictFrozenModel
from compactor.storage.port import ObjectStore

FOLD_ATTEMPTS = 6
"""Maximum number of restarts of a fold whose snapshot another process deleted meanwhile."""
CUT_EVERY = 64
"""Number of slots after which a snapshot is written, so that opening a log reads at most about this many records, one after the other."""
SLOT_KINDS = ("boundary", "log", "snapshot")
PAGE = 1000
"""Number of keys that a store returns per LIST request."""
_NUMBERED = re.compile(r"\d{20}\.json")


S = TypeVar("S", bound=ControlLogState)
Body = Any


class LogDeletionBoundary(StrictFrozenModel):
    """Statement that the records up to and including ``slot`` may have been deleted, because a snapshot replaces them. Numbered from 1."""

    version: int
    log: str
    number: int
    slot: int


class StateSnapshot(StrictFrozenModel, Generic[S]):
    """Stored state of a control log after the records up to and including ``state.slot``."""

    version: int
    log: str
    state: S


class SlotContention(Exception):
    """Raised if an append has lost the next slot to other processes more often than its caller allows."""


class StateIdentity(StrictFrozenModel):
    """Identity of a state within its control log, by which a state stored elsewhere is known to be of this log.

    boundary: the highest boundary that was known when the state was computed.
    incarnation, attempt: of the writer of the last record; ``incarnation`` is empty if the state is exactly the boundary's snapshot.
    """

    boundary: LogDeletionBoundary
    incarnation: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class ControlLogFormat(Generic[S]):
    """Kind of control log.

    with_store_times: function (state, slot -> milliseconds) -> state that contains the store's modification time of each record to which it
        refers. Called before these records may be deleted.
    """

    record: type[ControlRecord[Any]]
    snapshot: type[StateSnapshot[S]]
    apply: Callable[[S, ControlRecord[Any]], S]
    with_store_times: Callable[[S, Callable[[int], int]], S]


class ControlLog(Generic[S]):
    """Access of one process to one control log, with the folded state. Not thread-safe.

    Reading methods raise BadControlRecord if an object is corrupt or in the wrong place, and StoreError if the store fails.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        name: str,
        empty_state: S,
        log_format: ControlLogFormat[S],
        *,
        incarnation: str,
        clock_ms: Callable[[], int],
        min_slot: int = 0,
        convert_to_reader_state: Callable[[S], S] | None = None,
    ) -> None:
        """Makes no request.

        :param incarnation: random id, used by no other instance.
        :param min_slot: slot that the log is known to have had; a fold that ends below it is refused. 0 if none is known.
        :param convert_to_reader_state: folded state -> state for readers (``state``).
        :param clock_ms: this machine's clock, stored in records for people only.
        """
        self.store = store
        self.floor = min_slot
        self.prefix = prefix
        self.name = name
        self.incarnation = incarnation
        self._form = log_format
        self._empty = empty_state
        self._clock_ms = clock_ms
        self._view = convert_to_reader_state
        self._state: S | None = None
        self._last: tuple[str, int] | None = None
        self._kept: tuple[S, StateIdentity] | None = None
        self._attempt = 0
        self._boundary = self._nothing = LogDeletionBoundary(version=records.VERSION, log=name, number=0, slot=0)
        self.diverged = False
        """Whether a kept state was of another log (or of a later copy of this one) and was thrown away."""

    @property
    def state(self) -> S:
        return self._reader_state(self._folded_state)

    @property
    def _folded_state(self) -> S:
        """Folded state, without the change made for readers. Reads the log now if it was not read yet."""
        if self._state is not None:
            return self._state
        if not self._adopt_cached_state():
            self._reset_to_snapshot()
        return self._fold_to_end(None)

    def _reader_state(self, state: S) -> S:
        return state if self._view is None else self._view(state)

    def continue_from_cached_state(self, state: S, identity: StateIdentity | None = None) -> None:
        """With ``identity`` the state may come from another process: the next read first checks that the log still has the record which the
        identity names.
        """
        self._state, self._kept = (state, None) if identity is None else (None, (state, identity))
        self._last = None

    def state_identity(self) -> StateIdentity | None:
        """Return None if the log is empty or the writer of its last record is not known."""
        state = self.state
        if self._boundary.slot == state.slot:
            return StateIdentity(boundary=self._boundary) if state.slot else None
        return StateIdentity(boundary=self._boundary, incarnation=self._last[0], attempt=self._last[1]) if self._last else None

    def control_record_object_key(self, slot: int) -> str:
        return f"{self.prefix}/log/{slot:020d}.json"

    def build_record_to_append(self, body: Body) -> ControlRecord[Any]:
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
        if self._state is None and not self._adopt_cached_state():
            self._reset_to_snapshot()
        self._fold_to_end(None)
        return self.state

    def refresh_and_check_gaps(self) -> S:
        """Read the log to its end, and raise BadControlRecord if LIST shows an object after the end: reading alone takes a gap for the end.
        Called before irreversible decisions.
        """
        beyond = self._last_listed_keys()
        if beyond:
            self.refresh()
        for kind, key in beyond.items():
            if key > self._last_folded_key(kind):
                cause = f"an object before it is missing: what can be read ends at {self._last_folded_key(kind)}"
                hint = "Nothing was changed. Restore the missing objects from the store's versions or a backup"
                raise BadControlRecord(cause, segment=f"{self.store.url}/{key}", hint=hint)
        return self.state

    def _last_listed_keys(self) -> dict[str, str]:
        """Return the last listed key after the present state, by kind of object."""
        last = {kind: self._last_folded_key(kind) for kind in SLOT_KINDS}
        keys = [info.key for info in islice(self.store.list(f"{self.prefix}/", after=min(last.values())), PAGE)]
        if len(keys) == PAGE:  # scratch and sidecars of a large partition
            keys += [info.key for kind in SLOT_KINDS for info in self.store.list(f"{self.prefix}/{kind}/", after=last[kind])]
        found: dict[str, str] = {}
        for key in keys:
            kind, _, name = key.removeprefix(f"{self.prefix}/").partition("/")
            if kind in last and key > last[kind] and _NUMBERED.fullmatch(name):
                found[kind] = max(key, found.get(kind, ""))
        return found

    def _last_folded_key(self, object_kind: str) -> str:
        number = self._boundary.number if object_kind == "boundary" else self.state.slot
        return f"{self.prefix}/{object_kind}/{number:020d}.json"

    def reload_from_snapshot(self) -> S:
        """Read the log again from its snapshot, which has the modification times of log records that are deleted by now."""
        self._reset_to_snapshot()
        self._fold_to_end(None)
        return self.state

    def read_history(self) -> tuple[S, list[tuple[ControlRecord[Any], S]]]:
        """Return the state before the oldest record that the log still has, and each record with the state after it."""
        while True:
            self._reset_to_snapshot()
            base = state = self._folded_state
            steps: list[tuple[ControlRecord[Any], S]] = []
            for record in self._iterate_records_after(base.slot):
                state = self._form.apply(state, record)
                steps.append((record, state))
            if self._read_boundary().slot <= base.slot:
                self._require_log_not_shortened(state)
                self._state = state
                return base, steps

    def has_new_records(self) -> bool:
        state, mark = self.state, self.state_identity()
        if mark is None:
            return self._read_object(self.control_record_object_key(state.slot + 1)) is not None or self._read_boundary().slot > state.slot
        if not self.has_changed_since(state.slot, mark):
            return False
        tied = self.contains_state(state.slot, mark)
        # The log was cut, or replaced by an older copy: the next read starts over from the snapshot.
        if not tied:
            self._state, self._last, self._boundary = None, None, self._nothing
            self.diverged = tied is False
        return True

    def has_changed_since(self, slot: int, identity: StateIdentity) -> bool:
        """Return True, too, if the log no longer has the record that ``identity`` names."""
        self._boundary = identity.boundary
        if self.floor > slot or not self.contains_state(slot, identity):
            return True
        # Where the record still stands nobody has cut beyond it; a snapshot's own slot is gone, so that the boundary has to be asked.
        return self._read_object(self.control_record_object_key(slot + 1)) is not None or (
            not identity.incarnation and self._read_boundary().slot > slot
        )

    def has_min_new_records(self, min_new_record_count: int) -> bool:
        """Makes one request."""
        return self._read_object(self.control_record_object_key(self.state.slot + min_new_record_count)) is not None

    def confirmed_slot(self) -> int:
        """Return the slot of the present state after reading its record back from the store; 0 if it is not there."""
        state, mark = self.state, self.state_identity()
        return state.slot if mark is not None and self.contains_state(state.slot, mark) else 0

    def append_due_records(self, decide_record_to_append: Callable[[S], Body | None], *, max_lost_slots: int = 0) -> S:
        """Append the record that ``decide_record_to_append`` returns, until it returns None. Return the state at which it did.

        ``decide_record_to_append`` is called again after every append and whenever the log has grown. It must tell from the state whether
        its record has taken effect, because nothing else proves that. It may raise to give up.

        After a StoreError the last record may or may not be in the log, so the caller must not change anything that depends on it.

        :param max_lost_slots: slots lost to other writers after which SlotContention is raised; 0 for no limit.
        """
        lost = 0
        while True:
            state = self._folded_state
            body = decide_record_to_append(state)
            if body is None:
                return state
            self._attempt += 1
            record = self.build_record_to_append(body)
            try:
                self.store.create(self.control_record_object_key(record.slot), records.append_checksum(record.model_dump_json().encode()))
            except AlreadyExists:
                pass
            else:
                self._fold_to_end(record)
                continue
            stored = self._read_record_at_slot(record.slot)
            if stored is not None and is_same_attempt(stored, record):
                self._fold_to_end(record)
            elif stored is not None:
                self._fold_to_end(None)
                lost += 1
                if lost == max_lost_slots:
                    raise SlotContention

    def snapshot_and_cut(self, min_new_records: int = CUT_EVERY) -> bool:
        """Write a snapshot and a boundary, and delete the records that the snapshot includes, if at least ``min_new_records`` follow the
        last boundary. Return whether records were deleted.

        Any process may do this at any time, also several at once.
        """
        if self._folded_state.slot - self._boundary.slot < max(min_new_records, 1):
            return False
        self.refresh()
        state, known = self._folded_state, self._boundary
        if state.slot - known.slot < max(min_new_records, 1):
            return False
        try:
            timed = self._form.with_store_times(state, lambda slot: self.store.head(self.control_record_object_key(slot)).modified_ms)
        except NotFound:
            return False  # somebody else has cut meanwhile
        if self._read_boundary() != known or not self._create_and_verify_snapshot(timed):
            return False
        self._create_boundary(state.slot)
        self._delete_below_boundary()
        self._state = timed
        return True

    def restart_as_empty_log(self, create_empty_state: Callable[[int], S]) -> S:
        """Abandon a log that is damaged for good, by a snapshot of an empty state above every slot that was ever used, so that records
        which reappear below it have no effect. Raises Unavailable if the snapshot cannot be read back.
        """
        self._read_boundary()
        listed = [key for kind in ("log", "snapshot") for key in (self._highest_listed_object_number(kind),) if key]
        state = create_empty_state(max([self.floor, self._boundary.slot, *listed]) + 1)
        if not self._create_and_verify_snapshot(state):
            raise Unavailable(f"{self.store.url}/{self._snapshot_object_key(state.slot)} cannot be read back", hint="Try again")
        self._create_boundary(state.slot)
        self._delete_below_boundary()
        return self.reload_from_snapshot()

    def _highest_listed_object_number(self, object_kind: str) -> int:
        prefix = f"{self.prefix}/{object_kind}/"
        names = (info.key.removeprefix(prefix) for info in self.store.list(prefix))
        return max((int(name[:20]) for name in names if _NUMBERED.fullmatch(name)), default=0)

    def _fold_to_end(self, appended: ControlRecord[Any] | None) -> S:
        """Read the log to its end, or apply ``appended``, the record that was just created. If the boundary shows that unread records were
        deleted meanwhile, read everything again from the snapshot.
        """
        while True:
            base = self._folded_state
            state, last = base, self._last
            for record in [appended] if appended else self._iterate_records_after(base.slot):
                state, last = self._form.apply(state, record), (record.incarnation, record.attempt)
            if self._read_boundary().slot <= base.slot:
                self._require_log_not_shortened(state)
                self._state, self._last = state, last
                return state
            self._reset_to_snapshot()
            appended = None

    def _require_log_not_shortened(self, state: S) -> None:
        if state.slot < self.floor:
            cause = f"{self.name} ends at slot {state.slot}, the catalog has seen its slot {self.floor}: the records between are missing"
            hint = (
                "Nothing was changed. Restore the missing objects of this control log from the store's versions or a backup; "
                f"if they are lost for good, `topics delete {self.name}` takes the partition out of the tier"
            )
            raise BadControlRecord(cause, segment=f"{self.store.url}/{self.control_record_object_key(state.slot + 1)}", hint=hint)

    def contains_state(self, slot: int, identity: StateIdentity) -> bool | None:
        """Return whether the log still has the record or boundary of an identity: False if another one is in its place, None if it no
        longer exists, because it was deleted after a snapshot or lost.
        """
        if not identity.incarnation:
            return self._read_control_object(LogDeletionBoundary, self._boundary_object_key(identity.boundary.number)) == identity.boundary
        record = self._read_record_at_slot(slot)
        return None if record is None else (record.incarnation, record.attempt) == (identity.incarnation, identity.attempt)

    def _iterate_records_after(self, slot: int) -> Iterator[ControlRecord[Any]]:
        while (record := self._read_record_at_slot(slot + 1)) is not None:
            yield record
            slot = record.slot

    def _adopt_cached_state(self) -> bool:
        """Return False if there is no cached state, or if the log no longer holds its last record."""
        if self._kept is None:
            return False
        (state, mark), self._kept = self._kept, None
        found = self.contains_state(state.slot, mark)
        self.diverged = found is False  # a slot that is gone was cut
        if found:
            self._state, self._boundary = state, mark.boundary
            self._last = (mark.incarnation, mark.attempt) if mark.incarnation else None
        return bool(found)

    def _reset_to_snapshot(self) -> None:
        self._last = None
        boundary = self._boundary
        # A log of few records probably has no boundary, so no request is made. The caller reads the boundary after the records, and starts
        # over if there is one.
        if boundary.slot == 0 and 0 < self.floor < CUT_EVERY:
            self._state = self._empty
            return
        for _ in range(FOLD_ATTEMPTS):
            boundary = self._read_boundary()
            if boundary.slot == 0:
                self._state = self._empty
                return
            state = self.read_snapshot(boundary.slot)
            if state is not None:
                self._state = state
                return
        where = f"{self.store.url}/{self._snapshot_object_key(boundary.slot)}"
        raise BadControlRecord(f"the snapshot that boundary {boundary.number} names is missing", segment=where, hint="Restore it")

    def _read_record_at_slot(self, slot: int) -> ControlRecord[Any] | None:
        """Raise BadControlRecord if the object belongs to another slot or log."""
        key = self.control_record_object_key(slot)
        record = self._read_control_object(self._form.record, key)
        if record is not None and (record.slot != slot or record.log != self.name):
            cause = f"it is slot {record.slot} of {record.log}, in the place of slot {slot} of {self.name}"
            raise BadControlRecord(cause, segment=f"{self.store.url}/{key}", hint="Restore the object that belongs here")
        return record

    def _snapshot_object_key(self, slot: int) -> str:
        return f"{self.prefix}/snapshot/{slot:020d}.json"

    def read_snapshot(self, slot: int) -> S | None:
        """Raise BadControlRecord if the object belongs to another slot or log."""
        key = self._snapshot_object_key(slot)
        snapshot = self._read_control_object(self._form.snapshot, key)
        if snapshot is None:
            return None
        if snapshot.state.slot != slot or snapshot.log != self.name:
            cause = f"it is the snapshot of slot {snapshot.state.slot} of {snapshot.log}"
            raise BadControlRecord(cause, segment=f"{self.store.url}/{key}", hint="Restore the object that belongs here")
        return snapshot.state

    def _create_and_verify_snapshot(self, state: S) -> bool:
        """Return whether the snapshot can be read back. A snapshot that another process created at the same slot is equally valid."""
        snapshot = self._form.snapshot(version=records.VERSION, log=self.name, state=state)
        try:
            self.store.create(self._snapshot_object_key(state.slot), records.append_checksum(snapshot.model_dump_json().encode()))
        except (AlreadyExists, Unavailable):
            pass
        return self.read_snapshot(state.slot) is not None

    def _boundary_object_key(self, number: int) -> str:
        return f"{self.prefix}/boundary/{number:020d}.json"

    def _read_boundary(self) -> LogDeletionBoundary:
        """Makes one request if there is no new boundary."""
        known = self._boundary
        step = 1
        while (found := self._read_control_object(LogDeletionBoundary, self._boundary_object_key(known.number + step))) is not None:
            known, step = found, step * 2
        while step > 1:
            step //= 2
            found = self._read_control_object(LogDeletionBoundary, self._boundary_object_key(known.number + step))
            if found is not None:
                known = found
        self._boundary = known
        return known

    def _create_boundary(self, slot: int) -> None:
        number = self._boundary.number + 1
        boundary = LogDeletionBoundary(version=records.VERSION, log=self.name, number=number, slot=slot)
        try:
            self.store.create(self._boundary_object_key(number), records.append_checksum(boundary.model_dump_json().encode()))
        except (AlreadyExists, Unavailable):
            pass  # the highest boundary is read again before anything is deleted

    def _delete_below_boundary(self) -> None:
        """Read the highest boundary again, and delete what is below it, also records that a slow process wrote there later."""
        bound = self._read_boundary().slot
        for kind, beyond in (("log", bound + 1), ("snapshot", bound)):
            limit = f"{self.prefix}/{kind}/{beyond:020d}.json"
            keys: list[str] = []
            for info in self.store.list(f"{self.prefix}/{kind}/"):
                if info.key >= limit:
                    break
                keys.append(info.key)
            self.store.delete(keys)

    def _read_control_object(self, value_type: type[records.ValueT], key: str) -> records.ValueT | None:
        data = self._read_object(key)
        if data is None:
            return None
        where = f"{self.store.url}/{key}"
        try:
            return records.decode_checksummed_json(value_type, data, where)
        except BadControlRecord:  # fetched once more before it is refused
            again = self._read_object(key)
            return records.decode_checksummed_json(value_type, data if again is None else again, where)

    def _read_object(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except NotFound:
            return None


def is_same_attempt(stored: ControlRecord[Any], attempted: ControlRecord[Any]) -> bool:
    return stored.incarnation == attempted.incarnation and stored.attempt == attempted.attempt
