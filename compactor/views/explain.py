"""Answers of `explain`: why a partition is not cleaned, what became of an offset or a key.

Decisions come from ``assess_round`` and the folded state.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from compactor.access.tier import Tier
from compactor.config.settings import TOPIC_POLICY, CleanerSettings
from compactor.config.times import format_iso_time
from compactor.config.units import count_noun, format_duration, format_setting, format_size
from compactor.constants import NEVER_MS
from compactor.control.leadership import LeaseInfo, current_lease
from compactor.control.log_start import grace_period_ms
from compactor.control.logs import pause_reason, retry_if_object_missing
from compactor.control.records import BLOCKED_BY_STAT, NEXT_STEP_STAT, PlanAnnounced
from compactor.control.state import GroupAwaitingDeletion, PartitionState
from compactor.control.summary import PartitionStateOrSummary, PartitionSummary, summarize_state
from compactor.errors import NotFound
from compactor.model.ids import RunHistoryStatus, TopicPartition
from compactor.model.plan import CompactionPlan, KeylessPolicy, KeylessRecords
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import OPEN_ROUND_MAX_MS
from compactor.round.plan import (
    KAFKA_RATIO,
    RoundAssessment,
    S,
    assess_round,
    count_segments_expiring_soon,
    expiry_margin_ms,
    find_expired_segments,
    is_retention_enabled,
    next_expiry_ms,
)
from compactor.views.difference import ControlLogHistory
from compactor.views.dump import FoundRecord, RecordSearch
from compactor.views.verdict import (
    Block,
    TransactionAtEnd,
    blocks_of_topics,
    bytes_not_cleaned,
    future_timestamps_text,
    known_bootstrap_servers,
    read_open_transaction,
    stored_block,
    with_recorded_time,
)

# Outlook on retention, for `plan` and `explain`.


@dataclass(frozen=True)
class RetentionOutlook:
    """Segments that the next round will find expired.

    segments, bytes: what the next `run` removes first; 0 where brokers remove segments themselves.
    log_start_offset: after this removal.
    next_ms: when the next segment exceeds a limit; None if never or unknown.
    one_to_one: number of segments to be rewritten one to one, because brokers expire them soon.
    """

    segments: int
    bytes: int
    log_start_offset: int
    reason: str = ""
    next_ms: int | None = None
    one_to_one: int = 0
    text: str = ""


def retention_outlook(
    state: PartitionStateOrSummary[S], assessment: RoundAssessment[S], cleaner: CleanerSettings, now_ms: int
) -> RetentionOutlook:
    """:param cleaner: on a broker-managed tier ``retention_ms`` is the topic's own.
    :param now_ms: this machine's clock; by a store's clock that is behind, segments expire later.
    """
    if not state.has_segments:
        return RetentionOutlook(0, 0, state.log_start)
    if state.mirrored:
        return _broker_retention_outlook(state, assessment, cleaner, now_ms)
    expired, next_ms = find_expired_segments(state, cleaner, now_ms), next_expiry_ms(state, cleaner)
    if expired is not None:
        kept = "" if expired.log_start_offset <= state.end_offset else "; the newest segment stays, unread, until another one has arrived"
        text = f"the next `run` removes {count_noun(expired.segments, 'segment')}, {format_size(expired.bytes)}, before it cleans: "
        text += f"{expired.reason}; the log then starts at offset {expired.log_start_offset}{kept}"
        return RetentionOutlook(expired.segments, expired.bytes, expired.log_start_offset, expired.reason, None, 0, text)
    sentences = []
    if next_ms < NEVER_MS:
        sentences.append(
            f"the first segment expires at {format_iso_time(next_ms)}, by retention_ms ({format_duration(cleaner.retention_ms)})"
        )
    if is_retention_enabled(cleaner) and cleaner.retention_bytes >= 0:
        limit, size = format_size(cleaner.retention_bytes), format_size(state.bytes)
        sentences.append(f"segments expire as soon as {limit} remain without them, by retention_bytes; there are {size}")
    return RetentionOutlook(0, 0, state.log_start, next_ms=next_ms if next_ms < NEVER_MS else None, text="; ".join(sentences))


def _broker_retention_outlook(
    state: PartitionStateOrSummary[S], assessment: RoundAssessment[S], cleaner: CleanerSettings, now_ms: int
) -> RetentionOutlook:
    if not is_retention_enabled(cleaner) or cleaner.retention_ms < 0:
        return RetentionOutlook(0, 0, state.log_start)
    next_ms = min(NEVER_MS, state.live[0].max_timestamp_ms + cleaner.retention_ms)
    soon = count_segments_expiring_soon(state, assessment.covered_segments, cleaner, now_ms)
    after = format_duration(cleaner.retention_ms)
    text = f"brokers expire segments by retention.ms of the topic ({after}), the first at {format_iso_time(next_ms)}"
    if soon:
        text += f"; {count_noun(soon, 'segment')} expire within {format_duration(expiry_margin_ms(state))} and are "
        text += "rewritten one to one, so that each expires when it would have, and no group loses a part of its sources"
    return RetentionOutlook(0, 0, state.log_start, next_ms=next_ms, one_to_one=soon, text=text)


OnRead = Callable[[int], None]
RecordDocument = dict[str, Any]
"""Fields of a JSON object."""
RemovedRecord = tuple[GroupAwaitingDeletion, FoundRecord]
"""The group of replaced segments that still holds a removed record, and the record."""


@dataclass(frozen=True)
class ExplanationFact:
    """Finding. kind: one word for scripts. values: JSON fields with the data in ``text``."""

    kind: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    answer: str
    facts: tuple[ExplanationFact, ...]


# --- the partition ---


def explain_partition(tier: Tier, partition: TopicPartition, now_ms: int) -> Explanation:
    """Raises StoreError, or BadControlRecord if the control log is damaged."""
    if not tier.kind.compacts:
        return _explain_listed_partition(tier, partition)
    log = tier.open_partition_log(partition)
    past = ControlLogHistory(log)
    state = log.state
    cleaner = tier.cleaner_settings_for_topic(partition.topic)
    lease = current_lease(tier.ports, log)
    found = assess_round(state, cleaner, now_ms)
    outlook = retention_outlook(state, found, cleaner, now_ms)
    transaction = read_open_transaction(tier, state)
    summary, servers = summarize_state(state), known_bootstrap_servers(tier)
    block = blocks_of_topics(tier, [partition.topic]).get(partition.topic) or stored_block(
        summary, assess_round(summary, cleaner, now_ms), cleaner, transaction, now_ms, servers
    )
    facts = (
        *_block_facts(block, summary),
        *_partition_status_facts(state, lease, now_ms),
        _settings_fact(tier, partition.topic, cleaner),
        *_dirty_segment_facts(state, found, cleaner, transaction, now_ms),
        *_retention_facts(state, outlook, tier.first_readable_offset(state)),
        *_waiting_facts(state, tier, now_ms),
        *_latest_round_facts(past, state),
    )
    why = pause_reason(tier.catalog.state, partition)
    if block is not None and state.quarantine is None and state.has_segments:
        answer = f"It is blocked: {block.reason}." + (f" {block.next_step}." if block.next_step else "")
    elif why and state.has_segments and state.intent is None:
        answer = f"It is {why}. Open rounds continue."
    else:
        answer = _answer_why_not_cleaned(state, lease, found, outlook, now_ms)
    return Explanation(answer, facts)


def _block_facts(block: Block | None, summary: PartitionSummary) -> Iterator[ExplanationFact]:
    if block is None:
        return
    block, held = with_recorded_time(block, summary), bytes_not_cleaned(summary)
    since = f" since {format_iso_time(block.since_ms)}" if block.since_ms else ""
    text = f"no round can clean it{since}, {format_size(held)} wait: {block.reason}" + (f". {block.next_step}" if block.next_step else "")
    values = {"cause": block.cause.value, "since_ms": block.since_ms or None, "waiting_bytes": held, "next_step": block.next_step}
    yield ExplanationFact("blocked", text, values)


def _settings_fact(tier: Tier, topic: str, cleaner: CleanerSettings) -> ExplanationFact:
    """Kafka has these settings per topic, too."""
    values = {key: {"value": getattr(cleaner, key), "source": tier.source_of_topic_setting(topic, key)} for key in TOPIC_POLICY.values()}
    text = ", ".join(f"{key} {format_setting(key, one['value'])} from {one['source']}" for key, one in values.items())
    return ExplanationFact("settings", text.replace("from default", "by default"), {"settings": values})


def _explain_listed_partition(tier: Tier, partition: TopicPartition) -> Explanation:
    state = tier.open_partition_log(partition).refresh()
    if not state.has_segments:
        return Explanation("It holds no segments yet.", ())
    answer = f"Nothing cleans it here: a tier of layout {tier.settings.tier.layout} is only read."
    held = f"{count_noun(len(state.live), 'segment')} with offsets {state.start_offset} to {state.end_offset}, {format_size(state.bytes)}"
    values = {"start_offset": state.start_offset, "end_offset": state.end_offset, "bytes": state.bytes}
    how = "`import --from-tier` copies it into a compactor-managed tier, where rounds clean it; `generations` writes this layout again"
    return Explanation(answer, (ExplanationFact("offsets", held, values), ExplanationFact("only_read", how)))


def _answer_why_not_cleaned(
    state: PartitionState,
    lease: LeaseInfo | None,
    assessment: RoundAssessment[RemoteLogSegmentMetadata],
    outlook: RetentionOutlook,
    now_ms: int,
) -> str:
    """The most important reason."""
    led = lease is not None and lease.expires_ms >= now_ms
    if not state.has_segments:
        return "It holds no segments yet."
    if state.intent is not None:
        run_id = state.intent.plan.run_id
        if led and lease is not None:
            return f"It is being cleaned now: {lease.holder} works on run {run_id}."
        return f"Run {run_id} was interrupted; the next `run` finishes or undoes it."
    if state.quarantine is not None and state.quarantine.keyless is not None:
        return f"It is blocked: {state.quarantine.reason}. The next `run` tries again."
    if state.quarantine is not None:
        return f"It is quarantined: {state.quarantine.reason}. {_quarantine_advice(state)}"
    if led and lease is not None:
        return f"{lease.holder} holds its lease (epoch {lease.epoch}) until {format_iso_time(lease.expires_ms)}."
    if assessment.due:
        return f"It is due: {assessment.reason}. The next `run` cleans it."
    if outlook.reason:
        return f"It is due: {outlook.reason}. The next `run` removes what has expired."
    return f"It is not due: {assessment.reason}."


def _quarantine_advice(state: PartitionState) -> str:
    failed = state.latest_quarantined_run
    if failed is not None and BLOCKED_BY_STAT in failed.stats:
        step = failed.stats.get(NEXT_STEP_STAT)
        return f"{step}. The next `run` tries again." if step else "The next `run` tries again."
    restore = "restore the object from the store's versions or a backup"
    if not state.mirrored:  # brokers record no digests, without which `repair` recognises nothing
        restore = f"`repair {state.topic_partition} --from LOG_DIR|CONFIG` makes it good from a log directory or another tier, or {restore}"
    return f"`verify {state.topic_partition}` names all damage; {restore}. The next `run` tries again."


def _partition_status_facts(state: PartitionState, lease: LeaseInfo | None, now_ms: int) -> Iterator[ExplanationFact]:
    clean = " ".join(f"{entry.leader_epoch}:{entry.offset}" for entry in state.vector) or "none"
    dirty = f"dirty from {state.first_dirty_offset}" if state.first_dirty_offset <= state.end_offset else "nothing is dirty"
    yield ExplanationFact(
        "offsets",
        f"{count_noun(len(state.live), 'segment')} with offsets {state.start_offset} to {state.end_offset}; "
        f"{dirty} (cleaner offsets {clean})",
        {"start_offset": state.start_offset, "end_offset": state.end_offset, "first_dirty_offset": state.first_dirty_offset},
    )
    if lease is not None:
        over = "" if lease.expires_ms >= now_ms else "; it is over, any compactor may take over"
        values = {"holder": lease.holder, "epoch": lease.epoch, "expires_ms": lease.expires_ms}
        yield ExplanationFact(
            "lease", f"{lease.holder} leads as epoch {lease.epoch}, its lease runs until {format_iso_time(lease.expires_ms)}{over}", values
        )
    if state.intent is not None:
        plan = state.intent.plan
        done = len(state.intent.receipts)
        text = (
            f"run {plan.run_id} is open since {format_iso_time(state.intent.at_ms)}: {done} of {count_noun(len(plan.tasks), 'group')} done"
        )
        yield ExplanationFact("open_round", text, {"run_id": plan.run_id, "groups": len(plan.tasks), "groups_done": done})
    if state.quarantine is not None:
        why = state.quarantine
        where = f" ({why.segment})" if why.segment not in why.reason else ""
        text = f"failed {count_noun(why.failures, 'time')} in a row, last at {format_iso_time(why.at_ms)}: {why.reason}{where}"
        counts = {} if why.keyless is None else {"keyless_records": why.keyless.count, "records_dirty": why.keyless.records}
        values = {"failures": why.failures, "at_ms": why.at_ms, "reason": why.reason, "segment": why.segment}
        yield ExplanationFact("quarantine", text, values | counts)


def _dirty_segment_facts(
    state: PartitionState,
    assessment: RoundAssessment[RemoteLogSegmentMetadata],
    cleaner: CleanerSettings,
    transaction: TransactionAtEnd | None,
    now_ms: int,
) -> Iterator[ExplanationFact]:
    if not state.has_segments:
        return
    yield ExplanationFact(
        "dirty",
        f"{len(assessment.dirty)} dirty segments up to offset {assessment.end - 1}, dirty ratio {assessment.dirty_ratio:.2f}; "
        f"above {assessment.threshold} a round is due",
        {
            "dirty_ratio": assessment.dirty_ratio,
            "min_cleanable_dirty_ratio": assessment.threshold.ratio,
            "uncleanable_from": assessment.end,
        },
    )
    if assessment.threshold.why:
        saved = assessment.threshold.saved_usd_month
        text = f"min_cleanable_dirty_ratio is chosen automatically: {assessment.threshold.ratio:g}, {assessment.threshold.why}"
        text += f"; it saves {saved:.2f} USD a month in comparison with {KAFKA_RATIO:g}" if saved is not None else ""
        yield ExplanationFact("automatic_ratio", text, {"saves_usd_month": saved})
    if transaction is not None:
        text = f"a transaction is open since offset {transaction.first_offset}: its segment and all later ones must wait for its end"
        if transaction.producer_id >= 0:
            text += f". Producer {transaction.producer_id}, epoch {transaction.epoch}, last wrote to it"
            text += f" at {format_iso_time(transaction.timestamp_ms)}" if transaction.timestamp_ms >= 0 else " at an unknown time"
        values = {"producer_id": transaction.producer_id, "producer_epoch": transaction.epoch, "timestamp_ms": transaction.timestamp_ms}
        yield ExplanationFact("open_transaction", text, {"offset": transaction.first_offset, **values})
    if text := future_timestamps_text(state.live, now_ms):
        latest = max(segment.max_timestamp_ms for segment in state.live)
        yield ExplanationFact("future_timestamps", text, {"max_timestamp_ms": latest})
    if cleaner.min_compaction_lag_ms > 0:
        text = f"min_compaction_lag_ms keeps records younger than {format_duration(cleaner.min_compaction_lag_ms)} from being cleaned"
        yield ExplanationFact("min_compaction_lag", text, {"min_compaction_lag_ms": cleaner.min_compaction_lag_ms})
    horizons = sorted(segment.due_ms for segment in state.live if segment.due_ms >= 0)
    passed = sum(horizon <= now_ms for horizon in horizons)
    if horizons:
        text = f"{count_noun(passed, 'segment holds', 'segments hold')} tombstones or markers whose delete horizon has passed"
        ahead = next((horizon for horizon in horizons if horizon > now_ms), None)
        text += f"; the next horizon is {format_iso_time(ahead)}" if ahead is not None else ""
        yield ExplanationFact("horizons", text, {"passed": passed, "next_ms": ahead})


def _retention_facts(state: PartitionState, outlook: RetentionOutlook, log_start: int) -> Iterator[ExplanationFact]:
    if log_start > state.start_offset:
        text = f"readers begin at offset {log_start}; the segment in which it lies stays until all of its records have expired"
        yield ExplanationFact("log_start", text, {"log_start_offset": log_start})
    if state.broker_log_start:
        text = f"brokers have reported the log start {state.broker_log_start}; what they have deleted below it counts as expired, "
        text += "also if a new leader starts lower"
        yield ExplanationFact("broker_log_start", text, {"log_start_offset": state.broker_log_start})
    if outlook.text:
        values = {"segments": outlook.segments, "bytes": outlook.bytes, "next_ms": outlook.next_ms, "one_to_one": outlook.one_to_one}
        yield ExplanationFact("retention", outlook.text, values)
    if outlook.text and state.mirrored and state.intent is not None and state.intent.receipts:
        until_ms = state.intent.at_ms + OPEN_ROUND_MAX_MS
        text = f"brokers expire nothing behind the {len(state.intent.receipts)} new segments of the open round; if its publication has not "
        text += f"begun by {format_iso_time(until_ms)}, it is given up"
        yield ExplanationFact("expiry_held_up", text, {"until_ms": until_ms})


def _waiting_facts(state: PartitionState, tier: Tier, now_ms: int) -> Iterator[ExplanationFact]:
    for group in state.waiting:
        size = sum(segment.size_bytes for segment in group.segments)
        keep = grace_period_ms(group, tier.retention)
        what = "the outputs of undone run" if group.undone else "what was replaced by run"
        named = f"what left because {group.why}" if group.why else f"{what} {group.run_id}"
        held = f"{count_noun(len(group.segments), 'segment')}, {format_size(size)}"
        text = f"{named}: {held}, kept for {format_duration(keep)} and then deleted by `retire`"
        yield ExplanationFact("waiting", text, {"run_id": group.run_id, "segments": len(group.segments), "bytes": size})
    for entry in state.registrations.values():
        text = (
            f"import {entry.import_id} by {entry.holder} is unfinished: {count_noun(len(entry.ids), 'segment is', 'segments are')} missing"
        )
        yield ExplanationFact("import", text, {"import_id": entry.import_id, "holder": entry.holder, "segments": len(entry.ids)})


def _latest_round_facts(history: ControlLogHistory, state: PartitionState) -> Iterator[ExplanationFact]:
    """Reasons why the latest round rewrote or skipped each segment, if the control log has its plan."""
    plans = [record.body.plan for record in history.records if isinstance(record.body, PlanAnnounced)]
    plan = next(
        (plan for plan in reversed(plans) if (run := state.find_run(plan.run_id)) is not None and run.status != RunHistoryStatus.UNDONE),
        None,
    )
    if plan is None:
        if state.runs:
            yield ExplanationFact(
                "last_round", f"the plan of run {state.runs[-1].run_id} is no longer in the control log; `runs show` has its figures"
            )
        return
    run = state.find_run(plan.run_id)
    status = run.status if run else ""
    if run is not None and run.stats.get("keyless_records"):
        count, records, policy = run.stats["keyless_records"], run.stats["records_dirty"], plan.policy.keyless_records
        text = (
            f"{KeylessRecords(count=int(count), records=int(records))} of the last round's range had no key; keyless_records was {policy}"
        )
        yield ExplanationFact("keyless", text, {"keyless_records": count, "records_dirty": records, "policy": policy})
    dirty = plan.first_dirty_offset < plan.end_offset
    what = f"over offsets {plan.first_dirty_offset} to {plan.end_offset - 1}" if dirty else f"over what was clean, below {plan.end_offset}"
    text = f"run {plan.run_id} ({status}) {what}"
    yield ExplanationFact("last_round", text, {"run_id": plan.run_id, "status": status})
    yield from _planned_segment_facts(plan)


def _planned_segment_facts(plan: CompactionPlan) -> Iterator[ExplanationFact]:
    read = {segment.id: segment.reason for segment in plan.read}
    for task in plan.tasks:
        why = "; ".join(dict.fromkeys(read.get(name, "dirty") for name in task.sources))
        what = f"{count_noun(len(task.sources), 'segment')} -> {task.new_segment_id}"
        text = f"offsets {task.start_offset} to {task.end_offset} were rewritten ({why}): {what}"
        yield ExplanationFact("rewritten", text, {"sources": list(task.sources), "id": task.new_segment_id, "reason": why})
    for skipped in plan.skipped:
        yield ExplanationFact(
            "skipped", f"segment {skipped.id} was not read: {skipped.reason}", {"id": skipped.id, "reason": skipped.reason}
        )


# --- a key or an offset ---


def explain_key(
    tier: Tier, partition: TopicPartition, key: bytes, now_ms: int, on_bytes: OnRead = lambda size: None, shown_key: str = ""
) -> Explanation:
    """Offsets that hold a key, the record that sets its value, and removed records.

    Reads every live segment, and every replaced one that is not deleted yet.

    :param shown_key: empty to show the key's bytes.
    """

    def explain_key_in_state(state: PartitionState) -> Explanation:
        all_found = list(RecordSearch(tier, partition, on_bytes).find_records(state.live, key=key))
        log_start = tier.first_readable_offset(state)
        found = [record for record in all_found if record.offset >= log_start]
        below = [record for record in all_found if record.offset < log_start]
        facts = _RecordExplainer(
            state, now_ms, tier.kind.compacts, tier.cleaner_settings_for_topic(partition.topic).keyless_records
        ).facts_about_records(found)
        facts += _removed_record_facts(_find_removed_records(tier, state, found, on_bytes, key=key))
        hidden = f"; no reader sees it, as the log starts at {log_start}"
        facts += [ExplanationFact("below_log_start", _describe_record(record) + hidden, _record_document(record)) for record in below]
        return Explanation(_answer_about_key(shown_key or _format_key(key), found, facts), tuple(facts))

    return _explain_with_retry(tier, partition, explain_key_in_state)


def explain_offset(tier: Tier, partition: TopicPartition, offset: int, now_ms: int, on_bytes: OnRead = lambda size: None) -> Explanation:
    """Reads the live segments from the offset on and, if the record was removed, the replaced ones that contained the offset."""

    def explain_offset_in_state(state: PartitionState) -> Explanation:
        log_start = tier.first_readable_offset(state)
        if state.has_segments and offset < log_start:
            held = "Its segment stays as long as it holds later records, or is the newest one"
            held = held if offset >= state.start_offset else "Its segment has left the view; `retire` deletes its objects after grace"
            answer = f"Offset {offset} is below the log start {log_start}: retention or a person has deleted it. {held}."
            return Explanation(answer, ())
        if not state.has_segments or not state.start_offset <= offset <= state.end_offset:
            where = f"offsets {state.start_offset} to {state.end_offset}" if state.has_segments else "nothing"
            return Explanation(f"Offset {offset} is not in the tier, which holds {where}.", ())
        later_segments = [segment for segment in state.live if segment.end_offset >= offset]
        here = next(RecordSearch(tier, partition, on_bytes).find_records(later_segments, offset=offset), None)
        if here is None:
            return _explain_removed_offset(tier, state, later_segments, offset, on_bytes)
        later: list[FoundRecord] = []
        if here.key is not None and not here.control:
            later = [s for s in RecordSearch(tier, partition, on_bytes).find_records(later_segments, key=here.key) if s.offset >= offset]
        outlook = _RecordExplainer(state, now_ms, tier.kind.compacts, tier.cleaner_settings_for_topic(partition.topic).keyless_records)
        return Explanation(outlook.answer_about_offset(here, later), tuple(outlook.facts_about_records(later or [here])))

    return _explain_with_retry(tier, partition, explain_offset_in_state)


def _explain_with_retry(tier: Tier, partition: TopicPartition, explain_with: Callable[[PartitionState], Explanation]) -> Explanation:
    """Explain again from the new state if an object is deleted meanwhile."""
    log = tier.open_partition_log(partition)
    return retry_if_object_missing(partition, lambda: explain_with(log.refresh()))


def _explain_removed_offset(
    tier: Tier, state: PartitionState, later_segments: Sequence[RemoteLogSegmentMetadata], offset: int, on_bytes: OnRead
) -> Explanation:
    """:param later_segments: ascending, from the one that contains the offset."""
    segment = later_segments[0]
    epoch = state.published_by.get(segment.id)
    if epoch is None:
        came = "imported" if tier.kind.compacts else "uploaded"
        answer = f"Offset {offset} held nothing when segment {segment.id} was {came}: the broker's log had no record there any more."
        return Explanation(answer, ())
    found = _find_removed_records(tier, state, [], on_bytes, offset=offset)
    answer = f"Offset {offset} holds no record any more: it was cleaned away when epoch {epoch} wrote segment {segment.id}."
    if not found:
        return Explanation(f"{answer} What it held is deleted.", ())
    group, old = found[0]
    if old.key is None:
        return Explanation(answer, (ExplanationFact("removed", _describe_record(old), _record_document(old)),))
    later = [
        s
        for s in RecordSearch(tier, state.topic_partition, on_bytes).find_records(later_segments, key=old.key)
        if s.sets_value and s.offset > offset
    ]
    answer = f"Offset {offset} held {_format_key(old.key)} and was cleaned away by run {group.run_id}: "
    if old.outcome == "abort":
        answer += "its transaction was aborted."
    elif later:
        answer += f"offset {later[-1].offset} supersedes it."
    elif old.is_tombstone:
        answer += "it was a tombstone whose delete horizon had passed."
    else:
        answer += "a later record superseded it, which was removed, too."
    facts = [
        ExplanationFact("removed", _describe_record(old), _record_document(old)),
        *(ExplanationFact("superseded_by", _describe_record(s), _record_document(s)) for s in later),
    ]
    return Explanation(answer, tuple(facts))


def _find_removed_records(
    tier: Tier, state: PartitionState, live_records: Iterable[FoundRecord], on_bytes: OnRead, *, key: bytes | None = None, offset: int = -1
) -> list[RemovedRecord]:
    """Outputs of undone rounds, and segments that are deleted during the search, are skipped."""
    still = {record.offset for record in live_records}
    found = []
    for group in state.waiting:
        if group.undone:
            continue
        segments = [s for s in group.segments if offset < 0 or s.start_offset <= offset <= s.end_offset]
        try:
            # Markers further on are not passed here, so that outcomes of transactions may be unknown.
            seen = list(RecordSearch(tier, state.topic_partition, on_bytes).find_records(segments, key=key, offset=offset))
        except NotFound:
            continue  # retired meanwhile
        found += [(group, record) for record in seen if record.offset not in still]
    return found


def _removed_record_facts(removed_records: Iterable[RemovedRecord]) -> list[ExplanationFact]:
    """By descending offset."""
    facts = {}
    for group, record in removed_records:
        text = f"{_describe_record(record)}: removed by run {group.run_id}"
        facts[record.offset] = ExplanationFact("removed", text, _record_document(record) | {"run_id": group.run_id})
    return [facts[offset] for offset in sorted(facts, reverse=True)]


KEYLESS_PROSPECTS: Final[Mapping[KeylessPolicy, str]] = {
    "refuse": "; keyless_records is refuse: no round removes it",
    "drop": "; the next round that reads it drops it",
    "keep": "; keyless_records is keep: it stays",
}
"""What becomes of a record without a key, by the topic's setting."""


