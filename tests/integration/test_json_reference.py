"""docs/reference/json.md says what the commands print: the same fields, of the same kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compactor.cli.arguments import COMMANDS
from compactor.cli.output import SCHEMA_VERSION
from tests.json_reference import examples, short, without_ids, written


def differences(told: Any, real: Any, where: str) -> Iterator[str]:
    if isinstance(told, dict) and isinstance(real, dict):
        # Requests are counted by kind, without zeros: a slow round also deletes the heartbeats that it wrote.
        for name in sorted(told.keys() ^ real.keys()) if not where.endswith(".requests") else ():
            yield f"{where}.{name} is {'not printed' if name in told else 'not on the page'}"
        for name in told.keys() & real.keys():
            yield from differences(told[name], real[name], f"{where}.{name}")
    elif isinstance(told, list) and isinstance(real, list):
        for one, other in zip(told, real, strict=False):
            yield from differences(one, other, f"{where}[]")
    elif kind(told) != kind(real):
        yield f"{where}: {told!r} on the page, {real!r} printed"


def kind(value: Any) -> str:
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


ELSEWHERE = {"agent", "daemon", "serve", "completion", "cat", "demo", "orphans"}
"""Services and `completion` print no document; the others need brokers or take long; docs/commands has their documents."""


def test_every_command_has_a_document_on_the_page() -> None:
    assert {command.name for command in COMMANDS} - {title.split()[0] for title in written()} == ELSEWHERE


def test_the_page_says_what_the_commands_print(tmp_path: Path) -> None:
    told = written()
    real = {without_ids(each.title): {"schema_version": SCHEMA_VERSION, **short(each.document)} for each in examples(tmp_path)}
    assert told.keys() == real.keys()
    found = [line for title, document in real.items() for line in differences(told[title], document, title)]
    assert found == [], "python -m tests.json_reference writes the page anew"
