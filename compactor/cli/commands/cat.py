"""Command ``cat``: prints the records of a partition, one per line."""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

from rich.cells import cell_len, set_cell_size

from compactor.cli import tiers
from compactor.cli.output import Output
from compactor.config.times import format_iso_time
from compactor.decoding import FieldFormat, KeyAndValueDecoder, parse_topic_key
from compactor.errors import BadData, ExitCode, UsageError
from compactor.read.outcomes import DamagedOffsetRange
from compactor.read.ranges import read_record_blocks
from compactor.read.records import RecordBlock, iterate_byte_strings

KeyAndValueFormats = tuple[FieldFormat, FieldFormat]
WIDEST_KEY = 40
"""Largest number of columns that the key takes in a table."""


def print_records(args: argparse.Namespace, out: Output) -> ExitCode:
    if args.skip_damaged and args.view == "latest":
        hint = "An older value of a key would take the place of one that cannot be read"
        raise UsageError("--skip-damaged and --view latest exclude each other", hint=hint)
    tier, name = tiers.open_tier_and_partition(args)
    skipped: list[DamagedOffsetRange] = []

    def report_skipped(damage: DamagedOffsetRange) -> None:
        skipped.append(damage)
        out.print_note(f"error: offsets {damage.first} to {damage.last} of {name} cannot be read: {damage.reason} ({damage.segment})")

    decoder = KeyAndValueDecoder(tier.settings)
    blocks = read_record_blocks(
        tier,
        name,
        first_offset=args.first,
        last_offset=args.last,
        read_committed=args.isolation == "read_committed",
        latest_only=args.view == "latest",
        key=None if args.key is None else parse_topic_key(args.key, name.topic, decoder),
        on_damage=report_skipped if args.skip_damaged else None,
    )
    count = 0

    def counted_blocks() -> Iterator[RecordBlock]:
        nonlocal count
        for block in blocks:
            count += len(block)
            yield block

    width = out.terminal_width()
    formats: KeyAndValueFormats = (args.key_format, args.value_format)
    match args.format or ("json" if width is None or out.mode == "json" else "table"):
        case "table":
            out.write_chunks(_table_lines(counted_blocks(), decoder, formats, width))
        case "json":
            out.write_chunks(_json_lines(counted_blocks(), decoder, formats))
        case _:
            out.write_chunks(_value_lines(counted_blocks()))
    if not count:
        state = tier.open_partition_log(name).state
        first = max(state.start_offset, tier.first_readable_offset(state))
        held = f"it holds offsets {first} to {state.end_offset}" if state.has_segments else "it holds no segments yet"
        if first > state.end_offset >= 0:
            held = f"all records below its log start, {first}, are deleted"
        out.print_note(f"{name} has no such record; {held}")
    return BadData.exit_code if skipped else 0


def _json_lines(blocks: Iterable[RecordBlock], decoder: KeyAndValueDecoder, formats: KeyAndValueFormats) -> Iterator[bytes]:
    for block in blocks:
        lines = []
        for message in block.messages():
            kind, time = message.timestamp()
            known = bool(kind) and time != -1
            line: dict[str, Any] = {"offset": message.offset(), "timestamp": time if known else None}
            line["time"] = format_iso_time(time, "milliseconds") if known else None
            for field, data, wanted in zip(("key", "value"), (message.key(), message.value()), formats, strict=True):
                line |= _json_fields(field, data, decoder, wanted)
            line["headers"] = [{"key": key, **_json_fields("value", value, decoder, "text")} for key, value in message.headers() or ()]
            line["leader_epoch"] = message.leader_epoch()
            lines.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
        yield "".join(lines).encode()


def _value_lines(blocks: Iterable[RecordBlock]) -> Iterator[bytes]:
    """A newline follows each value, as in kcat. Null becomes an empty line."""
    for block in blocks:
        yield b"".join((value or b"") + b"\n" for value in iterate_byte_strings(block.values))


def _json_fields(name: str, data: bytes | None, decoder: KeyAndValueDecoder, field_format: FieldFormat) -> dict[str, Any]:
    """JSON fields of a record's key or value:

    - ``NAME``: the decoded data;
    - ``NAME_base64``: the bytes, if they cannot be decoded;
    - ``NAME_error``: why decoding failed, if a format or schema was to be applied;
    - ``NAME_schema_id``: id of the schema, if the data names one.
    """
    found = decoder.decode_key_or_value(data, field_format)
    schema = {} if found.schema_id is None else {f"{name}_schema_id": found.schema_id}
    if found.is_decoded:
        return {name: found.value, **schema}
    reason = {} if field_format in ("auto", "text", "bytes") and not schema else {f"{name}_error": found.error}
    return {f"{name}_base64": base64.b64encode(data or b"").decode(), **schema, **reason}


def _table_lines(
    blocks: Iterable[RecordBlock], decoder: KeyAndValueDecoder, formats: KeyAndValueFormats, width: int | None
) -> Iterator[bytes]:
    """Columns are as wide as the first block needs; later, a longer offset or key shifts the cells to its right. width: None to cut
    nothing.
    """
    widths: tuple[int, int, int] | None = None
    for block in blocks:
        rows = []
        for message in block.messages():
            kind, time = message.timestamp()
            shown = format_iso_time(time, "milliseconds") if kind and time != -1 else ""
            fields = (message.key(), message.value())
            rows.append(
                (
                    str(message.offset()),
                    shown,
                    *(_format_field(data, decoder, wanted) for data, wanted in zip(fields, formats, strict=True)),
                )
            )
        heading = ("offset", "time", "key", "value")
        if widths is None:
            first, second, third = (max(cell_len(row[place]) for row in (heading, *rows)) for place in range(3))
            widths = (first, second, min(third, WIDEST_KEY))
            rows = [heading, *rows]
        lines = []
        for offset, shown, key, value in rows:
            wide = set_cell_size(key, widths[2]) if cell_len(key) <= widths[2] else set_cell_size(key, widths[2] - 1) + "…"
            line = f" {offset:>{widths[0]}}   {shown:<{widths[1]}}   {wide}   {value}"
            lines.append((line if width is None or cell_len(line) <= width else set_cell_size(line, width - 1) + "…") + "\n")
        yield "".join(lines).encode()


def _format_field(data: bytes | None, decoder: KeyAndValueDecoder, field_format: FieldFormat) -> str:
    if data is None:
        return "null"
    found = decoder.decode_key_or_value(data, field_format)
    text = found.format_value_as_text() if found.is_decoded else "base64:" + base64.b64encode(data).decode()
    return text if text is not None and text.isprintable() else json.dumps(text, ensure_ascii=False)
