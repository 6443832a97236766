"""Statuses of rounds as they are stored, printed and compared."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class RoundStatus(StrEnum):
    """Outcome of a round over one partition, or of another job that the daemon runs for a partition. The `run` command prints it."""

    CLEANED = "cleaned"
    RESUMED = "resumed"
    EXPIRED = "expired"
    """Only retention had something to do."""
    NOTHING_TO_DO = "nothing_to_do"
    WAITING = "waiting"
    PAUSED = "paused"
    QUARANTINED = "quarantined"
    LEASED = "leased"
    FENCED = "fenced"
    RETIRED = "retired"
    OUT_OF_BUDGET = "out_of_budget"
    STOPPED = "stopped"
    FAILED = "failed"


PUBLISHING: Final = (RoundStatus.CLEANED, RoundStatus.RESUMED)
"""Statuses of rounds that published new segments."""
CHANGING: Final = (*PUBLISHING, RoundStatus.EXPIRED)
"""Statuses of rounds that changed what readers read."""


class RunHistoryStatus(StrEnum):
    """Status of a round in the run history that the control log keeps. Records that other versions of the program wrote may have further
    values.
    """

    RUNNING = "running"
    PUBLISHED = "published"
    CLEANED = "cleaned"
    RESUMED = "resumed"
    RESTORED = "restored"
    REPAIRED = "repaired"
    UNDONE = "undone"
    REVERTED = "reverted"
    REVERTED_IN_PART = "reverted_in_part"
    QUARANTINED = "quarantined"
