"""Decoding of keys and values, and a client of a schema registry that speaks the API of Confluent's.
Confluent's wire format is one zero byte, the id of the schema (four bytes, big-endian), and the encoded value.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote
from uuid import UUID

import urllib3

from compactor.config.sections import RegistrySettings
from compactor.config.settings import Settings
from compactor.errors import NotFound, Refused, StoreError, Unavailable, UsageError
from compactor.extras import require_pip_extra

FieldFormat = Literal["auto", "avro", "json", "text", "bytes"]
FORMATS: Final[tuple[FieldFormat, ...]] = ("auto", "avro", "json", "text", "bytes")
"""Formats that a key or value can be read as.

auto: the registry's schema if there is a registry and the bytes are in its wire format with an id that it has; else text; else bytes.
avro: the registry's schema, else not decoded. json, text: UTF-8, else not decoded. bytes: never decoded.
"""

_HEADER = struct.Struct(">BI")
_UNREADABLE = (EOFError, IndexError, KeyError, OverflowError, RecursionError, StopIteration, TypeError, ValueError, struct.error)
"""Exceptions of fastavro for bytes that do not match a schema."""


class TimeOutOfRange(str):
    """Avro's number of a date or time that Python has not, such as one beyond the years 1 to 9999. No column of times takes it."""

    __slots__ = ()


ParsedSchemaAndNamedTypes = tuple[Any, dict[str, Any]]
"""An Avro schema as fastavro has parsed it, and the schemas of its named types."""


@dataclass(frozen=True, slots=True)
class DecodedKeyOrValue:
    """Result of decoding a key or a value.

    value: text, or a JSON value in which bytes, times and decimals are texts. None if the bytes are null or were not decoded.
    schema_id: None if the bytes name no schema that the registry has.
    error: reason why the bytes were not decoded, or empty.
    """

    value: Any = None
    is_json: bool = False
    schema_id: int | None = None
    error: str = ""
    is_avro: bool = False

    @property
    def is_decoded(self) -> bool:
        return not self.error

    def format_value_as_text(self) -> str | None:
        """JSON for a JSON value. None if ``value`` is None and not JSON's null."""
        return to_json_text(self.value) if self.is_json else self.value


