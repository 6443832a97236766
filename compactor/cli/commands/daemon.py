"""``daemon``: run and retire over and over, until SIGTERM. SIGHUP rereads the configuration."""

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
    from compactor.service.daemon import Daemon

STOP_SECONDS = 8
"""What is not given back after so long is left as a crash would leave it: the next run resumes it."""
ENDING = (signal.SIGTERM, signal.SIGINT)
MEANT = (*ENDING, signal.SIGHUP)


def add_arguments(parser: frame.Parser) -> None:
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    # Blocked before the first thread begins, so that they arrive here and nowhere else.
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT)
    from compactor.cleaner.warm import warm_up
    from compactor.service.daemon import Daemon
    from compactor.service.pages import Pages, served

    opened = tiers.opened(args, local_state=True, writes="daemon")
    try:
        opened.identity()
    except UsageError as error:
        out.note(f"{_now()} {error.message}; waiting for it")
    daemon = Daemon(opened, tell=lambda text: out.note(f"{_now()} {text}"))
    in_force = opened.settings
    settings = in_force.daemon
    with served(settings.listen, Pages(daemon.status, daemon.silent_ms, settings.interval_ms)) as address:
        out.note(f"{_now()} {opened.ports.holder} watches {opened.ports.layout.url}; status at http://{address}/")

        def work() -> None:
            warm_up()
            daemon.run()

        thread = threading.Thread(target=work, name="daemon", daemon=True)
        thread.start()
        while thread.is_alive():
            came = signal.sigtimedwait(MEANT, 1)
            if came is not None and came.si_signo in ENDING:
                break
            if came is not None:
                in_force = _reread(args, in_force, daemon, out)
        failed = not thread.is_alive()
        daemon.end()
        thread.join(STOP_SECONDS)
    if failed:
        out.note(f"{_now()} error: a bug: the daemon ended by itself; the trace is above. Please report it")
        return 1
    left = [str(job.name) for job in daemon.status().running]
    out.note(f"{_now()} stopped" + (f"; left at work, for the next run to resume: {', '.join(left)}" if left else ""))
    if thread.is_alive():
        out.close()
        os._exit(0)  # a thread in the middle of a request that does not end: Python would wait for it
    return 0


def _reread(args: argparse.Namespace, in_force: Settings, daemon: Daemon, out: Output) -> Settings:
    """SIGHUP: the configuration as it is now, as far as it can be followed; where it is wrong, the old one stays."""
    from compactor.service.reloading import reread

    try:
        found = reread(in_force, frame.settings(args))
    except UsageError as error:
        out.note(f"{_now()} the configuration is wrong, and the old one stays in force: {error}")
        return in_force
    daemon.reread(found.settings)
    out.note(f"{_now()} the configuration was read again: " + ("; ".join(found.changed) or "nothing to change at once"))
    if found.waiting:
        out.note(f"{_now()} changed as well, but only for the next start: {'; '.join(found.waiting)}")
    return found.settings


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
