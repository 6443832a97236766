"""Writing and deleting generations of many partitions.

A superseded generation is deleted ``keep_ms`` after readers were directed to its successor, one that was announced and never counted
``keep_ms`` after its writer's last announcement. Objects are deleted before the records about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from compactor.access.tier import Tier
from compactor.config.units import count_noun, format_size
from compactor.constants import NEVER_MS
from compactor.errors import CompactorError
from compactor.features.pinterest.generations import (
    GENERATIONS_FOLDER,
    GenerationReport,
    GenerationTarget,
    GenerationWriteOptions,
    PartitionGenerations,
    configured_generation_target,
    partitions_of_object_keys,
    switch_readers,
    update_generation,
    write_generation,
)
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.outputs import OutputReport
from compactor.round.compaction import disk_budget_bytes
from compactor.storage.port import ObjectStore


@dataclass(frozen=True)
class DeletedOrExpiringGeneration:
    """due_ms: by the store's clock. objects, bytes: -1 if not counted."""

    topic: str
    partition: int
    generation: str
    deleted: bool
    objects: int
    bytes: int
    due_ms: int


@dataclass(frozen=True)
class GenerationUpkeepReport:
    """again_ms: when the next generation may be deleted, by the store's clock; NEVER_MS if none waits."""

    report: GenerationReport
    retired: tuple[DeletedOrExpiringGeneration, ...]
    again_ms: int


def write_generations(
    tier: Tier,
    target: GenerationTarget,
    partitions: Sequence[TopicPartition],
    *,
    on_bytes: Callable[[int], None] = lambda size: None,
    on_partition: Callable[[TopicPartition, GenerationReport | CompactorError], None] = lambda name, done: None,
) -> list[GenerationReport | CompactorError]:
    """Write generations, ``daemon.threads`` at a time within one disk budget. Return reports and errors in the given order; one that fails
    does not stop the others (isolation, I9).
    """
    options = GenerationWriteOptions(disk=DiskBudget(disk_budget_bytes(tier.settings.cleaner, tier.state_dir)), on_bytes=on_bytes)

    def try_write_generation(partition: TopicPartition) -> GenerationReport | CompactorError:
        try:
            done: GenerationReport | CompactorError = write_generation(tier, target, partition, options)
        except CompactorError as error:
            done = error
        on_partition(partition, done)
        return done

    with ThreadPoolExecutor(tier.settings.daemon.threads, "generations") as pool:
        return list(pool.map(try_write_generation, partitions))


def upkeep_generation(
    tier: Tier, target: GenerationTarget, partition: TopicPartition, options: GenerationWriteOptions
) -> GenerationUpkeepReport:
    """Write a partition's generation and delete old ones. Raises BadData, OutOfBudget, Leased, Unavailable, StoreError."""
    report, known = update_generation(tier, target, partition, options)
    retired = _delete_expired_generations(target, partition, known, dry_run=False, count_waiting_objects=False)
    return GenerationUpkeepReport(report, tuple(retired), min((one.due_ms for one in retired if not one.deleted), default=NEVER_MS))


@dataclass(frozen=True)
class PinterestOutput:
    target: GenerationTarget

    def update_output(self, tier: Tier, partition: TopicPartition, disk: DiskBudget) -> OutputReport:
        """Raises BadData, OutOfBudget, Leased, StoreError."""
        done = upkeep_generation(tier, self.target, partition, GenerationWriteOptions(disk=disk, yields=True))
        made, deleted = done.report, [one for one in done.retired if one.deleted]
        parts = (
            [f"generation {made.generation} {made.status}, {count_noun(made.objects, 'segment')}, {format_size(made.bytes)}"]
            if made.objects
            else []
        )
        parts += [f"deleted generation {one.generation}, {count_noun(one.objects, 'object')}, {format_size(one.bytes)}" for one in deleted]
        return OutputReport(made.status, made.slot, done.again_ms, "; ".join(parts))


