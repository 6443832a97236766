"""``verify``: is the tier what its metadata says? Reads every live object; changes nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from checkpoint.files import parse_leader_epoch_checkpoint
from compactor.bootstrap import Tier
from compactor.cleaner.passes.describe import content_of, negative_timestamps
from compactor.cleaner.passes.source import SourceSegment, open_source
from compactor.cleaner.passes.transactions import txnindex_misfit
from compactor.config import Cleaner
from compactor.control.logs import PartitionLog
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound, OutOfBudget, Refused
from compactor.local.budget import blocks
from compactor.local.spool import process_folder
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.balance import BalanceKey, content_sum
from compactor.records.indexes import index_misfit, parse_txn_index, timeindex_misfit
from compactor.records.producers import parse_snapshot
from compactor.round.compaction import disk_budget
from compactor.tier.recorded import download
from compactor.upkeep.retire import Clock, survey
from compactor.upkeep.uploads import leftovers


@dataclass(frozen=True)
class Problem:
    """``severity``: ``error``, or ``note`` for what waits for grace or a sweep. ``kind`` is one word for scripts."""

    severity: str
    kind: str
    topic: str
    partition: int
    object: str
    detail: str


def verify_catalog(opened: Tier) -> list[Problem]:
    """Whether the tier-wide log can be read to its end: partitions that it does not name are not looked at."""
    try:
        opened.check_owner()
        opened.catalog.check_whole()
    except BadData as error:
        return [Problem("error", "control-log", "", -1, error.segment, error.cause)]
    return []


def verify_uploads(opened: Tier) -> list[Problem]:
    """Notes of what writers have begun and will not finish any more; one where that cannot be asked."""
    try:
        found = [one for one in leftovers(opened, opened.ports.clock_ms()) if one.due]
    except Refused as error:
        return [Problem("note", "uploads-unknown", "", -1, opened.ports.data.url, f"unfinished uploads cannot be listed: {error.message}")]
    detail = "an upload that nobody has finished; `retire` sweeps it"
    return [Problem("note", "unfinished", "", -1, one.where, detail) for one in found]


def verify_partition(
    opened: Tier, name: TopicPartition, on_bytes: Callable[[int], None] = lambda size: None, *, deep: bool = False
) -> list[Problem]:
    """All problems and notes of one partition. What is wrong with the data is an answer, not an exception.

    :param deep: each segment's batches are added up anew and compared with the sum that was recorded when it was written.
    :raises OutOfBudget: a segment that does not fit within ``disk_budget_bytes``.
    :raises StoreError: the store does not answer.
    """
    log = opened.open(name)
    try:
        state = log.check_whole()
    except BadData as error:
        return [Problem("error", "control-log", name.topic, name.partition, error.segment, error.message)]
    found = list(_check_coverage(state))
    found += _check_account(state) if deep else []
    key = BalanceKey(opened.hash_key()) if deep and state.live else None
    cleaner = opened.cleaner_for(name.topic)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=process_folder(opened.state_dir)) as scratch:
        previous_last = -1
        for segment in state.live:
            check_room(opened, cleaner, segment)
            check = _Check(opened, name, segment, Path(scratch), cleaner.max_decompressed_batch_bytes, key)
            problems, last = check.run(previous_last)
            previous_last = max(previous_last, last)
            if problems and log.refresh().slot != state.slot and segment.id not in log.state.live_by_id():
                continue  # replaced and retired while we looked
            found += problems
            on_bytes(segment.size_bytes)
    return found + list(_notes(opened, name, log))


def _check_coverage(state: PartitionState) -> Iterator[Problem]:
    for before, after in zip(state.live, state.live[1:], strict=False):
        if after.start_offset != before.end_offset + 1:
            kind = "gap" if after.start_offset > before.end_offset else "overlap"
            detail = f"it begins at {after.start_offset}, the segment before ends at {before.end_offset}"
            yield Problem("error", kind, *state.name, after.id, detail)


def check_room(opened: Tier, cleaner: Cleaner, segment: RemoteLogSegmentMetadata) -> None:
    """One segment at a time lies on the local disk."""
    needed, budget = sum(blocks(file.size) for file in segment.files.values()), disk_budget(cleaner, opened.state_dir)
    if needed > budget:
        raise OutOfBudget(
            f"segment {segment.id} takes {needed} bytes of local disk, and the disk budget is {budget}",
            hint=f"Set disk_budget_bytes to at least {needed}",
        )


class _Check(NamedTuple):
    """One segment against what was recorded of it."""

    opened: Tier
    name: TopicPartition
    segment: RemoteLogSegmentMetadata
    scratch: Path
    inflate_limit: int
    balance_key: BalanceKey | None

    def run(self, previous_last: int) -> tuple[list[Problem], int]:
        """(problems, last offset that its batches hold)."""
        segment = self.segment
        found: list[Problem] = []
        paths = self._fetched(found)
        if "log" not in paths:
            return found, segment.end_offset
        try:
            source = open_source(
                0, paths["log"], segment.start_offset, segment.end_offset + 1, segment.mtime_ms, previous_last, self.inflate_limit
            )
            source.name = self._where("log")
            source.verify(0, len(source.table))
            negative = negative_timestamps(source, self.inflate_limit)
        except BadData as error:
            return [*found, self._problem("log", "log", error.cause)], segment.end_offset
        if negative:
            detail = (
                f"{negative} records have negative timestamps: no round writes a batch anew that keeps one, as Kafka's cleaner does not"
            )
            found.append(self._problem("negative-timestamp", "log", detail, severity="note"))
        if detail := _content_problem(segment, source, self.balance_key):
            found.append(self._problem("balance", "log", detail))
        if detail := _metadata_problem(segment, source):
            found.append(self._problem("metadata", "log", detail))
        for kind, detail in problems_beside(source, {kind: path.read_bytes() for kind, path in paths.items() if kind != "log"}):
            found.append(self._problem(kind, kind, detail))
        return found, int(source.table.last_offset[-1]) if len(source.table) else -1

    def _fetched(self, found: list[Problem]) -> dict[str, Path]:
        """Kind -> the object as a local file, where it is what was recorded."""
        paths: dict[str, Path] = {}
        for kind, file in self.segment.files.items():
            path = self.scratch / kind
            path.unlink(missing_ok=True)
            try:
                arrived = download(self.opened.ports.layout, self.name, self.segment, kind, path)
            except NotFound:
                found.append(self._problem("missing", kind, "the object is not in the store"))
                continue
            if arrived.is_recorded(file):
                paths[kind] = path
            elif arrived.size != file.size:
                found.append(self._problem("size", kind, f"it has {arrived.size} bytes, recorded are {file.size}"))
            else:
                found.append(self._problem("digest", kind, "its bytes are not those that were recorded"))
        return paths

    def _problem(self, kind: str, file: str, detail: str, severity: str = "error") -> Problem:
        return Problem(severity, kind, *self.name, self._where(file), detail)

    def _where(self, kind: str) -> str:
        return self.opened.ports.layout.where(self.name, self.segment, kind)


def _metadata_problem(segment: RemoteLogSegmentMetadata, source: SourceSegment) -> str:
    """What readers decide by without a look into the log; ids, offsets and epochs the fold has checked."""
    latest = content_of(source.table).max_timestamp_ms
    if segment.size_bytes != source.size:
        return f"its metadata says {segment.size_bytes} bytes, it has {source.size}"
    if segment.max_timestamp_ms != latest:
        return f"its metadata says that its latest record is of {segment.max_timestamp_ms}, it is of {latest}"
    return ""


def _content_problem(segment: RemoteLogSegmentMetadata, source: SourceSegment, key: BalanceKey | None) -> str:
    """Whether it holds the batches that were recorded when it was written."""
    if key is None or segment.content is None:
        return ""
    held = content_sum(source.buf, key)
    return "" if held == segment.content else f"it holds {held} batches, and {segment.content} were recorded when it was written"


def _check_account(state: PartitionState) -> Iterator[Problem]:
    """Whether each remembered round adds up by its own record, and the last one with what readers have."""
    for run in state.runs:
        if run.balance is not None and (problem := run.balance.problem()):
            yield Problem("error", "balance", *state.name, run.run_id, problem)
    unknown = sum(segment.content is None for segment in state.live)
    if unknown:
        detail = f"of {unknown} segments nobody recorded what they hold: an earlier program or a broker wrote them"
        yield Problem("note", "balance-unknown", *state.name, "", detail)


def problems_beside(source: SourceSegment, files: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """(kind, what is wrong) of the files beside a sound log."""
    problems: dict[str, Callable[[bytes], str]] = {
        "index": lambda data: index_misfit(data, source.base, source.table),
        "timeindex": lambda data: timeindex_misfit(data, source.base, source.table),
        "txnindex": lambda data: _txnindex_problem(data, source),
    }
    for kind, problem in problems.items():
        if kind in files and (detail := problem(files[kind])):
            yield kind, detail
    try:
        if "snapshot" in files:
            parse_snapshot(files["snapshot"], "snapshot")
    except BadData as error:
        yield "snapshot", error.cause
    try:
        parse_leader_epoch_checkpoint(files.get("leader-epoch-checkpoint", b"").decode())
    except (BadData, UnicodeDecodeError) as error:
        yield "leader-epoch-checkpoint", str(error)


def _txnindex_problem(data: bytes, source: SourceSegment) -> str:
    try:
        entries = parse_txn_index(data, "")
    except BadData as error:
        return error.cause
    return txnindex_misfit(entries, source)


def _notes(opened: Tier, name: TopicPartition, log: PartitionLog) -> Iterator[Problem]:
    # By this machine's clock: a directory is written to when it is asked for its own, and nothing is decided here.
    found = survey(opened.ports, log, opened.retention, Clock(opened.ports.clock_ms(), asks=False))
    for segment in (*found.due, *found.waiting, *found.unfinished):
        yield Problem("note", "waiting", *name, segment.id, "replaced; its objects wait for grace or for `retire`")
    for key in (*(item.key for item in found.orphans), *found.scratch):
        yield Problem("note", "orphan", *name, key, "nobody reads it; `retire` sweeps it")
    for key in (item.key for item in found.young):
        yield Problem("note", "orphan", *name, key, "its log does not know it; `retire` sweeps it once it is older than orphan_age_ms")
    for key in found.strangers:
        yield Problem("note", "stranger", *name, key, "it is none of this program's objects, and is left alone")
    for import_id in found.stale_imports:
        yield Problem("note", "import", *name, import_id, "an unfinished import; `retire` sweeps what it left")
    if found.open_intent:
        yield Problem("note", "intent", *name, "", "a round was begun and not finished; the next `run` finishes or undoes it")
