"""Stages of a round, and which of them may follow which (announce before upload before publish before retire, I4).

docs/publication.md shows the table; tests/unit/test_control_ordering.py compares them.
"""

from __future__ import annotations

from enum import StrEnum

from compactor.control.state import RoundIntent
from compactor.errors import CompactorError


class RoundStage(StrEnum):
    """Stages that a round can pass through, from its announcement to the deletion of the replaced segments. STAGES says in which order."""

    ANNOUNCED = "announced"
    UPLOADED = "uploaded"
    VERIFIED = "verified"
    PUBLISH_BEGUN = "publish begun"
    PUBLISHED = "published"
    RETIRE_BEGUN = "retire begun"
    DELETED = "deleted"
    RETIRED = "retired"
    UNDONE = "undone"
    REVERTED = "reverted"


_T = RoundStage
STAGES: dict[RoundStage | None, frozenset[RoundStage]] = {
    None: frozenset({_T.ANNOUNCED}),
    _T.ANNOUNCED: frozenset({_T.UPLOADED, _T.UNDONE}),
    _T.UPLOADED: frozenset({_T.VERIFIED, _T.UNDONE}),
    _T.VERIFIED: frozenset({_T.PUBLISH_BEGUN, _T.PUBLISHED, _T.UNDONE}),
    _T.PUBLISH_BEGUN: frozenset({_T.PUBLISHED}),
    _T.PUBLISHED: frozenset({_T.RETIRE_BEGUN, _T.REVERTED}),
    _T.REVERTED: frozenset({_T.RETIRE_BEGUN}),
    _T.UNDONE: frozenset({_T.DELETED}),
    _T.RETIRE_BEGUN: frozenset({_T.DELETED}),
    _T.DELETED: frozenset({_T.RETIRED}),
    _T.RETIRED: frozenset(),
}
"""Before PUBLISHED a round can only be undone (UNDONE), after it only go forward; REVERTED is a publication of its own (``undo``).
PUBLISH_BEGUN comes between them where readers are switched in several steps (brokers), and cannot be undone either. An undone intent has
nothing to retire, so it ends with DELETED. Grace lies between PUBLISHED or REVERTED and RETIRE_BEGUN.

UPLOADED means that all groups have receipts: each was rewritten, passed the gate and was uploaded, in this order.
"""


def stage_of_intent(intent: RoundIntent) -> RoundStage:
    """Return the stage that an open intent has reached according to the control log. A resumed round continues from there."""
    if intent.begun_slot:
        return RoundStage.PUBLISH_BEGUN
    return RoundStage.ANNOUNCED if intent.pending_tasks else RoundStage.UPLOADED


class RoundStageTracker:
    """Present stage of one round, or of segments that are retired together. Refuses every change that STAGES does not allow."""

    def __init__(self, stage: RoundStage | None = None) -> None:
        self.stage = stage

    def advance_to_stage(self, stage: RoundStage) -> None:
        """Change the present stage to ``stage``. Raises CompactorError (a bug) if it may not follow the present one."""
        if stage not in STAGES[self.stage]:
            raise CompactorError(f"a round cannot go from {self.stage or 'nothing'} to {stage}", hint="This is a bug; please report it")
        self.stage = stage
