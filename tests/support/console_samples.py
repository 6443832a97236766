"""A daemon and an agent as they might be, for pages that are looked at: every state, names and errors that mean harm, many partitions."""

from __future__ import annotations

import random
from dataclasses import replace

from checkpoint.lineage import EpochEntry
from checkpoint.offsets import CleanerOffset
from compactor.adapters.brokers.chain import LeaderReportedLogEnd
from compactor.constants import NEVER_MS, CompactorEpoch, LeaderEpoch, Offset
from compactor.control.state import CompactorEpochAndEnding, CompactorLeader, RunHistoryEntry
from compactor.control.summary import SKIPPED_RANGES_STAT, LastRoundSummary, SegmentSummary, SkippedSegmentRange, format_skipped_ranges
from compactor.daemon.partition_cache import PartitionHistory, ReplacedOffsetRange
from compactor.daemon.scheduling import DaemonAction, PartitionJob, PartitionSchedule
from compactor.daemon.status import (
    DaemonStatus,
    DurationHistogram,
    HourlyStorageFigures,
    JobTotals,
    PartitionDetails,
    RunningJobSnapshot,
    TierStorageTrend,
)
from compactor.errors import BlockedCause
from compactor.features.agent.plan import PartitionDirectoryListing, PartitionUploadState, SealedSegmentFile, UploadFailureReason
from compactor.features.agent.status import AgentCounters, AgentStatus
from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.storage.wrappers import StoreUsage
from compactor.views.verdict import Block
from tests.support.dues import changed, due_of, quarantine, waiting

NOW = 1_795_353_605_000
MINUTE = 60_000
HOUR_MS = 60 * MINUTE
HOLDER = "compactor-7f9c-2.example"
HARM = "<script>alert(1)</script> & \"quoted\" 'too'"
LONGEST = TopicPartition("a_topic_with_a_name_as_long_as_Kafka_allows" + "x" * 205, 3)
TOPICS = ("orders", "customers", "inventory.levels", "payments_settled", "sessions", "catalog-prices", "shipments.eu-west")


