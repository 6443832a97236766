"""Spark data source ``kafka-tiered``: reads the records of remote partitions as a DataFrame without contacting a broker.

Reads are planned from metadata alone: the control log of each partition is folded, its offsets are cut into splits, and each split is
read by one task. Small partitions share a task. docs/spark.md lists the options.

Spark does not tell a Python data source which columns a query needs, so columns are chosen with the option ``columns`` or with
``.schema()``. Ranges are options too, and filters are left to Spark. A Python source may take filters (``pushFilters``, Spark 4.1 to
4.3), but Spark then keeps what the last query planned for every later one: after ``df.where("offset < 5").count()``, ``df.count()`` reads
only those five offsets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, LongType, StringType, StructField, StructType, TimestampType
from typing_extensions import override

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config import settings as config
from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.consumer.history import (
    ConsumedLogHistory,
    HistoryMismatchReason,
    consumed_history_before_position,
    find_log_mismatch,
    log_identity,
)
from compactor.consumer.reading import (
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
from compactor.control.logs import retry_if_object_missing
from compactor.control.state import PartitionState
from compactor.decoding.fields import KeyAndValueDecoder
from compactor.errors import BadData, UsageError
from compactor.kernels.common import KEY_BYTES
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.spark.options import (
    ALL_COLUMN_TYPES,
    COLUMN_TYPES,
    ReadRequest,
    is_table_creation,
    parse_read_options,
    remove_options_added_by_spark,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from compactor.consumer.columns import TextFunction

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
    """Spark data source ``kafka-tiered``, from which Spark gets the schema and the readers. docs/spark.md describes its options.

    For a table over this source, the options are stored in the metadata of its columns, because Spark 4 drops the table's options but keeps
    this metadata.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._request = parse_read_options(options) if options else None

    @classmethod
    @override
    def name(cls) -> str:
        """Return the format name for ``spark.read.format``."""
        return "kafka-tiered"

    @override
    def schema(self) -> StructType | str:
        """Return the columns that a read gives, with the options in their metadata if a table is being created."""
        request = self._request or parse_read_options({})
        names = request.columns or COLUMN_TYPES
        if is_table_creation(self.options):
            kept = {OPTIONS_KEY: json.dumps(remove_options_added_by_spark(self.options))}
            return StructType([StructField(name, SPARK_TYPES[ALL_COLUMN_TYPES[name]], metadata=kept) for name in names])
        return ", ".join(f"`{name}` {ALL_COLUMN_TYPES[name]}" for name in names)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for a batch query."""
        return KafkaTieredBatchReader(self._request_from_options_or_schema(schema), schema)

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader for a streaming query."""
        return KafkaTieredStreamReader(self._request_from_options_or_schema(schema), schema)

    def _request_from_options_or_schema(self, schema: StructType) -> ReadRequest:
        """Return the options of this source or, for a table, those in the column metadata. Raises UsageError if there are none."""
        require_supported_schema(schema)
        if self._request is not None:
            return self._request
        kept = next((column.metadata[OPTIONS_KEY] for column in schema.fields if OPTIONS_KEY in (column.metadata or {})), None)
        if kept is None:
            hint = "Create it without columns: the option columns chooses them"
            raise UsageError("Spark does not tell the options of this table", hint=hint)
        return parse_read_options(json.loads(kept))


