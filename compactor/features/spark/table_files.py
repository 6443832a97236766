"""Data files of Iceberg tables, written by executors.

1. Slices and other files, one task each: the file is written, or its keys are read, and the keys are hashed (16 bytes a key in the
   shuffle).
2. One task per range of hashes checks that no key occurs twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from pyiceberg.manifest import DataFile

from bloom.filter import siphash_key_halves
from compactor.cleaner.keys import KeyHashSet
from compactor.config.settings import Settings
from compactor.constants import TopicId
from compactor.errors import OutOfBudget
from compactor.features.iceberg.columns import (
    BYTES_PER_KEY,
    DataFilesToWrite,
    DataFileWriteTask,
    TableColumnsMissing,
    duplicate_key_error,
    hashes_of_key_column,
    write_slice_file,
)
from compactor.features.iceberg.plan import ViewSlice
from compactor.features.iceberg.table import TopicTable
from compactor.features.spark.jobs import JobListener, SparkCluster, TaskOutcome, open_tier_on_executor, run_task
from compactor.kernels.common import Hashes
from compactor.model.ids import TopicPartition
from compactor.read.reading import LastRecordOfEachKeyRequest, hash_keys_of_rows
from compactor.read.records import SelectedRecords
from compactor.round.ports import Costs

MIN_RANGE_BYTES: Final = 1 << 16
"""Smallest memory for the keys of one range."""


class _KeyHashesInHashRange(NamedTuple):
    """16 bytes each. place: segment or data file, for errors."""

    place: str
    data: bytes


@dataclass(frozen=True)
class SparkTaskDataFileWriter:
    """Writer of data files by Spark tasks, whose cost is added to ``cost``."""

    cluster: SparkCluster
    cost: Costs
    job_listener: JobListener

    def write_data_files(self, files: DataFilesToWrite, out_files_by_slice: dict[ViewSlice, DataFile | None]) -> float:
        """Raises Unavailable, too, if Spark aborts the job."""
        if not files.tasks:
            return 1.0
        tier, name = files.tier, files.partition
        budget = max(tier.cleaner_settings_for_topic(name.topic).map_budget_bytes // self.cluster.task_slots_per_executor, MIN_RANGE_BYTES)
        keys = sum(task.max_slice_records for task in files.tasks) + sum(file.record_count for file in files.others)
        ranges = -(-keys * BYTES_PER_KEY // budget)
        items = [*files.tasks, *(file.file_path for file in files.others)]
        task = _WriteFileAndHashKeysTask(
            tier.settings,
            name,
            tier.metadata.topic_id(name),
            tier.identity.temporary_hash_key(),
            files.table.copy_without_catalog(),
            ranges,
        )
        answers = self.cluster.shuffle_answers_to_targets(f"{name}: {len(items)} data files", items, task, [None] * (ranges + 1))
        step, work = f"{name}: keys of data files compared in {ranges} ranges", _CheckKeyUniquenessTask(name, budget)
        outcomes: list[TaskOutcome] = []
        for outcome in self.cluster.run_job(step, answers, work, ranges + 1, job_listener=self.job_listener):
            outcomes += [outcome, *(outcome.value or ())]
        for outcome in outcomes:
            self.cost.add(outcome.cost)
            if isinstance(outcome.value, tuple):
                out_files_by_slice[outcome.value[0]] = outcome.value[1]
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        missing = [error.columns for error in errors if isinstance(error, TableColumnsMissing)]
        for error in errors:
            if not isinstance(error, TableColumnsMissing):
                raise error
        for columns in missing:
            files.table.add_columns(columns)
        # The keys were compared before.
        rest = [task for task in files.tasks if task.file.slice not in out_files_by_slice]
        return self.write_data_files(replace(files, tasks=rest, others=()), out_files_by_slice) if missing else 1.0


@dataclass(frozen=True)
class _WriteFileAndHashKeysTask:
    """Writes the file of a slice, or reads a file at a path, and yields the hashes of the keys."""

    settings: Settings
    partition: TopicPartition
    topic_id: TopicId
    hash_key: bytes
    table: TopicTable
    ranges: int

    def __call__(self, task_or_path: DataFileWriteTask | str) -> Iterator[tuple[int, _KeyHashesInHashRange | TaskOutcome]]:
        """Yield (hash range, hashes of keys), and at last (number after the last range, outcome)."""
        hashes: list[Hashes] = []
        outcome = run_task(-1, lambda _: self._write_or_read_keys(task_or_path, hashes))
        place = task_or_path if isinstance(task_or_path, str) else f"segment {task_or_path.file.slice.segment_id}"
        for found in hashes if outcome.error is None or isinstance(outcome.error, TableColumnsMissing) else ():
            range_of_hash = ((found[:, 0] >> np.uint64(32)) * np.uint64(self.ranges)) >> np.uint64(32)
            for number in np.unique(range_of_hash).tolist():
                yield number, _KeyHashesInHashRange(place, found[range_of_hash == number].tobytes())
        yield self.ranges, outcome

    def _write_or_read_keys(
        self, task_or_path: DataFileWriteTask | str, key_hashes: list[Hashes]
    ) -> tuple[ViewSlice, DataFile | None] | None:
        halves = siphash_key_halves(self.hash_key)
        if isinstance(task_or_path, str):
            key_hashes += [hashes_of_key_column(keys, halves) for keys in self.table.read_file_keys(task_or_path)]
            return None
        tier = open_tier_on_executor(self.settings.model_dump_json(), self.partition.topic * bool(self.topic_id), self.topic_id)
        each, every_key = task_or_path.file.slice, LastRecordOfEachKeyRequest(0, 1, 0)

        def append_key_hashes(selection: SelectedRecords) -> None:
            key_hashes.append(hash_keys_of_rows(selection, each.first, each.last, every_key, halves)[0].copy())

        return each, write_slice_file(tier, self.table, task_or_path, append_key_hashes)


@dataclass(frozen=True)
class _CheckKeyUniquenessTask:
    """One further task collects the outcomes of the tasks that wrote files."""

    partition: TopicPartition
    budget_bytes: int

    def __call__(self, index: int, gathered: Iterable[Any], cost: Costs) -> list[TaskOutcome]:
        """Return the gathered outcomes. Raises BadData if a key occurs twice, OutOfBudget if the hashes exceed the memory."""
        keys, outcomes = KeyHashSet(self.budget_bytes * 5 // 4), []  # more, because ranges differ a little
        for answer in gathered:
            if isinstance(answer, TaskOutcome):
                outcomes.append(answer)
            elif answer is not None:
                hashes = np.frombuffer(bytearray(answer.data), np.uint64).reshape(-1, 2)
                new = np.empty(len(hashes), np.bool_)
                if keys.insert_keys_until_full(hashes, new) < len(hashes):
                    raise OutOfBudget(f"{self.partition}: the keys of a table need more memory", hint="Raise map_budget_bytes")
                if not new.all():
                    raise duplicate_key_error(self.partition, answer.place)
        return outcomes
