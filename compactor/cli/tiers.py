"""Common part of the commands: opening the tier, choosing partitions, exit codes, audit."""

from __future__ import annotations

import argparse
import gc
import getpass
import os
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any

from checkpoint.offsets import CleanerOffset
from compactor import __version__
from compactor.access.tier import Tier, no_such_partition_error
from compactor.bootstrap import open_tier
from compactor.cli import command_parser
from compactor.cli.output import Output, Table, format_size
from compactor.config.settings import Settings
from compactor.config.units import count_noun, format_duration
from compactor.control.audit import ActionOutcome, ManualAction, record_action, record_outcome
from compactor.control.incarnations import latest_incarnations
from compactor.control.logs import PartitionLog, pattern_matches
from compactor.control.summary import PartitionSummary
from compactor.errors import BadData, CompactorError, ExitCode, Leased, StoreError, UsageError, gravest_exit_code, without_secrets
from compactor.model.finding import Finding
from compactor.model.ids import TopicPartition, partition_of_incarnation
from compactor.storage.factory import open_store
from compactor.storage.wrappers import ReadOnlyStore
from compactor.tier.kinds import control_url, tier_kind
from compactor.views.checkpoints import read_only_copy
from compactor.views.overview import read_summaries

READ_ONLY_HINT = "What only reads works without: topics, segments, plan, explain, checkpoints, verify, export"
WRITERS = ("run", "retire", "daemon", "recompact", "undo", "topics takeover")
"""Commands that may change a broker-managed tier."""


def open_configured_tier(args: argparse.Namespace, *, local_state: bool = False, writing_command: str = "") -> Tier:
    """local_state: whether to use cached control logs and summaries.

    :param writing_command: name of the command if it changes the tier. If empty, a broker-managed tier is read-only.
    :raises UsageError: if the settings do not allow it, or the command does not work on this kind of tier.
    """
    gc.set_threshold(100_000)  # segments are made by the hundred thousand, and no cycles
    settings = command_parser.load_command_settings(args)
    shared = tier_kind(settings).is_broker_managed
    if shared and writing_command:
        _check_writer(writing_command, settings)
    tier = open_tier(settings, local_state=local_state)
    if shared and writing_command:
        tier.identity.read_or_create_catalog()
    elif shared:
        tier = read_only_copy(tier)
    if any(cleaner.map_engine == "spark" for cleaner in (settings.cleaner, *settings.topics.values())):
        from compactor.features.spark.recompaction import SparkRunners

        tier = replace(tier, runners=SparkRunners())
    if writing_command in ("run", "daemon") and settings.spark.uses_spark_cluster:
        from compactor.features.spark.child import SparkChildRoundRunner

        tier = replace(tier, remote_rounds=SparkChildRoundRunner())
    return tier


def _check_writer(command: str, settings: Settings) -> None:
    if command not in WRITERS:
        raise UsageError(f"`{command}` does not work on a broker-managed tier", hint=READ_ONLY_HINT)
    has_control = bool(control_url(settings))
    if not (has_control and settings.kafka.bootstrap_servers.strip()):
        missing = "bootstrap_servers under [kafka]" if has_control else "control_url under [tier]"
        raise UsageError(f"`{command}` on a broker-managed tier needs {missing}", hint=READ_ONLY_HINT)
    if not settings.kafka.topics:
        raise UsageError(f"`{command}`: topics under [kafka] is empty, so that no topic is read", hint="Name whole regular expressions")


def open_for_control_writes(args: argparse.Namespace) -> Tier:
    """Brokers' data is read-only. Raises UsageError if no control store is configured."""
    settings = command_parser.load_command_settings(args)
    if not tier_kind(settings).is_broker_managed:
        return open_configured_tier(args)
    if not control_url(settings):
        raise UsageError("no control store is configured", hint="Set control_url under [tier], outside of the location that brokers write")
    found = open_tier(settings)
    found.identity.read_or_create_catalog()
    return found.with_stores(data=ReadOnlyStore(found.ports.data))


def open_read_only(args: argparse.Namespace) -> Tier:
    return read_only_copy(open_configured_tier(args))


def open_tier_and_partition(
    args: argparse.Namespace, open_tier: Callable[[argparse.Namespace], Tier] = open_read_only
) -> tuple[Tier, TopicPartition]:
    """Tier, and partition of ``args.partition``. If several topics have had this name, ``--topic-id`` chooses.

    :raises UsageError: if the tier has no such partition, or the name is that of a topic with several partitions.
    """
    tier = open_tier(args)
    names = select_partitions(tier, [args.partition])
    if len(names) > 1:
        shown = ", ".join(map(str, names[:5])) + (" ..." if len(names) > 5 else "")
        raise UsageError(f"{args.partition} has {len(names)} partitions, and one is needed", hint=f"Name one of {shown}")
    topic_id = getattr(args, "topic_id", None)
    return tier, tier.incarnation_with_topic_id(names[0], topic_id) if topic_id else names[0]


