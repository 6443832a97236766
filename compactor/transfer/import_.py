"""``import``: the sealed segments of a Kafka log directory into the tier (register ids < upload < tiered).

Everything is read and checked before the first thing is written. An import that was cut short is taken up where it stopped: its id
is made of what it brings, and the ids of its segments stand in the control log.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compactor.bootstrap import Tier
from compactor.cleaner.offline import open_directory
from compactor.cleaner.passes.lanes import Lanes
from compactor.cleaner.passes.portraits import portray
from compactor.control.importing import register, tier
from compactor.control.logs import PartitionLog
from compactor.control.state import ClosedImport, PartitionState
from compactor.errors import BadData, OutOfBudget, StoreError, UsageError
from compactor.model.ids import TopicPartition, segment_id
from compactor.model.policy import CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.sources import producers_at_end
from compactor.storage.factory import is_s3, local_path
from compactor.tier.sidecars import Sidecars
from compactor.transfer.log_directory import Member, check, check_unchanged, lineage_for, members, prepare, room_for

MOST_ATTEMPTS = 1000


@dataclass(frozen=True)
class ImportReport:
    """``end_offset`` is inclusive. ``repeated``: the same import was done before; nothing was written."""

    segments: int
    bytes: int
    start_offset: int
    end_offset: int
    repeated: bool = False


@dataclass(frozen=True)
class ImportProgress:
    """Who wants to know: each step with the bytes that it is about, then the bytes as they are done."""

    at: Callable[[str, int], None] = lambda step, size: None
    advance: Callable[[int], None] = lambda size: None


def import_directory(
    opened: Tier, log_dir: Path, name: TopicPartition, policy: CleanerPolicy, progress: ImportProgress | None = None, *, gaps: bool = False
) -> ImportReport:
    """Copies all segments of ``log_dir`` behind the partition's end.

    :param gaps: see ``logdir.check``.
    :raises UsageError: not a log directory, or one that cannot be read.
    :raises BadData: a segment that cannot be read; a gap or an overlap. The tier is as it was.
    :raises Fenced: the import was voided because it slept too long.
    :raises StoreError: what was uploaded is found again by the next attempt, or swept.
    """
    progress = progress or ImportProgress()
    with _reading(log_dir):
        sources = open_directory(log_dir, policy.index_interval_bytes, policy.max_decompressed_batch_bytes)
        size = sum(source.size for source in sources)
        progress.at("checking", size)
        threads = opened.settings.daemon.threads
        check(log_dir, sources, policy.max_decompressed_batch_bytes, threads, gaps=gaps, on_bytes=progress.advance)
    log = opened.open(name)
    state = log.check_whole()
    with _reading(log_dir):
        found = members(log_dir, sources, producers_at_end(opened.ports.layout, state))
    intake = _Intake(opened, log_dir, name, policy, found, log)
    progress.at("uploading", size)
    repeated = intake.run(progress.advance)
    return ImportReport(len(found), size, found[0].start, found[-1].end, repeated)


@contextmanager
def _reading(log_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename or log_dir}: {error.strerror}", hint="Check the path, its owner and its mode"
        ) from error


class _Intake:
    """One import: what it brings and where to."""

    def __init__(
        self, opened: Tier, log_dir: Path, name: TopicPartition, policy: CleanerPolicy, found: Sequence[Member], log: PartitionLog
    ) -> None:
        self._opened = opened
        self._log_dir = log_dir
        self._name = name
        self._policy = policy
        self._members = found
        self._log = log

    def run(self, on_bytes: Callable[[int], None]) -> bool:
        """True where this very import was complete before, or a twin of this process was faster."""
        for import_id in _import_ids(self._members):
            if self._closed(import_id) is None and self._attempt(import_id, on_bytes):
                return False
            closed = self._closed(import_id)
            if closed is not None and not closed.voided:
                return True
        raise StoreError("this import was voided too often", hint="See why with `explain`, or raise publish.orphan_age_ms")

    def _portray(self, metadata: RemoteLogSegmentMetadata, member: Member, sidecars: Sidecars) -> None:
        """A sidecar without a filter: how many keys a round will meet, and what became of transactions without reading it again."""
        limit = self._policy.max_decompressed_batch_bytes
        with Lanes(self._opened.settings.daemon.threads) as lanes:
            sidecars.add(portray(metadata.id, member.source, None, sidecars.hash_key, limit, lanes, sketch=True))

    def _closed(self, import_id: str) -> ClosedImport | None:
        return next((entry for entry in self._log.state.closed_imports if entry.import_id == import_id), None)

    def _attempt(self, import_id: str, on_bytes: Callable[[int], None]) -> bool:
        """False where it is closed by now, or an earlier attempt with other settings left other objects: the next one takes new ids."""
        opened, state = self._opened, self._log.state
        _check_position(state, self._name, self._members)
        lineage = lineage_for(self._log_dir, self._members, state.lineage)
        if import_id not in state.registrations:
            _check_room(opened.ports.layout.url, sum(room_for(member, self._policy.index_interval_bytes) for member in self._members))
        opened.create()
        state = register(opened.ports, self._log, import_id, [opened.ports.new_id() for _ in self._members])
        # Listed before the upload: what a killed import leaves behind is found by `retire`.
        opened.note_change(self._log)
        entry = state.registrations.get(import_id)
        if entry is None or len(entry.ids) != len(self._members):
            return False
        segments = []
        sidecars = opened.sidecars(self._name) if opened.settings.cleaner_for(self._name.topic).bloom else None
        for member, registered in zip(self._members, entry.ids, strict=True):
            with tempfile.TemporaryDirectory(prefix="import-") as scratch:
                metadata, paths = prepare(self._log_dir, member, registered, lineage, self._policy, Path(scratch))
                if opened.ports.layout.upload(self._name, metadata, paths):
                    return False
                check_unchanged(self._log_dir, member)
            if sidecars is not None:
                self._portray(metadata, member, sidecars)
            segments.append(metadata)
            on_bytes(metadata.size_bytes)
        tier(opened.ports, self._log, import_id, segments, lineage)
        opened.note_change(self._log)
        return True


def _import_ids(found: Sequence[Member]) -> Iterator[str]:
    """The ids of the first, second, ... attempt at one import: the same whenever offsets and bytes are the same."""
    identity = "\n".join(f"{member.start} {member.end} {member.sha256}" for member in found).encode()
    for attempt in range(MOST_ATTEMPTS):
        yield segment_id(hashlib.sha256(identity + attempt.to_bytes(4, "big")).digest()[:16])


def _check_position(state: PartitionState, name: TopicPartition, found: Sequence[Member]) -> None:
    start = found[0].start
    if not state.live or start == state.end_offset + 1:
        return
    what = "overlaps what the tier holds" if start <= state.end_offset else "leaves a gap"
    raise BadData(
        f"the directory begins at offset {start}, and {name} ends at {state.end_offset} in the tier: it {what}",
        segment=found[0].source.name,
        hint=f"Give a directory whose first segment begins at {state.end_offset + 1}",
    )


def _check_room(url: str, needed: int) -> None:
    """Where the tier is a directory: whether so much fits on its disk. Else it would be left with half of it. Raises OutOfBudget."""
    if is_s3(url):
        return
    root = local_path(url)
    disk = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    if free < needed:
        raise OutOfBudget(
            f"this import needs {needed} bytes, and the disk of {disk} has {free} left",
            hint="Free space, or move the tier to a larger disk",
        )
