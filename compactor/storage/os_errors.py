"""Translation of operating-system errors about files into the port's errors, with the path and what to do next."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compactor.errors import CompactorError, NotFound, OutOfBudget, Refused, Unavailable

FULL = (errno.ENOSPC, errno.EDQUOT)
_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_A_FILE = (errno.ENOTDIR, errno.EISDIR)
_BAD_PATH = (errno.ELOOP, errno.ENAMETOOLONG)


@contextmanager
def os_errors_as_compactor_errors(verb: str, path: Path) -> Iterator[None]:
    """Provide a ``with`` block in which OSErrors are replaced by CompactorErrors with a hint. A missing file becomes NotFound if ``verb``
    is ``read``.

    :param verb: what is done to the file: read, write, list or delete.
    :param path: the file or directory, for messages.
    """
    try:
        yield
    except OSError as error:
        raise _os_error_as_compactor_error(verb, path, error) from error


def _os_error_as_compactor_error(verb: str, path: Path, error: OSError) -> CompactorError:
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
