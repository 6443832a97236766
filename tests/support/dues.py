"""Judged partitions as the daemon's scheduler sees them, without a control log."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from compactor.control.state import PartitionState, Quarantine
from compactor.control.summary import GroupAwaitingDeletionSummary, summarize_state
from compactor.daemon.scheduling import Due
from compactor.model.ids import TopicPartition

OF_DUE = {entry.name for entry in fields(Due)}


def due_of(name: TopicPartition, slot: int = 1, **changes: Any) -> Due:
    """``changes``: fields of Due, or else of its summary."""
    state = PartitionState(topic=name.topic, partition=name.partition, incarnation=name.incarnation, slot=slot)
    return changed(Due(summarize_state(state)), **changes)


def changed(due: Due, **changes: Any) -> Due:
    judged = {name: changes.pop(name) for name in OF_DUE & changes.keys()}
    return replace(due, summary=due.summary.model_copy(update=changes), **judged)


def waiting(size_bytes: int) -> tuple[GroupAwaitingDeletionSummary, ...]:
    group = GroupAwaitingDeletionSummary(slot=1, since_ms=None, run_id="r", undone=False, segments=1, size_bytes=size_bytes)
    return (group,) if size_bytes else ()


def quarantine(at_ms: int, failures: int = 1, reason: str = "bad", segment: str = "") -> Quarantine:
    return Quarantine(reason=reason, segment=segment, failures=failures, slot=1, at_ms=at_ms)
