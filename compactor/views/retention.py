"""Outlook on retention for `plan` and `explain`: which segments of a partition expire, in words and numbers. Decides nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from compactor.config.settings import CleanerSettings
from compactor.constants import NEVER_MS
from compactor.control.summary import PartitionStateOrSummary
from compactor.round.expiry import S, find_expired_segments, is_retention_enabled, next_retention_expiry_time_ms
from compactor.round.plan import RoundAssessment, count_segments_expiring_soon, margin_before_broker_expiry_ms
from compactor.views.time_formats import count_noun, format_duration, format_iso_time, format_size


@dataclass(frozen=True)
class RetentionOutlook:
    """Segments of a partition that the next round will find expired, and when further ones expire.

    segments, bytes: number and size of the segments that the next `run` removes first; 0 where brokers remove segments themselves.
    log_start_offset: first offset of the log after this removal.
    reason: which retention limits were exceeded; empty if nothing expires now.
    next_ms: when the next segment exceeds a limit, in milliseconds; None if that never happens or is not known.
    one_to_one: number of segments that a round would rewrite one to one, because brokers expire them soon.
    text: the whole outlook in words; empty if retention does not apply.
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
    """Return which segments of a partition expire now, and when the next one expires.

    :param assessment: the segments that a round would cover now.
    :param cleaner: the cleaner settings for the topic. On a broker-managed tier ``retention_ms`` is the topic's own.
    :param now_ms: this machine's clock. If the store's clock is behind, segments expire later.
    """
    if not state.has_segments:
        return RetentionOutlook(0, 0, state.log_start)
    if state.mirrored:
        return _retention_outlook_under_brokers(state, assessment, cleaner, now_ms)
    expired, next_ms = find_expired_segments(state, cleaner, now_ms), next_retention_expiry_time_ms(state, cleaner)
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


def _retention_outlook_under_brokers(
    state: PartitionStateOrSummary[S], assessment: RoundAssessment[S], cleaner: CleanerSettings, now_ms: int
) -> RetentionOutlook:
    """Return when the brokers of a broker-managed tier expire the next segment, and how many segments a round therefore rewrites one to
    one.
    """
    if not is_retention_enabled(cleaner) or cleaner.retention_ms < 0:
        return RetentionOutlook(0, 0, state.log_start)
    next_ms = min(NEVER_MS, state.live[0].max_timestamp_ms + cleaner.retention_ms)
    soon = count_segments_expiring_soon(state, assessment.covered_segments, cleaner, now_ms)
    after = format_duration(cleaner.retention_ms)
    text = f"brokers expire segments by retention.ms of the topic ({after}), the first at {format_iso_time(next_ms)}"
    if soon:
        text += f"; {count_noun(soon, 'segment')} expire within {format_duration(margin_before_broker_expiry_ms(state))} and are "
        text += "rewritten one to one, so that each expires when it would have, and no group loses a part of its sources"
    return RetentionOutlook(0, 0, state.log_start, next_ms=next_ms, one_to_one=soon, text=text)
