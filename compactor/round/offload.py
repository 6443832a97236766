"""Decision which partitions go to Spark under ``map_engine = "auto"``. Pure."""

from __future__ import annotations

from compactor.cleaner.keys.disk_map import count_log_scans_to_fit_disk
from compactor.config.settings import CleanerSettings, SparkSettings
from compactor.config.units import format_size
from compactor.kernels.common import KEY_BYTES
from compactor.model.base import ReasonOrEmpty
from compactor.round.plan import RoundAssessment, S
from compactor.round.skip import estimate_record_count

FEW_PASSES = 3
"""Number of passes over the keys up to which this process does the work, although it reads the dirty range as often."""


def reason_to_run_on_spark(cleaner: CleanerSettings, spark: SparkSettings, assessment: RoundAssessment[S]) -> ReasonOrEmpty:
    """Return the reason why a due round goes to the Spark cluster of [spark] master, or an empty string if this process does it.

    :param assessment: decision that the round is due, with the segments it covers.
    """
    if cleaner.map_engine != "auto" or not spark.uses_spark_cluster or not assessment.due:
        return ""
    size = sum(segment.size_bytes for segment in assessment.covered_segments)
    if 0 < spark.above_bytes < size:
        return f"its {format_size(size)} are more than [spark] above_bytes"
    budget = cleaner.disk_budget_bytes
    if not isinstance(budget, int):
        return ""
    largest = max((segment.size_bytes for segment in assessment.covered_segments), default=0)
    if 2 * largest > budget:
        return f"its largest segment of {format_size(largest)} and the output do not fit disk_budget_bytes"
    if sum(estimate_record_count(segment) for segment in assessment.dirty) * KEY_BYTES <= cleaner.map_budget_bytes:
        return ""
    passes = expected_scan_count_of_dirty_range(cleaner, assessment)
    return f"the keys would need {passes} passes" if passes > FEW_PASSES else ""


def expected_scan_count_of_dirty_range(cleaner: CleanerSettings, assessment: RoundAssessment[S]) -> int:
    """Return how many times the partitioned engine would have to read the dirty range to collect its keys; 1 if the disk budget is
    ``auto``.
    """
    if not isinstance(cleaner.disk_budget_bytes, int):
        return 1
    rows, largest = (
        sum(estimate_record_count(s) for s in assessment.dirty),
        max((s.size_bytes for s in assessment.covered_segments), default=0),
    )
    return count_log_scans_to_fit_disk(rows, max(1, cleaner.disk_budget_bytes - largest))
