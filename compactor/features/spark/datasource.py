"""Spark data source ``kafka-tiered``: reads the records of remote partitions as a DataFrame without contacting a broker.

Reads are planned from the control logs alone. docs/spark.md lists the options. Filters are left to Spark: with ``pushFilters`` (Spark 4.1
to 4.3) Spark keeps what the last query planned for every later one, so that after ``df.where("offset < 5").count()``, ``df.count()`` reads
only those five offsets.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, LongType, StringType, StructField, StructType, TimestampType
from typing_extensions import override

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config import settings as config
from compactor.constants import EMPTY_TOPIC_ID, MAX_OFFSET, TopicId
from compactor.control.logs import retry_if_object_missing
from compactor.control.state import PartitionState
from compactor.decoding import FORMATS, FieldFormat, KeyAndValueDecoder
from compactor.errors import BadData, UsageError
from compactor.kernels.common import KEY_BYTES
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.read.outcomes import (
    ConsumedLogHistory,
    HistoryMismatchReason,
    consumed_history_before_position,
    find_log_mismatch,
    log_identity,
)
from compactor.read.reading import (
    MAX_RETRIES,
    MAX_SPILL_SPAN,
    DiskKeySortRequest,
    LastRecordOfEachKeyRequest,
    OffsetRangeReader,
    OffsetRangeToRead,
    ReadOptions,
    find_record_for_time,
    last_stable_offset,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from compactor.read.columns import TextFunction


# ---- options: those of Spark's own Kafka source are accepted where they have the same meaning --------------------------------


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
"""Spark types of the columns in compactor.read.columns.MESSAGE_COLUMNS."""

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
    """Options of one read.

    topics, pattern, assigned: exactly one is set.
    partitions: of every topic; None means all.
    starting_offset, ending_offset: defaults; start inclusive, end exclusive.
    starting, ending: of single partitions.
    starting_ms, ending_ms: resolved to offsets as in Spark's Kafka source.
    key_ranges: tasks per partition for ``latest``; 0 means automatic.
    fails_on_decoding_error: if not, the text is null.
    skip_damaged: with a warning in the executor's log.
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
        """Sorted. Raises UsageError if a topic or partition is not in the tier."""
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
    """Case and underscores are ignored. Raises UsageError if an option is unknown or invalid."""
    given = {_normalize_option_name(name): (name, value) for name, value in remove_spark_options(options).items()}
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
    return "provider" in options


def remove_spark_options(options: Mapping[str, str]) -> dict[str, str]:
    if not is_table_creation(options):
        return dict(options)
    return {
        name: value
        for name, value in options.items()
        if _normalize_option_name(name) not in TABLE_OPTIONS and not name.startswith("option.")
    }


def _normalize_option_name(name: str) -> str:
    return name.replace("_", "").lower()


def _unknown_option_hint(name: str, known_options: Mapping[str, str]) -> str:
    if name.startswith("kafka."):
        return "It asks no broker: leave it out"
    near = difflib.get_close_matches(name, list(known_options), n=1)
    return f"Did you mean {known_options[near[0]]}?" if near else f"It knows {', '.join(known_options.values())}"


def _parse_topic_options(options: Mapping[str, str]) -> dict[str, Any]:
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
    return TopicPartition.create_validated(name, 0).topic


def _parse_json_object(name: str, value: str) -> dict[str, Any]:
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
    if not isinstance(numbers, list) or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise UsageError(f"kafka-tiered: assign = {value!r} has no list of partitions", hint=_EXAMPLE_HINTS["assign"])
    return sorted(set(numbers))


