"""When something may be deleted: the one place that counts grace, the undo window and the age of what nobody finished.

Pure functions over frozen values. ``since`` has the store's time of each slot that something waits from; a slot whose time is not
known counts from ``now_ms``, so that nothing goes too early. All times in milliseconds by the store's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from compactor.control.ports import Retention


class WaitsFrom(Protocol):
    """What waits from a slot on: a group of replaced segments, an open import, or the summary of either."""

    @property
    def slot(self) -> int: ...


class WaitingGroup(WaitsFrom, Protocol):
    """Segments that left the view: state.Waiting, or its summary."""

    @property
    def undone(self) -> bool: ...
    @property
    def grace_ms(self) -> int | None: ...
    @property
    def undo_window_ms(self) -> int | None: ...


def keep_ms(group: WaitingGroup, retention: Retention) -> int:
    """How long the group is kept: what was recorded with it or what is configured here, whichever is more.

    The outputs of an undone round need no undo window. Where nothing was recorded, what is configured counts.
    """
    grace = max(retention.grace_ms, group.grace_ms or 0)
    return grace if group.undone else max(grace, retention.undo_window_ms, group.undo_window_ms or 0)


def retire_ms(group: WaitingGroup, retention: Retention, since: Mapping[int, int], now_ms: int) -> int:
    """The first moment at which the group may be deleted."""
    return since.get(group.slot, now_ms) + keep_ms(group, retention)


def stale_ms(entry: WaitsFrom, retention: Retention, since: Mapping[int, int], now_ms: int) -> int:
    """The first moment at which nobody takes an open import for one that is still at work."""
    return since.get(entry.slot, now_ms) + retention.orphan_age_ms