def open_output(tier: Tier, wrap_store: Callable[[ObjectStore], ObjectStore]) -> PinterestOutput:
    """Output of [tier.pinterest]. Raises UsageError if its target is not usable."""
    target = configured_generation_target(tier)
    return PinterestOutput(replace(target, store=wrap_store(target.store)))


def partitions_with_generations(target: GenerationTarget) -> list[TopicPartition]:
    return partitions_of_object_keys([info.key for info in target.store.list(f"{GENERATIONS_FOLDER}/{target.keys.cluster}/")])


def read_partition_generations(target: GenerationTarget, partition: TopicPartition) -> PartitionGenerations:
    """Raises BadData, StoreError."""
    return target.generation_step_log(partition).read_generations()


def delete_due_generations(
    target: GenerationTarget, partition: TopicPartition, *, dry_run: bool = False
) -> list[DeletedOrExpiringGeneration]:
    """Return the due generations and those that still wait. Raises BadData, StoreError."""
    log = target.generation_step_log(partition)
    return _delete_expired_generations(
        target,
        partition,
        log.read_generations() if dry_run else switch_readers(target, log),
        dry_run=dry_run,
        count_waiting_objects=True,
    )


def _delete_expired_generations(
    target: GenerationTarget, partition: TopicPartition, generations: PartitionGenerations, *, dry_run: bool, count_waiting_objects: bool
) -> list[DeletedOrExpiringGeneration]:
    if not generations.earlier and not generations.begun:
        return []
    log, store = target.generation_step_log(partition), target.store
    now = (target.clock_ms if dry_run else store.clock_ms)()
    found: list[DeletedOrExpiringGeneration] = []
    for generation in generations.earlier:
        reported = [
            ms for number, ms in generations.recorded_ms.items() if number >= generation.ended
        ]  # of the next one, or of one after it
        due_ms = min(reported) + target.keep_ms if reported else NEVER_MS
        # The oldest first: what is left of the steps begins with a generation.
        if any(not one.deleted for one in found):
            due_ms = max(due_ms, found[-1].due_ms)
        found.append(
            _delete_generation_if_due(
                target, partition, generation.name, due_ms, now, dry_run=dry_run, count_waiting_objects=count_waiting_objects
            )
        )
        if found[-1].deleted and not dry_run:
            numbers = [number for number in reversed(generations.numbers) if generation.began <= number < generation.ended]
            # From the newest to the oldest, so that what is left of them begins a generation.
            store.delete(
                [key for number in numbers for key in (log.generation_step_object_key(number), log.pointer_written_marker_key(number))]
            )
    for begun in generations.begun:
        if begun.generation in generations.recorded_generation_names:
            gone = True
        elif begun.number < generations.next_generation_step_number:
            found.append(
                _delete_generation_if_due(
                    target,
                    partition,
                    begun.generation,
                    begun.modified_ms + target.keep_ms,
                    now,
                    dry_run=dry_run,
                    count_waiting_objects=count_waiting_objects,
                )
            )
            gone = found[-1].deleted
        else:
            gone = False  # somebody is at it, or will be
        if gone and not dry_run:
            store.delete([log.generation_announcement_key(begun.generation)])
    return found


def _delete_generation_if_due(
    target: GenerationTarget,
    partition: TopicPartition,
    generation: str,
    due_ms: int,
    now_ms: int,
    *,
    dry_run: bool,
    count_waiting_objects: bool,
) -> DeletedOrExpiringGeneration:
    due = due_ms <= now_ms
    one = DeletedOrExpiringGeneration(*partition, generation, due, -1, -1, due_ms)
    if not due and not count_waiting_objects:
        return one
    objects = list(target.store.list(target.generation_folder(generation, partition)))
    if due and not dry_run:
        target.store.delete([info.key for info in objects])
    return replace(one, objects=len(objects), bytes=sum(info.size for info in objects))
