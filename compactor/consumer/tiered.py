"""One log out of two: a partition is read from the tier, and where the tier ends, from the broker.

The hand-over is an offset. read_uncommitted hands over at the tier's end; read_committed at the first offset of the oldest transaction that
is open there: what lies behind it was not handed out, and the broker decides about it. Where the broker has deleted that offset already
(OFFSET_OUT_OF_RANGE below its log start), the tier is asked again. So there is neither a gap nor a repeat: every step begins at the
position, which is the offset behind the last message that was handed out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Final, Literal, Self

from compactor.bootstrap import Tier
from compactor.consumer.broker import BrokerLog, LogBounds
from compactor.consumer.feed import Ended, Failed, Item, TierFeed, reported
from compactor.consumer.last_values import LastValues, latest
from compactor.consumer.messages import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    MessageLike,
    Place,
    PlaceLike,
    TierMessage,
    out_of_range,
)
from compactor.consumer.reading import first_offset, offset_at
from compactor.errors import CompactorError, UsageError
from compactor.model.ids import TopicPartition

FOREVER: Final = 1e9
"""Seconds."""
BROKER_SLICE_S: Final = 0.05
"""How long the broker is waited for while the tier may have something, too."""
BROKER_WAIT_S: Final = 0.5
"""And how long otherwise, before the caller's patience is looked at again."""
FETCH: Final = 10_000
"""Messages that are taken from the broker's client at once."""


@dataclass(frozen=True)
class ConsumerOptions:
    """How a TieredConsumer reads.

    ``view`` latest: of what the tier has when reading begins only the last record of each key, and none where that is a tombstone; from
    there on every record. ``threads`` read the tier ahead, up to ``queue_bytes``. ``refresh_s``: how often a partition that cannot go
    on looks again. ``offset_reset``: where to begin when an offset is below everything that there is, or none was given; "error" says so
    in a message.
    """

    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    view: Literal["all", "latest"] = "all"
    threads: int = 4
    queue_bytes: int = 64 << 20
    refresh_s: float = 1.0
    offset_reset: Literal["earliest", "latest", "error"] = "earliest"

    @property
    def committed(self) -> bool:
        return self.isolation == "read_committed"


@dataclass
class _Assigned:
    """``source`` resting: it looks again at ``wake_s``. ``needed``: the broker begins only there. ``told``: its trouble was said once."""

    name: TopicPartition
    position: int
    source: Literal["tier", "broker", "resting"] = "resting"
    wake_s: float = 0.0
    needed: int = -1
    told: bool = False
    begun: bool = False


