"""``spark.read.format("kafka-tiered")``: the records of remote partitions as a DataFrame, without a broker.

Planned from metadata alone: each partition is folded, its offsets are cut into splits, and each split is read by one task. docs/spark.md
lists the options. Spark does not tell a Python source which columns a query needs: they are chosen by ``columns`` or ``.schema()``.

Ranges are options too, and filters are left to Spark. A Python source may take filters (``pushFilters``, Spark 4.1 to 4.3), but Spark then
keeps what the last query planned for every later one: after ``df.where("offset < 5").count()``, ``df.count()`` reads those five offsets.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from compactor import config
from compactor.bootstrap import Tier, open_tier
from compactor.consumer.pieces import Gone
from compactor.consumer.reading import FOLDS, Extent, Latest, Reader, WantedRecords, first_offset_at, last_stable_offset
from compactor.control.state import PartitionState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata

if TYPE_CHECKING:
    import pyarrow as pa

MAX: Final = 2**63 - 1
SPLIT_BYTES: Final = 64 << 20
KEY_BYTES: Final = 20

SETTINGS: Final = {
    "url": ("tier", "url"),
    "controlurl": ("tier", "control_url"),
    "layout": ("tier", "layout"),
    "kind": ("tier", "kind"),
    "endpointurl": ("s3", "endpoint_url"),
    "region": ("s3", "region"),
}
"""Options that are settings of the tier; each may also stand in the file that ``config`` names."""

DDL: Final = {
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
"""The columns, with their types in Spark: compactor.consumer.columns.COLUMNS."""

READING: Final = {
    "config": "config", "topic": "topic", "partitions": "partitions", "startingoffset": "startingOffset", "endingoffset": "endingOffset",
    "startingtimestamp": "startingTimestamp", "endingtimestamp": "endingTimestamp", "isolation": "isolation", "view": "view",
    "columns": "columns", "splitbytes": "splitBytes", "keyranges": "keyRanges",
}  # fmt: skip


@dataclass(frozen=True)
class ReadRequest:
    """The options, checked. ``starting_ms`` and ``ending_ms`` are looked up as offsets, as Spark's own Kafka source does it."""

    settings: config.Settings
    topic: str
    partitions: tuple[int, ...] | None = None
    starting_offset: int = 0
    ending_offset: int = MAX
    starting_ms: int | None = None
    ending_ms: int | None = None
    committed: bool = True
    latest: bool = False
    columns: tuple[str, ...] = ()
    split_bytes: int = SPLIT_BYTES
    key_ranges: int = 0


