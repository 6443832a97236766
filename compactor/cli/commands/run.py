"""``run [TOPIC-PARTITION...]``: one round over what is due; also finishes or undoes what a crash left."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Progress, Table, size
from compactor.cli.profile import Profile, add_argument
from compactor.cli.warming import warm_up

if TYPE_CHECKING:
    from compactor.bootstrap import Tier
    from compactor.control.ordering import Stage
    from compactor.control.summary import PartitionSummary
    from compactor.model.ids import TopicPartition
    from compactor.model.plan import CompactionPlan
    from compactor.service.progress import JobProgress


def add_arguments(parser: frame.Parser) -> None:
    tiers.partitions_argument(parser)
    tiers.now_argument(parser)
    parser.add_argument("--force", action="store_true", help="clean whatever is dirty, whatever the dirty ratio says")
    add_argument(parser)
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    from compactor.control.pauses import pause_of
    from compactor.round.compaction import nothing_to_do, paused

    with tiers.opened(args, local_state=True, writes="run") as opened:
        names = opened.partitions(args.partitions)
        outcomes = tiers.PartitionOutcomes(out, named=bool(args.partitions))
        now = tiers.now_ms(args)
        rows = {}
        held = []
        for summary in _looks(opened, names, out):
            if summary.leader is not None and not summary.leader.released:
                held.append(summary.name)
            why = pause_of(opened.catalog.state, summary.name)
            idle = (
                paused(summary, why)
                if why and not summary.open_run
                else nothing_to_do(opened.cleaner_for(summary.topic), summary, now, force=args.force)
            )
            if idle is not None:
                rows[summary.name] = tiers.plain(idle) | {"requests": 0, "seconds": 0.0}
                outcomes.ok()
        work = [name for name in names if name not in rows]
        profile = Profile(args)
        if work:
            rows |= _rounds(opened, work, held, args, now, profile, out, outcomes)
    found = [rows[name] for name in names]
    usage = opened.counters.usage()
    store = {"requests": dict(usage.requests), "bytes_read": usage.bytes_read, "bytes_written": usage.bytes_written}
    out.result({"partitions": found, "store": store, "profile": profile.document()}, _table(found), *profile.tables(), summary=_why(found))
    return outcomes.exit_code()


def _looks(opened: Tier, names: Sequence[TopicPartition], out: Output) -> list[PartitionSummary]:
    """All partitions that can be read, as the tier has them now: most of them have nothing to do, and are asked for that at once."""
    from compactor.views.overview import overview

    with out.progress("looking", len(names), "partitions") as progress:
        looks = overview(opened, names, max_age_ms=0, on_partition=progress.advance)
    return [look.summary for look in looks if look.summary is not None]


def _say_who_leads(opened: Tier, name: TopicPartition, out: Output) -> None:
    """A process that was killed did not give its lease back: waiting for its end would look like doing nothing."""
    from compactor.control.leadership import lease_of

    log = opened.open(name)
    log.refresh()
    lease = lease_of(opened.ports, log)
    left_ms = lease.expires_ms - opened.ports.control.clock_ms() if lease else 0
    if lease and left_ms > 0:
        out.note(f"{name}: {lease.holder} holds the lease; waiting for its end, up to {-(-left_ms // 1000)} s")


def _rounds(
    opened: Tier,
    names: Sequence[TopicPartition],
    held: Sequence[TopicPartition],
    args: argparse.Namespace,
    now: int,
    profile: Profile,
    out: Output,
    outcomes: tiers.PartitionOutcomes,
) -> dict[TopicPartition, dict[str, object]]:
    from compactor.local.spool import process_folder
    from compactor.round.compaction import not_done
    from compactor.service.journal import Journal
    from compactor.service.progress import JobProgress
    from compactor.service.scheduling import Action, Job

    process_folder(opened.state_dir)  # before anything is announced that could not be worked on
    if opened.engines is not None:
        for name in names:
            opened.engines(opened, name)  # a machine without Java lacks it for every partition
    rows = {}
    warm_up(out, load=args.profile)
    with out.progress("cleaning", unit="bytes") as progress, opened.counters.watched(progress.advance), profile.recording():
        for number, name in enumerate(names, start=1):
            begin, before = time.monotonic(), opened.counters.usage()
            told = JobProgress(Job(name, Action.ROUND), None, now, Journal(logging.getLogger(__name__)))
            stages = _Stages(progress, f"{name} ({number} of {len(names)})", told)
            try:
                if name in held:
                    _say_who_leads(opened, name, out)
                report = opened.compact(name, now, force=args.force, on_stage=stages)
                if report.status == "quarantined":
                    outcomes.bad_data(str(name), report.reason)
                else:
                    if report.reason:  # why it waits, what was given up first, what brokers had deleted meanwhile
                        out.note(f"{name}: {report.reason}")
                    outcomes.ok()
            except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
                report = not_done(name, outcomes.failed(str(name), error))
            requests = opened.counters.usage().since(before).total_requests
            rows[name] = tiers.plain(report) | {"requests": requests, "seconds": round(time.monotonic() - begin, 3)}
    return rows


def _why(found: list[dict[str, object]]) -> str:
    """Why something that is due was not begun; what failed was told when it did."""
    return "\n".join(f"{row['topic']}-{row['partition']} is {row['reason']}" for row in found if row["status"] == "paused")


class _Stages:
    """Shows the stage that a round has reached, and the bytes that go to and fro in it; with ``-v`` a line for each step stays."""

    def __init__(self, progress: Progress, label: str, told: JobProgress) -> None:
        self._progress = progress
        self._label = label
        self._told = told
        progress.at(label)

    def __call__(self, stage: Stage, plan: CompactionPlan) -> None:
        self._progress.at(f"{self._label}: {stage.value}")
        self._told.reached(stage, plan)


def _table(found: list[dict[str, object]]) -> Table:
    columns = ("partition", "status", "segments", "records", "kept", "read", "written", "next dirty", "seconds")
    rows = []
    for row in found:
        segments = f"{row['segments_in']} -> {row['segments_out']}" if row.get("segments_out") else ""
        read, written, copied = row.get("bytes_read"), row.get("bytes_written"), row.get("bytes_copied")
        by_the_store = f" ({size(copied)} copied by the store)" if isinstance(copied, int) and copied else ""
        rows.append(
            (
                f"{row['topic']}-{row['partition']}", row["status"], segments, row.get("records_read"), row.get("records_kept"),
                size(read) if isinstance(read, int) else "", size(written) + by_the_store if isinstance(written, int) else "",
                row.get("next_dirty_offset"), row["seconds"],
            )
        )  # fmt: skip
    return Table("", columns, rows)
