"""``spark.read.format("kafka-tiered")``: the records of remote partitions as a DataFrame, without a broker.

Planned from metadata alone: each partition is folded, its offsets are cut into splits, and each split is read by one task; small partitions
share a task. docs/spark.md lists the options. Spark does not tell a Python source which columns a query needs: they are chosen by
``columns`` or ``.schema()``.

Ranges are options too, and filters are left to Spark. A Python source may take filters (``pushFilters``, Spark 4.1 to 4.3), but Spark then
keeps what the last query planned for every later one: after ``df.where("offset < 5").count()``, ``df.count()`` reads those five offsets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from compactor import config
from compactor.bootstrap import Tier, open_tier
from compactor.consumer.pieces import Gone
from compactor.consumer.reading import (
    FOLDS,
    MOST_SPAN,
    Extent,
    Latest,
    Reader,
    Spill,
    WantedRecords,
    first_offset_at,
    last_stable_offset,
)
from compactor.control.state import PartitionState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.spark.options import DDL, ReadRequest, is_table, parse_options, without_spark

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

KEY_BYTES: Final = 20
OPEN_BYTES: Final = 4 << 20
"""What a partition weighs besides its bytes where small ones share a task: some requests (Spark: openCostInBytes)."""

KEPT: Final = "kafka-tiered"
"""Where the columns of a table have its options."""

TYPES: Final[dict[str, DataType]] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    DDL["headers"]: ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}

LOOKERS: Final = 16
"""Partitions that are folded at a time."""


class KafkaTieredSource(DataSource):
    """See docs/spark.md.

    Spark 4 forgets the options of a table that was created over a Python source, and keeps its columns: so the columns have the options.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._request = parse_options(options) if options else None

    @classmethod
    def name(cls) -> str:
        return "kafka-tiered"

    def schema(self) -> StructType | str:
        request = self._request or parse_options({})
        names = request.columns or DDL
        if is_table(self.options):
            kept = {KEPT: json.dumps(without_spark(self.options))}
            return StructType([StructField(name, TYPES[DDL[name]], metadata=kept) for name in names])
        return ", ".join(f"`{name}` {DDL[name]}" for name in names)

    def reader(self, schema: StructType) -> DataSourceReader:
        return KafkaTieredReader(self._of(schema), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, Spark's name
        return KafkaTieredStream(self._of(schema), schema)

    def _of(self, schema: StructType) -> ReadRequest:
        check_schema(schema)
        if self._request is not None:
            return self._request
        kept = next((column.metadata[KEPT] for column in schema.fields if KEPT in (column.metadata or {})), None)
        if kept is None:
            hint = "Create it without columns: the option columns chooses them"
            raise UsageError("Spark does not tell the options of this table", hint=hint)
        return parse_options(json.loads(kept))


class KafkaTieredReader(DataSourceReader):
    """Planned on the driver, shipped to the executors as it is."""

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        self._request = request
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return plan(_tier(self._request.settings), self._request)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._request.settings, self._schema, partition)


class KafkaTieredStream(DataSourceStreamReader):
    """Micro-batches of what has come to the tier: imports and brokers make it longer. Offsets are those of the partitions, by name."""

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        unbounded = request.ending_ms is None and not request.ending and request.ending_offset == ReadRequest.ending_offset
        if request.latest or not unbounded:
            what = "view = latest" if request.latest else "an end"
            raise UsageError(f"kafka-tiered: {what} is for spark.read, not for readStream", hint="Leave it out; a stream has every record")
        self._request = request
        self._schema = schema

    def initialOffset(self) -> dict[str, int]:  # noqa: N802, Spark's name
        return {}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # noqa: N802, the signature that every supported Spark calls
        """The end of each partition: what is committed, where that is asked for."""
        ends = _of_each(self._request, lambda tier, name: _end(tier, self._request, tier.open(name).refresh()))
        return {str(name): end for name, end in ends}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        names = {str(name): name for name in _names(_tier(self._request.settings), self._request)}
        # A partition that came later begins where the stream would have begun with it.
        begun = {names[name]: offset for name, offset in start.items() if name in names}
        until = {names[name]: offset for name, offset in end.items() if name in names}
        starting_ms = None if start else self._request.starting_ms
        request = replace(self._request, starting={**self._request.starting, **begun}, ending=until, starting_ms=starting_ms)
        return plan(_tier(self._request.settings), request)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_split(self._request.settings, self._schema, partition)


@dataclass(frozen=True)
class ReadPart:
    """Some offsets of one partition. ``topic_id``: of a tier that brokers write, so that a task need not ask them for it."""

    extent: Extent
    wanted: WantedRecords
    topic_id: str
    bytes: int


class Split(InputPartition):
    """What one task reads."""

    def __init__(self, parts: Sequence[ReadPart]) -> None:
        super().__init__(", ".join(f"{part.extent.name} {part.extent.first}..{part.extent.last}" for part in parts[:3]))
        self.parts = tuple(parts)


def read_split(settings: config.Settings, schema: StructType, split: InputPartition) -> Iterator[pa.RecordBatch]:
    """On an executor."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from compactor.consumer.columns import batch_of

    if not isinstance(split, Split):
        return
    columns = to_arrow_schema(schema, timezone="UTC")
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    folder = local if os.path.isdir(local) else None
    for part in split.parts:
        name = part.extent.name
        for selection in Reader(_tier(settings, part.topic_id, name.topic), part.extent, part.wanted, folder).selections():
            yield batch_of(selection, name.topic, name.partition, columns)


def check_schema(schema: StructType) -> None:
    """A schema given by ``.schema()`` chooses columns; it changes no types. Raises UsageError."""
    for column in schema.fields:
        if column.name not in DDL:
            raise UsageError(f"kafka-tiered has no column {column.name!r}", hint=f"Its columns are {', '.join(DDL)}")
        if column.dataType.simpleString() != DDL[column.name]:
            raise UsageError(f"kafka-tiered: column {column.name} is {DDL[column.name]}", hint="Cast it after reading")


# ---- planning ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _opened(settings: str, topic_id: str, topic: str) -> Tier:
    return open_tier(config.Settings.model_validate_json(settings), topics={topic: topic_id} if topic_id else None)


def _tier(settings: config.Settings, topic_id: str = "", topic: str = "") -> Tier:
    """One client per process and tier; ``topic_id`` where brokers' metadata need not be asked for it."""
    return _opened(settings.model_dump_json(), topic_id, topic if topic_id else "")


