"""SegmentLayout for Aiven's plug-in. Ranged reads fetch and decrypt only the chunks that they need.

*Repeated upload* (determinism, I7). Equal files and settings give equal bytes, so objects of an earlier attempt are compared byte by byte.
If they differ (another zstd version), the segment counts as uploaded if its objects decode to the same files; otherwise the upload fails.
Nothing is deleted, because another process could be about to publish the segment.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeVar

from compactor.adapters.brokers.aiven.manifest import (
    ENCRYPTION_OVERHEAD,
    INDEX_KINDS,
    IV_BYTES,
    MAX_MANIFEST_BYTES,
    OPTIONAL_KIND,
    TAG_BYTES,
    ChunkCipher,
    ChunkIndex,
    CustomMetadata,
    IndexFileRange,
    InvalidAivenDataError,
    PrivateKeyRing,
    SegmentCipherAndWrappedKey,
    SegmentManifest,
    WrappedSegmentKey,
    compress_chunk,
    compressed_chunk_index,
    decode_chunk,
    derive_chunk_iv,
    segment_metadata_for_manifest,
    uncompressed_chunk_index,
)
from compactor.config.settings import AivenSettings, Settings
from compactor.errors import BadData, CompactorError, NotFound, Refused, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.checks import translated_os_errors
from compactor.storage.keys import object_key_problem
from compactor.storage.port import FileLease, ObjectStore
from compactor.tier.contents import (
    READ_BYTES,
    FileContent,
    SegmentObjectNameStem,
    TopicIdOfPartition,
    content_sha256,
    content_size_bytes,
    create_or_match,
    open_content,
    read_chunks,
    segment_object_name_stem,
)
from compactor.tier.ports import ListedObject, SegmentRef, WholeLogUploadLayout

_T = TypeVar("_T")
_MAX_CACHED_SEGMENTS: Final = 256
LOG: Final = "log"
INDEXES: Final = "indexes"
MANIFEST: Final = "rsm-manifest"
SUFFIXES: Final = (LOG, INDEXES, MANIFEST)
"""In the order of upload."""
_FOLDER: Final = re.compile(r"([^/]+)-[A-Za-z0-9_-]{22}/(\d+)/[^/]+")


class ParsedObjectKey(NamedTuple):
    """Object key in parts. suffix: one of SUFFIXES."""

    stem: SegmentObjectNameStem
    suffix: str


class FetchedFilePart(NamedTuple):
    data: bytes
    transferred: int


@dataclass(frozen=True)
class AivenObjectKeys:
    prefix: str
    topic_id: TopicIdOfPartition

    def partition_folder(self, partition: TopicPartition) -> str:
        """Key prefix that ends in a slash, so that partition 1 is not a prefix of partition 10."""
        return f"{self.prefix}{partition.topic}-{self.topic_id(partition)}/{partition.partition}/"

    def key_without_affixes(self, partition: TopicPartition, segment: SegmentRef) -> str:
        return f"{partition.topic}-{self.topic_id(partition)}/{partition.partition}/{segment_object_name_stem(segment)}"

    def object_key(self, partition: TopicPartition, segment: SegmentRef, suffix: str) -> str:
        return f"{self.prefix}{self.key_without_affixes(partition, segment)}.{suffix}"

    def partition_in_key(self, key: str) -> str:
        """Return ``topic-partition``, whatever the topic id is, or an empty string."""
        match = _FOLDER.fullmatch(key.removeprefix(self.prefix)) if key.startswith(self.prefix) else None
        return f"{match[1]}-{match[2]}" if match else ""

    def parse_object_key(self, partition: TopicPartition, key: str) -> ParsedObjectKey | None:
        """Return None if the key is not one of this layout."""
        first, _, suffix = key.removeprefix(self.partition_folder(partition)).partition(".")
        found = SegmentObjectNameStem.parse(first)
        return ParsedObjectKey(found, suffix) if found and suffix in SUFFIXES else None


_BATCH_HEADER_BYTES: Final = 23
_ZSTD_BOUND: Final = 512
_LOG, _INDEX_FILES = 0, 1  # streams of encryption.iv


class SegmentEncoder:
    """Encoder of segments according to [tier.aiven]. An encrypted log is read twice, because its keys depend on its content. Compressed or
    encrypted data is staged beside the log.
    """

    def __init__(self, settings: AivenSettings, keys: AivenObjectKeys, ring: PrivateKeyRing) -> None:
        self._settings = settings
        self._keys = keys
        self._ring = ring

    @contextmanager
    def encoded_objects(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> Iterator[Mapping[str, FileContent]]:
        """Yield the content of a segment's objects by suffix, in the order of upload. Raises BadData if the plug-in could not store the
        segment.
        """
        log = contents["log"]
        self._require_files(partition, segment, contents)
        if not self._settings.active_key_pair and not self._is_compression_needed(log):
            chunks = uncompressed_chunk_index(self._settings.chunk_size, content_size_bytes(log), 0)
            yield self._encode_objects(partition, segment, log, contents, chunks, None)
            return
        staged = None if isinstance(log, bytes) else log.with_name(f"{log.name}.packed")
        try:
            with io.BytesIO() if staged is None else staged.open("w+b") as file:
                chunks, sealed = self._write_chunks(file, segment, contents)
                file.flush()
                body = file.getvalue() if isinstance(file, io.BytesIO) else staged
                assert body is not None  # noqa: S101 - a file has a path
                yield self._encode_objects(partition, segment, body, contents, chunks, sealed)
        finally:
            if staged is not None:
                staged.unlink(missing_ok=True)

    def max_encoding_disk_bytes(self, log_bytes: int) -> int:
        if not self._settings.active_key_pair and self._settings.compression == "none":
            return 0
        chunks = -(-log_bytes // self._settings.chunk_size)
        return (
            log_bytes + log_bytes // 255 + chunks * (ENCRYPTION_OVERHEAD + _ZSTD_BOUND)
        )  # ZSTD_compressBound, where nothing can be compressed

    def custom_metadata(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> CustomMetadata:
        """Custom metadata before the upload. Compresses the log if the size depends on it."""
        fields = self._settings.custom_metadata_fields
        return CustomMetadata(
            self._stored_size_bytes(partition, segment, contents) if "REMOTE_SIZE" in fields else None,
            self._keys.prefix if "OBJECT_PREFIX" in fields else None,
            self._keys.key_without_affixes(partition, segment) if "OBJECT_KEY" in fields else None,
        )

    def _stored_size_bytes(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]) -> int:
        self._require_files(partition, segment, contents)
        log, pair = contents["log"], self._settings.active_key_pair
        overhead = ENCRYPTION_OVERHEAD if pair else 0
        if self._is_compression_needed(log):
            lengths = [len(compress_chunk(chunk)) + overhead for chunk in read_chunks(log, self._settings.chunk_size)]
            chunks = compressed_chunk_index(self._settings.chunk_size, content_size_bytes(log), lengths)
        else:
            chunks = uncompressed_chunk_index(self._settings.chunk_size, content_size_bytes(log), overhead)
        manifest = self._build_manifest(partition, segment, contents, chunks, self._ring.placeholder_segment_key(pair) if pair else None)
        return chunks.stored_size + manifest.indexes_size + len(manifest.encode())

    def _require_files(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]) -> None:
        where = self._keys.object_key(partition, segment, LOG)
        if not content_size_bytes(contents["log"]):
            raise BadData("a log without a byte cannot be tiered: brokers never get past it", segment=where)
        missing = [kind for kind in INDEX_KINDS if kind not in contents and kind != OPTIONAL_KIND]
        if missing:
            raise BadData(f"the segment has no {missing[0]}, without which brokers cannot use it", segment=where)

    def _is_compression_needed(self, log: FileContent) -> bool:
        how = self._settings.compression
        return how == "zstd" or (how == "heuristic" and not _is_first_batch_compressed(log))

    def _write_chunks(
        self, file: BinaryIO, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> tuple[ChunkIndex, SegmentCipherAndWrappedKey | None]:
        # Write the log's chunks, leaving space for encryption, then encrypt them in place.
        log, pair, chunk_size = contents["log"], self._settings.active_key_pair, self._settings.chunk_size
        overhead = ENCRYPTION_OVERHEAD if pair else 0
        squeezed: Callable[[bytes], bytes] = compress_chunk if self._is_compression_needed(log) else bytes
        lengths, digest = [], hashlib.sha256()
        for chunk in read_chunks(log, chunk_size):
            data = squeezed(chunk)
            _digest_framed(digest.update, data)
            file.write(bytes(IV_BYTES) + data + bytes(TAG_BYTES) if pair else data)
            lengths.append(len(data) + overhead)
        size = content_size_bytes(log)
        chunks = (
            compressed_chunk_index(chunk_size, size, lengths)
            if squeezed is compress_chunk
            else uncompressed_chunk_index(chunk_size, size, overhead)
        )
        if not pair:
            return chunks, None
        for _, content in _stored_index_files(contents):
            _digest_framed(digest.update, content)
        sealed = self._ring.derive_segment_key(pair, segment.id, digest.digest())
        at = 0
        for number, length in enumerate(lengths):
            file.seek(at + IV_BYTES)
            data = file.read(length - ENCRYPTION_OVERHEAD)
            file.seek(at)
            file.write(sealed.cipher.encrypt(derive_chunk_iv(_LOG, number), data))
            at += length
        return chunks, sealed

    def _encode_objects(
        self,
        partition: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        log: FileContent,
        contents: Mapping[str, FileContent],
        chunks: ChunkIndex,
        sealed: SegmentCipherAndWrappedKey | None,
    ) -> Mapping[str, FileContent]:
        parts = [
            sealed.cipher.encrypt(derive_chunk_iv(_INDEX_FILES, number), content) if sealed and content else content
            for number, (_, content) in enumerate(_stored_index_files(contents))
        ]
        manifest = self._build_manifest(partition, segment, contents, chunks, sealed.key if sealed else None)
        return {LOG: log, INDEXES: b"".join(parts), MANIFEST: manifest.encode()}

    def _build_manifest(
        self,
        partition: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        contents: Mapping[str, FileContent],
        chunks: ChunkIndex,
        key: WrappedSegmentKey | None,
    ) -> SegmentManifest:
        spans, at = {}, 0
        for kind, content in _stored_index_files(contents):
            spans[kind] = IndexFileRange(at, len(content) + ENCRYPTION_OVERHEAD if key and content else len(content))
            at = spans[kind].end
        about = segment_metadata_for_manifest(partition, self._keys.topic_id(partition), segment, has_transactions="txnindex" in contents)
        return SegmentManifest(chunks, spans, not chunks.fixed, key, about)


def _stored_index_files(contents: Mapping[str, FileContent]) -> list[tuple[str, bytes]]:
    """Index files, which are small: bounded by segment.index.bytes."""
    return [(kind, _read_file_content(contents[kind])) for kind in INDEX_KINDS if kind in contents]


def _read_file_content(content: FileContent) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content


def _digest_framed(update: Callable[[bytes], None], data: bytes) -> None:
    # Add bytes preceded by their length, so that no other division of the bytes gives the same digest.
    update(len(data).to_bytes(8, "big"))
    update(data)


def _is_first_batch_compressed(log: FileContent) -> bool:
    # The plug-in's heuristic (SegmentCompressionChecker).
    with open_content(log) as file:
        head = file.read(_BATCH_HEADER_BYTES)
    if len(head) < _BATCH_HEADER_BYTES:
        return False
    attributes = head[22] if head[16] == 2 else head[17]  # of a batch, or of a message of magic 0 and 1
    return attributes & 7 != 0


@dataclass(frozen=True)
class OpenedSegment:
    """Manifest and object keys of a segment. cipher: None if it is not encrypted."""

    log_key: str
    indexes_key: str
    manifest: SegmentManifest
    cipher: ChunkCipher | None


class AivenLayout(WholeLogUploadLayout):
    """SegmentLayout of Aiven's plug-in. Thread-safe if the store is. Caches a few manifests, which never change."""

    def __init__(self, store: ObjectStore, topic_id: TopicIdOfPartition, settings: AivenSettings) -> None:
        """Raise UsageError if the key prefix is not valid in an object store."""
        if settings.key_prefix and (fault := object_key_problem(f"{settings.key_prefix}x")):
            raise UsageError(f"no object can have the key_prefix {settings.key_prefix!r} under [tier.aiven]: it {fault}")
        self._store = store
        self._keys = AivenObjectKeys(settings.key_prefix, topic_id)
        self._ring = PrivateKeyRing(settings.key_pairs)
        self._packer = SegmentEncoder(settings, self._keys, self._ring)
        self._opened_segments: OrderedDict[tuple[str, int, str], OpenedSegment] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def required_kinds(self) -> frozenset[str]:
        return frozenset(SUFFIXES)

    def partition_folder(self, partition: TopicPartition) -> str:
        return self._keys.partition_folder(partition)

    def object_name(self, partition: TopicPartition, segment: SegmentRef, file_kind: str) -> str:
        suffix = file_kind if file_kind in SUFFIXES else INDEXES
        return self._keys.object_key(partition, segment, suffix)

    def segment_files(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        """Files by kind, from the manifest and without digests if a broker wrote them."""
        if segment.files:
            return segment.files
        return {kind: SegmentFile(size=size) for kind, size in self._open_segment(partition, segment).manifest.plain_file_sizes().items()}

    def read_file(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, start: int = 0, length: int | None = None
    ) -> bytes:
        opened_segment = self._open_segment(partition, segment)
        if file_kind != "log":
            data = self._retry_corrupt_read(lambda: self._read_index_file(partition, segment, opened_segment, file_kind))
            return data[start:] if length is None else data[start : start + length]
        size = opened_segment.manifest.chunks.file_size
        end = size if length is None else min(size, start + length)
        return self._retry_corrupt_read(lambda: self._read_log_bytes(opened_segment, start, end).data) if start < end else b""

    def download_file(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> int:
        opened_segment = self._open_segment(partition, segment)
        travelled = 0
        try:
            with translated_os_errors("write", path), path.open("wb") as file:
                for data, fetched in self._iterate_file_parts(partition, segment, opened_segment, file_kind):
                    file.write(data)
                    travelled += fetched
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return travelled

    def lend_file(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> FileLease | None:
        return None  # objects hold transformed chunks

    def upload_segment(
        self,
        partition: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        contents: Mapping[str, Path | bytes],
        scratch: Path | None = None,
    ) -> str:
        """Create the objects. Return a message about an existing object with other content, or an empty string."""
        with self._packer.encoded_objects(partition, segment, contents) as objects:
            for suffix, content in objects.items():
                key = self._keys.object_key(partition, segment, suffix)
                if not create_or_match(self._store, key, content):
                    return (
                        "" if self._is_uploaded_with_content(partition, segment, contents) else f"{key} exists already with other content"
                    )
        return ""

    def upload_scratch_disk_bytes(self, log_bytes: int) -> int:
        return self._packer.max_encoding_disk_bytes(log_bytes)

    def custom_metadata(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        return self._packer.custom_metadata(partition, segment, contents).encode()

    def stored_segment_problem(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        try:
            opened_segment = self._read_manifest(partition, segment)
            self._require_recorded_sizes(partition, segment, opened_segment)
            for kind, recorded in segment.files.items():
                if recorded.sha256 and self._sha256_of_stored_file(partition, segment, opened_segment, kind) != recorded.sha256:
                    return f"the {kind} in {self.object_name(partition, segment, kind)} has another digest than was recorded"
        except NotFound as error:
            return f"missing: {error}"
        except BadData as error:
            return str(error)
        return ""

    def delete_segments(self, partition: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        keys = []
        for segment in segments:
            keys += [self._keys.object_key(partition, segment, suffix) for suffix in SUFFIXES]
            try:
                custom = _decode_custom_metadata(segment)
            except InvalidAivenDataError:
                continue  # somebody else's: the plug-in would not find these objects by it either
            if custom.object_prefix is not None and custom.object_key in (None, self._keys.key_without_affixes(partition, segment)):
                keys += [
                    f"{custom.object_prefix}{self._keys.key_without_affixes(partition, segment)}.{suffix}" for suffix in (LOG, INDEXES)
                ]
        self._store.delete(list(dict.fromkeys(keys)))

    def list_objects(self, partition: TopicPartition) -> Iterator[ListedObject]:
        for info in self._store.list(self._keys.partition_folder(partition)):
            found = self._keys.parse_object_key(partition, info.key)
            if found:
                stem, suffix = found
                yield ListedObject(info.key, info.size, info.modified_ms, stem.segment_id, stem.start_offset, suffix)
            else:
                yield ListedObject(info.key, info.size, info.modified_ms)

    def partition_in_key(self, key: str) -> str:
        return self._keys.partition_in_key(key)

    def _open_segment(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> OpenedSegment:
        key = (self._keys.object_key(partition, segment, MANIFEST), segment.size_bytes, segment.custom_metadata)
        with self._lock:
            if found := self._opened_segments.get(key):
                self._opened_segments.move_to_end(key)
                return found
        opened_segment = self._retry_corrupt_read(lambda: self._read_manifest(partition, segment))
        with self._lock:
            self._opened_segments[key] = opened_segment
            while len(self._opened_segments) > _MAX_CACHED_SEGMENTS:
                self._opened_segments.popitem(last=False)
        return opened_segment

    def _read_manifest(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> OpenedSegment:
        key = self._keys.object_key(partition, segment, MANIFEST)
        try:
            data = self._store.get(key, 0, MAX_MANIFEST_BYTES + 1)
        except NotFound as error:
            hint = "Without its manifest nothing of a segment can be read: its upload did not finish, or it was deleted meanwhile"
            raise NotFound(error.message, hint=hint) from error
        try:
            manifest = SegmentManifest.decode(data)
            manifest.require_manifest_of_segment(partition, self._keys.topic_id(partition), segment)
            custom = _decode_custom_metadata(segment)
        except InvalidAivenDataError as error:
            raise _invalid_manifest_error(key, error) from error
        try:
            cipher = self._ring.unwrap_segment_key(manifest.key) if manifest.key else None
        except Refused as error:
            raise Refused(f"cannot read {self.url}/{key}: {error.message}", hint=error.hint) from error
        prefix = self._keys.prefix if custom.object_prefix is None else custom.object_prefix
        main = custom.object_key or self._keys.key_without_affixes(partition, segment)
        return OpenedSegment(f"{prefix}{main}.{LOG}", f"{prefix}{main}.{INDEXES}", manifest, cipher)

    def _retry_corrupt_read(self, read: Callable[[], _T]) -> _T:
        # Read once more after BadData, because a bit may have flipped in transit.
        try:
            return read()
        except BadData:
            return read()

    def _read_log_bytes(self, opened_segment: OpenedSegment, start_byte: int, end_byte: int) -> FetchedFilePart:
        """Read bytes [start_byte, end_byte) of the plain log, which must not be empty. Raises BadData."""
        manifest, chunks, key = opened_segment.manifest, opened_segment.manifest.chunks, opened_segment.log_key
        if not manifest.compressed and not opened_segment.cipher:
            data = self._read_exactly(key, start_byte, end_byte - start_byte, is_end_of_object=end_byte == chunks.file_size)
            return FetchedFilePart(data, len(data))
        wanted = [chunks.stored_chunk(number) for number in chunks.chunk_numbers(start_byte, end_byte)]
        first, last = wanted[0], wanted[-1]
        size = last.stored_start + last.stored_size - first.stored_start
        stored = self._read_exactly(key, first.stored_start, size, is_end_of_object=end_byte == chunks.file_size)
        plain = []
        for chunk in wanted:
            at = chunk.stored_start - first.stored_start
            try:
                plain.append(
                    decode_chunk(stored[at : at + chunk.stored_size], chunk.size, opened_segment.cipher, is_compressed=manifest.compressed)
                )
            except InvalidAivenDataError as error:
                raise BadData(str(error), segment=key, position=chunk.start, hint=_RESTORE_HINT) from error
        return FetchedFilePart(b"".join(plain)[start_byte - first.start : end_byte - first.start], size)

    def _read_index_file(self, partition: TopicPartition, segment: SegmentRef, opened_segment: OpenedSegment, file_kind: str) -> bytes:
        span = opened_segment.manifest.indexes.get(file_kind)
        if span is None:
            raise NotFound(f"{self.object_name(partition, segment, file_kind)} holds no {file_kind}")
        if not span.size:
            return b""
        stored = self._read_exactly(
            opened_segment.indexes_key, span.position, span.size, is_end_of_object=span.end == opened_segment.manifest.indexes_size
        )
        try:
            return decode_chunk(
                stored, span.size - opened_segment.manifest.encryption_overhead_bytes, opened_segment.cipher, is_compressed=False
            )
        except InvalidAivenDataError as error:
            raise BadData(f"the {file_kind}: {error}", segment=opened_segment.indexes_key, hint=_RESTORE_HINT) from error

    def _read_exactly(self, key: str, start_byte: int, size_bytes: int, *, is_end_of_object: bool) -> bytes:
        """Raises BadData if the object is shorter, or longer although ``is_end_of_object`` is set."""
        data = self._store.get(key, start_byte, size_bytes + is_end_of_object)
        if len(data) != size_bytes:
            how = "ends at" if len(data) < size_bytes else "goes on behind"
            at = start_byte + min(len(data), size_bytes)
            raise BadData(f"the object {how} {at} bytes, its manifest says {start_byte + size_bytes}", segment=key, hint=_RESTORE_HINT)
        return data

    def _iterate_file_parts(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, opened_segment: OpenedSegment, file_kind: str
    ) -> Iterator[FetchedFilePart]:
        if file_kind != "log":
            data = self._retry_corrupt_read(lambda: self._read_index_file(partition, segment, opened_segment, file_kind))
            yield FetchedFilePart(data, len(data) + (opened_segment.manifest.encryption_overhead_bytes if data else 0))
            return
        chunks = opened_segment.manifest.chunks
        step = max(1, READ_BYTES // chunks.chunk_size) * chunks.chunk_size
        for start in range(0, chunks.file_size, step):
            end = min(start + step, chunks.file_size)
            yield self._reread_log_bytes(opened_segment, start, end)

    def _reread_log_bytes(self, opened_segment: OpenedSegment, start_byte: int, end_byte: int) -> FetchedFilePart:
        return self._retry_corrupt_read(lambda: self._read_log_bytes(opened_segment, start_byte, end_byte))

    def _require_recorded_sizes(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, opened_segment: OpenedSegment) -> None:
        manifest = opened_segment.manifest
        remote = self._store.head(self._keys.object_key(partition, segment, MANIFEST)).size
        for key, size in ((opened_segment.log_key, manifest.chunks.stored_size), (opened_segment.indexes_key, manifest.indexes_size)):
            info = self._store.head(key)
            if info.size != size:
                raise BadData(f"the object has {info.size} bytes, its manifest says {size}", segment=key, hint=_RESTORE_HINT)
            remote += info.size
        sizes = manifest.plain_file_sizes()
        for kind, recorded in segment.files.items():
            if sizes.get(kind) != recorded.size:
                raise BadData(
                    f"the {kind} has {sizes.get(kind, 'no')} bytes, recorded are {recorded.size}", segment=opened_segment.indexes_key
                )
        custom = _decode_custom_metadata(segment)
        if custom.remote_size not in (None, remote):
            raise BadData(f"its objects have {remote} bytes, its custom metadata says {custom.remote_size}", segment=opened_segment.log_key)

    def _sha256_of_stored_file(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, opened_segment: OpenedSegment, file_kind: str
    ) -> str:
        digest = hashlib.sha256()
        for data, _ in self._iterate_file_parts(partition, segment, opened_segment, file_kind):
            digest.update(data)
        return digest.hexdigest()

    def _is_uploaded_with_content(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> bool:
        # Return whether all objects exist and decode to these files. The stored bytes may differ, as with another version of zstd.
        try:
            opened_segment = self._read_manifest(partition, segment)
            sizes = opened_segment.manifest.plain_file_sizes()
            return sizes.keys() == contents.keys() and all(
                self._sha256_of_stored_file(partition, segment, opened_segment, kind) == content_sha256(content)
                for kind, content in contents.items()
            )
        except (NotFound, BadData):
            return False


_RESTORE_HINT: Final = "Restore it from the store's versions or a backup; nothing was changed"


def _invalid_manifest_error(key: str, error: InvalidAivenDataError) -> CompactorError:
    return BadData(str(error), segment=key, hint=_RESTORE_HINT)


def _decode_custom_metadata(segment: SegmentRef) -> CustomMetadata:
    return CustomMetadata.decode(segment.custom_metadata) if isinstance(segment, RemoteLogSegmentMetadata) else CustomMetadata()


def open_layout(settings: Settings, store: ObjectStore, topic_id: TopicIdOfPartition) -> AivenLayout:
    return AivenLayout(store, topic_id, settings.tier.aiven)
