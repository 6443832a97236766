"""Command ``daemon``: runs rounds and deletes replaced segments continuously until SIGTERM. SIGHUP rereads the configuration."""

from __future__ import annotations

import argparse
import logging

from compactor.cli import frame, serving, tiers
from compactor.cli.output import Output
from compactor.daemon.daemon import Daemon
from compactor.errors import StoreError, UsageError
from compactor.views.prices import price_table_of_tier
from compactor.web.console import RequestRouter
from compactor.web.daemon_pages import DaemonPages
from compactor.web.server import serve_pages


def run_daemon(args: argparse.Namespace, out: Output) -> int:
    serving.prepare_process()

    tell = serving.SERVICE_JOURNAL
    opened = tiers.open_configured_tier(args, local_state=True, writing_command="daemon")
    try:
        opened.identity.read()
    except (UsageError, StoreError) as error:
        tell(f"{error.message}; waiting for it", level=logging.WARNING)
    daemon = Daemon(opened, log=tell)
    settings = opened.settings.daemon
    pages = DaemonPages(
        daemon.status,
        daemon.partition_details,
        getattr(args, "config", ""),
        price_table_of_tier(opened.settings.tier_url),
        settings.runbook_url,
        daemon.cleaner_for,
    )
    with serve_pages(settings.listen, RequestRouter(pages, daemon.loop_age_ms, settings.interval_ms)) as address:
        tell(f"{opened.ports.holder} schedules {opened.ports.layout.url}; status at http://{address}/")
        return serving.run_service(
            "daemon",
            daemon,
            opened.settings,
            lambda: frame.load_command_settings(args),
            lambda: [work.job.name for work in daemon.status().running_jobs],
            out,
        )
