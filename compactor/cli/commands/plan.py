"""Command ``plan``: what `run` would do, and what that would cost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from compactor.access.tier import Tier
from compactor.cli import command_parser, tiers
from compactor.cli.command_parser import SAMPLED_PARTITIONS
from compactor.cli.kernels import compile_numba_kernels
from compactor.cli.output import Output, Table, format_size
from compactor.config.times import format_iso_time
from compactor.config.units import count_noun
from compactor.control.logs import pause_reason
from compactor.control.summary import PartitionSummary
from compactor.errors import CompactorError, ExitCode
from compactor.read.ranges import estimate_saving_from_samples
from compactor.storage.probe import does_delete_free_space
from compactor.views.forecast import (
    PriceTable,
    RoundCircumstances,
    RoundForecast,
    forecast_round,
    price_table_of_tier,
    read_skip_evidence,
)
from compactor.views.verdict import TransactionAtEnd, VerdictKind, blocks_of_topics, read_open_transaction

DEFAULT_SAMPLE_BYTES = 8 << 20


def plan_command(args: argparse.Namespace, out: Output) -> ExitCode:
    with tiers.open_configured_tier(args, local_state=True) as tier:
        outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=bool(args.partitions))
        prices = price_table_of_tier(tier.settings.tier_url, args.prices)
        summaries = tiers.read_partition_summaries(tier, tiers.select_partitions(tier, args.partitions), out, outcomes)
        frees = does_delete_free_space(tier.ports.data)
        now, found = command_parser.now_ms_from_arguments(args), []
        blocks = blocks_of_topics(tier, sorted({summary.topic for summary in summaries}))
        for summary in summaries:
            one = forecast_round(
                tier,
                summary,
                frees,
                now,
                force=args.force,
                sidecar_evidence=read_skip_evidence(tier, summary, now, force=args.force),
                prices=prices,
                circumstances=RoundCircumstances(
                    blocks.get(summary.topic),
                    pause_reason(tier.catalog.state, summary.topic_partition),
                    _read_open_transaction(tier, summary),
                ),
            )
            found.append(one)
        if frees:
            found = _sample_savings(tier, found, args.sample, out, prices)
    rows = [
        (
            str(f.topic_partition),
            "cannot run" if f.verdict.is_blocked else f.due,
            f.live,
            f"about {f.skip}" if f.asked else f.skip,
            format_size(f.bytes_to_read),
            format_size(f.bytes_to_write),
            f.map_keys,
            f.map_engine if f.passes < 2 else f"{f.map_engine}, {f.passes} passes",
            _format_expected_saving(f),
            f.cost_usd,
            f.verdict.reason if f.verdict.is_blocked else f.reason,
        )
        for f in found
    ]
    columns = ("partition", "due", "segments", "skipped", "read", "write, max", "keys, max", "map", "saves", "USD", "reason")
    table = Table("", columns, rows, minor=("USD", "map", "skipped", "keys, max", "segments", "write, max"), below=1)
    documents = [f.document() for f in found] if out.mode == "json" else []
    reasons = {f.expected_saving_why for f in found if f.expected_saving_bytes is None}
    notes = [_blocked_partition_line(f) for f in found if f.verdict.is_blocked]
    notes += _expected_saving_lines(found)
    notes += [f"saves ?: {why}; --sample 16MiB reads some of it" for why in sorted(reasons)] + [
        f"{f.topic_partition}: {f.negative_timestamps} records have negative timestamps: a round that would have to rewrite one of "
        "their batches leaves the partition unchanged, as Kafka's cleaner does"
        for f in found
        if f.negative_timestamps
    ]
    notes += [
        f"{f.topic_partition}: {f.keyless_records:,} records without a key are known ({100 * (f.keyless_share or 0):.3g} % of those read); "
        f"keyless_records is {f.keyless_policy}"
        for f in found
        if f.keyless_records
    ]
    notes += [f"{f.topic_partition}: {f.future_timestamps}" for f in found if f.future_timestamps]
    if not tier.kind.compacts:
        notes.append(f"a tier of layout {tier.settings.tier.layout} is only read: this is what a round would do once it was imported")
    for f in found:
        is_paused = f.due and f.verdict.kind is VerdictKind.PAUSED
        notes += [f"{f.topic_partition}: no round starts, it is {f.verdict.reason}"] if is_paused else []
        notes += [f"{f.topic_partition}: {f.retention}"] if f.segments_expired or f.one_to_one or (f.retention and len(found) == 1) else []
    notes += _dirty_ratio_lines(found) + _storage_cost_lines(found, prices)
    out.print_result({"partitions": documents, "prices": prices.document()}, table, summary="\n".join(notes))
    return outcomes.exit_code()


def _read_open_transaction(tier: Tier, summary: PartitionSummary) -> TransactionAtEnd | None:
    if not summary.has_open_transaction:
        return None
    return read_open_transaction(tier, tier.open_partition_log(summary.topic_partition).refresh())


def _blocked_partition_line(forecast: RoundForecast) -> str:
    verdict = forecast.verdict
    since = f" since {format_iso_time(verdict.since_ms)}" if verdict.since_ms else ""
    step = f". {verdict.next_step}" if verdict.next_step else ""
    held = format_size(verdict.waiting_bytes)
    return f"cannot run: {forecast.topic_partition} is blocked by {verdict.cause}{since}, {held} wait: {verdict.reason}{step}"


def _expected_saving_lines(forecasts: Sequence[RoundForecast]) -> list[str]:
    due = [f for f in forecasts if f.due and not f.verdict.is_blocked and f.expected_saving_bytes is not None]
    if not due:
        return []
    saved, error = sum(f.expected_saving_bytes or 0 for f in due), sum(f.expected_saving_error_bytes or 0 for f in due)
    is_estimate = any(f.expected_saving_error_bytes is not None for f in due)
    amount = ("at least " if is_estimate else "about ") + format_size(saved) + (f" (± {format_size(error)})" if error else "")
    rounds = count_noun(len(due), "round is", "rounds are")
    source = ", estimated from a sample" if error else ""
    return [f"{rounds} due: {amount} of {format_size(sum(f.bytes_to_read for f in due))} read will be saved{source}"]


def _dirty_ratio_lines(forecasts: Sequence[RoundForecast]) -> list[str]:
    chosen = [f for f in forecasts if f.min_cleanable_dirty_ratio_saves_usd_month is not None]
    if not chosen:
        return []
    ratios = sorted({f.min_cleanable_dirty_ratio for f in chosen})
    between = f"{ratios[0]:g}" if len(ratios) == 1 else f"{ratios[0]:g} to {ratios[-1]:g}"
    saved = sum(f.min_cleanable_dirty_ratio_saves_usd_month or 0 for f in chosen)
    partitions = count_noun(len(chosen), "partition")
    return [f'min_cleanable_dirty_ratio = "auto" chose {between} for {partitions}: {saved:.2f} USD a month less than with 0.5']


def _storage_cost_lines(forecasts: Sequence[RoundForecast], prices: PriceTable) -> list[str]:
    if not prices.stored_gib_month_usd or not forecasts:
        return []
    stored, saved = sum(f.stored_usd_month for f in forecasts), sum(f.expected_saving_usd_month or 0 for f in forecasts)
    return [f"stored: {stored:.2f} USD a month, of which these rounds save {saved:.2f} ({prices})"]


def _format_expected_saving(forecast: RoundForecast) -> str:
    if forecast.expected_saving_bytes is None:
        return "?"
    if forecast.expected_saving_error_bytes is None:
        return format_size(forecast.expected_saving_bytes)
    error = f" ± {format_size(forecast.expected_saving_error_bytes)}" if forecast.expected_saving_error_bytes else ""
    return f"at least {format_size(forecast.expected_saving_bytes)}{error}"


def _sample_savings(
    tier: Tier, forecasts: Sequence[RoundForecast], sample_bytes: int | None, out: Output, prices: PriceTable
) -> list[RoundForecast]:
    """sample_bytes: of each partition; 0 to sample nothing; None for DEFAULT_SAMPLE_BYTES of each of the SAMPLED_PARTITIONS largest due
    partitions whose saving is unknown.
    """
    unknown = [f for f in forecasts if f.due and not f.verdict.is_blocked and f.expected_saving_bytes is None]
    largest = sorted(unknown, key=lambda f: -f.bytes_to_read)[:SAMPLED_PARTITIONS]
    chosen = {f.topic_partition for f in (largest if sample_bytes is None else forecasts if sample_bytes else ())}
    if chosen:
        compile_numba_kernels(out)
    results = []
    for one in forecasts:
        if one.topic_partition not in chosen:
            results.append(one)
            continue
        try:
            results.append(_with_sampled_saving(tier, one, sample_bytes or DEFAULT_SAMPLE_BYTES, out, prices))
        except CompactorError as error:
            if sample_bytes is not None:
                raise
            results.append(replace(one, expected_saving_why=f"a sample cannot be read: {error}"))
    return results


def _with_sampled_saving(tier: Tier, forecast: RoundForecast, sample_bytes: int, out: Output, prices: PriceTable) -> RoundForecast:
    with (
        out.show_progress(f"sampling {forecast.topic_partition}", unit="bytes") as progress,
        tier.counters.report_transferred_bytes_to(progress.advance),
    ):
        sample = estimate_saving_from_samples(tier, tier.open_partition_log(forecast.topic_partition).refresh(), sample_bytes)
    known = forecast if forecast.keyless_records else forecast.with_keyless_records(sample.keyless)
    if known.keyless_records and known.keyless_policy == "refuse":
        return known
    return replace(
        known,
        expected_saving_bytes=sample.at_least_bytes,
        expected_saving_why=str(sample),
        expected_saving_error_bytes=sample.error_bytes,
        expected_saving_usd_month=prices.monthly_storage_usd(sample.at_least_bytes),
    )