def _parse_offsets_option(
    options: Mapping[str, str], name: str, unbounded_word: str, unbounded_number: int, bound_offset: int
) -> dict[TopicPartition, int]:
    """For ``startingOffsets`` and ``endingOffsets``. ``unbounded_word`` ("earliest", "latest") and ``unbounded_number`` (-2, -1) mean no
    bounds; the number becomes ``bound_offset``.
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
    if name not in options:
        return default
    if not (options[name].isascii() and options[name].isdigit()) or not min_value <= int(options[name]) <= MAX_OFFSET:
        raise UsageError(f"kafka-tiered: {name} = {options[name]!r} is not a whole number from {min_value} to {MAX_OFFSET}")
    return int(options[name])


def _parse_choice_option(options: Mapping[str, str], name: str, choices: tuple[Choice, ...]) -> Choice:
    chosen = options.get(name, choices[0])
    for choice in choices:
        if chosen == choice:
            return choice
    raise UsageError(f"kafka-tiered: {name} = {chosen!r}: allowed is {' or '.join(choices)}")


def _parse_partition_numbers(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in numbers):
        raise UsageError(f"kafka-tiered: partitions = {text!r}: write numbers with commas between them")
    return tuple(sorted({int(part) for part in numbers}))


def _parse_columns_option(options: Mapping[str, str]) -> tuple[str, ...]:
    exact = {name.lower(): name for name in ALL_COLUMN_TYPES}
    names = [part.strip() for part in options["columns"].split(",")] if options.get("columns") else []
    for name in names:
        if name.lower() not in exact:
            raise UsageError(f"kafka-tiered has no column {name!r}", hint=f"Its columns are {', '.join(ALL_COLUMN_TYPES)}")
    if _parse_choice_option(options, "includeHeaders", ("true", "false")) == "false":
        names = [name for name in names or COLUMN_TYPES if name.lower() != "headers"]
    return tuple(dict.fromkeys(exact[name.lower()] for name in names))


T = TypeVar("T")

PARTITION_OVERHEAD_BYTES: Final = 4 << 20
"""Bytes added to each partition's size when small partitions are combined, for its requests (like Spark's openCostInBytes)."""

OPTIONS_KEY: Final = "kafka-tiered"
"""Key in the metadata of a table's columns under which its options are stored."""

SPARK_TYPES: Final[dict[str, DataType]] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    COLUMN_TYPES["headers"]: ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}

HISTORY_KEY: Final = "history"
"""Key in a stream offset under which leader epochs and topic ids are stored."""

PARTITION_THREADS: Final = 16
"""Threads that read the state of partitions."""
StreamOffset = dict[str, Any]
"""Offset of a stream as Spark stores it: the end offset (exclusive) of each partition, and their histories."""
OffsetsAndSegments = tuple[int, int, tuple[RemoteLogSegmentMetadata, ...]]
"""First and last offset (inclusive) of a range, and the segments that hold it."""


