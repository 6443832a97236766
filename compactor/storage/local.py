"""A directory as an object store (``file://``): a key is a path below the root, an object is a plain file.

*Create-if-absent* is an exclusive hard link: the bytes are staged under ``.object-store/tmp`` (same file system, never listed), synced and
linked to their place, and the directory is synced. A crash leaves at most a staged file, which is swept after an hour.

*Metadata* must appear together with the object, survive copying, and never mix with that of a writer that lost the race. They lie in a
companion file that is written before the link. Its name holds the object's modification time in nanoseconds, unique among the key's
companions; that of a writer that lost therefore matches no object. ``cp -a``, ``rsync -a`` and ``tar`` keep both.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from compactor.errors import AlreadyExists, Refused, Unavailable
from compactor.storage.checks import FULL, require_equal_copy, translated_os_errors
from compactor.storage.keys import (
    RESERVED,
    check_byte_range,
    check_object_key,
    check_object_key_prefix,
    normalize_metadata_names,
    object_key_component_problem,
    require_storable_object_metadata,
)
from compactor.storage.port import (
    ComposeSource,
    CopyLimits,
    FileLease,
    FileRange,
    ObjectInfo,
    ObjectRangeToCopy,
    ObjectStore,
    UnfinishedUpload,
)
from compactor.storage.schemes import directory_of_store_url
from compactor.storage.settings import RetrySettings
from compactor.storage.wrappers import RequestCounters, RequestMeter, Retrier, RetryingStore, StoreOptions

_CHUNK = 1 << 20
_LONGEST_NAME = 200
_STALE_NS = 3_600 * 1_000_000_000
_MOST_COPY_BYTES = 1 << 30
_NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)
"""Errors of ``copy_file_range`` that mean it is not supported here. The bytes are then read and written instead."""
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK)
"""Errors of ``link`` after which the bytes are copied: another file system, or one with a limit. The link to the key shows any other."""
_LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems on which a lease holds for all writers, and a mapped file stays readable. Others may be written to on another machine."""
_RETRIES = RetrySettings(deadline_s=1, base_s=0.05, cap_s=0.5)
"""A network file system that has lost a handle finds it again at once, or not at all."""


def open_store_at(url: str, options: StoreOptions) -> ObjectStore:
    """Raises UsageError if the text names no directory."""
    return RetryingStore(
        LocalStore(directory_of_store_url(url), options.meter, holds_control_records=options.records), Retrier(options.retries or _RETRIES)
    )


