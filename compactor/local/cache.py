"""Cache of one tier on the local machine: folded control logs, partition summaries, and sidecar heads.

The cache can be deleted at any time and belongs to one tier id. It never replaces the control log: folding continues from a cached state
only if the log still contains the record with which that state ended (StateIdentity). Methods raise no errors: if the cache fails,
it is treated as empty.

    meta              format, program version, tier id
    catalog           the folded catalog of the tier
    seen/<name>       up to which record a partition's log was read, and when
    summary/<name>    the partition's summary (control.summary)
    state/<name>      the partition's folded state
    head/<segment>    head of the segment's sidecar, as stored in the tier
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from compactor import __version__
from compactor.control.control_log import StateIdentity
from compactor.control.state import CatalogState, PartitionState
from compactor.control.summary import PartitionSummary, decode_summary, encode_summary, summarize_state
from compactor.local.rocks import RocksDatabase
from compactor.model.base import StrictFrozenModel
from compactor.model.ids import TopicPartition

CACHE_FORMAT = 5
"""Counts up when what is kept, or what a fold makes of a log, changes its meaning."""

_META, _CATALOG, _SEEN, _SUMMARY, _STATE, _HEAD = b"meta", b"catalog", b"seen/", b"summary/", b"state/", b"head/"
_UNREADABLE = "it cannot be read"


class LocalCacheHeader(StrictFrozenModel):
    """Record that describes a local cache: format number, program version, and tier id."""

    format: int
    program: str
    tier_id: str


class ControlLogReadProgress(StrictFrozenModel):
    """Position up to which a partition's control log was read into the cache.

    slot: number of the last record of the control log in the cached state.
    hint: number of the last hint about the partition (a catalog record that its control log has grown) that was known when the log was
    read.
    checked_ms: time of the latest read that found no newer records, by this machine's clock in milliseconds.
    mark: identifies the record ``slot``. If the control log has another record with this number, the cached state is not used.
    """

    slot: int
    hint: int
    checked_ms: int
    mark: StateIdentity


class CachedCatalog(StrictFrozenModel):
    """Cached catalog of a tier. mark: identifies the last record of the tier-wide log in it, by number and tag."""

    state: CatalogState
    mark: StateIdentity


ValueT = TypeVar("ValueT", bound=StrictFrozenModel)


class LocalState:
    """Cache of one tier's control data in a database in ``folder`` on the local disk. The database is opened on first use. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._rocks = RocksDatabase(folder)
        self._tier_id = ""
        self._catalog_slot = -1

    @property
    def is_bound_to_tier(self) -> bool:
        """Return whether ``bind_to_tier`` was called, so that it is known to which tier the cached data belongs."""
        return bool(self._tier_id)

    @property
    def is_writable(self) -> bool:
        """Return whether this process may write to the cache; only one process at a time may."""
        return self._rocks.is_writable

    def close(self) -> None:
        """Close the cache's database."""
        self._rocks.close()

    def cached_catalog(self) -> CachedCatalog | None:
        """Return the cached catalog, or None if none is cached. May be called before ``bind_to_tier``, because the catalog itself contains
        the tier id that is needed for binding.
        """
        if self._read_cache_header() is None:
            return None
        kept = self._read_cached_value(CachedCatalog, _CATALOG)
        self._catalog_slot = kept.state.slot if kept else -1
        return kept

    def bind_to_tier(self, tier_id: str, *, is_from_diverged_copy: bool = False) -> None:
        """Bind the cache to the tier with this id, whose data it holds from now on. Content of another tier is deleted.

        :param is_from_diverged_copy: whether the cache was filled from a copy of this tier whose control records differ; then all content
            is deleted, too.
        """
        meta = self._read_cache_header()
        if meta is not None and (is_from_diverged_copy or meta.tier_id != tier_id):
            self._discard_cached_content("it is about another tier, or about a later copy of this one")
            meta = None
        self._tier_id = tier_id
        if meta is None:
            made = LocalCacheHeader(format=CACHE_FORMAT, program=__version__, tier_id=tier_id)
            self._rocks.write({_META: made.model_dump_json().encode()})

    def cache_catalog(self, state: CatalogState, identity: StateIdentity | None) -> None:
        """Write the catalog to the cache, unless the cached one has the same last record.

        :param identity: identifies the last record in the catalog. If it is None, nothing is written.
        """
        if identity is not None and state.slot != self._catalog_slot:
            self._rocks.write({_CATALOG: CachedCatalog(state=state, mark=identity).model_dump_json().encode()})
            self._catalog_slot = state.slot

    def cached_summaries_by_partition_name(self) -> dict[str, tuple[ControlLogReadProgress, PartitionSummary]]:
        """Return a pair for each cached partition, by ``topic-partition``: the position up to which its control log was read, and its
        summary. Empty if nothing is cached or the cache cannot be read.
        """
        seen, known = self._rocks.entries_with_prefix(_SEEN), self._rocks.entries_with_prefix(_SUMMARY)
        found: dict[str, tuple[ControlLogReadProgress, PartitionSummary]] = {}
        try:
            for key, data in known.items():
                summary, about = decode_summary(data), ControlLogReadProgress.model_validate_json(seen.get(key, b""))
                if about.slot == summary.slot:
                    found[key.decode()] = about, summary
        except (ValueError, struct.error):
            self._discard_cached_content(_UNREADABLE)
            return {}
        return found

    def cached_partition_state(self, partition: TopicPartition) -> tuple[PartitionState, StateIdentity] | None:
        """Return a pair: the cached state of a partition, and the identity of the last control-log record in it. ``ControlLog.load`` then
        reads only later records. None if no usable state is cached.
        """
        state, seen = (
            self._read_cached_value(PartitionState, _database_key_of_partition(_STATE, partition)),
            self._read_cached_value(ControlLogReadProgress, _database_key_of_partition(_SEEN, partition)),
        )
        return (state, seen.mark) if state is not None and seen is not None and state.slot == seen.slot else None

    def cache_partition_state(self, state: PartitionState, identity: StateIdentity, last_hint_number: int, now_ms: int) -> None:
        """Write a partition's state and its summary to the cache.

        :param identity: identifies the last control-log record in the state.
        :param last_hint_number: number of the last catalog record about the partition that was known before its control log was read.
        :param now_ms: current time by this machine's clock, in milliseconds.
        """
        seen = ControlLogReadProgress(slot=state.slot, hint=last_hint_number, checked_ms=now_ms, mark=identity)
        self._rocks.write(
            {
                _database_key_of_partition(_SEEN, state.topic_partition): seen.model_dump_json().encode(),
                _database_key_of_partition(_SUMMARY, state.topic_partition): encode_summary(summarize_state(state)),
                _database_key_of_partition(_STATE, state.topic_partition): state.model_dump_json().encode(),
            }
        )

    def save_control_log_read_progress(self, progress_by_partition: Mapping[TopicPartition, ControlLogReadProgress]) -> None:
        """Write the read positions of partitions whose control logs were read and had no newer records than the cached states. Only
        ``checked_ms`` and ``hint`` differ from the stored positions.
        """
        self._rocks.write(
            {_database_key_of_partition(_SEEN, name): value.model_dump_json().encode() for name, value in progress_by_partition.items()}
        )

    def cached_sidecar_heads(self, segment_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the cached heads (first parts) of these segments' sidecars, by segment id. Segments without a cached head are absent."""
        found = self._rocks.get([_HEAD + name.encode() for name in segment_ids])
        return {name: data for name, data in zip(segment_ids, found, strict=True) if data is not None}

    def cache_sidecar_heads(self, heads: Mapping[str, bytes]) -> None:
        """Write the first parts (heads) of sidecars to the cache, by segment id."""
        self._rocks.write({_HEAD + name.encode(): data for name, data in heads.items()})

    def delete_cached_sidecar_heads(self, segment_ids: Sequence[str]) -> None:
        """Delete the cached first parts (heads) of these segments' sidecars, because the segments are gone or the sidecars were rebuilt."""
        self._rocks.write({}, [_HEAD + name.encode() for name in segment_ids])

    def _read_cache_header(self) -> LocalCacheHeader | None:
        """Return the header of the cache. None if the cache is empty, or if another version of the program wrote it; its content is deleted
        then.
        """
        meta = self._read_cached_value(LocalCacheHeader, _META)
        if meta is not None and (meta.format, meta.program) != (CACHE_FORMAT, __version__):
            self._discard_cached_content(f"it is of version {meta.program}, format {meta.format}")
            return None
        return meta

    def _read_cached_value(self, value_type: type[ValueT], database_key: bytes) -> ValueT | None:
        """Return the value that is stored under a key, or None if there is none. If the value cannot be parsed, the whole cache is emptied
        and None is returned.
        """
        (data,) = self._rocks.get([database_key])
        try:
            return None if data is None else value_type.model_validate_json(data)
        except ValueError:
            self._discard_cached_content(_UNREADABLE)
            return None

    def _discard_cached_content(self, reason: str) -> None:
        """Delete everything in the cache, log the reason, and bind the empty cache to its tier."""
        self._rocks.delete_all_entries(reason)
        self._catalog_slot = -1
        if self._tier_id:
            self._rocks.write(
                {_META: LocalCacheHeader(format=CACHE_FORMAT, program=__version__, tier_id=self._tier_id).model_dump_json().encode()}
            )


def _database_key_of_partition(key_prefix: bytes, partition: TopicPartition) -> bytes:
    """Return the database key of a partition's value. key_prefix: the kind of value, such as ``state/``."""
    return key_prefix + str(partition).encode()
