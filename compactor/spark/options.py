"""Options of the data source ``kafka-tiered``: parsing and validation. docs/spark.md lists them.

Options of Spark's own Kafka source are accepted where they have the same meaning.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from compactor.config import settings as config
from compactor.constants import MAX_OFFSET
from compactor.decoding.fields import FORMATS, FieldFormat
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition

Choice = TypeVar("Choice", bound=str)
DefaultT = TypeVar("DefaultT")

SPLIT_BYTES: Final = 64 << 20

SETTING_OPTIONS: Final = {
    "url": ("tier", "url"),
    "controlUrl": ("tier", "control_url"),
    "layout": ("tier", "layout"),
    "kind": ("tier", "kind"),
    "endpointUrl": ("s3", "endpoint_url"),
    "region": ("s3", "region"),
    "registryUrl": ("registry", "url"),
}
"""Options that set a configuration value, with its section and name. They override the file that ``config`` names."""

COLUMN_TYPES: Final = {
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "leaderEpoch": "int",
}
"""Spark types of the columns in compactor.consumer.columns.MESSAGE_COLUMNS."""

TEXT_COLUMN_TYPES: Final = {"keyText": "string", "valueText": "string"}
"""Spark types of the decoded columns, which are read only if ``columns`` names them."""

ALL_COLUMN_TYPES: Final = {**COLUMN_TYPES, **TEXT_COLUMN_TYPES}

TOPIC_OPTIONS: Final = ("topic", "subscribe", "subscribePattern", "assign")
READ_OPTIONS: Final = (
    "config", *TOPIC_OPTIONS, "partitions", "startingOffset", "endingOffset", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "isolation", "view", "columns", "includeHeaders", "splitBytes", "keyRanges",
    "keyFormat", "valueFormat", "onDecodingError", "skipDamaged",
)  # fmt: skip

TABLE_OPTIONS: Final = (
    "provider",
    "path",
    "owner",
    "location",
    "ismanagedlocation",
    "serialization.format",
    "comment",
    "external",
    "collation",
)
"""Options that Spark adds for a table that was created over the source. ``provider`` is present only for tables."""

EARLIEST_OFFSET: Final = -2
LATEST_OFFSET: Final = -1


@dataclass(frozen=True)
class ReadRequest:
    """Validated options of one read.

    topics, pattern, assigned: exactly one says which topics are read: names, a regular expression, or topics with their partitions.
    partitions: partition numbers to read of every topic; None means all.
    starting_offset, ending_offset: default bounds, start inclusive and end exclusive.
    starting, ending: bounds of single partitions; they replace the defaults.
    starting_ms, ending_ms: timestamps that are resolved to offsets as in Spark's Kafka source.
    committed: whether only committed records are read (read_committed).
    latest: whether only the latest record of each key is returned.
    key_format, value_format: how ``keyText`` and ``valueText`` are decoded.
    fails_on_decoding_error: whether bytes that cannot be decoded end the read; if not, their text is null.
    key_ranges: number of tasks per partition for ``latest``; 0 means automatic.
    skip_damaged: whether offsets that cannot be read are skipped, with a warning in the executor's log.
    """

    settings: config.Settings
    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: tuple[int, ...] | None = None
    assigned: Mapping[str, tuple[int, ...]] | None = None
    starting_offset: int = 0
    ending_offset: int = MAX_OFFSET
    starting: Mapping[TopicPartition, int] = field(default_factory=dict)
    ending: Mapping[TopicPartition, int] = field(default_factory=dict)
    starting_ms: int | None = None
    ending_ms: int | None = None
    committed: bool = True
    latest: bool = False
    columns: tuple[str, ...] = ()
    split_bytes: int = SPLIT_BYTES
    key_ranges: int = 0
    key_format: FieldFormat = "auto"
    value_format: FieldFormat = "auto"
    fails_on_decoding_error: bool = True
    skip_damaged: bool = False

    def select_requested_partitions(self, available: Iterable[TopicPartition], tier_url: str) -> list[TopicPartition]:
        """Return the requested partitions of a tier, sorted by topic and partition.

        :param available: all partitions of the tier.
        :param tier_url: named in error messages.
        :raises UsageError: if a requested topic or partition is not in the tier.
        """
        by_topic: dict[str, list[int]] = {}
        for name in available:
            by_topic.setdefault(name.topic, []).append(name.partition)
        topics = [topic for topic in by_topic if re.fullmatch(self.pattern, topic)] if self.pattern else list(self.assigned or self.topics)
        hint = "`tiered-compactor topics` lists what it holds"
        if self.pattern and not topics:
            raise UsageError(f"the tier at {tier_url} holds no topic that matches {self.pattern}", hint=hint)
        found = []
        for topic in sorted(topics):
            if topic not in by_topic:
                raise UsageError(f"the tier at {tier_url} holds no topic {topic}", hint=hint)
            wanted = self.assigned[topic] if self.assigned else self.partitions
            missing = sorted(set(wanted or ()) - set(by_topic[topic]))
            if missing:
                raise UsageError(f"{topic} has no partition {missing[0]} in the tier")
            found += [TopicPartition(topic, number) for number in sorted(by_topic[topic] if wanted is None else wanted)]
        return found


def parse_read_options(options: Mapping[str, str]) -> ReadRequest:
    """Parse the options of a read. Upper and lower case and underscores in option names are ignored. Raises UsageError if an option is
    unknown or invalid.
    """
    given = {_normalize_option_name(name): (name, value) for name, value in remove_options_added_by_spark(options).items()}
    known = {_normalize_option_name(name): name for name in (*SETTING_OPTIONS, *READ_OPTIONS)}
    if "path" in given:
        raise UsageError(
            "kafka-tiered takes no path", hint='Say .option("url", URL_OF_THE_TIER) or .option("config", "tier.toml"), and the topic'
        )
    for name, (written, _) in given.items():
        if name not in known:
            raise UsageError(f"kafka-tiered has no option {written!r}", hint=_unknown_option_hint(name, known))
    environ = dict(os.environ)
    environ |= {
        config.environment_variable_name(*SETTING_OPTIONS[known[name]]): value
        for name, (_, value) in given.items()
        if known[name] in SETTING_OPTIONS
    }
    text = {known[name]: value.strip() for name, (_, value) in given.items() if known[name] in READ_OPTIONS}
    settings = config.load_settings(text.get("config"), environ)
    _ = settings.tier_url
    skip_damaged = _parse_choice_option(text, "skipDamaged", ("false", "true")) == "true"
    if skip_damaged and text.get("view") == "latest":
        hint = "An older value of a key would take the place of one that cannot be read"
        raise UsageError("kafka-tiered: skipDamaged and the view latest exclude each other", hint=hint)
    return ReadRequest(
        settings=settings,
        **_parse_topic_options(text),
        partitions=_parse_partition_numbers(text.get("partitions", "")),
        starting_offset=_parse_int_option(text, "startingOffset", 0),
        ending_offset=_parse_int_option(text, "endingOffset", MAX_OFFSET),
        starting=_parse_offsets_option(text, "startingOffsets", "earliest", EARLIEST_OFFSET, 0),
        ending=_parse_offsets_option(text, "endingOffsets", "latest", LATEST_OFFSET, MAX_OFFSET),
        starting_ms=_parse_int_option(text, "startingTimestamp", None),
        ending_ms=_parse_int_option(text, "endingTimestamp", None),
        committed=_parse_choice_option(text, "isolation", ("read_committed", "read_uncommitted")) == "read_committed",
        latest=_parse_choice_option(text, "view", ("all", "latest")) == "latest",
        columns=_parse_columns_option(text),
        split_bytes=_parse_int_option(text, "splitBytes", SPLIT_BYTES, 1),
        key_ranges=_parse_int_option(text, "keyRanges", 0),
        key_format=_parse_choice_option(text, "keyFormat", FORMATS),
        value_format=_parse_choice_option(text, "valueFormat", FORMATS),
        fails_on_decoding_error=_parse_choice_option(text, "onDecodingError", ("fail", "null")) == "fail",
        skip_damaged=skip_damaged,
    )


def is_table_creation(options: Mapping[str, str]) -> bool:
    """Return whether Spark passed these options for a ``CREATE TABLE`` statement."""
    return "provider" in options


def remove_options_added_by_spark(options: Mapping[str, str]) -> dict[str, str]:
    """Return only the options that the user gave, without those that Spark adds for tables."""
    if not is_table_creation(options):
        return dict(options)
    return {
        name: value
        for name, value in options.items()
        if _normalize_option_name(name) not in TABLE_OPTIONS and not name.startswith("option.")
    }


def _normalize_option_name(name: str) -> str:
    """Return an option name in lower case without underscores."""
    return name.replace("_", "").lower()


def _unknown_option_hint(name: str, known_options: Mapping[str, str]) -> str:
    """Return a hint for an unknown option: the most similar known option, or the list of all."""
    if name.startswith("kafka."):
        return "It asks no broker: leave it out"
    near = difflib.get_close_matches(name, list(known_options), n=1)
    return f"Did you mean {known_options[near[0]]}?" if near else f"It knows {', '.join(known_options.values())}"


def _parse_topic_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the ReadRequest fields for the one option that chooses topics. Raises UsageError if none or several of them are given."""
    message = [name for name in TOPIC_OPTIONS if options.get(name)]
    if not message:
        raise UsageError("kafka-tiered needs the option topic", hint="Or subscribe, subscribePattern, assign, as in Spark's Kafka source")
    if len(message) > 1:
        raise UsageError(f"kafka-tiered: {message[0]} and {message[1]} both select topics", hint="Give one of them")
    value = options[message[0]]
    if message[0] == "subscribePattern":
        try:
            return {"pattern": re.compile(value).pattern}
        except re.error as error:
            raise UsageError(f"kafka-tiered: subscribePattern = {value!r} is not a valid regular expression: {error}") from None
    if message[0] == "assign":
        if options.get("partitions"):
            raise UsageError("kafka-tiered: assign names the partitions already", hint="Leave out partitions")
        return {
            "assigned": {
                _validate_topic_name(topic): tuple(_validate_partition_numbers(value, numbers))
                for topic, numbers in _parse_json_object("assign", value).items()
            }
        }
    return {"topics": tuple(dict.fromkeys(_validate_topic_name(part.strip()) for part in value.split(",")))}