class TieredConsumer:
    """Shaped like confluent_kafka.Consumer; partitions are assigned, no group is joined, no offset is committed. For one thread.

    :param broker: None reads the tier alone, and goes on as it grows. It is closed with the consumer.
    """

    def __init__(self, tier: Tier, broker: BrokerLog | None = None, options: ConsumerOptions | None = None) -> None:
        self._tier = tier
        self._broker = broker
        self._options = options or ConsumerOptions()
        self._feed = TierFeed(
            tier,
            committed=self._options.committed,
            latest_only=self._options.view == "latest",
            threads=self._options.threads,
            queue_bytes=self._options.queue_bytes,
        )
        self._assigned: dict[TopicPartition, _Assigned] = {}
        self._block: tuple[TopicPartition, Iterator[TierMessage]] | None = None
        self._pending: deque[MessageLike] = deque()
        self._lost: list[TopicPartition] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- what is read -------------------------------------------------------------------------------------------------------

    def assign(self, places: Iterable[PlaceLike]) -> None:
        """Reads exactly these partitions, each from its offset (OFFSET_BEGINNING, OFFSET_END too; without one as ``offset_reset`` says).

        Raises UsageError for a partition that neither tier nor broker has, StoreError.
        """
        wanted = {TopicPartition.of(place.topic, place.partition): place.offset for place in places}
        self._check_open()
        if self._broker is None:
            self._tier.partitions([str(name) for name in wanted])
        offsets = {name: self._resolved(name, offset) for name, offset in wanted.items()}
        self.unassign()
        for name, offset in offsets.items():
            self._assigned[name] = _Assigned(name, offset)
        self._wake(time.monotonic())

    def unassign(self) -> None:
        for name in self._assigned:
            self._feed.stop(name)
        if self._broker is not None and self._assigned:
            self._broker.stop(self._assigned)
        self._assigned, self._block = {}, None
        self._pending.clear()

    def assignment(self) -> list[Place]:
        return [Place(*name) for name in self._assigned]

    def seek(self, place: PlaceLike) -> None:
        """An assigned partition goes on at another offset."""
        at = self._of(place)
        offset = self._resolved(at.name, place.offset)
        self._feed.stop(at.name)
        if self._broker is not None:
            self._broker.stop([at.name])
        if self._block is not None and self._block[0] == at.name:
            self._block = None
        self._pending = deque(m for m in self._pending if (m.topic(), m.partition()) != at.name)
        self._assigned[at.name] = _Assigned(at.name, offset)
        self._wake(time.monotonic())

    def position(self, places: Sequence[PlaceLike]) -> list[Place]:
        """Of assigned partitions: the offset behind the last message that was handed out, or behind what there was none of."""
        return [Place(at.name.topic, at.name.partition, at.position) for at in map(self._of, places)]

    def offsets_for_times(self, places: Sequence[PlaceLike], timeout: float | None = None) -> list[Place]:
        """``offset`` of each is a time in milliseconds; the answer has the first offset that is as young, OFFSET_END where there is none.

        ``timeout`` is there for confluent_kafka's shape: the tier's and the broker's own settings hold.
        """
        found = []
        for place in places:
            name = TopicPartition.of(place.topic, place.partition)
            offset = offset_at(self._tier, name, place.offset)
            if offset is None and self._broker is not None:
                offset = self._broker.offset_at(name, place.offset)
            found.append(Place(*name, OFFSET_END if offset is None else offset))
        return found

    def get_watermark_offsets(self, place: PlaceLike) -> tuple[int, int]:
        """The first offset that tier or broker has, and the one behind the last."""
        return self._bounds(TopicPartition.of(place.topic, place.partition))

    def latest(self, place: PlaceLike) -> LastValues:
        """The last values of a partition's keys, as the tier has them now; ``assign`` its ``next_offset`` to go on from there."""
        return latest(self._tier, TopicPartition.of(place.topic, place.partition), committed=self._options.committed)

    # ---- what comes ---------------------------------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> MessageLike | None:
        """The next message; None where none came in ``timeout`` seconds (None or negative: waits for one).

        A message with an error says that one partition does not go on at present. Raises StoreError, BadData: it may be called again, and
        begins where it was.
        """
        found = self.consume(1, -1 if timeout is None else timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[MessageLike]:
        """Up to so many messages; fewer where no more came in time."""
        self._check_open()
        deadline = time.monotonic() + (FOREVER if timeout < 0 else timeout)
        found: list[MessageLike] = []
        while True:
            self._hand_out(found, num_messages)
            left = deadline - time.monotonic()
            if len(found) >= num_messages or (left <= 0 and found):
                return found
            try:
                came = self._gather(max(0.0, left))
            except CompactorError:
                if found:  # the error comes again by itself; these do not
                    return found
                raise
            if not came and left <= 0:
                return found

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._feed.close()
            if self._broker is not None:
                self._broker.close()

    def _hand_out(self, found: list[MessageLike], wanted: int) -> None:
        while self._pending and len(found) < wanted:
            message = self._pending.popleft()
            at = self._assigned.get(TopicPartition(message.topic() or "", message.partition() or 0))
            if message.error() is None and at is not None:
                offset = message.offset() or 0
                if at.source != "broker" or offset < at.position:
                    continue
                at.position, at.told = offset + 1, False
            found.append(message)
        if self._block is not None and len(found) < wanted:
            name, messages = self._block
            before = len(found)
            found.extend(islice(messages, wanted - before))
            if len(found) > before:
                self._assigned[name].position = (found[-1].offset() or 0) + 1
            if len(found) < wanted:
                self._block = None

    def _gather(self, wait_s: float) -> bool:
        """Takes what has come, after everything before it was handed out. False: nothing has."""
        now = time.monotonic()
        self._look_for_lost()
        self._wake(now)
        rest = min((at.wake_s - now for at in self._assigned.values() if at.source == "resting"), default=FOREVER)
        wait_s = max(0.0, min(wait_s, rest))
        if self._broker is None or not any(at.source == "broker" for at in self._assigned.values()):
            item = self._feed.take(wait_s)
            if item is not None:
                self._take(item)
            return item is not None
        item = self._feed.take(0)
        if item is not None:
            self._take(item)
        most = 0.0 if item is not None else BROKER_SLICE_S if self._feed.busy else BROKER_WAIT_S
        fetched = self._broker.fetch(FETCH, min(wait_s, most))
        self._pending.extend(fetched.messages)
        self._lost.extend(fetched.out_of_range)
        return item is not None or bool(fetched.messages) or bool(fetched.out_of_range)

    def _take(self, item: Item) -> None:
        at = self._assigned.get(item.name)
        if at is None or at.source != "tier":
            return
        if isinstance(item, Ended):
            self._rest(at)  # where the broker does not answer, nobody reads it at present
            self._ended(at, item)
        elif isinstance(item, Failed):
            self._rest(at)
            raise reported(item.error)
        else:
            self._block = (item.name, item.messages())
            at.told = False

    # ---- from one to the other ----------------------------------------------------------------------------------------------

    def _wake(self, now: float) -> None:
        """Partitions that have rested look at the tier again."""
        for at in self._assigned.values():
            if at.source == "resting" and at.wake_s <= now:
                at.source = "tier"
                self._feed.begin(at.name, at.position, from_now=at.begun)

    def _ended(self, at: _Assigned, item: Ended) -> None:
        """The tier has no more at the position."""
        at.begun = True
        if item.offset < item.start < item.end and not self._broker_has(at):
            self._below(at, item)
            return
        at.position = max(at.position, item.offset)
        if self._broker is None:
            self._rest(at)
        elif at.position < at.needed:
            if item.end <= at.position:
                self._tell(at, f"the tier ends at {item.end}, and the broker begins at {at.needed}")
            self._rest(at)
        else:
            self._broker.read_from({at.name: at.position})
            at.needed, at.source = -1, "broker"

    def _broker_has(self, at: _Assigned) -> bool:
        if self._broker is None:
            return False
        bounds = self._broker.bounds(at.name)
        return bounds.start <= at.position <= bounds.end

    def _below(self, at: _Assigned, item: Ended) -> None:
        """What is at the position is gone from the tier, and the broker does not have it either."""
        if self._options.offset_reset == "error":
            self._tell(at, f"the tier begins at {item.start}")
            self._rest(at)
        else:
            at.position = item.start if self._options.offset_reset == "earliest" else item.end
            at.source = "tier"
            self._feed.begin(at.name, at.position, from_now=self._options.view == "all")

    def _look_for_lost(self) -> None:
        """Only now: what had come of them before was handed out first."""
        while self._lost and self._broker is not None:
            at = self._assigned.get(self._lost[-1])
            if at is not None and at.source == "broker":
                self._out_of_range(at, self._broker.bounds(at.name))
            self._lost.pop()

    def _out_of_range(self, at: _Assigned, bounds: LogBounds) -> None:
        """The broker does not have the position (any more)."""
        if at.position < bounds.start:
            at.needed, at.source = bounds.start, "tier"
            self._feed.begin(at.name, at.position, from_now=True)
            return
        if at.position > bounds.end:
            self._tell(at, f"the broker's log ends at {bounds.end}: was it truncated?")
        self._rest(at)

    def _tell(self, at: _Assigned, why: str) -> None:
        if not at.told:
            at.told = True
            text = f"offset {at.position} of {at.name} is not there: {why}"
            self._pending.append(TierMessage(*at.name, at.position, error=out_of_range(text)))

    def _rest(self, at: _Assigned) -> None:
        at.source, at.wake_s = "resting", time.monotonic() + self._options.refresh_s

    def _bounds(self, name: TopicPartition) -> LogBounds:
        """Of tier and broker together."""
        state = self._tier.open(name).refresh()
        mine = LogBounds(first_offset(self._tier, state), state.end_offset + 1)
        if self._broker is None:
            return mine
        its = self._broker.bounds(name)
        return LogBounds(min(mine.start, its.start), max(mine.end, its.end)) if state.live else its

    def _resolved(self, name: TopicPartition, offset: int) -> int:
        """A real offset for a logical one. Raises UsageError where there is none to be had."""
        if offset >= 0:
            return offset
        reset = self._options.offset_reset
        if offset == OFFSET_BEGINNING or (offset != OFFSET_END and reset == "earliest"):
            return self._bounds(name).start
        if offset == OFFSET_END or reset == "latest":
            return self._bounds(name).end
        raise UsageError(f"no offset for {name}", hint=f"Give one, or OFFSET_BEGINNING; {OFFSET_INVALID} is none")

    def _of(self, place: PlaceLike) -> _Assigned:
        name = TopicPartition(place.topic, place.partition)
        if name not in self._assigned:
            raise UsageError(f"{name} is not assigned", hint="Call assign first")
        return self._assigned[name]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the consumer is closed")