class KeyAndValueDecoder:
    def __init__(self, settings: Settings) -> None:
        self._registry = SchemaRegistry(settings.registry) if settings.registry.url else None
        self._parsed = lru_cache(maxsize=1000)(_parse_avro_schema)

    @property
    def has_registry(self) -> bool:
        return self._registry is not None

    def decode_key_or_value(
        self, data: bytes | None, field_format: FieldFormat = "auto", *, keeps_python_types: bool = False
    ) -> DecodedKeyOrValue:
        """Decode bytes. Those that do not have the format give a result with an ``error``.

        :param field_format: ``auto`` decodes by the schema registry if the bytes begin with the id of a schema, otherwise as text.
        :param keeps_python_types: whether Avro values keep fastavro's Python types instead of JSON's.
        :raises StoreError: if the registry is needed and cannot be reached.
        :raises UsageError: if the format is ``avro`` and no registry is configured.
        """
        if data is None:
            return DecodedKeyOrValue()
        if field_format == "avro":
            return self._decode_by_schema_id(data, self._require_registry(), keeps_python_types=keeps_python_types)
        if field_format == "auto" and self._registry and data[:1] == b"\0":
            found = self._decode_by_schema_id(data, self._registry, keeps_python_types=keeps_python_types)
            if found.is_decoded or found.schema_id is not None:
                return found
        if field_format == "bytes":
            return DecodedKeyOrValue(error="not decoded")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return DecodedKeyOrValue(error="not UTF-8")
        return _parse_json_text(text) if field_format == "json" else DecodedKeyOrValue(text)

    def encode_avro_key(self, topic: str, key_text: str) -> bytes:
        """Encode a key given as ``avro:JSON`` or ``avro@ID:JSON``, by the schema of that id or the topic's key schema.

        Kafka compares bytes, so a value encoded with two schemas gives two keys: the id is required if several key schemas of the topic can
        encode the value.

        :raises UsageError: if the text is not valid, the schema does not match it, or several encodings are possible.
        """
        registry = self._require_registry()
        named, _, written = key_text.removeprefix("avro").partition(":")
        try:
            value = json.loads(written)
        except ValueError:
            raise UsageError(
                f"{key_text} is not a key", hint='Write avro:JSON, such as avro:{"id": 5} or avro:"a", or avro@ID:JSON'
            ) from None
        subject = f"{topic}-key"
        ids = [int(named[1:])] if named[1:].isdigit() else registry.fetch_subject_ids(subject)
        if not ids:
            raise UsageError(f"the schema registry has no subject {subject}", hint="Name the schema's id: avro@ID:JSON")
        schemas = [schema for each in ids if (schema := registry.schema(each)) is not None and schema.kind == "AVRO"]
        found = {schema.schema_id: data for schema in schemas if (data := self._try_encode_avro(schema, value)) is not None}
        if not found:
            raise UsageError(f"{written} matches none of the Avro schemas {', '.join(map(str, ids))}")
        if len(found) > 1:
            hint = f"Name one of {', '.join(map(str, found))}: avro@{max(found)}:{written}"
            raise UsageError(f"{subject} has {len(found)} schemas that encode this key, each to another key", hint=hint)
        return next(iter(found.values()))

    def _require_registry(self) -> SchemaRegistry:
        if self._registry is None:
            raise UsageError("Avro needs a schema registry", hint="Set url under [registry]")
        return self._registry

    def fetch_avro_schema(self, schema_id: int) -> ParsedSchemaAndNamedTypes:
        """Raises KeyError if the registry lacks the schema, ValueError if it is not valid, StoreError if the registry cannot be reached."""
        schema = self._require_registry().schema(schema_id)
        if schema is None:
            raise KeyError(schema_id)
        return self._parsed(schema)

    def _decode_by_schema_id(self, data: bytes, registry: SchemaRegistry, *, keeps_python_types: bool) -> DecodedKeyOrValue:
        if len(data) < _HEADER.size or data[0] != 0:
            return DecodedKeyOrValue(error="not in the wire format of a schema registry")
        schema_id = _HEADER.unpack_from(data)[1]
        schema = registry.schema(schema_id)
        if schema is None:
            return DecodedKeyOrValue(error=f"the schema registry has no schema {schema_id}")
        payload = data[_HEADER.size :]
        if schema.kind == "JSON":
            try:
                return DecodedKeyOrValue(_load_json(payload.decode()), is_json=True, schema_id=schema_id)
            except (ValueError, RecursionError) as error:
                return DecodedKeyOrValue(schema_id=schema_id, error=f"not JSON: {_describe_decoding_error(error)}")
        if schema.kind != "AVRO":
            return DecodedKeyOrValue(schema_id=schema_id, error=f"schema {schema_id} is of type {schema.kind}, which is not decoded")
        return self._decode_avro(schema, payload, keeps_python_types=keeps_python_types)

    def _decode_avro(self, schema: RegisteredSchema, payload: bytes, *, keeps_python_types: bool) -> DecodedKeyOrValue:
        from fastavro import schemaless_reader

        stream = io.BytesIO(payload)
        try:
            value = schemaless_reader(stream, self._parsed(schema)[0], None)
            shown = _replace_uuids_by_text(value) if keeps_python_types else json.loads(to_json_text(value))
        except _UNREADABLE as error:
            reason = f"not valid by schema {schema.schema_id}: {_describe_decoding_error(error)}"
            return DecodedKeyOrValue(schema_id=schema.schema_id, error=reason)
        rest = len(payload) - stream.tell()
        if rest:
            return DecodedKeyOrValue(schema_id=schema.schema_id, error=f"{rest} bytes follow the value of schema {schema.schema_id}")
        return DecodedKeyOrValue(shown, is_json=True, schema_id=schema.schema_id, is_avro=True)

    def _try_encode_avro(self, schema: RegisteredSchema, value: object) -> bytes | None:
        from fastavro import schemaless_writer

        stream = io.BytesIO(_HEADER.pack(0, schema.schema_id))
        stream.seek(0, io.SEEK_END)
        try:
            schemaless_writer(stream, self._parsed(schema)[0], value, strict=True)
        except (*_UNREADABLE, AttributeError):
            return None
        return stream.getvalue()


def parse_key_text(key_text: str) -> bytes:
    """Raises UsageError if a ``base64:...`` text is not base64."""
    if not key_text.startswith("base64:"):
        return key_text.encode()
    try:
        return base64.b64decode(key_text.removeprefix("base64:"), validate=True)
    except binascii.Error as error:
        raise UsageError(f"{key_text} is not base64: {error}", hint="Write the key as text, or as base64:...") from error


