"""Random rounds on the metadata topic: crashes at any append, answers and records that come late, a broker that deletes by itself.

One key is written early and deleted later, its tombstone has expired: what compaction leaves of it depends on the order of groups. After
every record that any broker may have read last: no offset without a segment, no deleted object that lookups answer with, no reader who
sees the key again. In the end a process without faults finishes everything, and nothing of the dead is left.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from typing_extensions import override

from compactor.adapters.brokers import chain as rules, publisher as kafka
from compactor.adapters.brokers.cache import RemoteLogMetadataCache
from compactor.adapters.brokers.chain import lineage_from_segments, offset_gaps, segment_read_ranges
from compactor.adapters.brokers.publisher import MetadataTopicSegmentPublisher
from compactor.errors import Refused, Unavailable
from compactor.model.ids import COMPACTOR_BROKER_ID
from compactor.model.plan import Replacement
from compactor.model.remote_log import RemoteLogSegmentMetadataUpdateRecord
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from compactor.tier.ports import AnnouncedSegment
from tests.simulation.memory_topic import Loss, MemoryMetadataTopic
from tests.support.kafka_publishing import NAME, BrokerWorld, described, named

S = SegmentState
SEEDS = 40
SIZE = 10
ALIVE, DEAD = "put", "tombstone"


class Crash(Exception):
    """The process is gone."""


@dataclass
class Control:
    """What is durable elsewhere: the control log's part of a round."""

    plan: list[Replacement] = field(default_factory=list)
    begun: bool = False
    replaced: list[str] = field(default_factory=list)
    withdrawn: list[AnnouncedSegment] = field(default_factory=list)


def _epochs(segment: RemoteLogSegmentMetadata) -> set[int]:
    return {entry.epoch for entry in segment.leader_epochs}


