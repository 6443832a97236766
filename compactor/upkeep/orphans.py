"""``orphans``: objects of a tier that brokers write which no metadata names. Found by one command, deleted by another.

Between the two somebody reads the list. ``purge`` believes nothing of it: each entry must still be there as it was listed, be old enough,
and be named by nobody in metadata that was read from the brokers *after* the LIST. Brokers name a segment before they upload its first
object, so that what a later look does not know was never theirs to keep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compactor.bootstrap import Tier
from compactor.errors import BadData, UsageError
from compactor.model.ids import TopicPartition
from compactor.storage.deleting import delete_keys
from compactor.storage.port import ObjectStore
from compactor.upkeep.broker_objects import look

FORMAT = 1
SURE = "sure"
LIKELY = "likely"
"""``sure``: metadata says that the segment's deletion is finished. ``likely``: nothing ever named it, which a topic that has lost records
would look like, too."""


@dataclass(frozen=True)
class Orphan:
    """``age_ms``: since its last change, when it was listed. ``object``: its key below the tier's URL."""

    partition: str
    object: str
    bytes: int
    modified_ms: int
    age_ms: int
    certainty: str
    reason: str


@dataclass(frozen=True)
class OrphanList:
    """What ``find`` has found, of which tier, and when by this machine's clock."""

    url: str
    layout: str
    cluster_id: str
    found_ms: int
    orphans: tuple[Orphan, ...]

    def document(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


@dataclass(frozen=True)
class Purged:
    """``kept``: object -> why it is not deleted."""

    deleted: Sequence[Orphan]
    kept: dict[str, str]


def find(opened: Tier, names: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None) -> OrphanList:
    """Reads only. Young objects are left out: an upload may be at work. Raises StoreError, BadData."""
    now = opened.ports.clock_ms()
    found: list[Orphan] = []
    for name in names:
        found += (one for one in _of_partition(opened, name, now) if one.age_ms >= opened.retention.orphan_age_ms)
        on_partition()
    tier = opened.settings.tier
    return OrphanList(opened.settings.tier_url, tier.layout, opened.metadata.cluster_id(), now, tuple(found))


def purge(opened: Tier, wanted: OrphanList, data: ObjectStore, *, dry_run: bool = False) -> Purged:
    """Deletes of the list what still is an orphan. ``data``: the tier's store, which may be written.

    :raises UsageError: the list is of another tier, or there are no brokers to ask.
    """
    _check_tier(opened, wanted)
    deleted: list[Orphan] = []
    kept: dict[str, str] = {}
    now = opened.ports.clock_ms()
    known = {str(name): name for name in opened.metadata.names()}
    for partition in dict.fromkeys(one.partition for one in wanted.orphans):
        mine = [one for one in wanted.orphans if one.partition == partition]
        if partition not in known:
            kept |= {one.object: "the tier holds no such partition any more" for one in mine}
            continue
        still = {one.object: one for one in _of_partition(opened, known[partition], now)}
        for one in mine:
            if problem := _problem(one, still.get(one.object), opened.retention.orphan_age_ms):
                kept[one.object] = problem
            else:
                deleted.append(one)
    if not dry_run:
        delete_keys(data, [one.object for one in deleted])
    return Purged(deleted, kept)


def _problem(listed: Orphan, now: Orphan | None, least_age_ms: int) -> str:
    """Why it must not be deleted, or nothing."""
    if now is None:
        return "metadata names it now, or it is gone"
    if (now.bytes, now.modified_ms) != (listed.bytes, listed.modified_ms):
        return "it has changed since it was listed"
    return f"it is younger than orphan_age_ms ({least_age_ms})" if now.age_ms < least_age_ms else ""


def _of_partition(opened: Tier, name: TopicPartition, now_ms: int) -> Iterator[Orphan]:
    for one in look(opened, name).orphans:
        why = "its segment's deletion is recorded as finished" if one.finished else "no metadata has ever named its segment"
        listed = one.listed
        certainty = SURE if one.finished else LIKELY
        yield Orphan(str(name), listed.key, listed.size, listed.modified_ms, max(0, now_ms - listed.modified_ms), certainty, why)


def _check_tier(opened: Tier, wanted: OrphanList) -> None:
    tier = opened.settings.tier
    if (wanted.url, wanted.layout) != (opened.settings.tier_url, tier.layout):
        raise UsageError(
            f"the list is of the tier at {wanted.url}, layout {wanted.layout}; configured is {opened.settings.tier_url}, {tier.layout}",
            hint="Nothing was deleted. Name the configuration that the list was made with",
        )
    if opened.metadata.taken_ms >= 0:
        raise UsageError(
            "orphans are deleted by what brokers say now, and there is only a snapshot", hint="Set bootstrap_servers under [kafka]"
        )
    if (cluster := opened.metadata.cluster_id()) != wanted.cluster_id:
        raise UsageError(f"the list is of the cluster {wanted.cluster_id}, this one is {cluster}", hint="Nothing was deleted")
    if opened.metadata.incomplete():
        raise UsageError(
            f"{opened.metadata.where} has lost records, so that objects it does not name may be segments",
            hint="Nothing was deleted. Its cleanup.policy must be delete, without a limit of time and size",
        )


def write(found: OrphanList, path: Path) -> None:
    """Raises UsageError where the file exists: a list that somebody has read is not overwritten."""
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(found.document(), file, indent=1)
    except FileExistsError:
        raise UsageError(f"{path} exists already", hint="Name a new file") from None


def read(path: Path) -> OrphanList:
    """Raises UsageError, BadData for what ``write`` did not write."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        known = document.pop("format") == FORMAT
        found = OrphanList(**document | {"orphans": tuple(Orphan(**one) for one in document["orphans"])})
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadData(f"it is no list of orphans: {error}", segment=str(path), hint="`orphans find --to FILE` writes one") from error
    if not known:
        raise BadData("it is a list of another version of this program", segment=str(path), hint="`orphans find --to FILE` writes one")
    return found