class KafkaTieredSource(DataSource):
    """Data source.

    A table's options are stored in the metadata of its columns, because Spark 4 drops the options.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._request = parse_read_options(options) if options else None

    @classmethod
    @override
    def name(cls) -> str:
        return "kafka-tiered"

    @override
    def schema(self) -> StructType | str:
        request = self._request or parse_read_options({})
        names = request.columns or COLUMN_TYPES
        if is_table_creation(self.options):
            kept = {OPTIONS_KEY: json.dumps(remove_spark_options(self.options))}
            return StructType([StructField(name, SPARK_TYPES[ALL_COLUMN_TYPES[name]], metadata=kept) for name in names])
        return ", ".join(f"`{name}` {ALL_COLUMN_TYPES[name]}" for name in names)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        return KafkaTieredBatchReader(self._resolve_request(schema), schema)

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return KafkaTieredStreamReader(self._resolve_request(schema), schema)

    def _resolve_request(self, schema: StructType) -> ReadRequest:
        require_supported_schema(schema)
        if self._request is not None:
            return self._request
        kept = next((column.metadata[OPTIONS_KEY] for column in schema.fields if OPTIONS_KEY in (column.metadata or {})), None)
        if kept is None:
            hint = "Create it without columns: the option columns chooses them"
            raise UsageError("Spark does not tell the options of this table", hint=hint)
        return parse_read_options(json.loads(kept))


class KafkaTieredBatchReader(DataSourceReader):
    """Planned on the driver, then pickled and sent to the executors."""

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        self._request = request
        self._schema = schema

    @override
    def partitions(self) -> Sequence[InputPartition]:
        return plan_splits(_open_tier(self._request.settings), self._request)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._request, self._schema, partition)


class KafkaTieredStreamReader(DataSourceStreamReader):
    """Micro-batch reader of appended records.

    A stream offset has each partition's end offset (exclusive), and under ``HISTORY_KEY`` its last leader epoch (null if unknown) and topic
    id, to reject truncated logs and recreated topics.
    """

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        unbounded = request.ending_ms is None and not request.ending and request.ending_offset == ReadRequest.ending_offset
        if request.latest or not unbounded:
            what = "view = latest" if request.latest else "an end"
            raise UsageError(f"kafka-tiered: {what} is for spark.read, not for readStream", hint="Leave it out; a stream has every record")
        self._request = request
        self._schema = schema

    @override
    def initialOffset(self) -> dict[str, int]:
        return {}

    @override
    def latestOffset(self) -> StreamOffset:  # type: ignore[override]
        """With read_committed the end is the last stable offset."""

        def history_to_end(tier: Tier, partition: TopicPartition) -> ConsumedLogHistory:
            state = tier.open_partition_log(tier.latest_incarnation(partition)).refresh()
            return log_identity(tier, state).consumed_history_below_offset(_end_offset_of_read(tier, self._request, state))

        ends = {str(name): log for name, log in map_requested_partitions(self._request, history_to_end)}
        return {name: log.end for name, log in ends.items()} | {
            HISTORY_KEY: {name: [log.last_read_leader_epoch, log.topic_id] for name, log in ends.items()}
        }

    @override
    def partitions(self, start: StreamOffset, end: StreamOffset) -> Sequence[InputPartition]:
        """Raises BadData if the log was truncated or the topic was recreated."""
        self._require_stream_history(start)
        self._require_stream_history(end)
        names = {str(name): name for name in _requested_partitions(_open_tier(self._request.settings), self._request)}
        # A partition that came later begins where the stream would have begun with it.
        begun = {names[name]: offset for name, offset in start.items() if name in names}
        until = {names[name]: offset for name, offset in end.items() if name in names}
        starting_ms = None if start else self._request.starting_ms
        request = replace(self._request, starting={**self._request.starting, **begun}, ending=until, starting_ms=starting_ms)
        return plan_splits(_open_tier(self._request.settings), request)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._request, self._schema, partition)

    def _require_stream_history(self, offsets: StreamOffset) -> None:
        """Raise BadData if a log no longer contains what was read. Offsets of earlier versions have no history and are accepted."""
        known: dict[str, list[Any]] = offsets.get(HISTORY_KEY, {})

        def find_stream_mismatch(tier: Tier, partition: TopicPartition) -> HistoryMismatchReason | None:
            if str(partition) not in known:
                return None
            return find_log_mismatch(
                consumed_history_before_position(offsets[str(partition)], *known[str(partition)]),
                log_identity(tier, tier.open_partition_log(tier.latest_incarnation(partition)).refresh()),
            )

        for name, found in map_requested_partitions(self._request, find_stream_mismatch) if known else ():
            if found is not None:
                agreed = f"truncated: it holds what was read up to offset {found.agreed_offset}"
                what = "created again under another topic id" if found.reason == "topic" else agreed
                raise BadData(
                    f"the log was {what}, and the stream is at {offsets[str(name)]}",
                    segment=str(name),
                    hint="Begin a new checkpoint; startingOffsets says where",
                )


@dataclass(frozen=True)
class PartitionReadRange:
    """Offset range that one task reads. topic_id: empty unless the tier is broker-managed, so that a task need not read the brokers'
    metadata.
    """

    extent: OffsetRangeToRead
    options: ReadOptions
    topic_id: TopicId
    bytes: int


class ReadSplit(InputPartition):
    def __init__(self, parts: Sequence[PartitionReadRange]) -> None:
        super().__init__(", ".join(f"{part.extent.partition} {part.extent.first}..{part.extent.last}" for part in parts[:3]))
        self.parts = tuple(parts)


def read_split(request: ReadRequest, schema: StructType, split: InputPartition) -> Iterator[pa.RecordBatch]:
    from pyspark.sql.pandas.types import to_arrow_schema

    from compactor.read.columns import to_arrow_batch

    if not isinstance(split, ReadSplit):
        return
    columns = to_arrow_schema(schema, timezone="UTC")
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    folder = local if os.path.isdir(local) else None
    for part in split.parts:
        name = part.extent.partition
        decode = _text_decoder_of_partition(request, name)
        for selection in OffsetRangeReader(
            _open_tier(request.settings, part.topic_id, name.topic), part.extent, part.options, folder
        ).read_selected_records():
            yield to_arrow_batch(selection, name.topic, name.partition, columns, decode)


def _text_decoder_of_partition(request: ReadRequest, partition: TopicPartition) -> TextFunction:
    decoder = KeyAndValueDecoder(request.settings)

    def decode_field_text(field: str, offset: int, data: bytes | None) -> str | None:
        found = decoder.decode_key_or_value(data, request.key_format if field == "key" else request.value_format)
        if found.error and request.fails_on_decoding_error:
            hint = "onDecodingError = null reads on; the columns key and value have the bytes"
            raise BadData(f"the {field} cannot be decoded: {found.error}", segment=str(partition), offset=offset, hint=hint)
        return found.format_value_as_text() if found.is_decoded else None

    return decode_field_text


def require_supported_schema(schema: StructType) -> None:
    """Raise UsageError if ``.schema()`` has an unknown column or another type."""
    for column in schema.fields:
        if column.name not in ALL_COLUMN_TYPES:
            raise UsageError(f"kafka-tiered has no column {column.name!r}", hint=f"Its columns are {', '.join(ALL_COLUMN_TYPES)}")
        if column.dataType.simpleString() != ALL_COLUMN_TYPES[column.name]:
            raise UsageError(f"kafka-tiered: column {column.name} is {ALL_COLUMN_TYPES[column.name]}", hint="Cast it after reading")


# ---- planning ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _open_cached_tier(settings_json: str, topic_id: TopicId, topic: str) -> Tier:
    return open_tier(config.Settings.model_validate_json(settings_json), topics={topic: topic_id} if topic_id else None)


def _open_tier(settings: config.Settings, topic_id: TopicId = EMPTY_TOPIC_ID, topic: str = "") -> Tier:
    """If ``topic_id`` is known, the brokers' metadata is not read."""
    return _open_cached_tier(settings.model_dump_json(), topic_id, topic if topic_id else "")


