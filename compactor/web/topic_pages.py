"""A daemon's page of topics, and the figures over time that its first page shows. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from compactor import __version__
from compactor.config.settings import CleanerSettings
from compactor.daemon.scheduling import DaemonAction, PartitionSchedule
from compactor.daemon.status import DaemonStatus
from compactor.daemon.trend import HourlyStorageFigures
from compactor.model.status import RoundStatus
from compactor.web.documents import EffectiveCleanerSettings, HourlyStorageBytes, TopicsDocument, TopicTotalsRow


def topics_document(status: DaemonStatus, cleaner_settings_for_topic: Callable[[str], CleanerSettings]) -> TopicsDocument:
    """Return the document of the page of topics.

    :param cleaner_settings_for_topic: returns the settings in force for a topic.
    """
    by_topic: dict[str, list[PartitionSchedule]] = defaultdict(list)
    for schedule in status.schedules:
        by_topic[schedule.partition.topic].append(schedule)
    rows = [_topic_row(topic, found, status, cleaner_settings_for_topic(topic)) for topic, found in by_topic.items()]
    rows.sort(key=lambda row: (-row.bytes, row.topic))
    return TopicsDocument(version=__version__, tier=status.tier, now_ms=status.now_ms, topics=tuple(rows))


def _topic_row(topic: str, schedules: Iterable[PartitionSchedule], status: DaemonStatus, cleaner: CleanerSettings) -> TopicTotalsRow:
    """Return the row of one topic, with the totals of its partitions."""
    found = list(schedules)
    statuses = [schedule.status for schedule in found if schedule.status is not None]
    rounds = [each.last_round for each in statuses if each.last_round is not None and each.last_round.bytes_after >= 0]
    return TopicTotalsRow(
        topic=topic,
        partitions=len(found),
        attention_partitions=sum(bool(schedule.blocked_reason) for schedule in found),
        due_partitions=sum(schedule.status_if_round_may_begin is not None for schedule in found),
        segments=sum(each.segments for each in statuses),
        bytes=sum(each.bytes for each in statuses),
        dirty_bytes=sum(each.dirty_bytes for each in statuses),
        waiting_bytes=sum(each.waiting_bytes for each in statuses),
        saved_bytes=sum(max(0, each.bytes_before - each.bytes_after) for each in rounds),
        policy=EffectiveCleanerSettings(**{name: getattr(cleaner, name) for name in EffectiveCleanerSettings.model_fields}),
        week=hourly_storage_bytes(status.trend.topics.get(topic, ())),
    )


def hourly_storage_bytes(hours: Iterable[HourlyStorageFigures]) -> tuple[HourlyStorageBytes, ...]:
    """Return the storage figures of each hour in the form that the pages' documents use."""
    return tuple(
        HourlyStorageBytes(hour_ms=each.hour_ms, stored_bytes=each.stored, dirty_bytes=each.dirty, reclaimed_bytes=each.reclaimed)
        for each in hours
    )


def queue_empty_ms(status: DaemonStatus, due_bytes: int) -> int | None:
    """Return the time, in milliseconds since 1970, when all due rounds will be done if they go on as fast as this process's rounds so far.

    Return None if nothing is due, or this process has finished no round.

    :param due_bytes: dirty bytes of partitions that wait for a round.
    """
    totals, key = status.totals, (DaemonAction.ROUND.value, RoundStatus.CLEANED.value)
    seconds = totals.durations[key].total if key in totals.durations else 0.0
    if not due_bytes or not seconds or not totals.round_bytes_read:
        return None
    at_once = max(1, sum(work.job.action is DaemonAction.ROUND for work in status.running_jobs))
    return status.now_ms + int(1000 * due_bytes * seconds / totals.round_bytes_read / at_once)
