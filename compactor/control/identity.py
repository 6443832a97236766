"""Ownership of the data root: a compactor-managed tier stores its id there, and only the catalog with that id may write or sweep.

  <tier.url>/tier-id.json    {"tier_id": "...", ...}, created if absent, never overwritten

With a mistyped ``control_url`` the catalog is empty, and every segment would look like an orphan. Therefore no identity is created over a
root that holds another id, or segments that the catalog does not name. A root without an id (written by an earlier version, or the id was
lost) is adopted by the catalog that names all its segments, and by no other. Broker-managed and listed tiers have no such object.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from pydantic import ValidationError
from typing_extensions import override

from compactor.control import ordering
from compactor.control.logs import open_catalog, open_partition_log
from compactor.control.ports import EnvironmentPorts
from compactor.control.state import CatalogState
from compactor.errors import AlreadyExists, BadData, NotFound, Unavailable, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.segment import StrictFrozenModel
from compactor.storage.port import ObjectStore
from compactor.tier.contents import TopicIdOfPartition, recognize_layout

KEY = "tier-id.json"
IDENTITY_READ_ATTEMPTS = 4
FIRST_OBJECTS = 1_000
"""Number of objects that are inspected to find out which program writes them."""


@dataclass(frozen=True)
class DataRootTierId:
    """Content of ``tier-id.json``. ``made_by``, ``control_url``: process and control store that created it, for people."""

    tier_id: str
    made_by: str = ""
    control_url: str = ""

    @override
    def __str__(self) -> str:
        made = [f"made by {self.made_by}"] if self.made_by else []
        made += [f"with the control store {self.control_url}"] if self.control_url else []
        return f"tier {self.tier_id}" + (f" ({' '.join(made)})" if made else "")


def read_tier_id(ports: EnvironmentPorts) -> DataRootTierId | None:
    """Return None if the data root has none. Raises BadData if the object is corrupt."""
    before = data = b""
    # The object has no checksum, so it is read until two answers in a row are equal.
    for _ in range(IDENTITY_READ_ATTEMPTS):
        try:
            data = ports.data.get(KEY)
        except NotFound:
            return None
        if data == before:
            break
        before = data
    try:
        found = json.loads(data)
        return DataRootTierId(str(found["tier_id"]), str(found.get("made_by", "")), str(found.get("control_url", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        hint = 'Restore it, or write {"tier_id": "..."} with the id that `config check` names'
        raise BadData("it names no tier", segment=f"{ports.data.url}/{KEY}", hint=hint) from None


class DataRootOwnershipCheckByTierId:
    """Check that the data root belongs to this tier, made once before a process leads anything, and again before each sweep.

    tier_id: the tier's id; read from the catalog when it is first needed, unless a caller has set it.
    """

    def __init__(self, *, is_exclusive: bool = True) -> None:
        """:param is_exclusive: whether only this program writes into the data root; if not, every check passes."""
        self.tier_id = ""
        self.ours = is_exclusive
        self._asked = False

    def require_own_root(self, ports: EnvironmentPorts, *, repeat_if_passed_before: bool = False) -> None:
        """Raise UsageError unless the data root belongs to this tier. A root without an id gets this tier's id if the catalog names every
        segment in it.
        """
        if not self.ours or (self._asked and not repeat_if_passed_before):
            return
        if not self.tier_id:
            self.tier_id = open_catalog(ports).refresh().tier_id
        if not self.tier_id:
            return  # nothing was ever imported: there is nothing to write into, and nothing that could be swept
        found = read_tier_id(ports)
        if found is None:
            found = self._write_tier_id(ports)
        self._require_same_tier_id(ports, found)
        self._asked = True

    def require_not_foreign_root(self, ports: EnvironmentPorts, catalog: CatalogState) -> None:
        """Raise UsageError if the data root belongs to another tier. A root without an id is accepted and left unchanged."""
        found = read_tier_id(ports) if self.ours else None
        self.tier_id = catalog.tier_id
        if found is not None:
            self._require_same_tier_id(ports, found)

    def require_unowned_root(self, ports: EnvironmentPorts, catalog: CatalogState) -> None:
        """Raise UsageError if no tier may be created over this data root, because it has an id or segments that the catalog does not
        name.
        """
        if not self.ours or catalog.tier_id:
            return
        found = read_tier_id(ports)
        if found is not None:
            self._require_same_tier_id(ports, found)
        self.require_no_broker_objects(ports)
        stranger = _find_unknown_object(ports, catalog)
        if stranger:
            raise UsageError(
                f"{ports.data.url} holds segments already ({stranger}), and the control store {ports.control.url} knows no tier",
                hint="Nothing was changed. Correct tier.url or tier.control_url, or restore the control store from a backup",
            )

    def require_no_broker_objects(self, ports: EnvironmentPorts) -> None:
        """Raise UsageError if brokers write into this data root."""
        found = recognize_layout(info.key for info in islice(ports.data.list(""), FIRST_OBJECTS)) if self.ours else None
        if found is not None:
            raise UsageError(f"there is no tier at {ports.data.url} that could be ours: it is {found.what}", hint=found.hint)

    def _require_same_tier_id(self, ports: EnvironmentPorts, root_id: DataRootTierId) -> None:
        if root_id.tier_id != self.tier_id:
            other = f"that of tier {self.tier_id}" if self.tier_id else "has no tier yet"
            is_other = "is " if self.tier_id else ""
            raise UsageError(
                f"{ports.data.url} belongs to {root_id}, and the control store {ports.control.url} {is_other}{other}",
                hint="Nothing was changed. Correct tier.url or tier.control_url: each tier needs its own location",
            )

    def _write_tier_id(self, ports: EnvironmentPorts) -> DataRootTierId:
        """Write this tier's id into a data root that has none, and return the id stored there afterwards. Raises UsageError if the root
        holds a segment that the catalog does not name, or none of the segments that it names.
        """
        catalog = open_catalog(ports).refresh()
        stranger = _find_unknown_object(ports, catalog)
        named = _describe_missing_segments(ports, catalog)
        if named:
            raise UsageError(
                f"{ports.data.url} holds nothing of tier {self.tier_id} in the control store {ports.control.url}, which names {named}",
                hint="Nothing was changed. Correct tier.url, or restore the objects. If all of them are lost for good, write "
                f'{{"tier_id": "{self.tier_id}"}} into {KEY} there',
            )
        if stranger:
            raise UsageError(
                f"{ports.data.url} does not say whose it is, and holds {stranger}, which tier {self.tier_id} "
                f"in the control store {ports.control.url} does not name",
                hint="Nothing was changed. Correct tier.url or tier.control_url. If they are right, take that object away, or write "
                f'{{"tier_id": "{self.tier_id}"}} into {KEY} there',
            )
        made = {"tier_id": self.tier_id, "made_by": ports.holder, "control_url": ports.control.url}
        try:
            ports.data.create(KEY, json.dumps(made).encode())
        except (AlreadyExists, Unavailable):
            pass
        found = read_tier_id(ports)
        if found is None:
            raise Unavailable(f"{ports.data.url}/{KEY} was written and cannot be read", hint="Try again")
        return found


def _find_unknown_object(ports: EnvironmentPorts, catalog: CatalogState) -> str:
    """Return the key of a segment's object that belongs to no segment in the catalog's control logs; empty: none."""
    for text in {found for info in ports.data.list("") if (found := ports.layout.partition_in_key(info.key))}:
        name = TopicPartition.parse_partition_store_prefix(text)
        # Listed before the log is read: an import registers its segment ids before it uploads, so that a listed object is registered by
        # then.
        listed = [item for item in ports.layout.list_objects(name) if item.segment_id]
        known: set[str] = set()
        if listed and text in catalog.partitions:
            state = open_partition_log(ports, name, catalog.reached.get(text, 0)).refresh_and_check_gaps()
            known = ordering.protected_segment_ids(state).union(segment.id for segment in state.retiring).union(state.voided)
        for item in listed:
            if item.segment_id not in known:
                return item.key
    return ""


def _describe_missing_segments(ports: EnvironmentPorts, catalog: CatalogState) -> str:
    """Return ``segments of <partition>`` if the catalog has live segments and the data root has objects of none; empty otherwise."""
    named = ""
    for name in catalog.topic_partitions:
        live = {segment.id for segment in open_partition_log(ports, name, catalog.reached.get(str(name), 0)).refresh_and_check_gaps().live}
        if live.intersection(item.segment_id for item in ports.layout.list_objects(name)):
            return ""
        named = named or (f"segments of {name}" if live else "")
    return named


def control_store_problem(state: CatalogState, url: str, cluster_id: str) -> str:
    """Return why a control store belongs to another broker-managed tier; empty: it does not. Compares cluster ids if both are known, else
    URLs.
    """
    if not state.url:
        return ""
    if state.cluster_id and cluster_id:
        return "" if state.cluster_id == cluster_id else f"it is about the cluster {state.cluster_id}, this one is {cluster_id}"
    return "" if state.url == url else f"it is about {state.url}, not {url}"


# Ownership of the topics of a broker-managed tier: which control store compacts a topic.
#
#   <tier.url>/.tiered-compactor/owners/<topic id>/<number>.json    created if absent, never overwritten; the highest number counts
#
# Rounds of one topic in two control stores would not know of each other's leadership, and would delete each other's segments. So the first
# process that leads a partition takes the topic for its control store, and others are refused until ``topics takeover`` adds a number.
# The brokers' plug-in lists and deletes only below its own prefix or folder.


OWNER_PREFIX = ".tiered-compactor/owners/"
_log = logging.getLogger(__name__)


class TopicOwner(StrictFrozenModel):
    """Control store that compacts a topic. ``tier_id``: the identity in its catalog; a new one if the control store was lost and created
    again.

    by, at_ms: for people.
    """

    topic: str
    topic_id: str
    tier_id: str
    control_url: str
    by: str
    at_ms: int

    def is_same_control_store(self, other: TopicOwner) -> bool:
        """A copy in another place is another control store: both could be at work."""
        return (self.tier_id, self.control_url) == (other.tier_id, other.control_url)


class RecordedOwner(NamedTuple):
    """An owner as recorded. ``number``: 0 if there is none."""

    number: int
    owner: TopicOwner | None


def read_topic_owner(data: ObjectStore, topic_id: str) -> RecordedOwner:
    """Raises BadData if the object is corrupt, and StoreError."""
    folder = f"{OWNER_PREFIX}{topic_id}/"
    numbers = [info.key.removeprefix(folder).removesuffix(".json") for info in data.list(folder)]
    number = max((int(each) for each in numbers if each.isdecimal()), default=0)
    if not number:
        return RecordedOwner(0, None)
    key = _key(topic_id, number)
    try:
        return RecordedOwner(number, TopicOwner.model_validate_json(data.get(key)))
    except ValidationError:
        hint = "`topics takeover` names the control store again, once no other one compacts the topic"
        raise BadData("it names no control store", segment=f"{data.url}/{key}", hint=hint) from None


@dataclass
class TopicOwnershipCheckByObjects:
    topic_id: TopicIdOfPartition
    _tier_id: str = field(default="", init=False)

    def require_own_topic(self, ports: EnvironmentPorts, partition: TopicPartition) -> None:
        """Take the topic for this control store if it has no owner. Raises UsageError if another control store has it, and StoreError."""
        mine = self._owner_record(ports, partition)
        number, owner = read_topic_owner(ports.data, mine.topic_id)
        if owner is None and not mine.tier_id:
            return  # nothing was ever written with this control store, and what is not led is not taken
        if owner is None:
            number, owner = self._record_owner(ports.data, number + 1, mine)
        if not owner.is_same_control_store(mine):
            raise UsageError(
                f"topic {partition.topic} ({mine.topic_id}) of {ports.data.url} is compacted with the control store {owner.control_url} "
                f"(tier {owner.tier_id}), and this one is {mine.control_url} (tier {mine.tier_id or 'unknown'})",
                hint="Nothing was changed. Correct tier.control_url, or leave the topic out of [kafka] topics. If that control store is "
                f"lost or was moved, and nothing works with it any more: `topics takeover {partition.topic}`",
            )

    def take_over(self, ports: EnvironmentPorts, partition: TopicPartition) -> str:
        """Record this control store as the topic's owner. Return the URL of the former owner: empty if there was none, this one's if
        nothing had to be recorded. Raises AlreadyExists if another process was faster, and StoreError.
        """
        mine = self._owner_record(ports, partition)
        try:
            number, owner = read_topic_owner(ports.data, mine.topic_id)
        except BadData:
            numbers = [info.key for info in ports.data.list(f"{OWNER_PREFIX}{mine.topic_id}/")]
            number, owner = len(numbers), None
        if owner is not None and owner.is_same_control_store(mine):
            return owner.control_url
        ports.data.create(_key(mine.topic_id, number + 1), mine.model_dump_json().encode())
        return owner.control_url if owner is not None else ""

    def _owner_record(self, ports: EnvironmentPorts, partition: TopicPartition) -> TopicOwner:
        self._tier_id = self._tier_id or open_catalog(ports).refresh().tier_id
        return TopicOwner(
            topic=partition.topic,
            topic_id=self.topic_id(partition),
            tier_id=self._tier_id,
            control_url=ports.control.url,
            by=ports.holder,
            at_ms=ports.clock_ms(),
        )

    def _record_owner(self, data: ObjectStore, number: int, mine: TopicOwner) -> tuple[int, TopicOwner]:
        try:
            data.create(_key(mine.topic_id, number), mine.model_dump_json().encode())
        except AlreadyExists:
            pass
        else:
            _log.warning("topic %s (%s) is compacted with the control store %s from now on", mine.topic, mine.topic_id, mine.control_url)
        found, owner = read_topic_owner(data, mine.topic_id)
        return found, owner or mine


def _key(topic_id: str, number: int) -> str:
    return f"{OWNER_PREFIX}{topic_id}/{number:06d}.json"