def select_partitions(tier: Tier, given_names: Sequence[str]) -> list[TopicPartition]:
    """Partitions that a user's arguments select, each once; all if there are none.

    :param given_names: partitions, topics (the present one of that name), or regular expressions over whole names. An existing name is
        never taken as an expression.
    :raises UsageError: if a name or expression matches nothing.
    """
    known = tier.list_partitions()
    latest = latest_incarnations(known, tier.catalog.state.withdrawn_partitions)
    found: list[TopicPartition] = []
    for text in given_names:
        exact = [name for name in known if "~" in text and text in (str(name), f"{name}~1")]
        named = exact or [name for name in latest if str(name.first_incarnation) == text] or [name for name in latest if name.topic == text]
        with suppress(re.error):
            named = named or [name for name in latest if pattern_matches(text, name)]
        if not named:
            raise no_such_partition_error(text, known)
        found += named
    return list(dict.fromkeys(found)) if given_names else known


def read_control_logs(tier: Tier, partitions: Sequence[TopicPartition], out: Output, outcomes: PartitionOutcomes) -> list[PartitionLog]:
    found = []
    with out.show_progress("reading", len(partitions), "partitions") as progress:
        for name, log in zip(partitions, tier.read_logs(partitions, progress.advance), strict=True):
            if isinstance(log, CompactorError):
                outcomes.record_failure(str(name), log)
            else:
                outcomes.record_success()
                found.append(log)
    return found


def read_partition_summaries(
    tier: Tier, partitions: Sequence[TopicPartition], out: Output, outcomes: PartitionOutcomes
) -> list[PartitionSummary]:
    """Summaries that can be read, from control logs or local state. ``outcomes`` reports the others."""
    found = []
    with out.show_progress("looking", len(partitions), "partitions") as progress:
        looks = read_summaries(tier, partitions, check_for_restored_logs=True, on_partition=progress.advance)
    for inspection in looks:
        if inspection.error is not None:
            outcomes.record_failure(str(inspection.partition), inspection.error)
        if inspection.summary is not None:
            outcomes.record_success()
            found.append(inspection.summary)
    return found


def sum_stored_bytes(tier: Tier, partitions: Sequence[TopicPartition], out: Output, *, includes_replaced_segments: bool = False) -> int:
    with out.show_progress("looking", len(partitions), "partitions") as progress:
        looks = read_summaries(tier, partitions, on_partition=progress.advance)
    found = [one.summary for one in looks if one.summary is not None]
    replaced = sum(summary.waiting_bytes for summary in found) if includes_replaced_segments else 0
    return sum(summary.bytes for summary in found) + replaced


VERIFY_FIELDS = ("severity", "kind", "topic", "partition", "object", "detail")
"""JSON fields of a finding of `verify`."""
BROKER_FIELDS = (*VERIFY_FIELDS, "means", "todo")
DOCTOR_FIELDS = (*BROKER_FIELDS, "bytes", "usd_month")


def print_check_findings(
    findings: Sequence[Finding], out: Output, summary_without_errors: str = "all is well", fields: Sequence[str] = VERIFY_FIELDS
) -> ExitCode:
    """Print findings, and return 0, or the exit code of BadData if one is an error. Equal notes are counted together."""
    rows: Counter[tuple[str, ...]] = Counter()
    for one in findings:
        name = f"{one.where.topic}-{one.where.partition}" if one.where.topic else ""
        texts = (one.detail, one.means, one.hint)
        is_error = one.severity == "error"
        if is_error:
            out.print_note(f"error: {one.object or name}: {': '.join(filter(None, texts[:2]))}")
        rows[(one.severity, one.kind, name, one.object if is_error or texts[1] else "", *texts)] += 1
    errors = sum(one.severity == "error" for one in findings)
    columns = ("severity", "problem", "partition", "count", "object", "what was found", "what it means", "what to do")
    table = Table("", columns, [(*row[:3], count, *row[3:]) for row, count in rows.items()], minor=("count",), below=4)
    summary = count_noun(errors, "problem") if errors else summary_without_errors
    out.print_result(
        {"ok": not errors, "problems": [one.document(fields) for one in findings]}, *([table] if rows else []), summary=summary
    )
    return BadData.exit_code if errors else 0


def format_cleaner_offsets(offsets: Sequence[CleanerOffset]) -> str:
    return " ".join(f"{entry.leader_epoch}:{entry.offset}" for entry in offsets) or "never cleaned"


