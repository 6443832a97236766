"""Data files of a table, and the typed columns of decoded keys and values.

1. The types of a batch's values are merged into those of the table's columns: fields are added and types widened by Iceberg's rules, so
   that existing files stay readable.
2. If the table lacks columns, no batch is written: they are added when all rows were read, and the file is restarted.
3. Else rows are written. A part of a value that has no place in the columns is left out of its row, with the reason.

Types are merged once per batch if its values match each other, and otherwise once per row, in time that depends on the row alone.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np
import pyarrow as pa
from typing_extensions import override

from bloom.filter import hash_keys, siphash_key_halves
from compactor.access.tier import Tier
from compactor.cleaner.keys import KeyHashSet
from compactor.decoding import DecodedKeyOrValue, FieldFormat, KeyAndValueDecoder, TimeOutOfRange, logical_type
from compactor.errors import BadData, CompactorError
from compactor.features.iceberg.plan import DataFileName, ViewSlice
from compactor.features.iceberg.table import DECODED_COLUMNS, ERROR_COLUMN, MAX_COLUMNS, TopicTable
from compactor.kernels.common import Hashes, HashKeyHalves
from compactor.model.ids import TopicPartition
from compactor.read.columns import to_arrow_batch
from compactor.read.ranges import PREFETCHED_PIECES
from compactor.read.reading import LastRecordOfEachKeyRequest, OffsetRangeReader, OffsetRangeToRead, ReadOptions, hash_keys_of_rows
from compactor.read.records import SelectedRecords

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile


BYTES_PER_KEY: Final = 20
"""Memory of one key in a ``KeyHashSet``, at most."""

_COLUMNS: Final = pa.schema(
    [
        ("key", pa.binary()), ("value", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")), ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))), ("leaderEpoch", pa.int32()),
    ]
)  # fmt: skip
"""The columns of a table as ``to_arrow_batch`` makes them, in the table's order."""

TYPED_ROWS: Final = 1024
"""Most rows whose types are merged at once: if each has other fields, pyarrow makes as many columns, of as many rows each."""

_NAMES: Final = ("key", "value", "partition", "offset", "timestamp", "timestamp_type", "headers", "leader_epoch")


@dataclass(frozen=True)
class DataFileWriteTask:
    """Task to write one slice's data file. inflate_limit: largest size of an uncompressed batch, in bytes."""

    file: DataFileName
    extent: OffsetRangeToRead
    inflate_limit: int

    @property
    def max_slice_records(self) -> int:
        """An upper bound, because brokers do not report the number."""
        return self.extent.segments[0].records or self.extent.last - self.extent.first + 1


@dataclass(frozen=True)
class DataFilesToWrite:
    """Data files of one update of a partition.

    others: files that stay in the table. No key of theirs may be written again.
    turn: selects the range of key hashes that is compared, if memory does not suffice for all keys.
    """

    tier: Tier
    partition: TopicPartition
    table: TopicTable
    tasks: Sequence[DataFileWriteTask]
    others: Sequence[DataFile]
    turn: int


class DataFileWriter(Protocol):
    def write_data_files(self, files: DataFilesToWrite, out_files_by_slice: dict[ViewSlice, DataFile | None]) -> float:
        """Return which share (0 to 1) of the keys was checked to be unique in the partition.

        :param out_files_by_slice: receives each file as soon as it is complete; None for a slice without rows.
        :raises BadData: if a key occurs twice. :raises LogChanged: if the log was truncated meanwhile.
        """


class LocalDataFileWriter:
    def write_data_files(self, files: DataFilesToWrite, out_files_by_slice: dict[ViewSlice, DataFile | None]) -> float:
        budget = files.tier.cleaner_settings_for_topic(files.partition.topic).map_budget_bytes
        check = _KeyUniquenessCheck(files, budget, sum(task.max_slice_records for task in files.tasks))
        for task in files.tasks:
            each = task.file.slice
            try:
                out_files_by_slice[each] = write_slice_file(files.tier, files.table, task, partial(check.add_keys_of_records, each))
            except TableColumnsMissing as error:
                files.table.add_columns(error.columns)
                out_files_by_slice[each] = write_slice_file(files.tier, files.table, task)  # whose keys are added
        for file in files.others if files.tasks else ():
            for keys in files.table.read_file_keys(file.file_path):
                check.require_keys_unwritten(keys, file.file_path)
        return check.checked_share_of_keys