def _validate_topic_name(name: str) -> str:
    """Return the topic name if it is valid. Raises UsageError otherwise."""
    return TopicPartition.create_validated(name, 0).topic


def _parse_json_object(name: str, value: str) -> dict[str, Any]:
    """Parse an option that contains a non-empty JSON object. Raises UsageError if it does not."""
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise UsageError(f"kafka-tiered: {name} = {value!r} is not a JSON object with topics", hint=_EXAMPLE_HINTS[name])
    return found


_EXAMPLE_HINTS: Final = {
    "assign": 'Write {"orders": [0, 1]}',
    "startingOffsets": 'Write {"orders": {"0": 23, "1": -2}}, or earliest',
    "endingOffsets": 'Write {"orders": {"0": 50, "1": -1}}, or latest',
}


def _validate_partition_numbers(value: str, numbers: Any) -> list[int]:
    """Return sorted partition numbers without duplicates. Raises UsageError if ``numbers`` is not a list of non-negative integers.

    :param value: text of the option ``assign`` that contains the numbers, for the error.
    """
    if not isinstance(numbers, list) or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise UsageError(f"kafka-tiered: assign = {value!r} has no list of partitions", hint=_EXAMPLE_HINTS["assign"])
    return sorted(set(numbers))


def _parse_offsets_option(
    options: Mapping[str, str], name: str, unbounded_word: str, unbounded_number: int, bound_offset: int
) -> dict[TopicPartition, int]:
    """Parse an option such as ``startingOffsets`` and return the offset of each partition that it names.

    :param unbounded_word: the option value that means "no bounds": "earliest" or "latest".
    :param unbounded_number: the number that stands for ``unbounded_word`` in JSON: -2 or -1.
    :param bound_offset: the offset that ``unbounded_number`` is replaced with.
    :raises UsageError: if the value is invalid or conflicts with the option of the same name in the singular.
    """
    value = options.get(name, unbounded_word)
    if value == unbounded_word:
        return {}
    if f"{name[:-1]}" in options:
        raise UsageError(f"kafka-tiered: {name} and {name[:-1]} both select a range", hint="Give one of them")
    if value in ("earliest", "latest"):
        raise UsageError(f"kafka-tiered: {name} = {value} leaves nothing to read", hint=_EXAMPLE_HINTS[name])
    found = {}
    for topic, offsets in _parse_json_object(name, value).items():
        for number, offset in offsets.items() if isinstance(offsets, dict) else [("", None)]:
            if not number.isdigit() or not isinstance(offset, int) or (offset < 0 and offset != unbounded_number):
                raise UsageError(f"kafka-tiered: {name} = {value!r}: {topic} has no offsets by partition", hint=_EXAMPLE_HINTS[name])
            found[TopicPartition.create_validated(topic, int(number))] = bound_offset if offset == unbounded_number else offset
    return found


