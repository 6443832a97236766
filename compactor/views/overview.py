"""All partitions at a glance: from what this machine remembers where that is fresh enough, from the tier where it is not.

The tier-wide log hints at partitions that changed. Hints can be lost (a process that dies between its publication and its hint), so a
a partition that nobody hinted at is asked for news all the same once in ``MAX_AGE_MS``, and at every look while somebody is at work on
it: two requests that find nothing, and what is new is folded on. Commands that show it to people ask of every other one whether the log
still has the record that the memory ends with (``marks``): it may have been set back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from compactor.bootstrap import Tier
from compactor.control.logs import open_partition
from compactor.control.summary import PartitionSummary, summarize
from compactor.errors import CompactorError
from compactor.local.cache import Seen
from compactor.model.ids import TopicPartition

MAX_AGE_MS = 3_600_000
"""By so much what is shown may be behind the tier where a hint was lost. Decisions are never made from it: `run` asks every partition."""
THREADS = 16
"""Partitions asked at a time: they wait for the store, not for each other."""

OnPartition = Callable[[], None]
Kept = tuple[Seen, PartitionSummary]


@dataclass(frozen=True)
class PartitionLook:
    """What a look at one partition came to: one of the two."""

    name: TopicPartition
    summary: PartitionSummary | None = None
    error: CompactorError | None = None


def overview(
    opened: Tier,
    names: Sequence[TopicPartition],
    *,
    max_age_ms: int = MAX_AGE_MS,
    marks: bool = False,
    on_partition: OnPartition = lambda: None,
) -> list[PartitionLook]:
    """A look at each of them, in their order. ``max_age_ms`` 0: the tier is asked about each. Raises StoreError for the catalog only.

    ``marks``: one request for each of those that would be believed without, to see that its log was not set back.
    """
    hints = opened.identity().partitions
    now = opened.ports.clock_ms()
    kept = opened.local.summaries() if opened.local else {}
    found: dict[TopicPartition, PartitionLook] = {}
    asked: list[TopicPartition] = []
    trusted: set[TopicPartition] = set()
    for name in names:
        known = kept.get(str(name))
        fresh = known is not None and opened.floor(name) <= known[0].slot and is_fresh(*known, hints.get(str(name), 0), now, max_age_ms)
        if fresh and marks:
            trusted.add(name)
        if known and fresh and not marks:
            found[name] = PartitionLook(name, known[1])
            on_partition()
        else:
            asked.append(name)
    confirmed: dict[TopicPartition, Seen] = {}

    def ask(name: TopicPartition) -> PartitionLook:
        known = kept.get(str(name))
        if known and name in trusted and _is_tied(opened, name, known[0]):
            look = PartitionLook(name, known[1])
        else:
            look = _ask(opened, name, hints.get(str(name), 0), known, confirmed, now)
        on_partition()
        return look

    if asked:
        with ThreadPoolExecutor(min(THREADS, len(asked)), thread_name_prefix="look") as pool:
            found |= zip(asked, pool.map(ask, asked), strict=True)
    if opened.local and confirmed:
        opened.local.checked(confirmed)
    return [found[name] for name in names]


def is_fresh(seen: Seen, summary: PartitionSummary, hint: int, now_ms: int, max_age_ms: int) -> bool:
    """Where something was begun (an import, a leadership) the next record may come without a hint."""
    led = summary.leader is not None and not summary.leader.released
    at_work = led or summary.open_run or summary.imports
    return seen.hint == hint and 0 <= now_ms - seen.checked_ms < max_age_ms and not at_work


def _is_tied(opened: Tier, name: TopicPartition, seen: Seen) -> bool:
    """A store that fails is met again by the question that follows."""
    try:
        return bool(open_partition(opened.ports, name).ties(seen.slot, seen.mark))
    except CompactorError:
        return False


def _ask(
    opened: Tier, name: TopicPartition, hint: int, kept: Kept | None, confirmed: dict[TopicPartition, Seen], now_ms: int
) -> PartitionLook:
    try:
        if kept:
            seen, summary = kept
            if not open_partition(opened.ports, name, opened.floor(name)).poll_from(seen.slot, seen.mark):
                confirmed[name] = seen.model_copy(update={"hint": hint, "checked_ms": now_ms})
                return PartitionLook(name, summary)
        log = opened.open(name)
        state = log.refresh()
        opened.keep(log, hint)
        return PartitionLook(name, summarize(state))
    except CompactorError as error:
        return PartitionLook(name, error=error)
