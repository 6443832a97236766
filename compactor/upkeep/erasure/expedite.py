"""What an erasure needs, done now under the normal protocol: rounds over the partitions that hold the key, then `retire`.

Nothing is written that a round or `retire` would not write. Grace is shortened only where somebody has consented to it; delete horizons
of tombstones, which slow readers were promised, are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from compactor.bootstrap import Tier
from compactor.config import Cleaner
from compactor.control.grace import keep_ms
from compactor.control.state import PartitionState
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import AssessWith
from compactor.round.plan import Assessment, assess
from compactor.upkeep.erasure.holders import PartitionSurvey
from compactor.upkeep.erasure.survey import Question, survey
from compactor.upkeep.retire import STORES_OWN, Clock, retire

ROUNDS = 3
"""One drops what is superseded and gives tombstones their horizon, another one drops those whose horizon has passed by then."""
HOLDS = "segments hold keys that are to be erased"


def expedite(opened: Tier, found: PartitionSurvey, asked: Question, *, shorten_grace: bool, tell: Callable[[str], None]) -> PartitionSurvey:
    """Returns how the partition stands afterwards. Raises Leased, Fenced, StoreError, OutOfBudget."""
    for _ in range(ROUNDS):
        if not found.movable:
            break
        if not _round(opened, found, asked.now_ms, tell):
            break
        before, found = found.movable, survey(opened, found.name, asked)
        if found.movable == before:
            break
    if found.holders:
        _retire(opened, found, asked.now_ms, shorten_grace=shorten_grace, tell=tell)
        found = survey(opened, found.name, asked)
    return found


def forced_over(segments: frozenset[str]) -> AssessWith:
    """A round that also reads and writes anew these segments, wherever they lie below its end."""

    def look(state: PartitionState, cleaner: Cleaner, now_ms: int) -> Assessment[RemoteLogSegmentMetadata]:
        usual = assess(state, cleaner, now_ms, force=True)
        due = {segment.id for segment in usual.segments if segment.id in segments}.union(usual.horizon_due)
        reason = usual.reason if usual.due else f"{len(due)} {HOLDS}" if due else usual.reason
        return replace(usual, due=usual.due or bool(due), reason=reason, horizon_due=tuple(sorted(due)))

    return look


def _round(opened: Tier, found: PartitionSurvey, now_ms: int, tell: Callable[[str], None]) -> bool:
    name = found.name
    log, hint = opened.open(name, leads=True), opened.hint(name)
    report = opened.round(name, now_ms, assess_with=forced_over(found.movable)).run(log)
    opened.keep(log, hint)
    if report.status in ("cleaned", "resumed"):
        opened.note_change(log)
        tell(f"{name}: {report.status}, {report.records_read} records -> {report.records_kept}, clean up to {report.next_dirty_offset}")
    elif report.status == "quarantined":
        tell(f"{name}: quarantined: {report.reason}")
    return report.status in ("cleaned", "resumed")


def _retire(opened: Tier, found: PartitionSurvey, now_ms: int, *, shorten_grace: bool, tell: Callable[[str], None]) -> None:
    log = opened.open(found.name, leads=True)
    clock = STORES_OWN
    if shorten_grace:
        kept = [keep_ms(group, opened.retention) for group in log.refresh().waiting]
        ahead = max(kept, default=0) + opened.retention.grace_ms + 1
        clock = Clock(opened.ports.control.clock_ms() + ahead, forced=True, spares_young=True)
    report = retire(opened.ports, log, opened.lease, opened.retention, clock=clock, work=opened.round(found.name, now_ms))
    opened.note_slots([log])
    if report.deleted or report.swept:
        early = ", grace cut short" if shorten_grace else ""
        tell(f"{found.name}: {len(report.deleted) + len(report.swept)} objects deleted, {report.bytes} bytes{early}")
