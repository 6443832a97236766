"""Arguments that several commands share, and types of arguments. It imports nothing heavy, like ``arguments``."""

from __future__ import annotations

import argparse
from pathlib import Path

from compactor.cli.command_parser import argument, parse_time_ms, whole_number_parser
from compactor.constants import TopicId

INT32_MAX = 2**31 - 1
WATCH_SECONDS = 5
"""Seconds between two answers of `status --watch`."""
SAMPLED_PARTITIONS = 8
"""Largest number of partitions that `plan` samples without being asked, so that it answers within seconds."""
FIELD_FORMATS = ("auto", "avro", "json", "text", "bytes")
OffsetOrTimeWord = str
"""``offset`` or ``time``."""
OffsetOrTimeMs = int
FILE_HELP = "or one of Kafka's own cleaner-offset-checkpoint and leader-epoch-checkpoint files"


def parse_offset_or_time(text: str) -> tuple[OffsetOrTimeWord, OffsetOrTimeMs]:
    """Return an argument as ("offset", a number) or ("time", milliseconds). Raises ArgumentTypeError if it is neither."""
    if text.isascii() and text.isdigit():
        return "offset", whole_number_parser()(text)
    return "time", parse_time_ms(text)


def parse_topic_id(text: str) -> TopicId:
    """Check that an argument is a topic id, and return it. Raises ArgumentTypeError if it is not."""
    from compactor.tier.names import is_topic_id

    if not is_topic_id(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a topic id; `kafka-topics --describe` prints it")
    return TopicId(text)


PARTITION_ARGUMENT = argument("partition", metavar="TOPIC-PARTITION")
PARTITION_OR_TOPIC_ARGUMENT = argument("partition", metavar="TOPIC[-PARTITION]", help="a partition, a topic or a whole regular expression")
PARTITIONS_ARGUMENT = argument(
    "partitions", nargs="*", metavar="TOPIC[-PARTITION]", help="a partition, a topic or a whole regular expression (default: all)"
)
PATTERN_ARGUMENT = argument("pattern", metavar="PATTERN", help="a topic, a TOPIC-PARTITION or a whole regular expression")
RUN_ARGUMENT = argument("run_id", metavar="RUN", help="as `runs list` prints it, or its first characters")
TOPIC_ID_ARGUMENT = argument(
    "--topic-id", metavar="ID", help="of the topics that have had this name, the one with this id (default: the latest)"
)
TOPICS_OPTION = argument("--topics", metavar="REGEX", help="only topics whose whole name matches")
CLOCK_OPTION = argument(
    "--now",
    "--at",
    type=parse_time_ms,
    metavar="TIME",
    help="the cleaner's clock: milliseconds, a time, '2h ago', 'in 3d' (default: the clock)",
)
DRY_RUN_OPTION = argument("--dry-run", action="store_true", help="show what would be deleted, and delete nothing")
PRICES_OPTION = argument("--prices", type=Path, metavar="FILE", help="a TOML file with other prices (default: those of S3 Standard)")
PROFILE_OPTION = argument("--profile", action="store_true", help="show the cost of each stage: CPU seconds, seconds, bytes")
ACCEPT_ERASED_OPTION = argument(
    "--accept-erased", action="store_true", help="also if it may bring values back whose keys were erased (`erasure --expedite`)"
)
REASON_OPTION = argument("--reason", metavar="TEXT", default="", help="the reason, which `audit list` shows")
SKIP_DAMAGED_OPTION = argument(
    "--skip-damaged", action="store_true", help="leave out what cannot be read, name its offsets, and end with exit code 3"
)
