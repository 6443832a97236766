"""Import of every ``<topic>-<partition>`` directory in a broker's log directory, each independently (``import LOG_ROOT``)."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from compactor.access.tier import Tier
from compactor.control.logs import publish_partition_change_hints
from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.transfer.import_ import import_directory
from compactor.transfer.import_options import ImportOptions, ImportProgressCallbacks, ImportReport, ImportResources

IMPORTS_PER_THREAD = 8
"""Partitions that are imported at the same time, for each thread of ``daemon.threads``."""

METADATA_LOG = "__cluster_metadata"
"""Directory name of KRaft's metadata log, which is no topic."""

ALL_TOPICS = ".*"
"""Expression for topic names that is used if none is given."""

_SEGMENT = re.compile(r"\d{20}\.log")


@dataclass(frozen=True)
class PartitionImportResult:
    """Result of importing one partition. Either ``report`` or ``error`` is None. report: what was added; None if the import failed. error:
    why it failed; None if it did not.
    """

    partition: TopicPartition
    report: ImportReport | None
    error: Exception | None = None

    @property
    def import_status(self) -> str:
        return self.report.import_status if self.report else "refused"

    @property
    def import_result_message(self) -> str:
        """Return the reason why the import failed or, if it succeeded, its notes for people."""
        if self.error is not None:
            return str(self.error)
        return "; ".join(self.report.notes) if self.report else ""


def has_partition_directories(path: Path) -> bool:
    """Return whether a directory contains partition directories and no segments itself. Raises UsageError if it cannot be
    read.
    """
    try:
        entries = list(path.iterdir()) if path.is_dir() else []
        return not any(_SEGMENT.fullmatch(entry.name) for entry in entries) and any(
            partition_of_directory(entry) is not None and entry.is_dir() for entry in entries
        )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="Check the path, its owner and its mode") from error


def partition_of_directory(log_dir: Path) -> TopicPartition | None:
    """Return the partition that a directory is named after; None if its name is not ``topic-partition``. For a symbolic link, the name of
    the link counts, not that of its target.
    """
    try:
        return TopicPartition.parse(Path(os.path.abspath(log_dir)).name)
    except UsageError:
        return None


def is_topic_chosen(topic: str, topic_regexes: Sequence[str], topics_in_tier: Container[str] = ()) -> bool:
    """Return whether a regular expression for whole topic names chooses a topic. A name that begins with ``__``, as those of Kafka's and
    other systems' internal topics do, is chosen only by an expression that begins so, too, or if the tier holds the topic already: such
    topics are rarely meant by a general expression, and some hold nothing but records without a key.
    """
    matching = [regex for regex in topic_regexes if re.fullmatch(regex, topic)]
    if not is_internal_topic_name(topic):
        return bool(matching)
    return bool(matching) and (topic in topics_in_tier or any(is_internal_topic_name(regex) for regex in matching))


def topics_in_catalog(catalog: CatalogState) -> set[str]:
    """Return the names of the topics that the tier holds, in any incarnation."""
    return {TopicPartition.parse_partition_store_prefix(name).topic for name in catalog.partitions}


def is_internal_topic_name(name: str) -> bool:
    """Return whether a topic's name, or an expression for names, begins with ``__``."""
    return name.startswith("__")


def topic_name_filter(topic_regex: str | None) -> Callable[[TopicPartition], bool]:
    """Return a function that tells whether a partition's topic matches ``topic_regex``. Raises UsageError for an invalid expression.

    :param topic_regex: a regular expression for whole topic names; None for all.
    """
    try:
        wanted = re.compile(topic_regex) if topic_regex is not None else None
    except re.error as error:
        raise UsageError(
            f"--topics: {topic_regex!r} is not a regular expression: {error}", hint="It is matched against whole names"
        ) from None
    return lambda name: wanted is None or wanted.fullmatch(name.topic) is not None


def list_partition_directories(
    root: Path, topic_regex: str | None = None, topics_in_tier: Container[str] = ()
) -> list[tuple[TopicPartition, Path]]:
    """Return the partition directories in a broker's log directory that ``is_topic_chosen`` chooses, by topic and number.

    Directories that a broker is creating or deleting have other names and are left out.

    :param topic_regex: a regular expression for whole topic names; None for all. Raises UsageError if it is invalid.
    :param topics_in_tier: topics that the tier holds already.
    """
    topic_name_filter(topic_regex)  # refuses what is no expression
    regexes = [ALL_TOPICS if topic_regex is None else topic_regex]
    found = [(name, path) for path in root.iterdir() if (name := partition_of_directory(path)) is not None and path.is_dir()]
    return sorted(
        (name, path) for name, path in found if name.topic != METADATA_LOG and is_topic_chosen(name.topic, regexes, topics_in_tier)
    )


