"""Who keeps compactors from beginning rounds, and who wants one now: records of the tier-wide log that all of them obey."""

from __future__ import annotations

import re

from compactor.control.logs import CatalogLog, tidy
from compactor.control.records import RoundsPaused, RoundsResumed, RoundWanted
from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition


def matches(pattern: str, name: TopicPartition) -> bool:
    """A whole regular expression: of a topic, or of a ``topic-partition``."""
    return bool(re.fullmatch(pattern, name.topic) or re.fullmatch(pattern, str(name)))


def pause_of(state: CatalogState, name: TopicPartition) -> str:
    """Why no round is begun over this partition; empty where one may be."""
    for pattern, pause in state.paused.items():
        if matches(pattern, name):
            return (
                f"paused by {pause.by}" + (f": {pause.reason}" if pause.reason else "") + (f" ({pattern})" if pattern != str(name) else "")
            )
    return ""


def pause(catalog: CatalogLog, pattern: str, by: str, reason: str) -> bool:
    """Returns whether it was not paused before. Raises UsageError for what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{pattern!r} is no regular expression: {error}", hint="Name a topic, a TOPIC-PARTITION or a whole regular expression"
        ) from error
    before = pattern in catalog.refresh().paused
    catalog.transact(lambda state: None if pattern in state.paused else RoundsPaused(pattern=pattern, by=by, reason=reason))
    tidy(catalog)
    return not before


def resume(catalog: CatalogLog, pattern: str, by: str) -> None:
    """Raises UsageError for a pattern that nothing was paused by."""
    known = catalog.refresh().paused
    if pattern not in known:
        hint = f"Paused are: {', '.join(known)}" if known else "Nothing is paused"
        raise UsageError(f"nothing was paused by {pattern!r}", hint=hint)
    catalog.transact(lambda state: RoundsResumed(pattern=pattern, by=by) if pattern in state.paused else None)
    tidy(catalog)


def want(catalog: CatalogLog, name: TopicPartition, by: str) -> None:
    """A daemon begins a round over it at its next scan."""
    since = catalog.refresh().slot
    body = RoundWanted(topic=name.topic, partition=name.partition, by=by)
    catalog.transact(lambda state: None if str(name) in state.wanted and state.wanted[str(name)].slot > since else body)
    tidy(catalog)
