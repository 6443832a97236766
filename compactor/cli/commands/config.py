"""``config show`` and ``config check``."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compactor.cli import frame
from compactor.cli.output import Output, Table
from compactor.errors import CompactorError, Refused, gravest

if TYPE_CHECKING:
    from compactor.config import Settings
    from compactor.storage.port import ObjectStore

_SECRET = re.compile(r"passw|secret|token|jaas|oauth|key\.pem|private", re.IGNORECASE)
"""librdkafka properties whose values are not shown."""


def add_arguments(parser: frame.Parser) -> None:
    parser.subcommand("show", "every setting in force, and where it comes from").runs(show)
    parser.subcommand("check", "whether the settings work: tries the tier and the directory for local state").runs(check)


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


def check(args: argparse.Namespace, out: Output) -> int:
    """Every check is made, also after one that failed; wrong settings end the command before, as everywhere."""
    settings = frame.settings(args)
    urls = dict.fromkeys((settings.tier_url, settings.control_url))
    checks: list[tuple[str, str, Callable[[], str]]] = [("state_dir", settings.tier.state_dir, partial(_try_directory, settings))]
    checks += [("store", url, partial(_try_store, settings, url)) for url in urls]
    problems, codes, rows = [], [], []
    for kind, what, attempt in checks:
        try:
            rows.append((kind, what, attempt()))
        except CompactorError as error:
            problems.append({"severity": "error", "kind": kind, "object": what, "detail": str(error)})
            codes.append(error.exit_code)
            rows.append((kind, what, f"error: {error}"))
    summary = f"{len(problems)} of {len(checks)} checks failed" if problems else "everything works"
    out.result({"ok": not problems, "problems": problems}, Table("", ("check", "of", "result"), rows), summary=summary)
    return gravest(codes)


def _try_directory(settings: Settings) -> str:
    directory = Path(settings.tier.state_dir).absolute()
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise Refused(f"nothing can be written in {existing}", hint="Set state_dir under [tier] to a directory of this user")
    return "can be written" if existing == directory else f"can be made in {existing}"


def _try_store(settings: Settings, url: str) -> str:
    from compactor.storage.factory import open_store

    store: ObjectStore = open_store(url, s3=settings.s3, limits=settings.limits)
    first = next(iter(store.list("")), None)
    return "can be listed" if first else "can be listed, holds nothing yet"


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
