"""Command ``config check``: whether stores, brokers, topics and folders can be used."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from compactor.adapters.brokers.admin import KafkaAdmin
from compactor.adapters.brokers.cluster import kafka_python_options
from compactor.bootstrap import cluster_confirmations, kafka_connection_settings, open_tier, wall_clock_ms
from compactor.cli import command_parser
from compactor.cli.output import Output, Table
from compactor.config.sections import MINIMUM_DAYS
from compactor.config.settings import Settings
from compactor.errors import BadData, CompactorError, ExitCode, Refused, StoreError, Unavailable, UsageError
from compactor.model.finding import Finding
from compactor.storage.factory import open_store
from compactor.storage.probe import probe_store
from compactor.tier.kinds import MetadataSource, control_url, tier_kind
from compactor.upkeep.broker_doctor import (
    check_cluster,
    check_known_problems,
    check_metadata,
    check_object_access,
    check_record_rate,
    check_topics,
)
from compactor.views.checkpoints import read_only_copy
from compactor.views.verdict import blocks_of_topics

COLUMNS = ("severity", "kind", "object", "detail", "hint")
SEVERITIES = ("error", "warning", "note")
"""Gravest first."""

CHECK_FIRST_ANSWER_MS = 4_000
"""Longest wait for the first answer of a store. Several checks wait in turn."""
CHECK_BROKERS_S = 5.0
"""Longest wait for each of the first answers of the brokers."""


def check_settings(args: argparse.Namespace, out: Output) -> ExitCode:
    """A failed check does not stop the others. The exit code is 0 if no check found an error. Invalid values are refused when the settings
    are loaded.
    """
    checks = {
        MetadataSource.CONTROL_LOG: _check_compactor_managed_tier,
        MetadataSource.METADATA_TOPIC: _check_broker_managed_tier,
        MetadataSource.LISTING: _check_listed_tier,
    }
    settings = _with_short_timeout(command_parser.load_command_settings(args))
    with out.show_progress("trying the tier"):
        problems = [*_check_state_dir(settings), *checks[tier_kind(settings).metadata](settings)]
    topics = _topic_results(problems)
    ok = all(problem.severity != "error" for problem in problems)
    documents = [problem.document(COLUMNS) for problem in problems]
    tables = [Table("", COLUMNS, [[*row.values()] for row in documents], below=3)] if problems else []
    out.print_result({"ok": ok, "problems": documents, "topics": topics}, *tables, summary=_usability_text(settings, problems, topics))
    if any(problem.kind == "identity" for problem in problems):
        return UsageError.exit_code
    return 0 if ok else StoreError.exit_code


def _topic_results(problems: Sequence[Finding]) -> list[dict[str, object]]:
    """Row for each topic with a problem of its own, with the exit code of `run` on it."""
    found: dict[str, str] = {}
    for problem in problems:
        if problem.kind == "topic":
            gravest = min(problem.severity, found.get(problem.object, "note"), key=SEVERITIES.index)
            found[problem.object] = gravest
    return [
        {"topic": topic, "severity": severity, "exit_code": Refused.exit_code if severity == "error" else 0, "blocked": severity == "error"}
        for topic, severity in sorted(found.items())
    ]


def _usability_text(settings: Settings, problems: Sequence[Finding], topics: Sequence[dict[str, object]]) -> str:
    places = f"{settings.tier_url} and {settings.tier.state_dir}"
    if any(problem.severity == "error" and problem.kind != "topic" for problem in problems):
        return f"{places} cannot be used like this"
    blocked = [f"{row['topic']} (error, exit code {row['exit_code']})" for row in topics if row["blocked"]]
    if blocked:
        whom = "it" if len(blocked) == 1 else "them"
        return f"blocked: {', '.join(blocked)}; no round can clean {whom}, and other topics are not affected"
    return f"{places} can be used"


def _with_short_timeout(settings: Settings) -> Settings:
    sections = {name: getattr(settings, name) for name in type(settings).model_fields}
    waiting = {name: section for name, section in sections.items() if getattr(section, "first_answer_ms", 0) > CHECK_FIRST_ANSWER_MS}
    short = {name: section.model_copy(update={"first_answer_ms": CHECK_FIRST_ANSWER_MS}) for name, section in waiting.items()}
    return settings.model_copy(update=short)


def _check_compactor_managed_tier(settings: Settings) -> list[Finding]:
    """Nothing is written if the data belongs to another tier."""
    problems = _check_identity(settings)
    if not problems:
        problems = _check_stores(settings)
        problems += [] if any(problem.severity == "error" for problem in problems) else _check_topic_patterns(settings)
    return [
        *problems,
        *_check_storage_class(settings),
        *_check_topic_deletion(settings),
        *_find_ineffective_settings(settings),
    ]


def _check_broker_managed_tier(settings: Settings) -> list[Finding]:
    return [*_check_cluster(settings), *_check_stores(settings)]


def _check_listed_tier(settings: Settings) -> list[Finding]:
    return [
        *_check_listing(settings),
        *_check_topic_patterns(settings),
        *_find_ineffective_settings(settings),
    ]


def _check_topic_deletion(settings: Settings) -> list[Finding]:
    if settings.tier.on_topic_deletion == "keep":
        return []
    detail, hint = "it asks the cluster, and [kafka] bootstrap_servers names none", 'Name brokers, or set it to "keep"'
    if settings.kafka.has_configured_brokers:
        try:
            kafka_python_options(kafka_connection_settings(settings))
        except CompactorError as error:
            detail, hint = error.message, error.hint
        else:
            return []
    return [Finding("error", "settings", "tier.on_topic_deletion", detail, hint)]


def _find_ineffective_settings(settings: Settings) -> list[Finding]:
    if not settings.publish.metadata_records_per_hour:
        return []
    detail, key = "a tier of kind object-log has no metadata records to limit", "publish.metadata_records_per_hour"
    return [Finding("note", "settings", key, detail, "Take it out of the configuration")]


def _check_storage_class(settings: Settings) -> list[Finding]:
    name = settings.s3.storage_class
    if name not in MINIMUM_DAYS:
        return []
    detail = f"S3 bills an object in {name} for at least {MINIMUM_DAYS[name]} days, also when a round replaces it earlier"
    hint = "It pays for topics whose rounds are rarer: raise min_cleanable_dirty_ratio, or leave it out"
    return [Finding("note", "storage-class", "s3.storage_class", detail, hint)]


def _check_state_dir(settings: Settings) -> list[Finding]:
    directory = Path(settings.tier.state_dir).absolute()
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return []
    hint = "Set state_dir under [tier] to a directory in which this user may write"
    detail = f"nothing can be written in {existing}"
    return [Finding("error", "state-dir", settings.tier.state_dir, detail, hint)]


def _check_stores(settings: Settings) -> list[Finding]:
    # The control store lies inside the tier unless it has a place of its own; what holds for the tier then holds for it.
    # Where brokers keep their segments, reading is all that is tried.
    tier = settings.tier
    stores = [(settings.tier_url, ".tiered-compactor/probe/")] if tier_kind(settings).owns_root else []
    if tier.control_url:
        stores.append((tier.control_url, "probe/"))
    if tier.pinterest.target:
        stores.append((tier.pinterest.target, ".tiered-compactor/probe/"))
    problems: list[Finding] = []
    for url, prefix in stores:
        store = open_store(url, settings=settings, limits=settings.limits)
        problems += [replace(finding, object=url) for finding in probe_store(store, wall_clock_ms, prefix)]
    return problems


def _check_topic_patterns(settings: Settings) -> list[Finding]:
    """Error for each Iceberg table that several topics would have, warning for each [topics] table that matches no topic."""
    try:
        topics = {name.topic for name in read_only_copy(open_tier(settings)).list_partitions()}
    except CompactorError:
        return []  # `_check_stores` reports it
    shared = _check_shared_tables(settings, topics)
    unmatched = [pattern for pattern in settings.topics if topics and not any(re.fullmatch(pattern, topic) for topic in topics)]
    detail = "no topic of the tier matches"
    return shared + [
        Finding("warning", "topics", f"[topics.{json.dumps(pattern)}]", detail, _unmatched_pattern_hint(pattern)) for pattern in unmatched
    ]


def _check_shared_tables(settings: Settings, topics: Iterable[str]) -> list[Finding]:
    return [
        Finding(
            "error",
            "settings",
            "[outputs.iceberg]",
            f"topics {' and '.join(found)} would have one table, {table}",
            f"Name a table for each, for example [outputs.iceberg.topics.{json.dumps(found[0])}] table",
        )
        for table, found in settings.outputs.iceberg.find_shared_tables(topics).items()
    ]


def _unmatched_pattern_hint(pattern: str) -> str:
    wildcard = re.sub(r"(?<=[\w-])\*", ".*", pattern)
    if wildcard != pattern:
        return f"It is a regular expression over whole names: for names that begin so write {json.dumps(wildcard)}"
    return "It is a regular expression over whole names; `topics` lists them"


def _check_listing(settings: Settings) -> list[Finding]:
    try:
        tier = open_tier(settings)
        names = tier.list_partitions()
        if names:
            tier.open_partition_log(names[0]).refresh()
    except CompactorError as error:
        kind = "settings" if isinstance(error, UsageError) else "reading"
        return [Finding("error", kind, settings.tier_url, error.message, error.hint)]
    if names:
        return []
    detail = f"no segment found of cluster {settings.tier.pinterest.cluster} below it"
    hint = "Compare url, cluster and entropy_bits with the uploader's settings"
    return [Finding("warning", "empty", settings.tier_url, detail, hint)]


def _check_cluster(settings: Settings) -> list[Finding]:
    found = []
    servers = settings.kafka.bootstrap_servers.strip()
    connection = kafka_connection_settings(settings) if servers else None
    if connection is not None:
        first_admin = KafkaAdmin(replace(connection, timeout_s=CHECK_BROKERS_S))
        found += check_cluster(
            first_admin,
            servers,
            reports_missing_append_permission=bool(control_url(settings)),
            confirmed=cluster_confirmations(settings),
        )
    if any(finding.severity == "error" for finding in found):
        return found
    try:
        tier = read_only_copy(open_tier(settings))
    except CompactorError as error:
        kind = "metadata" if isinstance(error, BadData | StoreError) else "settings"
        return [Finding("error", kind, "[kafka]", error.message, error.hint)]
    names, problems = check_metadata(tier)
    found += problems
    if connection is not None:
        admin = KafkaAdmin(connection)
        topics = sorted({name.topic for name in names})
        found += check_topics(
            admin, topics, lambda topic: tier.settings.cleaner_settings_for_topic(topic).cleanup_policy, connection.bootstrap_servers
        )
        found += check_known_problems(admin, topics)
    if control_url(settings) and not any(finding.severity == "error" for finding in problems):  # else nothing is compacted anyway
        blocks = blocks_of_topics(tier, sorted({name.topic for name in names}))
        named = {finding.object for finding in found if finding.kind == "topic" and finding.severity == "error"}
        rest = {topic: block for topic, block in blocks.items() if topic not in named}
        found += [Finding("error", "topic", topic, block.reason, block.next_step) for topic, block in rest.items()]
    found += check_object_access(tier, names) if names else []
    found += check_record_rate(tier, names)
    shared = _check_shared_tables(settings, {name.topic for name in names})
    return [*found, *shared]


def _check_identity(settings: Settings) -> list[Finding]:
    """Check that tier and control store belong together. If both are empty, that passes."""
    tier = open_tier(settings)
    try:
        state = tier.catalog.refresh()
        tier.ownership.require_not_foreign_root(tier.ports, state)
        tier.ownership.require_unowned_root(tier.ports, state)
    except Unavailable as error:  # a second wait for the same store would say the same
        return [Finding("error", "store", settings.tier_url, error.message, error.hint)]
    except StoreError:
        return []  # `_check_stores` reports it
    except CompactorError as error:
        kind = "identity" if isinstance(error, UsageError) else "control-log"
        return [Finding("error", kind, control_url(settings), error.message, error.hint)]
    return []
