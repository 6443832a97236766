"""Typed columns of a table: what keys and values stand for, beside their bytes.

    bytes -> decoded values -> their type -> united with the table's columns -> rows

Columns are added and widened by Iceberg's rules, so that files that are there already stay readable. A value that has no place in the
table's columns, because it is not decoded or because its type is another one, has its bytes and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from compactor.decoding.fields import DecodedKeyOrValue, FieldFormat, KeyAndValueDecoder
from compactor.errors import CompactorError
from compactor.outputs.iceberg_table import DECODED_COLUMNS, ERROR_COLUMN, TopicTable

_MISMATCH = (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError, RecursionError)
"""Exceptions of pyarrow and pyiceberg for values that do not match a type, and for types that have no place in a table."""


class TableColumnsMissing(CompactorError):
    """Raised if rows have values for which the table lacks columns, or has columns of too narrow types.

    columns: all columns that these rows need.
    """

    def __init__(self, columns: pa.Schema) -> None:
        super().__init__("the table lacks columns")
        self.columns = columns


class TypedColumnBuilder:
    """Builder of typed columns for the decoded keys and values of rows that will be written.

    :param formats: formats of ``key`` and ``value``. A field without a format is not decoded.
    """

    def __init__(self, table: TopicTable, decoder: KeyAndValueDecoder, formats: Mapping[str, FieldFormat]) -> None:
        self._table, self._decoder, self._formats = table, decoder, formats
        self._types = {name: table.column_type(name) for name in (*(DECODED_COLUMNS[field] for field in formats), ERROR_COLUMN)}
        self.lacks_columns = self._types[ERROR_COLUMN] is None
        self._types[ERROR_COLUMN] = pa.string()
        self._rejected: set[tuple[str, pa.DataType]] = set()
        self._avro_type = lru_cache(maxsize=1000)(lambda schema_id: arrow_type_of_avro_schema(*decoder.fetch_avro_schema(schema_id)))

    def missing_columns_error(self) -> TableColumnsMissing:
        """Return the error to raise, with all columns that the rows added so far need."""
        return TableColumnsMissing(pa.schema([(name, kind) for name, kind in self._types.items() if kind is not None]))

    def add_typed_columns_to_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a copy of the batch with added columns: the typed values, and the reasons why values could not be decoded. Sets
        ``lacks_columns`` of this builder if the table does not have all these columns yet.

        Raises StoreError if the schema registry does not answer, UsageError if none is configured.
        """
        errors: list[str | None] = [None] * len(batch)
        found: dict[str, list[Any]] = {}
        for field, field_format in self._formats.items():
            decoded = [
                self._decoder.decode_key_or_value(data, field_format, keeps_python_types=True) for data in batch.column(field).to_pylist()
            ]
            for row, value in enumerate(decoded):
                errors[row] = f"{field}: {value.error}" if value.error else errors[row]
            found[field] = self._values_or_none_if_type_mismatch(field, decoded, errors)
        for field, values in found.items():
            name = DECODED_COLUMNS[field]
            if (kind := self._types[name]) is not None:
                batch = batch.append_column(name, pa.array(values, kind))
        return batch.append_column(ERROR_COLUMN, pa.array(errors, pa.string()))

    def _values_or_none_if_type_mismatch(self, field: str, decoded: Sequence[DecodedKeyOrValue], errors: list[str | None]) -> list[Any]:
        """Return the values of a column. A value that does not match the column's type is replaced by None, and the reason is put into
        ``errors``.
        """
        name = DECODED_COLUMNS[field]
        while True:  # again, if a later value made the type one that an earlier value does not match, such as a large number a fraction
            values: list[Any] = [None if errors[row] else each.value for row, each in enumerate(decoded)]
            kind = self._types[name]
            self._widen_column_for_rows(name, decoded, values, errors, slice(0, len(values)))
            if self._types[name] == kind:
                return values

    def _widen_column_for_rows(
        self, column_name: str, decoded: Sequence[DecodedKeyOrValue], values: list[Any], errors: list[str | None], rows: slice
    ) -> None:
        """Widen a column's type so that it includes the values of ``rows``. If that fails, do the same for each half of the rows. If it
        fails for a single row, set its value to None in ``values``, and the reason in ``errors``.
        """
        some = [row for row in range(rows.start, rows.stop) if values[row] is not None]
        ids = {decoded[row].schema_id for row in some if decoded[row].is_avro}
        try:
            for schema_id in ids:
                self._widen_column_type(column_name, self._avro_type(schema_id))
            self._widen_column_type(column_name, pa.array([values[row] for row in some if not decoded[row].is_avro]).type)
            pa.array([values[row] for row in some], self._types[column_name] or pa.null())
        except _MISMATCH as error:
            if rows.stop - rows.start == 1:
                values[rows.start] = None
                errors[rows.start] = f"{column_name}: its type has no place in the table ({type(error).__name__})"
                return
            middle = (rows.start + rows.stop) // 2
            for half in (slice(rows.start, middle), slice(middle, rows.stop)):
                self._widen_column_for_rows(column_name, decoded, values, errors, half)

    def _widen_column_type(self, column_name: str, data_type: pa.DataType) -> None:
        """Widen the type of a column so that it includes ``data_type``. Raises one of the exceptions in ``_MISMATCH`` if Iceberg's rules
        forbid it.
        """
        known, wanted = self._types[column_name], _type_without_null_fields(data_type)
        if wanted is None or wanted == known:
            return
        both = [pa.schema([(column_name, each)]) for each in (known, wanted) if each is not None]
        united = pa.unify_schemas(both, promote_options="permissive")
        if united.field(column_name).type == known:
            return
        if (column_name, united.field(column_name).type) in self._rejected:
            raise ValueError(column_name)
        try:
            self._table.require_addable_columns(united)
        except _MISMATCH:
            self._rejected.add((column_name, united.field(column_name).type))
            raise
        self._types[column_name] = united.field(column_name).type
        self.lacks_columns = True


