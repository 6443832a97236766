"""``daemon``: run and retire over and over, until SIGTERM."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time

from compactor.cli import frame, tiers
from compactor.cli.output import Output
from compactor.errors import UsageError

STOP_SECONDS = 8
"""What is not given back after so long is left as a crash would leave it: the next run resumes it."""
ENDING = (signal.SIGTERM, signal.SIGINT)


def add_arguments(parser: frame.Parser) -> None:
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    # Blocked before the first thread begins, so that they arrive here and nowhere else.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    from compactor.cleaner.warm import warm_up
    from compactor.service.daemon import Daemon
    from compactor.service.pages import Pages, served

    opened = tiers.opened(args, local_state=True)
    try:
        opened.identity()
    except UsageError as error:
        out.note(f"{_now()} {error.message}; waiting for it")
    daemon = Daemon(opened, tell=lambda text: out.note(f"{_now()} {text}"))
    settings = opened.settings.daemon
    with served(settings.listen, Pages(daemon.status, daemon.silent_ms, settings.interval_ms)) as address:
        out.note(f"{_now()} {opened.ports.holder} watches {opened.ports.layout.url}; status at http://{address}/")

        def work() -> None:
            warm_up()
            daemon.run()

        thread = threading.Thread(target=work, name="daemon", daemon=True)
        thread.start()
        while thread.is_alive() and signal.sigtimedwait(ENDING, 1) is None:
            pass
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


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
