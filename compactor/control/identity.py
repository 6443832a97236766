"""Whose a tier's data is: a data root of our own holds the id of its tier, and only the catalog with that id writes into it or sweeps it.

    <tier.url>/tier-id.json    {"tier_id": "...", ...}, created if absent, never overwritten

A mistyped ``control_url`` makes an empty catalog: to it, every segment would be an orphan. Therefore no identity is made over a root
that holds another id, or segments that the catalog does not name. A root without an id (an earlier program's, or one whose id was
lost) is adopted by the catalog that names all its segments, and by no other.

Into foreign layouts nothing is written for this: what they are (kind, url, cluster id) stands in the tier-wide log.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice

from compactor.control import ordering
from compactor.control.logs import open_catalog, open_partition
from compactor.control.ports import Ports
from compactor.control.state import CatalogState
from compactor.errors import AlreadyExists, BadData, NotFound, Unavailable, UsageError
from compactor.model.ids import TopicPartition
from compactor.tier.names import foreign

KEY = "tier-id.json"
READS = 4
FIRST_OBJECTS = 1_000
"""So many are looked at for whose they are."""


@dataclass(frozen=True)
class RootId:
    """What lies in the data root. ``made_by`` and ``control_url`` are of the time when it was made, for people."""

    tier_id: str
    made_by: str = ""
    control_url: str = ""

    def __str__(self) -> str:
        made = [f"made by {self.made_by}"] if self.made_by else []
        made += [f"with the control store {self.control_url}"] if self.control_url else []
        return f"tier {self.tier_id}" + (f" ({' '.join(made)})" if made else "")


def read_root(ports: Ports) -> RootId | None:
    """The id in the data root; None where there is none. Raises BadData for an object that says nothing.

    It has no checksum of its own: what is damaged on its way is told by asking until two answers in a row are the same.
    """
    before = data = b""
    for _ in range(READS):
        try:
            data = ports.data.get(KEY)
        except NotFound:
            return None
        if data == before:
            break
        before = data
    try:
        found = json.loads(data)
        return RootId(str(found["tier_id"]), str(found.get("made_by", "")), str(found.get("control_url", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        hint = 'Restore it, or write {"tier_id": "..."} with the id that `config check` names'
        raise BadData("it names no tier", segment=f"{ports.data.url}/{KEY}", hint=hint) from None


class Ownership:
    """One process's answer to whose the data root is. Asked once before it leads anything, and anew before each sweep.

    ``tier_id`` is the catalog's, once somebody has folded it; until then this folds it for itself.
    """

    def __init__(self, *, ours: bool = True) -> None:
        """``ours``: nobody but this program writes into the data root."""
        self.tier_id = ""
        self.ours = ours
        self._asked = False

    def require(self, ports: Ports, *, anew: bool = False) -> None:
        """For whoever is about to write or to sweep. Raises UsageError where the root is not certainly this tier's.

        Where the root has no id it gets this one, if the catalog names everything in it.
        """
        if not self.ours or (self._asked and not anew):
            return
        if not self.tier_id:
            self.tier_id = open_catalog(ports).refresh().tier_id
        if not self.tier_id:
            return  # nothing was ever imported: there is nothing to write into, and nothing that could be swept
        found = read_root(ports)
        if found is None:
            found = self._adopt(ports)
        self._compare(ports, found)
        self._asked = True

    def check(self, ports: Ports, catalog: CatalogState) -> None:
        """For whoever only looks: as ``require``, but a root without an id stays as it is."""
        found = read_root(ports) if self.ours else None
        self.tier_id = catalog.tier_id
        if found is not None:
            self._compare(ports, found)

    def before_creation(self, ports: Ports, catalog: CatalogState) -> None:
        """Whether a tier may be made here. Raises UsageError for a root that is somebody's."""
        if not self.ours or catalog.tier_id:
            return
        found = read_root(ports)
        if found is not None:
            self._compare(ports, found)
        self.refuse_foreign(ports)
        stranger = _unnamed(ports, catalog)
        if stranger:
            raise UsageError(
                f"{ports.data.url} holds segments already ({stranger}), and the control store {ports.control.url} knows no tier",
                hint="Nothing was changed. Correct tier.url or tier.control_url, or restore the control store from a backup",
            )

    def refuse_foreign(self, ports: Ports) -> None:
        """Raises UsageError where brokers write into what is named as ours: the objects are theirs, and ours would be in their way."""
        found = foreign(info.key for info in islice(ports.data.list(""), FIRST_OBJECTS)) if self.ours else None
        if found is not None:
            raise UsageError(f"there is no tier at {ports.data.url} that could be ours: it is {found.what}", hint=found.hint)

    def _compare(self, ports: Ports, found: RootId) -> None:
        if found.tier_id != self.tier_id:
            other = f"that of tier {self.tier_id}" if self.tier_id else "has no tier yet"
            is_other = "is " if self.tier_id else ""
            raise UsageError(
                f"{ports.data.url} belongs to {found}, and the control store {ports.control.url} {is_other}{other}",
                hint="Nothing was changed. Correct tier.url or tier.control_url: each tier needs a place of its own",
            )

    def _adopt(self, ports: Ports) -> RootId:
        catalog = open_catalog(ports).refresh()
        stranger = _unnamed(ports, catalog)
        named = _elsewhere(ports, catalog)
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
        found = read_root(ports)
        if found is None:
            raise Unavailable(f"{ports.data.url}/{KEY} was written and cannot be read", hint="Try again")
        return found


def _unnamed(ports: Ports, catalog: CatalogState) -> str:
    """A segment's object that no partition of the catalog names; empty where there is none. LIST < fold: what is imported now is named."""
    for text in {found: None for info in ports.data.list("") if (found := ports.layout.partition_of(info.key))}:
        name = TopicPartition.parse(text)
        listed = [item for item in ports.layout.list(name) if item.segment_id]
        known: set[str] = set()
        if listed and text in catalog.partitions:
            state = open_partition(ports, name, catalog.reached.get(text, 0)).check_whole()
            known = ordering.protected(state).union(segment.id for segment in state.retiring).union(state.voided)
        for item in listed:
            if item.segment_id not in known:
                return item.key
    return ""


def _elsewhere(ports: Ports, catalog: CatalogState) -> str:
    """A live segment that the catalog names, where the root has none of them all: it is another place. Empty where it has one."""
    named = ""
    for text in sorted(catalog.partitions):
        name = TopicPartition.parse(text)
        live = {segment.id for segment in open_partition(ports, name, catalog.reached.get(text, 0)).check_whole().live}
        if live.intersection(item.segment_id for item in ports.layout.list(name)):
            return ""
        named = named or (f"segments of {name}" if live else "")
    return named


def foreign_problem(state: CatalogState, url: str, cluster_id: str) -> str:
    """Why this control store is not about that broker's tier, or nothing. The cluster's id counts where both are known, else the place."""
    if not state.url:
        return ""
    if state.cluster_id and cluster_id:
        return "" if state.cluster_id == cluster_id else f"it is about the cluster {state.cluster_id}, this one is {cluster_id}"
    return "" if state.url == url else f"it is about {state.url}, not {url}"
