"""SegmentLayout for Aiven's plug-in. Ranged reads fetch and decrypt only the chunks that they need.

*Repeated upload* (determinism, I7). Equal files and settings give equal bytes, encrypted or not (see ``encryption``), so objects of an
earlier attempt are compared byte by byte. If they differ (another zstd version, other settings), the segment counts as uploaded if its
manifest exists and the described objects decode to the same files. Otherwise the upload fails with the object's name. Nothing is deleted,
because another process could be about to finish and publish the segment.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from compactor.config.settings import AivenSettings
from compactor.errors import BadData, CompactorError, NotFound, Refused, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.keys import key_problem
from compactor.storage.os_errors import file_errors
from compactor.storage.port import ObjectStore
from compactor.tier.contents import READ_BYTES, FileContent, content_sha256, create_object
from compactor.tier.layouts.aiven.chunk_index import InvalidDataError
from compactor.tier.layouts.aiven.custom_metadata import CustomMetadata
from compactor.tier.layouts.aiven.encryption import KeyRing
from compactor.tier.layouts.aiven.manifest import MAX_MANIFEST_BYTES, Manifest
from compactor.tier.layouts.aiven.packing import INDEXES, LOG, MANIFEST, SUFFIXES, ObjectKeys, Packer
from compactor.tier.layouts.aiven.transform import ChunkCipher, restore_chunk
from compactor.tier.names import TopicIdOf
from compactor.tier.ports import ListedObject, NonComposableLayout, SegmentRef

_T = TypeVar("_T")
_MAX_CACHED_SEGMENTS: Final = 256


@dataclass(frozen=True)
class OpenedSegment:
    """Manifest, object keys and unwrapped data key of a segment."""

    log_key: str
    indexes_key: str
    manifest: Manifest
    cipher: ChunkCipher | None


class AivenLayout(NonComposableLayout):
    """SegmentLayout of Aiven's plug-in. Thread-safe if the store is. Caches a few manifests, which never change."""

    def __init__(self, store: ObjectStore, topic_id: TopicIdOf, settings: AivenSettings) -> None:
        """Raises UsageError if the key prefix is not valid in an object store."""
        if settings.key_prefix and (fault := key_problem(f"{settings.key_prefix}x")):
            raise UsageError(f"no object can have the key_prefix {settings.key_prefix!r} under [tier.aiven]: it {fault}")
        self._store = store
        self._keys = ObjectKeys(settings.key_prefix, topic_id)
        self._ring = KeyRing(settings.key_pairs)
        self._packer = Packer(settings, self._keys, self._ring)
        self._opened_segments: OrderedDict[tuple[str, int, str], OpenedSegment] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def required_parts(self) -> frozenset[str]:
        return frozenset(SUFFIXES)

    def partition_folder(self, name: TopicPartition) -> str:
        return self._keys.partition_folder(name)

    def object_name(self, name: TopicPartition, segment: SegmentRef, kind: str) -> str:
        suffix = kind if kind in SUFFIXES else INDEXES
        return self._keys.object_key(name, segment, suffix)

    def segment_files(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        """Return a segment's files by kind. If a broker wrote them, they are taken from the manifest and have no digests."""
        if segment.files:
            return segment.files
        return {kind: SegmentFile(size=size) for kind, size in self._open_segment(name, segment).manifest.sizes().items()}

    def read_file(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, start: int = 0, length: int | None = None
    ) -> bytes:
        opened = self._open_segment(name, segment)
        if kind != "log":
            data = self._retry_corrupt_read(lambda: self._read_index_file(name, segment, opened, kind))
            return data[start:] if length is None else data[start : start + length]
        size = opened.manifest.chunks.file_size
        end = size if length is None else min(size, start + length)
        return self._retry_corrupt_read(lambda: self._read_log_bytes(opened, start, end)[0]) if start < end else b""

    def download_file(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, path: Path) -> int:
        opened = self._open_segment(name, segment)
        travelled = 0
        try:
            with file_errors("write", path), path.open("wb") as file:
                for data, fetched in self._file_pieces(name, segment, opened, kind):
                    file.write(data)
                    travelled += fetched
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return travelled

    def upload_segment(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        """Create the segment's three objects: log, indexes and manifest.

        Compressed or encrypted data is staged beside the log, which needs as much disk again.
        """
        with self._packer.packed_objects(name, segment, contents) as packed:
            for suffix, content in packed.objects.items():
                key = self._keys.object_key(name, segment, suffix)
                if not create_object(self._store, key, content):
                    return "" if self._is_uploaded(name, segment, contents) else f"{key} exists already with other content"
        return ""

    def upload_space_bytes(self, log_bytes: int) -> int:
        return self._packer.packing_space_bytes(log_bytes)

    def custom_metadata(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        return self._packer.custom_metadata(name, segment, contents).encode()

    def stored_segment_problem(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        """Return why a stored segment is not as recorded, or an empty string.

        Compares the sizes of its three objects, and the content of files with a recorded digest.
        """
        try:
            opened = self._read_manifest(name, segment)
            self._check_objects(name, segment, opened)
            for kind, recorded in segment.files.items():
                if recorded.sha256 and self._file_digest(name, segment, opened, kind) != recorded.sha256:
                    return f"the {kind} in {self.object_name(name, segment, kind)} has another digest than was recorded"
        except NotFound as error:
            return f"missing: {error}"
        except BadData as error:
            return str(error)
        return ""

    def delete_segments(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        """Delete a segment's objects under the configured prefix, and those that its custom metadata names under an older prefix."""
        keys = []
        for segment in segments:
            keys += [self._keys.object_key(name, segment, suffix) for suffix in SUFFIXES]
            try:
                custom = _decode_custom_metadata(segment)
            except InvalidDataError:
                continue  # somebody else's: the plug-in would not find these objects by it either
            if custom.object_prefix is not None and custom.object_key in (None, self._keys.main_path(name, segment)):
                keys += [f"{custom.object_prefix}{self._keys.main_path(name, segment)}.{suffix}" for suffix in (LOG, INDEXES)]
        self._store.delete(list(dict.fromkeys(keys)))

    def list_objects(self, name: TopicPartition) -> Iterator[ListedObject]:
        for info in self._store.list(self._keys.partition_folder(name)):
            found = self._keys.parse_object_key(name, info.key)
            if found:
                stem, suffix = found
                yield ListedObject(info.key, info.size, info.modified_ms, stem.segment_id, stem.start_offset, suffix)
            else:
                yield ListedObject(info.key, info.size, info.modified_ms)

    def partition_of(self, key: str) -> str:
        return self._keys.partition_of(key)

    def _open_segment(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> OpenedSegment:
        """Return a segment's manifest and cipher, from the cache if possible."""
        key = (self._keys.object_key(name, segment, MANIFEST), segment.size_bytes, segment.custom_metadata)
        with self._lock:
            if found := self._opened_segments.get(key):
                self._opened_segments.move_to_end(key)
                return found
        opened = self._retry_corrupt_read(lambda: self._read_manifest(name, segment))
        with self._lock:
            self._opened_segments[key] = opened
            while len(self._opened_segments) > _MAX_CACHED_SEGMENTS:
                self._opened_segments.popitem(last=False)
        return opened

    def _read_manifest(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> OpenedSegment:
        """Read a segment's manifest and unwrap its data key. Raises NotFound, BadData, or Refused if the key cannot be unwrapped."""
        key = self._keys.object_key(name, segment, MANIFEST)
        try:
            data = self._store.get(key, 0, MAX_MANIFEST_BYTES + 1)
        except NotFound as error:
            hint = "Without its manifest nothing of a segment can be read: its upload did not finish, or it was deleted meanwhile"
            raise NotFound(error.message, hint=hint) from error
        try:
            manifest = Manifest.decode(data)
            manifest.check_is_of(name, self._keys.topic_id(name), segment)
            custom = _decode_custom_metadata(segment)
        except InvalidDataError as error:
            raise _invalid_manifest_error(key, error) from error
        try:
            cipher = self._ring.segment_cipher(manifest.key) if manifest.key else None
        except Refused as error:
            raise Refused(f"cannot read {self.url}/{key}: {error.message}", hint=error.hint) from error
        prefix = self._keys.prefix if custom.object_prefix is None else custom.object_prefix
        main = custom.object_key or self._keys.main_path(name, segment)
        return OpenedSegment(f"{prefix}{main}.{LOG}", f"{prefix}{main}.{INDEXES}", manifest, cipher)

    def _retry_corrupt_read(self, read: Callable[[], _T]) -> _T:
        """Call ``read``, and once more if it raises BadData, because a bit may have flipped in transit."""
        try:
            return read()
        except BadData:
            return read()

    def _read_log_bytes(self, opened: OpenedSegment, start: int, end: int) -> tuple[bytes, int]:
        """Return bytes [start, end) of the log and the number of bytes transferred. ``start`` must be less than ``end``. Raises BadData."""
        manifest, chunks, key = opened.manifest, opened.manifest.chunks, opened.log_key
        if not manifest.compressed and not opened.cipher:
            data = self._read_exactly(key, start, end - start, is_end=end == chunks.file_size)
            return data, len(data)
        wanted = [chunks.chunk(number) for number in chunks.chunk_numbers(start, end)]
        first, last = wanted[0], wanted[-1]
        size = last.stored_start + last.stored_size - first.stored_start
        stored = self._read_exactly(key, first.stored_start, size, is_end=end == chunks.file_size)
        plain = []
        for chunk in wanted:
            at = chunk.stored_start - first.stored_start
            try:
                plain.append(restore_chunk(stored[at : at + chunk.stored_size], chunk.size, opened.cipher, compressed=manifest.compressed))
            except InvalidDataError as error:
                raise BadData(str(error), segment=key, position=chunk.start, hint=_RESTORE_HINT) from error
        return b"".join(plain)[start - first.start : end - first.start], size

    def _read_index_file(self, name: TopicPartition, segment: SegmentRef, opened: OpenedSegment, kind: str) -> bytes:
        """Return the plain content of one index file. Raises NotFound if the segment has none of this kind."""
        span = opened.manifest.indexes.get(kind)
        if span is None:
            raise NotFound(f"{self.object_name(name, segment, kind)} holds no {kind}")
        if not span.size:
            return b""
        stored = self._read_exactly(opened.indexes_key, span.position, span.size, is_end=span.end == opened.manifest.indexes_size)
        try:
            return restore_chunk(stored, span.size - opened.manifest.overhead, opened.cipher, compressed=False)
        except InvalidDataError as error:
            raise BadData(f"the {kind}: {error}", segment=opened.indexes_key, hint=_RESTORE_HINT) from error

    def _read_exactly(self, key: str, start: int, size: int, *, is_end: bool) -> bytes:
        """Return ``size`` bytes of an object. Raises BadData if it is shorter, or longer although ``is_end`` is set."""
        data = self._store.get(key, start, size + is_end)
        if len(data) != size:
            how = "ends at" if len(data) < size else "goes on behind"
            at = start + min(len(data), size)
            raise BadData(f"the object {how} {at} bytes, its manifest says {start + size}", segment=key, hint=_RESTORE_HINT)
        return data

    def _file_pieces(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, opened: OpenedSegment, kind: str
    ) -> Iterator[tuple[bytes, int]]:
        """Yield one file in pieces, in order, each with the number of bytes transferred."""
        if kind != "log":
            data = self._retry_corrupt_read(lambda: self._read_index_file(name, segment, opened, kind))
            yield data, len(data) + (opened.manifest.overhead if data else 0)
            return
        chunks = opened.manifest.chunks
        step = max(1, READ_BYTES // chunks.chunk_size) * chunks.chunk_size
        for start in range(0, chunks.file_size, step):
            end = min(start + step, chunks.file_size)
            yield self._read_log_range(opened, start, end)

    def _read_log_range(self, opened: OpenedSegment, start: int, end: int) -> tuple[bytes, int]:
        """Return bytes [start, end) of the log and the number of bytes transferred, with one retry."""
        return self._retry_corrupt_read(lambda: self._read_log_bytes(opened, start, end))

    def _check_objects(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, opened: OpenedSegment) -> None:
        """Raise NotFound or BadData if an object is absent or has another size than recorded."""
        manifest = opened.manifest
        remote = self._store.head(self._keys.object_key(name, segment, MANIFEST)).size
        for key, size in ((opened.log_key, manifest.chunks.stored_size), (opened.indexes_key, manifest.indexes_size)):
            info = self._store.head(key)
            if info.size != size:
                raise BadData(f"the object has {info.size} bytes, its manifest says {size}", segment=key, hint=_RESTORE_HINT)
            remote += info.size
        sizes = manifest.sizes()
        for kind, recorded in segment.files.items():
            if sizes.get(kind) != recorded.size:
                raise BadData(f"the {kind} has {sizes.get(kind, 'no')} bytes, recorded are {recorded.size}", segment=opened.indexes_key)
        custom = _decode_custom_metadata(segment)
        if custom.remote_size not in (None, remote):
            raise BadData(f"its objects have {remote} bytes, its custom metadata says {custom.remote_size}", segment=opened.log_key)

    def _file_digest(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, opened: OpenedSegment, kind: str) -> str:
        """Read a stored file, decrypted and decompressed, and return its SHA-256 as hex digits."""
        digest = hashlib.sha256()
        for data, _ in self._file_pieces(name, segment, opened, kind):
            digest.update(data)
        return digest.hexdigest()

    def _is_uploaded(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]) -> bool:
        """Return whether the segment is stored completely and with this content, though in other bytes."""
        try:
            opened = self._read_manifest(name, segment)
            sizes = opened.manifest.sizes()
            return sizes.keys() == contents.keys() and all(
                self._file_digest(name, segment, opened, kind) == content_sha256(content) for kind, content in contents.items()
            )
        except (NotFound, BadData):
            return False


_RESTORE_HINT: Final = "Restore it from the store's versions or a backup; nothing was changed"


def _invalid_manifest_error(key: str, error: InvalidDataError) -> CompactorError:
    return BadData(str(error), segment=key, hint=_RESTORE_HINT)


def _decode_custom_metadata(segment: SegmentRef) -> CustomMetadata:
    """Decode the segment's custom metadata. Raises InvalidDataError."""
    return CustomMetadata.decode(segment.custom_metadata) if isinstance(segment, RemoteLogSegmentMetadata) else CustomMetadata()