@dataclass(frozen=True)
class _RecordExplainer:
    state: PartitionState
    now_ms: int
    rounds: bool
    keyless_records: KeylessPolicy

    def facts_about_records(self, records: Sequence[FoundRecord]) -> list[ExplanationFact]:
        """:param records: of one key, newest first."""
        facts = []
        latest: FoundRecord | None = None
        for record in records:
            if not record.sets_value:
                facts.append(
                    ExplanationFact(
                        _ignored_code(record),
                        f"{_describe_record(record)}: {self.reason_value_is_ignored(record)}",
                        _record_document(record),
                    )
                )
            elif latest is None:
                latest = record
                why = f", {self.tombstone_removal_text(record)}" if record.is_tombstone else ""
                facts.append(
                    ExplanationFact("latest", f"{_describe_record(record)}: the latest record of the key{why}", _record_document(record))
                )
            else:
                text = f"{_describe_record(record)}: superseded by offset {latest.offset}, {self.superseded_text(record, latest)}"
                facts.append(ExplanationFact("superseded", text, _record_document(record) | {"superseded_by": latest.offset}))
        return facts

    def reason_value_is_ignored(self, record: FoundRecord) -> str:
        if record.control:
            what, then = "a marker", "; a round removes it after its delete horizon, once no record of its transaction is left"
        elif record.outcome == "abort":
            what, then = "its transaction was aborted", "; the next round that reads it drops it"
        elif record.outcome == "open":
            what, then = "its transaction is not decided within the tier", ""
        else:
            what, then = "it has no key", KEYLESS_PROSPECTS[self.keyless_records]
        return what + then * self.rounds

    def tombstone_removal_text(self, record: FoundRecord) -> str:
        """Like in Kafka, the first round sets a delete horizon, and a round after that time drops the tombstone."""
        if not self.rounds:
            return "a tombstone, which no round removes here"
        if record.horizon_ms is not None:
            if record.horizon_ms > self.now_ms:
                return f"a tombstone that stays until its delete horizon {format_iso_time(record.horizon_ms)}, so that slow readers see it"
            return (
                f"a tombstone whose delete horizon {format_iso_time(record.horizon_ms)} has passed: the next round that reads it drops it"
            )
        if record.offset >= self.state.first_dirty_offset:
            return "a tombstone that no round has seen yet: the first one gives it a delete horizon, delete_retention_ms ahead"
        why = "an old record format, or no round has rewritten it"
        return f"a tombstone without a delete horizon: {why}; the next round that reads it sets one"

    def superseded_text(self, record: FoundRecord, latest: FoundRecord) -> str:
        if not self.rounds:
            return "and no round removes it here"
        if latest.offset >= self.state.first_dirty_offset:
            return "which no round has cleaned yet"
        return f"and not removed yet because its segment {record.segment.id} was not rewritten since"

    def answer_about_offset(self, record: FoundRecord, later_records: Sequence[FoundRecord]) -> str:
        """:param later_records: records with its key, from this offset on, newest first."""
        what = "O" + _describe_record(record).removeprefix("o")
        if not record.sets_value:
            return f"{what}: {self.reason_value_is_ignored(record)}."
        latest = next((later for later in later_records if later.sets_value), record)
        if latest.offset > record.offset:
            return f"{what}: superseded by offset {latest.offset}, {self.superseded_text(record, latest)}."
        why = self.tombstone_removal_text(record) if record.is_tombstone else "the latest value of its key: it stays"
        return f"{what}: {why}."


