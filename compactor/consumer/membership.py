"""A consumer's part in its group: the partitions that it was given, and the offsets that it has stored and committed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compactor.consumer.group import ErrorMessage, GroupClient, OffsetWithLeaderEpoch
from compactor.consumer.messages import Place
from compactor.errors import StoreError
from compactor.model.ids import TopicPartition

_log = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, OffsetWithLeaderEpoch]


@dataclass(frozen=True)
class AutoCommitOptions:
    """Rules for committing offsets without a call of ``commit``.

    auto_commit: commit stored offsets every ``interval_s`` seconds, on revocation and on ``close``.
    auto_store: store the offset after each record that was returned, when the consumer is called the next time.
    """

    auto_commit: bool = True
    interval_s: float = 5.0
    auto_store: bool = True


@dataclass
class OffsetCommitTracker:
    """Offsets of the partitions that a group member holds, by state of their commit.

    stored: offsets to commit.
    requested: offsets for which a commit request was sent, or that the group had committed before this member got the partition.
    confirmed: offsets that are known to be committed.
    """

    stored: dict[TopicPartition, OffsetWithLeaderEpoch] = field(default_factory=dict)
    requested: dict[TopicPartition, OffsetWithLeaderEpoch] = field(default_factory=dict)
    confirmed: dict[TopicPartition, OffsetWithLeaderEpoch] = field(default_factory=dict)

    def record_start_offsets_as_committed(self, offsets: Offsets) -> None:
        """Record the offset at which reading of each partition starts, and treat it as committed, so that an offset is committed only after
        records were read.
        """
        self.remove_partitions(offsets)
        self.requested.update(offsets)
        self.confirmed.update(offsets)

    def remove_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the offsets that are kept here for partitions that this member no longer holds."""
        for name in list(partitions):
            for known in (self.stored, self.requested, self.confirmed):
                known.pop(name, None)

    def offsets_to_commit(self) -> Offsets:
        """Return the stored offsets for which no commit request was sent yet."""
        return {name: at for name, at in self.stored.items() if self.requested.get(name) != at}

    def offsets_without_confirmed_commit(self, partitions: Collection[TopicPartition]) -> Offsets:
        """Return those stored offsets of these partitions that are not known to be committed. A commit that was requested last and not
        confirmed may have taken effect, so that an offset before it has to be committed again.
        """
        known = {name: at for name, at in self.confirmed.items() if self.requested.get(name) == at}
        return {name: at for name, at in self.stored.items() if name in partitions and known.get(name) != at}


@dataclass(frozen=True)
class RebalanceCallbacks:
    """Functions of the application that are called when a rebalance adds or removes partitions.

    Each receives the consumer and the positions of these partitions.
    """

    on_assign: Callable[[Any, list[Place]], None] | None = None
    on_revoke: Callable[[Any, list[Place]], None] | None = None
    on_lost: Callable[[Any, list[Place]], None] | None = None


@dataclass(frozen=True)
class MembershipCallbacks:
    """Functions of a consumer that its GroupMembership (membership in a consumer group) calls.

    consumer: the consumer, which is passed to the application's callbacks.
    positions: returns the positions of assigned partitions, after the last record that the application has.
    drop_queued_records: drops queued records of partitions, and stops reading them.
    remove_partitions: removes partitions from the consumer, with their positions.
    """

    consumer: Any
    positions: Callable[[], Offsets]
    drop_queued_records: Callable[[Collection[TopicPartition]], None]
    remove_partitions: Callable[[Collection[TopicPartition]], None]


