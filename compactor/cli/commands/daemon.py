"""``daemon``: run and retire over and over, until SIGTERM. SIGHUP rereads the configuration."""

from __future__ import annotations

import argparse
import logging

from compactor.cli import frame, serving, tiers
from compactor.cli.output import Output
from compactor.errors import StoreError, UsageError


def add_arguments(parser: frame.Parser) -> None:
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    serving.prepare()
    from compactor.service.daemon import Daemon
    from compactor.service.pages.console import Console
    from compactor.service.pages.daemon_pages import DaemonPages
    from compactor.service.pages.server import served
    from compactor.views.prices import prices_for

    tell = serving.JOURNAL
    opened = tiers.opened(args, local_state=True, writes="daemon")
    try:
        opened.identity()
    except (UsageError, StoreError) as error:
        tell(f"{error.message}; waiting for it", level=logging.WARNING)
    daemon = Daemon(opened, tell=tell)
    settings = opened.settings.daemon
    pages = DaemonPages(daemon.status, daemon.picture, getattr(args, "config", ""), prices_for(opened.settings.tier_url))
    with served(settings.listen, Console(pages, daemon.silent_ms, settings.interval_ms)) as address:
        tell(f"{opened.ports.holder} watches {opened.ports.layout.url}; status at http://{address}/")
        return serving.serve(
            "daemon", daemon, opened.settings, lambda: frame.settings(args), lambda: [job.name for job in daemon.status().running], out
        )
