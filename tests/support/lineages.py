"""Records of a broker's lineage, as processes of earlier versions wrote them on their own."""

from collections.abc import Sequence

from compactor.control.logs import PartitionLog
from compactor.control.records import LineageRecorded
from compactor.control.state import PartitionState
from compactor.model.segment import EpochEntry


def record_lineage(log: PartitionLog, lineage: Sequence[EpochEntry], end_offset: int) -> PartitionState:
    """Append the broker's lineage, with the end of its log (exclusive), unless it is the one that the log has."""
    body = LineageRecorded(lineage=tuple(lineage), end_offset=end_offset)
    log.refresh()
    return log.append_due_records(lambda state: None if (state.lineage, state.lineage_end) == (body.lineage, end_offset) else body)