class KafkaTieredBatchReader(DataSourceReader):
    """Batch reader. Planned on the driver, then pickled and sent to the executors."""

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        self._request = request
        self._schema = schema

    @override
    def partitions(self) -> Sequence[InputPartition]:
        """Return the splits of the read."""
        return plan_splits(_open_tier(self._request.settings), self._request)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one split as Arrow batches."""
        return read_split(self._request, self._schema, partition)


class KafkaTieredStreamReader(DataSourceStreamReader):
    """Micro-batch reader that returns records as imports and broker uploads append them to the tier.

    A stream offset maps each partition name to its end offset (exclusive). Under ``HISTORY_KEY`` it also holds, for each partition, the
    leader epoch before that offset (null if unknown) and the topic id. Leader epoch and topic id are used to reject a log that was
    truncated or whose topic was recreated.
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
        """Return an empty offset: each partition starts where the options say."""
        return {}

    @override
    def latestOffset(self) -> StreamOffset:  # type: ignore[override]
        """Return the current end offset of each partition, with its leader epoch and topic id. With read_committed the end is the last
        stable offset.
        """

        def history_up_to_partition_end(tier: Tier, partition: TopicPartition) -> ConsumedLogHistory:
            """Return the end offset of one partition with its leader epoch and topic id."""
            state = tier.open_control_log_of_partition(tier.latest_incarnation(partition)).refresh()
            return log_identity(tier, state).consumed_history_below_offset(_end_offset_of_read(tier, self._request, state))

        ends = {str(name): log for name, log in map_requested_partitions(self._request, history_up_to_partition_end)}
        return {name: log.end for name, log in ends.items()} | {
            HISTORY_KEY: {name: [log.last_read_leader_epoch, log.topic_id] for name, log in ends.items()}
        }

    @override
    def partitions(self, start: StreamOffset, end: StreamOffset) -> Sequence[InputPartition]:
        """Return the splits between two stream offsets. Raises BadData if the log was truncated or the topic was recreated."""
        self._require_logs_match_stream_history(start)
        self._require_logs_match_stream_history(end)
        names = {str(name): name for name in _requested_partitions(_open_tier(self._request.settings), self._request)}
        # A partition that came later begins where the stream would have begun with it.
        begun = {names[name]: offset for name, offset in start.items() if name in names}
        until = {names[name]: offset for name, offset in end.items() if name in names}
        starting_ms = None if start else self._request.starting_ms
        request = replace(self._request, starting={**self._request.starting, **begun}, ending=until, starting_ms=starting_ms)
        return plan_splits(_open_tier(self._request.settings), request)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one split as Arrow batches."""
        return read_split(self._request, self._schema, partition)

    def _require_logs_match_stream_history(self, offsets: StreamOffset) -> None:
        """Raise BadData if a log no longer contains what was read up to ``offsets``. Stream offsets that earlier versions of this program
        made have no history and are accepted.
        """
        known: dict[str, list[Any]] = offsets.get(HISTORY_KEY, {})

        def find_log_mismatch_with_stream_history(tier: Tier, partition: TopicPartition) -> HistoryMismatchReason | None:
            """Return how the log of a partition differs from the stream's history, or None if it matches."""
            if str(partition) not in known:
                return None
            return find_log_mismatch(
                consumed_history_before_position(offsets[str(partition)], *known[str(partition)]),
                log_identity(tier, tier.open_control_log_of_partition(tier.latest_incarnation(partition)).refresh()),
            )

        for name, found in map_requested_partitions(self._request, find_log_mismatch_with_stream_history) if known else ():
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
    """An offset range of one partition that one task reads.

    topic_id: topic id in a broker-managed tier, so that a task need not read the brokers' metadata; otherwise empty.
    bytes: estimated number of bytes to read.
    """

    extent: OffsetRangeToRead
    options: ReadOptions
    topic_id: TopicId
    bytes: int


class ReadSplit(InputPartition):
    """All offset ranges that one task reads."""

    def __init__(self, parts: Sequence[PartitionReadRange]) -> None:
        super().__init__(", ".join(f"{part.extent.partition} {part.extent.first}..{part.extent.last}" for part in parts[:3]))
        self.parts = tuple(parts)


