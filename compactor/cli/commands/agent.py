"""Command ``agent``: uploads sealed segments until SIGTERM. SIGHUP rereads the configuration."""

from __future__ import annotations

import argparse
from dataclasses import replace

from compactor import extras
from compactor.adapters.brokers.chain import AgentClusterQueriesOverKafka
from compactor.bootstrap import kafka_connection_settings
from compactor.cli import command_parser, serving, tiers
from compactor.cli.output import Output
from compactor.config.settings import Settings
from compactor.errors import ExitCode, UsageError
from compactor.features.agent.agent import UploadAgent, watch_log_dirs
from compactor.tier.kinds import compactor_managed_hint, tier_kind
from compactor.web.console import RequestRouter
from compactor.web.pages import AgentPages
from compactor.web.server import serve_pages

BROKER_SECONDS = 5.0
"""Timeout of one request to the brokers. The agent retries by itself."""


def run_upload_agent(args: argparse.Namespace, out: Output) -> ExitCode:
    serving.prepare_process()

    extras.require_pip_extra("kafka", "agent")
    in_force = _validate_agent_settings(command_parser.load_command_settings(args))
    tier = tiers.open_configured_tier(args, local_state=True)
    tell = serving.SERVICE_JOURNAL
    brokers = AgentClusterQueriesOverKafka(replace(kafka_connection_settings(in_force), timeout_s=BROKER_SECONDS))
    agent = UploadAgent(tier, brokers, log=tell)
    settings = in_force.agent
    shown = AgentPages(agent.status, getattr(args, "config", ""), settings.runbook_url)
    pages = RequestRouter(shown, agent.loop_age_ms, settings.interval_ms)
    with (
        serve_pages(settings.listen, pages, "agent.listen", settings.host_names) as address,
        watch_log_dirs(settings.log_dirs, agent.request_scan, tell),
    ):
        tell(f"{tier.ports.holder} uploads to {tier.ports.layout.url}; status at http://{address}/")
        return serving.run_service(
            "agent",
            agent,
            in_force,
            lambda: _validate_agent_settings(command_parser.load_command_settings(args)),
            lambda: agent.status().running,
            out,
        )


def _validate_agent_settings(settings: Settings) -> Settings:
    agent = settings.agent
    if not agent.log_dirs:
        raise UsageError("no log directory is named", hint='Set log_dirs under [agent] to the broker\'s log.dirs, ["/var/lib/kafka"]')
    if not agent.topics:
        raise UsageError("no topic is named", hint='Set topics under [agent], for example ["orders-.*"]')
    if not tier_kind(settings).owns_root:
        raise UsageError(
            f"the agent uploads to a compactor-managed tier, not to one of kind {settings.tier.kind} with layout {settings.tier.layout}",
            hint=f"Set {compactor_managed_hint()}; a topic that brokers tier needs no agent",
        )
    return settings
