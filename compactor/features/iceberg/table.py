"""Access to one topic's Iceberg table. pyiceberg writes all of the table's metadata.

A commit asserts the snapshot that it was planned from. pyiceberg would repeat a refused commit on the newer snapshot;
``commit.retry.num-retries = 0`` turns that off, because a change must be planned again.
"""

from __future__ import annotations

import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
from pyiceberg import exceptions as iceberg_errors
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.io.pyarrow import PyArrowFileIO, parquet_file_to_data_file, schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.table.update import RemoveSnapshotRefUpdate, RemoveSnapshotsUpdate, ValidatableTableRequirement
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.transforms import IdentityTransform, VoidTransform
from pyiceberg.types import BinaryType, IntegerType, ListType, LongType, NestedField, StringType, StructType, TimestamptzType
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError
from typing_extensions import override

from compactor.config.sections import IcebergTableSettings
from compactor.errors import BadData, Refused, Unavailable, UsageError
from compactor.features.iceberg.plan import (
    ENTRY_PREFIX,
    DataFileName,
    FileOrigin,
    PartitionEntryInSnapshot,
    SnapshotCommitTime,
    SnapshotReference,
    file_origin,
    foreign_rows_error,
    marked_file_id,
    parse_snapshot_entry,
    plan_snapshot_expiry,
    split_expired_references,
    summary_key,
)

ROW_GROUP_BYTES: Final = 64 << 20
"""Size of a row group before compression. It is the memory that a writer of a file takes, and what engines read at once."""

KEY_FILTER_ERRORS: Final = 0.01
"""Share of lookups of absent keys that a row group's Bloom filter lets through. Engines skip all other row groups."""

SCHEMA: Final = Schema(
    NestedField(1, "key", BinaryType(), required=True),
    NestedField(2, "value", BinaryType(), required=True),
    NestedField(3, "partition", IntegerType(), required=True),
    NestedField(4, "offset", LongType(), required=True),
    NestedField(5, "timestamp", TimestamptzType()),
    NestedField(6, "timestamp_type", IntegerType()),
    NestedField(
        7,
        "headers",
        ListType(9, StructType(NestedField(10, "key", StringType()), NestedField(11, "value", BinaryType())), element_required=False),
    ),
    NestedField(8, "leader_epoch", IntegerType()),
    identifier_field_ids=[1, 3],
)
"""Columns of a table. Partition and key identify a row, because a key may occur in two partitions."""

TIER_PROPERTY: Final = "tiered-compactor.tier"
TOPIC_PROPERTY: Final = "tiered-compactor.topic"
PROPERTIES: Final = {
    "format-version": "2",
    "commit.retry.num-retries": "0",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "10",
    "write.parquet.compression-codec": "zstd",
    # Manifests outlive the files that they name. They must hold nothing of keys and values, which `erasure` could not find there.
    "write.metadata.metrics.default": "counts",
    **{f"write.metadata.metrics.column.{name}": "full" for name in ("partition", "offset", "timestamp", "timestamp_type", "leader_epoch")},
}

NEWEST_FORMAT: Final = 2
"""Newest format version of tables that pyiceberg can write."""

DECODED_COLUMNS: Final = {"key": "decoded_key", "value": "decoded_value"}
"""Names of the typed columns, by the column that holds the bytes."""

ERROR_COLUMN: Final = "decoding_error"
"""Column with the reason why a key or value has no typed columns; null if they have. Tables with typed columns have it."""

MAX_COLUMNS: Final = 1000
"""Most columns of a table, nested ones included. JSON objects with ever new names must not make the table's metadata grow for ever."""
DeletedFileCountAndNextExpiryMs = tuple[int, int | None]
"""Number of deleted files, and when the next snapshot may expire, in milliseconds; None if none waits."""
DeletedFileCountAndYoungestMs = tuple[int, int | None]
"""Number of deleted files, and when the youngest of the orphans that stay was written, in milliseconds; None if none stays."""
PathKeyAndSnapshotIds = tuple[str, bytes | None, tuple[int, ...]]
"""Path of a data file, a key that it has (None: it may have any), and the ids of the snapshots that name the file."""


class TableChanged(Unavailable):
    """Raised if another process has committed to the table meanwhile."""


