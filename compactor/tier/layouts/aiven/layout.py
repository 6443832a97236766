"""The tier of Aiven's plug-in as a SegmentLayout: ranged reads fetch and decrypt the chunks that they need, and no more.

*Uploading again* (I7). The same files and settings make the same bytes, encrypted or not (see ``encryption``), so what an earlier
attempt left is compared byte by byte. Where it differs (another zstd, other settings), the segment counts as done if its manifest
is there and everything that it describes reads back as the files that were to be uploaded. Else the answer names the object, and
the id is given up: nothing is deleted here, because another process could be about to finish and publish it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from compactor.config import Aiven
from compactor.errors import BadData, CompactorError, NotFound, Refused, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.deleting import delete_keys
from compactor.storage.keys import key_fault
from compactor.storage.os_errors import file_errors
from compactor.storage.port import ObjectStore
from compactor.tier.contents import PIECE_BYTES, FileContent, create, digest_of
from compactor.tier.layouts.aiven.chunk_index import Misfit
from compactor.tier.layouts.aiven.custom_metadata import CustomMetadata
from compactor.tier.layouts.aiven.encryption import KeyRing
from compactor.tier.layouts.aiven.keys import INDEXES, LOG, MANIFEST, SUFFIXES, ObjectKeys
from compactor.tier.layouts.aiven.manifest import MAX_BYTES, Manifest
from compactor.tier.layouts.aiven.packing import Packer
from compactor.tier.layouts.aiven.transform import ChunkCipher, restore
from compactor.tier.names import TopicIdOf
from compactor.tier.ports import ListedObject, SegmentRef
from compactor.tier.whole import WrittenWhole

_T = TypeVar("_T")
_KEPT: Final = 256


@dataclass(frozen=True)
class OpenedSegment:
    """What reading a segment needs: its manifest, and its data key unwrapped."""

    log_key: str
    indexes_key: str
    manifest: Manifest
    cipher: ChunkCipher | None


class AivenLayout(WrittenWhole):
    """SegmentLayout. Usable by as many threads as the store. Manifests never change, so a few are kept."""

    def __init__(self, store: ObjectStore, topic_id: TopicIdOf, settings: Aiven) -> None:
        """Raises UsageError for a key prefix that no store can have."""
        if settings.key_prefix and (fault := key_fault(f"{settings.key_prefix}x")):
            raise UsageError(f"no object can have the key_prefix {settings.key_prefix!r} under [tier.aiven]: it {fault}")
        self._store = store
        self._keys = ObjectKeys(settings.key_prefix, topic_id)
        self._ring = KeyRing(settings.key_pairs)
        self._packer = Packer(settings, self._keys, self._ring)
        self._kept: OrderedDict[tuple[str, int, str], OpenedSegment] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(SUFFIXES)

    def folder(self, name: TopicPartition) -> str:
        return self._keys.folder(name)

    def where(self, name: TopicPartition, segment: SegmentRef, kind: str) -> str:
        suffix = kind if kind in SUFFIXES else INDEXES
        return self._keys.key(name, segment, suffix)

    def files(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        """Where a broker wrote them: from the manifest, without digests."""
        if segment.files:
            return segment.files
        return {kind: SegmentFile(size=size) for kind, size in self._opened(name, segment).manifest.sizes().items()}

    def read(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, start: int = 0, length: int | None = None) -> bytes:
        opened = self._opened(name, segment)
        if kind != "log":
            data = self._once_more(lambda: self._index_file(name, segment, opened, kind))
            return data[start:] if length is None else data[start : start + length]
        size = opened.manifest.chunks.file_size
        end = size if length is None else min(size, start + length)
        return self._once_more(lambda: self._log_bytes(opened, start, end)[0]) if start < end else b""

    def download(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, path: Path) -> int:
        opened = self._opened(name, segment)
        travelled = 0
        try:
            with file_errors("write", path), path.open("wb") as file:
                for data, fetched in self._pieces(name, segment, opened, kind):
                    file.write(data)
                    travelled += fetched
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return travelled

    def upload(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        """Stages what is compressed or encrypted beside the log: as much disk again."""
        with self._packer.packed(name, segment, contents) as packed:
            for suffix, content in packed.objects.items():
                key = self._keys.key(name, segment, suffix)
                if not create(self._store, key, content):
                    return "" if self._reads_back(name, segment, contents) else f"{key} exists already with other content"
        return ""

    def upload_room(self, log_bytes: int) -> int:
        return self._packer.room(log_bytes)

    def custom_metadata(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        return self._packer.custom_metadata(name, segment, contents).encode()

    def problem(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        """Sizes of all three objects; files with a recorded digest are read."""
        try:
            opened = self._fresh(name, segment)
            self._check_objects(name, segment, opened)
            for kind, recorded in segment.files.items():
                if recorded.sha256 and self._digest(name, segment, opened, kind) != recorded.sha256:
                    return f"the {kind} in {self.where(name, segment, kind)} has another digest than was recorded"
        except NotFound as error:
            return f"missing: {error}"
        except BadData as error:
            return str(error)
        return ""

    def delete(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        """As the plug-in does, by the configured prefix; and what custom metadata says of the same objects under an older prefix."""
        keys = []
        for segment in segments:
            keys += [self._keys.key(name, segment, suffix) for suffix in SUFFIXES]
            try:
                custom = _custom_metadata(segment)
            except Misfit:
                continue  # somebody else's: the plug-in would not find these objects by it either
            if custom.object_prefix is not None and custom.object_key in (None, self._keys.main_path(name, segment)):
                keys += [f"{custom.object_prefix}{self._keys.main_path(name, segment)}.{suffix}" for suffix in (LOG, INDEXES)]
        delete_keys(self._store, list(dict.fromkeys(keys)))

    def list(self, name: TopicPartition) -> Iterator[ListedObject]:
        for info in self._store.list(self._keys.folder(name)):
            found = self._keys.parse(name, info.key)
            if found:
                stem, suffix = found
                yield ListedObject(info.key, info.size, info.modified_ms, stem.segment_id, stem.start_offset, suffix)
            else:
                yield ListedObject(info.key, info.size, info.modified_ms)

    def partition_of(self, key: str) -> str:
        return self._keys.partition_of(key)

    def _opened(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> OpenedSegment:
        key = (self._keys.key(name, segment, MANIFEST), segment.size_bytes, segment.custom_metadata)
        with self._lock:
            if found := self._kept.get(key):
                self._kept.move_to_end(key)
                return found
        opened = self._once_more(lambda: self._fresh(name, segment))
        with self._lock:
            self._kept[key] = opened
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return opened

    def _fresh(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> OpenedSegment:
        """Raises NotFound, BadData, Refused where its data key cannot be unwrapped."""
        key = self._keys.key(name, segment, MANIFEST)
        try:
            data = self._store.get(key, 0, MAX_BYTES + 1)
        except NotFound as error:
            hint = "Without its manifest nothing of a segment can be read: its upload did not finish, or it was deleted meanwhile"
            raise NotFound(error.message, hint=hint) from error
        try:
            manifest = Manifest.decode(data)
            manifest.check_is_of(name, self._keys.topic_id(name), segment)
            custom = _custom_metadata(segment)
        except Misfit as error:
            raise _bad_manifest(key, error) from error
        try:
            cipher = self._ring.cipher(manifest.key) if manifest.key else None
        except Refused as error:
            raise Refused(f"cannot read {self.url}/{key}: {error.message}", hint=error.hint) from error
        prefix = self._keys.prefix if custom.object_prefix is None else custom.object_prefix
        main = custom.object_key or self._keys.main_path(name, segment)
        return OpenedSegment(f"{prefix}{main}.{LOG}", f"{prefix}{main}.{INDEXES}", manifest, cipher)

    def _once_more(self, read: Callable[[], _T]) -> _T:
        """A bit that flips on its way is no damage in the store."""
        try:
            return read()
        except BadData:
            return read()

    def _log_bytes(self, opened: OpenedSegment, start: int, end: int) -> tuple[bytes, int]:
        """Bytes [start, end) of the log, ``start`` < ``end``, inside it; and the bytes that travelled. Raises BadData."""
        manifest, chunks, key = opened.manifest, opened.manifest.chunks, opened.log_key
        if not manifest.compressed and not opened.cipher:
            data = self._exactly(key, start, end - start, is_end=end == chunks.file_size)
            return data, len(data)
        wanted = [chunks.chunk(number) for number in chunks.numbers(start, end)]
        first, last = wanted[0], wanted[-1]
        size = last.stored_start + last.stored_size - first.stored_start
        stored = self._exactly(key, first.stored_start, size, is_end=end == chunks.file_size)
        plain = []
        for chunk in wanted:
            at = chunk.stored_start - first.stored_start
            try:
                plain.append(restore(stored[at : at + chunk.stored_size], chunk.size, opened.cipher, compressed=manifest.compressed))
            except Misfit as error:
                raise BadData(str(error), segment=key, position=chunk.start, hint=_DAMAGED) from error
        return b"".join(plain)[start - first.start : end - first.start], size

    def _index_file(self, name: TopicPartition, segment: SegmentRef, opened: OpenedSegment, kind: str) -> bytes:
        span = opened.manifest.indexes.get(kind)
        if span is None:
            raise NotFound(f"{self.where(name, segment, kind)} holds no {kind}")
        if not span.size:
            return b""
        stored = self._exactly(opened.indexes_key, span.position, span.size, is_end=span.end == opened.manifest.indexes_size)
        try:
            return restore(stored, span.size - opened.manifest.overhead, opened.cipher, compressed=False)
        except Misfit as error:
            raise BadData(f"the {kind}: {error}", segment=opened.indexes_key, hint=_DAMAGED) from error

    def _exactly(self, key: str, start: int, size: int, *, is_end: bool) -> bytes:
        """``is_end``: where the object must end. Raises BadData where it ends earlier or later."""
        data = self._store.get(key, start, size + is_end)
        if len(data) != size:
            how = "ends at" if len(data) < size else "goes on behind"
            at = start + min(len(data), size)
            raise BadData(f"the object {how} {at} bytes, its manifest says {start + size}", segment=key, hint=_DAMAGED)
        return data

    def _pieces(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, opened: OpenedSegment, kind: str
    ) -> Iterator[tuple[bytes, int]]:
        """One file, in order, with the bytes that travelled for each piece."""
        if kind != "log":
            data = self._once_more(lambda: self._index_file(name, segment, opened, kind))
            yield data, len(data) + (opened.manifest.overhead if data else 0)
            return
        chunks = opened.manifest.chunks
        step = max(1, PIECE_BYTES // chunks.chunk_size) * chunks.chunk_size
        for start in range(0, chunks.file_size, step):
            end = min(start + step, chunks.file_size)
            yield self._log_range(opened, start, end)

    def _log_range(self, opened: OpenedSegment, start: int, end: int) -> tuple[bytes, int]:
        return self._once_more(lambda: self._log_bytes(opened, start, end))

    def _check_objects(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, opened: OpenedSegment) -> None:
        """Raises NotFound, BadData."""
        manifest = opened.manifest
        remote = self._store.head(self._keys.key(name, segment, MANIFEST)).size
        for key, size in ((opened.log_key, manifest.chunks.stored_size), (opened.indexes_key, manifest.indexes_size)):
            info = self._store.head(key)
            if info.size != size:
                raise BadData(f"the object has {info.size} bytes, its manifest says {size}", segment=key, hint=_DAMAGED)
            remote += info.size
        sizes = manifest.sizes()
        for kind, recorded in segment.files.items():
            if sizes.get(kind) != recorded.size:
                raise BadData(f"the {kind} has {sizes.get(kind, 'no')} bytes, recorded are {recorded.size}", segment=opened.indexes_key)
        custom = _custom_metadata(segment)
        if custom.remote_size not in (None, remote):
            raise BadData(f"its objects have {remote} bytes, its custom metadata says {custom.remote_size}", segment=opened.log_key)

    def _digest(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, opened: OpenedSegment, kind: str) -> str:
        digest = hashlib.sha256()
        for data, _ in self._pieces(name, segment, opened, kind):
            digest.update(data)
        return digest.hexdigest()

    def _reads_back(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]) -> bool:
        """Whether the segment is there already, whole and with this content, though in other bytes."""
        try:
            opened = self._fresh(name, segment)
            sizes = opened.manifest.sizes()
            return sizes.keys() == contents.keys() and all(
                self._digest(name, segment, opened, kind) == digest_of(content) for kind, content in contents.items()
            )
        except (NotFound, BadData):
            return False


_DAMAGED: Final = "Restore it from the store's versions or a backup; nothing was changed"


def _bad_manifest(key: str, error: Misfit) -> CompactorError:
    return BadData(str(error), segment=key, hint=_DAMAGED)


def _custom_metadata(segment: SegmentRef) -> CustomMetadata:
    """Raises Misfit."""
    return CustomMetadata.decode(segment.custom_metadata) if isinstance(segment, RemoteLogSegmentMetadata) else CustomMetadata()