class GroupMembership:
    """Membership of a consumer in a group: a RebalanceListener that commits the offsets of returned records before partitions are given up.

    added: partitions that the group has assigned, and for which the consumer must still determine where reading begins.
    """

    def __init__(self, client: GroupClient, options: AutoCommitOptions, hooks: MembershipCallbacks) -> None:
        self._client = client
        self._options = options
        self._hooks = hooks
        self._callbacks = RebalanceCallbacks()
        self._ledger = OffsetCommitTracker()
        self._next_commit_s = time.monotonic() + options.interval_s
        self.added: list[TopicPartition] = []

    # ---- the group -----------------------------------------------------------------------------------------------------------

    def subscribe(self, topics: Sequence[str], callbacks: RebalanceCallbacks) -> None:
        """Join the group for these topics. ``callbacks``: functions of the application to call in rebalances."""
        self._callbacks = callbacks
        self._client.subscribe(topics, self)

    def unsubscribe(self) -> None:
        """Leave the group, after giving up all partitions."""
        self._client.unsubscribe()

    def poll_rebalances(self) -> Sequence[ErrorMessage]:
        """Process rebalances, commit offsets that are due, and return the group's errors that have arrived."""
        errors = self._client.poll_rebalances()
        if self._options.auto_commit and time.monotonic() >= self._next_commit_s:
            self._next_commit_s = time.monotonic() + self._options.interval_s
            self._store_offsets_of_returned_records()
            self._request_commit(self._ledger.offsets_to_commit(), wait_for_answer=False)
        return errors

    def start_positions_of_added_partitions(self) -> list[Place]:
        """Return the positions at which added partitions begin: their committed offsets, or positions without an offset if the group has
        none.
        """
        committed = self._client.committed_offsets(self.added)
        return [Place(*name, *committed[name]) if name in committed else Place(*name) for name in self.added]

    def call_on_assign_for_added_partitions(self, places: list[Place]) -> None:
        """Call the application's ``on_assign`` with the positions of partitions that were added."""
        if self._callbacks.on_assign is not None:
            self._callbacks.on_assign(self._hooks.consumer, places)

    def record_start_offsets_as_committed(self, offsets: Offsets) -> None:
        """Record the offset at which reading of each partition starts, and treat it as committed, so that an offset is committed only after
        records were read.
        """
        self._ledger.record_start_offsets_as_committed(offsets)

    def close(self) -> None:
        """Commit the offsets of records that were returned, if auto-commit is on, and leave the group."""
        try:
            self._commit_before_giving_up_partitions(self._hooks.positions())
        finally:
            self._client.close()

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.added += partitions

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        try:
            self._hooks.drop_queued_records(partitions)
            self._commit_before_giving_up_partitions(partitions)
            if self._callbacks.on_revoke is not None:
                self._callbacks.on_revoke(self._hooks.consumer, self._positions_of_partitions(partitions))
        finally:
            self._remove_partitions(partitions)

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        try:
            self._hooks.drop_queued_records(partitions)
            callback = self._callbacks.on_lost or self._callbacks.on_revoke
            if callback is not None:
                callback(self._hooks.consumer, self._positions_of_partitions(partitions))
        finally:
            self._remove_partitions(partitions)

    def _positions_of_partitions(self, partitions: Sequence[TopicPartition]) -> list[Place]:
        """Return the positions of these partitions; a Place without an offset for partitions that have no position yet."""
        at = self._hooks.positions()
        return [Place(*name, *at[name]) if name in at else Place(*name) for name in partitions]

    def _remove_partitions(self, partitions: Collection[TopicPartition]) -> None:
        """Remove partitions that this member no longer holds, with their offsets and queued records."""
        self.added = [name for name in self.added if name not in partitions]
        self._ledger.remove_partitions(partitions)
        self._hooks.remove_partitions(partitions)

    # ---- offsets -------------------------------------------------------------------------------------------------------------

    def store_offsets(self, offsets: Offsets) -> None:
        """Store offsets, which the next commit includes."""
        self._ledger.stored.update(offsets)

    def commit(self, offsets: Offsets | None, *, wait: bool) -> Offsets:
        """Commit ``offsets`` and return them; None commits the stored offsets that are not known to be committed. Raises Unavailable,
        Refused.

        :param wait: return only after the coordinator has answered.
        """
        if offsets is None:
            self._store_offsets_of_returned_records()
            offsets = self._ledger.offsets_without_confirmed_commit(self._ledger.stored)
        self._request_commit(offsets, wait_for_answer=wait)
        return offsets

    def committed_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        """Return the offsets that the group has committed, by partition. Partitions without a committed offset are missing."""
        return self._client.committed_offsets(partitions)

    def _store_offsets_of_returned_records(self) -> None:
        """Store the offsets after the records that the application has got, if ``auto_store`` is set."""
        if self._options.auto_store:
            # Where nothing was read yet there is nothing to store; after that, a position that was sought back to counts, too.
            known = self._ledger.confirmed | self._ledger.stored
            self._ledger.stored.update({name: at for name, at in self._hooks.positions().items() if known.get(name) != at})

    def _request_commit(self, offsets: Offsets, *, wait_for_answer: bool) -> None:
        """Send a commit request for these offsets, if there are any, and record it.

        :param wait_for_answer: whether to wait for the coordinator's answer.
        """
        if not offsets:
            return
        self._client.commit(offsets, wait=wait_for_answer)
        self._ledger.requested.update(offsets)
        if wait_for_answer:
            self._ledger.confirmed.update(offsets)

    def _commit_before_giving_up_partitions(self, partitions: Collection[TopicPartition]) -> None:
        """Commit the offsets of partitions that will be given up, if auto-commit is on. Errors are logged; the partitions' next reader then
        reads some records again.
        """
        if not self._options.auto_commit:
            return
        self._store_offsets_of_returned_records()
        try:
            self._request_commit(self._ledger.offsets_without_confirmed_commit(partitions), wait_for_answer=True)
        except StoreError as error:
            _log.warning("offsets of %d partitions were not committed before they were given up: %s", len(partitions), error)
