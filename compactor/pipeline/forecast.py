"""``plan``: what a round would read, write and cost, from metadata alone."""

from __future__ import annotations

from dataclasses import dataclass

from compactor.model.ids import TopicPartition
from compactor.pipeline.planning import assess
from compactor.pipeline.tier import Tier

KEY_BYTES = 20
READ_REQUEST_USD = 0.4e-6
WRITE_REQUEST_USD = 5e-6
"""S3 Standard in us-east-1, November 2026; traffic inside a region is free."""

CONTROL_WRITES = 6
"""Records of a round: leadership taken and given back, plan, publication, history, hint; one receipt a group comes on top."""


@dataclass(frozen=True)
class SegmentForecast:
    id: str
    start_offset: int
    end_offset: int
    bytes: int
    action: str
    why: str


@dataclass(frozen=True)
class Forecast:
    """Bytes and counts; ``bytes_to_write`` and ``map_keys`` are upper bounds. ``cost_usd``: requests to S3, 0 for a directory."""

    topic: str
    partition: int
    due: bool
    reason: str
    dirty_ratio: float
    segments: tuple[SegmentForecast, ...]
    skip: int
    bytes_to_read: int
    bytes_to_write: int
    map_keys: int
    map_engine: str
    passes: int
    peak_disk_bytes: int
    requests: int
    cost_usd: float


def forecast(opened: Tier, name: TopicPartition, now_ms: int, *, force: bool = False) -> Forecast:
    """Reads the partition's control log only."""
    state = opened.open(name).refresh()
    cleaner = opened.settings.cleaner_for(name.topic)
    found = assess(state, cleaner, now_ms, force=force)
    rewritten = [s for s in found.segments if found.dirty or s.id in found.horizon_due] if found.due else []
    ids = {segment.id for segment in rewritten}
    dirty = {segment.id for segment in found.dirty}
    segments = []
    for segment in state.live:
        why = "dirty" if segment.id in dirty else "clean, but its keys may be superseded" if found.dirty else "a delete horizon has passed"
        if segment.start_offset >= found.end:
            why = "behind the round's end"
        elif segment.id not in ids:
            why = "nothing is due"
        action = "rewrite" if segment.id in ids else "skip"
        segments.append(SegmentForecast(segment.id, segment.start_offset, segment.end_offset, segment.size_bytes, action, why))
    # Headers of all segments are read for the outcomes of transactions; what does not stay on the disk is fetched once more.
    once = state.bytes if rewritten else 0
    budget = cleaner.disk_budget_bytes
    again = sum(s.size_bytes for s in rewritten) if isinstance(budget, int) and once > budget else 0
    writing = sum(s.size_bytes for s in rewritten)
    objects_read = sum(len(s.files) for s in (state.live if rewritten else ()))
    objects_written = sum(len(s.files) for s in rewritten)
    requests = objects_read + 2 * objects_written + CONTROL_WRITES + len(rewritten) if rewritten else 0
    usd = objects_read * READ_REQUEST_USD + (objects_written + CONTROL_WRITES + len(rewritten)) * WRITE_REQUEST_USD
    return Forecast(
        topic=name.topic,
        partition=name.partition,
        due=found.due,
        reason=found.reason,
        dirty_ratio=round(found.dirty_ratio, 6),
        segments=tuple(segments),
        skip=sum(segment.action == "skip" for segment in segments),
        bytes_to_read=once + again,
        bytes_to_write=writing,
        map_keys=sum(s.records for s in found.dirty) if found.due else 0,
        map_engine="memory",
        passes=1 if rewritten else 0,
        peak_disk_bytes=min(once + writing, budget) if isinstance(budget, int) else once + writing,
        requests=requests,
        cost_usd=round(usd, 6) if rewritten and opened.ports.data.url.startswith("s3:") else 0.0,
    )
