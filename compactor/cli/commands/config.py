"""Command ``config show``: the settings and their sources."""

from __future__ import annotations

import argparse
import re

from compactor.cli import command_parser
from compactor.cli.output import Output, Table
from compactor.config.settings import SECTION_TYPES, Settings, setting_keys, topic_override_key
from compactor.config.units import format_setting
from compactor.errors import UsageError

_SECRET = re.compile(r"passw|secret|token|jaas|oauth|key\.pem|private|credential|account-key", re.IGNORECASE)
"""Names of properties of librdkafka and of catalogs whose values are not shown."""
_URL_WITH_PASSWORD = re.compile(r"://[^/]*@")


def show_settings(args: argparse.Namespace, out: Output) -> None:
    settings = command_parser.load_command_settings(args)
    rows = _setting_rows(settings) if args.topic is None else _topic_setting_rows(args, args.topic)
    document = {
        "ok": True,
        "problems": [],
        "settings": [{"key": key, "value": value, "source": source} for key, value, source in rows],
    }
    cells = [(key, format_setting(key, value), "" if source == "default" else f"from {source}") for key, value, source in rows]
    out.print_result(document, Table("", ("setting", "value", "unless it is the default"), cells, below=1))


def _setting_rows(settings: Settings) -> list[tuple[str, object, str]]:
    """Rows (key, value, source). Source: a file, an environment variable or ``default``."""
    rows: list[tuple[str, object, str]] = []
    for section, kind in SECTION_TYPES.items():
        for key, value in settings.settings_of_section(section).model_dump(mode="json", include=set(setting_keys(kind))).items():
            shown = _hide_secrets(value) if isinstance(value, dict) else value
            rows.append((f"{section}.{key}", shown, settings.source_of_setting(f"{section}.{key}")))
    for pattern, cleaner in settings.topics.items():
        values = cleaner.model_dump(mode="json")
        dotted = {topic_override_key(pattern, key): values[key] for key in settings.overridden_setting_names(pattern)}
        rows += [(key, value, settings.source_of_setting(key)) for key, value in dotted.items()]
    return rows


def _topic_setting_rows(args: argparse.Namespace, topic: str) -> list[tuple[str, object, str]]:
    """Rows (key, value, source). Raises UsageError if the tier has no such topic."""
    from compactor.cli import tiers

    tier = tiers.open_configured_tier(args)
    if tier.topic_settings_in_kafka(topic) is None:
        raise UsageError(f"the tier has no topic {topic}", hint="`topics` lists what it holds")
    values = tier.cleaner_settings_for_topic(topic).model_dump(mode="json")
    return [(f"cleaner.{key}", value, tier.source_of_topic_setting(topic, key)) for key, value in values.items()]


def _hide_secrets(properties: dict[str, object]) -> dict[str, object]:
    return {
        name: _hide_secrets(value)
        if isinstance(value, dict)
        else "(not shown)"
        if _SECRET.search(name) or _URL_WITH_PASSWORD.search(str(value))
        else value
        for name, value in properties.items()
    }
