"""RocksDB database that may be lost: after any error the program continues without it, and no error is raised.

One process can write (RocksDB's own lock). Other processes, and those without write permission, open it as secondaries and read what had
been written by then. A broken database is deleted by the process that can write, with a line in the log.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from rocksdict import Options, Rdict

_OPEN_FILES = 64
_LOCKED = ("While lock file", "lock hold by current process")
"""What RocksDB says where another process, or this one, has it open for writing."""
_log = logging.getLogger(__name__)


class RocksDatabase:
    """RocksDB database in ``folder``, used as a cache: its content may be lost at any time. Opened on first use and closed at the latest
    when the process ends. Thread-safe.
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
        """Return whether this process has the database open for writing."""
        return self._database_opened_on_first_use() is not None and self._writer

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of these keys, None for each absent key."""
        db = self._database_opened_on_first_use()
        if db is None or not keys:
            return [None] * len(keys)
        try:
            return list(cast("Iterable[bytes | None]", db.get(list(keys))))
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing narrower
            self.delete_all_entries(str(error))
            return [None] * len(keys)

    def entries_with_prefix(self, prefix: bytes) -> dict[bytes, bytes]:
        """Return all entries whose key begins with ``prefix``; the prefix is removed from the keys."""
        db = self._database_opened_on_first_use()
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
        """Write ``values`` and delete the entries of ``deleted_keys``, all or nothing. Does nothing if this process has not opened the
        database for writing.
        """
        db = self._database_opened_on_first_use()
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
            _log.warning("local state in %s cannot be written, going on without: %s", self._folder, _error_message_on_one_line(error))
            self.close()

    def delete_all_entries(self, reason: str) -> None:
        """Delete the content of the database and log the reason. A process that may not write closes the database instead, and continues
        without it.
        """
        with self._lock:
            if self._db is None:
                return
            writer = self._writer
            self.close()
            if writer:
                _log.warning("local state in %s is thrown away: %s", self._folder, _error_message_on_one_line(reason))
                shutil.rmtree(self._folder, ignore_errors=True)
                self._open_database()

    def close(self) -> None:
        """Close the database for the rest of the process. Later reads find nothing."""
        with self._lock:
            self._tried, self._db, self._writer = True, None, False
            self._cleanup.close()

    def _database_opened_on_first_use(self) -> Rdict | None:
        """Return the database, opened on the first call, or None if it cannot be opened."""
        with self._lock:
            if not self._tried:
                self._tried = True
                self._open_database()
            return self._db

    def _open_database(self) -> None:
        """Open the database for writing. If another process has it open for writing or the folder is read-only, open it as a secondary (for
        reading). Delete and recreate a broken one. If nothing helps, continue without a database.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open_for_writing()
        except Exception as error:  # noqa: BLE001
            if any(message in str(error) for message in _LOCKED) or not os.access(self._folder, os.W_OK | os.X_OK):
                self._open_as_read_only_secondary()
                return
            _log.warning("local state in %s is thrown away: %s", self._folder, _error_message_on_one_line(error))
            shutil.rmtree(self._folder, ignore_errors=True)
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._open_for_writing()
            except Exception as again:  # noqa: BLE001
                _log.warning("going on without local state: %s", _error_message_on_one_line(again))

    def _open_for_writing(self) -> None:
        """Open the database for reading and writing. Raises RocksDB's error if that fails."""
        from rocksdict import Rdict

        db = Rdict(str(self._folder), _database_options(_OPEN_FILES))
        self._db, self._writer = db, True
        self._cleanup.callback(_close_database, db, is_writer=True)

    def _open_as_read_only_secondary(self) -> None:
        """Open the database as a RocksDB secondary, which can read while another process writes. Its own files are in a temporary folder.
        If that fails, continue without a database.
        """
        from rocksdict import AccessType, Rdict

        try:
            own = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tiered-compactor-", ignore_cleanup_errors=True))
            db = Rdict(str(self._folder), _database_options(-1), access_type=AccessType.secondary(own))
        except Exception as error:  # noqa: BLE001
            _log.info("no local state: %s", error)
            return
        self._db, self._writer = db, False
        self._cleanup.callback(_close_database, db, is_writer=False)


def _error_message_on_one_line(message: object) -> str:
    """Return an error's message with all white space, including line breaks, replaced by single spaces."""
    return " ".join(str(message).split())


def _database_options(max_open_files: int) -> Options:
    """Return the options with which RocksDB opens the cache. ``max_open_files``: -1 for no limit."""
    from rocksdict import DBCompressionType, Options

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_max_open_files(max_open_files)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(1 << 20)
    return options


def _close_database(database: Rdict, *, is_writer: bool) -> None:
    """Close a RocksDB database and ignore errors.

    :param is_writer: whether this process opened it for writing. If so, entries that are only in the write-ahead log are flushed first.
    """
    with suppress(Exception):
        if is_writer:
            database.flush()  # what is only in the write-ahead log is read again, slowly, by the next one who opens it
        database.close()