class KafkaTieredSource(DataSource):
    """See docs/spark.md."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._request = parse_options(options)

    @classmethod
    def name(cls) -> str:
        return "kafka-tiered"

    def schema(self) -> str:
        return ", ".join(f"`{name}` {DDL[name]}" for name in self._request.columns or DDL)

    def reader(self, schema: StructType) -> DataSourceReader:
        check_schema(schema)
        return KafkaTieredReader(self._request, schema)


class KafkaTieredReader(DataSourceReader):
    """Planned on the driver, shipped to the executors as it is."""

    def __init__(self, request: ReadRequest, schema: StructType) -> None:
        self._request = request
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return plan(_tier(self._request.settings), self._request)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, Split):
            from pyspark.sql.pandas.types import to_arrow_schema

            from compactor.consumer.columns import batch_of

            schema = to_arrow_schema(self._schema, timezone="UTC")
            name = partition.extent.name
            tier = _tier(self._request.settings, partition.topic_id, name.topic)
            for selection in Reader(tier, partition.extent, partition.wanted).selections():
                yield batch_of(selection, name.topic, name.partition, schema)


class Split(InputPartition):
    """What one task reads."""

    def __init__(self, extent: Extent, wanted: WantedRecords, topic_id: str = "") -> None:
        """``topic_id``: of a tier that brokers write, so that a task need not ask them for it."""
        super().__init__(f"{extent.name} {extent.first}..{extent.last}")
        self.topic_id = topic_id
        self.extent = extent
        self.wanted = wanted


def parse_options(options: Mapping[str, str]) -> ReadRequest:
    """Names as in the documentation; case and underscores do not matter. Raises UsageError."""
    given = {name.replace("_", "").lower(): (name, value) for name, value in options.items()}
    known = {**{key: key for key in SETTINGS}, **READING}
    for name, (written, _) in given.items():
        if name not in known and name != "path":
            near = difflib.get_close_matches(name, list(known), n=1)
            hint = f"Did you mean {known[near[0]]}?" if near else f"It knows {', '.join(known.values())}"
            raise UsageError(f"kafka-tiered has no option {written!r}", hint=hint)
    environ = dict(os.environ)
    environ |= {config.env_name(*SETTINGS[name]): value for name, (_, value) in given.items() if name in SETTINGS}
    text = {READING[name]: value.strip() for name, (_, value) in given.items() if name in READING}
    settings = config.load(text.get("config"), environ)
    _ = settings.tier_url
    if not text.get("topic"):
        raise UsageError("kafka-tiered needs the option topic")
    return ReadRequest(
        settings=settings,
        topic=TopicPartition.of(text["topic"], 0).topic,
        partitions=_partitions(text.get("partitions", "")),
        starting_offset=_whole(text, "startingOffset", 0),
        ending_offset=_whole(text, "endingOffset", MAX),
        starting_ms=_whole(text, "startingTimestamp", None),
        ending_ms=_whole(text, "endingTimestamp", None),
        committed=_choice(text, "isolation", ("read_committed", "read_uncommitted")) == "read_committed",
        latest=_choice(text, "view", ("all", "latest")) == "latest",
        columns=_columns(text.get("columns", "")),
        split_bytes=_whole(text, "splitBytes", SPLIT_BYTES, 1),
        key_ranges=_whole(text, "keyRanges", 0),
    )


def _whole(text: Mapping[str, str], name: str, default: Any, low: int = 0) -> Any:
    if name not in text:
        return default
    if not (text[name].isascii() and text[name].isdigit()) or not low <= int(text[name]) <= MAX:
        raise UsageError(f"kafka-tiered: {name} = {text[name]!r} is not a whole number from {low} to {MAX}")
    return int(text[name])


def _choice(text: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    chosen = text.get(name, choices[0])
    if chosen not in choices:
        raise UsageError(f"kafka-tiered: {name} = {chosen!r}: allowed is {' or '.join(choices)}")
    return chosen


def _partitions(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in numbers):
        raise UsageError(f"kafka-tiered: partitions = {text!r}: write numbers with commas between them")
    return tuple(sorted({int(part) for part in numbers}))


def _columns(text: str) -> tuple[str, ...]:
    exact = {name.lower(): name for name in DDL}
    names = [part.strip() for part in text.split(",")] if text else []
    for name in names:
        if name.lower() not in exact:
            raise UsageError(f"kafka-tiered has no column {name!r}", hint=f"Its columns are {', '.join(DDL)}")
    return tuple(dict.fromkeys(exact[name.lower()] for name in names))


def check_schema(schema: StructType) -> None:
    """A schema given by ``.schema()`` chooses columns; it changes no types. Raises UsageError."""
    for column in schema.fields:
        if column.name not in DDL:
            raise UsageError(f"kafka-tiered has no column {column.name!r}", hint=f"Its columns are {', '.join(DDL)}")
        if column.dataType.simpleString() != DDL[column.name]:
            raise UsageError(f"kafka-tiered: column {column.name} is {DDL[column.name]}", hint="Cast it after reading")


# ---- planning ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _opened(settings: str, topic_id: str, topic: str) -> Tier:
    return open_tier(config.Settings.model_validate_json(settings), topics={topic: topic_id} if topic_id else None)


def _tier(settings: config.Settings, topic_id: str = "", topic: str = "") -> Tier:
    """One client per process and tier."""
    return _opened(settings.model_dump_json(), topic_id, topic)


def plan(tier: Tier, request: ReadRequest) -> list[InputPartition]:
    """The splits of a read: a few requests per partition, none per segment unless times are looked up. Raises UsageError, StoreError."""
    known = sorted(name.partition for name in tier.partitions() if name.topic == request.topic)
    if not known:
        hint = "`tiered-compactor topics` lists what it holds"
        raise UsageError(f"the tier at {tier.ports.layout.url} holds no topic {request.topic}", hint=hint)
    missing = sorted(set(request.partitions or ()) - set(known))
    if missing:
        raise UsageError(f"{request.topic} has no partition {missing[0]} in the tier")
    splits: list[InputPartition] = []
    for partition in known if request.partitions is None else request.partitions:
        splits += _of_partition(tier, request, TopicPartition(request.topic, partition))
    return splits


def _of_partition(tier: Tier, request: ReadRequest, name: TopicPartition) -> list[Split]:
    for _ in range(FOLDS):
        try:
            return _splits(tier, request, name, tier.open(name).refresh())
        except Gone:
            continue  # a segment was replaced while times were looked up in it
    return _splits(tier, request, name, tier.open(name).refresh())


def _splits(tier: Tier, request: ReadRequest, name: TopicPartition, state: PartitionState) -> list[Split]:
    limit = request.settings.cleaner_for(request.topic).max_decompressed_batch_bytes
    first, end = max(request.starting_offset, state.start_offset, tier.log_start(name)), min(request.ending_offset, state.end_offset + 1)
    if request.committed:
        end = min(end, last_stable_offset(tier, state))
    if request.starting_ms is not None:
        found = first_offset_at(tier, name, state.live, request.starting_ms, limit)
        first = end if found is None else max(first, found)
    if request.ending_ms is not None:
        found = first_offset_at(tier, name, state.live, request.ending_ms, limit)
        end = end if found is None else min(end, found)
    segments = [segment for segment in state.live if segment.end_offset >= first and segment.start_offset < end]
    if request.latest:
        return _latest_splits(tier, request, name, segments, first, end)
    wanted = WantedRecords(request.committed, limit)
    parts = [(max(a, first), min(b, end - 1), of) for a, b, of in _cut(segments, request.split_bytes)]
    return [Split(Extent(name, a, b, of), wanted, tier.topic_id(name)) for a, b, of in parts if a <= b]


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


def _latest_splits(
    tier: Tier, request: ReadRequest, name: TopicPartition, segments: Sequence[RemoteLogSegmentMetadata], first: int, end: int
) -> list[Split]:
    if not segments or first >= end:
        return []
    limit = request.settings.cleaner_for(request.topic).max_decompressed_batch_bytes
    budget = max(request.settings.cleaner.map_budget_bytes, 1 << 16)
    ranges = request.key_ranges or -(-sum(_records(segment) for segment in segments) * KEY_BYTES // budget) or 1
    extent = Extent(name, first, end - 1, tuple(segments))
    each = [WantedRecords(request.committed, limit, Latest(number, ranges, budget)) for number in range(ranges)]
    return [Split(extent, wanted, tier.topic_id(name)) for wanted in each]


def _records(segment: RemoteLogSegmentMetadata) -> int:
    """How many it has at most: brokers do not say how many it has."""
    return segment.records or segment.end_offset - segment.start_offset + 1
