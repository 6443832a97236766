"""What this machine remembers of one tier: folded control logs, summaries of partitions, heads of sidecars.

It can be deleted at any time, is bound to the id of its tier, and is never the truth: a state kept here is folded on from where it
ended, and only if the log still has what it ended with (control_log.Mark). Nothing here raises: whatever fails means to do without.

    meta              format, program version, tier id
    catalog           the tier-wide log
    seen/<name>       how far a partition is known, since when, and up to which hint
    summary/<name>    control.summary
    state/<name>      the folded state
    head/<segment>    head of the segment's sidecar, as it lies in the store
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from compactor import __version__
from compactor.control.control_log import Mark
from compactor.control.state import CatalogState, PartitionState
from compactor.control.summary import PartitionSummary, pack, summarize, unpack
from compactor.local.rocks import Rocks
from compactor.model.base import Value
from compactor.model.ids import TopicPartition

FORMAT = 4
"""Counts up when what is kept, or what a fold makes of a log, changes its meaning."""

_META, _CATALOG, _SEEN, _SUMMARY, _STATE, _HEAD = b"meta", b"catalog", b"seen/", b"summary/", b"state/", b"head/"
_UNREADABLE = "it cannot be read"


class Meta(Value):
    format: int
    program: str
    tier_id: str


class Seen(Value):
    """``hint``: the catalog's slot that was followed; ``checked_ms``: when the store last had nothing newer, by this machine's clock."""

    slot: int
    hint: int
    checked_ms: int
    mark: Mark


class KeptCatalog(Value):
    state: CatalogState
    mark: Mark


ValueT = TypeVar("ValueT", bound=Value)


class LocalState:
    """The cache of one tier in ``folder``. Nothing is opened before it is used; may be used by several threads."""

    def __init__(self, folder: Path) -> None:
        self._rocks = Rocks(folder)
        self._tier_id = ""
        self._catalog_slot = -1

    @property
    def bound(self) -> bool:
        """Whether it is known which tier this is about."""
        return bool(self._tier_id)

    @property
    def writable(self) -> bool:
        """Whether this process is the one that writes."""
        return self._rocks.writable

    def close(self) -> None:
        self._rocks.close()

    def catalog(self) -> KeptCatalog | None:
        """What is kept of the tier-wide log. It tells which tier this is, so that ``bind`` comes after it."""
        if self._meta() is None:
            return None
        kept = self._value(KeptCatalog, _CATALOG)
        self._catalog_slot = kept.state.slot if kept else -1
        return kept

    def bind(self, tier_id: str, *, diverged: bool = False) -> None:
        """Says which tier this is about. What is kept of another one, or of a later copy of this one (``diverged``), is thrown away."""
        meta = self._meta()
        if meta is not None and (diverged or meta.tier_id != tier_id):
            self._throw_away("it is about another tier, or about a later copy of this one")
            meta = None
        self._tier_id = tier_id
        if meta is None:
            made = Meta(format=FORMAT, program=__version__, tier_id=tier_id)
            self._rocks.write({_META: made.model_dump_json().encode()})

    def keep_catalog(self, state: CatalogState, mark: Mark | None) -> None:
        if mark is not None and state.slot != self._catalog_slot:
            self._rocks.write({_CATALOG: KeptCatalog(state=state, mark=mark).model_dump_json().encode()})
            self._catalog_slot = state.slot

    def summaries(self) -> dict[str, tuple[Seen, PartitionSummary]]:
        """All partitions that are known, by ``topic-partition``."""
        seen, known = self._rocks.below(_SEEN), self._rocks.below(_SUMMARY)
        found: dict[str, tuple[Seen, PartitionSummary]] = {}
        try:
            for key, data in known.items():
                summary, about = unpack(data), Seen.model_validate_json(seen.get(key, b""))
                if about.slot == summary.slot:
                    found[key.decode()] = about, summary
        except (ValueError, struct.error):
            self._throw_away(_UNREADABLE)
            return {}
        return found

    def state(self, name: TopicPartition) -> tuple[PartitionState, Mark] | None:
        """A partition's folded state, for ControlLog.load."""
        state, seen = self._value(PartitionState, _key(_STATE, name)), self._value(Seen, _key(_SEEN, name))
        return (state, seen.mark) if state is not None and seen is not None and state.slot == seen.slot else None

    def keep(self, state: PartitionState, mark: Mark, hint: int, now_ms: int) -> None:
        """``hint``: the catalog's latest one about this partition from before its log was read last."""
        seen = Seen(slot=state.slot, hint=hint, checked_ms=now_ms, mark=mark)
        self._rocks.write(
            {
                _key(_SEEN, state.name): seen.model_dump_json().encode(),
                _key(_SUMMARY, state.name): pack(summarize(state)),
                _key(_STATE, state.name): state.model_dump_json().encode(),
            }
        )

    def checked(self, seen: Mapping[TopicPartition, Seen]) -> None:
        """The store has nothing newer than what is kept of these partitions."""
        self._rocks.write({_key(_SEEN, name): value.model_dump_json().encode() for name, value in seen.items()})

    def heads(self, ids: Sequence[str]) -> dict[str, bytes]:
        """What is kept of the sidecars of these segments, by segment id."""
        found = self._rocks.get([_HEAD + name.encode() for name in ids])
        return {name: data for name, data in zip(ids, found, strict=True) if data is not None}

    def keep_heads(self, heads: Mapping[str, bytes]) -> None:
        self._rocks.write({_HEAD + name.encode(): data for name, data in heads.items()})

    def forget_heads(self, ids: Sequence[str]) -> None:
        """Of segments that are gone, or whose sidecars were made anew."""
        self._rocks.write({}, [_HEAD + name.encode() for name in ids])

    def _meta(self) -> Meta | None:
        """None where nothing is kept, also where what was kept is of another version."""
        meta = self._value(Meta, _META)
        if meta is not None and (meta.format, meta.program) != (FORMAT, __version__):
            self._throw_away(f"it is of version {meta.program}, format {meta.format}")
            return None
        return meta

    def _value(self, kind: type[ValueT], key: bytes) -> ValueT | None:
        (data,) = self._rocks.get([key])
        try:
            return None if data is None else kind.model_validate_json(data)
        except ValueError:
            self._throw_away(_UNREADABLE)
            return None

    def _throw_away(self, why: str) -> None:
        self._rocks.throw_away(why)
        self._catalog_slot = -1
        if self._tier_id:
            self._rocks.write({_META: Meta(format=FORMAT, program=__version__, tier_id=self._tier_id).model_dump_json().encode()})


def _key(kind: bytes, name: TopicPartition) -> bytes:
    return kind + str(name).encode()
