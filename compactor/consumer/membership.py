"""A consumer's part in its group: the partitions that it was given, and the offsets that it has stored and committed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compactor.consumer.group import GroupClient, GroupOffset
from compactor.consumer.messages import Place
from compactor.errors import StoreError
from compactor.model.ids import TopicPartition

_log = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, GroupOffset]


@dataclass(frozen=True)
class CommitOptions:
    """Rules for committing offsets without a call of ``commit``.

    auto_commit: commit stored offsets every ``interval_s`` seconds, on revocation and on ``close``.
    auto_store: store the offset after each record that was returned, when the consumer is called the next time.
    """

    auto_commit: bool = True
    interval_s: float = 5.0
    auto_store: bool = True


@dataclass
class CommitLedger:
    """Offsets of the partitions that a member holds.

    stored: offsets to commit.
    requested: offsets that a commit was sent for, or that were committed before.
    confirmed: offsets of which it is known that they are committed.
    """

    stored: dict[TopicPartition, GroupOffset] = field(default_factory=dict)
    requested: dict[TopicPartition, GroupOffset] = field(default_factory=dict)
    confirmed: dict[TopicPartition, GroupOffset] = field(default_factory=dict)

    def begin_at(self, offsets: Offsets) -> None:
        """Record the offsets at which partitions begin. Only other offsets need to be committed."""
        self.forget(offsets)
        self.requested.update(offsets)
        self.confirmed.update(offsets)

    def forget(self, names: Iterable[TopicPartition]) -> None:
        """Remove the offsets of partitions that this member has given up."""
        for name in list(names):
            for known in (self.stored, self.requested, self.confirmed):
                known.pop(name, None)

    def to_request(self) -> Offsets:
        """Return the offsets to commit for which no commit request was sent yet."""
        return {name: at for name, at in self.stored.items() if self.requested.get(name) != at}

    def to_confirm(self, names: Collection[TopicPartition]) -> Offsets:
        """Return the offsets to commit of these partitions for which no commit is known to have succeeded."""
        return {name: at for name, at in self.stored.items() if name in names and self.confirmed.get(name) != at}


@dataclass(frozen=True)
class RebalanceCallbacks:
    """Functions of the application that are called when a rebalance adds or removes partitions.

    Each receives the consumer and the positions of these partitions.
    """

    on_assign: Callable[[Any, list[Place]], None] | None = None
    on_revoke: Callable[[Any, list[Place]], None] | None = None
    on_lost: Callable[[Any, list[Place]], None] | None = None


@dataclass(frozen=True)
class ConsumerHooks:
    """Functions of a consumer that its membership in a group (Membership) calls.

    consumer: argument of the application's callbacks.
    offsets: returns the positions of assigned partitions, after the last record that the application has.
    discard: drops queued records of partitions, and stops reading them.
    release: removes partitions from the consumer, with their positions.
    """

    consumer: Any
    offsets: Callable[[], Offsets]
    discard: Callable[[Collection[TopicPartition]], None]
    release: Callable[[Collection[TopicPartition]], None]


class Membership:
    """RebalanceListener of a consumer: commits what was returned before partitions are given up.

    Partitions that were added wait in ``added`` until the consumer has found out where they begin.
    """

    def __init__(self, member: GroupClient, options: CommitOptions, hooks: ConsumerHooks) -> None:
        self._member = member
        self._options = options
        self._hooks = hooks
        self._callbacks = RebalanceCallbacks()
        self._ledger = CommitLedger()
        self._next_commit_s = time.monotonic() + options.interval_s
        self.added: list[TopicPartition] = []

    # ---- the group -----------------------------------------------------------------------------------------------------------

    def subscribe(self, topics: Sequence[str], callbacks: RebalanceCallbacks) -> None:
        """Join the group for these topics."""
        self._callbacks = callbacks
        self._member.subscribe(topics, self)

    def unsubscribe(self) -> None:
        """Leave the group, after giving up all partitions."""
        self._member.unsubscribe()

    def poll(self) -> Sequence[Any]:
        """Handle rebalances, commit what is due, and return messages with errors."""
        errors = self._member.poll()
        if self._options.auto_commit and time.monotonic() >= self._next_commit_s:
            self._next_commit_s = time.monotonic() + self._options.interval_s
            self._store_returned()
            self._send_commit(self._ledger.to_request(), wait=False)
        return errors

    def start_places(self) -> list[Place]:
        """Return where the added partitions begin: at their committed offsets, or without an offset if the group has none."""
        committed = self._member.committed(self.added)
        return [Place(*name, *committed[name]) if name in committed else Place(*name) for name in self.added]

    def report_added(self, places: list[Place]) -> None:
        """Call the application's callback for partitions that were added."""
        if self._callbacks.on_assign is not None:
            self._callbacks.on_assign(self._hooks.consumer, places)

    def begin_at(self, offsets: Offsets) -> None:
        """Record the offsets at which partitions begin, so that only other offsets are committed later."""
        self._ledger.begin_at(offsets)

    def close(self) -> None:
        """Commit the offsets of records that were returned, if auto-commit is on, and leave the group."""
        try:
            self._commit_before_giving_up(self._hooks.offsets())
        finally:
            self._member.close()

    def add_partitions(self, names: Sequence[TopicPartition]) -> None:
        self.added += names

    def revoke_partitions(self, names: Sequence[TopicPartition]) -> None:
        try:
            self._hooks.discard(names)
            self._commit_before_giving_up(names)
            if self._callbacks.on_revoke is not None:
                self._callbacks.on_revoke(self._hooks.consumer, self._places(names))
        finally:
            self._give_up(names)

    def lose_partitions(self, names: Sequence[TopicPartition]) -> None:
        try:
            self._hooks.discard(names)
            callback = self._callbacks.on_lost or self._callbacks.on_revoke
            if callback is not None:
                callback(self._hooks.consumer, self._places(names))
        finally:
            self._give_up(names)

    def _places(self, names: Sequence[TopicPartition]) -> list[Place]:
        at = self._hooks.offsets()
        return [Place(*name, *at[name]) if name in at else Place(*name) for name in names]

    def _give_up(self, names: Collection[TopicPartition]) -> None:
        self.added = [name for name in self.added if name not in names]
        self._ledger.forget(names)
        self._hooks.release(names)

    # ---- offsets -------------------------------------------------------------------------------------------------------------

    def store(self, offsets: Offsets) -> None:
        """Store offsets to be committed."""
        self._ledger.stored.update(offsets)

    def commit(self, offsets: Offsets | None, *, wait: bool) -> Offsets:
        """Commit these offsets, by default all stored ones. Return them. Raises Unavailable, Refused."""
        if offsets is None:
            self._store_returned()
            offsets = self._ledger.to_confirm(self._ledger.stored)
        self._send_commit(offsets, wait=wait)
        return offsets

    def committed(self, names: Collection[TopicPartition]) -> Offsets:
        """Return the offsets that the group has committed, of those partitions that have one."""
        return self._member.committed(names)

    def _store_returned(self) -> None:
        if self._options.auto_store:
            begun = self._ledger.confirmed
            self._ledger.stored.update({name: at for name, at in self._hooks.offsets().items() if begun.get(name) != at})

    def _send_commit(self, offsets: Offsets, *, wait: bool) -> None:
        if not offsets:
            return
        self._member.commit(offsets, wait=wait)
        self._ledger.requested.update(offsets)
        if wait:
            self._ledger.confirmed.update(offsets)

    def _commit_before_giving_up(self, names: Collection[TopicPartition]) -> None:
        """Commit before partitions are given up. If this fails, their next reader reads some records again."""
        if not self._options.auto_commit:
            return
        self._store_returned()
        try:
            self._send_commit(self._ledger.to_confirm(names), wait=True)
        except StoreError as error:
            _log.warning("offsets of %d partitions were not committed before they were given up: %s", len(names), error)
