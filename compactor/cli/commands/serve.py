"""Command ``serve``: any Kafka client reads the tier, until SIGTERM. SIGHUP rereads the users."""

from __future__ import annotations

import argparse

from compactor import extras
from compactor.cli import command_parser, serving, tiers
from compactor.cli.output import Output
from compactor.errors import ExitCode
from compactor.web.server import serve_pages


def serve_tier(args: argparse.Namespace, out: Output) -> ExitCode:
    serving.prepare_process()
    extras.require_pip_extra("kafka", "serve")
    from compactor.features.serve.endpoint import Endpoint, client_lines
    from compactor.features.serve.pages import EndpointPages

    settings = command_parser.load_command_settings(args)
    tier = tiers.open_read_only(args)
    topics = sorted({name.topic for name in tier.list_latest_incarnations()})
    endpoint = Endpoint(tier, settings, args.listen or settings.serve.listen)
    with serve_pages(settings.serve.pages_listen, EndpointPages(endpoint), "serve.pages_listen") as address:
        for line in client_lines(endpoint, topics):
            serving.SERVICE_JOURNAL(line)
        serving.SERVICE_JOURNAL(f"status at http://{address}/")
        return serving.run_service("serve", endpoint, settings, lambda: command_parser.load_command_settings(args), lambda: (), out)
