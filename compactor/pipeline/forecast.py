"""``plan``: what a round would read, write, cost and save, from metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from compactor.config import Cleaner
from compactor.metadata.summary import PartitionSummary, SegmentSummary, summarize
from compactor.model.ids import TopicPartition
from compactor.pipeline.planning import Assessment, assess
from compactor.pipeline.tier import Tier
from compactor.storage.probe import deletes_free_space

KEY_BYTES = 20
READ_REQUEST_USD = 0.4e-6
WRITE_REQUEST_USD = 5e-6
"""S3 Standard in us-east-1, November 2026; traffic inside a region is free."""

CONTROL_WRITES = 6
"""Records of a round: leadership taken and given back, plan, publication, history, hint; one receipt a group comes on top."""


class SegmentForecast(NamedTuple):
    id: str
    start_offset: int
    end_offset: int
    bytes: int
    action: str
    why: str


@dataclass(frozen=True)
class Forecast:
    """Bytes and counts; ``bytes_to_write`` and ``map_keys`` are upper bounds. ``cost_usd``: requests to S3, 0 for a directory.

    ``expected_saving_bytes``: what the store will hold less once the replaced objects are deleted; None where nobody can promise
    anything, and ``expected_saving_why`` says why, or what it rests on.
    """

    topic: str
    partition: int
    due: bool
    reason: str
    dirty_ratio: float
    skip: int
    bytes_to_read: int
    bytes_to_write: int
    map_keys: int
    map_engine: str
    passes: int
    peak_disk_bytes: int
    requests: int
    cost_usd: float
    expected_saving_bytes: int | None
    expected_saving_why: str
    live: Sequence[SegmentSummary] = field(repr=False)
    found: Assessment[SegmentSummary] = field(repr=False)

    @property
    def segments(self) -> list[SegmentForecast]:
        """One for each live segment; made when it is asked for, as there may be very many."""
        dirty, rewritten = {segment.id for segment in self.found.dirty}, {segment.id for segment in _rewritten(self.found)}
        clean_why = "clean, but its keys may be superseded" if self.found.dirty else "a delete horizon has passed"
        forecasts = []
        for segment in self.live:
            why = "dirty" if segment.id in dirty else clean_why
            if segment.start_offset >= self.found.end:
                why = "behind the round's end"
            elif segment.id not in rewritten:
                why = "nothing is due"
            action = "rewrite" if segment.id in rewritten else "skip"
            forecasts.append(SegmentForecast(segment.id, segment.start_offset, segment.end_offset, segment.size_bytes, action, why))
        return forecasts

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)[:-2]}
        return values | {"segments": [segment._asdict() for segment in self.segments]}


def forecast(opened: Tier, name: TopicPartition, now_ms: int, *, force: bool = False) -> Forecast:
    """Reads the partition's control log, and asks the store whether deleting frees anything there."""
    return forecast_of(opened, summarize(opened.open(name).refresh()), deletes_free_space(opened.ports.data), now_ms, force=force)


def forecast_of(opened: Tier, summary: PartitionSummary, frees_space: bool | None, now_ms: int, *, force: bool = False) -> Forecast:
    """Makes no request. ``frees_space``: as ``deletes_free_space`` has it."""
    cleaner = opened.settings.cleaner_for(summary.topic)
    found = assess(summary, cleaner, now_ms, force=force)
    rewritten = _rewritten(found)
    # Headers of all segments are read for the outcomes of transactions; what does not stay on the disk is fetched once more.
    once = summary.bytes if rewritten else 0
    budget = cleaner.disk_budget_bytes
    writing = sum(s.size_bytes for s in rewritten)
    again = writing if isinstance(budget, int) and once > budget else 0
    objects_read = sum(s.file_count for s in (summary.live if rewritten else ()))
    objects_written = sum(s.file_count for s in rewritten)
    requests = objects_read + 2 * objects_written + CONTROL_WRITES + len(rewritten) if rewritten else 0
    usd = objects_read * READ_REQUEST_USD + (objects_written + CONTROL_WRITES + len(rewritten)) * WRITE_REQUEST_USD
    saving, why = _saving(summary, writing, frees_space)
    return Forecast(
        topic=summary.topic,
        partition=summary.partition,
        due=found.due or bool(summary.open_run),
        reason=f"run {summary.open_run} was begun and not finished" if summary.open_run else found.reason,
        dirty_ratio=round(found.dirty_ratio, 6),
        skip=summary.segments - len(rewritten),
        bytes_to_read=once + again,
        bytes_to_write=writing,
        map_keys=sum(s.records for s in found.dirty) if found.due else 0,
        map_engine="memory",
        passes=1 if rewritten else 0,
        peak_disk_bytes=_peak_disk(cleaner, once + writing),
        requests=requests,
        cost_usd=round(usd, 6) if rewritten and opened.ports.data.url.startswith("s3:") else 0.0,
        expected_saving_bytes=saving,
        expected_saving_why=why,
        live=summary.live,
        found=found,
    )


def _rewritten(found: Assessment[SegmentSummary]) -> Sequence[SegmentSummary]:
    if not found.due:
        return ()
    return found.segments if found.dirty else [segment for segment in found.clean if segment.id in found.horizon_due]


def _peak_disk(cleaner: Cleaner, wanted: int) -> int:
    return min(wanted, cleaner.disk_budget_bytes) if isinstance(cleaner.disk_budget_bytes, int) else wanted


def _saving(summary: PartitionSummary, writing: int, frees_space: bool | None) -> tuple[int | None, str]:
    if not writing:
        return 0, "nothing is rewritten"
    if frees_space is None:
        return None, "the store does not say whether it keeps what is deleted; `config check` says what is missing"
    if not frees_space:
        return None, "the bucket keeps what is deleted (versioning or Object Lock), so that deleting saves nothing until that expires"
    if summary.kept_share < 0:
        return None, "no round of this partition is remembered to judge by"
    why = f"its last round kept {100 * summary.kept_share:.0f} % of the bytes that it rewrote"
    return max(0, round(writing * (1 - summary.kept_share))), why