def _ignore_records(selection: SelectedRecords) -> None: ...


def write_slice_file(
    tier: Tier, table: TopicTable, task: DataFileWriteTask, on_records: Callable[[SelectedRecords], None] = _ignore_records
) -> DataFile | None:
    """Write the records of a slice that have a key and a value to a data file. If there are none, write nothing and return None.

    :param on_records: receives all committed records, also tombstones and records without a key.
    :raises TableColumnsMissing: after all records were read, if the table lacks columns for their decoded keys or values.
    :raises LogChanged: if the log was truncated meanwhile. Raises BadData, StoreError.
    """
    options = ReadOptions(True, task.inflate_limit, requests_in_advance=PREFETCHED_PIECES)
    settings = tier.settings.outputs.iceberg.iceberg_table_settings(task.extent.partition.topic)
    decoded_format_by_field = settings.decoded_format_by_field if settings is not None else {}
    typed = TypedColumnBuilder(table, KeyAndValueDecoder(tier.settings), decoded_format_by_field) if decoded_format_by_field else None

    def read_slice_batches() -> Iterator[pa.RecordBatch]:
        for selection in OffsetRangeReader(tier, task.extent, options).read_selected_records():
            on_records(selection)
            rows, picked = selection.rows, selection.picked
            found = picked[(rows.key_length[picked] >= 0) & (rows.value_length[picked] >= 0)]
            if len(found):
                batch = to_arrow_batch(replace(selection, picked=found), *task.extent.partition, _COLUMNS)
                batch = batch.rename_columns(list(_NAMES))
                if typed is None:
                    yield batch
                    continue
                for first in range(0, len(batch), TYPED_ROWS):
                    part = typed.add_typed_columns(batch.slice(first, TYPED_ROWS))
                    if not typed.lacks_columns:
                        yield part
        if typed and typed.lacks_columns:
            raise typed.missing_columns_error()

    return table.write_data_file(task.file, read_slice_batches())


def hashes_of_key_column(keys: pa.Array, hash_key_halves: HashKeyHalves) -> Hashes:
    """Keys are of type large_binary."""
    starts = np.frombuffer(keys.buffers()[1], np.int64)[keys.offset : keys.offset + len(keys) + 1]
    hashes = np.empty((len(keys), 2), np.uint64)
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    hash_keys(data, starts[:-1], np.diff(starts).astype(np.int32), *hash_key_halves, hashes)
    return hashes


def duplicate_key_error(partition: TopicPartition, object_name: str, offset: int = -1) -> BadData:
    """For the key's second occurrence. offset: -1 if unknown."""
    cause = f"{partition}: a key occurs twice below the cleaner offset, so that its last value is not known"
    return BadData(cause, segment=object_name, offset=offset, hint="`verify` and `explain` with the key say more; the table stays as it is")