def read_split(request: ReadRequest, schema: StructType, split: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the records of a split as Arrow batches. Runs on an executor."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from compactor.consumer.columns import to_arrow_batch

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
    """Return the function that decodes keys and values of a partition. It raises BadData for bytes that cannot be decoded, if the request
    says so.
    """
    decoder = KeyAndValueDecoder(request.settings)

    def decode_field_text(field: str, offset: int, data: bytes | None) -> str | None:
        found = decoder.decode_key_or_value(data, request.key_format if field == "key" else request.value_format)
        if found.error and request.fails_on_decoding_error:
            hint = "onDecodingError = null reads on; the columns key and value have the bytes"
            raise BadData(f"the {field} cannot be decoded: {found.error}", segment=str(partition), offset=offset, hint=hint)
        return found.format_value_as_text() if found.is_decoded else None

    return decode_field_text


def require_supported_schema(schema: StructType) -> None:
    """Raise UsageError if a schema given with ``.schema()`` has an unknown column or another type. A schema may choose columns but not
    change their types.
    """
    for column in schema.fields:
        if column.name not in ALL_COLUMN_TYPES:
            raise UsageError(f"kafka-tiered has no column {column.name!r}", hint=f"Its columns are {', '.join(ALL_COLUMN_TYPES)}")
        if column.dataType.simpleString() != ALL_COLUMN_TYPES[column.name]:
            raise UsageError(f"kafka-tiered: column {column.name} is {ALL_COLUMN_TYPES[column.name]}", hint="Cast it after reading")


# ---- planning ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _open_cached_tier(settings_json: str, topic_id: TopicId, topic: str) -> Tier:
    """Open a tier from its settings as JSON, once per process for the same arguments. ``topic_id``: id of ``topic``; empty if unknown."""
    return open_tier(config.Settings.model_validate_json(settings_json), topics={topic: topic_id} if topic_id else None)


def _open_tier(settings: config.Settings, topic_id: TopicId = EMPTY_TOPIC_ID, topic: str = "") -> Tier:
    """Return this process's clients for a tier.

    :param topic_id: id of ``topic`` if it is known already; the brokers' metadata is then not read.
    """
    return _open_cached_tier(settings.model_dump_json(), topic_id, topic if topic_id else "")


def plan_splits(tier: Tier, request: ReadRequest) -> list[InputPartition]:
    """Return the splits of a read. Planning costs a few requests per partition, and requests per segment only if timestamps are looked up.
    Raises UsageError if a requested partition does not exist, StoreError if metadata cannot be read.
    """
    found = [
        part
        for _, parts in map_requested_partitions(request, lambda _, name: _plan_read_ranges_of_partition(tier, request, name), tier)
        for part in parts
    ]
    return list(_combine_into_splits(found, request.split_bytes))


def _requested_partitions(tier: Tier, request: ReadRequest) -> list[TopicPartition]:
    """Return the partitions of the tier that the request chooses."""
    return request.select_requested_partitions(tier.list_partitions_in_latest_incarnation(), tier.ports.layout.url)


def map_requested_partitions(
    request: ReadRequest, function: Callable[[Tier, TopicPartition], T], tier: Tier | None = None
) -> list[tuple[TopicPartition, T]]:
    """Call ``function`` with the tier and each requested partition, in several threads. Return (partition, result) pairs in the order of
    the partitions.

    :param tier: the tier to use; None to open the one that the request names.
    """
    tier = tier or _open_tier(request.settings)
    names = _requested_partitions(tier, request)
    with ThreadPoolExecutor(PARTITION_THREADS, "partition") as pool:
        return list(zip(names, pool.map(partial(function, tier), names), strict=True))


def _combine_into_splits(parts: Iterable[PartitionReadRange], split_bytes: int) -> Iterator[ReadSplit]:
    """Combine neighbouring parts into splits of at most ``split_bytes``, counting PARTITION_OVERHEAD_BYTES for each part."""
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


def _plan_read_ranges_of_partition(tier: Tier, request: ReadRequest, partition: TopicPartition) -> list[PartitionReadRange]:
    """Return the offset ranges into which one partition is cut for reading; each is read by one task. If a segment is replaced during
    planning, the state is read again and planning restarts.
    """
    return retry_if_object_missing(
        partition,
        lambda: _read_ranges_within_request_bounds(
            tier, request, partition, tier.open_control_log_of_partition(tier.latest_incarnation(partition)).refresh()
        ),
        MAX_RETRIES,
    )


def _end_offset_of_read(tier: Tier, request: ReadRequest, state: PartitionState) -> int:
    """Return the first offset that the request may not read: the last stable offset with read_committed, else the end of the log."""
    return last_stable_offset(tier, state) if request.committed else state.end_offset + 1


def _read_ranges_within_request_bounds(
    tier: Tier, request: ReadRequest, partition: TopicPartition, state: PartitionState
) -> list[PartitionReadRange]:
    """Return the offset ranges of one partition that satisfy the bounds of the request, cut to about ``split_bytes`` each."""
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
        each = _last_record_requests_of_tasks(request, partition, extent)
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
    """Return roughly how many bytes of the segments lie between two offsets, both inclusive."""
    whole = segments[-1].end_offset - segments[0].start_offset + 1
    return sum(segment.size_bytes for segment in segments) * (last_offset - first_offset + 1) // whole


def _cut_segments_into_ranges(segments: Sequence[RemoteLogSegmentMetadata], split_bytes: int) -> Iterator[OffsetsAndSegments]:
    """Yield (first offset, last offset, segments), both offsets inclusive. Neighbouring segments are combined up to ``split_bytes``; a
    larger segment is cut into equal offset ranges.
    """
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


def _last_record_requests_of_tasks(
    request: ReadRequest, partition: TopicPartition, read_range: OffsetRangeToRead
) -> list[LastRecordOfEachKeyRequest]:
    """Return one request for each task that reads a partition with ``view = latest``. By default one task reads it, and sorts the keys on
    local disk if they do not fit in memory. With the option ``keyRanges``, or if the range of offsets is too large for this sort, each task
    reads the keys of one hash range.
    """
    cleaner = request.settings.cleaner_settings_for_topic(partition.topic)
    budget = max(cleaner.map_budget_bytes, 1 << 16)
    records = sum(_record_count_upper_bound_of_segment(segment) for segment in read_range.segments)
    ranges = request.key_ranges or -(-records * KEY_BYTES // budget) or 1
    if not request.key_ranges and ranges > 1 and read_range.last - read_range.first < MAX_SPILL_SPAN:
        disk = cleaner.disk_budget_bytes if isinstance(cleaner.disk_budget_bytes, int) else 0
        return [LastRecordOfEachKeyRequest(0, 1, budget, spill=DiskKeySortRequest(records, disk))]
    return [LastRecordOfEachKeyRequest(number, ranges, budget) for number in range(ranges)]


def _record_count_upper_bound_of_segment(segment: RemoteLogSegmentMetadata) -> int:
    """Return an upper bound of a segment's record count, because brokers do not report the count."""
    return segment.records or segment.end_offset - segment.start_offset + 1
