"""A service in a thread, and the signals that stop or reconfigure it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from compactor.cli.output import Output
from compactor.errors import ExitCode, UsageError, without_secrets
from compactor.local import budget as allocator
from compactor.service import EventLogger, ServiceEventLogger

if TYPE_CHECKING:
    from compactor.config.settings import Settings

SERVICE_JOURNAL = ServiceEventLogger(logging.getLogger("compactor.service"))

STOP_SECONDS = 8
"""Seconds after which work that still runs is abandoned as by a crash. The next start continues it."""
GIVE_BACK_S = 20
"""Seconds between two releases of free memory to the system."""
ENDING = (signal.SIGTERM, signal.SIGINT)
MEANT = (*ENDING, signal.SIGHUP)
_COMPILE = """
import signal
signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the signals that end a process are blocked in a service
from compactor.cleaner.precompile import precompile_kernels
precompile_kernels()
"""


class RunnableService(Protocol):
    """Service that runs until ``request_stop``. Requests return at once."""

    def run(self) -> None: ...
    def request_stop(self) -> None: ...
    def request_settings_change(self, settings: Settings) -> None: ...


def prepare_process() -> None:
    """Block the signals that ``run_service`` waits for, and limit malloc's heaps. Call it before the first thread starts: threads inherit
    blocked signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT)
    allocator.limit_malloc_heaps()


def load_kernels() -> None:
    """Load kernels, compiled by a child process if necessary. In this process, the compiler would leave a quarter of a gigabyte of memory
    for as long as the service runs.
    """
    from compactor.cleaner.precompile import precompile_kernels
    from compactor.kernels.jit import COMPLETE, kernel_cache_folder

    folder = kernel_cache_folder()
    if folder is not None and not (folder / COMPLETE).exists():
        subprocess.run([sys.executable, "-c", _COMPILE], check=False)  # noqa: S603 - if it fails, this process compiles
    precompile_kernels()


def run_service(
    name: str,
    service: RunnableService,
    settings: Settings,
    read_settings: Callable[[], Settings],
    unfinished_jobs: Callable[[], Iterable[object]],
    out: Output,
) -> ExitCode:
    """Run a service until SIGTERM or SIGINT. SIGHUP makes it reread the configuration.

    Return 0; 1 if the service ended by itself, which is a bug. Work that does not end within STOP_SECONDS is abandoned.

    :param read_settings: raises UsageError if the configuration is invalid.
    """
    tell = SERVICE_JOURNAL

    def run_service_in_thread() -> None:
        load_kernels()
        try:
            service.run()
        except Exception:  # noqa: BLE001 - noticed below, as the thread ends
            sys.stderr.write(without_secrets(traceback.format_exc()))

    thread = threading.Thread(target=run_service_in_thread, name=name, daemon=True)
    thread.start()
    given_back = time.monotonic()
    while thread.is_alive():
        came = signal.sigtimedwait(MEANT, 1)
        if time.monotonic() - given_back > GIVE_BACK_S:
            allocator.trim_memory()
            given_back = time.monotonic()
        if came is not None and came.si_signo in ENDING:
            break
        if came is not None:
            settings = _reload_configuration(service, settings, read_settings, tell)
    if not thread.is_alive():
        tell(f"a bug: the {name} ended by itself; the trace is above. Please report it", level=logging.CRITICAL)
        return 1
    service.request_stop()
    thread.join(STOP_SECONDS)
    running_jobs = ", ".join(map(str, unfinished_jobs()))
    tell("stopped" + (f"; interrupted, to be resumed by the next start: {running_jobs}" if running_jobs else ""))
    if thread.is_alive():
        out.close()
        os._exit(0)  # a thread in the middle of a request that does not end: Python would wait for it
    return 0


def _reload_configuration(
    service: RunnableService, current_settings: Settings, read_settings: Callable[[], Settings], log: EventLogger
) -> Settings:
    """Settings now in force: the old ones if the configuration is invalid."""
    from compactor.service import settings_after_reload

    try:
        found = settings_after_reload(current_settings, read_settings())
    except UsageError as error:
        log(f"the configuration is invalid, and the old one stays in force: {error}", level=logging.ERROR)
        return current_settings
    service.request_settings_change(found.settings)
    log("the configuration was read again: " + ("; ".join(found.changed) or "nothing changed"))
    if found.waiting:
        log(f"changed, but only from the next start on: {'; '.join(found.waiting)}", level=logging.WARNING)
    return found.settings
