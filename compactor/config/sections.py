"""Sections of the settings: how stores and registries are reached, and outputs, the compacted views for readers that do not know the
tier.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from compactor.config.units import parse_unit_text
from compactor.model.segment import StrictFrozenModel
from compactor.storage.schemes import NO_CREDENTIALS, StorePrices

MAX_MS = 2**63 - 1

Milliseconds = Annotated[int, Field(ge=0, le=MAX_MS)]


class SettingsSection(StrictFrozenModel):
    """Base class of sections. Values have exactly the declared types, except that durations and sizes may be texts such as ``10m``."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _parse_durations_and_sizes(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {key: parse_unit_text(key, value) for key, value in values.items()}


class SegmentReplacementCosts(NamedTuple):
    """Costs of replacing segments in a store, for an automatic dirty ratio.
    replaced_ms: how long replaced segments stay in the store.
    """

    prices: StorePrices
    replaced_ms: int


def _validate_endpoint_url(url: str) -> str:
    if url and not re.match(r"https?://[^/]", url):
        raise ValueError("write http:// or https://, host and port, for example http://127.0.0.1:9000")
    if "@" in url.partition("://")[2].partition("/")[0]:  # messages and `config show` show URLs
        raise ValueError(NO_CREDENTIALS)
    return url


MINIMUM_DAYS = {"STANDARD_IA": 30, "ONEZONE_IA": 30, "GLACIER_IR": 90}
"""Storage classes of S3 that bill an object for at least so many days, also if it is deleted earlier."""


def validate_storage_class(name: str) -> str:
    """Return the name. Raises ValueError for an archive class, whose objects must be restored before reading."""
    if name in ("GLACIER", "DEEP_ARCHIVE"):
        raise ValueError("objects of that class must be restored before they can be read")
    return name


class S3Settings(SettingsSection):
    """[s3]. Credentials come from the usual AWS chain (environment, ~/.aws, instance role), never from the configuration."""

    endpoint_url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    region: str = ""
    first_answer_ms: Milliseconds = 8_000
    storage_class: Annotated[str, AfterValidator(validate_storage_class)] = ""


class GcsSettings(SettingsSection):
    """[gcs]. Credentials are a file or the default ones (environment, gcloud, service account of the machine)."""

    endpoint_url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    credentials_file: str = ""


class AzureSettings(SettingsSection):
    """[azure]. Credentials are a file, the variables of Azure's own tools, or the default ones (environment, workload or managed
    identity).
    """

    endpoint_url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    credentials_file: str = ""


class HdfsSettings(SettingsSection):
    """[hdfs], by the WebHDFS of its namenode. Tickets of Kerberos come from the usual cache or client keytab."""

    webhdfs_url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    user: str = ""
    kerberos: bool = False


class RegistrySettings(SettingsSection):
    """[registry]: the schema registry with the schemas of keys and values."""

    url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    credentials_file: str = ""


def validate_regular_expressions(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns. Raises ValueError if one is not a valid regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{json.dumps(pattern)} is not a regular expression: {error}") from error
    return patterns


CatalogProperties = dict[str, str | bool | int | float]
"""Properties of an Iceberg catalog by pyiceberg's names, such as type, uri and credential."""


DecodedFormat = Literal["bytes", "text", "json", "avro"]
"""Formats of keys and values in tables. avro: by the schema registry."""


class IcebergTableSettings(SettingsSection):
    """[outputs.iceberg.topics."orders-.*"]: the table of topics whose whole name matches. Empty values are taken from [outputs.iceberg].
    key_format, value_format: decoding into typed columns. ``bytes`` leaves keys or values undecoded in a binary column.
    """

    table: str = ""
    warehouse: str = ""
    catalog: CatalogProperties = {}
    key_format: DecodedFormat = "bytes"
    value_format: DecodedFormat = "bytes"

    @property
    def decoded_format_by_field(self) -> dict[str, DecodedFormat]:
        """Return the format of each field (``key``, ``value``) that is decoded."""
        formats: dict[str, DecodedFormat] = {"key": self.key_format, "value": self.value_format}
        return {field: each for field, each in formats.items() if each != "bytes"}


def _validate_iceberg_topics(topics: dict[str, Any]) -> dict[str, IcebergTableSettings]:
    validate_regular_expressions(tuple(topics))
    return {pattern: IcebergTableSettings(**table) if isinstance(table, dict) else table for pattern, table in topics.items()}


_TOPIC_NAME = re.compile(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*")
"""Form of patterns that are a topic's literal name: words between single separators. A dot in them is no wildcard."""


def _validate_iceberg_table_name(name: str) -> str:
    if not re.fullmatch(r"[^.\s]+(\.[^.\s]+)+", name):
        raise ValueError("a namespace and a name, for example kafka.{topic}")
    return name


class IcebergSettings(SettingsSection):
    """[outputs.iceberg]: Iceberg tables with the compacted view of topics.
    topics: by regular expression. A topic's literal name means that topic alone: ``orders.v1`` does not match ``orders-v1``.
    """

    table: Annotated[str, AfterValidator(_validate_iceberg_table_name)] = "kafka.{topic}"
    warehouse: str = ""
    catalog: CatalogProperties = {}
    keep_ms: int = Field(86_400_000, ge=60_000, le=MAX_MS)
    topics: Annotated[dict[str, IcebergTableSettings], BeforeValidator(_validate_iceberg_topics)] = {}

    @model_validator(mode="after")
    def _require_catalogs(self) -> Self:
        for pattern, own in self.topics.items():
            if not (own.catalog or self.catalog):
                raise ValueError(f'no catalog is set for the table of {json.dumps(pattern)}, for example {{type = "sql", uri = ...}}')
        return self

    def iceberg_table_settings(self, topic: str) -> IcebergTableSettings | None:
        """Return the settings of a topic's table, or None: those of its literal name, or else of the first pattern that matches. Empty
        values are taken from [outputs.iceberg].
        ``{topic}`` in the table's name stands for the topic, with ``_`` in place of characters that names in SQL cannot have.
        """
        patterns = (pattern for pattern in self.topics if not _TOPIC_NAME.fullmatch(pattern) and re.fullmatch(pattern, topic))
        own = self.topics.get(topic if topic in self.topics else next(patterns, ""))
        if own is None:
            return None
        name = (own.table or self.table).replace("{topic}", re.sub(r"[.-]", "_", topic))
        given = {"table": name, "warehouse": own.warehouse or self.warehouse, "catalog": own.catalog or self.catalog}
        return own.model_copy(update=given)

    def find_shared_tables(self, topics: Iterable[str]) -> dict[str, list[str]]:
        """Return the tables that several topics would have (a pattern with a fixed table, or names that differ in ``.``, ``-`` and ``_``
        only), with their topics in order.
        """
        tables: dict[tuple[str, str], list[str]] = {}
        for topic in sorted(set(topics)):
            if (own := self.iceberg_table_settings(topic)) is not None:
                tables.setdefault((own.table, json.dumps(own.catalog, sort_keys=True)), []).append(topic)
        return {table: found for (table, _), found in tables.items() if len(found) > 1}


class OutputSettings(SettingsSection):
    """[outputs]: compacted views for readers that do not know the tier."""

    iceberg: IcebergSettings = IcebergSettings()