class Story:
    """One random history."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = BrokerWorld()
        self.control = Control()
        self.objects: set[str] = set()
        self.holds: dict[str, set[str]] = {}
        self.made = 100
        self.start = 0
        self.late: list[bytes] = []
        self.checked = 0
        count = self.rng.randint(5, 9)
        put, dead = sorted(self.rng.sample(range(count - 1), 2))
        ends = sorted(self.rng.sample(range(1, count * SIZE), 2))
        for number in range(count):
            first, last = number * SIZE, number * SIZE + SIZE - 1
            epochs = {epoch: max(first, begin) for epoch, begin in enumerate([0, *ends]) if begin <= last}
            current = max(epoch for epoch, begin in enumerate([0, *ends]) if begin <= first)
            made = self.world.tier(number, first, last, {epoch: at for epoch, at in epochs.items() if epoch >= current})
            self.objects.add(made.id)
            self.holds[made.id] = {ALIVE} if number == put else {DEAD} if number == dead else set()
        self.check()

    def publisher(self, faults: float) -> MetadataTopicSegmentPublisher:
        def fate() -> Loss:
            drawn = self.rng.random()
            return Loss(before=drawn < faults, lost=faults <= drawn < 2 * faults)

        return self.world.publisher(appending=Meddled(self, fate, faults))

    def meddle(self, faults: float) -> None:
        """The broker deletes records up to a segment's end, and what is started there; seldom."""
        if faults and self.start == 0 and self.rng.random() < 0.02:
            self.start = SIZE
            for one in list(self.world.cache().segments.values()):
                if one.end_offset < SIZE and one.state in rules.UNDELETED_STATES:
                    self.world.delete(one.id)
                    self.objects.discard(one.id)

    def land(self, chance: float = 1.0) -> None:
        for value in list(self.late):
            if self.rng.random() < chance:
                self.late.remove(value)
                for log in self.world.log.logs:
                    if log:
                        self.world.log.put(self.world.log.logs.index(log), value)
                self.check()

    def live(self) -> list[RemoteLogSegmentMetadata]:
        cache = self.world.cache()
        known = {segment.id: segment for segment in (new.segment for new in self.control.plan)}
        return [
            known.get(link.segment.id)
            or described(0, link.first, link.last, {e.epoch: e.start_offset for e in link.segment.leader_epochs}).model_copy(
                update={"id": link.segment.id}
            )
            for link in segment_read_ranges(cache, lineage_from_segments(cache))
        ]

    def known(self) -> set[str]:
        planned = {new.segment.id for new in self.control.plan}
        return {one.id for one in self.live() if one.id not in self.gone()} | planned | set(self.control.replaced)

    def gone(self) -> set[str]:
        return {one.id for one in self.control.withdrawn}

    def announce(self) -> None:
        live = self.live()[:-1]
        groups: list[list[RemoteLogSegmentMetadata]] = []
        while live:
            members = [live.pop(0)]
            while live and self.rng.random() < 0.7 and _epochs(live[0]) <= _epochs(members[-1]):
                members.append(live.pop(0))
            groups.append(members)
        values = [one for members in groups for one in members]
        gone = any(DEAD in self.holds[one.id] for one in values) or not any(ALIVE in self.holds[one.id] for one in values)
        for members in groups:
            self.made += 1
            epochs: dict[int, int] = {}
            for one in members:
                for entry in one.leader_epochs:
                    epochs.setdefault(entry.epoch, entry.start_offset)
            new = described(self.made, members[0].start_offset, members[-1].end_offset, epochs, max_ms=900 - self.made)
            self.control.plan.append(Replacement(sources=tuple(one.id for one in members), segment=new))
            self.holds[new.id] = set() if gone else set().union(*(self.holds[one.id] for one in members))

    def process(self, faults: float) -> None:
        """A run: what is left of the last one, or a new round; then retire."""
        publisher, control = self.publisher(faults), self.control
        publisher.withdraw_unknown_segments(NAME, [new.segment for new in control.plan if control.begun], self.known())
        if control.plan and not control.begun and (self.rng.random() < 0.4 or not self.whole()):
            away = [new.segment for new in control.plan]
            control.withdrawn += [AnnouncedSegment(one.id, one.start_offset, one.end_offset, one.leader_epochs) for one in away]
            control.plan = []
        if control.withdrawn:
            publisher.withdraw_segments(NAME, control.withdrawn, include_unannounced=True)
            self.objects -= self.gone()
            publisher.record_finished_segment_deletion(NAME, control.withdrawn)
        if not control.plan:
            self.announce()
        if not control.begun:
            for new in control.plan:
                publisher.announce_segment(NAME, new.segment)
                self.objects.add(new.segment.id)
        self.wait()
        publisher.publish_replacements(NAME, control.plan, self.begun, self.published, is_begun_recorded=control.begun)
        self.objects -= set(control.replaced)
        publisher.record_finished_segment_deletion(NAME, self.refs(control.replaced))
        control.replaced = []
        left = publisher.find_unknown_segments(NAME, self.known()) or ()
        self.objects -= {one.id for one in left}
        publisher.record_finished_segment_deletion(NAME, left)

    def whole(self) -> bool:
        there = {one.id for one in self.live()}
        return all(source in there for new in self.control.plan for source in new.sources)

    def wait(self) -> None:
        """For a predecessor's producer to give up: what is late lands before, or never."""
        self.land()

    def begun(self) -> None:
        self.control.begun = True

    def published(self, cut_off: Collection[str]) -> None:
        control = self.control
        control.replaced += [source for new in control.plan if new.segment.id not in cut_off for source in new.sources]
        control.withdrawn += [
            AnnouncedSegment(one.id, one.start_offset, one.end_offset, one.leader_epochs)
            for one in (new.segment for new in control.plan)
            if one.id in cut_off
        ]
        control.plan, control.begun = [], False

    def refs(self, ids: Collection[str]) -> list[AnnouncedSegment]:
        return [AnnouncedSegment(name, 0, 0, ()) for name in ids]

    def run(self) -> None:
        for _ in range(self.rng.randint(2, 8)):
            try:
                self.process(faults=0.04)
            except (Crash, Refused):
                pass
            self.land(0.3)
        for _ in range(3):
            self.process(faults=0)
        self.land()
        self.process(faults=0)
        self.finished()

    def check(self) -> None:
        """After each record that came since the last look."""
        for number, (record, cache) in enumerate(self.world.steps()):
            if number < self.checked:
                continue
            self.checked = number + 1
            if isinstance(record, RemoteLogSegmentMetadataUpdateRecord) and record.broker_id == COMPACTOR_BROKER_ID:
                self.readers(cache)

    def readers(self, cache: RemoteLogMetadataCache) -> None:
        links = segment_read_ranges(cache, lineage_from_segments(cache))
        at, seen = self.start, False
        for link in links:
            if link.last < at:
                continue
            assert link.first <= at, f"offset {at} has no segment"
            at = link.last + 1
            held = self.holds[link.segment.id]
            seen = (seen or ALIVE in held) and DEAD not in held
            assert link.segment.id in self.objects or link.last < self.start, f"{link.segment.id} is read and deleted"
        assert not seen, "a deleted key is read again"

    def finished(self) -> None:
        cache = self.world.cache()
        read = {link.segment.segment_id for link in segment_read_ranges(cache, lineage_from_segments(cache))}
        assert {one.id for one in cache.segments.values() if one.segment_id not in read} == set()
        assert [gap for gap in offset_gaps(segment_read_ranges(cache, lineage_from_segments(cache))) if gap[1] >= self.start] == []
        assert {one.id for one in cache.segments.values()} == self.objects - {name for name in self.objects if name not in self.holds}


