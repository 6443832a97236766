"""``agent``: beside a broker, uploads what it has sealed, until SIGTERM. SIGHUP rereads the configuration."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from compactor.cli import frame, tiers
from compactor.cli.output import Output
from compactor.errors import UsageError

if TYPE_CHECKING:
    from compactor.config import Settings
    from compactor.service.agent import Agent

STOP_SECONDS = 8
"""What is not uploaded after so long is left as a crash would leave it: the next upload of the same segments goes on there."""
BROKER_SECONDS = 5.0
"""So long one question to the brokers may take; the agent asks again by itself."""
ENDING = (signal.SIGTERM, signal.SIGINT)
MEANT = (*ENDING, signal.SIGHUP)


def add_arguments(parser: frame.Parser) -> None:
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    # Blocked before the first thread begins, so that they arrive here and nowhere else.
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT)
    from dataclasses import replace

    from compactor import extras
    from compactor.bootstrap import connection_of
    from compactor.cleaner.warm import warm_up
    from compactor.metadata_topic.leaders import KafkaLeaders
    from compactor.service.agent import Agent
    from compactor.service.agent_metrics import AgentPages
    from compactor.service.agent_notices import noticed
    from compactor.service.pages import served

    extras.need("kafka", "agent")
    in_force = _checked(frame.settings(args))
    opened = tiers.opened(args, local_state=True)

    def tell(text: str) -> None:
        out.note(f"{_now()} {text}")

    brokers = KafkaLeaders(replace(connection_of(in_force), timeout_s=BROKER_SECONDS))
    agent = Agent(opened, brokers, tell=tell)
    settings = in_force.agent
    pages = AgentPages(agent.status, agent.silent_ms, settings.interval_ms)
    with served(settings.listen, pages, "agent.listen") as address, noticed(settings.log_dirs, agent.wake, tell):
        tell(f"{opened.ports.holder} uploads to {opened.ports.layout.url}; status at http://{address}/")

        def work() -> None:
            warm_up()
            agent.run()

        thread = threading.Thread(target=work, name="agent", daemon=True)
        thread.start()
        while thread.is_alive():
            came = signal.sigtimedwait(MEANT, 1)
            if came is not None and came.si_signo in ENDING:
                break
            if came is not None:
                in_force = _reread(args, in_force, agent, out)
        failed = not thread.is_alive()
        agent.end()
        thread.join(STOP_SECONDS)
    if failed:
        tell("error: a bug: the agent ended by itself; the trace is above. Please report it")
        return 1
    left = [str(name) for name in agent.status().running]
    tell("stopped" + (f"; left at work, for the next start to go on with: {', '.join(left)}" if left else ""))
    if thread.is_alive():
        out.close()
        os._exit(0)  # a thread in the middle of a request that does not end: Python would wait for it
    return 0


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


def _reread(args: argparse.Namespace, in_force: Settings, agent: Agent, out: Output) -> Settings:
    """SIGHUP: the configuration as it is now, as far as it can be followed; where it is wrong, the old one stays."""
    from compactor.service.reloading import reread

    try:
        found = reread(in_force, _checked(frame.settings(args)))
    except UsageError as error:
        out.note(f"{_now()} the configuration is wrong, and the old one stays in force: {error}")
        return in_force
    agent.reread(found.settings)
    out.note(f"{_now()} the configuration was read again: " + ("; ".join(found.changed) or "nothing to change at once"))
    if found.waiting:
        out.note(f"{_now()} changed as well, but only for the next start: {'; '.join(found.waiting)}")
    return found.settings


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
