"""``erasure TOPIC --key K``: which objects still hold a key, since when it is gone, what has to pass until it is."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size
from compactor.errors import BadData, UsageError

if TYPE_CHECKING:
    from compactor.bootstrap import Tier
    from compactor.model.ids import TopicPartition
    from compactor.upkeep.erasure.looking import TopicLook
    from compactor.upkeep.erasure.survey import Question

NOT_YET = 3
MOST_ROWS = 50
"""Holders that a table shows; JSON has them all."""


def add_arguments(parser: frame.Parser) -> None:
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help="all of its partitions; or one TOPIC-PARTITION")
    parser.add_argument("--key", metavar="K", action="append", default=[], help="text, or base64:...; may be repeated")
    parser.add_argument("--keys-file", metavar="FILE", type=Path, help="one key a line, written like --key")
    parser.add_argument("--by-filters", action="store_true", help="do not read live segments whose Bloom filter has none of the keys")
    parser.add_argument("--expedite", action="store_true", help="do what is needed now: rounds over the partitions concerned, then retire")
    parser.add_argument(
        "--shorten-grace", action="store_true", help="with --expedite: consent that replaced objects go before their grace ends"
    )
    parser.add_argument("--before", metavar="REPORT", type=Path, help="an earlier report: which of its holders are gone")
    parser.add_argument("--to", metavar="REPORT", type=Path, help="write the report there, as JSON")
    parser.add_argument("--sign-with", metavar="FILE", type=Path, help="sign it: an Ed25519 private key (PEM), or a secret for HMAC-SHA256")
    parser.add_argument(
        "--check", metavar="REPORT", type=Path, help="of a report: whether the signature holds (--sign-with), and whose it is"
    )
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    from compactor.upkeep.erasure import report as reports

    keys = _keys(args)
    secret = _read(args.sign_with) if args.sign_with is not None else None
    if args.check is not None:
        return _check(args, keys, secret, out)
    if args.topic is None or not keys:
        raise UsageError("a topic and a key are needed", hint="tiered-compactor erasure TOPIC --key K")
    if args.shorten_grace and not args.expedite:
        raise UsageError("--shorten-grace goes with --expedite", hint="Without it nothing is deleted")
    if args.to is not None and args.to.exists():
        raise UsageError(f"{args.to} exists already", hint="Name a new file")
    opened = tiers.opened(args, writes="run", local_state=True) if args.expedite else tiers.viewed(args)
    with opened:
        document, code = _asked(opened, args, keys, out)
    if secret is not None:
        document = reports.signed(document, secret)
    if args.to is not None:
        args.to.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _print(document, keys, out)
    return code


def _asked(opened: Tier, args: argparse.Namespace, keys: list[bytes], out: Output) -> tuple[dict[str, Any], int]:
    from compactor.upkeep.erasure import report as reports
    from compactor.upkeep.erasure.looking import look, partitions_of
    from compactor.upkeep.erasure.survey import Question

    names = partitions_of(opened, args.topic)
    secret = opened.reading_key()
    digests = tuple(reports.digest_of(key, secret) for key in keys)
    before = reports.holders_of(_report(args.before), digests) if args.before is not None else []
    outcomes = tiers.PartitionOutcomes(out, named=True)
    done: list[str] = []
    with out.progress("looking", unit="bytes") as progress:
        past = bool(before) or args.expedite
        asked = Question(tuple(keys), opened.ports.clock_ms(), args.by_filters, past, progress.advance)

        place = {name: number for number, name in enumerate(names, 1)}

        def at(name: TopicPartition) -> None:
            progress.at(f"looking at {name} ({place[name]} of {len(names)})")

        found = look(opened, names, asked, at)
        removals = [(key, one) for each in found.surveys for key, some in each.removals.items() for one in some]
        if args.expedite and found.holders:
            before += found.holders
            _expedite(opened, found, asked, args, outcomes, done, out)
            asked = replace(asked, now_ms=opened.ports.clock_ms())
            found = look(opened, names, asked, at)
    for name, error in found.failed:
        outcomes.failed(str(name), error)
    settings = opened.settings
    tier = {"id": opened.catalog.state.tier_id, "url": settings.tier_url, "kind": settings.tier.kind, "layout": settings.tier.layout}
    about = reports.Asked(tier, args.topic, asked.now_ms, digests)
    removals += reports.removals_of(before, found)
    document = reports.document(about, found, reports.gone_since(before, found), removals, done)
    return document, outcomes.exit_code() or (0 if document["erased"] else NOT_YET)


def _expedite(
    opened: Tier,
    found: TopicLook,
    asked: Question,
    args: argparse.Namespace,
    outcomes: tiers.PartitionOutcomes,
    done: list[str],
    out: Output,
) -> None:
    from compactor.cli.warming import warm_up
    from compactor.control.pauses import pause_of
    from compactor.local.spool import process_folder
    from compactor.upkeep.erasure.expedite import expedite

    if opened.listed is not None:
        raise UsageError("a tier of this layout is only read", hint="Nothing was changed; leave out --expedite")
    process_folder(opened.state_dir)
    warm_up(out)

    def tell(text: str) -> None:
        done.append(text)
        out.note(text)

    for one in found.surveys:
        if not one.holders:
            continue
        if why := pause_of(opened.catalog.state, one.name):
            tell(f"{one.name}: nothing was done, it is {why}")
            continue
        try:
            expedite(opened, one, asked, shorten_grace=args.shorten_grace, tell=tell)
        except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
            outcomes.failed(str(one.name), error)


def _keys(args: argparse.Namespace) -> list[bytes]:
    from compactor.views.explain import parse_key

    texts = list(args.key)
    if args.keys_file is not None:
        texts += [line for line in _read(args.keys_file).decode("utf-8").splitlines() if line]
    return list(dict.fromkeys(parse_key(text) for text in texts))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _report(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise BadData(f"it is no JSON: {error}", segment=str(path)) from error
    if not isinstance(found, dict):
        raise BadData("it is no report of an erasure", segment=str(path))
    return found


def _check(args: argparse.Namespace, keys: list[bytes], secret: bytes | None, out: Output) -> int:
    """Of a filed report: whether its signature holds, and (with the tier at hand) whether it is about these keys."""
    from compactor.upkeep.erasure import report as reports

    found = _report(args.check)
    problems = []
    if secret is not None and (problem := reports.signature_problem(found, secret)):
        problems.append(problem)
    if keys:
        opened = tiers.viewed(args)
        opened.identity()
        known = {entry["digest"] for entry in found.get("keys", [])}
        strange = [key for key in keys if reports.digest_of(key, opened.reading_key()) not in known]
        problems += [f"it is not about {len(strange)} of {len(keys)} keys"] if strange else []
    text = "; ".join(problems) or "it holds"
    out.result({"ok": not problems, "problems": problems, "erased": found.get("erased")}, summary=text)
    return NOT_YET if problems else 0


def _print(document: dict[str, Any], keys: list[bytes], out: Output) -> None:
    numbers = {entry["digest"]: number for number, entry in enumerate(document["keys"])}
    rows = [
        (h["partition"], h["object"], h["state"], _shown(numbers, keys, h["key"]), h["what"], h["records"] or None, size(h["bytes"]),
         h["until"], h["waits_for"])
        for h in document["holders"][:MOST_ROWS]
    ]  # fmt: skip
    more = len(document["holders"]) - MOST_ROWS
    if more > 0:
        rows.append(("", f"and {more} more; --output json has all", "", "", "", None, "", "", ""))
    columns = ("partition", "object", "state", "key", "what", "records", "size", "not before", "waits for")
    since = document["gone_since"]
    gone = f" Readers have not had it since run {since['run_id']} ({since['at']})." if since else ""
    left = f" {len(document['gone'])} objects that held it are gone." if document["gone"] else ""
    erased = (
        "Erased: nothing in the tier holds it." if document["erased"] else f"Not yet: {len(document['holders'])} objects hold it, or could."
    )
    if document["erased"] and not since and not document["gone"]:
        erased += " Nor is there a trace that it ever did: if you expect one, mind how the key is written (`segments dump` prints keys)."
    tables = [Table("", columns, rows)] if rows else []
    notes = "\n".join(f"Not covered: {one['what']} ({one['why']})" for one in document["not_covered"])
    out.result(document, *tables, summary=f"{erased}{gone}{left}\n{notes}")


def _shown(numbers: dict[str, int], keys: list[bytes], digest: str | None) -> str:
    if digest is None:
        return "any"
    key = keys[numbers[digest]]
    return key.decode("utf-8", "backslashreplace")
