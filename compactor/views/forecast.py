"""``plan``: what a round would read, write, cost and save, from metadata and the heads of sidecars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from compactor.bootstrap import Tier
from compactor.cleaner.keys.buckets import passes_needed
from compactor.config import Cleaner
from compactor.control.savings import expected
from compactor.control.summary import PartitionSummary, SegmentSummary, summarize
from compactor.model.ids import TopicPartition
from compactor.round.plan import Assessment, assess
from compactor.round.skip import (
    KEY_BYTES,
    FilterRecord,
    engine_for,
    filter_record,
    horizon_passed,
    keys_expected,
    look_at,
    records_about,
)
from compactor.storage.probe import deletes_free_space
from compactor.tier.sidecars import MISSING, Head
from compactor.views.prices import CONTROL_WRITES, PriceTable, prices_for


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

    ``stored_usd_month``: what all live and replaced segments cost a month. By the prices that were handed in (views.prices).

    ``skip``: segments that the round is expected to leave alone; ``asked``: those about which only their filters will tell. Of these as
    many are expected to be skipped as in the rounds before.

    ``expected_saving_bytes``: what the store will hold less once the replaced objects are deleted; None where nobody can promise
    anything, and ``expected_saving_why`` says why, or what it rests on; from a sample it is known up to ``expected_saving_error_bytes``.
    """

    topic: str
    partition: int
    due: bool
    reason: str
    dirty_ratio: float
    skip: int
    asked: int
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
    expected_saving_error_bytes: int | None
    expected_saving_usd_month: float | None
    stored_usd_month: float
    negative_timestamps: int
    live: int = field(repr=False)
    listed: Callable[[], Sequence[SegmentForecast]] = field(repr=False)

    @property
    def segments(self) -> Sequence[SegmentForecast]:
        """One for each live segment; of a partition that is not due made when asked for, as there may be very many."""
        return self.listed()

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)[:-2]}
        return values | {"segments": [segment._asdict() for segment in self.segments]}


@dataclass(frozen=True)
class SidecarEvidence:
    """What sidecars say. ``heads``: by segment id; ``record``: what filters have brought on the partition so far."""

    heads: Mapping[str, Head]
    record: FilterRecord


def known_of(opened: Tier, summary: PartitionSummary, now_ms: int, *, force: bool = False) -> SidecarEvidence | None:
    """Reads the heads of sidecars, where a round is due that would ask for them. Raises StoreError."""
    cleaner = opened.cleaner_for(summary.topic)
    found = assess(summary, cleaner, now_ms, force=force)
    if not found.due or not cleaner.bloom:
        return None
    if not found.clean and sum(records_about(segment) for segment in found.dirty) * KEY_BYTES <= cleaner.map_budget_bytes:
        return None  # whatever they say, all is read and the keys fit
    runs = opened.open(summary.name).refresh().runs if found.clean else ()
    return SidecarEvidence(opened.sidecars(summary.name).heads([segment.id for segment in found.segments]), filter_record(runs))


def forecast(opened: Tier, name: TopicPartition, now_ms: int, *, force: bool = False) -> Forecast:
    """Reads the partition's control log and sidecars, and asks the store whether deleting frees anything there."""
    summary = summarize(opened.open(name).refresh())
    known = known_of(opened, summary, now_ms, force=force)
    return forecast_of(opened, summary, deletes_free_space(opened.ports.data), now_ms, force=force, known=known)


