"""Cache of one tier on the local machine: folded control logs, partition summaries, and sidecar heads.

It can be deleted at any time, and belongs to one tier id. Folding continues from a cached state only if the log still contains the record
with which that state ended (StateIdentity). Methods raise no errors: a cache that fails is treated as empty.

    meta              format, program version, tier id
    catalog           the folded catalog of the tier
    seen/<name>       up to which record a partition's log was read, and when
    summary/<name>    the partition's summary (control.summary)
    state/<name>      the partition's folded state
    head/<segment>    head of the segment's sidecar, as stored in the tier
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from compactor import __version__
from compactor.control.control_log import StateIdentity
from compactor.control.state import CatalogState, PartitionState
from compactor.control.summary import PartitionSummary, decode_summary, encode_summary, summarize_state
from compactor.model.ids import TopicPartition
from compactor.model.segment import StrictFrozenModel

if TYPE_CHECKING:
    from rocksdict import Options, Rdict


# One process can write (RocksDB's own lock). Others, and those without write permission, open the database as secondaries and read what had
# been written by then. A broken database is deleted by the process that can write.


_OPEN_FILES = 64
_LOCKED = ("While lock file", "lock hold by current process")
"""What RocksDB says where another process, or this one, has it open for writing."""
_log = logging.getLogger(__name__)


class RocksDatabase:
    """RocksDB database whose content may be lost at any time; after any error the program continues without it. Opened on first use, closed
    at the latest when the process ends. Thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._tried = False
        self._db: Rdict | None = None
        self._writer = False
        self._cleanup = ExitStack()
        weakref.finalize(self, self._cleanup.close)

    @property
    def is_writable(self) -> bool:
        return self._database() is not None and self._writer

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        db = self._database()
        if db is None or not keys:
            return [None] * len(keys)
        try:
            return list(cast("Iterable[bytes | None]", db.get(list(keys))))
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing narrower
            self.delete_all_entries(str(error))
            return [None] * len(keys)

    def entries_with_prefix(self, prefix: bytes) -> dict[bytes, bytes]:
        db = self._database()
        found: dict[bytes, bytes] = {}
        if db is None:
            return found
        try:
            for key, data in cast("Iterable[tuple[bytes, bytes]]", db.items(from_key=prefix)):
                if not key.startswith(prefix):
                    break
                found[key[len(prefix) :]] = data
        except Exception as error:  # noqa: BLE001
            self.delete_all_entries(str(error))
            return {}
        return found

    def write(self, values: Mapping[bytes, bytes], deleted_keys: Sequence[bytes] = ()) -> None:
        """All or nothing. Does nothing if the database is not open for writing."""
        db = self._database()
        if db is None or not self._writer:
            return
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key, data in values.items():
            batch.put(key, data)
        for key in deleted_keys:
            batch.delete(key)
        try:
            db.write(batch)
        except Exception as error:  # noqa: BLE001
            _log.warning("local state in %s cannot be written, going on without: %s", self._folder, _one_line(error))
            self.close()

    def delete_all_entries(self, reason: str) -> None:
        """A process that may not write closes the database instead."""
        with self._lock:
            if self._db is None:
                return
            writer = self._writer
            self.close()
            if writer:
                _log.warning("local state in %s is thrown away: %s", self._folder, _one_line(reason))
                shutil.rmtree(self._folder, ignore_errors=True)
                self._open_database()

    def close(self) -> None:
        """Later reads find nothing."""
        with self._lock:
            self._tried, self._db, self._writer = True, None, False
            self._cleanup.close()

    def _database(self) -> Rdict | None:
        with self._lock:
            if not self._tried:
                self._tried = True
                self._open_database()
            return self._db

    def _open_database(self) -> None:
        """Open as a secondary if another process has it open for writing or the folder is read-only. Delete and recreate a broken one."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open_for_writing()
        except Exception as error:  # noqa: BLE001
            if any(message in str(error) for message in _LOCKED) or not os.access(self._folder, os.W_OK | os.X_OK):
                self._open_as_secondary()
                return
            _log.warning("local state in %s is thrown away: %s", self._folder, _one_line(error))
            shutil.rmtree(self._folder, ignore_errors=True)
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._open_for_writing()
            except Exception as again:  # noqa: BLE001
                _log.warning("going on without local state: %s", _one_line(again))

    def _open_for_writing(self) -> None:
        from rocksdict import Rdict

        db = Rdict(str(self._folder), _database_options(_OPEN_FILES))
        self._db, self._writer = db, True
        self._cleanup.callback(_close_database, db, is_writer=True)

    def _open_as_secondary(self) -> None:
        """A RocksDB secondary reads while another process writes."""
        from rocksdict import AccessType, Rdict

        try:
            own = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tiered-compactor-", ignore_cleanup_errors=True))
            db = Rdict(str(self._folder), _database_options(-1), access_type=AccessType.secondary(own))
        except Exception as error:  # noqa: BLE001
            _log.info("no local state: %s", error)
            return
        self._db, self._writer = db, False
        self._cleanup.callback(_close_database, db, is_writer=False)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _database_options(max_open_files: int) -> Options:
    from rocksdict import DBCompressionType, Options

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_max_open_files(max_open_files)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(1 << 20)
    return options


def _close_database(database: Rdict, *, is_writer: bool) -> None:
    with suppress(Exception):
        if is_writer:
            database.flush()  # what is only in the write-ahead log is read again, slowly, by the next one who opens it
        database.close()


CACHE_FORMAT = 6
"""Counts up when what is kept, or what a fold makes of a log, changes its meaning."""

_META, _CATALOG, _SEEN, _SUMMARY, _STATE, _HEAD = b"meta", b"catalog", b"seen/", b"summary/", b"state/", b"head/"
_UNREADABLE = "it cannot be read"


class LocalCacheHeader(StrictFrozenModel):
    format: int
    program: str
    tier_id: str


class ControlLogReadProgress(StrictFrozenModel):
    """Position up to which a control log was read.

    hint: number of the partition's last hint that was known before the read.
    checked_ms: time of the latest read that found no newer records, by this machine's clock.
    mark: identifies the record ``slot``. If the log has another record there, the cached state is not used.
    """

    slot: int
    hint: int
    checked_ms: int
    mark: StateIdentity


class CachedCatalog(StrictFrozenModel):
    """Cached catalog. ``mark``: identifies its last record."""

    state: CatalogState
    mark: StateIdentity


ValueT = TypeVar("ValueT", bound=StrictFrozenModel)


class LocalState:
    """Cache of one tier on the local disk. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._rocks = RocksDatabase(folder)
        self._tier_id = ""
        self._catalog_slot = -1

    @property
    def is_bound_to_tier(self) -> bool:
        return bool(self._tier_id)

    @property
    def is_writable(self) -> bool:
        """Only one process at a time may write."""
        return self._rocks.is_writable

    def close(self) -> None:
        self._rocks.close()

    def cached_catalog(self) -> CachedCatalog | None:
        """May be called before ``bind_to_tier``, because the catalog contains the tier id."""
        if self._read_cache_header() is None:
            return None
        kept = self._read_cached_value(CachedCatalog, _CATALOG)
        self._catalog_slot = kept.state.slot if kept else -1
        return kept

    def bind_to_tier(self, tier_id: str, *, is_from_diverged_copy: bool = False) -> None:
        """Content of another tier is deleted.

        :param is_from_diverged_copy: whether the cache was filled from a copy of this tier whose control records differ; its content is
        deleted, too.
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
        """Does nothing without ``identity``."""
        if identity is not None and state.slot != self._catalog_slot:
            self._rocks.write({_CATALOG: CachedCatalog(state=state, mark=identity).model_dump_json().encode()})
            self._catalog_slot = state.slot

    def cached_summaries(self) -> dict[str, tuple[ControlLogReadProgress, PartitionSummary]]:
        """By ``topic-partition``."""
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
        """Return the state with the identity of its last record, for ``ControlLog.continue_from_cached_state``."""
        state, seen = (
            self._read_cached_value(PartitionState, _database_key_of_partition(_STATE, partition)),
            self._read_cached_value(ControlLogReadProgress, _database_key_of_partition(_SEEN, partition)),
        )
        return (state, seen.mark) if state is not None and seen is not None and state.slot == seen.slot else None

    def cache_partition_state(self, state: PartitionState, identity: StateIdentity, last_hint_number: int, now_ms: int) -> None:
        """:param last_hint_number: known before the control log was read."""
        seen = ControlLogReadProgress(slot=state.slot, hint=last_hint_number, checked_ms=now_ms, mark=identity)
        self._rocks.write(
            {
                _database_key_of_partition(_SEEN, state.topic_partition): seen.model_dump_json().encode(),
                _database_key_of_partition(_SUMMARY, state.topic_partition): encode_summary(summarize_state(state)),
                _database_key_of_partition(_STATE, state.topic_partition): state.model_dump_json().encode(),
            }
        )

    def save_read_progress(self, progress_by_partition: Mapping[TopicPartition, ControlLogReadProgress]) -> None:
        self._rocks.write(
            {_database_key_of_partition(_SEEN, name): value.model_dump_json().encode() for name, value in progress_by_partition.items()}
        )

    def cached_sidecar_heads(self, segment_ids: Sequence[str]) -> dict[str, bytes]:
        found = self._rocks.get([_HEAD + name.encode() for name in segment_ids])
        return {name: data for name, data in zip(segment_ids, found, strict=True) if data is not None}

    def cache_sidecar_heads(self, heads: Mapping[str, bytes]) -> None:
        self._rocks.write({_HEAD + name.encode(): data for name, data in heads.items()})

    def delete_cached_sidecar_heads(self, segment_ids: Sequence[str]) -> None:
        self._rocks.write({}, [_HEAD + name.encode() for name in segment_ids])

    def _read_cache_header(self) -> LocalCacheHeader | None:
        """The content is deleted if another version of the program wrote it."""
        meta = self._read_cached_value(LocalCacheHeader, _META)
        if meta is not None and (meta.format, meta.program) != (CACHE_FORMAT, __version__):
            self._discard_cached_content(f"it is of version {meta.program}, format {meta.format}")
            return None
        return meta

    def _read_cached_value(self, value_type: type[ValueT], database_key: bytes) -> ValueT | None:
        """If the value cannot be parsed, the whole cache is emptied."""
        (data,) = self._rocks.get([database_key])
        try:
            return None if data is None else value_type.model_validate_json(data)
        except ValueError:
            self._discard_cached_content(_UNREADABLE)
            return None

    def _discard_cached_content(self, reason: str) -> None:
        self._rocks.delete_all_entries(reason)
        self._catalog_slot = -1
        if self._tier_id:
            self._rocks.write(
                {_META: LocalCacheHeader(format=CACHE_FORMAT, program=__version__, tier_id=self._tier_id).model_dump_json().encode()}
            )


def _database_key_of_partition(key_prefix: bytes, partition: TopicPartition) -> bytes:
    return key_prefix + str(partition).encode()