@contextmanager
def _convert_iceberg_errors(table_name: str) -> Iterator[None]:
    try:
        yield
    except (iceberg_errors.CommitFailedException, iceberg_errors.ValidationException, iceberg_errors.TableAlreadyExistsError) as error:
        raise TableChanged(f"table {table_name} was changed meanwhile: {error}") from error
    except iceberg_errors.NotInstalledError as error:
        raise UsageError(f"the catalog of table {table_name} needs a package: {error}") from error
    except (iceberg_errors.UnauthorizedError, iceberg_errors.ForbiddenError, PermissionError) as error:
        raise Refused(f"table {table_name}: {error}") from error
    except (OSError, SQLAlchemyError, iceberg_errors.RESTError, iceberg_errors.NoSuchTableError) as error:
        raise Unavailable(f"table {table_name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class TopicTable:
    """A topic's Iceberg table as last read. name: with its namespace."""

    name: str
    table: Table

    def column_type(self, name: str) -> pa.DataType | None:
        field = next((field for field in self.table.schema().fields if field.name == name), None)
        return None if field is None else schema_to_pyarrow(Schema(field)).field(0).type

    @property
    def free_column_count(self) -> int:
        """Nested columns included."""
        return MAX_COLUMNS - len(self.table.schema().column_names)

    def add_columns(self, columns: pa.Schema) -> None:
        """Add or widen columns by Iceberg's rules. Raises TableChanged."""
        before = self.current_snapshot
        try:
            with _convert_iceberg_errors(self.name), self.table.update_schema() as update:
                update.union_by_name(columns)
        except ValueError as error:
            raise TableChanged(f"table {self.name} has other columns meanwhile: {error}") from error
        if self.current_snapshot != before:
            raise TableChanged(f"table {self.name} was changed meanwhile")

    @property
    def current_snapshot(self) -> Snapshot | None:
        return self.table.current_snapshot()

    def count_undecoded_rows(self, files: Iterable[DataFile]) -> int:
        column = next((field.field_id for field in self.table.schema().fields if field.name == ERROR_COLUMN), -1)
        return sum((file.value_counts or {}).get(column, 0) - (file.null_value_counts or {}).get(column, 0) for file in files)

    def copy_without_catalog(self) -> TopicTable:
        """For another machine that writes files."""
        table = self.table
        return TopicTable(
            self.name, Table(table.name(), table.metadata, table.metadata_location, table.io, NoopCatalog(table.catalog.name))
        )

    def partition_entry(self, partition: int) -> PartitionEntryInSnapshot | None:
        """From the latest snapshot of this program. Raises BadData."""
        properties = _snapshot_properties(self._latest_own_snapshot())
        return parse_snapshot_entry(properties.get(summary_key(partition)), self.name)

    @property
    def is_changed_by_others(self) -> bool:
        return self.current_snapshot is not None and not _is_own_commit(self.current_snapshot)

    def is_partition_changed(self, partition: int) -> bool:
        """Compared with the latest snapshot of this program. Raises BadData if another program wrote rows or deletes of rows into the
        current snapshot, in any partition.
        """
        return self.is_changed_by_others and summary_key(partition) not in self._entries_of_unchanged_partitions()

    def data_files_of_partition(self, partition: int) -> dict[str, DataFile]:
        """In the current snapshot, by path. Raises BadData if rows are deleted by position or by key, which this program never does."""
        return self._scan_data_files(f"partition == {partition}", None)

    def _scan_data_files(self, row_filter: str | BooleanExpression, snapshot_id: int | None) -> dict[str, DataFile]:
        """By path; None: the current snapshot. Raises BadData if it has deletes of rows."""
        deleted = BadData(
            "rows were deleted in it by another program",
            segment=f"table {self.name}",
            hint="Roll it back to a snapshot before, or drop it to have it written anew",
        )
        with _convert_iceberg_errors(self.name):
            try:
                tasks = list(self.table.scan(row_filter, snapshot_id=snapshot_id).plan_files())
            except (ValueError, RuntimeError) as error:  # deletes by key, which pyiceberg does not read
                raise deleted from error
        if any(task.delete_files for task in tasks):
            raise deleted
        return {task.file.file_path: task.file for task in tasks}

    def write_data_file(self, name: DataFileName, batches: Iterator[pa.RecordBatch]) -> DataFile | None:
        """All batches have the same columns. Return None, and write nothing, if there are no rows."""
        first = next(batches, None)
        if first is None:
            return None
        with _convert_iceberg_errors(self.name):
            path = self.table.location_provider().new_data_location(name.file_name_with_nonce(self._new_marked_id().hex))
            schema = schema_to_pyarrow(Schema(*(self.table.schema().find_field(column) for column in first.schema.names)))
            groups = _row_groups(itertools.chain([first], batches))
            first_group = next(groups)
            key_filter = {"ndv": sum(map(len, first_group)), "fpp": KEY_FILTER_ERRORS}  # later groups have about as many rows
            try:
                with (
                    self.table.io.new_output(path).create() as stream,
                    pq.ParquetWriter(
                        stream, schema, compression="zstd", write_page_index=True, bloom_filter_options={"key": key_filter}
                    ) as writer,
                ):
                    for group in itertools.chain([first_group], groups):
                        writer.write_table(pa.Table.from_batches(group).cast(schema), row_group_size=1 << 30)
                return self._manifest_entry(path)
            except BaseException:
                self.table.io.delete(path)
                raise

    def _manifest_entry(self, path: str) -> DataFile:
        """Lowest and highest timestamp are left out if one is after the year 9999, because pyiceberg cannot convert such times. Raises
        UsageError if its rows have several values of a partition field.
        """
        metadata = self.table.metadata.model_copy(update={"properties": self.table.properties | PROPERTIES})
        without = {**metadata.properties, "write.metadata.metrics.column.timestamp": "counts"}
        try:
            try:
                return parquet_file_to_data_file(self.table.io, metadata, path)
            except OverflowError:
                return parquet_file_to_data_file(self.table.io, metadata.model_copy(update={"properties": without}), path)
        except ValueError as error:
            raise UsageError(f"table {self.name}: {error}", hint="Remove the field from the table's partition spec") from error

    def read_file_keys(self, path: str) -> Iterator[pa.Array]:
        """Keys are of type large_binary. A file of another program's deletes has none."""
        with _convert_iceberg_errors(self.name), self.table.io.new_input(path).open() as stream, pq.ParquetFile(stream) as file:
            for batch in file.iter_batches(columns=["key"]) if "key" in file.schema_arrow.names else ():
                yield batch.column(0).cast(pa.large_binary())

    def commit_snapshot(self, entries: dict[int, PartitionEntryInSnapshot], added: Sequence[DataFile], removed: Sequence[DataFile]) -> None:
        """Commit one snapshot on top of the one that was current when this table was read.

        :param entries: new ones. Those of other partitions are copied, because their snapshot will expire, unless another program has
            changed their files since.
        :raises TableChanged: if there is a newer snapshot. :raises Unavailable: if the commit may or may not have taken effect.
        """
        own = {summary_key(partition): entry.model_dump_json() for partition, entry in entries.items()}
        with (
            _convert_iceberg_errors(self.name),
            self.table.transaction() as transaction,
            _SnapshotAddingAndRemovingFiles(
                operation=Operation.OVERWRITE if self.current_snapshot else Operation.APPEND,
                transaction=transaction,
                io=self.table.io,
                commit_uuid=self._new_marked_id(),
                snapshot_properties=self._entries_of_unchanged_partitions() | own,
            ) as producer,
        ):
            for file in added:
                producer.append_data_file(file)
            for file in removed:
                producer.delete_data_file(file)

    @property
    def snapshot_count(self) -> int:
        return len(self.table.snapshots())

    @property
    def reason_to_keep_files(self) -> str:
        """Why no snapshot expires and no file is deleted. ``gc.enabled`` forbids both in Iceberg's own library, too."""
        value = self.table.properties.get("gc.enabled", "true")
        return "" if value.lower() == "true" else f"gc.enabled={value} keeps superseded snapshots and the files of killed writers"

    def expire_snapshots(self, keep_ms: int, now_ms: int) -> DeletedFileCountAndNextExpiryMs:
        """Expire the snapshots that were superseded at least ``keep_ms`` ago, and branches and tags older than their ``max-ref-age-ms``.
        Then delete the files that only these name: manifests, and this program's data files.

        :raises TableChanged: if a new branch or tag names one of the snapshots, or another process has expired them.
        """
        if self.reason_to_keep_files:
            return 0, None
        old_references, expired, next_ms = self._plan_expiry(keep_ms, now_ms)
        if not expired and not old_references:
            return 0, next_ms
        with _convert_iceberg_errors(self.name):
            gone = [one for one in self.table.snapshots() if one.snapshot_id in expired]
            try:
                unused = self._file_paths_of_snapshots(gone)
            except FileNotFoundError as error:  # another process has expired them
                raise TableChanged(f"table {self.name} was changed meanwhile: {error}") from error
            self._commit_expiry(set(expired), old_references)
            # After the commit, when no new snapshot, branch or tag can name the expired snapshots.
            unused -= self._file_paths_of_snapshots([*self.table.snapshots(), *self._snapshots_tagged_meanwhile(gone, old_references)])
            deleted = [path for path in unused if path.endswith(".avro") or DataFileName.from_data_file_path(path)]
            for path in deleted:
                with suppress(FileNotFoundError):
                    self.table.io.delete(path)
            return len(deleted), next_ms

    def _plan_expiry(self, keep_ms: int, now_ms: int) -> tuple[set[str], list[int], int | None]:
        references, default_age = self.table.metadata.refs, self.table.properties.get("history.expire.max-ref-age-ms")
        ages = {name: one.max_ref_age_ms or (int(default_age) if default_age else None) for name, one in references.items()}
        made_ms = {one.snapshot_id: one.timestamp_ms for one in self.table.snapshots()}
        old, next_reference_ms = split_expired_references(
            (SnapshotReference(name, one.snapshot_id, ages[name]) for name, one in references.items()), made_ms, now_ms
        )
        held = {one.snapshot_id for name, one in references.items() if name not in old}
        # Its entries are in no later snapshot as long as nothing was committed after another program's commit.
        held |= {one.snapshot_id for one in [self._latest_own_snapshot()] if one is not None}
        snapshots = (
            SnapshotCommitTime(one.snapshot_id, one.timestamp_ms, one.snapshot_id in held, one.parent_snapshot_id)
            for one in self.table.snapshots()
        )
        expired, next_ms = plan_snapshot_expiry(snapshots, keep_ms, now_ms)
        return old, expired, min((ms for ms in (next_ms, next_reference_ms) if ms is not None), default=None)

    def _commit_expiry(self, expired: set[int], old_references: set[str]) -> None:
        known = {name: self.table.metadata.refs[name] for name in old_references}
        required = (_SnapshotsUnnamed(snapshot_ids=expired, known=known),)
        updates = [*(RemoveSnapshotRefUpdate(ref_name=name) for name in sorted(old_references))]
        try:
            with self.table.transaction() as transaction:
                transaction._apply(
                    (*updates, *([RemoveSnapshotsUpdate(snapshot_ids=sorted(expired))] if expired else [])),
                    () if isinstance(self.table.catalog, RestCatalog) else required,  # type: ignore[arg-type] # a kind of our own
                )
        except ValueError as error:  # a snapshot is gone
            raise TableChanged(f"table {self.name} was changed meanwhile: {error}") from error

    def _snapshots_tagged_meanwhile(self, gone: Sequence[Snapshot], old_references: set[str]) -> list[Snapshot]:
        """Expired snapshots that a branch or tag named before the expiry. A REST server does not know ``_SnapshotsUnnamed`` and drops such
        a name; the files stay, so that the snapshot can be restored.
        """
        if not isinstance(self.table.catalog, RestCatalog) or not self.table.metadata.metadata_log:
            return []
        before = FromInputFile.table_metadata(self.table.io.new_input(self.table.metadata.metadata_log[-1].metadata_file))
        named = {one.snapshot_id for name, one in before.refs.items() if name not in old_references}
        return [one for one in gone if one.snapshot_id in named]

    def delete_orphan_files(self, partition: int, older_than_ms: int) -> DeletedFileCountAndYoungestMs:
        """Delete orphans (files that no snapshot names) that this program wrote for this table before ``older_than_ms``: data files of the
        partition, manifests, and metadata of commits that never took effect. A file of an earlier version, whose name does not tell its
        table, is deleted if no other table has been at this table's location.

        Call it only when the table shows the partition's current view: a slower process then fails to commit an older view, so that its
        files are not needed.
        """
        io, provider = self.table.io, self.table.location_provider()
        if not isinstance(io, PyArrowFileIO) or self.reason_to_keep_files:
            return 0, None
        with _convert_iceberg_errors(self.name):
            listed = [*_list_files_under_location(io, provider.data_path), *_list_files_under_location(io, provider.metadata_path)]
            self.table.refresh()  # after the files were listed, so that each of them was committed before or is an orphan
            used = {path.rpartition("/")[2] for path in self._file_paths_of_snapshots(self.table.snapshots())}
            current = [self.table.metadata_location, *(entry.metadata_file for entry in self.table.metadata.metadata_log)]
            used |= {path.rpartition("/")[2] for path in current}
            rest = [
                (store, one, one.mtime_ns // 1_000_000) for store, one in listed if one.base_name not in used and one.mtime_ns is not None
            ]
            origins = {one.base_name: self._origin_of_partition_file(one.base_name, partition) for _, one, _ in rest}
            deletable = {FileOrigin.THIS_TABLE}
            if FileOrigin.UNMARKED in origins.values() and self._is_alone(one.base_name for _, one in listed):
                deletable.add(FileOrigin.UNMARKED)
            orphans = [(store, one.path, made_ms) for store, one, made_ms in rest if origins[one.base_name] in deletable]
            old = [(store, path) for store, path, made_ms in orphans if made_ms < older_than_ms]
            for store, path in old:
                store.delete_file(path)
        return len(old), max((made_ms for _, _, made_ms in orphans if made_ms >= older_than_ms), default=None)

    def _origin_of_partition_file(self, name: str, partition: int) -> FileOrigin:
        """By name or, for metadata, by content. Data files of other partitions are OTHER: their processes may still be writing."""
        if (data := DataFileName.from_data_file_path(name)) is not None and data.partition != partition:
            return FileOrigin.OTHER
        if not name.endswith(".metadata.json"):
            return file_origin(name, self.table.metadata.table_uuid)
        metadata = self._read_metadata_file(name)
        if metadata is None or metadata.table_uuid != self.table.metadata.table_uuid or (last := metadata.current_snapshot()) is None:
            return FileOrigin.OTHER
        of = file_origin(last.manifest_list.rpartition("/")[2], metadata.table_uuid)
        is_failed_commit = of is not FileOrigin.OTHER and self.table.snapshot_by_id(last.snapshot_id) is None
        return FileOrigin.THIS_TABLE if is_failed_commit else FileOrigin.OTHER

    def _is_alone(self, names: Iterable[str]) -> bool:
        """Return whether all metadata files at the location are the table's own. Another table may have been renamed and be in use."""
        if not self.table.properties.keys().isdisjoint({"write.data.path", "write.metadata.path"}):
            return False  # metadata of other tables with the same place for data may lie elsewhere
        found = [self._read_metadata_file(name) for name in names if name.endswith(".metadata.json")]
        return all(one is not None and one.table_uuid == self.table.metadata.table_uuid for one in found)

    def _read_metadata_file(self, name: str) -> TableMetadata | None:
        try:
            return FromInputFile.table_metadata(self.table.io.new_input(self.table.location_provider().new_metadata_location(name)))
        except (iceberg_errors.ValidationError, ValueError, FileNotFoundError):
            return None

    def find_files_with_keys(self, keys: Collection[bytes]) -> Iterator[PathKeyAndSnapshotIds]:
        """Yield (path, key, ids of the snapshots that name the file) for each of the keys in a data file, or in a file of deletes by key.

        A file that is not Parquet is another program's, is not read, and may have any key.
        """
        formats: dict[str, FileFormat] = {}
        snapshots: dict[str, set[int]] = defaultdict(set)
        with _convert_iceberg_errors(self.name):
            for snapshot in self.table.snapshots():
                for manifest in snapshot.manifests(self.table.io):
                    for entry in manifest.fetch_manifest_entry(self.table.io, discard_deleted=True):
                        if entry.data_file.content is not DataFileContent.POSITION_DELETES:
                            formats[entry.data_file.file_path] = entry.data_file.file_format
                            snapshots[entry.data_file.file_path].add(snapshot.snapshot_id)
        wanted = pa.array(sorted(keys), pa.large_binary())
        for path, file_format in sorted(formats.items()):
            found: list[bytes | None] = [None]
            if file_format is FileFormat.PARQUET:
                found = [*sorted({key for array in self.read_file_keys(path) for key in array.filter(pc.is_in(array, wanted)).to_pylist()})]
            for key in found:
                yield path, key, tuple(sorted(snapshots[path]))

    def _latest_own_snapshot(self) -> Snapshot | None:
        """Commits of others do not copy entries."""
        snapshot = self.current_snapshot
        while snapshot is not None and not _is_own_commit(snapshot):
            snapshot = self.table.snapshot_by_id(snapshot.parent_snapshot_id) if snapshot.parent_snapshot_id is not None else None
        return snapshot

    def _entries_of_unchanged_partitions(self) -> dict[str, str]:
        """From the latest snapshot of this program, without partitions whose files another program has removed since. Raises BadData if
        another program has added rows or deletes since, in any partition.
        """
        own = self._latest_own_snapshot()
        entries = {key: text for key, text in _snapshot_properties(own).items() if key.startswith(ENTRY_PREFIX)}
        if not self.is_changed_by_others:
            return entries
        present = self._own_paths_by_partition(None)
        known = self._own_paths_by_partition(own.snapshot_id) if own is not None else {}
        changed = {partition for partition in present.keys() | known.keys() if present.get(partition) != known.get(partition)}
        return {key: text for key, text in entries.items() if int(key.removeprefix(ENTRY_PREFIX)) not in changed}

    def _own_paths_by_partition(self, snapshot_id: int | None) -> dict[int, set[str]]:
        """Paths in a snapshot (None: the current one). Raises BadData if another program wrote one of them, or deleted rows."""
        paths: dict[int, set[str]] = defaultdict(set)
        for path in self._scan_data_files(AlwaysTrue(), snapshot_id):
            if (name := DataFileName.from_data_file_path(path)) is None:
                raise foreign_rows_error(path)
            paths[name.partition].add(path)
        return paths

    def _new_marked_id(self) -> uuid.UUID:
        return marked_file_id(self.table.metadata.table_uuid, uuid.uuid4().hex)  # noqa: TID251 - no other file has it

    def _file_paths_of_snapshots(self, snapshots: Iterable[Snapshot]) -> set[str]:
        paths: set[str] = set()
        for snapshot in snapshots:
            paths.add(snapshot.manifest_list)
            for manifest in snapshot.manifests(self.table.io):
                if manifest.manifest_path not in paths:
                    paths.add(manifest.manifest_path)
                    paths.update(entry.data_file.file_path for entry in manifest.fetch_manifest_entry(self.table.io, discard_deleted=True))
        return paths


class _SnapshotsUnnamed(ValidatableTableRequirement):
    """Requirement that only known branches and tags name certain snapshots: pyiceberg would remove a later name with the snapshot."""

    type: Literal["assert-snapshots-unnamed"] = "assert-snapshots-unnamed"
    snapshot_ids: set[int]
    known: dict[str, SnapshotRef]

    @override
    def validate(self, base_metadata: TableMetadata | None) -> None:  # type: ignore[override] # as pyiceberg's own
        references = base_metadata.refs.items() if base_metadata is not None else ()
        named = [name for name, one in references if one.snapshot_id in self.snapshot_ids and self.known.get(name) != one]
        if named:
            raise iceberg_errors.CommitFailedException(f"snapshots that would expire are named {', '.join(named)} meanwhile")


class _SnapshotAddingAndRemovingFiles(_OverwriteFiles):
    """Snapshot without manifests that list no file any more, which pyiceberg would carry over for ever."""

    @override
    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        return [one for one in manifests if one.has_added_files() or one.has_existing_files() or one.added_snapshot_id == self.snapshot_id]


@contextmanager
def open_table_loader(
    settings: IcebergTableSettings,
    tier_id: str,
    topic: str,
    *,
    create_if_missing: bool,
    before_creation: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], TopicTable | None]]:
    """Yield a function that reads a topic's table, None if there is none.

    :param before_creation: may raise an error.
    :raises UsageError: if the table is another topic's or another tier's, or does not have the columns of this program.
    """
    with _convert_iceberg_errors(settings.table):
        catalog = _load_catalog(settings)
    try:
        yield lambda: _load_table(catalog, settings.table, tier_id, topic, before_creation if create_if_missing else None)
    finally:
        close = getattr(catalog, "close", None)
        if close is not None:
            close()