def daemon_status(partitions: int, *, trouble: bool = True) -> DaemonStatus:
    """``trouble``: some partitions are quarantined, failing or unreadable, with an error that tries to be markup."""
    chance = random.Random(7)
    schedules = [_watch(TopicPartition(TOPICS[at % len(TOPICS)], at // len(TOPICS)), at, chance) for at in range(partitions)]
    if trouble:
        schedules[2] = _quarantined(schedules[2])
        schedules[9] = _failing(schedules[9])
        schedules[11] = replace(schedules[11], due=None, next_poll_ms=NOW)
        schedules[13] = replace(schedules[13], partition=LONGEST)
    second = schedules[5 % partitions]
    working = (
        RunningJobSnapshot(
            PartitionJob(schedules[0].partition, DaemonAction.ROUND),
            NOW - 204_000,
            "rewrite",
            "Yk2hS0x1QeqLr3zUu0aZpA",
            5,
            12,
            "groups",
            0.7,
            NOW + 88_000,
        ),
        RunningJobSnapshot(
            PartitionJob(second.partition, DaemonAction.ROUND),
            NOW - 31_000,
            "index",
            "",
            412 << 20,
            1900 << 20,
            "bytes",
            0.11,
            NOW + 246_000,
        ),
        RunningJobSnapshot(PartitionJob(schedules[6 % partitions].partition, DaemonAction.RETIRE), NOW - 800, "retire"),
    )
    taken = DurationHistogram().with_duration(0.3).with_duration(2.0).with_duration(48.0)
    return DaemonStatus(
        holder=HOLDER,
        tier="s3://kafka-archive-production/tier",
        now_ms=NOW,
        started_ms=NOW - 19 * HOUR_MS,
        scans=4_412,
        scan_ms=NOW - 6_000,
        interval_ms=15_000,
        ready=True,
        stopping=False,
        problem="",
        schedules=tuple(schedules),
        running_jobs=working if partitions > 6 else working[:1],
        usage=StoreUsage(requests={"get": 120_331, "put": 8_804, "list": 10_001}, bytes_read=4 << 40, bytes_written=1 << 40),
        totals=JobTotals(
            jobs={("round", "cleaned"): 3, ("retire", "retired"): 2},
            durations={("round", "cleaned"): taken, ("retire", "retired"): DurationHistogram().with_duration(0.2)},
            phases={"index": DurationHistogram().with_duration(1.0), "rewrite": DurationHistogram().with_duration(4.0)},
            round_bytes_read=200 << 30,
            last_round_seconds=48.0,
            last_recopy_percent=31.0,
            last_map_percent=12.0,
        ),
        disk_used=1 << 30,
        disk_peak=3 << 30,
        disk_total=4 << 30,
        trend=_trend(),
    )


def _trend() -> TierStorageTrend:
    """A week in which a backlog is worked off."""
    begin = NOW - NOW % HOUR_MS - 167 * HOUR_MS
    hours = tuple(
        HourlyStorageFigures(begin + at * HOUR_MS, (9 << 40) - at * (12 << 30), ((200 - at) % 60) << 32, (at % 24) << 30)
        for at in range(168)
    )
    return TierStorageTrend(hours=hours, topics={"orders": hours})


def _watch(name: TopicPartition, at: int, chance: random.Random) -> PartitionSchedule:
    ratio = chance.random() ** 3
    size = int(10 ** chance.uniform(6.5, 11))
    end = int(10 ** chance.uniform(5, 10))
    due = ratio > 0.5
    before = int(size * chance.uniform(1.1, 4))
    waits = chance.random() < 0.2
    seen = due_of(
        name,
        40,
        segments=max(1, size // (1 << 28)),
        bytes=size,
        start_offset=0,
        end_offset=end,
        vector=(CleanerOffset(leader_epoch=CompactorEpoch(3), offset=Offset(int(end * (1 - ratio)))),),
        first_dirty_offset=int(end * (1 - ratio)),
        first_uncleanable_offset=end + 1,
        dirty_bytes=int(size * ratio),
        dirty_ratio=ratio,
        is_due=due,
        reason=f"dirty ratio {ratio:.2f} is {'above' if due else 'not above'} 0.5",
        leader=_leader(3, released=at not in (0, 5)),
        retire_at_ms=NOW + chance.randrange(60) * MINUTE if waits else NEVER_MS,
        freed=((NOW - 60 * HOUR_MS, 7), (NOW - 3 * HOUR_MS, before // 2)),
        waiting=waiting(before - size // 2 if waits else 0),
        last_round=LastRoundSummary(
            run_id="Yk2hS0x1QeqLr3zUu0aZpA",
            status="cleaned",
            ended_ms=NOW - chance.randrange(3 * 24 * 60) * MINUTE,
            bytes_before=before,
            bytes_after=size,
        )
        if chance.random() < 0.9
        else None,
    )
    return PartitionSchedule(partition=name, due=seen, next_poll_ms=NOW + chance.randrange(60) * MINUTE)


def _failing(schedule: PartitionSchedule) -> PartitionSchedule:
    assert schedule.due is not None
    seen = replace(schedule.due, is_due=True)
    reason = f"the store does not answer: {HARM}"
    return replace(schedule, due=seen, problem=reason, failures=2, failing_since_ms=NOW - 4 * MINUTE, next_round_ms=NOW + 90_000)


def _quarantined(schedule: PartitionSchedule) -> PartitionSchedule:
    assert schedule.due is not None
    reason = (
        "bad data: batch at offset 81,204,113 of 00000000000081200000.log: its CRC is 0x5f0c91aa, and its bytes give 0x1b77e02d. "
        "Restore the object from the store's versions or a backup"
    )
    since_ms = NOW - 3 * HOUR_MS
    seen = changed(
        schedule.due,
        is_due=True,
        reason="dirty ratio 0.71 is above 0.5",
        quarantine=quarantine(since_ms, 7, reason, "x0Vq7bN1S9mB2yQx4mJv3w"),
        block=Block(BlockedCause.DAMAGE, reason, since_ms),
    )
    return replace(schedule, due=seen)


def picture(segments: int = 36, *, trouble: bool = False) -> PartitionDetails:
    """A partition in the middle of its life: cleaned, dirty, not cleanable yet, with what was replaced and what was left alone."""
    chance = random.Random(3)
    live, at = [], 1_200_000
    for number in range(segments):
        width = chance.randrange(200_000, 900_000)
        clean = number < 0.6 * segments
        live.append(_segment(number, at, at + width - 1, int(width * (90 if clean else 420) * chance.uniform(0.5, 1.2))))
        at += width
    name = TopicPartition("orders", 17)
    dirty, uncleanable = live[int(0.6 * segments)].start_offset, live[-2].start_offset
    base = _watch(name, 0, chance)
    assert base.due is not None
    seen = changed(
        base.due,
        segments=segments,
        bytes=sum(segment.size_bytes for segment in live),
        start_offset=live[0].start_offset,
        end_offset=at - 1,
        vector=(
            CleanerOffset(leader_epoch=CompactorEpoch(4), offset=Offset(live[4].start_offset)),
            CleanerOffset(leader_epoch=CompactorEpoch(6), offset=Offset(dirty)),
        ),
        first_dirty_offset=dirty,
        first_uncleanable_offset=uncleanable,
        dirty_bytes=sum(segment.size_bytes for segment in live if segment.start_offset >= dirty),
        dirty_ratio=0.62,
        is_due=True,
        reason="dirty ratio 0.62 is above 0.5",
        waiting=waiting(812 << 20),
        retire_at_ms=NOW + 7 * MINUTE,
    )
    schedule = replace(base, due=seen)
    reason = "its filter matches none of 812 keys"
    spared = [SkippedSegmentRange(part[0].start_offset, part[-1].end_offset, reason) for part in (live[3:6], live[11:13])]
    left_alone = format_skipped_ranges(spared)
    story = PartitionHistory(
        slot=90,
        leader=_leader(6),
        runs=tuple(_run(number, dirty, left_alone) for number in range(5)),
        epochs=tuple(
            CompactorEpochAndEnding(
                epoch=CompactorEpoch(number),
                holder=HOLDER if number != 4 else "compactor-7f9c-1.example",
                incarnation=str(number),
                slot=10 * number,
                at_ms=NOW - (7 - number) * 5 * HOUR_MS,
                ended="" if number == 6 else "replaced" if number == 4 else "released",
                ended_ms=-1 if number == 6 else NOW - (7 - number) * 5 * HOUR_MS + 200_000,
            )
            for number in range(3, 7)
        ),
        lineage=(
            EpochEntry(LeaderEpoch(2), Offset(0)),
            EpochEntry(LeaderEpoch(5), Offset(live[segments // 3].start_offset)),
            EpochEntry(LeaderEpoch(9), Offset(live[2 * segments // 3].start_offset)),
        ),
        replaced=(_gone(live[2], live[7], undone=False), _gone(live[9], live[10], undone=False), _gone(live[14], live[15], undone=True)),
        fenced=1,
    )
    work = RunningJobSnapshot(
        PartitionJob(name, DaemonAction.ROUND), NOW - 75_000, "rewrite", "Yk2hS0x1QeqLr3zUu0aZpA", 4, 9, "groups", 0.72, NOW + 29_000
    )
    if trouble:
        schedule = replace(
            _quarantined(schedule), problem=f"the disk budget is too small: {HARM}", failures=1, failing_since_ms=NOW - MINUTE
        )
    return PartitionDetails(NOW, schedule, tuple(live), story, None if trouble else work)


def _leader(epoch: int, *, released: bool = False) -> CompactorLeader:
    at_ms = NOW - HOUR_MS
    return CompactorLeader(
        epoch=CompactorEpoch(epoch), incarnation="a", holder=HOLDER, slot=80, at_ms=at_ms, ttl_ms=30_000, released=released
    )


def _segment(number: int, start: int, end: int, size: int) -> SegmentSummary:
    return SegmentSummary(encode_segment_id(number.to_bytes(16, "big")), start, end, size, NOW, NOW, NOW, -1, -1, end - start, 0, 0, 5)


def _gone(first: SegmentSummary, last: SegmentSummary, *, undone: bool) -> ReplacedOffsetRange:
    return ReplacedOffsetRange(
        start_offset=first.start_offset,
        end_offset=last.end_offset,
        segments=4,
        bytes=290 << 20,
        run_id="Yk2hS0x1QeqLr3zUu0aZpA",
        undone=undone,
    )


def _run(number: int, dirty: int, left_alone: str) -> RunHistoryEntry:
    before = (900 - 150 * number) << 20
    failed = number == 3
    costs = {"bytes_before": before, "bytes_written": before // 3, "bytes_read": before + (90 << 20)}
    return RunHistoryEntry(
        run_id=encode_segment_id((900 + number).to_bytes(16, "big")),
        leader_epoch=CompactorEpoch(2 + number),
        holder=HOLDER,
        slot=10 * number,
        started_ms=NOW - (6 - number) * 5 * HOUR_MS,
        ended_ms=NOW - (6 - number) * 5 * HOUR_MS + 154_000,
        status="quarantined" if failed else "cleaned",
        reason="gate: group 2 holds a record that none of its sources has" if failed else "",
        segment="x0Vq7bN1S9mB2yQx4mJv3w" if failed else "",
        published_slot=0 if failed else 10 * number + 4,
        first_dirty_offset=dirty // 5 * number,
        next_dirty_offset=dirty // 5 * (number + 1),
        sources=12,
        outputs=0 if failed else 4,
        stats={} if failed else {**costs, "records_read": 4_100_000, "records_kept": 1_210_000, SKIPPED_RANGES_STAT: left_alone},
    )


def agent_status(partitions: int) -> AgentStatus:
    schedules = []
    for at in range(partitions):
        name = TopicPartition(TOPICS[at % len(TOPICS)], at // len(TOPICS))
        sealed = tuple(SealedSegmentFile(1000 * n, 1000 * n + 1000, 200 << 20, NOW - (9 - n) * MINUTE) for n in range(at % 4))
        schedule = PartitionUploadState(
            PartitionDirectoryListing(name, f"/kafka/{name}", NOW, NOW, sealed, 4000),
            leads=at % 5 != 4,
            position=1000,
            end=LeaderReportedLogEnd(LeaderEpoch(3), 4200),
        )
        if at == 3:
            reason = f"offsets 1000 to 4999 were deleted by the broker before they were uploaded: {HARM}"
            schedule = replace(
                schedule,
                trouble=UploadFailureReason.GAP,
                reason=reason,
                failures=3,
                troubled_ms=NOW - HOUR_MS,
                retry_at_ms=NOW + 4 * MINUTE,
            )
        schedules.append(schedule)
    return AgentStatus(
        holder=HOLDER,
        tier="s3://kafka-archive-production/tier",
        now_ms=NOW,
        started_ms=NOW - 19 * HOUR_MS,
        scans=1_200,
        scan_ms=NOW - 2_000,
        interval_ms=5_000,
        ready=True,
        stopping=False,
        problem="",
        problems={},
        upload_states=tuple(schedules),
        running={schedules[1].partition: NOW - 12_000},
        usage=StoreUsage(requests={"put": 800}),
        tallies=AgentCounters(uploads=40, segments=112, bytes=98 << 30, refusals={UploadFailureReason.GAP: 3}),
    )
