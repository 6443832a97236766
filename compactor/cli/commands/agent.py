"""``agent``: beside a broker, uploads what it has sealed, until SIGTERM. SIGHUP rereads the configuration."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from compactor.cli import frame, serving, tiers
from compactor.cli.output import Output
from compactor.errors import UsageError

if TYPE_CHECKING:
    from compactor.config import Settings

BROKER_SECONDS = 5.0
"""So long one question to the brokers may take; the agent asks again by itself."""


def add_arguments(parser: frame.Parser) -> None:
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    serving.prepare()
    from dataclasses import replace

    from compactor import extras
    from compactor.bootstrap import connection_of
    from compactor.metadata_topic.leaders import KafkaLeaders
    from compactor.service.agent import Agent
    from compactor.service.agent_notices import noticed
    from compactor.service.pages.agent_pages import AgentPages
    from compactor.service.pages.console import Console
    from compactor.service.pages.server import served

    extras.need("kafka", "agent")
    in_force = _checked(frame.settings(args))
    opened = tiers.opened(args, local_state=True)
    tell = serving.JOURNAL
    brokers = KafkaLeaders(replace(connection_of(in_force), timeout_s=BROKER_SECONDS))
    agent = Agent(opened, brokers, tell=tell)
    settings = in_force.agent
    pages = Console(AgentPages(agent.status, getattr(args, "config", "")), agent.silent_ms, settings.interval_ms)
    with served(settings.listen, pages, "agent.listen") as address, noticed(settings.log_dirs, agent.wake, tell):
        tell(f"{opened.ports.holder} uploads to {opened.ports.layout.url}; status at http://{address}/")
        return serving.serve("agent", agent, in_force, lambda: _checked(frame.settings(args)), lambda: agent.status().running, out)


def _checked(settings: Settings) -> Settings:
    """Raises UsageError where there is nothing to do with them."""
    agent = settings.agent
    if not agent.log_dirs:
        raise UsageError("no log directory is named", hint='Set log_dirs under [agent] to the broker\'s log.dirs, ["/var/lib/kafka"]')
    if not agent.topics:
        raise UsageError("no topic is named", hint='Set topics under [agent], for example ["orders-.*"]')
    if settings.tier.kind != "object-log" or settings.tier.layout != "native":
        raise UsageError(
            f"the agent fills a tier of its own, not one of kind {settings.tier.kind} with layout {settings.tier.layout}",
            hint='Set kind = "object-log" and layout = "native"; what brokers tier by themselves needs no agent',
        )
    return settings
