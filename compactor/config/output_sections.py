"""Sections of the settings that describe outputs: compacted views for readers that do not know the tier."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from compactor.config.store_sections import MAX_MS, SettingsSection


def validate_regular_expressions(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns unchanged. Raises ValueError if one of them is not a valid regular expression."""
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
    """[outputs.iceberg.topics."orders-.*"]: the Iceberg table of topics whose whole name matches. A value that is
    empty is taken from [outputs.iceberg].

    key_format, value_format: how keys and values are decoded into typed columns. ``bytes`` leaves them undecoded in a binary column.
    """

    table: str = ""
    warehouse: str = ""
    catalog: CatalogProperties = {}
    key_format: DecodedFormat = "bytes"
    value_format: DecodedFormat = "bytes"

    @property
    def decoded_format_by_field(self) -> dict[str, DecodedFormat]:
        """Return the formats to decode: by the name of the field (``key`` or ``value``) its format. Fields with the format ``bytes`` are
        left out.
        """
        formats: dict[str, DecodedFormat] = {"key": self.key_format, "value": self.value_format}
        return {field: each for field, each in formats.items() if each != "bytes"}


def _validate_iceberg_topics(topics: dict[str, Any]) -> dict[str, IcebergTableSettings]:
    """Return the settings of the Iceberg tables by topic pattern. Raises ValueError for an invalid pattern or an unknown setting."""
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

    topics: settings of the tables by a regular expression that topics match; no tables by default. A topic's literal name means that topic
        alone: ``orders.v1`` does not match ``orders-v1``.
    """

    table: Annotated[str, AfterValidator(_validate_iceberg_table_name)] = "kafka.{topic}"
    warehouse: str = ""
    catalog: CatalogProperties = {}
    keep_ms: int = Field(86_400_000, ge=60_000, le=MAX_MS)
    topics: Annotated[dict[str, IcebergTableSettings], BeforeValidator(_validate_iceberg_topics)] = {}

    @model_validator(mode="after")
    def _require_catalog_for_every_table(self) -> Self:
        for pattern, own in self.topics.items():
            if not (own.catalog or self.catalog):
                raise ValueError(f'no catalog is set for the table of {json.dumps(pattern)}, for example {{type = "sql", uri = ...}}')
        return self

    def iceberg_table_settings(self, topic: str) -> IcebergTableSettings | None:
        """Return the settings of a topic's Iceberg table, or None if it has none. The topic's literal name applies, or else the first
        pattern that matches the topic.

        Values that the topic's table leaves empty are taken from [outputs.iceberg].

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
        """Return the tables that several topics would have, because their names differ in ``.``, ``-`` and ``_`` only, or because a
        pattern for several topics names one table: by the name of the table, the topics in order.
        """
        tables: dict[tuple[str, str], list[str]] = {}
        for topic in sorted(set(topics)):
            if (own := self.iceberg_table_settings(topic)) is not None:
                tables.setdefault((own.table, json.dumps(own.catalog, sort_keys=True)), []).append(topic)
        return {table: found for (table, _), found in tables.items() if len(found) > 1}


class OutputSettings(SettingsSection):
    """[outputs]: compacted views for readers that do not know the tier."""

    iceberg: IcebergSettings = IcebergSettings()
