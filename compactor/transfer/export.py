"""``export``: the current readable view back out, as a Kafka log directory that a broker can open."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.lineage import union
from compactor.bootstrap import Tier
from compactor.cleaner.passes.describe import lineage_of
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound, OutOfBudget, UsageError
from compactor.metadata_topic.codec import uuid_bytes
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import map_file, scan_batches
from compactor.tier.brokers import BrokersMetadata
from compactor.tier.recorded import download

READS = 3
"""A reader that meets a missing object folds again: the view may have moved on meanwhile."""

_SUFFIXED = ("log", "index", "timeindex", "txnindex")


@dataclass(frozen=True)
class ExportReport:
    """``end_offset`` is inclusive."""

    segments: int
    bytes: int
    start_offset: int
    end_offset: int


def export_partition(
    opened: Tier,
    name: TopicPartition,
    folder: Path,
    on_bytes: Callable[[int], None] = lambda size: None,
    on_begin: Callable[[int], None] = lambda size: None,
) -> ExportReport:
    """Writes the view into ``folder``, which must not exist and appears whole or not at all.

    :param on_begin: told how many bytes there are, again where it has to begin anew.
    :raises UsageError: the folder exists or cannot be written, or there is nothing to export.
    :raises BadData: an object is missing or not what was recorded.
    :raises OutOfBudget: no space left for it.
    """
    reads = 0
    while True:
        reads += 1
        try:
            return _export(opened, name, opened.open(name).refresh(), folder, on_bytes, on_begin)
        except NotFound as error:
            if reads == READS:
                raise BadData(f"an object of the view is missing: {error.message}", segment=str(name), hint="See `verify`") from error


def _export(
    opened: Tier,
    name: TopicPartition,
    state: PartitionState,
    folder: Path,
    on_bytes: Callable[[int], None],
    on_begin: Callable[[int], None],
) -> ExportReport:
    if not state.live:
        raise UsageError(f"{name} holds no segments yet", hint="`topics` lists what the tier holds")
    on_begin(state.bytes)
    with _appearing(folder, opened.ports.new_id()) as partial:
        before = state.start_offset - 1
        for segment in state.live:
            fetch(opened, name, segment, partial, before + 1)
            before = segment.end_offset
            on_bytes(segment.size_bytes)
        _write_lineage(opened, state, partial)
    return ExportReport(len(state.live), state.bytes, state.start_offset, state.end_offset)


@contextmanager
def _appearing(folder: Path, suffix: str) -> Iterator[Path]:
    """A new directory beside ``folder`` that takes its place when the block ends well, else goes."""
    folder = folder.absolute()
    if os.path.lexists(folder):
        raise UsageError(f"{folder} exists already", hint="Name a directory that does not exist; nothing is overwritten")
    partial = folder.with_name(f"{folder.name[:50]}.partial-{suffix}")  # names end at 255 bytes
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as error:
        where = f"cannot write {error.filename or folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfBudget(where, hint="Free space or choose another disk, then run it again") from error
        raise UsageError(where, hint="Name another directory, or check the owner and mode of this one") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fetch(opened: Tier, name: TopicPartition, segment: RemoteLogSegmentMetadata, folder: Path, first: int) -> None:
    """A segment's files as a broker has them in a log directory. Raises NotFound, BadData, StoreError.

    :param first: the first offset that readers read of it.
    """
    layout = opened.ports.layout
    segment = segment.model_copy(update={"files": dict(layout.files(name, segment))})
    whole = opened.brokers is None or _is_whole(opened.brokers, name, segment, first)
    begin = segment.start_offset if whole else max(first, segment.start_offset)
    for kind, file in segment.files.items():
        if kind == "log" or (kind in _SUFFIXED and whole):
            path = folder / f"{begin:020d}.{kind}"
        elif kind == "snapshot" and whole:
            path = folder / f"{segment.end_offset + 1:020d}.snapshot"
        else:
            continue
        download(layout, name, segment, kind, path).require(layout.where(name, segment, kind), file)
        if not whole:
            _cut(path, layout.where(name, segment, kind), begin, segment.end_offset)
        os.utime(path, ns=(max(segment.mtime_ms, 0) * 1_000_000,) * 2)
    if opened.listed is not None:
        _cut_shadowed(folder / f"{begin:020d}.log", layout.where(name, segment, "log"), segment)


def _cut_shadowed(path: Path, where: str, segment: RemoteLogSegmentMetadata) -> None:
    """What lies above its end is read from the next segment: nobody knew of it before it was fetched."""
    table = scan_batches(map_file(path), where, -1)
    if len(table) and table.last_offset[-1] > segment.end_offset:
        _cut(path, where, segment.start_offset, segment.end_offset)
        os.utime(path, ns=(segment.mtime_ms * 1_000_000,) * 2)
        for kind in ("index", "timeindex"):
            path.with_suffix(f".{kind}").unlink(missing_ok=True)


def _is_whole(brokers: BrokersMetadata, name: TopicPartition, segment: RemoteLogSegmentMetadata, first: int) -> bool:
    """Segments of brokers may overlap (two leaders tier the same offsets); in a log directory each offset stands once."""
    known = brokers.folded(name).cache.segments.get(uuid_bytes(segment.id))
    if known is None:
        raise NotFound(f"segment {segment.id} was deleted meanwhile")
    return known.end_offset == segment.end_offset and first <= segment.start_offset


def _cut(path: Path, where: str, first: int, last: int) -> None:
    """Leaves the batches that hold an offset of first..last. A broker makes the indexes of such a segment anew."""
    buf = map_file(path)
    table = scan_batches(buf, where, -1)
    mine = np.flatnonzero((table.last_offset >= first) & (table.base_offset <= last))
    begin, end = (int(table.position[mine[0]]), int(table.position[mine[-1]] + table.size[mine[-1]])) if len(mine) else (0, 0)
    data = bytes(buf[begin:end])
    path.unlink()
    path.write_bytes(data)


def _write_lineage(opened: Tier, state: PartitionState, folder: Path) -> None:
    if opened.listed is None:
        entries = state.lineage or union([segment.leader_epochs for segment in state.live])
    else:  # only the batches know of epochs
        paths = [folder / f"{segment.start_offset:020d}.log" for segment in state.live]
        entries = lineage_of([scan_batches(map_file(path), path.name) for path in paths])
    text = format_leader_epoch_checkpoint(tuple(entry for entry in entries if entry.start_offset <= state.end_offset))
    (folder / "leader-epoch-checkpoint").write_text(text, encoding="utf-8")