def _ignored_code(record: FoundRecord) -> str:
    if record.control:
        return "marker"
    return {"abort": "aborted", "open": "undecided"}.get(record.outcome, "keyless")


def _answer_about_key(key: str, records: Sequence[FoundRecord], facts: Sequence[ExplanationFact]) -> str:
    """:param records: present records of the key, newest first.
    :param facts: without records: the key's records were removed.
    """
    latest = next((record for record in records if record.sets_value), None)
    if latest is not None:
        what = "deleted, by the tombstone" if latest.is_tombstone else f"a value of {format_size(latest.value_bytes)},"
        more = len(records) - 1
        later_segments = f"; {more} other records of it are still there" if more else ""
        return f"The key {key} is {what} at offset {latest.offset}{later_segments}."
    if records:
        return f"The key {key} has no committed record; {len(records)} aborted or undecided ones are at hand."
    if facts:
        return f"The key {key} is no longer in the partition; replaced segments that are not deleted yet show what it was."
    return f"The key {key} is not in the partition."


def _describe_record(record: FoundRecord) -> str:
    if record.control:
        return f"offset {record.offset}, {record.control} marker of producer {record.producer_id}"
    value = "tombstone" if record.value_bytes < 0 else f"{record.value_bytes} bytes"
    key = _format_key(record.key) if record.key is not None else "no key"
    return f"offset {record.offset}, {key}, {value}, of {format_iso_time(record.timestamp) if record.timestamp >= 0 else 'no time'}"


def _record_document(record: FoundRecord) -> RecordDocument:
    return {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "tombstone": record.is_tombstone,
        "value_bytes": record.value_bytes,
        "segment": record.segment.id,
        "delete_horizon_ms": record.horizon_ms,
        "transaction": record.outcome or None,
    }


def _format_key(key: bytes) -> str:
    try:
        text = key.decode()
        if text.isprintable():
            return repr(text)
    except UnicodeDecodeError:
        pass
    return "base64:" + base64.b64encode(key).decode()
