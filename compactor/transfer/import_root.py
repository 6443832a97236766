"""``import LOG_ROOT``: every ``<topic>-<partition>`` directory in a broker's log directory, each for itself."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from compactor.bootstrap import Tier
from compactor.control.logs import PartitionLog
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.transfer.import_ import Company, ImportOptions, ImportProgress, ImportReport, import_directory

AT_ONCE = 8
"""Partitions per thread of ``daemon.threads``."""

_SEGMENT = re.compile(r"\d{20}\.log")


@dataclass(frozen=True)
class PartitionImport:
    """What became of one directory. ``error``: why it was refused; the report is None then."""

    name: TopicPartition
    report: ImportReport | None
    error: Exception | None = None

    @property
    def status(self) -> str:
        return self.report.status if self.report else "refused"

    @property
    def reason(self) -> str:
        """Why it was refused, or what people should know."""
        if self.error is not None:
            return str(self.error)
        return "; ".join(self.report.notes) if self.report else ""


def is_log_root(path: Path) -> bool:
    """Whether it holds directories of partitions, and no segments itself. Raises UsageError where it cannot be read."""
    try:
        entries = list(path.iterdir()) if path.is_dir() else []
        return not any(_SEGMENT.fullmatch(entry.name) for entry in entries) and any(
            named_by(entry) is not None and entry.is_dir() for entry in entries
        )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="Check the path, its owner and its mode") from error


def named_by(log_dir: Path) -> TopicPartition | None:
    """What a broker calls this partition; None where the directory has another kind of name. Of a link its own name counts."""
    try:
        return TopicPartition.parse(Path(os.path.abspath(log_dir)).name)
    except UsageError:
        return None


def partition_dirs(root: Path, topics: str | None = None) -> list[tuple[TopicPartition, Path]]:
    """The partitions' directories, by topic and number. Those that a broker deletes or has in the making have other names.

    :param topics: a regular expression over whole topic names.
    :raises UsageError: an expression that is none.
    """
    try:
        wanted = re.compile(topics) if topics is not None else None
    except re.error as error:
        raise UsageError(f"--topics: {topics!r} is not a regular expression: {error}", hint="It is matched against whole names") from None
    found = [(name, path) for path in root.iterdir() if (name := named_by(path)) is not None and path.is_dir()]
    return sorted((name, path) for name, path in found if wanted is None or wanted.fullmatch(name.topic))


def import_root(
    tier: Tier,
    directories: Sequence[tuple[TopicPartition, Path]],
    options: ImportOptions,
    *,
    on_bytes: Callable[[int], None] = lambda size: None,
    on_partition: Callable[[PartitionImport], None] = lambda done: None,
) -> list[PartitionImport]:
    """Each directory for itself; one that is refused does not stop the others.

    Several partitions at a time, each with one thread: most of an import of little is waiting for the store. Those of much go one by
    one, beside them.
    """
    options = replace(options, may_be_empty=True)
    one_at_a_time = threading.Lock()

    def note_change(log: PartitionLog) -> None:
        with one_at_a_time:  # there is one catalog log
            tier.note_change(log)

    def take(job: tuple[TopicPartition, Path]) -> PartitionImport:
        name, path = job
        policy = tier.cleaner_for(name.topic).policy()
        try:
            progress = ImportProgress(advance=on_bytes)
            report = import_directory(tier, path, name, policy, progress, options, company)
            done = PartitionImport(name, report)
        except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
            done = PartitionImport(name, None, error)
        with one_at_a_time:
            on_partition(done)
        return done

    company = Company(1, note_change, threading.Lock())
    if directories:
        tier.create()
        tier.identity()
    with ThreadPoolExecutor(AT_ONCE * tier.settings.daemon.threads, "import") as pool:
        return list(pool.map(take, directories))