def plan(tier: Tier, request: ReadRequest) -> list[InputPartition]:
    """The splits of a read: a few requests per partition, none per segment unless times are looked up. Raises UsageError, StoreError."""
    found = [part for _, parts in _of_each(request, lambda _, name: _of_partition(tier, request, name), tier) for part in parts]
    return list(_packed(found, request.split_bytes))


def _names(tier: Tier, request: ReadRequest) -> list[TopicPartition]:
    return request.chosen(tier.partitions(), tier.ports.layout.url)


def _of_each(request: ReadRequest, look: Callable[[Tier, TopicPartition], T], given: Tier | None = None) -> list[tuple[TopicPartition, T]]:
    """What ``look`` says of each partition that is read; many are looked at at a time."""
    tier = given or _tier(request.settings)
    names = _names(tier, request)
    with ThreadPoolExecutor(LOOKERS, "look") as pool:
        return list(zip(names, pool.map(partial(look, tier), names), strict=True))


def _packed(parts: Iterable[ReadPart], split_bytes: int) -> Iterator[Split]:
    """Small ones together, in their order."""
    together: list[ReadPart] = []
    size = 0
    for part in parts:
        weight = part.bytes + OPEN_BYTES
        if together and size + weight > split_bytes:
            yield Split(together)
            together, size = [], 0
        together.append(part)
        size += weight
    if together:
        yield Split(together)


def _of_partition(tier: Tier, request: ReadRequest, name: TopicPartition) -> list[ReadPart]:
    for _ in range(FOLDS):
        try:
            return _parts(tier, request, name, tier.open(name).refresh())
        except Gone:
            continue  # a segment was replaced while times were looked up in it
    return _parts(tier, request, name, tier.open(name).refresh())


def _end(tier: Tier, request: ReadRequest, state: PartitionState) -> int:
    """Exclusive: what may be read of a partition."""
    return last_stable_offset(tier, state) if request.committed else state.end_offset + 1


def _parts(tier: Tier, request: ReadRequest, name: TopicPartition, state: PartitionState) -> list[ReadPart]:
    limit = request.settings.cleaner_for(name.topic).max_decompressed_batch_bytes
    first = max(request.starting.get(name, request.starting_offset), state.start_offset, tier.log_start(name))
    end = min(request.ending.get(name, request.ending_offset), _end(tier, request, state))
    if request.starting_ms is not None:
        found = first_offset_at(tier, name, state.live, request.starting_ms, limit)
        first = end if found is None else max(first, found)
    if request.ending_ms is not None:
        found = first_offset_at(tier, name, state.live, request.ending_ms, limit)
        end = end if found is None else min(end, found)
    segments = [segment for segment in state.live if segment.end_offset >= first and segment.start_offset < end]
    if not segments or first >= end:
        return []
    if request.latest:
        extent, size = Extent(name, first, end - 1, tuple(segments)), sum(segment.size_bytes for segment in segments)
        each = _latest(request, name, extent)
        return [ReadPart(extent, WantedRecords(request.committed, limit, latest), tier.topic_id(name), size) for latest in each]
    wanted = WantedRecords(request.committed, limit)
    cuts = [(max(a, first), min(b, end - 1), of) for a, b, of in _cut(segments, request.split_bytes)]
    return [ReadPart(Extent(name, a, b, of), wanted, tier.topic_id(name), _bytes(a, b, of)) for a, b, of in cuts if a <= b]


def _bytes(first: int, last: int, segments: Sequence[RemoteLogSegmentMetadata]) -> int:
    """About how much of the segments lies between two offsets."""
    whole = segments[-1].end_offset - segments[0].start_offset + 1
    return sum(segment.size_bytes for segment in segments) * (last - first + 1) // whole


def _cut(segments: Sequence[RemoteLogSegmentMetadata], split_bytes: int) -> Iterator[tuple[int, int, tuple[RemoteLogSegmentMetadata, ...]]]:
    """(first offset, last offset, segments): neighbours together up to ``split_bytes``, larger segments in equal parts of their offsets."""
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


def _latest(request: ReadRequest, name: TopicPartition, extent: Extent) -> list[Latest]:
    """One task per partition. Where its keys would not fit the memory it sorts them on its disk; ``keyRanges`` says otherwise."""
    cleaner = request.settings.cleaner_for(name.topic)
    budget = max(cleaner.map_budget_bytes, 1 << 16)
    records = sum(_records(segment) for segment in extent.segments)
    ranges = request.key_ranges or -(-records * KEY_BYTES // budget) or 1
    if not request.key_ranges and ranges > 1 and extent.last - extent.first < MOST_SPAN:
        disk = cleaner.disk_budget_bytes if isinstance(cleaner.disk_budget_bytes, int) else 0
        return [Latest(0, 1, budget, spill=Spill(records, disk))]
    return [Latest(number, ranges, budget) for number in range(ranges)]


def _records(segment: RemoteLogSegmentMetadata) -> int:
    """How many it has at most: brokers do not say how many it has."""
    return segment.records or segment.end_offset - segment.start_offset + 1
