"""``verify``: is the tier what its metadata says? Reads every live object; changes nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compactor.cleaner.source import SourceSegment, open_source
from compactor.errors import BadData, NotFound
from compactor.metadata.state import PartitionState
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.pipeline.logs import PartitionLog
from compactor.pipeline.retire import survey
from compactor.pipeline.staging import digest
from compactor.pipeline.tier import Tier
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY, parse_txn_index
from compactor.records.producers import parse_snapshot


@dataclass(frozen=True)
class Problem:
    """``severity``: ``error``, or ``note`` for what waits for grace or a sweep. ``kind`` is one word for scripts."""

    severity: str
    kind: str
    topic: str
    partition: int
    object: str
    detail: str


def verify_partition(opened: Tier, name: TopicPartition, inflate_limit: int, on_bytes: Callable[[int], None] = lambda size: None) -> list[Problem]:
    """All problems and notes of one partition. Raises StoreError; what is wrong with the data is an answer, not an exception."""
    log = opened.open(name)
    try:
        state = log.refresh()
    except BadData as error:
        return [Problem("error", "control-log", name.topic, name.partition, error.segment, error.message)]
    found = list(_check_coverage(state))
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        previous_last = -1
        for segment in state.live:
            problems, last = _check_segment(opened, name, segment, Path(scratch), previous_last, inflate_limit)
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
            yield Problem("error", kind, *state.name, after.id, f"it begins at {after.start_offset}, the segment before ends at {before.end_offset}")


def _check_segment(
    opened: Tier, name: TopicPartition, segment: RemoteLogSegmentMetadata, scratch: Path, previous_last: int, inflate_limit: int
) -> tuple[list[Problem], int]:
    found: list[Problem] = []

    def problem(kind: str, key: str, detail: str) -> None:
        found.append(Problem("error", kind, *name, key, detail))

    paths: dict[str, Path] = {}
    for kind, file in segment.files.items():
        key, path = segment.key(str(name), kind), scratch / kind
        path.unlink(missing_ok=True)
        try:
            opened.ports.data.download(key, path)
        except NotFound:
            problem("missing", key, "the object is not in the store")
            continue
        if path.stat().st_size != file.size:
            problem("size", key, f"it has {path.stat().st_size} bytes, recorded are {file.size}")
        elif digest(path) != file.sha256:
            problem("digest", key, "its bytes are not those that were recorded")
        else:
            paths[kind] = path
    if "log" not in paths:
        return found, segment.end_offset
    try:
        source = open_source(0, paths["log"], segment.start_offset, segment.end_offset + 1, segment.mtime_ms, previous_last, inflate_limit)
        source.name = segment.key(str(name), "log")
        source.verify(0, len(source.table))
    except BadData as error:
        problem("log", segment.key(str(name), "log"), error.cause)
        return found, segment.end_offset
    for kind, check in (("index", _index_problem), ("timeindex", _timeindex_problem)):
        detail = check(paths[kind].read_bytes(), source) if kind in paths else ""
        if detail:
            problem(kind, segment.key(str(name), kind), detail)
    for kind, parse in (("txnindex", parse_txn_index), ("snapshot", parse_snapshot)):
        if kind in paths:
            try:
                parse(paths[kind].read_bytes(), kind)
            except BadData as error:
                problem(kind, segment.key(str(name), kind), error.cause)
    return found, int(source.table.last_offset[-1]) if len(source.table) else -1


def _index_problem(data: bytes, source: SourceSegment) -> str:
    if len(data) % OFFSET_ENTRY.itemsize:
        return "it holds no whole number of entries"
    entries = np.frombuffer(data, OFFSET_ENTRY)
    batch = np.searchsorted(source.table.position, entries["position"])
    if np.any(batch >= len(source.table)) or np.any(source.table.position[np.minimum(batch, len(source.table) - 1)] != entries["position"]):
        return "an entry does not point at a batch"
    if np.any(entries["offset"].astype(np.int64) + source.base > source.table.last_offset[batch]):
        return "an entry points at a batch below its offset"
    return ""


def _timeindex_problem(data: bytes, source: SourceSegment) -> str:
    if len(data) % TIME_ENTRY.itemsize:
        return "it holds no whole number of entries"
    entries = np.frombuffer(data, TIME_ENTRY)
    if np.any(np.diff(entries["timestamp"].astype(np.int64)) <= 0):
        return "its timestamps do not ascend"
    if np.any(entries["offset"].astype(np.int64) + source.base >= source.end):
        return "an entry lies behind the segment's end"
    return ""


def _notes(opened: Tier, name: TopicPartition, log: PartitionLog) -> Iterator[Problem]:
    found = survey(opened.ports, log, opened.retention)
    for segment in (*found.due, *found.waiting, *found.unfinished):
        yield Problem("note", "waiting", *name, segment.id, "replaced; its objects wait for grace or for `retire`")
    for key in (*found.orphans, *found.scratch):
        yield Problem("note", "orphan", *name, key, "nobody reads it; `retire` sweeps it")
    for import_id in found.stale_imports:
        yield Problem("note", "import", *name, import_id, "an unfinished import; `retire` sweeps what it left")
    if found.open_intent:
        yield Problem("note", "intent", *name, "", "a round was begun and not finished; the next `run` finishes or undoes it")
