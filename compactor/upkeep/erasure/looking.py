"""A whole topic asked for keys: its partitions, and what lies beside them in the tier. Reads only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from compactor.bootstrap import Tier, open_tier
from compactor.errors import CompactorError, Refused, UsageError
from compactor.kinds import pinterest_keys
from compactor.metadata_topic.codec import uuid_text
from compactor.model.ids import TopicPartition
from compactor.storage.factory import open_store
from compactor.tier.layouts.pinterest.generations import GenerationLog
from compactor.upkeep.erasure.holders import ANY_KEY, Holder, HolderState, NotCovered, PartitionSurvey
from compactor.upkeep.erasure.survey import Question, of_other_tier, survey
from compactor.upkeep.uploads import LEAST_AGE_MS, leftovers

ALWAYS = (
    NotCovered("values and headers of records", "a record is found by its key alone"),
    NotCovered("consumers, exports, backups and replicas of the store", "they are no part of the tier"),
    NotCovered("old versions of sidecars in the control store", "they have keyed hashes of keys, no keys"),
    NotCovered("local disks of compactors (tier.state_dir)", "what a round stages there goes when the round ends"),
)
OF_GENERATIONS = NotCovered(
    "old versions of generations that were deleted, and unfinished uploads beside them ([tier.pinterest] target)",
    "nobody remembers what they were; in a bucket a lifecycle rule ends them",
)


@dataclass(frozen=True)
class TopicLook:
    """``beside``: holders that are no partition's (uploads, generations, former topics). ``failed``: partitions that could not be asked."""

    surveys: tuple[PartitionSurvey, ...]
    beside: tuple[Holder, ...]
    not_covered: tuple[NotCovered, ...]
    failed: tuple[tuple[TopicPartition, CompactorError], ...]

    @property
    def holders(self) -> tuple[Holder, ...]:
        return (*(holder for one in self.surveys for holder in one.holders), *self.beside)


def partitions_of(opened: Tier, topic: str) -> list[TopicPartition]:
    """All partitions of a topic, or the one that is named. Raises UsageError for a topic that the tier does not hold."""
    names = opened.partitions()
    found = [name for name in names if name.topic == topic] or [name for name in names if str(name) == topic]
    if not found:
        raise UsageError(f"the tier holds no partition of a topic {topic}", hint="`topics` lists what it holds")
    return found


def look(
    opened: Tier, names: Sequence[TopicPartition], asked: Question, on_partition: Callable[[TopicPartition], None] = lambda name: None
) -> TopicLook:
    """One partition after the other; one that cannot be asked does not keep the others from it (I9)."""
    surveys: list[PartitionSurvey] = []
    failed: list[tuple[TopicPartition, CompactorError]] = []
    for name in names:
        on_partition(name)
        try:
            surveys.append(survey(opened, name, asked))
        except CompactorError as error:
            failed.append((name, error))
    not_covered = [one for found in surveys for one in found.not_covered]
    beside = [*_uploads(opened, names, asked, not_covered), *_former(opened, names)]
    for name in names:
        beside += _generations(opened, name, asked)
    if _has_generations(opened):
        not_covered.append(OF_GENERATIONS)
    return TopicLook(tuple(surveys), tuple(beside), (*not_covered, *ALWAYS), tuple(failed))


def _uploads(opened: Tier, names: Sequence[TopicPartition], asked: Question, not_covered: list[NotCovered]) -> Iterator[Holder]:
    """Those of these partitions, and such as do not say whose they are: a directory's staged files have no key."""
    wanted = {str(name) for name in names}
    age_ms = max(opened.retention.orphan_age_ms, LEAST_AGE_MS)
    try:
        found = leftovers(opened, asked.now_ms)
    except Refused as error:
        not_covered.append(NotCovered("unfinished uploads", f"these credentials may not ask: {error.message}"))
        return
    if not opened.ownership.ours:
        not_covered.append(NotCovered("unfinished uploads of brokers", "they are the brokers' own"))
    for one in found:
        of = opened.ports.layout.partition_of(one.upload.key)
        if one.store is opened.ports.data and (not of or of in wanted):
            until, waits_for = one.upload.begun_ms + age_ms, "the end of who uploads it, or orphan_age_ms and `retire`"
            yield Holder(of, one.where, HolderState.UPLOAD, ANY_KEY, "unknown", waits_for, until_ms=until)


def _former(opened: Tier, names: Sequence[TopicPartition]) -> Iterator[Holder]:
    """Topics of the same name that were deleted, and whose tier brokers have not deleted to the end."""
    topics = {name.topic for name in names}
    for one in opened.brokers.elsewhere() if opened.brokers is not None else ():
        if one.topic in topics:
            name, waits_for = str(one.name), "the brokers, which delete the tier of a deleted topic"
            place = f"{name} under topic id {uuid_text(one.topic_id)}"
            yield Holder(name, place, HolderState.FORMER_TOPIC, ANY_KEY, "unknown", waits_for)


def _has_generations(opened: Tier) -> bool:
    return bool(opened.settings.tier.pinterest.target) and opened.listed is None and opened.brokers is None


def _generations(opened: Tier, name: TopicPartition, asked: Question) -> Iterator[Holder]:
    """What `generations write` has made of the partition for consumers of Pinterest's layout."""
    tier, pinterest = opened.settings.tier, opened.settings.tier.pinterest
    if not _has_generations(opened):
        return
    store = open_store(pinterest.target, s3=opened.settings.s3, limits=opened.settings.limits, counters=opened.counters)
    known = GenerationLog(store, pinterest_keys(opened.settings), name).read()
    for generation in sorted(known.recorded | {one.generation for one in known.begun}):
        url = f"{pinterest.target.rstrip('/')}/{generation}"
        where = tier.model_copy(update={"url": url, "layout": "pinterest", "control_url": ""})
        yield from of_other_tier(open_tier(opened.settings.model_copy(update={"tier": where})), name, asked, HolderState.GENERATION, url)
