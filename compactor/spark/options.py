"""What may be said after ``spark.read.format("kafka-tiered")``, and what it means. docs/spark.md lists the options.

Those of Spark's own Kafka source are understood where they say the same thing.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from compactor import config
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition

MAX: Final = 2**63 - 1
SPLIT_BYTES: Final = 64 << 20

SETTINGS: Final = {
    "url": ("tier", "url"),
    "controlUrl": ("tier", "control_url"),
    "layout": ("tier", "layout"),
    "kind": ("tier", "kind"),
    "endpointUrl": ("s3", "endpoint_url"),
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

CHOOSING: Final = ("topic", "subscribe", "subscribePattern", "assign")
READING: Final = (
    "config", *CHOOSING, "partitions", "startingOffset", "endingOffset", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "isolation", "view", "columns", "includeHeaders", "splitBytes", "keyRanges",
)  # fmt: skip

OF_TABLES: Final = (
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
"""What Spark adds of its own where a table was created over the source. Without ``provider`` there is no table."""

EARLIEST: Final = -2
LATEST: Final = -1


@dataclass(frozen=True)
class ReadRequest:
    """The options, checked. ``starting_ms`` and ``ending_ms`` are looked up as offsets, as Spark's own Kafka source does it.

    ``topics``: names, or else ``pattern``; ``partitions``: all, these of every topic, or (``assigned``) these of each.
    ``starting``, ``ending``: where a partition has a bound of its own.
    """

    settings: config.Settings
    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: tuple[int, ...] | None = None
    assigned: Mapping[str, tuple[int, ...]] | None = None
    starting_offset: int = 0
    ending_offset: int = MAX
    starting: Mapping[TopicPartition, int] = field(default_factory=dict)
    ending: Mapping[TopicPartition, int] = field(default_factory=dict)
    starting_ms: int | None = None
    ending_ms: int | None = None
    committed: bool = True
    latest: bool = False
    columns: tuple[str, ...] = ()
    split_bytes: int = SPLIT_BYTES
    key_ranges: int = 0

    def chosen(self, held: Iterable[TopicPartition], where: str) -> list[TopicPartition]:
        """Those of the partitions that a tier holds which are to be read. Raises UsageError where it does not hold what was asked for."""
        by_topic: dict[str, list[int]] = {}
        for name in held:
            by_topic.setdefault(name.topic, []).append(name.partition)
        topics = [topic for topic in by_topic if re.fullmatch(self.pattern, topic)] if self.pattern else list(self.assigned or self.topics)
        hint = "`tiered-compactor topics` lists what it holds"
        if self.pattern and not topics:
            raise UsageError(f"the tier at {where} holds no topic that matches {self.pattern}", hint=hint)
        found = []
        for topic in sorted(topics):
            if topic not in by_topic:
                raise UsageError(f"the tier at {where} holds no topic {topic}", hint=hint)
            wanted = self.assigned[topic] if self.assigned else self.partitions
            missing = sorted(set(wanted or ()) - set(by_topic[topic]))
            if missing:
                raise UsageError(f"{topic} has no partition {missing[0]} in the tier")
            found += [TopicPartition(topic, number) for number in sorted(by_topic[topic] if wanted is None else wanted)]
        return found


def parse_options(options: Mapping[str, str]) -> ReadRequest:
    """Names as in the documentation; case and underscores do not matter. Raises UsageError."""
    given = {_plain(name): (name, value) for name, value in without_spark(options).items()}
    known = {_plain(name): name for name in (*SETTINGS, *READING)}
    if "path" in given:
        raise UsageError(
            "kafka-tiered takes no path", hint='Say .option("url", "s3://bucket/prefix") or .option("config", "tier.toml"), and the topic'
        )
    for name, (written, _) in given.items():
        if name not in known:
            raise UsageError(f"kafka-tiered has no option {written!r}", hint=_hint(name, known))
    environ = dict(os.environ)
    environ |= {config.env_name(*SETTINGS[known[name]]): value for name, (_, value) in given.items() if known[name] in SETTINGS}
    text = {known[name]: value.strip() for name, (_, value) in given.items() if known[name] in READING}
    settings = config.load(text.get("config"), environ)
    _ = settings.tier_url
    return ReadRequest(
        settings=settings,
        **_chosen(text),
        partitions=_partitions(text.get("partitions", "")),
        starting_offset=_whole(text, "startingOffset", 0),
        ending_offset=_whole(text, "endingOffset", MAX),
        starting=_offsets(text, "startingOffsets", "earliest", EARLIEST, 0),
        ending=_offsets(text, "endingOffsets", "latest", LATEST, MAX),
        starting_ms=_whole(text, "startingTimestamp", None),
        ending_ms=_whole(text, "endingTimestamp", None),
        committed=_choice(text, "isolation", ("read_committed", "read_uncommitted")) == "read_committed",
        latest=_choice(text, "view", ("all", "latest")) == "latest",
        columns=_columns(text),
        split_bytes=_whole(text, "splitBytes", SPLIT_BYTES, 1),
        key_ranges=_whole(text, "keyRanges", 0),
    )


def is_table(options: Mapping[str, str]) -> bool:
    """Whether Spark asks for a table that is being created."""
    return "provider" in options


def without_spark(options: Mapping[str, str]) -> dict[str, str]:
    """What the user said."""
    if not is_table(options):
        return dict(options)
    return {name: value for name, value in options.items() if _plain(name) not in OF_TABLES and not name.startswith("option.")}


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _hint(name: str, known: Mapping[str, str]) -> str:
    if name.startswith("kafka."):
        return "It asks no broker: leave it out"
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {known[near[0]]}?" if near else f"It knows {', '.join(known.values())}"


def _chosen(text: Mapping[str, str]) -> dict[str, Any]:
    """Which topics, said in one of four ways."""
    said = [name for name in CHOOSING if text.get(name)]
    if not said:
        raise UsageError("kafka-tiered needs the option topic", hint="Or subscribe, subscribePattern, assign, as in Spark's Kafka source")
    if len(said) > 1:
        raise UsageError(f"kafka-tiered: {said[0]} and {said[1]} both say which topics are read", hint="Give one of them")
    value = text[said[0]]
    if said[0] == "subscribePattern":
        try:
            return {"pattern": re.compile(value).pattern}
        except re.error as error:
            raise UsageError(f"kafka-tiered: subscribePattern = {value!r} is no regular expression: {error}") from None
    if said[0] == "assign":
        if text.get("partitions"):
            raise UsageError("kafka-tiered: assign says the partitions already", hint="Leave out partitions")
        return {"assigned": {_topic(topic): tuple(_numbers(value, numbers)) for topic, numbers in _json("assign", value).items()}}
    return {"topics": tuple(dict.fromkeys(_topic(part.strip()) for part in value.split(",")))}


def _topic(name: str) -> str:
    return TopicPartition.of(name, 0).topic


def _json(name: str, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise UsageError(f"kafka-tiered: {name} = {value!r} is no JSON object with topics", hint=_EXAMPLES[name])
    return found


_EXAMPLES: Final = {
    "assign": 'Write {"orders": [0, 1]}',
    "startingOffsets": 'Write {"orders": {"0": 23, "1": -2}}, or earliest',
    "endingOffsets": 'Write {"orders": {"0": 50, "1": -1}}, or latest',
}


def _numbers(value: str, found: Any) -> list[int]:
    if not isinstance(found, list) or not all(isinstance(number, int) and number >= 0 for number in found):
        raise UsageError(f"kafka-tiered: assign = {value!r} has no list of partitions", hint=_EXAMPLES["assign"])
    return sorted(set(found))


def _offsets(text: Mapping[str, str], name: str, word: str, mark: int, bound: int) -> dict[TopicPartition, int]:
    """By partition; those that are not named have no bound of their own. ``mark`` stands for ``word``, which is ``bound``."""
    value = text.get(name, word)
    if value == word:
        return {}
    if f"{name[:-1]}" in text:
        raise UsageError(f"kafka-tiered: {name} and {name[:-1]} both say where to read", hint="Give one of them")
    if value in ("earliest", "latest"):
        raise UsageError(f"kafka-tiered: {name} = {value} leaves nothing to read", hint=_EXAMPLES[name])
    found = {}
    for topic, offsets in _json(name, value).items():
        for number, offset in offsets.items() if isinstance(offsets, dict) else [("", None)]:
            if not number.isdigit() or not isinstance(offset, int) or (offset < 0 and offset != mark):
                raise UsageError(f"kafka-tiered: {name} = {value!r}: {topic} has no offsets by partition", hint=_EXAMPLES[name])
            found[TopicPartition.of(topic, int(number))] = bound if offset == mark else offset
    return found


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


def _columns(text: Mapping[str, str]) -> tuple[str, ...]:
    """Empty: all of them."""
    exact = {name.lower(): name for name in DDL}
    names = [part.strip() for part in text["columns"].split(",")] if text.get("columns") else []
    for name in names:
        if name.lower() not in exact:
            raise UsageError(f"kafka-tiered has no column {name!r}", hint=f"Its columns are {', '.join(DDL)}")
    if _choice(text, "includeHeaders", ("true", "false")) == "false":
        names = [name for name in names or DDL if name.lower() != "headers"]
    return tuple(dict.fromkeys(exact[name.lower()] for name in names))