def _parse_int_option(options: Mapping[str, str], name: str, default: DefaultT, min_value: int = 0) -> int | DefaultT:
    """Return the integer value of an option, or ``default`` if it is absent. Raises UsageError if it is not an integer from ``min_value``
    to 2^63-1.
    """
    if name not in options:
        return default
    if not (options[name].isascii() and options[name].isdigit()) or not min_value <= int(options[name]) <= MAX_OFFSET:
        raise UsageError(f"kafka-tiered: {name} = {options[name]!r} is not a whole number from {min_value} to {MAX_OFFSET}")
    return int(options[name])


def _parse_choice_option(options: Mapping[str, str], name: str, choices: tuple[Choice, ...]) -> Choice:
    """Return the value of an option that allows only ``choices``; the first is the default. Raises UsageError for another value."""
    chosen = options.get(name, choices[0])
    for choice in choices:
        if chosen == choice:
            return choice
    raise UsageError(f"kafka-tiered: {name} = {chosen!r}: allowed is {' or '.join(choices)}")


def _parse_partition_numbers(text: str) -> tuple[int, ...] | None:
    """Parse comma-separated partition numbers; None if ``text`` is empty. Raises UsageError if one is not a number."""
    if not text:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in numbers):
        raise UsageError(f"kafka-tiered: partitions = {text!r}: write numbers with commas between them")
    return tuple(sorted({int(part) for part in numbers}))


def _parse_columns_option(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the requested columns, in the order given; empty means all. Raises UsageError for an unknown column."""
    exact = {name.lower(): name for name in ALL_COLUMN_TYPES}
    names = [part.strip() for part in options["columns"].split(",")] if options.get("columns") else []
    for name in names:
        if name.lower() not in exact:
            raise UsageError(f"kafka-tiered has no column {name!r}", hint=f"Its columns are {', '.join(ALL_COLUMN_TYPES)}")
    if _parse_choice_option(options, "includeHeaders", ("true", "false")) == "false":
        names = [name for name in names or COLUMN_TYPES if name.lower() != "headers"]
    return tuple(dict.fromkeys(exact[name.lower()] for name in names))