def forecast_of(
    opened: Tier,
    summary: PartitionSummary,
    frees_space: bool | None,
    now_ms: int,
    *,
    force: bool = False,
    known: SidecarEvidence | None = None,
    prices: PriceTable | None = None,
) -> Forecast:
    """Makes no request. ``frees_space``: as ``deletes_free_space`` has it. ``known``: None where no sidecar is to be asked.

    ``prices``: None for those of the tier's kind of store.
    """
    prices = prices or prices_for(opened.settings.tier_url)
    cleaner = opened.cleaner_for(summary.topic)
    found = assess(summary, cleaner, now_ms, force=force)
    heads = known.heads if known else {}
    keys = keys_expected([heads.get(s.id, _NO_HEAD) for s in found.dirty], [records_about(s) for s in found.dirty]) if found.due else 0
    segments = _segments(summary, found, known, keys, now_ms) if found.due else []
    sizes = {action: sum(s.bytes for s in segments if s.action == action) for action in ("rewrite", "filter", "skip")}
    count = {action: sum(s.action == action for s in segments) for action in ("rewrite", "filter", "skip")}
    spared = known.record.skip_rate if known else 0.0
    # Behind the round's end, too, headers are read for the outcomes of transactions where no sidecar tells them.
    behind = sum(s.size_bytes for s in summary.live if s.start_offset >= found.end and s.id not in heads) if found.due else 0
    once = sizes["rewrite"] + round(sizes["filter"] * (1 - spared)) + behind
    budget = cleaner.disk_budget_bytes
    dirty = sum(s.size_bytes for s in found.dirty) if found.due else 0
    again = dirty if isinstance(budget, int) and dirty > budget else 0
    writing = sizes["rewrite"] + sizes["filter"]
    engine = engine_for(cleaner.map_engine, keys, cleaner.map_budget_bytes)
    passes = _passes(cleaner, found, engine) if writing else 0
    files = {s.id: s.file_count for s in summary.live}
    touched = [files[s.id] for s in segments if s.action == "rewrite"] + [files[s.id] for s in segments if s.action == "filter"]
    objects_read = passes * len(found.dirty) + sum(touched) + len(heads) + count["filter"] if writing else 0
    objects_written = sum(touched)
    requests = objects_read + 2 * objects_written + CONTROL_WRITES + len(touched) if writing else 0
    usd = prices.requests_usd(objects_read, objects_written + CONTROL_WRITES + len(touched))
    late = [s for s in segments if s.action == "rewrite"] if not dirty else []
    saving, why = _saving(summary, writing, dirty, frees_space, _tombstones(late, heads))
    return Forecast(
        topic=summary.topic,
        partition=summary.partition,
        due=found.due or bool(summary.open_run),
        reason=f"run {summary.open_run} was begun and not finished" if summary.open_run else found.reason,
        dirty_ratio=round(found.dirty_ratio, 6),
        skip=summary.segments - count["rewrite"] - count["filter"] + int(count["filter"] * spared),
        asked=count["filter"],
        bytes_to_read=once + again,
        bytes_to_write=writing,
        map_keys=keys,
        map_engine=engine,
        passes=passes,
        peak_disk_bytes=_peak_disk(cleaner, once + writing),
        requests=requests,
        cost_usd=usd if writing else 0.0,
        expected_saving_bytes=saving,
        expected_saving_why=why,
        expected_saving_error_bytes=None,
        expected_saving_usd_month=None if saving is None else prices.stored_usd_month(saving),
        stored_usd_month=prices.stored_usd_month(summary.bytes + sum(group.size_bytes for group in summary.waiting)),
        negative_timestamps=summary.negative_timestamps,
        live=summary.segments,
        listed=lambda: segments if found.due else _segments(summary, found, known, keys, now_ms),
    )


_NO_HEAD = Head(None, MISSING, 0)


def _segments(
    summary: PartitionSummary, found: Assessment[SegmentSummary], known: SidecarEvidence | None, keys: int, now_ms: int
) -> list[SegmentForecast]:
    """One for each live segment: what becomes of it, and why. Actions: rewrite, skip, or filter (its filter will tell)."""
    dirty, clean = {segment.id for segment in found.dirty}, {segment.id for segment in found.clean}

    def of(segment: SegmentSummary) -> tuple[str, str]:
        if segment.start_offset >= found.end:
            return "skip", "behind the round's end"
        if not found.due:
            return "skip", "nothing is due"
        if segment.id in dirty:
            return "rewrite", "dirty"
        late = horizon_passed(segment, now_ms)
        if not dirty or segment.id not in clean:
            return ("rewrite", late) if late else ("skip", "nothing is due")
        if known is None:
            return "rewrite", late or "clean, but its keys may be superseded"
        look = look_at(known.heads.get(segment.id, _NO_HEAD), late, keys=keys, record=known.record, now_ms=now_ms)
        if look.must:
            return "rewrite", look.must
        return ("skip", look.may) if look.may else ("filter", "clean, and its filter is asked for the keys of the dirty range")

    return [SegmentForecast(s.id, s.start_offset, s.end_offset, s.size_bytes, *of(s)) for s in summary.live]


def _passes(cleaner: Cleaner, found: Assessment[SegmentSummary], engine: str) -> int:
    """How often the dirty range is read for its keys."""
    if engine != "partitioned" or not isinstance(cleaner.disk_budget_bytes, int):
        return 1
    rows, largest = sum(records_about(s) for s in found.dirty), max((s.size_bytes for s in found.segments), default=0)
    return passes_needed(rows, max(1, cleaner.disk_budget_bytes - largest))


def _peak_disk(cleaner: Cleaner, wanted: int) -> int:
    return min(wanted, cleaner.disk_budget_bytes) if isinstance(cleaner.disk_budget_bytes, int) else wanted


def _tombstones(segments: Sequence[SegmentForecast], heads: Mapping[str, Head]) -> int | None:
    """How many lie in these segments; None where a sidecar is missing that would tell."""
    known = [head.sidecar.due.tombstones for s in segments if (head := heads.get(s.id)) is not None and head.sidecar is not None]
    return sum(known) if len(known) == len(segments) else None


def _saving(
    summary: PartitionSummary, writing: int, dirty: int, frees_space: bool | None, tombstones: int | None
) -> tuple[int | None, str]:
    if not writing:
        return 0, "nothing is rewritten"
    if frees_space is None:
        return None, "the store does not say whether it keeps what is deleted; `config check` says what is missing"
    if not frees_space:
        return None, "the bucket keeps what is deleted (versioning or Object Lock), so that deleting saves nothing until that expires"
    saving, why = expected(summary.rates, dirty, writing, tombstones)
    return (None if saving is None else min(saving, writing)), why
