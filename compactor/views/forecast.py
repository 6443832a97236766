"""Forecast of a round for `plan`, from metadata and the heads of sidecars."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from compactor.access.tier import Tier
from compactor.config.settings import CleanerSettings
from compactor.config.units import count_noun
from compactor.control.summary import PartitionSummary, SegmentSummary, summarize_state
from compactor.errors import BlockedCause, UsageError
from compactor.kernels.common import KEY_BYTES
from compactor.model.ids import TopicPartition, partition_of_incarnation
from compactor.model.plan import KeylessPolicy, KeylessRecords, KeylessRecordsRefused
from compactor.round.plan import (
    RoundAssessment,
    assess_round,
    expected_scan_count,
    known_refused_keyless,
    spark_reason,
)
from compactor.round.ports import (
    BloomFilterUsageStatistics,
    choose_key_engine,
    decide_by_sidecar,
    delete_horizon_passed_reason,
    estimate_distinct_keys,
    estimate_record_count,
    filter_usage_of_run,
)
from compactor.storage.probe import does_delete_free_space
from compactor.storage.schemes import CONTROL_WRITES, DIRECTORY, StorePrices, store_kind
from compactor.tier.sidecars import NO_SIDECAR, SidecarHead
from compactor.views.explain import RetentionOutlook, retention_outlook
from compactor.views.verdict import (
    Block,
    PartitionVerdict,
    TransactionAtEnd,
    VerdictKind,
    bytes_not_cleaned,
    future_timestamps_text,
    held_until_ms,
    known_bootstrap_servers,
    partition_verdict,
    stored_block,
    with_recorded_time,
)

# Prices. Traffic inside a region is free and not counted.


@dataclass(frozen=True)
class PriceTable(StorePrices):
    """Prices of one object store in USD, with their date."""

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @override
    def __str__(self) -> str:
        return f"{self.of}, {self.as_of}: {self.stored_gib_month_usd:g} USD a GiB and month"


NO_PRICES = PriceTable(**asdict(DIRECTORY.prices))
"""Prices of a store that costs nothing."""


def price_table_of_tier(tier_url: str, price_file: Path | None = None) -> PriceTable:
    """Prices of ``price_file`` (TOML), or of the tier's kind of store.

    :raises UsageError: if the file cannot be read or a field is missing, unknown or invalid.
    """
    if price_file is None:
        return PriceTable(**asdict(store_kind(tier_url).prices))
    try:
        given = tomllib.loads(price_file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{price_file} cannot be read: {error}") from error
    numbers = [field.name for field in fields(PriceTable) if field.name not in ("as_of", "of")]
    wrong = [name for name in numbers if not isinstance(given.get(name), (int, float)) or given[name] < 0]
    strange = given.keys() - {"as_of", "of", *numbers}
    if wrong or strange or not given.get("as_of"):
        message = (
            f"{', '.join(wrong)} must be numbers" if wrong else f"unknown: {', '.join(sorted(strange))}" if strange else "as_of is missing"
        )
        raise UsageError(f"{price_file} is not a valid price table: {message}", hint=f"It has as_of, of, {', '.join(numbers)}")
    return PriceTable(str(given["as_of"]), str(given.get("of", price_file.name)), **{name: float(given[name]) for name in numbers})


TOMBSTONE_BYTES = 128
"""Upper bound on the size of a tombstone, unless its key is long."""
ActionAndReason = tuple[str, str]
SavedBytesAndReason = tuple[int | None, str]
"""Expected bytes that the store shrinks by, or None if unknown; and what this is based on, or why it is unknown."""


class SegmentActionForecast(NamedTuple):
    """Expected action of a round on one segment. end_offset: inclusive.

    action: expire, rewrite, skip, or filter (skipped if the segment's Bloom filter shows that it holds none of the dirty keys).
    """

    id: str
    start_offset: int
    end_offset: int
    bytes: int
    action: str
    why: str


@dataclass(frozen=True)
class RoundForecast:
    """Sizes are in bytes; bytes_to_write and map_keys are upper bounds.

    due: true also if only retention deletes something.
    segments_expired, bytes_expired: what retention deletes first; not counted in bytes_to_read and bytes_to_write.
    one_to_one: as in RetentionOutlook.
    min_cleanable_dirty_ratio: if chosen automatically, the next two fields say why, and how much it saves in comparison with Kafka's
        default.
    skip: expected number, including the expected share of ``asked``.
    asked: number of segments whose Bloom filters decide. The share is that of earlier rounds.
    stored_usd_month: of all live and replaced segments.
    expected_saving_bytes: once replaced objects are deleted; None if unknown.
    expected_saving_error_bytes: half width of the 95 % confidence interval; None without a sample.
    keyless_records, keyless_share: in the dirty range, the share from 0 to 1; None before the first round or sample.
    """

    topic: str
    partition: int
    incarnation: int
    due: bool
    reason: str
    retention: str
    segments_expired: int
    bytes_expired: int
    log_start_offset: int
    next_expiry_ms: int | None
    one_to_one: int
    dirty_ratio: float
    min_cleanable_dirty_ratio: float
    min_cleanable_dirty_ratio_why: str
    min_cleanable_dirty_ratio_saves_usd_month: float | None
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
    keyless_records: int | None
    keyless_share: float | None
    keyless_policy: KeylessPolicy
    future_timestamps: str
    verdict: PartitionVerdict
    live: int = field(repr=False)
    listed: Callable[[], Sequence[SegmentActionForecast]] = field(repr=False)

    @property
    def topic_partition(self) -> TopicPartition:
        return partition_of_incarnation(self.topic, self.partition, self.incarnation)

    @property
    def segments(self) -> Sequence[SegmentActionForecast]:
        """If no round is due, the list, which may be very long, is computed here."""
        return self.listed()

    def with_keyless_records(self, keyless: KeylessRecords) -> RoundForecast:
        """A round that refuses these records saves nothing."""
        known = replace(self, keyless_records=keyless.count, keyless_share=round(keyless.share, 6))
        if self.keyless_policy != "refuse" or not keyless.count:
            return known
        refusal = KeylessRecordsRefused(self.topic, keyless)
        verdict = self.verdict
        if not verdict.is_blocked:
            verdict = replace(verdict, kind=VerdictKind.BLOCKED, cause=BlockedCause.KEYLESS.value, reason=refusal.message)
        return replace(
            known,
            verdict=verdict,
            reason=str(refusal),
            expected_saving_bytes=0,
            expected_saving_why="records without a key are refused, so that no round is made",
            expected_saving_error_bytes=None,
            expected_saving_usd_month=0.0,
        )

    def document(self) -> dict[str, Any]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)[:-2]} | {"verdict": self.verdict.document()}
        return values | {"segments": [segment._asdict() for segment in self.segments]}


@dataclass(frozen=True)
class RoundCircumstances:
    """Circumstances besides stored state that prevent a round.

    block: why brokers or the topic's settings rule out rounds.
    paused: who paused rounds; empty if nobody did.
    """

    block: Block | None = None
    paused: str = ""
    transaction: TransactionAtEnd | None = None


NO_CIRCUMSTANCES = RoundCircumstances()


@dataclass(frozen=True)
class SkipEvidence:
    """Sidecar headers by segment id, and segments that Bloom filters let earlier rounds skip."""

    heads: Mapping[str, SidecarHead]
    record: BloomFilterUsageStatistics


def read_skip_evidence(tier: Tier, summary: PartitionSummary, now_ms: int, *, force: bool = False) -> SkipEvidence | None:
    """Returns None if no round is due, or the round uses no sidecar. Raises StoreError."""
    cleaner = tier.cleaner_settings_for_topic(summary.topic)
    found = assess_round(summary, cleaner, now_ms, force=force)
    if not found.due or not cleaner.bloom:
        return None
    if not found.clean and sum(estimate_record_count(segment) for segment in found.dirty) * KEY_BYTES <= cleaner.map_budget_bytes:
        return None  # whatever they say, all is read and the keys fit
    return SkipEvidence(
        tier.open_sidecar_store(summary.topic_partition).load_sidecar_heads([segment.id for segment in found.covered_segments]),
        filter_usage_of_run(summary.filter_stats),
    )


def forecast_next_round(tier: Tier, partition: TopicPartition, now_ms: int, *, force: bool = False) -> RoundForecast:
    """:param force: a round is due if anything is dirty."""
    summary = summarize_state(tier.open_partition_log(partition).refresh())
    known = read_skip_evidence(tier, summary, now_ms, force=force)
    return forecast_round(tier, summary, does_delete_free_space(tier.ports.data), now_ms, force=force, sidecar_evidence=known)


def forecast_round(
    tier: Tier,
    summary: PartitionSummary,
    deletion_frees_space: bool | None,
    now_ms: int,
    *,
    force: bool = False,
    sidecar_evidence: SkipEvidence | None = None,
    prices: PriceTable | None = None,
    circumstances: RoundCircumstances = NO_CIRCUMSTANCES,
) -> RoundForecast:
    """Makes no request.

    :param deletion_frees_space: None if unknown.
    :param sidecar_evidence: None to use no sidecar.
    :param prices: None for those of the tier's kind of store.
    """
    prices = prices or price_table_of_tier(tier.settings.tier_url)
    cleaner, open_run = tier.cleaner_settings_for_topic(summary.topic), summary.open_run
    found = assess_round(summary, cleaner, now_ms, force=force)
    outlook = retention_outlook(summary, found, cleaner, now_ms)
    if outlook.reason and not open_run:
        summary = _with_log_start_raised(summary, outlook)
        found = assess_round(summary, cleaner, now_ms, force=force)
    expires = f"retention: {outlook.reason}" if outlook.reason and not found.due else ""
    heads = sidecar_evidence.heads if sidecar_evidence else {}
    keys = _expected_dirty_key_count(found, heads) if found.due else 0
    all_segments = partial(_segment_forecasts, summary, found, sidecar_evidence, outlook, keys, cleaner, now_ms)
    segments = all_segments() if found.due else []
    sizes = {action: sum(s.bytes for s in segments if s.action == action) for action in ("rewrite", "filter", "skip")}
    count = {action: sum(s.action == action for s in segments) for action in ("rewrite", "filter", "skip")}
    spared = sidecar_evidence.record.idle_share if sidecar_evidence else 0.0
    # Behind the round's end, too, headers are read for the outcomes of transactions where no sidecar tells them.
    behind = sum(s.size_bytes for s in summary.live if s.start_offset >= found.end and s.id not in heads) if found.due else 0
    once = sizes["rewrite"] + round(sizes["filter"] * (1 - spared)) + behind
    dirty = sum(s.size_bytes for s in found.dirty) if found.due else 0
    again = dirty if isinstance(cleaner.disk_budget_bytes, int) and dirty > cleaner.disk_budget_bytes else 0
    writing = sizes["rewrite"] + sizes["filter"]
    offloaded = spark_reason(cleaner, tier.settings.spark, found)
    engine = "spark" if offloaded else choose_key_engine(cleaner.map_engine, keys, cleaner.map_budget_bytes)
    passes = (expected_scan_count(cleaner, found) if engine == "partitioned" else 1) if writing else 0
    files = {s.id: s.file_count for s in summary.live}
    touched = [files[s.id] for s in segments if s.action in ("rewrite", "filter")]
    objects_read = passes * len(found.dirty) + sum(touched) + len(heads) + count["filter"] if writing else 0
    requests = objects_read + 2 * sum(touched) + CONTROL_WRITES + len(touched) if writing else 0
    usd = prices.requests_usd(objects_read, sum(touched) + CONTROL_WRITES + len(touched))
    late = [s for s in segments if s.action == "rewrite"] if not dirty else []
    saving, why = _expected_saving_and_reason(summary, writing, dirty, deletion_frees_space, _count_tombstones_from_sidecars(late, heads))
    due = found.due or bool(open_run) or bool(expires)
    reason = f"run {open_run} was begun and not finished" if open_run else expires or found.reason
    forecast = RoundForecast(
        topic=summary.topic,
        partition=summary.partition,
        incarnation=summary.incarnation,
        due=due,
        reason=reason,
        retention=outlook.text,
        segments_expired=outlook.segments,
        bytes_expired=outlook.bytes,
        log_start_offset=outlook.log_start_offset,
        next_expiry_ms=outlook.next_ms,
        one_to_one=outlook.one_to_one,
        dirty_ratio=round(found.dirty_ratio, 6),
        min_cleanable_dirty_ratio=found.threshold.ratio,
        min_cleanable_dirty_ratio_why=found.threshold.why,
        min_cleanable_dirty_ratio_saves_usd_month=found.threshold.saved_usd_month,
        skip=summary.segments - outlook.segments - count["rewrite"] - count["filter"] + int(count["filter"] * spared),
        asked=count["filter"],
        bytes_to_read=once + again,
        bytes_to_write=writing,
        map_keys=keys,
        map_engine=engine,
        passes=passes,
        peak_disk_bytes=_expected_peak_disk_bytes(cleaner, once + writing),
        requests=requests,
        cost_usd=usd if writing else 0.0,
        expected_saving_bytes=saving,
        expected_saving_why=why,
        expected_saving_error_bytes=None,
        expected_saving_usd_month=None if saving is None else prices.monthly_storage_usd(saving),
        stored_usd_month=prices.monthly_storage_usd(summary.bytes + summary.waiting_bytes),
        negative_timestamps=summary.negative_timestamps,
        keyless_records=None,
        keyless_share=None,
        keyless_policy=cleaner.keyless_records,
        future_timestamps=future_timestamps_text(summary.live, now_ms),
        verdict=_verdict(summary, found, cleaner, (due, reason), circumstances, known_bootstrap_servers(tier), now_ms),
        live=summary.segments,
        listed=lambda: segments if found.due else all_segments(),
    )
    return _with_known_keyless_records(forecast, summary, cleaner, found)


def _with_log_start_raised(summary: PartitionSummary, outlook: RetentionOutlook) -> PartitionSummary:
    """`run` raises the log start first, unless it has to finish a round."""
    start = outlook.log_start_offset
    return summary.model_copy(update={"log_start_offset": start, "first_dirty_offset": max(summary.first_dirty_offset, start)})


def _with_known_keyless_records(
    forecast: RoundForecast, summary: PartitionSummary, cleaner: CleanerSettings, found: RoundAssessment[SegmentSummary]
) -> RoundForecast:
    """Records for which an earlier round was refused count if they are still in the dirty range."""
    keyless = known_refused_keyless(summary, cleaner, found.end) if found.due else None
    return forecast.with_keyless_records(keyless) if keyless else forecast


def _verdict(
    summary: PartitionSummary,
    found: RoundAssessment[SegmentSummary],
    cleaner: CleanerSettings,
    is_due: tuple[bool, str],
    circumstances: RoundCircumstances,
    bootstrap_servers: str,
    now_ms: int,
) -> PartitionVerdict:
    block, transaction = circumstances.block, circumstances.transaction
    return partition_verdict(
        due=is_due[0],
        reason=is_due[1],
        blocks=(
            with_recorded_time(block, summary) if block is not None else None,
            stored_block(summary, found, cleaner, transaction, now_ms, bootstrap_servers),
        ),
        paused=circumstances.paused,
        held_until_ms=held_until_ms(summary, found, cleaner, transaction, now_ms),
        waiting_bytes=bytes_not_cleaned(summary),
    )


_NO_HEAD = SidecarHead(None, NO_SIDECAR, 0)


def _expected_dirty_key_count(assessment: RoundAssessment[SegmentSummary], heads: Mapping[str, SidecarHead]) -> int:
    dirty = assessment.dirty
    return estimate_distinct_keys([heads.get(s.id, _NO_HEAD) for s in dirty], [estimate_record_count(s) for s in dirty])


def _segment_forecasts(
    summary: PartitionSummary,
    assessment: RoundAssessment[SegmentSummary],
    sidecar_evidence: SkipEvidence | None,
    outlook: RetentionOutlook,
    key_count: int,
    cleaner: CleanerSettings,
    now_ms: int,
) -> list[SegmentActionForecast]:
    dirty, clean = {segment.id for segment in assessment.dirty}, {segment.id for segment in assessment.clean}
    gone, log_start = {segment.id for segment in summary.live[: outlook.segments]}, summary.log_start
    alone = {segment.id for segment in assessment.covered_segments[: outlook.one_to_one]}

    def expected_action(segment: SegmentSummary) -> ActionAndReason:
        action, why = ungrouped_action(segment)
        return action, f"{why}; alone, because brokers expire it soon" if action != "skip" and segment.id in alone else why

    def ungrouped_action(segment: SegmentSummary) -> ActionAndReason:
        if segment.id in gone:
            return "expire", outlook.reason
        if segment.end_offset < log_start:
            return "skip", "its records have expired; it stays as the newest segment"
        if segment.start_offset >= assessment.end:
            return "skip", "after the round's end"
        if not assessment.due:
            return "skip", "nothing is due"
        if segment.id in dirty:
            return "rewrite", "dirty"
        late = delete_horizon_passed_reason(segment, now_ms)
        if not dirty or segment.id not in clean:
            return ("rewrite", late) if late else ("skip", "nothing is due")
        if sidecar_evidence is None:
            return "rewrite", late or "clean, but its keys may be superseded"
        decision = decide_by_sidecar(
            sidecar_evidence.heads.get(segment.id, _NO_HEAD),
            late,
            dirty_key_count=key_count,
            filter_usage=sidecar_evidence.record,
            now_ms=now_ms,
            drops_keyless=cleaner.keyless_records == "drop",
        )
        if decision.must:
            return "rewrite", decision.must
        return ("skip", decision.may) if decision.may else ("filter", "clean, and its filter is asked for the keys of the dirty range")

    return [SegmentActionForecast(s.id, s.start_offset, s.end_offset, s.size_bytes, *expected_action(s)) for s in summary.live]


def _expected_peak_disk_bytes(cleaner: CleanerSettings, peak_bytes_without_budget: int) -> int:
    return (
        min(peak_bytes_without_budget, cleaner.disk_budget_bytes)
        if isinstance(cleaner.disk_budget_bytes, int)
        else peak_bytes_without_budget
    )


def _count_tombstones_from_sidecars(segments: Sequence[SegmentActionForecast], heads: Mapping[str, SidecarHead]) -> int | None:
    """Returns None if a segment has no sidecar in ``heads``."""
    known = [head.sidecar.due.tombstones for s in segments if (head := heads.get(s.id)) is not None and head.sidecar is not None]
    return sum(known) if len(known) == len(segments) else None


def _expected_saving_and_reason(
    summary: PartitionSummary, bytes_to_write: int, dirty_bytes: int, deletion_frees_space: bool | None, tombstone_count: int | None
) -> SavedBytesAndReason:
    """:param bytes_to_write: upper bound of the saving.
    :param tombstone_count: tombstones to remove if nothing is dirty.
    """
    if not bytes_to_write:
        return 0, "nothing is rewritten"
    if deletion_frees_space is None:
        return None, "the store does not show whether it keeps deleted objects; `config check` names the missing right"
    if not deletion_frees_space:
        return None, "the bucket keeps deleted objects (versioning or Object Lock), so that deleting saves nothing until they expire"
    if dirty_bytes:
        rate = summary.saved_per_dirty_byte
        if rate is None:
            return None, "no earlier round of this partition is known to estimate from"
        return min(round(dirty_bytes * rate), bytes_to_write), f"its last round saved {rate:.2f} bytes per dirty byte"
    if tombstone_count is None:
        return None, "only delete horizons are due, and not all sidecars have a count of tombstones"
    why = f"only delete horizons are due: {count_noun(tombstone_count, 'tombstone')}, {TOMBSTONE_BYTES} bytes each at most"
    return min(tombstone_count * TOMBSTONE_BYTES, bytes_to_write), why
