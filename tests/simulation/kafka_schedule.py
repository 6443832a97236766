"""One schedule of the simulation of tiers that brokers write, and the rules that it notices when they are dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from compactor.adapters.brokers import chain as rules, publisher as kafka
from compactor.adapters.brokers.publisher import MetadataTopicSegmentPublisher
from compactor.control import leadership as broker_expiry, mirror, publication
from compactor.control.leadership import Leadership, RecordRefused
from compactor.errors import CompactorError
from compactor.model.ids import TopicPartition
from compactor.model.plan import Replacement
from compactor.model.remote_log import uuid_bytes
from tests.simulation import brokers
from tests.simulation.brokers import Simulated
from tests.simulation.mutations import noticed
from tests.simulation.schedule import Outcome, watched
from tests.simulation.world import NO_FAULTS, Faults, World

STEPS = 500
BUSY = Faults(crash=0.006, throttle=0.01, lost=0.03, delay=0, duplicate=0, stop=0.02, jump=0.003)
PROFILES = (BUSY, BUSY, NO_FAULTS, replace(NO_FAULTS, stop=0.08), replace(BUSY, crash=0.02))


def run_kafka_schedule(seed: int, *, steps: int = STEPS, trace: bool = False, expires: bool = False) -> Outcome:
    """Two compactors over replicas that go on tiering; then one that finishes. Deterministic in ``seed``.

    ``expires``: brokers expire segments from the front, and a new leader may start lower than the one before.
    """
    world = World(seed)
    world.faults = world.rng.choice(PROFILES)
    if trace:
        world.trace = []
    sim = Simulated(world, expires=expires)
    with watched(world, sim.oracle):
        sim.replicas.produce(12)
        for _ in range(3):
            sim.replicas.tier(slow=False)
        world.push(world.now_ms, sim.broker_step)
        for name, holder in (("compactor-1", "host-a"), ("compactor-2", "host-a")):
            world.spawn(name, sim.compacting(name, holder), holder)
        world.run(steps)
        stop(world, sim)
        if not world.violations:
            sim.settle()
    counts = dict(sim.oracle.counts) | {"dropped": sim.dropped, "refused": bool(sim.refused)}
    return Outcome(seed, tuple(world.violations), world.steps, counts, tuple(world.trace or ()))


def stop(world: World, sim: Simulated) -> None:
    """What is on its way lands; brokers rest."""
    world.queue = [entry for entry in world.queue if entry[2] != sim.broker_step]
    world.stop()


Mutation = Callable[[], AbstractContextManager[Any]]


@contextmanager
def unasked(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    """Rules that refuse are silent, too: what is said is what the order alone makes of it."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(rules, "record_refusal", lambda *_: ""))
        stack.enter_context(patch.object(rules, "source_deletion_refusal", lambda *_: ""))
        for each in patches:
            stack.enter_context(each)
        yield


def sources_first() -> AbstractContextManager[Any]:
    def switched(
        self: MetadataTopicSegmentPublisher, name: TopicPartition, replacement: Replacement, expired: Any, *, must_withdraw: bool
    ) -> kafka._ReaderSwitchOutcome:
        where, cache = self._read_newest_metadata(name)
        left = [cache.segments[raw] for raw in map(uuid_bytes, replacement.sources) if raw in cache.segments]
        going = sorted((one for one in left if one.state in rules.UNDELETED_STATES), key=lambda one: one.start_offset)
        self._append_checked(where, cache, [self._state_change_record(one, kafka._S.DELETE_SEGMENT_STARTED) for one in going])
        self._append_copy_finished_record(where, cache.segments[uuid_bytes(replacement.segment.id)])
        return kafka._ReaderSwitchOutcome.SWITCHED

    return unasked(patch.object(MetadataTopicSegmentPublisher, "_switch_readers", switched))


def sorting(descends: Callable[[Any], bool]) -> AbstractContextManager[Any]:
    def ordered(items: Any, key: Callable[[Any], Any]) -> list[Any]:
        found = sorted(items, key=key)
        return found[::-1] if found and descends(found[0]) else found

    return unasked(patch.object(kafka, "sorted", ordered, create=True))


def never_begun() -> AbstractContextManager[Any]:
    plain = MetadataTopicSegmentPublisher.publish_replacements

    def publish(
        self: MetadataTopicSegmentPublisher,
        name: TopicPartition,
        replacements: Sequence[Replacement],
        begun: Callable[[], None],
        record: Callable[[Collection[str]], None],
        **way: Any,
    ) -> None:
        plain(self, name, replacements, lambda: None, record, **way)

    return unasked(patch.object(MetadataTopicSegmentPublisher, "publish_replacements", publish))


def not_behind() -> AbstractContextManager[Any]:
    plain = MetadataTopicSegmentPublisher._switch_readers
    return unasked(
        patch.object(
            MetadataTopicSegmentPublisher,
            "_switch_readers",
            lambda *group, must_withdraw: plain(*group, must_withdraw=False),
        )
    )