class _KeyUniquenessCheck:
    """Check that no key occurs twice below the cleaner offset.

    If the hashes of the written keys need more than the memory budget, each update of the table checks only one range of hashes, and
    ``DataFilesToWrite.turn`` selects it.
    """

    def __init__(self, files: DataFilesToWrite, budget_bytes: int, record_count: int) -> None:
        self._name = files.partition
        self.ranges = max(1, -(-record_count * BYTES_PER_KEY // budget_bytes))
        self._options = LastRecordOfEachKeyRequest(files.turn % self.ranges, self.ranges, budget_bytes)
        self._halves = siphash_key_halves(files.tier.identity.temporary_hash_key())
        self._keys = KeyHashSet(max(budget_bytes, 1 << 16)) if record_count else None
        self._added = self._skipped = 0

    @property
    def checked_share_of_keys(self) -> float:
        return (1 - self._skipped / max(self._added, 1)) / self.ranges

    def add_keys_of_records(self, view_slice: ViewSlice, selection: SelectedRecords) -> None:
        """Tombstones included. Raises BadData if one was added before."""
        hashes, rows = hash_keys_of_rows(selection, view_slice.first, view_slice.last, self._options, self._halves)
        new = np.empty(len(hashes), np.bool_)
        if self._keys is not None:
            done = self._keys.insert_keys_until_full(hashes, new)
            self._added, self._skipped = self._added + len(hashes), self._skipped + len(hashes) - done
            if not new[:done].all():
                offset = int(selection.rows.offset[rows[np.flatnonzero(~new[:done])[0]]])
                raise duplicate_key_error(self._name, f"segment {view_slice.segment_id}", offset)

    def require_keys_unwritten(self, keys: pa.Array, path: str) -> None:
        """Raise BadData if a key (large_binary) of a file that stays in the table is among the added ones."""
        hashes, held = hashes_of_key_column(keys, self._halves), np.empty(len(keys), np.bool_)
        if self._keys is not None:
            self._keys.flag_contained_keys(hashes, held)
            if held.any():
                raise duplicate_key_error(self._name, path)


MAX_DEPTH: Final = 32
"""Most levels of structs, lists and maps in each other. Of 70 structs, pyiceberg 0.12 writes metadata that it cannot read, and of 50 lists,
pyarrow writes files that it cannot read.
"""
MAX_DIGITS: Final = 38
"""Most digits of a decimal in Iceberg."""
REASONS_PER_ROW: Final = 3
MAX_PATH: Final = 200
_INEXACT_DOUBLE: Final = 2**53
_MISMATCH = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""Exceptions of pyarrow for values that do not match a type, or have no common type."""


class TableColumnsMissing(CompactorError):
    """Raised if the table lacks columns, or has some of too narrow types."""

    def __init__(self, columns: pa.Schema) -> None:
        super().__init__("the table lacks columns")
        self.columns = columns


@dataclass(slots=True, eq=False)
class ColumnType:
    """Type of a column, its part, or a value: one of the first four fields is set.

    item: type of a list's elements, or of a map's values if ``is_map``; the keys of maps are texts.
    is_stored: the table has it, so that only widening by Iceberg's rules is allowed.
    """

    plain: pa.DataType | None = None
    fields: dict[str, ColumnType] | None = None
    item: ColumnType | None = None
    is_map: bool = False
    untyped: str = ""
    is_stored: bool = False
    lower_names: set[str] = field(default_factory=set)

    @classmethod
    def struct(cls, fields: Iterable[tuple[str, ColumnType | None]], *, is_stored: bool = False) -> Self | None:
        """Return a struct of the fields whose type is not None, if any."""
        found = {name: each for name, each in fields if each is not None}
        return cls(fields=found, is_stored=is_stored, lower_names={name.lower() for name in found}) if found else None

    @property
    def parts(self) -> Iterable[ColumnType]:
        return self.fields.values() if self.fields is not None else (self.item,) if self.item is not None else ()

    def height(self) -> int:
        return 1 + max((part.height() for part in self.parts), default=0)

    def column_count(self) -> int:
        """Number of columns that a table counts, this one included."""
        return 1 + self.is_map + sum(part.column_count() for part in self.parts)

    def arrow_type(self) -> pa.DataType:
        if self.fields is not None:
            return pa.struct([(name, each.arrow_type()) for name, each in self.fields.items()])
        if self.item is not None:
            return pa.map_(pa.string(), self.item.arrow_type()) if self.is_map else pa.list_(self.item.arrow_type())
        return self.plain

    @override
    def __str__(self) -> str:
        if self.plain is None:
            return "struct" if self.fields is not None else "map" if self.is_map else "list"
        return _ICEBERG_NAMES.get(self.plain, str(self.plain))


_ICEBERG_NAMES: Final = {
    pa.bool_(): "boolean", pa.int32(): "int", pa.int64(): "long", pa.float32(): "float", pa.float64(): "double", pa.date32(): "date",
    pa.time64("us"): "time", pa.timestamp("us", "UTC"): "timestamptz", pa.timestamp("us"): "timestamp",
}  # fmt: skip
_PLAIN_TYPES: Final = {*_ICEBERG_NAMES, pa.string(), pa.binary()}
_SHORT_FORMS: Final = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
_TOO_DEEP: Final = f"it is nested more than {MAX_DEPTH} levels deep"


def type_of_arrow(data_type: pa.DataType, *, is_stored: bool = False, depth: int = 1) -> ColumnType | None:
    """Type; None if pyarrow's says nothing about values, such as that of nulls and of empty lists."""
    if depth > MAX_DEPTH + 1:
        return ColumnType(untyped=_TOO_DEEP)
    if pa.types.is_null(data_type):
        return None
    if pa.types.is_struct(data_type):
        parts = ((each.name, type_of_arrow(each.type, is_stored=is_stored, depth=depth + 1)) for each in data_type)
        return ColumnType.struct(parts, is_stored=is_stored)
    is_map = pa.types.is_map(data_type)
    if is_map or pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        item = type_of_arrow(data_type.item_type if is_map else data_type.value_type, is_stored=is_stored, depth=depth + 1)
        return None if item is None else ColumnType(item=item, is_map=is_map, is_stored=is_stored)
    plain = _SHORT_FORMS.get(data_type, data_type)
    if plain in _PLAIN_TYPES or pa.types.is_decimal(plain) or pa.types.is_fixed_size_binary(plain):
        return ColumnType(plain, is_stored=is_stored)
    return ColumnType(untyped=f"{plain} is not a type of tables")


def type_of_json(value: Any, depth: int = 1) -> ColumnType | None:
    """Type of a JSON value; None for null and an empty list."""
    if depth > MAX_DEPTH + 1:
        return ColumnType(untyped=_TOO_DEEP)
    match value:
        case None:
            return None
        case dict():
            return ColumnType.struct((name, type_of_json(each, depth + 1)) for name, each in value.items())
        case list():
            kinds = [kind for each in value if (kind := type_of_json(each, depth + 1)) is not None]
            if not kinds:
                return None
            rest = ColumnType(item=kinds[0])
            for kind in kinds[1:]:
                _TypeMerge(rest, ColumnType(item=kind)).apply()
            return rest
        case int() if not isinstance(value, bool) and not -(2**63) <= value < 2**63:
            return ColumnType(untyped="the number is beyond long")
        case decimal.Decimal():
            return ColumnType(untyped="the number is beyond double")
    return ColumnType(_JSON_TYPES[type(value)])


_JSON_TYPES: Final = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_AVRO_TYPES: Final = {
    "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64(),
    "bytes": pa.binary(), "string": pa.string(), "enum": pa.string(), "int-date": pa.date32(), "string-uuid": pa.string(),
    "int-time-millis": pa.time64("us"), "long-time-micros": pa.time64("us"), "long-timestamp-millis": pa.timestamp("us", "UTC"),
    "long-timestamp-micros": pa.timestamp("us", "UTC"), "long-local-timestamp-millis": pa.timestamp("us"),
    "long-local-timestamp-micros": pa.timestamp("us"),
}  # fmt: skip
"""Types of columns by Avro's primitive and logical types."""


class _AvroTypes:
    """Conversion of one Avro schema, as fastavro has parsed it.

    A small schema can stand for a huge type, because a type has as many columns as places: the conversion stops there.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named, self._left = named, 2 * MAX_COLUMNS

    def convert(self, schema: Any, within: frozenset[str] = frozenset(), depth: int = 1) -> ColumnType | None:
        """Type of a column; None if its values are always null or empty. ``within``: names of the types around it."""
        self._left -= 1
        if depth > MAX_DEPTH + 1 or self._left < 0:
            return ColumnType(untyped=_TOO_DEEP if self._left >= 0 else f"its schema has more than {2 * MAX_COLUMNS:,} fields")
        if isinstance(schema, list):
            kinds = [each for each in schema if each != "null"]
            if len(kinds) > 1:
                return ColumnType(untyped=f"its type is a union of {', '.join(map(_avro_type_name, kinds))}")
            return self.convert(kinds[0], within, depth) if kinds else None
        if isinstance(schema, str):
            if schema == "null":
                return None
            if schema in _AVRO_TYPES:
                return ColumnType(_AVRO_TYPES[schema])
            if schema in within or schema not in self._named:
                return ColumnType(untyped=f"its type {schema} {'contains itself' if schema in within else 'is not in the schema'}")
            return self.convert(self._named[schema], within, depth)
        logical, kind = logical_type(schema), schema["type"]
        if logical == "decimal":
            digits, scale = schema["precision"], schema.get("scale", 0)
            if digits > MAX_DIGITS:
                return ColumnType(
                    untyped=f"its type is decimal({digits}, {scale}), and a table's decimals have at most {MAX_DIGITS} digits"
                )
            return ColumnType(pa.decimal128(digits, scale))
        if logical in _AVRO_TYPES:
            return ColumnType(_AVRO_TYPES[logical])
        if kind in {"record", "error"}:
            inner = within | {schema["name"]}
            return ColumnType.struct((each["name"], self.convert(each["type"], inner, depth + 1)) for each in schema["fields"])
        if kind in {"array", "map"}:
            item = self.convert(schema["items" if kind == "array" else "values"], within, depth + 1)
            return None if item is None else ColumnType(item=item, is_map=kind == "map")
        if kind == "fixed":
            return ColumnType(pa.binary(schema["size"] or -1))
        return self.convert(kind, within, depth)


def _avro_type_name(schema: Any) -> str:
    return schema if isinstance(schema, str) else str(schema.get("name") or schema.get("logicalType") or schema["type"])


def _widen(known: pa.DataType, other: pa.DataType, *, is_stored: bool) -> pa.DataType | None:
    """Type that holds both. ``is_stored``: only Iceberg's promotions are allowed."""
    if pa.types.is_decimal(known) and pa.types.is_decimal(other):
        scale = max(known.scale, other.scale)
        digits = max(known.precision - known.scale, other.precision - other.scale) + scale
        return pa.decimal128(digits, scale) if digits <= MAX_DIGITS and (scale == known.scale or not is_stored) else None
    for order in ((pa.int32(), pa.int64()), (pa.float32(), pa.float64())):
        if known in order and other in order:
            return order[max(order.index(known), order.index(other))]
    if pa.types.is_floating(known) and pa.types.is_integer(other):
        return known if is_stored else pa.float64()
    if pa.types.is_integer(known) and pa.types.is_floating(other):
        return None if is_stored else pa.float64()
    return known if known == other else None


def _name_problem(name: str, siblings: ColumnType) -> str:
    if not name or "." in name:
        return "its name is empty" if not name else "its name contains a dot"
    if "\0" in name:  # Arrow's C interface ends names there: engines take the name for another one, or fail
        return "its name contains a null character"
    if name.lower() in siblings.lower_names:
        return "its name differs from another one only by case"
    return "" if name.isascii() or name.encode(errors="ignore").decode() == name else "its name is not valid Unicode"


class _TypeMerge:
    """Merge of the type of values into a known type; nothing changes before ``apply``.

    is_exact: all parts of the values have a place then.
    """

    def __init__(self, known: ColumnType, other: ColumnType) -> None:
        self.is_exact, self.column_count = True, 0
        self._widened: list[tuple[ColumnType, pa.DataType]] = []
        self._added: list[tuple[dict[str, ColumnType], set[str], str, ColumnType]] = []
        self._merge(known, other, 0)

    def apply(self, *, may_add: bool = True) -> bool:
        """Return whether the known type changed. Without ``may_add``, types are only widened."""
        for known, data_type in self._widened:
            known.plain = data_type
        for fields, lower_names, name, added in self._added if may_add else ():
            fields[name] = added
            lower_names.add(name.lower())
        return bool(self._widened or (self._added and may_add))

    def _merge(self, known: ColumnType, other: ColumnType, depth: int) -> None:
        if known.plain is not None and other.plain is not None:
            widened = _widen(known.plain, other.plain, is_stored=known.is_stored)
            if widened is None:
                self.is_exact = False
            elif widened != known.plain:
                self._widened.append((known, widened))
        elif known.item is not None and other.item is not None and known.is_map == other.is_map:
            self._merge(known.item, other.item, depth + 1)
        elif known.fields is not None and other.fields is not None:
            self._merge_fields(known, known.fields, other.fields, depth)
        else:
            self.is_exact = False

    def _merge_fields(self, known: ColumnType, fields: dict[str, ColumnType], others: Mapping[str, ColumnType], depth: int) -> None:
        new = known if others.keys() <= fields.keys() else ColumnType(lower_names=known.lower_names.copy())
        for name, other in others.items():
            if name in fields:
                self._merge(fields[name], other, depth + 1)
            elif not _name_problem(name, new) and depth + other.height() <= MAX_DEPTH and (added := self._typed_part(other)) is not None:
                new.lower_names.add(name.lower())
                self._added.append((fields, known.lower_names, name, added))
                self.column_count += added.column_count()
            else:
                self.is_exact = False

    def _typed_part(self, other: ColumnType) -> ColumnType | None:
        if other.item is not None:
            item = self._typed_part(other.item)
            return None if item is None else ColumnType(item=item, is_map=other.is_map)
        if other.fields is None:
            self.is_exact = self.is_exact and not other.untyped
            return None if other.untyped else ColumnType(other.plain)
        fields: dict[str, ColumnType] = {}
        struct = ColumnType(fields=fields)
        for name, each in other.fields.items():
            if _name_problem(name, struct) or (part := self._typed_part(each)) is None:
                self.is_exact = False
            else:
                fields[name] = part
                struct.lower_names.add(name.lower())
        return struct if fields else None


class _RowFitting:
    """Fitting of one decoded value to a column; ``reasons`` say why parts are left out."""

    def __init__(self, source: ColumnType | None) -> None:
        self.reasons: list[str] = []
        self._source = source

    def fit(self, name: str, value: Any, columns: ColumnType) -> Any:
        return self._fit_field(name, value, columns, self._source, (next(key for key, each in DECODED_COLUMNS.items() if each == name),), 0)

    def _fit_field(self, name: str, value: Any, struct: ColumnType, source: ColumnType | None, path: tuple[str, ...], depth: int) -> Any:
        known = (struct.fields or {}).get(name)
        if known is not None or value is None:
            return None if known is None else self._fit(value, known, source, path, depth + 1)
        source = source if self._source is not None else type_of_json(value)
        if source is None:
            return None
        problem = _name_problem(name, struct) or (_TOO_DEEP if depth + source.height() > MAX_DEPTH else "")
        if problem or _TypeMerge(ColumnType(fields={}), ColumnType(fields={name: source})).column_count:
            self._add_reason(path, problem or f"the table would have more than {MAX_COLUMNS:,} columns")
        else:
            self._explain_untyped_parts(value, source, path)
        return None

    def _explain_untyped_parts(self, value: Any, source: ColumnType, path: tuple[str, ...]) -> None:
        if source.untyped:
            self._add_reason(path, source.untyped)
        for name, each in (source.fields or {}).items():
            if (problem := _name_problem(name, ColumnType())) or value.get(name) is None:
                self._add_reason((*path, name), problem) if problem else None
            else:
                self._explain_untyped_parts(value[name], each, (*path, name))
        if source.item is not None:
            for each in value.values() if source.is_map else value:
                if each is not None:
                    self._explain_untyped_parts(each, source.item, path)

    def _fit(self, value: Any, known: ColumnType, source: ColumnType | None, path: tuple[str, ...], depth: int) -> Any:
        if value is None:
            return None
        if source is not None and source.untyped:
            self._add_reason(path, source.untyped)
            return None
        if known.fields is not None and isinstance(value, dict) and not (source is not None and source.is_map):
            types = source.fields if source is not None and source.fields is not None else {}
            fitted = {name: self._fit_field(name, each, known, types.get(name), (*path, name), depth) for name, each in value.items()}
            return {name: each for name, each in fitted.items() if name in known.fields}
        item, part = known.item, source.item if source is not None else None
        if item is not None and known.is_map and isinstance(value, dict) and source is not None and source.is_map:
            return {name: self._fit(each, item, part, (*path, name), depth + 1) for name, each in value.items()}
        if item is not None and not known.is_map and isinstance(value, list):
            before = len(self.reasons)
            items = [self._fit(each, item, part, path, depth + 1) for each in value]
            # A list with a hole would say that its length is right.
            return items if len(self.reasons) == before or item.plain is None else None
        if known.plain is None or (problem := _plain_problem(value, known)):
            self._add_reason(path, problem if known.plain is not None else f"{_type_name(value, source)} instead of {known}")
            return None
        return value

    def _add_reason(self, path: tuple[str, ...], problem: str) -> None:
        place = ".".join(path).encode(errors="backslashreplace").decode()
        place = place if len(place) <= MAX_PATH else f"{place[:MAX_PATH]}..."
        reason = f"{place}: its type has no place in the table: {problem}"
        if reason not in self.reasons[-1:]:
            self.reasons.append(reason)


_PYTHON_TYPES: Final = {
    pa.bool_(): bool, pa.int32(): int, pa.int64(): int, pa.string(): str, pa.binary(): bytes, pa.time64("us"): dt.time,
}  # fmt: skip
"""Python's types of values that need no further check but that of their range, by the type of the column."""


def _plain_problem(value: Any, known: ColumnType) -> str:
    data_type: Any = known.plain
    is_number = isinstance(value, int) and not isinstance(value, bool)
    wanted = _PYTHON_TYPES.get(data_type)
    if pa.types.is_floating(data_type):
        is_place = isinstance(value, float) or is_number
        if is_number and abs(value) > _INEXACT_DOUBLE:
            return f"long instead of {known}, which does not hold it exactly"
    elif pa.types.is_timestamp(data_type):
        is_place = isinstance(value, dt.datetime) and (value.tzinfo is None) == (data_type.tz is None)
    elif pa.types.is_date(data_type):
        is_place = isinstance(value, dt.date) and not isinstance(value, dt.datetime)
    elif pa.types.is_decimal(data_type):
        is_place = isinstance(value, decimal.Decimal)
    else:
        is_place = isinstance(value, wanted or bytes) and (wanted is not int or is_number)
    if not is_place:
        return f"{_type_name(value)} instead of {known}"
    try:
        pa.scalar(value, data_type)
    except _MISMATCH:
        return "the text is not valid Unicode" if isinstance(value, str) else f"the {_type_name(value)} is beyond {known}"
    return ""


def _type_name(value: Any, source: ColumnType | None = None) -> str:
    if source is not None and not source.untyped:
        return str(source)
    names = {
        bool: "boolean", int: "long", float: "double", str: "string", bytes: "binary", dict: "struct", list: "list",
        dt.date: "date", dt.time: "time", dt.datetime: "timestamp", decimal.Decimal: "decimal",
        TimeOutOfRange: "a time out of range",
    }  # fmt: skip
    return names.get(type(value), "value")


class TypedColumnBuilder:
    """Builder of typed columns. ``formats``: a field without one is not decoded."""

    def __init__(self, table: TopicTable, decoder: KeyAndValueDecoder, formats: Mapping[str, FieldFormat]) -> None:
        self._decoder, self._formats = decoder, formats
        self._stored = {name: found for name in DECODED_COLUMNS.values() if (found := table.column_type(name)) is not None}
        known = ((name, type_of_arrow(kind, is_stored=True)) for name, kind in self._stored.items())
        self._columns = ColumnType.struct(known, is_stored=True) or ColumnType(fields={}, is_stored=True)
        self.lacks_columns = table.column_type(ERROR_COLUMN) is None
        self._free = table.free_column_count - self.lacks_columns
        self._avro_type = lru_cache(maxsize=1000)(self._convert_avro_schema)

    def missing_columns_error(self) -> TableColumnsMissing:
        columns = (self._columns.fields or {}).items()
        return TableColumnsMissing(pa.schema([*((name, kind.arrow_type()) for name, kind in columns), (ERROR_COLUMN, pa.string())]))

    def add_typed_columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with typed values and the reasons for missing parts; if the table lacks columns, the batch as it was, and set
        ``lacks_columns``.

        Raises StoreError if the schema registry does not answer, UsageError if none is configured.
        """
        decoded = {
            name: [self._decoder.decode_key_or_value(data, how, keeps_python_types=True) for data in batch.column(name).to_pylist()]
            for name, how in self._formats.items()
        }
        exact = {name: self._merge_types(DECODED_COLUMNS[name], each) for name, each in decoded.items()}
        if self.lacks_columns:
            return batch
        reasons: list[list[str]] = [[] for _ in range(len(batch))]
        for name, values in decoded.items():
            array = self._column(name, values, reasons, is_exact=exact[name])
            batch = batch if array is None else batch.append_column(DECODED_COLUMNS[name], array)
        return batch.append_column(ERROR_COLUMN, pa.array([_join_reasons(each) for each in reasons], pa.string()))

    def _convert_avro_schema(self, schema_id: int) -> ColumnType | None:
        schema, named = self._decoder.fetch_avro_schema(schema_id)
        return _AvroTypes(named).convert(schema)

    def _merge_types(self, column_name: str, decoded: Sequence[DecodedKeyOrValue]) -> bool:
        """Return whether all values have their place then, as far as types tell."""
        some = [each for each in decoded if each.value is not None]
        schemas = [
            self._avro_type(each) for each in sorted({each.schema_id for each in some if each.is_avro and each.schema_id is not None})
        ]
        is_exact = not [kind for kind in schemas if not self._merge_type(column_name, kind)]  # all are merged
        values = [each.value for each in some if not each.is_avro]
        try:
            is_same = self._merge_type(column_name, type_of_arrow(pa.array(values).type), only_exact=True)
        except (*_MISMATCH, RecursionError):
            is_same = False
        if not is_same:
            for value in values:
                self._merge_type(column_name, type_of_json(value))
        return is_exact and is_same

    def _merge_type(self, column_name: str, kind: ColumnType | None, *, only_exact: bool = False) -> bool:
        """Return whether the values have their place then. A value with more new fields than the table has space for adds none, so that one
        value cannot use it up. ``only_exact``: change nothing if the result would be False.
        """
        if kind is None:
            return True
        merge = _TypeMerge(self._columns, ColumnType(fields={column_name: kind}))
        may_add = merge.column_count <= self._free
        is_exact = merge.is_exact and may_add
        if is_exact or not only_exact:
            self.lacks_columns |= merge.apply(may_add=may_add)
            self._free -= merge.column_count if may_add else 0
        return is_exact

    def _column(self, name: str, decoded: Sequence[DecodedKeyOrValue], reasons: list[list[str]], *, is_exact: bool) -> pa.Array | None:
        column_name, values = DECODED_COLUMNS[name], [each.value for each in decoded]
        for row, each in enumerate(decoded):
            if each.error:
                reasons[row].append(f"{name}: {each.error}")
        stored = self._stored.get(column_name)
        if is_exact:
            try:
                return None if stored is None else pa.array(values, stored)
            except _MISMATCH:  # a value that its type does not tell, such as a long in a column of doubles
                pass
        for row, each in enumerate(decoded):
            if each.value is not None:
                fitting = _RowFitting(self._avro_type(each.schema_id) if each.is_avro and each.schema_id is not None else None)
                values[row] = fitting.fit(column_name, each.value, self._columns)
                reasons[row] += fitting.reasons
        return None if stored is None else pa.array(values, stored)


def _join_reasons(reasons: Sequence[str]) -> str | None:
    rest = len(reasons) - REASONS_PER_ROW
    return "; ".join([*reasons[:REASONS_PER_ROW], *([f"and {rest} more"] if rest > 0 else [])]) or None
