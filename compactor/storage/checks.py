"""Findings about stores, checks of server-side copies, and shared helpers of stores."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import crc32c

from compactor.errors import CompactorError, CopyDiffers, NotFound, OutOfBudget, Refused, Unavailable
from compactor.model.finding import Finding
from compactor.storage.port import ComposeSource, FileRange, ObjectRangeToCopy, ObjectStore

FindingKindAndDetail = tuple[str, str]
"""Kind and detail of a Finding."""


def unknown_deletion_settings(url: str, answer: str, rights: str) -> Finding:
    """Finding that it is not known whether a store keeps deleted objects.

    :param answer: the store's answer, or why it could not be asked.
    :param rights: needed for the question; missing only if the answer says so.
    """
    is_refused = any(word in answer.lower() for word in ("denied", "credentials"))
    return Finding(
        "note",
        "versioning-unknown",
        "",
        f"whether {url} keeps versions, deleted or locked objects is not known, so no saving is promised: {answer}",
        f"Grant {rights}"
        if is_refused
        else "No right is missing: this server does not answer the question. Its documentation says whether it keeps versions",
    )


def require_equal_copy(
    piece: ObjectRangeToCopy, object_name: str, copied: Iterable[bytes], read_source: Callable[[], Iterable[bytes]]
) -> None:
    """Raise CopyDiffers if the CRC-32C differs. The source is read only if its own is unknown."""
    expected = _crc32c_of_chunks(read_source()) if piece.crc32c is None else piece.crc32c
    if _crc32c_of_chunks(copied) != expected:
        raise CopyDiffers(f"{object_name}: the store has copied other bytes of it than it was asked for", hint="Run verify --deep")


def _crc32c_of_chunks(chunks: Iterable[bytes]) -> int:
    crc = 0
    for chunk in chunks:
        crc = crc32c.crc32c(chunk, crc)
    return crc


def copy_source_changed_error(object_name: str) -> Unavailable:
    return Unavailable(f"{object_name} is not the version that was to be copied", hint="Something else writes to this tier; run verify")


def require_unchanged_copy_sources(store: ObjectStore, sources: Sequence[ComposeSource]) -> None:
    """Raise NotFound if a source is gone, Unavailable if it has another version, ValueError if a range is not in it."""
    copied = [piece for piece in sources if isinstance(piece, ObjectRangeToCopy) and piece.length]
    for key in dict.fromkeys(piece.key for piece in copied):
        found = store.head(key)
        if any(piece.etag != found.etag for piece in copied if piece.key == key):
            raise copy_source_changed_error(f"{store.url}/{key}")
        if any(piece.start + piece.length > found.size for piece in copied if piece.key == key):
            raise ValueError(f"{store.url}/{key} ends before what was to be copied of it")


def verify_or_delete_copy(store: ObjectStore, key: str, sources: Sequence[ComposeSource], chunk_bytes: int) -> None:
    """Read back the copied ranges of a new object. If they differ from their sources, delete the object and raise CopyDiffers."""

    def read_range(source: str, start: int, length: int) -> Iterator[bytes]:
        for at in range(start, start + length, chunk_bytes):
            yield store.get(source, at, min(chunk_bytes, start + length - at))

    at = 0
    for piece in sources:
        if isinstance(piece, ObjectRangeToCopy):
            try:
                source = partial(read_range, piece.key, piece.start, piece.length)
                require_equal_copy(piece, f"{store.url}/{piece.key}", read_range(key, at, piece.length), source)
            except CopyDiffers:
                store.delete([key])
                raise
        at += piece.length


FULL = (errno.ENOSPC, errno.EDQUOT)
_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_A_FILE = (errno.ENOTDIR, errno.EISDIR)
_BAD_PATH = (errno.ELOOP, errno.ENAMETOOLONG)


@contextmanager
def translated_os_errors(verb: str, path: Path) -> Iterator[None]:
    """Replace OSErrors by CompactorErrors. A missing file becomes NotFound if ``verb`` is ``read``.

    :param verb: read, write, list or delete.
    """
    try:
        yield
    except OSError as error:
        raise _translate_os_error(verb, path, error) from error


def _translate_os_error(verb: str, path: Path, error: OSError) -> CompactorError:
    name = error.filename if isinstance(error.filename, str) else str(path)
    what = f"cannot {verb} {path}: {error.strerror or error}" + (f" ({name})" if name != str(path) else "")
    if error.errno in FULL:
        return OutOfBudget(what, hint="Free space on that file system, or move the tier or state_dir to a larger one")
    if error.errno in _PERMISSION:
        return Refused(what, hint="Check owner and mode; the file system must be writable for writing and know hard links")
    if error.errno == errno.EXDEV:
        return Refused(what, hint="A tier directory must lie on one file system: hard links cannot leave it")
    if error.errno in _BAD_PATH:
        return Refused(what, hint="Objects are plain files with names of at most 255 bytes; remove the symbolic link or shorten the path")
    if verb == "write" and error.errno in _NOT_A_FILE:
        return Refused(what, hint="No key may be a directory of another key")
    if verb == "read" and error.errno in (errno.ENOENT, *_NOT_A_FILE):
        return NotFound(f"no object {path}")
    return Unavailable(what, hint="Check the disk or the mount, then try again")


def write_at_position(descriptor: int, data: bytes, position: int) -> int:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written
    return len(data)


def run_in_parallel(threads: int, tasks: list[Callable[[threading.Event], Any]]) -> list[Any]:
    """Results in order. The first failure is raised; it sets the event that each task receives, so that the others stop before their next
    attempt.
    """
    stop = threading.Event()

    def run_unless_stopped(task: Callable[[threading.Event], Any]) -> Any:
        try:
            return task(stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, min(threads, len(tasks))), thread_name_prefix="transfer") as pool:
        futures = [pool.submit(run_unless_stopped, task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            for future in futures:
                future.cancel()
    errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
    for error in errors:
        if not isinstance(error, CancelledError):
            raise error
    return [future.result() for future in futures]


def read_file_range(piece: FileRange) -> bytes:
    with translated_os_errors("read", piece.path), open(piece.path, "rb") as file:
        file.seek(piece.start)
        data = file.read(piece.length)
    if len(data) != piece.length:
        raise Unavailable(f"{piece.path} became shorter while it was uploaded")
    return data