class LocalStore:
    """ObjectStore in a local directory, which the first write creates.

    :param holds_control_records: whether control records fit on a full disk (``FullDiskReserveFile``), and ``modified_ms`` is never before
        the moment at which an object became visible, even if the writer paused.
    """

    def __init__(self, root: Path, meter: RequestMeter | None = None, *, holds_control_records: bool = False) -> None:
        self._root = Path(os.path.abspath(root))
        self._records = holds_control_records
        self._reserve = FullDiskReserveFile(self._root / RESERVED / "reserve") if holds_control_records else None
        self._meter = meter or RequestCounters()
        self._swept_ns = 0
        self._may_lend: bool | None = None

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_byte_range(start, length)
        path = self._object_path(key)
        self._meter.record_request("get")
        with translated_os_errors("read", path), _open_object(path) as file:
            file.seek(start)
            # A huge length would be allocated in advance.
            data = file.read() if length is None else file.read(min(length, os.fstat(file.fileno()).st_size))
        self._meter.record_bytes_read(len(data))
        return data

    def head(self, key: str) -> ObjectInfo:
        path = self._object_path(key)
        self._meter.record_request("head")
        with translated_os_errors("read", path):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a plain file", str(path))
            return self._object_info(key, status, _read_object_metadata_file(path, status))

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self._create_object(key, lambda file: self._write_chunks(file, (data,)), metadata)

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None, *, may_link: bool = False) -> ObjectInfo:
        def write_content(file: BinaryIO) -> None:
            with open(path, "rb") as source:
                self._write_chunks(file, _read_chunks(source, None))

        return self._create_object(key, write_content, metadata, path if may_link else None)

    @property
    def server_copy_limits(self) -> CopyLimits:
        return CopyLimits(min_run_bytes=0, max_bytes=_MOST_COPY_BYTES)

    def compose(self, key: str, sources: Sequence[ComposeSource], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """A copied range shares its blocks with the source if the file system can (reflink). Copied bytes are read back before the object
        appears: OpenZFS 2.1.4 to 2.2.1 copied zeros and did not say so.
        """
        for piece in sources:
            check_byte_range(piece.start, piece.length)

        def write_content(file: BinaryIO) -> None:
            for piece in sources:
                if isinstance(piece, ObjectRangeToCopy):
                    self._append_object_range(piece, file)
                else:
                    self._append_file_range(piece, file)

        return self._create_object(key, write_content, metadata)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        target = self._object_path(key)
        self._meter.record_request("put")
        with (
            translated_os_errors("write", target),
            self._temporary_file_with_content(lambda file: self._write_chunks(file, (data,))) as staged,
        ):
            _create_missing_directories(target.parent)
            os.replace(staged, target)
            _sync_directory(target.parent)
            return self._object_info(key, target.lstat(), {})

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        check_byte_range(start, length)
        source = self._object_path(key)
        self._meter.record_request("get")
        done = 0
        with translated_os_errors("read", source), _open_object(source) as file:
            file.seek(start)
            try:
                with translated_os_errors("write", path), open(path, "wb") as target:
                    while chunk := file.read(_CHUNK if length is None else min(_CHUNK, length - done)):
                        self._meter.record_bytes_read(len(chunk))
                        target.write(chunk)
                        done += len(chunk)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        return done

    def lend(self, key: str, path: Path) -> FileLease | None:
        source = self._object_path(key)
        if self._may_lend is None:
            self._may_lend = file_system_type(self._root) in _LOCAL_FILE_SYSTEMS
        if not self._may_lend:
            return None
        with translated_os_errors("read", source):
            file = _open_object(source)
        lease = LocalFileLease.try_take(file, source)
        if lease is not None:
            self._meter.record_request("get")  # what is not lent is downloaded, and counts there
            self._meter.record_bytes_read(os.fstat(file.fileno()).st_size)
            with translated_os_errors("write", path):
                # It leads to the open file, even if the object is deleted meanwhile, and to another file system.
                path.symlink_to(f"/proc/self/fd/{file.fileno()}")
        return lease

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_object_key_prefix(prefix)
        self._meter.record_request("list")
        folder = prefix.rpartition("/")[0]
        with translated_os_errors("list", self._root / folder):
            start = self._require_inside_root(self._root / folder)
            for found, status in _walk_objects(start, f"{folder}/" if folder else "", prefix, after):
                yield self._object_info(found, status, {})

    def delete(self, keys: Iterable[str]) -> None:
        touched: set[Path] = set()
        for key in keys:
            path = self._object_path(key)
            self._meter.record_request("delete")
            with translated_os_errors("delete", path), suppress(FileNotFoundError, NotADirectoryError):
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                path.unlink()
                _metadata_path(path, status.st_mtime_ns).unlink(missing_ok=True)
                touched.add(path.parent)
        for folder in sorted(touched):
            with translated_os_errors("delete in", folder), suppress(FileNotFoundError):
                _sync_directory(folder)

    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        folder = self._root / RESERVED / "tmp"
        self._meter.record_request("list")
        with translated_os_errors("list", folder), suppress(FileNotFoundError, NotADirectoryError):
            for entry in [] if prefix else list(os.scandir(folder)):
                with suppress(FileNotFoundError):
                    yield UnfinishedUpload(f"{RESERVED}/{folder.name}/{entry.name}", entry.name, entry.stat().st_mtime_ns // 1_000_000)

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        folder = self._root / RESERVED / "tmp"
        for upload in uploads:
            self._meter.record_request("delete")
            with translated_os_errors("delete", folder / upload.id), suppress(FileNotFoundError):
                os.unlink(folder / os.path.basename(upload.id))

    def clock_ms(self) -> int:
        self._meter.record_request("head")
        with (
            translated_os_errors("write", self._root),
            self._temporary_file_with_content(lambda file: None, durable=False) as staged,
        ):
            return staged.lstat().st_mtime_ns // 1_000_000

    def _object_path(self, key: str) -> Path:
        check_object_key(key)
        path = self._root / key
        return self._require_inside_root(path.parent) / path.name

    def _require_inside_root(self, folder: Path) -> Path:
        """Raises Refused if symbolic links lead out of the store's root."""
        real, root = os.path.realpath(folder), os.path.realpath(self._root)
        if real != root and not real.startswith(root.rstrip("/") + "/"):
            raise Refused(f"{folder} leads out of the store {self._root}, to {real}", hint="Remove the symbolic link")
        return folder

    def _write_chunks(self, file: BinaryIO, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            self._meter.record_bytes_written(len(chunk))
            file.write(chunk)

    def _read_range(self, file: BinaryIO, start: int, length: int) -> Iterator[bytes]:
        file.seek(start)
        for chunk in _read_chunks(file, length):
            self._meter.record_bytes_read(len(chunk))
            yield chunk

    def _append_file_range(self, piece: FileRange, file: BinaryIO) -> None:
        with open(piece.path, "rb") as source:
            source.seek(piece.start)
            before = file.tell()
            self._write_chunks(file, _read_chunks(source, piece.length))
        if file.tell() - before != piece.length:
            raise Unavailable(f"{piece.path} ends before the range that was to be copied")

    def _append_object_range(self, piece: ObjectRangeToCopy, file: BinaryIO) -> None:
        # Raises Unavailable if the source is not the expected version before or after the copy, because other programs may write to it.
        path = self._object_path(piece.key)
        self._meter.record_request("copy")
        with translated_os_errors("read", path):
            source = _open_object(path)
        with source:
            _require_source_etag(path, source, piece)
            file.flush()
            done = _append_copied(source, piece, file)
            file.seek(0, os.SEEK_END)
            for chunk in self._read_range(source, piece.start + done, piece.length - done):
                self._write_chunks(file, (chunk,))
                done += len(chunk)
            _require_source_etag(path, source, piece)
            if done != piece.length:
                raise ValueError(f"{path} ends before byte {piece.start + piece.length}, up to which it was to be copied")
            file.flush()
            end = file.seek(0, os.SEEK_END)
            require_equal_copy(
                piece, str(path), self._read_range(file, end - done, done), lambda: self._read_range(source, piece.start, piece.length)
            )
            file.seek(end)

    def _create_object(
        self, key: str, write_content: Callable[[BinaryIO], None], metadata: Mapping[str, str] | None, linkable: Path | None = None
    ) -> ObjectInfo:
        # If the disk is full, release space from the reserve file and try again, as long as it has any.
        described = require_storable_object_metadata(metadata)
        target = self._object_path(key)
        self._meter.record_request("put")
        with translated_os_errors("write", target):
            while True:
                try:
                    return self._create_by_link(key, target, write_content, described, linkable)
                except OSError as error:
                    if error.errno not in FULL or self._reserve is None or not self._reserve.release_part():
                        raise

    def _create_by_link(
        self, key: str, target: Path, write_content: Callable[[BinaryIO], None], metadata: dict[str, str], linkable: Path | None
    ) -> ObjectInfo:
        _require_free_path(target)  # avoids staging a gigabyte for nothing; the link below decides
        with self._temporary_file_with_content(write_content, linkable=linkable) as staged:
            links = staged.lstat().st_nlink
            _create_missing_directories(target.parent)
            companion = _write_metadata_file(staged, target, metadata) if metadata else None
            try:
                os.link(staged, target)
            except FileExistsError:
                # A network file system may answer its own repeated request so: then the link is ours.
                if staged.lstat().st_nlink == links:
                    if companion:
                        companion.unlink(missing_ok=True)
                    _require_free_path(target)
                    raise AlreadyExists(f"{target} existed a moment ago") from None
            _sync_directory(target.parent)
            if self._reserve is not None:
                self._reserve.refill()
            return self._object_info(key, staged.lstat(), metadata)  # the same file; another writer may have deleted the object by now

    def _object_info(self, key: str, status: os.stat_result, metadata: Mapping[str, str]) -> ObjectInfo:
        # In a store of control records ``modified_ms`` is never before the hard link was made (the file's ctime).
        modified_ns = max(status.st_mtime_ns, status.st_ctime_ns) if self._records else status.st_mtime_ns
        return ObjectInfo(key, status.st_size, modified_ns // 1_000_000, _etag_of_file(status), metadata)

    @contextmanager
    def _temporary_file_with_content(
        self, write_content: Callable[[BinaryIO], None], durable: bool = True, linkable: Path | None = None
    ) -> Iterator[Path]:
        """:param linkable: file with the content, which becomes the staged one if it lies on the same file system."""
        folder = self._root / RESERVED / "tmp"
        _create_missing_directories(folder)
        staged = folder / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            is_linked = linkable is not None and self._try_link(linkable, staged)
            with open(staged, "rb" if is_linked else "x+b") as file:
                if not is_linked:
                    write_content(file)
                    file.flush()
                if durable:
                    os.fsync(file.fileno())
            self._delete_stale_staged_files(folder, staged.lstat().st_mtime_ns)
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    def _try_link(self, path: Path, staged: Path) -> bool:
        try:
            os.link(path, staged)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            return False
        # As old as a copy would be: the sweep below takes it for abandoned otherwise.
        os.utime(staged)
        self._meter.record_bytes_written(staged.stat().st_size)
        return True

    def _delete_stale_staged_files(self, folder: Path, now_ns: int) -> None:
        # Sweep files older than an hour, at most once an hour. A writer that pauses for longer finds its file deleted and fails.
        if 0 <= now_ns - self._swept_ns < _STALE_NS:
            return
        self._swept_ns = now_ns
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                if now_ns - entry.stat(follow_symlinks=False).st_mtime_ns > _STALE_NS:
                    os.unlink(entry)


def file_system_type(path: Path) -> str:
    """For example ``ext4`` or ``fuse.gcsfuse``; empty if the system does not say."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    real, longest, found = f"{os.path.realpath(path)}/", "", ""
    for line in mounts:
        about, _, kind = line.partition(" - ")
        point = about.split()[4].replace("\\040", " ").rstrip("/") + "/"
        if real.startswith(point) and len(point) >= len(longest):  # of two at one place the later one counts
            longest, found = point, kind.split()[0]
    return found


class LocalFileLease:
    """A lease of the kernel (fcntl(2), ``F_SETLEASE``): who opens the file for writing, or cuts it, waits for its end, at most
    ``fs.lease-break-time`` (45 s). A mapped file that is cut would end this process.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path

    @staticmethod
    def try_take(file: BinaryIO, path: Path) -> LocalFileLease | None:
        """Close the file, and return None, if somebody has it open for writing, or it is another user's, or the system has no leases."""
        try:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # ignored unless handled; the default would end the process
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except (AttributeError, OSError):
            file.close()
            return None
        return LocalFileLease(file, path)

    def require_unbroken(self) -> None:
        if fcntl.fcntl(self._file, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            raise Unavailable(
                f"another program has opened {self._path} for writing while it was read",
                hint="Objects of a tier never change: find out what writes to its directory, and run verify",
            )

    def close(self) -> None:
        self._file.close()


def _walk_objects(folder: Path, base: str, prefix: str, after: str) -> Iterator[tuple[str, os.stat_result]]:
    # Yield keys in UTF-8 byte order; to get it, a directory is sorted by its name with a slash.
    try:
        with os.scandir(folder) as entries:
            named = sorted((_utf8_sort_key(entry), entry) for entry in entries if not object_key_component_problem(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, entry in named:
        key = base + name
        if name.endswith("/"):
            if (key.startswith(prefix) or prefix.startswith(key)) and (key > after or after.startswith(key)):
                yield from _walk_objects(folder / entry.name, key, prefix, after)
        elif key.startswith(prefix) and key > after:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield key, status


def _utf8_sort_key(entry: os.DirEntry[str]) -> str:
    return entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name


def _open_object(path: Path) -> BinaryIO:
    """Open for reading without following a symbolic link or blocking on a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def _etag_of_file(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _require_source_etag(path: Path, source: BinaryIO, piece: ObjectRangeToCopy) -> None:
    if _etag_of_file(os.fstat(source.fileno())) != piece.etag:
        raise Unavailable(f"{path} is not the version that was to be copied", hint="Something else writes to this tier; run verify")


def _read_chunks(file: BinaryIO, length: int | None) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK if length is None else min(_CHUNK, length)):
        length = None if length is None else length - len(chunk)
        yield chunk


def _append_copied(source: BinaryIO, piece: ObjectRangeToCopy, file: BinaryIO) -> int:
    """Number of bytes appended; 0 if the kernel or the file system cannot copy."""
    done = 0
    if not hasattr(os, "copy_file_range"):
        return done
    end = os.fstat(file.fileno()).st_size
    try:
        while done < piece.length:
            wanted = min(_MOST_COPY_BYTES, piece.length - done)
            copied = os.copy_file_range(source.fileno(), file.fileno(), wanted, piece.start + done, end + done)
            if not copied:
                break
            done += copied
    except OSError as error:
        if error.errno not in _NO_COPY:
            raise
    return done


def _require_free_path(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        raise Refused(f"{target} is a directory, so no object can have its name", hint="No key may be a directory of another key")
    if os.path.lexists(target):
        raise AlreadyExists(f"{target} exists already")


def _metadata_path(path: Path, mtime_ns: int) -> Path:
    # The modification time in the name keeps metadata of an overwritten object from its successor. A long name is replaced by its digest.
    name = path.name if len(os.fsencode(path.name)) <= _LONGEST_NAME else hashlib.sha256(os.fsencode(path.name)).hexdigest()
    return path.parent / RESERVED / f"{name}.{mtime_ns}"


def _read_object_metadata_file(path: Path, status: os.stat_result) -> dict[str, str]:
    try:
        return normalize_metadata_names(json.loads(_metadata_path(path, status.st_mtime_ns).read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise Unavailable(f"the metadata beside {path} cannot be read: {error}", hint="The disk may have lost it; run verify") from error


def _write_metadata_file(staged: Path, target: Path, metadata: dict[str, str]) -> Path:
    # Give the object a unique modification time, which the name of its metadata file contains.
    folder = target.parent / RESERVED
    _create_missing_directories(folder)
    while True:
        mtime_ns = staged.lstat().st_mtime_ns // 1_000_000 * 1_000_000 + uuid.uuid4().int % 1_000_000
        os.utime(staged, ns=(mtime_ns, mtime_ns))
        companion = _metadata_path(target, staged.lstat().st_mtime_ns)  # as the file system rounds it
        try:
            with open(companion, "xb") as file:
                file.write(json.dumps(metadata).encode())
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            # The file system has coarse times: try again with the next one.
            os.utime(staged)
            continue
        _sync_directory(folder)
        return companion


def _create_missing_directories(folder: Path) -> None:
    if folder.is_dir():
        return
    _create_missing_directories(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "an object is where a directory is needed", str(folder)) from None
    _sync_directory(folder.parent)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A few bytes of the disk are reserved for control records. Without them nothing could be deleted from a full disk: what is about to be
# deleted has to be recorded first.

RESERVE_BYTES = 1 << 20
"""As many bytes as some thousand records take; more than `retire` writes before it frees some."""
SLICE_BYTES = RESERVE_BYTES // 16
"""What is given back at a time: enough for a record, little enough that others cannot take much of it."""


class FullDiskReserveFile:
    """File of 1 MiB that is shortened when the disk is full, so that control records can still be written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def refill(self) -> None:
        """Extend the file to its full size if the disk has space."""
        with suppress(OSError):
            if not self._path.exists() or self._path.stat().st_size < RESERVE_BYTES:
                with open(self._path, "ab") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def release_part(self) -> bool:
        """Shorten the file by a sixteenth. Return False if it was empty or missing."""
        try:
            size = self._path.stat().st_size
            if size == 0:
                return False
            os.truncate(self._path, max(0, size - SLICE_BYTES))
        except OSError:
            return False
        return True