def no_look() -> AbstractContextManager[Any]:
    """The sources go whatever became of the segment that should stand for them."""

    def switched(
        self: MetadataTopicSegmentPublisher, name: TopicPartition, replacement: Replacement, expired: Any, *, must_withdraw: bool
    ) -> kafka._ReaderSwitchOutcome:
        where, cache = self._read_newest_metadata(name)
        known = cache.segments.get(uuid_bytes(replacement.segment.id))
        if known is not None and known.state is kafka._S.COPY_SEGMENT_STARTED:
            self._append_copy_finished_record(where, known)
        left = [cache.segments[raw] for raw in map(uuid_bytes, replacement.sources) if raw in cache.segments]
        going = sorted((one for one in left if one.state in rules.UNDELETED_STATES), key=lambda one: one.start_offset)
        self._append_checked(where, cache, [self._state_change_record(one, kafka._S.DELETE_SEGMENT_STARTED) for one in going])
        return kafka._ReaderSwitchOutcome.SWITCHED

    return unasked(patch.object(MetadataTopicSegmentPublisher, "_switch_readers", switched))


def expired_without_log_start() -> AbstractContextManager[Any]:
    """Whatever brokers have deleted counts as expired, although no log start is recorded that explains it."""

    def found(leadership: Leadership, wanted: Collection[str]) -> frozenset[str]:
        return leadership.ports.publisher.find_deleted_segments(leadership.state.topic_partition, wanted)

    return patch.object(broker_expiry, "find_expired_segments", found)


def expired_by_log_start_alone() -> AbstractContextManager[Any]:
    """Whatever lies below the log start counts as expired, also if brokers have not deleted it and readers find it."""

    def found(leadership: Leadership, wanted: Collection[str]) -> frozenset[str]:
        start, state = broker_expiry.record_broker_log_start(leadership), leadership.state
        ends = {segment.id: segment.end_offset for segment in state.live}
        ends |= {task.new_segment_id: task.end_offset for task in (state.intent.plan.tasks if state.intent else ())}
        return frozenset(name for name in wanted if ends.get(name, start) < start)

    return patch.object(broker_expiry, "find_expired_segments", found)


def present_log_start_counts() -> AbstractContextManager[Any]:
    """The present leader's log start decides, and is not recorded: its successor may start lower."""

    def observed(leadership: Leadership) -> int:
        ask = leadership.ports.broker_log_start
        return ask(leadership.state.topic_partition) if ask is not None else 0

    return patch.object(broker_expiry, "record_broker_log_start", observed)


KAFKA_MUTATIONS: dict[str, Mutation] = {
    "R3": sources_first,
    "R3b": lambda: sorting(lambda one: not hasattr(one, "sources")),
    "R8": lambda: unasked(patch.object(rules, "markers_before_finish", lambda *_: [])),
    "ascending": lambda: sorting(lambda one: hasattr(one, "sources")),
    "publish begun": never_begun,
    "look": no_look,
    "behind": not_behind,
    "grace": lambda: patch.object(brokers, "KEPT", replace(brokers.KEPT, grace_ms=0, undo_window_ms=0)),
    "cut off": lambda: unasked(
        patch.object(MetadataTopicSegmentPublisher, "withdraw_unknown_segments", lambda *_: 0),
        patch.object(MetadataTopicSegmentPublisher, "withdraw_segments", lambda *_, **__: None),
    ),
    "wait": lambda: unasked(patch.object(publication, "_wait_for_late_deliveries", lambda leadership: None)),
    "in flight": lambda: patch.object(MetadataTopicSegmentPublisher, "_prepare_range", lambda *_: None),
    "tiered again": lambda: patch.object(mirror, "_first_rerouted_offset", lambda *_: None),
}


EXPIRY_MUTATIONS: dict[str, Mutation] = {
    "expired without log start": expired_without_log_start,
    "the present log start counts": present_log_start_counts,
}
"""Noticed where brokers expire segments."""

RARE_EXPIRY_MUTATIONS: dict[str, Mutation] = {
    "expired by the log start alone": expired_by_log_start_alone,
    "expired without log start": expired_without_log_start,
}
"""Rare in schedules (the first one in none of 100): tests/integration/test_broker_expiry.py notices, and tests/model/Expiry.tla."""


def kafka_bites(mutation: Mutation, seeds: range, *, expires: bool = False) -> Iterator[tuple[int, str]]:
    """(seed, first violation) of each schedule that notices the missing rule."""
    for seed in seeds:
        try:
            with mutation():
                violations = run_kafka_schedule(seed, expires=expires).violations
        except (CompactorError, RecordRefused, AssertionError, LookupError, ValueError, RuntimeError) as error:
            violations = (f"{type(error).__name__}: {error}",)
        if violations:
            yield seed, noticed(violations[0])
