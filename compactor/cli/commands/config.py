"""``config show`` and ``config check``."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from compactor.cli import frame
from compactor.cli.output import Output, Table

if TYPE_CHECKING:
    from compactor.config import Settings

_SECRET = re.compile(r"passw|secret|token|jaas|oauth|key\.pem|private", re.IGNORECASE)
"""librdkafka properties whose values are not shown."""


def add_arguments(parser: frame.Parser) -> None:
    parser.subcommand("show", "every setting in force, and where it comes from").runs(show)


def show(args: argparse.Namespace, out: Output) -> None:
    settings = frame.settings(args)
    rows = _rows(settings)
    document = {
        "ok": True,
        "problems": [],
        "settings": [{"key": key, "value": value, "source": source} for key, value, source in rows],
    }
    table = Table("", ("setting", "value", "from"), [(key, _text(value), source) for key, value, source in rows])
    out.result(document, table)


def _rows(settings: Settings) -> list[tuple[str, object, str]]:
    from compactor.config import SECTIONS, topic_key

    rows: list[tuple[str, object, str]] = []
    for section in SECTIONS:
        for key, value in getattr(settings, section).model_dump(mode="json").items():
            shown = _without_secrets(value) if isinstance(value, dict) else value
            rows.append((f"{section}.{key}", shown, settings.where(f"{section}.{key}")))
    for pattern, cleaner in settings.topics.items():
        values = cleaner.model_dump(mode="json")
        dotted = {topic_key(pattern, key): values[key] for key in settings.overridden(pattern)}
        rows += [(key, value, settings.where(key)) for key, value in dotted.items()]
    return rows


def _without_secrets(properties: dict[str, object]) -> dict[str, object]:
    return {name: "(not shown)" if _SECRET.search(name) else value for name, value in properties.items()}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