def plan_splits(tier: Tier, request: ReadRequest) -> list[InputPartition]:
    """A few requests per partition; requests per segment only if timestamps are looked up. Raises UsageError if a requested partition does
    not exist, StoreError if metadata cannot be read.
    """
    found = [
        part for _, parts in map_requested_partitions(request, lambda _, name: _plan_partition(tier, request, name), tier) for part in parts
    ]
    return list(_combine_into_splits(found, request.split_bytes))


def _requested_partitions(tier: Tier, request: ReadRequest) -> list[TopicPartition]:
    return request.select_requested_partitions(tier.list_latest_incarnations(), tier.ports.layout.url)


def map_requested_partitions(
    request: ReadRequest, function: Callable[[Tier, TopicPartition], T], tier: Tier | None = None
) -> list[tuple[TopicPartition, T]]:
    """Call ``function`` in several threads. Results are in the partitions' order."""
    tier = tier or _open_tier(request.settings)
    names = _requested_partitions(tier, request)
    with ThreadPoolExecutor(PARTITION_THREADS, "partition") as pool:
        return list(zip(names, pool.map(partial(function, tier), names), strict=True))


def _combine_into_splits(parts: Iterable[PartitionReadRange], split_bytes: int) -> Iterator[ReadSplit]:
    together: list[PartitionReadRange] = []
    size = 0
    for part in parts:
        weight = part.bytes + PARTITION_OVERHEAD_BYTES
        if together and size + weight > split_bytes:
            yield ReadSplit(together)
            together, size = [], 0
        together.append(part)
        size += weight
    if together:
        yield ReadSplit(together)


def _plan_partition(tier: Tier, request: ReadRequest, partition: TopicPartition) -> list[PartitionReadRange]:
    """If a segment is replaced meanwhile, planning restarts."""
    return retry_if_object_missing(
        partition,
        lambda: _ranges_within_bounds(tier, request, partition, tier.open_partition_log(tier.latest_incarnation(partition)).refresh()),
        MAX_RETRIES,
    )


def _end_offset_of_read(tier: Tier, request: ReadRequest, state: PartitionState) -> int:
    """Exclusive: the last stable offset with read_committed, else the end of the log."""
    return last_stable_offset(tier, state) if request.committed else state.end_offset + 1


