"""Command ``doctor``: what harms a broker-managed tier, or is going to."""

from __future__ import annotations

import argparse

from compactor.adapters.brokers.admin import KafkaAdmin
from compactor.bootstrap import cluster_confirmations, kafka_connection_settings
from compactor.cli import tiers
from compactor.cli.output import Output
from compactor.config.units import count_noun
from compactor.errors import BadData, ExitCode, UsageError
from compactor.upkeep.broker_doctor import find_health_problems
from compactor.views.forecast import price_table_of_tier


def doctor_command(args: argparse.Namespace, out: Output) -> ExitCode:
    tier = tiers.open_read_only(args)
    if not tier.kind.is_broker_managed or not tier.settings.kafka.has_configured_brokers:
        raise UsageError(
            "doctor asks the brokers of a broker-managed tier", hint="Set kind under [tier] and bootstrap_servers under [kafka]"
        )
    names = tiers.select_partitions(tier, args.partitions)
    admin = KafkaAdmin(kafka_connection_settings(tier.settings))
    try:
        with out.show_progress("examining", len(names), "partitions") as progress:
            prices = price_table_of_tier(tier.settings.tier_url, args.prices)
            expected_topics = () if args.partitions else tier.settings.kafka.topics
            confirmed = cluster_confirmations(tier.settings)
            found = find_health_problems(tier, admin, names, prices, progress.advance, expected_topics, confirmed)
    finally:
        admin.close()
    severe = sum(finding.severity in ("error", args.fail_on) for finding in found)
    well = f"{count_noun(len(names), 'partition')}: nothing harms {'it' if len(names) == 1 else 'them'}" if not found else "nothing is lost"
    tiers.print_check_findings(found, out, well, tiers.DOCTOR_FIELDS)
    return BadData.exit_code if severe else 0