def _type_without_null_fields(data_type: pa.DataType) -> pa.DataType | None:
    """Return a type without its fields of type null, which say nothing about the values. Return None if no field is left."""
    if pa.types.is_struct(data_type):
        fields = [(field.name, found) for field in data_type if (found := _type_without_null_fields(field.type)) is not None]
        return pa.struct(fields) if fields else None
    if pa.types.is_list(data_type):
        found = _type_without_null_fields(data_type.value_type)
        return None if found is None else pa.list_(found)
    return None if pa.types.is_null(data_type) else data_type


_AVRO_TYPES: Final = {
    "null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64(),
    "bytes": pa.binary(), "string": pa.string(), "enum": pa.string(), "date": pa.date32(), "uuid": pa.string(),
    "time-millis": pa.time64("us"), "time-micros": pa.time64("us"), "timestamp-millis": pa.timestamp("us", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"), "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
}  # fmt: skip
"""Types of columns by Avro's primitive and logical types."""


def arrow_type_of_avro_schema(schema: Any, named_schemas: Mapping[str, Any]) -> pa.DataType:
    """Return the type of a column that holds the values of an Avro schema, as fastavro has parsed it.

    :param named_schemas: schemas of named types, by full name.
    :raises ValueError: if a union has several types. :raises RecursionError: if a type contains itself.
    :raises KeyError: if a named type is unknown.
    """
    if isinstance(schema, list):
        kinds = [each for each in schema if each != "null"] or ["null"]
        if len(kinds) > 1:
            raise ValueError("a union of several types")
        return arrow_type_of_avro_schema(kinds[0], named_schemas)
    if isinstance(schema, str):
        return _AVRO_TYPES[schema] if schema in _AVRO_TYPES else arrow_type_of_avro_schema(named_schemas[schema], named_schemas)
    logical, kind = schema.get("logicalType"), schema["type"]
    if logical == "decimal":
        return pa.decimal128(schema["precision"], schema.get("scale", 0))
    if logical in _AVRO_TYPES:
        return _AVRO_TYPES[logical]
    match kind:
        case "record" | "error":
            return pa.struct([(field["name"], arrow_type_of_avro_schema(field["type"], named_schemas)) for field in schema["fields"]])
        case "array":
            return pa.list_(arrow_type_of_avro_schema(schema["items"], named_schemas))
        case "map":
            return pa.map_(pa.string(), arrow_type_of_avro_schema(schema["values"], named_schemas))
        case "fixed":
            return pa.binary(schema["size"])
    return arrow_type_of_avro_schema(kind, named_schemas)