Source = TypeVar("Source")


class CatalogChangeBatcher:
    """Writer of catalog records for several threads: changes that arrive while one record is written are combined in the next one."""

    def __init__(self, publish: Callable[[Mapping[TopicPartition, int]], None]) -> None:
        self._say = publish
        self._forward_write_request = threading.Lock()
        self._changed = threading.Lock()
        self._waiting: list[tuple[TopicPartition, int, Future[None]]] = []

    def record_partition_change(self, partition: TopicPartition, slot: int) -> None:
        """Record in the catalog that a partition's control log has reached a slot (record number).

        Returns once the record is in the catalog. Raises the error of the append, if it fails.
        """
        reported: Future[None] = Future()
        with self._changed:
            self._waiting.append((partition, slot, reported))
        with self._forward_write_request:
            if not reported.done():
                self._write_pending_changes()
        reported.result()

    def _write_pending_changes(self) -> None:
        """Append one catalog record with all partition changes that the threads of the import have queued since the last one."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        try:
            self._say({name: slot for name, slot, _ in waiting})
        except BaseException as error:  # noqa: BLE001 - raised again in every thread whose change it was
            for _, _, reported in waiting:
                reported.set_exception(error)
        else:
            for _, _, reported in waiting:
                reported.set_result(None)


def import_partitions(
    tier: Tier,
    sources: Sequence[tuple[TopicPartition, Source]],
    import_one_partition: Callable[[TopicPartition, Source, ImportResources], ImportReport],
    *,
    max_parallel: int,
    on_partition: Callable[[PartitionImportResult], None],
) -> list[PartitionImportResult]:
    """Import several partitions at a time and return their results in the order of ``sources``. One that fails does not stop the others
    (isolation, I9).

    :param sources: what to import each partition from.
    :param import_one_partition: imports one partition; called from threads, with the resources that they share.
    :param max_parallel: number of partitions imported at the same time.
    :param on_partition: called with each result, by one thread at a time.
    """
    one_at_a_time = threading.Lock()
    changes = CatalogChangeBatcher(lambda slots: publish_partition_change_hints(tier.catalog, slots))

    def import_source(source: tuple[TopicPartition, Source]) -> PartitionImportResult:
        try:
            done = PartitionImportResult(source[0], import_one_partition(*source, company))
        except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
            done = PartitionImportResult(source[0], None, error)
        with one_at_a_time:
            on_partition(done)
        return done

    company = ImportResources(
        1, lambda log: changes.record_partition_change(log.state.topic_partition, log.last_slot_if_stored_else_zero()), threading.Lock()
    )
    if sources:
        tier.identity.read_or_create_catalog()
        tier.identity.read_catalog()
    with ThreadPoolExecutor(max_parallel, "import") as pool:
        return list(pool.map(import_source, sources))


def import_partition_directories(
    tier: Tier,
    directories: Sequence[tuple[TopicPartition, Path]],
    options: ImportOptions,
    *,
    on_partition: Callable[[PartitionImportResult], None] = lambda done: None,
    on_bytes: Callable[[TopicPartition, int], None] = lambda name, size: None,
) -> list[PartitionImportResult]:
    """Import several partition directories at a time. One that fails does not stop the others.

    Each import has one thread, because a small one mostly waits for the store. Large imports run one at a time beside them.

    :param on_bytes: called with the size of each new segment twice: when it was checked and when it was uploaded.
    """
    options = replace(options, may_be_empty=True)

    def import_one_partition(partition: TopicPartition, path: Path, shared: ImportResources) -> ImportReport:
        policy = tier.cleaner_settings_for_topic(partition.topic).cleaner_policy()
        progress = ImportProgressCallbacks(advance=partial(on_bytes, partition))
        return import_directory(tier, path, partition, policy, progress, options, shared)

    return import_partitions(
        tier, directories, import_one_partition, max_parallel=IMPORTS_PER_THREAD * tier.settings.daemon.threads, on_partition=on_partition
    )
