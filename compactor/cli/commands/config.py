"""``config show`` and ``config check``."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from compactor.cli import frame
from compactor.cli.output import Output, Table
from compactor.errors import BadData, CompactorError, StoreError, UsageError

if TYPE_CHECKING:
    from compactor.config import Settings

_SECRET = re.compile(r"passw|secret|token|jaas|oauth|key\.pem|private", re.IGNORECASE)
"""librdkafka properties whose values are not shown."""


def add_arguments(parser: frame.Parser) -> None:
    showing = parser.subcommand("show", "every setting in force, and where it comes from")
    showing.add_argument("--topic", metavar="T", help="how this topic is cleaned; its own settings count where brokers have it")
    showing.runs(show)
    parser.subcommand("check", "whether the settings work: tries the tier and the directory for local state").runs(check)


def show(args: argparse.Namespace, out: Output) -> None:
    settings = frame.settings(args)
    rows = _rows(settings) if args.topic is None else _rows_for(args, args.topic)
    document = {
        "ok": True,
        "problems": [],
        "settings": [{"key": key, "value": value, "source": source} for key, value, source in rows],
    }
    table = Table("", ("setting", "value", "from"), [(key, _text(value), source) for key, value, source in rows])
    out.result(document, table)


def check(args: argparse.Namespace, out: Output) -> int:
    """Tries everything, also after something failed. Settings that are wrong in themselves end it before, as everywhere."""
    settings = frame.settings(args)
    with out.progress("trying the tier"):
        if settings.tier.kind == "kafka":
            problems = [*_try_directory(settings), *_try_brokers(settings), *_try_stores(settings)]
        else:
            whose = _try_identity(settings)
            # Nothing is tried out in another tier's data.
            tried = [] if whose else [*_try_stores(settings), *_try_patterns(settings)]
            problems = [*_try_directory(settings), *whose, *tried, *_without_effect(settings)]
    ok = all(problem["severity"] != "error" for problem in problems)
    columns = ("severity", "kind", "object", "detail", "hint")
    tables = [Table("", columns, [[problem[column] for column in columns] for problem in problems])] if problems else []
    verdict = f"{settings.tier_url} and {settings.tier.state_dir} {'can be used' if ok else 'cannot be used like this'}"
    out.result({"ok": ok, "problems": problems}, *tables, summary=verdict)
    if any(problem["kind"] == "identity" for problem in problems):
        return UsageError.exit_code
    return 0 if ok else StoreError.exit_code


def _without_effect(settings: Settings) -> list[dict[str, str]]:
    if not settings.publish.metadata_records_per_hour:
        return []
    detail, key = "no broker is told anything of a tier of kind object-log", "publish.metadata_records_per_hour"
    return [{"severity": "note", "kind": "settings", "object": key, "detail": detail, "hint": "Take it out of the configuration"}]


def _try_directory(settings: Settings) -> list[dict[str, str]]:
    directory = Path(settings.tier.state_dir).absolute()
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return []
    hint = "Set state_dir under [tier] to a directory in which this user may write"
    detail = f"nothing can be written in {existing}"
    return [{"severity": "error", "kind": "state-dir", "object": settings.tier.state_dir, "detail": detail, "hint": hint}]


def _try_stores(settings: Settings) -> list[dict[str, str]]:
    from compactor.storage.factory import open_store
    from compactor.storage.probe import probe

    # The control store lies inside the tier unless it has a place of its own; what holds for the tier then holds for it.
    # Segments of brokers and of Pinterest's uploader are left alone: there reading is all that is tried.
    tier = settings.tier
    only_read = tier.layout == "pinterest"
    stores = [] if tier.kind == "kafka" or only_read else [(settings.tier_url, ".tiered-compactor/probe/")]
    if tier.control_url and not only_read:
        stores.append((tier.control_url, "probe/"))
    if tier.pinterest.target and not only_read:
        stores.append((tier.pinterest.target, ".tiered-compactor/probe/"))
    problems = _try_listing(settings) if only_read else []
    for url, prefix in stores:
        store = open_store(url, s3=settings.s3, limits=settings.limits)
        problems += [{"object": url, **finding.model_dump()} for finding in probe(store, _now_ms, prefix)]
    return problems


def _try_patterns(settings: Settings) -> list[dict[str, str]]:
    """Overrides that no topic has: regular expressions are easily mistaken for what shells have."""
    from compactor.bootstrap import open_tier
    from compactor.views.checkpoints import read_only

    try:
        topics = {name.topic for name in read_only(open_tier(settings)).partitions()}
    except CompactorError:
        return []  # trying the store says it better
    unmatched = [pattern for pattern in settings.topics if topics and not any(re.fullmatch(pattern, topic) for topic in topics)]
    detail = "no topic of the tier matches"
    return [
        {"severity": "warning", "kind": "topics", "object": f"[topics.{json.dumps(pattern)}]", "detail": detail, "hint": _meant(pattern)}
        for pattern in unmatched
    ]


def _meant(pattern: str) -> str:
    wildcard = re.sub(r"(?<=[\w-])\*", ".*", pattern)
    if wildcard != pattern:
        return f"It is a regular expression over whole names: for names that begin so write {json.dumps(wildcard)}"
    return "It is a regular expression over whole names; `topics` lists them"


def _try_listing(settings: Settings) -> list[dict[str, str]]:
    from compactor.bootstrap import open_tier

    try:
        opened = open_tier(settings)
        names = opened.partitions()
        if names:
            opened.open(names[0]).refresh()
    except CompactorError as error:
        kind = "settings" if isinstance(error, UsageError) else "reading"
        return [{"severity": "error", "kind": kind, "object": settings.tier_url, "detail": error.message, "hint": error.hint}]
    if names:
        return []
    detail = f"there is no segment of cluster {settings.tier.pinterest.cluster} below it"
    hint = "Compare url, cluster and entropy_bits with the uploader's settings"
    return [{"severity": "warning", "kind": "empty", "object": settings.tier_url, "detail": detail, "hint": hint}]


def _try_brokers(settings: Settings) -> list[dict[str, str]]:
    from compactor.bootstrap import connection_of, open_tier
    from compactor.metadata_topic.admin import KafkaAdmin
    from compactor.upkeep.broker_check import check_budget, check_cluster, check_names, check_reading, check_topics
    from compactor.views.checkpoints import read_only

    found = []
    servers = settings.kafka.bootstrap_servers.strip()
    admin = KafkaAdmin(connection_of(settings)) if servers else None
    if admin is not None:
        found += check_cluster(admin, servers, write=bool(settings.control_url))
    if any(finding.severity == "error" for finding in found):
        return [finding._asdict() for finding in found]
    try:
        opened = read_only(open_tier(settings))
    except CompactorError as error:
        kind = "metadata" if isinstance(error, BadData | StoreError) else "settings"
        return [{"severity": "error", "kind": kind, "object": "[kafka]", "detail": error.message, "hint": error.hint}]
    names, problems = check_names(opened)
    found += problems
    if admin is not None:
        found += check_topics(admin, sorted({name.topic for name in names}))
    found += check_reading(opened, names) if names else []
    found += check_budget(opened, names)
    return [finding._asdict() for finding in found]


def _try_identity(settings: Settings) -> list[dict[str, str]]:
    """Whether tier and control store belong together. Where neither holds anything yet, nothing is said."""
    from compactor.bootstrap import open_tier

    opened = open_tier(settings)
    try:
        state = opened.catalog.refresh()
        opened.ownership.check(opened.ports, state)
        opened.ownership.before_creation(opened.ports, state)
    except StoreError:
        return []  # trying the store says it better
    except CompactorError as error:
        kind = "identity" if isinstance(error, UsageError) else "control-log"
        return [{"severity": "error", "kind": kind, "object": settings.control_url, "detail": error.message, "hint": error.hint}]
    return []


def _now_ms() -> int:
    return int(time.time() * 1000)


def _rows(settings: Settings) -> list[tuple[str, object, str]]:
    from compactor.config import SECTIONS, keys_of, topic_key

    rows: list[tuple[str, object, str]] = []
    for section, kind in SECTIONS.items():
        for key, value in settings.section(section).model_dump(mode="json", include=set(keys_of(kind))).items():
            shown = _without_secrets(value) if isinstance(value, dict) else value
            rows.append((f"{section}.{key}", shown, settings.where(f"{section}.{key}")))
    for pattern, cleaner in settings.topics.items():
        values = cleaner.model_dump(mode="json")
        dotted = {topic_key(pattern, key): values[key] for key in settings.overridden(pattern)}
        rows += [(key, value, settings.where(key)) for key, value in dotted.items()]
    return rows


def _rows_for(args: argparse.Namespace, topic: str) -> list[tuple[str, object, str]]:
    """[cleaner] as it holds for one topic. Brokers are asked for the topic's own settings where they write the tier."""
    from compactor.cli import tiers

    opened = tiers.opened(args)
    if opened.brokers is not None and topic not in opened.brokers.topic_ids():
        raise UsageError(f"the tier has no topic {topic}", hint="`topics` lists what it holds")
    values = opened.cleaner_for(topic).model_dump(mode="json")
    return [(f"cleaner.{key}", value, opened.settings.source_for(topic, key, opened.chosen(topic))) for key, value in values.items()]


def _without_secrets(properties: dict[str, object]) -> dict[str, object]:
    return {name: "(not shown)" if _SECRET.search(name) else value for name, value in properties.items()}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
