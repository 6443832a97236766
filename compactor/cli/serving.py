"""What `daemon` and `agent` have in common: a service at work in a thread, and the signals that end it or have its settings read anew."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from compactor.cli.output import Output
from compactor.cli.warming import compile_all
from compactor.errors import UsageError
from compactor.local import allocator
from compactor.service.journal import Journal, Tell

if TYPE_CHECKING:
    from compactor.config import Settings

JOURNAL = Journal(logging.getLogger("compactor.service"))

STOP_SECONDS = 8
"""What is still at work after so long is left as a crash would leave it: the next start goes on there."""
GIVE_BACK_S = 20
"""So often memory that nothing lies in goes back to the system."""
ENDING = (signal.SIGTERM, signal.SIGINT)
MEANT = (*ENDING, signal.SIGHUP)


class Serves(Protocol):
    """``run`` returns after ``end``; ``end`` and ``reread`` return at once."""

    def run(self) -> None: ...

    def end(self) -> None: ...

    def reread(self, settings: Settings) -> None: ...


def prepare() -> None:
    """Called before the first thread begins: signals arrive in ``serve`` and nowhere else, and all threads share a few heaps."""
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT)
    allocator.few_heaps()


def serve(
    name: str, service: Serves, settings: Settings, read: Callable[[], Settings], left: Callable[[], Iterable[object]], out: Output
) -> int:
    """Until SIGTERM or SIGINT; SIGHUP has it go on with other settings. Returns the exit code.

    :param settings: those that it begins with. :param read: those that are written now; raises UsageError.
    :param left: what is still at work.
    """
    tell = JOURNAL

    def work() -> None:
        compile_all(load=True)
        service.run()

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    given_back = time.monotonic()
    while thread.is_alive():
        came = signal.sigtimedwait(MEANT, 1)
        if time.monotonic() - given_back > GIVE_BACK_S:
            allocator.give_back()
            given_back = time.monotonic()
        if came is not None and came.si_signo in ENDING:
            break
        if came is not None:
            settings = _reread(service, settings, read, tell)
    if not thread.is_alive():
        tell(f"a bug: the {name} ended by itself; the trace is above. Please report it", level=logging.CRITICAL)
        return 1
    service.end()
    thread.join(STOP_SECONDS)
    at_work = ", ".join(map(str, left()))
    tell("stopped" + (f"; left at work, for the next start to go on with: {at_work}" if at_work else ""))
    if thread.is_alive():
        out.close()
        os._exit(0)  # a thread in the middle of a request that does not end: Python would wait for it
    return 0


def _reread(service: Serves, in_force: Settings, read: Callable[[], Settings], tell: Tell) -> Settings:
    """The configuration as it is now, as far as it can be followed; where it is wrong, the old one stays."""
    from compactor.service.reloading import reread

    try:
        found = reread(in_force, read())
    except UsageError as error:
        tell(f"the configuration is wrong, and the old one stays in force: {error}", level=logging.ERROR)
        return in_force
    service.reread(found.settings)
    tell("the configuration was read again: " + ("; ".join(found.changed) or "nothing to change at once"))
    if found.waiting:
        tell(f"changed as well, but only for the next start: {'; '.join(found.waiting)}", level=logging.WARNING)
    return found.settings