def _ranges_within_bounds(tier: Tier, request: ReadRequest, partition: TopicPartition, state: PartitionState) -> list[PartitionReadRange]:
    limit = request.settings.cleaner_settings_for_topic(partition.topic).max_decompressed_batch_bytes
    log_start = tier.first_readable_offset(state)
    first = max(request.starting.get(partition, request.starting_offset), log_start)
    end = min(request.ending.get(partition, request.ending_offset), _end_offset_of_read(tier, request, state))
    if request.starting_ms is not None:
        found = find_record_for_time(tier, state.topic_partition, state.live, request.starting_ms, limit, log_start)
        first = end if found is None else max(first, found.offset)
    if request.ending_ms is not None:
        found = find_record_for_time(tier, state.topic_partition, state.live, request.ending_ms, limit, log_start)
        end = end if found is None else min(end, found.offset)
    log = log_identity(tier, state)
    segments = [segment for segment in state.live if segment.end_offset >= first and segment.start_offset < end]
    if not segments or first >= end:
        return []
    topic_id = tier.metadata.topic_id(partition)
    if request.latest:
        extent, size = (
            OffsetRangeToRead(state.topic_partition, first, end - 1, tuple(segments), log),
            sum(segment.size_bytes for segment in segments),
        )
        each = _last_record_requests(request, partition, extent)
        return [PartitionReadRange(extent, ReadOptions(request.committed, limit, latest), topic_id, size) for latest in each]
    options = ReadOptions(request.committed, limit, skip_damaged=request.skip_damaged)
    cuts = [(max(a, first), min(b, end - 1), of) for a, b, of in _cut_segments_into_ranges(segments, request.split_bytes)]
    return [
        PartitionReadRange(
            OffsetRangeToRead(state.topic_partition, a, b, of, log), options, topic_id, _estimate_bytes_between_offsets(a, b, of)
        )
        for a, b, of in cuts
        if a <= b
    ]


def _estimate_bytes_between_offsets(first_offset: int, last_offset: int, segments: Sequence[RemoteLogSegmentMetadata]) -> int:
    """Both offsets are inclusive."""
    whole = segments[-1].end_offset - segments[0].start_offset + 1
    return sum(segment.size_bytes for segment in segments) * (last_offset - first_offset + 1) // whole


def _cut_segments_into_ranges(segments: Sequence[RemoteLogSegmentMetadata], split_bytes: int) -> Iterator[OffsetsAndSegments]:
    """Offsets are inclusive. Neighbours are combined up to ``split_bytes``; a larger segment is cut."""
    together: list[RemoteLogSegmentMetadata] = []
    for segment in segments:
        near = together and together[-1].end_offset + 1 == segment.start_offset
        if together and (not near or sum(s.size_bytes for s in together) + segment.size_bytes > split_bytes):
            yield together[0].start_offset, together[-1].end_offset, tuple(together)
            together = []
        parts = min(-(-segment.size_bytes // split_bytes), segment.end_offset - segment.start_offset + 1)
        if parts <= 1:
            together.append(segment)
            continue
        cuts = [segment.start_offset + (segment.end_offset + 1 - segment.start_offset) * part // parts for part in range(parts + 1)]
        for begin, stop in pairwise(cuts):
            yield begin, stop - 1, (segment,)
    if together:
        yield together[0].start_offset, together[-1].end_offset, tuple(together)


def _last_record_requests(
    request: ReadRequest, partition: TopicPartition, read_range: OffsetRangeToRead
) -> list[LastRecordOfEachKeyRequest]:
    """One task, which sorts the keys on local disk if they do not fit in memory, or tasks for hash ranges with the option ``keyRanges`` or
    too many offsets for this sort.
    """
    cleaner = request.settings.cleaner_settings_for_topic(partition.topic)
    budget = max(cleaner.map_budget_bytes, 1 << 16)
    records = sum(_max_record_count(segment) for segment in read_range.segments)
    ranges = request.key_ranges or -(-records * KEY_BYTES // budget) or 1
    if not request.key_ranges and ranges > 1 and read_range.last - read_range.first < MAX_SPILL_SPAN:
        disk = cleaner.disk_budget_bytes if isinstance(cleaner.disk_budget_bytes, int) else 0
        return [LastRecordOfEachKeyRequest(0, 1, budget, spill=DiskKeySortRequest(records, disk))]
    return [LastRecordOfEachKeyRequest(number, ranges, budget) for number in range(ranges)]


def _max_record_count(segment: RemoteLogSegmentMetadata) -> int:
    """An upper bound: brokers do not report the count."""
    return segment.records or segment.end_offset - segment.start_offset + 1
