"""Pauses and requested rounds: records of the tier-wide log that all compactors obey."""

from __future__ import annotations

import re

from compactor.control.logs import CatalogLog, write_snapshot_if_due
from compactor.control.records import RoundRequested, RoundsPaused, RoundsResumed
from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition


def pattern_matches(pattern: str, partition: TopicPartition) -> bool:
    """Return whether a regular expression matches a partition. It must match the whole topic name, or the whole name ``topic-partition``
    with or without the suffix of the incarnation.
    """
    return any(re.fullmatch(pattern, text) for text in (partition.topic, str(partition.first_incarnation), str(partition)))


def round_pause_reason_or_empty(state: CatalogState, partition: TopicPartition) -> str:
    """Return why no round may begin over this partition, with author and pattern of the pause; an empty string if no pause matches it."""
    for pattern, pause in state.paused.items():
        if pattern_matches(pattern, partition):
            return (
                f"paused by {pause.by}"
                + (f": {pause.reason}" if pause.reason else "")
                + (f" ({pattern})" if pattern != str(partition) else "")
            )
    return ""


def add_round_pause_unless_present(catalog: CatalogLog, pattern: str, operator: str, reason: str) -> bool:
    """Pause rounds over the partitions that a pattern matches. Returns whether the pattern was not paused before.

    Raises UsageError if the pattern is not a valid regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{pattern!r} is not a valid regular expression: {error}", hint="Name a topic, a TOPIC-PARTITION or a whole regular expression"
        ) from error
    before = pattern in catalog.refresh().paused
    catalog.append_due_records(lambda state: None if pattern in state.paused else RoundsPaused(pattern=pattern, by=operator, reason=reason))
    write_snapshot_if_due(catalog)
    return not before


def end_round_pause_with_pattern(catalog: CatalogLog, pattern: str, operator: str) -> None:
    """End the pause that has this pattern. ``operator``: the person, for the log. Raises UsageError if there is no such pause."""
    known = catalog.refresh().paused
    if pattern not in known:
        hint = f"Paused are: {', '.join(known)}" if known else "Nothing is paused"
        raise UsageError(f"nothing was paused by {pattern!r}", hint=hint)
    catalog.append_due_records(lambda state: RoundsResumed(pattern=pattern, by=operator) if pattern in state.paused else None)
    write_snapshot_if_due(catalog)


def request_round(catalog: CatalogLog, partition: TopicPartition, operator: str) -> None:
    """Record a person's request for a round over a partition. A daemon starts it at its next scan."""
    since = catalog.refresh().slot
    body = RoundRequested(topic=partition.topic, partition=partition.partition, incarnation=partition.incarnation, by=operator)
    catalog.append_due_records(lambda state: None if str(partition) in state.wanted and state.wanted[str(partition)].slot > since else body)
    write_snapshot_if_due(catalog)
