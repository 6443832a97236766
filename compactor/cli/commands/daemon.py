"""Command ``daemon``: runs rounds and deletes replaced segments until SIGTERM. SIGHUP rereads the configuration."""

from __future__ import annotations

import argparse
import logging

from compactor.cli import command_parser, serving, tiers
from compactor.cli.output import Output
from compactor.daemon.daemon import Daemon
from compactor.errors import ExitCode, StoreError, UsageError
from compactor.views.forecast import price_table_of_tier
from compactor.web.console import RequestRouter
from compactor.web.pages import DaemonPages
from compactor.web.server import serve_pages


def run_daemon(args: argparse.Namespace, out: Output) -> ExitCode:
    serving.prepare_process()

    tell = serving.SERVICE_JOURNAL
    tier = tiers.open_configured_tier(args, local_state=True, writing_command="daemon")
    try:
        tier.identity.read_catalog()
    except (UsageError, StoreError) as error:
        tell(f"{error.message}; waiting for it", level=logging.WARNING)
    daemon = Daemon(tier, log=tell)
    settings = tier.settings.daemon
    pages = DaemonPages(
        daemon.status,
        daemon.partition_details,
        getattr(args, "config", ""),
        price_table_of_tier(tier.settings.tier_url),
        settings.runbook_url,
        daemon.cleaner_settings_for_topic,
    )
    router = RequestRouter(pages, daemon.loop_age_ms, settings.interval_ms)
    with serve_pages(settings.listen, router, host_names=settings.host_names) as address:
        tell(f"{tier.ports.holder} schedules {tier.ports.layout.url}; status at http://{address}/")
        return serving.run_service(
            "daemon",
            daemon,
            tier.settings,
            lambda: command_parser.load_command_settings(args),
            lambda: [work.job.partition for work in daemon.status().running_jobs],
            out,
        )
