"""Deletion times: the only place that computes grace, undo window and the age of unfinished imports.

Pure functions over frozen values. ``since`` maps slots to the store's time of each. A slot whose time is unknown counts from ``now_ms``, so
that nothing is deleted too early. All times are in milliseconds by the store's clock.
"""

from __future__ import annotations

from collections.abc import Mapping

from compactor.control.ports import ObjectRetention
from compactor.control.state import GroupAwaitingDeletion, OpenImport
from compactor.control.summary import GroupAwaitingDeletionSummary, ImportSummary

ReplacedGroup = GroupAwaitingDeletion | GroupAwaitingDeletionSummary
"""Segments that left the view and wait for deletion."""


def grace_period_ms(group: ReplacedGroup, retention: ObjectRetention) -> int:
    """Return how long a group of replaced segments is kept after readers stopped using it, in milliseconds: the time recorded with the
    group or the time in the settings, whichever is longer.

    The undo window applies only to groups that ``undo`` can restore.
    """
    grace = max(retention.grace_ms, group.grace_ms or 0)
    return grace if group.undone else max(grace, retention.undo_window_ms, group.undo_window_ms or 0)


def earliest_deletion_time_ms(group: ReplacedGroup, retention: ObjectRetention, slot_times_ms: Mapping[int, int], now_ms: int) -> int:
    """Return the first time at which a group of replaced segments may be deleted, in milliseconds by the store's clock.

    :param slot_times_ms: position of a record in the control log (slot) -> the store's modification time of that record, in milliseconds.
    :param now_ms: the store's present time, used instead if ``slot_times_ms`` lacks the record that replaced the group.
    """
    return slot_times_ms.get(group.slot, now_ms) + grace_period_ms(group, retention)


def import_abandoned_at_ms(
    registration: OpenImport | ImportSummary, retention: ObjectRetention, slot_times_ms: Mapping[int, int], now_ms: int
) -> int:
    """Return the first time at which an open import is regarded as abandoned, in milliseconds by the store's clock.

    :param slot_times_ms: position of a record in the control log (slot) -> the store's modification time of that record, in milliseconds.
    :param now_ms: the store's present time, used instead if ``slot_times_ms`` lacks the record that registered the import.
    """
    return slot_times_ms.get(registration.slot, now_ms) + retention.orphan_age_ms
