"""A RocksDB that may be lost: whatever goes wrong with it means to go on without, and nothing is raised.

One process writes (RocksDB's own lock). Others read what it had written by the time they opened it, as secondaries; so do those who
may not write here at all. A database that is broken is thrown away by the one who may write, with one line on stderr.
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


class Rocks:
    """:param folder: made by the first use. Opened by the first use, closed with the process at the latest; for several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._tried = False
        self._db: Rdict | None = None
        self._writer = False
        self._cleanup = ExitStack()
        weakref.finalize(self, self._cleanup.close)

    @property
    def writable(self) -> bool:
        """Whether this process is the one that writes."""
        return self._database() is not None and self._writer

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, None for what is absent."""
        db = self._database()
        if db is None or not keys:
            return [None] * len(keys)
        try:
            return list(cast("Iterable[bytes | None]", db.get(list(keys))))
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing narrower
            self.throw_away(str(error))
            return [None] * len(keys)

    def below(self, prefix: bytes) -> dict[bytes, bytes]:
        """Everything whose key begins with this, by the rest of the key."""
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
            self.throw_away(str(error))
            return {}
        return found

    def write(self, values: Mapping[bytes, bytes], gone: Sequence[bytes] = ()) -> None:
        """All of it or nothing; nothing where another process writes."""
        db = self._database()
        if db is None or not self._writer:
            return
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key, data in values.items():
            batch.put(key, data)
        for key in gone:
            batch.delete(key)
        try:
            db.write(batch)
        except Exception as error:  # noqa: BLE001
            _log.warning("local state in %s cannot be written, going on without: %s", self._folder, _line(error))
            self.close()

    def throw_away(self, why: str) -> None:
        """Begins anew, with one line on stderr. Whoever does not write goes on without."""
        with self._lock:
            if self._db is None:
                return
            writer = self._writer
            self.close()
            if writer:
                _log.warning("local state in %s is thrown away: %s", self._folder, _line(why))
                shutil.rmtree(self._folder, ignore_errors=True)
                self._open()

    def close(self) -> None:
        with self._lock:
            self._tried, self._db, self._writer = True, None, False
            self._cleanup.close()

    def _database(self) -> Rdict | None:
        with self._lock:
            if not self._tried:
                self._tried = True
                self._open()
            return self._db

    def _open(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._begin_writing()
        except Exception as error:  # noqa: BLE001
            if any(said in str(error) for said in _LOCKED) or not os.access(self._folder, os.W_OK | os.X_OK):
                self._begin_reading()
                return
            _log.warning("local state in %s is thrown away: %s", self._folder, _line(error))
            shutil.rmtree(self._folder, ignore_errors=True)
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._begin_writing()
            except Exception as again:  # noqa: BLE001
                _log.warning("going on without local state: %s", _line(again))

    def _begin_writing(self) -> None:
        from rocksdict import Rdict

        db = Rdict(str(self._folder), _options(_OPEN_FILES))
        self._db, self._writer = db, True
        self._cleanup.callback(_close, db, writer=True)

    def _begin_reading(self) -> None:
        """A secondary keeps files of its own elsewhere, and all of the writer's open."""
        from rocksdict import AccessType, Rdict

        try:
            own = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tiered-compactor-", ignore_cleanup_errors=True))
            db = Rdict(str(self._folder), _options(-1), access_type=AccessType.secondary(own))
        except Exception as error:  # noqa: BLE001
            _log.info("no local state: %s", error)
            return
        self._db, self._writer = db, False
        self._cleanup.callback(_close, db, writer=False)


def _line(said: object) -> str:
    """RocksDB may use several."""
    return " ".join(str(said).split())


def _options(open_files: int) -> Options:
    from rocksdict import DBCompressionType, Options

    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_max_open_files(open_files)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(1 << 20)
    return options


def _close(db: Rdict, *, writer: bool) -> None:
    with suppress(Exception):
        if writer:
            db.flush()  # what is only in the write-ahead log is read again, slowly, by the next one who opens it
        db.close()