class Meddled(MemoryMetadataTopic):
    """Of one process, which ends where an append fails; what failed may still come."""

    def __init__(self, story: Story, fate: Callable[[], Loss], faults: float) -> None:
        super().__init__(story.world.log, fate=fate)
        self._story = story
        self._faults = faults

    @override
    def append(self, partition: int, value: bytes) -> int:
        story = self._story
        story.meddle(self._faults)
        try:
            return super().append(partition, value)
        except Unavailable:
            if story.rng.random() < 0.5:
                story.late.append(value)
            raise Crash from None
        finally:
            story.check()


@pytest.mark.parametrize("block", range(3))
def test_readers_notice_nothing_and_every_crash_is_finished(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        try:
            Story(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@contextmanager
def without_refusals(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(rules, "record_refusal", lambda *_: "")
    patch.setattr(rules, "source_deletion_refusal", lambda *_: "")
    yield


def deletes_descend(patch: pytest.MonkeyPatch) -> None:
    """R3b."""
    patch.setattr(
        kafka, "sorted", lambda items, key: sorted(items, key=lambda one: key(one) * (1 if hasattr(one, "sources") else -1)), raising=False
    )


def groups_descend(patch: pytest.MonkeyPatch) -> None:
    """ascending."""
    patch.setattr(kafka, "sorted", lambda items, key: sorted(items, key=key, reverse=True), raising=False)


def nobody_waits(patch: pytest.MonkeyPatch) -> None:
    """wait."""
    patch.setattr(Story, "wait", lambda self: None)


def nobody_cuts_off(patch: pytest.MonkeyPatch) -> None:
    """cut off."""
    patch.setattr(MetadataTopicSegmentPublisher, "withdraw_unknown_segments", lambda *_: 0)
    patch.setattr(MetadataTopicSegmentPublisher, "withdraw_segments", lambda *_, **__: None)


def begun_rounds_are_undone(patch: pytest.MonkeyPatch) -> None:
    """publish begun."""
    patch.setattr(Story, "begun", lambda self: None)


@pytest.mark.parametrize("drop", [deletes_descend, groups_descend, nobody_cuts_off, begun_rounds_are_undone])
def test_each_rule_that_is_dropped_is_noticed(drop: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    drop(monkeypatch)
    noticed = 0
    with without_refusals(monkeypatch):
        for seed in range(SEEDS):
            try:
                Story(seed).run()
            except (AssertionError, Refused, Crash):
                noticed += 1
    assert noticed, (drop.__doc__ or "") + named(0)


class WayBack(Story):
    """A round, and then one that takes it back, broken off and gone on with at any record."""

    def forward(self) -> None:
        publisher = self.publisher(faults=0)
        self.announce()
        for new in self.control.plan:
            publisher.announce_segment(NAME, new.segment)
            self.objects.add(new.segment.id)
        done = self.control.plan
        publisher.publish_replacements(NAME, done, self.begun, self.published)
        for new in done:
            self.made += 1
            one = new.segment
            copy = described(self.made, one.start_offset, one.end_offset, {e.epoch: e.start_offset for e in one.leader_epochs})
            self.control.plan.append(Replacement(sources=(one.id,), segment=copy))
            self.holds[copy.id] = set().union(*(self.holds[source] for source in new.sources))

    def back(self, faults: float, *, backwards: bool) -> None:
        publisher, control = self.publisher(faults), self.control
        publisher.withdraw_unknown_segments(NAME, [new.segment for new in control.plan if control.begun], self.known())
        if not control.begun:
            for new in control.plan:
                publisher.announce_segment(NAME, new.segment)
                self.objects.add(new.segment.id)
        self.wait()
        publisher.publish_replacements(
            NAME, control.plan, self.begun, self.published, last_group_first=backwards, is_begun_recorded=control.begun
        )

    def run_back(self, *, backwards: bool = True) -> None:
        self.forward()
        for faults in [0.1] * self.rng.randint(0, 4) + [0.0]:
            if self.control.plan:
                with contextlib.suppress(Crash, Refused):
                    self.back(faults, backwards=backwards)
                self.land(0.3)
        self.land()
        self.check()


@pytest.mark.parametrize("block", range(2))
def test_a_round_that_is_taken_back_shows_no_deleted_key_either(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        story = WayBack(seed)
        try:
            story.run_back()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        links = segment_read_ranges(story.world.cache(), lineage_from_segments(story.world.cache()))
        assert [gap for gap in offset_gaps(links) if gap[1] >= story.start] == [], seed


def test_taking_a_round_back_from_its_beginning_is_noticed() -> None:
    noticed = 0
    for seed in range(SEEDS):
        try:
            WayBack(seed).run_back(backwards=False)
        except AssertionError:
            noticed += 1
    assert noticed
