"""Command ``erasure``: which objects still hold a key, and what remains until it is erased."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from compactor.access.tier import Tier
from compactor.cli import command_parser, tiers, tiers as audit
from compactor.cli.kernels import compile_numba_kernels
from compactor.cli.output import Output, Table, format_size
from compactor.config.units import count_noun
from compactor.control.audit import ERASURE
from compactor.control.logs import pause_reason
from compactor.decoding import parse_key_text
from compactor.errors import ExitCode, UsageError
from compactor.features.erasure.partition import KeyRemovalRound, KeySearchRequest
from compactor.features.erasure.topic import (
    ErasureReportHeader,
    TopicKeySearchResult,
    erasure_report_json,
    expedite_erasure,
    keyed_key_digest,
    partitions_of_topic,
    survey_topic,
)
from compactor.local.budget import spool_folder
from compactor.model.ids import TopicPartition

ErasureReportDocument = dict[str, Any]
NOT_YET = 3
MAX_HOLDER_ROWS = 50
"""Largest number of holders in the table. JSON has all of them."""


def erasure_command(args: argparse.Namespace, out: Output) -> ExitCode:
    keys = _requested_keys(args)
    if not keys:
        raise UsageError("a key is needed", hint=command_parser.command_line(args, "erasure TOPIC --key K"))
    if args.shorten_grace and not args.expedite:
        raise UsageError("--shorten-grace needs --expedite", hint="Without it nothing is deleted")
    if args.to is not None and args.to.exists():
        raise UsageError(f"{args.to} exists already", hint="Name a new file")
    tier = tiers.open_configured_tier(args, writing_command="run", local_state=True) if args.expedite else tiers.open_read_only(args)
    details = {"keys": len(keys), "shorten_grace": args.shorten_grace}
    with tier, audit.audited_if(args.expedite, args, tier.settings, out, ERASURE, [args.topic], **details):
        document, code = _search_and_report(tier, args, keys, out)
    if args.to is not None:
        args.to.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _print_erasure_report(document, keys, out)
    return code


def _search_and_report(tier: Tier, args: argparse.Namespace, keys: list[bytes], out: Output) -> tuple[ErasureReportDocument, ExitCode]:
    names = partitions_of_topic(tier, args.topic)
    secret = tier.identity.temporary_hash_key()
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=True)
    removals: list[tuple[int, KeyRemovalRound]] = []
    done: list[str] = []
    with out.show_progress("searching", tiers.sum_stored_bytes(tier, names, out, includes_replaced_segments=True), "bytes") as progress:
        question = KeySearchRequest(tuple(keys), tier.ports.clock_ms(), args.by_filters, progress.advance)
        place = {name: number for number, name in enumerate(names, 1)}

        def show_partition(partition: TopicPartition) -> None:
            progress.begin_part(f"searching {partition} ({place[partition]} of {len(names)})")

        found = survey_topic(tier, names, question, show_partition)
        if args.expedite and found.holders:
            removals = _expedite(tier, found, question, args, outcomes, done, out)
            question = replace(question, now_ms=tier.ports.clock_ms())
            found = survey_topic(tier, names, question, show_partition)
    for name, error in found.failed:
        outcomes.record_failure(str(name), error)
    settings = tier.settings
    tier_fields = {"id": tier.catalog.state.tier_id, "url": settings.tier_url, "kind": settings.tier.kind, "layout": settings.tier.layout}
    header = ErasureReportHeader(tier_fields, args.topic, question.now_ms, tuple(keyed_key_digest(key, secret) for key in keys))
    document = erasure_report_json(header, found, done, removals)
    return document, outcomes.exit_code() or (0 if document["erased"] else NOT_YET)


def _expedite(
    tier: Tier,
    survey: TopicKeySearchResult,
    search_request: KeySearchRequest,
    args: argparse.Namespace,
    outcomes: tiers.PartitionOutcomes,
    finished_steps: list[str],
    out: Output,
) -> list[tuple[int, KeyRemovalRound]]:
    """Run a round now in each partition that holds a key. Return each round that removed a key's records, earlier ones included, with the
    key's index.
    """
    if not tier.kind.compacts:
        raise UsageError("a tier of this layout is only read", hint="Nothing was changed; leave out --expedite")
    spool_folder(tier.state_dir)
    compile_numba_kernels(out)

    def record_erasure_step(text: str) -> None:
        finished_steps.append(text)
        out.print_note(text)

    removals = survey.removals
    for one in survey.surveys:
        if not one.holders:
            continue
        if why := pause_reason(tier.catalog.state, one.partition):
            record_erasure_step(f"{one.partition}: nothing was done, it is {why}")
            continue
        try:
            after = expedite_erasure(tier, one, search_request, shorten_grace=args.shorten_grace, report_step=record_erasure_step)
            removals += [(key, removal) for key, some in after.removals.items() for removal in some]
        except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
            outcomes.record_failure(str(one.partition), error)
    return removals


def _requested_keys(args: argparse.Namespace) -> list[bytes]:
    texts = list(args.key)
    if args.keys_file is not None:
        try:
            texts += [line for line in args.keys_file.read_text(encoding="utf-8").splitlines() if line]
        except OSError as error:
            raise UsageError(f"{args.keys_file} cannot be read: {error.strerror}") from error
    return list(dict.fromkeys(parse_key_text(text) for text in texts))


def _print_erasure_report(document: ErasureReportDocument, keys: list[bytes], out: Output) -> None:
    texts = {entry["digest"]: key.decode("utf-8", "backslashreplace") for entry, key in zip(document["keys"], keys, strict=True)}
    rows = [
        (
            h["partition"],
            h["state"],
            texts.get(h["key"], "any"),
            h["records"] or None,
            format_size(h["bytes"]),
            h["until"],
            h["object"],
            h["what"],
            h["waits_for"] and f"waits for {h['waits_for']}",
        )
        for h in document["holders"][:MAX_HOLDER_ROWS]
    ]
    more = len(document["holders"]) - MAX_HOLDER_ROWS
    if more > 0:
        rows.append(("", "", "", None, "", "", f"and {more} more; --output json has all", "", ""))
    columns = ("partition", "state", "key", "records", "size", "not before", "object", "what", "waits for")
    since = document["gone_since"]
    gone = f" Readers have not had it since run {since['run_id']} ({since['at']})." if since else ""
    erased = (
        "Erased: nothing in the tier holds it."
        if document["erased"]
        else f"Not yet: {count_noun(len(document['holders']), 'object')} may hold it."
    )
    if document["erased"] and not since and not document["done"]:
        erased += " There is no trace that it ever did. If you expect one, check how the key is written (`segments dump` prints keys)."
    tables = [Table("", columns, rows, minor=("records", "key"), below=3)] if rows else []
    notes = "\n".join(f"Not covered: {one['what']} ({one['why']})" for one in document["not_covered"])
    out.print_result(document, *tables, summary=f"{erased}{gone}\n{notes}")
