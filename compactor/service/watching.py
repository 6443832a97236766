"""What the daemon knows of each partition's log: a summary, and how far the log was read. Kept between looks, and beyond restarts.

Whole folded states are not held here: they are folded on from local state (``Tier.open``) when a log has something new.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from compactor.bootstrap import Tier
from compactor.control.logs import PartitionLog, open_partition
from compactor.control.summary import PartitionSummary, SegmentSummary, summarize
from compactor.local.cache import Seen
from compactor.model.ids import TopicPartition
from compactor.service.scheduling import Sight, sight
from compactor.service.story import PartitionStory, packed, story_of, unpacked
from compactor.upkeep.retire import since_ms
from compactor.views.overview import is_fresh


@dataclass(frozen=True)
class WatchedPartition:
    """``seen`` None where nothing ties the summary to the log. ``since_ms``: the store's times of slots that something waits from."""

    summary: PartitionSummary
    seen: Seen | None
    since_ms: Mapping[int, int]


class Watching:
    """Different partitions may be looked at by different threads, one partition by one thread at a time."""

    def __init__(self, opened: Tier) -> None:
        self._opened = opened
        self._known: dict[TopicPartition, WatchedPartition] = {}
        self._confirmed: dict[TopicPartition, Seen] = {}
        self._stories: dict[TopicPartition, bytes] = {}
        self._lock = threading.Lock()

    def remember(self, hints: Mapping[str, int], max_age_ms: int, now_ms: int) -> dict[TopicPartition, tuple[Sight, int]]:
        """What local state knows and nobody hints at as changed: a sight, and when the store was asked last. Makes no request."""
        kept = self._opened.local.summaries() if self._opened.local else {}
        found: dict[TopicPartition, tuple[Sight, int]] = {}
        for text, (seen, summary) in kept.items():
            fresh = text in hints and is_fresh(seen, summary, hints[text], now_ms, max_age_ms)
            if fresh and not summary.waiting and self._opened.floor(summary.name) <= seen.slot:  # what waits has to be asked for its time
                self._known[summary.name] = WatchedPartition(summary, seen, {})
                found[summary.name] = self._sight(summary.name, now_ms), seen.checked_ms
        return found

    def adopt(self, opened: Tier) -> None:
        """Goes on with other settings."""
        self._opened = opened

    def forget(self, name: TopicPartition) -> None:
        """It is another partition than the one of that name before."""
        self._known.pop(name, None)
        self._stories.pop(name, None)

    def again(self, name: TopicPartition, now_ms: int) -> Sight | None:
        """The sight of what is known of a partition, by the present settings; None where nothing is. Makes no request."""
        return self._sight(name, now_ms) if name in self._known else None

    def look(self, name: TopicPartition, hint: int, before: Sight | None, now_ms: int) -> Sight:
        """A fresh sight; two requests where nothing was written since ``before``. Raises StoreError, BadControlRecord.

        ``hint``: the catalog's latest one about the partition.
        """
        known = self._known.get(name)
        if before is not None and known is not None and not self._is_news(known, hint):
            self._confirm(known, hint, now_ms)
            return before if now_ms < before.wake_ms else self._sight(name, now_ms)
        log = self._opened.open(name)
        log.refresh()
        self.take(log, hint, now_ms)
        return self._sight(name, now_ms)

    def take(self, log: PartitionLog, hint: int, now_ms: int) -> Sight:
        """Goes on from a log that was just folded."""
        self._opened.keep(log, hint)
        # The store's times of slots: one request each that the log does not know by itself.
        since = since_ms(self._opened.ports, log) if log.state.waiting or log.state.registrations else {}
        mark = log.mark()
        seen = Seen(slot=log.state.slot, hint=hint, checked_ms=now_ms, mark=mark) if mark else None
        self._stories[log.state.name] = packed(story_of(log.state))
        self._known[log.state.name] = WatchedPartition(summarize(self._opened.as_read(log.state)), seen, since)
        return self._sight(log.state.name, now_ms)

    def segments(self, name: TopicPartition) -> tuple[SegmentSummary, ...]:
        """What readers see, as last looked at. Makes no request, and may be asked from any thread."""
        known = self._known.get(name)
        return known.summary.model_copy().live if known else ()

    def story(self, name: TopicPartition) -> PartitionStory | None:
        """What its log remembers, as last looked at; None where only a summary is known. As ``segments``."""
        if name not in self._stories and self._opened.local is not None and self._opened.local.bound:
            kept = self._opened.local.state(name)
            if kept is not None:
                self._stories.setdefault(name, packed(story_of(kept[0])))
        data = self._stories.get(name)
        return unpacked(data) if data is not None else None

    def write_down(self) -> None:
        """Local state learns which partitions had nothing new."""
        with self._lock:
            confirmed, self._confirmed = self._confirmed, {}
        if self._opened.local and confirmed:
            self._opened.local.checked(confirmed)

    def _is_news(self, known: WatchedPartition, hint: int) -> bool:
        """Of a tier that brokers write the control log does not say everything: a hint is news."""
        opened, name = self._opened, known.summary.name
        if known.seen is None or (opened.brokers is not None and known.seen.hint != hint):
            return True
        log = open_partition(opened.ports, name, opened.floor(name), key=opened.log_key(name))
        return log.poll_from(known.seen.slot, known.seen.mark)

    def _confirm(self, known: WatchedPartition, hint: int, now_ms: int) -> None:
        if known.seen is not None:
            with self._lock:
                self._confirmed[known.summary.name] = known.seen.model_copy(update={"hint": hint, "checked_ms": now_ms})

    def _sight(self, name: TopicPartition, now_ms: int) -> Sight:
        known = self._known[name]
        # A copy: a summary keeps the segments that it was asked for, 200,000 of them in a large tier.
        return sight(known.summary.model_copy(), self._opened.cleaner_for(name.topic), self._opened.retention, known.since_ms, now_ms)