def _load_catalog(settings: IcebergTableSettings) -> Catalog:
    """A new SQL catalog makes its two tables first, unless another process makes them meanwhile."""
    name, properties = str(settings.catalog.get("name", "compacted")), _catalog_properties(settings)
    for _ in range(2):
        with suppress(OperationalError, ProgrammingError, IntegrityError):  # "table already exists", in the words of each database
            return load_catalog(name, **properties)
    return load_catalog(name, **properties)


def _catalog_properties(settings: IcebergTableSettings) -> dict[str, Any]:
    own = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.catalog.items() if key != "name"}
    return {"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO", **({"warehouse": settings.warehouse} if settings.warehouse else {}), **own}


def shared_table_error(table_name: str, topics: Sequence[str]) -> UsageError:
    hint = f'Name a table for each, for example [outputs.iceberg.topics."{topics[0]}"] table = "..."'
    return UsageError(f"topics {' and '.join(topics)} would have one table, {table_name}", hint=hint)


def _load_table(
    catalog: Catalog, table_name: str, tier_id: str, topic: str, before_creation: Callable[[], None] | None
) -> TopicTable | None:
    with _convert_iceberg_errors(table_name):
        if not catalog.table_exists(table_name):
            if before_creation is None:
                return None
            before_creation()
            with suppress(IntegrityError):  # another process creates it in a SQL catalog at the same time
                catalog.create_namespace_if_not_exists(table_name.rpartition(".")[0])
            spec = PartitionSpec(PartitionField(3, 1000, IdentityTransform(), "partition"))
            own = {TIER_PROPERTY: tier_id, TOPIC_PROPERTY: topic}
            catalog.create_table_if_not_exists(table_name, SCHEMA, partition_spec=spec, properties=PROPERTIES | own)
        table = catalog.load_table(table_name)
    properties = table.properties
    if (properties.get(TIER_PROPERTY), properties.get(TOPIC_PROPERTY)) != (tier_id, topic):
        owner = f"topic {properties.get(TOPIC_PROPERTY)}" if TIER_PROPERTY in properties else "another program"
        owner += " of another tier" if properties.get(TIER_PROPERTY, tier_id) != tier_id else ""
        raise UsageError(f"table {table_name} belongs to {owner}", hint="Name another table for this topic under [outputs.iceberg]")
    _require_writable_layout(table_name, table)
    changed = [key for key in ("commit.retry.num-retries",) if properties.get(key) != PROPERTIES[key]]
    columns = {field.name: (field.field_type, field.required) for field in table.schema().fields}
    changed += [field.name for field in SCHEMA.fields if columns.get(field.name, ())[:1] != (field.field_type,)]
    if changed:
        raise UsageError(
            f"table {table_name} was altered: {', '.join(changed)}", hint="Set it back, or drop the table to have it written anew"
        )
    return TopicTable(table_name, table)


