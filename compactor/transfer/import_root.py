"""``import LOG_ROOT``: every ``<topic>-<partition>`` directory in a broker's log directory, each for itself."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from compactor.bootstrap import Tier
from compactor.control.logs import note_partitions
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.transfer.import_ import Company, ImportOptions, ImportProgress, ImportReport, import_directory

AT_ONCE = 8
"""Partitions per thread of ``daemon.threads``."""

METADATA_LOG = "__cluster_metadata"
"""KRaft's own log: no topic, though it lies among them."""

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


def of_topics(topics: str | None) -> Callable[[TopicPartition], bool]:
    """Whether a partition's topic is wanted. ``topics``: a regular expression over whole names, None for all. Raises UsageError."""
    try:
        wanted = re.compile(topics) if topics is not None else None
    except re.error as error:
        raise UsageError(f"--topics: {topics!r} is not a regular expression: {error}", hint="It is matched against whole names") from None
    return lambda name: wanted is None or wanted.fullmatch(name.topic) is not None


def partition_dirs(root: Path, topics: str | None = None) -> list[tuple[TopicPartition, Path]]:
    """The partitions' directories, by topic and number. Those that a broker deletes or has in the making have other names.

    :param topics: a regular expression over whole topic names.
    :raises UsageError: an expression that is none.
    """
    wanted = of_topics(topics)
    found = [(name, path) for path in root.iterdir() if (name := named_by(path)) is not None and path.is_dir()]
    return sorted((name, path) for name, path in found if wanted(name) and name.topic != METADATA_LOG)


Source = TypeVar("Source")


class ChangesTogether:
    """There is one catalog log: what threads have to say while one of them writes is said in one record after that."""

    def __init__(self, say: Callable[[Mapping[TopicPartition, int]], None]) -> None:
        self._say = say
        self._writing = threading.Lock()
        self._changed = threading.Lock()
        self._waiting: list[tuple[TopicPartition, int, Future[None]]] = []

    @property
    def waiting(self) -> int:
        """Changes that nobody has begun to say."""
        with self._changed:
            return len(self._waiting)

    def note(self, name: TopicPartition, slot: int) -> None:
        """Returns when it is said. Raises what saying it, with others, has raised."""
        told: Future[None] = Future()
        with self._changed:
            self._waiting.append((name, slot, told))
        with self._writing:
            if not told.done():
                self._say_all()
        told.result()

    def _say_all(self) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, []
        try:
            self._say({name: slot for name, slot, _ in waiting})
        except BaseException as error:  # noqa: BLE001 - told to everybody whose change it was
            for _, _, told in waiting:
                told.set_exception(error)
        else:
            for _, _, told in waiting:
                told.set_result(None)


def each_for_itself(
    tier: Tier,
    sources: Sequence[tuple[TopicPartition, Source]],
    bring: Callable[[TopicPartition, Source, Company], ImportReport],
    *,
    at_once: int,
    on_partition: Callable[[PartitionImport], None],
) -> list[PartitionImport]:
    """Each partition by itself, several at once; one that is refused does not stop the others (I9).

    :param bring: brings one into the tier; called from threads, with what they share.
    """
    one_at_a_time = threading.Lock()
    changes = ChangesTogether(lambda slots: note_partitions(tier.catalog, slots))

    def take(source: tuple[TopicPartition, Source]) -> PartitionImport:
        try:
            done = PartitionImport(source[0], bring(*source, company))
        except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
            done = PartitionImport(source[0], None, error)
        with one_at_a_time:
            on_partition(done)
        return done

    company = Company(1, lambda log: changes.note(log.state.name, log.reached()), threading.Lock())
    if sources:
        tier.create()
        tier.identity()
    with ThreadPoolExecutor(at_once, "import") as pool:
        return list(pool.map(take, sources))


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

    def bring(name: TopicPartition, path: Path, company: Company) -> ImportReport:
        policy = tier.cleaner_for(name.topic).policy()
        return import_directory(tier, path, name, policy, ImportProgress(advance=on_bytes), options, company)

    return each_for_itself(tier, directories, bring, at_once=AT_ONCE * tier.settings.daemon.threads, on_partition=on_partition)