def compaction_rounds_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = []
    for row in rows:
        segments = f"{row['segments_in']} -> {row['segments_out']}" if row.get("segments_out") else ""
        by_the_store = f" ({format_size(row['bytes_copied'])} copied by the store)" if row.get("bytes_copied") else ""
        moved = (format_size(row.get("bytes_read")), format_size(row.get("bytes_written")) + by_the_store)
        records = (row.get("records_read"), row.get("records_kept"))
        took = format_duration(1000 * row["seconds"]) if segments or row["seconds"] else ""
        cells.append((partition_of_row(row), row["status"], segments, *records, *moved, row.get("next_dirty_offset"), took))
    columns = ("partition", "status", "segments", "records", "kept", "read", "written", "next dirty", "took")
    return Table("", columns, cells, minor=("next dirty", "segments", "records", "kept", "read"))


def partition_of_row(row: Mapping[str, Any]) -> str:
    return str(partition_of_incarnation(row["topic"], row["partition"], row["incarnation"]))


def partition_name_fields(partition: TopicPartition) -> dict[str, Any]:
    return {"topic": partition.topic, "partition": partition.partition, "incarnation": partition.incarnation}


def report_document(report: Any) -> dict[str, Any]:
    return asdict(report)


class PartitionOutcomes:
    """Outcomes of a command for several partitions. A failed partition does not stop the others.

    :param is_selection_explicit: whether the user named the partitions. If not, one that another process leads is not a failure.
    """

    def __init__(self, out: Output, is_selection_explicit: bool) -> None:
        self._out = out
        self._named = is_selection_explicit
        self._codes: list[int] = []
        self._leased = 0

    def record_success(self) -> None:
        self._codes.append(0)

    def record_failure(self, object_name: str, error: Exception) -> CompactorError:
        """With TIERED_COMPACTOR_DEBUG=1, an exception that is no CompactorError is raised."""
        found = command_parser.as_compactor_error(error)
        if found is not error and os.environ.get(command_parser.DEBUG) == "1":
            raise error
        self._out.print_note(f"error: {found}" if str(found).startswith(f"{object_name}: ") else f"error: {object_name}: {found}")
        if isinstance(found, Leased) and not self._named:
            self._leased += 1
        else:
            self._codes.append(found.exit_code)
        return found

    def record_quarantine(self, partition: str, reason: str, keyless_records: int = 0, *, is_repairable: bool) -> None:
        """Record that a round failed on damaged data. It is retried with growing delays.

        :param keyless_records: number of records without a key for which the round was refused; 0 if that is not the reason.
        :param is_repairable: whether `repair` works on this tier: not where other programs write objects without digests.
        """
        if keyless_records:
            self._out.print_note(f"error: {partition} is blocked: {reason}. The round changed nothing")
            self._codes.append(3)
            return
        repair = "`repair`, or " if is_repairable else ""
        advice = (
            "The round changed nothing. Readers cannot read damaged data, either. `verify` names all damage, `explain` what helps: "
            f"{repair}restoring the object from the store's versions or a backup"
        )
        self._out.print_note(f"error: {partition} is quarantined: {reason}. {advice}")
        self._codes.append(3)

    def exit_code(self) -> ExitCode:
        """Exit code of the gravest failure, or 0. A partition that another process leads is a failure if the user named it, or if there is
        no other outcome.
        """
        if self._leased and not self._codes:
            return Leased.exit_code
        return gravest_exit_code(self._codes)


# Recording of what a person does to a tier (``compactor.control.audit``).


def invoking_user_name() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    caller = os.environ.get("SUDO_USER")
    return f"{caller} (as {user})" if caller and caller != user else user


def operator_name() -> str:
    return f"{invoking_user_name()}@{socket.gethostname()}"


@contextmanager
def audited(
    args: argparse.Namespace, settings: Settings, out: Output, command: str, targets: Sequence[str], **details: str | int | bool
) -> Iterator[None]:
    """Record a manual action in the audit log before the ``with`` block, and its outcome after it.

    :param targets: partitions, topics or patterns.
    :raises StoreError: before the block, if the action cannot be recorded.
    """
    url = control_url(settings)
    if not url:
        out.print_note("note: `audit list` will not show this: control_url under [tier] is not set")
        yield
        return
    control = open_store(url, settings=settings)
    action = ManualAction(
        at_ms=int(time.time() * 1000),
        user=invoking_user_name(),
        host=socket.gethostname(),
        process=os.getpid(),
        command=command,
        targets=tuple(targets),
        details=details,
        reason=getattr(args, "reason", ""),
        version=__version__,
    )
    key = record_action(control, action, secrets.token_hex(8))
    error = ""
    try:
        yield
    except BaseException as raised:
        error = without_secrets(str(raised)) or type(raised).__name__
        raise
    finally:
        try:
            record_outcome(control, key, ActionOutcome(at_ms=int(time.time() * 1000), error=error))
        except StoreError as failed:
            out.print_note(f"warning: the outcome is not in the audit: {failed}")


def audited_if(
    must_record: bool, args: argparse.Namespace, settings: Settings, out: Output, command: str, targets: Sequence[str], **details: str | int
) -> AbstractContextManager[None]:
    return audited(args, settings, out, command, targets, **details) if must_record else nullcontext()