def _require_writable_layout(table_name: str, table: Table) -> None:
    if table.format_version > NEWEST_FORMAT:
        raise UsageError(
            f"table {table_name} has format-version {table.format_version}, and {NEWEST_FORMAT} is the newest that can be written",
            hint="Drop the table to have it written anew, or name another table for this topic under [outputs.iceberg]",
        )
    own = {*(field.name for field in SCHEMA.fields), *DECODED_COLUMNS.values(), ERROR_COLUMN}
    for field in table.spec().fields:
        column = table.schema().find_column_name(field.source_id) or ""
        top_level = column.partition(".")[0]
        is_constant = isinstance(field.transform, IdentityTransform) and top_level in {"partition", "timestamp_type"}
        if top_level in own and not is_constant and not isinstance(field.transform, VoidTransform):
            raise UsageError(
                f"table {table_name} is partitioned by {field.name} ({field.transform} of {column}), which may differ within a file",
                hint="Remove the field from the table's partition spec; identity of partition and of timestamp_type may stay",
            )


def _list_files_under_location(io: PyArrowFileIO, location: str) -> list[tuple[pa.fs.FileSystem, pa.fs.FileInfo]]:
    scheme, netloc, path = PyArrowFileIO.parse_location(location, io.properties)
    store = io.fs_by_scheme(scheme, netloc)
    found = store.get_file_info(pa.fs.FileSelector(path, allow_not_found=True, recursive=True))
    return [(store, one) for one in found if one.type == pa.fs.FileType.File]


def _snapshot_properties(snapshot: Snapshot | None) -> dict[str, str]:
    return {} if snapshot is None or snapshot.summary is None else dict(snapshot.summary.additional_properties)


def _is_own_commit(snapshot: Snapshot) -> bool:
    return any(key.startswith(ENTRY_PREFIX) for key in _snapshot_properties(snapshot))


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size >= ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