def parse_topic_key(key_text: str, topic: str, decoder: KeyAndValueDecoder) -> bytes:
    """Key given as text, ``base64:...``, ``avro:JSON`` or ``avro@ID:JSON``. Without a registry, a text that begins with ``avro`` is the key
    itself. Raises UsageError if the text is not valid.
    """
    is_avro = decoder.has_registry and (key_text.startswith("avro:") or key_text.partition(":")[0].removeprefix("avro@").isdigit())
    return decoder.encode_avro_key(topic, key_text) if is_avro else parse_key_text(key_text)


def to_json_text(value: object) -> str:
    """Compact JSON. Bytes (base64), times (ISO 8601), decimals, and numbers such as NaN become strings."""
    from pydantic_core import to_json

    return to_json(_replace_bytes_by_base64(value), inf_nan_mode="strings").decode()


def _replace_bytes_by_base64(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: _replace_bytes_by_base64(each) for name, each in value.items()}
    return [_replace_bytes_by_base64(each) for each in value] if isinstance(value, list) else value


def _replace_uuids_by_text(value: object) -> object:
    if isinstance(value, dict):
        return {name: _replace_uuids_by_text(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_replace_uuids_by_text(each) for each in value]
    return str(value) if isinstance(value, UUID) else value


def _parse_json_text(text: str) -> DecodedKeyOrValue:
    try:
        return DecodedKeyOrValue(_load_json(text), is_json=True)
    except (ValueError, RecursionError) as error:
        return DecodedKeyOrValue(error=f"not JSON: {_describe_decoding_error(error)}")


_MAYBE_LARGE: Final = re.compile(r"[eE]\+?\d{3}|\d{300}")


def _load_json(text: str) -> Any:
    """Return the JSON value. Numbers that are beyond a double, or have more digits than Python converts, are Decimals."""
    if _MAYBE_LARGE.search(text) is None:
        return json.loads(text)
    return json.loads(text, parse_float=partial(_parse_number, float), parse_int=partial(_parse_number, int))


def _parse_number(kind: Callable[[str], float], digits: str) -> float | Decimal:
    try:
        number = kind(digits)
    except ValueError:  # Python's limit of digits
        number = math.inf
    try:
        return Decimal(digits) if number in {math.inf, -math.inf} else number
    except ArithmeticError:
        raise ValueError("the exponent of a number is too large") from None


def _describe_decoding_error(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, EOFError | IndexError | struct.error | StopIteration):
        return "the bytes end too early, or are another schema's"
    return str(error) if isinstance(error, ValueError) and str(error) else "the bytes are another schema's"


_OR_TEXT: Final = "-or-text"
LOGICAL_TYPES: Final = {
    "int-date", "int-time-millis", "long-time-micros", "long-timestamp-millis", "long-timestamp-micros", "long-local-timestamp-millis",
    "long-local-timestamp-micros", "string-uuid",
}  # fmt: skip
"""Avro's type and logical type of values for which Python has a type, though not for each of them."""


def logical_type(schema: dict[str, Any]) -> str:
    """Return the logical type of a part of a parsed schema as it is in LOGICAL_TYPES, ``decimal``, or empty."""
    named = str(schema.get("logicalType", ""))
    return f"{schema['type']}-{named.removesuffix(_OR_TEXT)}" if named.endswith(_OR_TEXT) else "decimal" if named == "decimal" else ""


def _prepare_logical_type(schema: dict[str, Any]) -> dict[str, Any]:
    """Let a reader of ours read a logical type, and drop it where it is not valid, which Avro's specification demands ("Logical Types")."""
    named = schema.get("logicalType")
    if f"{schema.get('type')}-{named}" in LOGICAL_TYPES:
        return schema | {"logicalType": f"{named}{_OR_TEXT}"}
    digits, scale = schema.get("precision"), schema.get("scale", 0)
    is_number = isinstance(digits, int) and isinstance(scale, int) and 0 <= scale <= digits > 0
    if named == "decimal" and schema.get("type") in {"bytes", "fixed"} and is_number:
        return schema
    return {name: each for name, each in schema.items() if name != "logicalType"}


def _read_or_keep(reader: Callable[..., Any], data: Any, *schemas: Any) -> Any:
    """Return what fastavro's reader of a logical type makes of Avro's value, and texts and numbers that it refuses as texts."""
    try:
        return reader(data, *schemas)
    except (ValueError, OverflowError):
        return data if isinstance(data, str) else TimeOutOfRange(data)


def _parse_avro_schema(schema: RegisteredSchema) -> ParsedSchemaAndNamedTypes:
    """Raises ValueError if it is not valid."""
    require_pip_extra("avro", "Avro")
    from fastavro.read import LOGICAL_READERS
    from fastavro.schema import SchemaParseException, UnknownType, parse_schema

    for each in LOGICAL_TYPES:
        LOGICAL_READERS.setdefault(f"{each}{_OR_TEXT}", partial(_read_or_keep, LOGICAL_READERS[each]))
    named: dict[str, Any] = {}
    try:
        for text in schema.references:
            parse_schema(json.loads(text, object_hook=_prepare_logical_type), named)
        return parse_schema(json.loads(schema.text, object_hook=_prepare_logical_type), named), named
    except (SchemaParseException, UnknownType) as error:
        raise ValueError(f"the schema is not valid: {error}") from error


TIMEOUT_S: Final = 5.0
"""Seconds after which a request that is not answered has failed. It is sent three times."""


JsonDocument = Any


@dataclass(frozen=True)
class RegisteredSchema:
    """A schema of the registry.

    kind: ``AVRO``, ``JSON`` or ``PROTOBUF``.
    references: texts of the schemas that it uses, directly or indirectly; each after those that it uses itself.
    """

    schema_id: int
    kind: str
    text: str
    references: tuple[str, ...] = ()


class SchemaRegistry:
    """Client of the schema registry. Each schema is requested once per process."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._url = settings.url.rstrip("/")
        # Requests are few, and no socket is left open that nobody closes.
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json", "Connection": "close"}
        if settings.credentials_file:
            headers |= urllib3.make_headers(basic_auth=_read_credentials_file(settings.credentials_file))
        self._pool = urllib3.PoolManager(headers=headers, timeout=TIMEOUT_S, retries=urllib3.Retry(2, redirect=3, raise_on_redirect=False))
        self.schema = lru_cache(maxsize=10_000)(self._fetch_schema)

    def _fetch_schema(self, schema_id: int) -> RegisteredSchema | None:
        try:
            return self._parse_schema_document(schema_id, self._request_json(f"/schemas/ids/{schema_id}"))
        except NotFound:
            return None

    def fetch_subject_ids(self, subject: str) -> list[int]:
        """Schema ids of all versions of a subject, such as ``orders-key``; none if it does not exist."""
        place = f"/subjects/{quote(subject, safe='')}/versions"
        try:
            return list(dict.fromkeys(self._request_json(f"{place}/{version}")["id"] for version in self._request_json(place)))
        except NotFound:
            return []

    def _parse_schema_document(self, schema_id: int, document: JsonDocument) -> RegisteredSchema:
        references: dict[str, None] = {}
        for each in document.get("references") or ():
            found = self._request_json(f"/subjects/{quote(each['subject'], safe='')}/versions/{each['version']}")
            schema = self._parse_schema_document(found["id"], found)
            references |= dict.fromkeys((*schema.references, schema.text))
        return RegisteredSchema(schema_id, document.get("schemaType") or "AVRO", document["schema"], tuple(references))

    def _request_json(self, path: str) -> JsonDocument:
        """:raises NotFound: if the registry does not have the path.
        :raises Refused: if the credentials are refused.
        :raises Unavailable: if the registry does not answer.
        :raises StoreError: if the answer has another status or is not JSON.
        """
        try:
            answer = self._pool.request("GET", self._url + path)
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise Unavailable(f"the schema registry at {self._url} does not answer: {reason}", hint="See url under [registry]") from None
        if answer.status == 404:
            raise NotFound(f"the schema registry at {self._url} has no {path}")
        if answer.status in (401, 403):
            raise Refused(f"the schema registry at {self._url} refuses: {answer.status}", hint="See credentials_file under [registry]")
        if answer.status != 200:
            raise StoreError(f"the schema registry at {self._url} answers {path} with status {answer.status}")
        try:
            return json.loads(answer.data)
        except ValueError:
            raise StoreError(f"what answers at {self._url} is not a schema registry", hint="See url under [registry]") from None


def _read_credentials_file(credentials_file: str) -> str:
    """Raises UsageError if the file cannot be read or contains anything but one line ``USER:PASSWORD``."""
    try:
        text = Path(credentials_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"[registry] credentials_file {credentials_file} cannot be read: {error.strerror}") from error
    if ":" not in text or "\n" in text:
        raise UsageError(f"[registry] credentials_file {credentials_file} must hold one line", hint="Write USER:PASSWORD")
    return text
