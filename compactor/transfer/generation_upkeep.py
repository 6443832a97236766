"""Generations of many partitions, and those that have had their time: what `generations` does, and the daemon by itself.

A generation goes ``keep_ms`` after readers were told of its successor; what was begun and never counted, ``keep_ms`` after its writer was
last heard of. Objects go first, then what tells of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from compactor.bootstrap import Tier
from compactor.errors import CompactorError
from compactor.local.budget import Budget
from compactor.model.ids import TopicPartition
from compactor.round.compaction import disk_budget
from compactor.storage.deleting import delete_keys
from compactor.tier.layouts.pinterest.generations import ROOT, Generations, told_names
from compactor.transfer.generations import GenerationReport, Target, Writing, brought_up, tell, write_generation

NEVER = 2**63 - 1


@dataclass(frozen=True)
class RetiredGeneration:
    """``due_ms``: from when on it may be deleted, by the store's clock. ``objects`` and ``bytes``: -1 where nobody has looked."""

    topic: str
    partition: int
    generation: str
    deleted: bool
    objects: int
    bytes: int
    due_ms: int


@dataclass(frozen=True)
class GenerationUpkeep:
    """``again_ms``: when the next one may be deleted, NEVER where none waits."""

    report: GenerationReport
    retired: tuple[RetiredGeneration, ...]
    again_ms: int


def write_generations(
    tier: Tier,
    target: Target,
    names: Sequence[TopicPartition],
    *,
    on_bytes: Callable[[int], None] = lambda size: None,
    on_partition: Callable[[TopicPartition, GenerationReport | CompactorError], None] = lambda name, done: None,
) -> list[GenerationReport | CompactorError]:
    """Each partition for itself, ``daemon.threads`` at a time within one disk budget; one that fails does not stop the others (I9)."""
    how = Writing(disk=Budget(disk_budget(tier.settings.cleaner, tier.state_dir)), on_bytes=on_bytes)

    def write(name: TopicPartition) -> GenerationReport | CompactorError:
        try:
            done: GenerationReport | CompactorError = write_generation(tier, target, name, how)
        except CompactorError as error:
            done = error
        on_partition(name, done)
        return done

    with ThreadPoolExecutor(tier.settings.daemon.threads, "generations") as pool:
        return list(pool.map(write, names))


def keep_generation(tier: Tier, target: Target, name: TopicPartition, how: Writing) -> GenerationUpkeep:
    """Brings a partition's generation up to the view, and deletes what has had its time. Raises as write_generation."""
    report, known = brought_up(tier, target, name, how)
    retired = _retired(target, name, known, dry_run=False, count=False)
    return GenerationUpkeep(report, tuple(retired), min((one.due_ms for one in retired if not one.deleted), default=NEVER))


def names_in(target: Target) -> list[TopicPartition]:
    """Partitions of which there is a generation."""
    return told_names([info.key for info in target.store.list(f"{ROOT}/{target.keys.cluster}/")])


def generations_of(target: Target, name: TopicPartition) -> Generations:
    """Raises BadData, StoreError."""
    return target.log(name).read()


def retire_generations(target: Target, name: TopicPartition, *, dry_run: bool = False) -> list[RetiredGeneration]:
    """Deletes what has had its time; tells what waits for it, too. Raises BadData, StoreError."""
    log = target.log(name)
    return _retired(target, name, log.read() if dry_run else tell(target, log), dry_run=dry_run, count=True)


def _retired(target: Target, name: TopicPartition, known: Generations, *, dry_run: bool, count: bool) -> list[RetiredGeneration]:
    if not known.earlier and not known.begun:
        return []
    log, store = target.log(name), target.store
    now = (target.clock_ms if dry_run else store.clock_ms)()
    found: list[RetiredGeneration] = []
    for generation in known.earlier:
        told = [ms for number, ms in known.told_ms.items() if number >= generation.ended]  # of the next one, or of one after it
        due_ms = min(told) + target.keep_ms if told else NEVER
        # The oldest first: what is left of the steps begins with a generation.
        if any(not one.deleted for one in found):
            due_ms = max(due_ms, found[-1].due_ms)
        found.append(_one(target, name, generation.name, due_ms, now, dry_run=dry_run, count=count))
        if found[-1].deleted and not dry_run:
            numbers = [number for number in reversed(known.numbers) if generation.began <= number < generation.ended]
            # From the newest to the oldest, so that what is left of them begins a generation.
            delete_keys(store, [key for number in numbers for key in (log.step_key(number), log.told_key(number))])
    for begun in known.begun:
        if begun.generation in known.recorded:
            gone = True
        elif begun.number < known.next_number:
            found.append(_one(target, name, begun.generation, begun.modified_ms + target.keep_ms, now, dry_run=dry_run, count=count))
            gone = found[-1].deleted
        else:
            gone = False  # somebody is at it, or will be
        if gone and not dry_run:
            delete_keys(store, [log.begun_key(begun.generation)])
    return found


def _one(
    target: Target, name: TopicPartition, generation: str, due_ms: int, now_ms: int, *, dry_run: bool, count: bool
) -> RetiredGeneration:
    due = due_ms <= now_ms
    one = RetiredGeneration(*name, generation, due, -1, -1, due_ms)
    if not due and not count:
        return one
    objects = list(target.store.list(target.folder(generation, name)))
    if due and not dry_run:
        delete_keys(target.store, [info.key for info in objects])
    return replace(one, objects=len(objects), bytes=sum(info.size for info in objects))
