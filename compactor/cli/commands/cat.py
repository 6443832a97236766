"""Command ``cat TOPIC-PARTITION``: prints the records of a partition, one per line."""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from compactor.cli import frame, tiers
from compactor.cli.output import Output
from compactor.constants import MAX_OFFSET

if TYPE_CHECKING:
    from compactor.consumer.messages import RecordBlock


def add_arguments(parser: frame.Parser) -> None:
    parser.set_command(
        print_records,
        tiers.PARTITION_ARGUMENT,
        tiers.TOPIC_ID_ARGUMENT,
        frame.argument("--from", metavar="N", dest="first", type=frame.whole_number(), default=0, help="first offset"),
        frame.argument("--to", metavar="N", dest="last", type=frame.whole_number(), default=MAX_OFFSET, help="last offset, inclusive"),
        frame.argument("--key", metavar="K", help="only records with this key: text, or base64:..."),
        frame.argument("--isolation", choices=("read_committed", "read_uncommitted"), default="read_committed"),
        frame.argument("--view", choices=("all", "latest"), default="all", help="latest: the last value of each key, deletes left out"),
        frame.argument("--format", choices=("json", "raw"), default="json", help="raw: values only, a newline after each"),
    )


def print_records(args: argparse.Namespace, out: Output) -> None:
    from compactor.consumer.ranges import read_blocks
    from compactor.views.explain import parse_key

    opened, name = tiers.open_partition(args)
    blocks = read_blocks(
        opened,
        name,
        first=args.first,
        last=args.last,
        committed=args.isolation == "read_committed",
        latest_only=args.view == "latest",
        key=None if args.key is None else parse_key(args.key),
    )
    out.write_chunks(_json_lines(blocks) if args.format == "json" else _raw_lines(blocks))


def _json_lines(blocks: Iterable[RecordBlock]) -> Iterator[bytes]:
    """Yield the records as JSON lines, block by block."""
    for block in blocks:
        lines = []
        for message in block.messages():
            kind, time = message.timestamp()
            line: dict[str, Any] = {"offset": message.offset(), "timestamp": time if kind and time != -1 else None}
            line |= _json_field("key", message.key()) | _json_field("value", message.value())
            line["headers"] = [{"key": key, **_json_field("value", value)} for key, value in message.headers() or ()]
            line["leader_epoch"] = message.leader_epoch()
            lines.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
        yield "".join(lines).encode()


def _raw_lines(blocks: Iterable[RecordBlock]) -> Iterator[bytes]:
    """Yield the values, a newline after each, as kcat prints them. A null is printed as an empty line."""
    from compactor.consumer.messages import byte_strings

    for block in blocks:
        yield b"".join((value or b"") + b"\n" for value in byte_strings(block.values))


def _json_field(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return bytes for JSON: as text if they are UTF-8, else in base64 under another name."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
