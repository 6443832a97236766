"""Command ``verify``: metadata against objects, indexes against logs, CRCs, gaps, overlaps and orphans."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from compactor.access.tier import Tier
from compactor.cli import tiers
from compactor.cli.output import Output
from compactor.errors import ExitCode, UsageError
from compactor.model.finding import Finding
from compactor.tier.kinds import MetadataSource
from compactor.upkeep.broker_verify import verify_broker_partition
from compactor.upkeep.verify import stale_upload_notes, verify_catalog, verify_partition

REPAIRABLE = ("missing", "size", "digest")
"""Problems that `repair` makes good: objects that are not as recorded."""


def verify_tier_command(args: argparse.Namespace, out: Output) -> ExitCode:
    tier = tiers.open_read_only(args)
    if args.fast and not tier.kind.is_broker_managed:
        raise UsageError("--fast is for broker-managed tiers", hint="Without it every live object is read")
    checks = {
        MetadataSource.CONTROL_LOG: _verify_compactor_managed_tier,
        MetadataSource.METADATA_TOPIC: _verify_broker_managed_tier,
        MetadataSource.LISTING: _verify_listed_tier,
    }
    return checks[tier.kind.metadata](tier, args, out)


def _verify_compactor_managed_tier(tier: Tier, args: argparse.Namespace, out: Output) -> ExitCode:
    found = verify_catalog(tier)
    if not found:
        found = _verify_each_partition(tier, args, out, partial(verify_partition, compares_batch_digest_sums=args.deep))
    code = tiers.print_check_findings([*found, *stale_upload_notes(tier)], out)
    for name in dict.fromkeys(
        f"{one.where.topic}-{one.where.partition}" for one in found if one.severity == "error" and one.kind in REPAIRABLE
    ):
        out.print_note(
            f"`repair {name} --from LOG_DIR|CONFIG` makes {name} good from a log directory, a replica's or a backup's, or another tier"
        )
    return code


def _verify_listed_tier(tier: Tier, args: argparse.Namespace, out: Output) -> ExitCode:
    from compactor.features.pinterest.verify import verify_listed_partition

    return tiers.print_check_findings(_verify_each_partition(tier, args, out, verify_listed_partition), out)


def _verify_each_partition(tier: Tier, args: argparse.Namespace, out: Output, verify: Callable[..., list[Finding]]) -> list[Finding]:
    found: list[Finding] = []
    names = tiers.select_partitions(tier, args.partitions)
    with out.show_progress("verifying", tiers.sum_stored_bytes(tier, names, out), "bytes") as progress:
        for name in names:
            progress.begin_part(f"verifying {name}")
            found += verify(tier, name, progress.advance)
    return found


def _verify_broker_managed_tier(tier: Tier, args: argparse.Namespace, out: Output) -> ExitCode:
    return tiers.print_check_findings(
        _verify_each_partition(tier, args, out, lambda *one: verify_broker_partition(*one, skips_segment_contents=args.fast)),
        out,
        fields=tiers.BROKER_FIELDS,
    )
