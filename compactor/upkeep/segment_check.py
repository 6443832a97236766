"""Checks of one segment's files, shared by `verify` for all kinds of tier. Reads only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from checkpoint.files import parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import reason_txn_index_is_invalid
from compactor.errors import BadData, NotFound, OutOfBudget
from compactor.local.budget import round_up_to_disk_blocks
from compactor.model.base import ReasonOrEmpty
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.indexes import parse_txn_index, reason_offset_index_is_invalid, reason_time_index_is_invalid
from compactor.records.producers import parse_producer_snapshot_file
from compactor.round.compaction import disk_budget_bytes
from compactor.tier.contents import download_segment_file

ProblemKindAndText = tuple[str, str]
"""Kind of a problem in one word, and its description."""


@dataclass(frozen=True)
class SegmentProblem:
    """A problem that `verify` found in a segment or its metadata.

    severity: ``error``, or ``note`` for something that only waits for its deletion.
    kind: the problem's kind in one word, for scripts.
    """

    severity: str
    kind: str
    topic: str
    partition: int
    object: str
    detail: str


class SegmentFileProblem(NamedTuple):
    """A file of a segment whose object is not as recorded. kind: ``missing``, ``size`` or ``digest``."""

    file: str
    kind: str
    detail: str


IntactPathsAndFileProblems = tuple[dict[str, Path], list[SegmentFileProblem]]
"""Paths of the intact files by kind, and a problem for each other file."""


def download_intact_files(
    tier: Tier, partition: TopicPartition, segment: RemoteLogSegmentMetadata, folder: Path
) -> IntactPathsAndFileProblems:
    """Download a segment's objects into a folder. Return the paths, by kind, of those that have the recorded size and digest, and a problem
    for each of the others. Raises StoreError.
    """
    paths: dict[str, Path] = {}
    problems = []
    for kind, file in segment.files.items():
        path = folder / kind
        path.unlink(missing_ok=True)
        try:
            arrived = download_segment_file(tier.ports.layout, partition, segment, kind, path)
        except NotFound:
            problems.append(SegmentFileProblem(kind, "missing", "the object is not in the store"))
            continue
        if arrived.matches_recorded_content(file):
            paths[kind] = path
        elif arrived.size != file.size:
            problems.append(SegmentFileProblem(kind, "size", f"it has {arrived.size} bytes, recorded are {file.size}"))
        else:
            problems.append(SegmentFileProblem(kind, "digest", "its bytes are not those that were recorded"))
    return paths, problems


def raise_if_segment_exceeds_disk_budget(
    tier: Tier, partition: TopicPartition, segment: RemoteLogSegmentMetadata, other_remedy: str = "", *, copies_on_disk: int = 1
) -> None:
    """Raise OutOfBudget if one segment does not fit within the disk budget.

    :param other_remedy: text about another remedy, appended to the hint.
    :param copies_on_disk: how many copies of the segment are on local disk at once.
    """
    needed = copies_on_disk * sum(round_up_to_disk_blocks(file.size) for file in segment.files.values())
    budget = disk_budget_bytes(tier.cleaner_settings_for_topic(partition.topic), tier.state_dir)
    if needed > budget:
        message = f"segment {segment.id} takes {needed} bytes of local disk, and the disk budget is {budget}"
        raise OutOfBudget(message, hint=f"Set disk_budget_bytes to at least {needed}{other_remedy}")


def index_and_checkpoint_file_problems(
    source: SourceSegment, files: Mapping[str, bytes], lineage: Sequence[EpochEntry] = (), log_start: int = 0
) -> Iterator[ProblemKindAndText]:
    """Yield (kind, problem) for each invalid index, snapshot or checkpoint file of a segment whose log is valid.

    :param lineage: leader epochs that the leader-epoch checkpoint must have.
    :param log_start: log start offset of the partition. Brokers drop leader epochs below it from later checkpoints.
    """
    checks: dict[str, Callable[[bytes], str]] = {
        "index": lambda data: reason_offset_index_is_invalid(data, source.base, source.table),
        "timeindex": lambda data: reason_time_index_is_invalid(data, source.base, source.table),
        "txnindex": lambda data: reason_txn_index_is_invalid(parse_txn_index(data, ""), source),
        "snapshot": _producer_snapshot_problem,
        "leader-epoch-checkpoint": lambda data: _leader_epoch_checkpoint_problem(data, lineage, log_start),
    }
    for kind, check in checks.items():
        if kind in files:
            try:
                detail = check(files[kind])
            except BadData as error:
                detail = error.cause
            if detail:
                yield kind, detail


def _producer_snapshot_problem(snapshot_bytes: bytes) -> ReasonOrEmpty:
    parse_producer_snapshot_file(snapshot_bytes, "snapshot")
    return ""


def _leader_epoch_checkpoint_problem(checkpoint_bytes: bytes, lineage: Sequence[EpochEntry], log_start: int) -> ReasonOrEmpty:
    """Return how a leader-epoch checkpoint differs from the leader epochs that the metadata states, or an empty string. A broker that uses
    a differing file would take another lineage.

    :param log_start: log start offset of the partition. Brokers drop epochs that end before it, and let the epoch that contains it begin
        there.
    """
    try:
        known = {entry.epoch: entry.start_offset for entry in parse_leader_epoch_checkpoint(checkpoint_bytes.decode())}
    except UnicodeDecodeError:
        return "it is not text"
    for entry, following in zip_longest(lineage, lineage[1:]):
        if following is not None and following.start_offset <= log_start:
            continue
        latest = max(entry.start_offset, log_start)
        if known.get(entry.epoch, latest + 1) > latest:
            return f"epoch {entry.epoch} begins at {known.get(entry.epoch, 'no offset')} in it, metadata says {entry.start_offset}"
    return ""
