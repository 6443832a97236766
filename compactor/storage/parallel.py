"""Large objects in parts: tasks that run in parallel, and the files they read and write."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import Any

from compactor.errors import Unavailable
from compactor.storage.os_errors import os_errors_as_compactor_errors
from compactor.storage.port import FileRange


def write_at_position(descriptor: int, data: bytes, position: int) -> int:
    """Write all bytes at a position of an open file and return their number."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written
    return len(data)


def run_in_parallel(threads: int, tasks: list[Callable[[threading.Event], Any]]) -> list[Any]:
    """Run tasks in threads and return their results in the order of the tasks.

    Each task receives an event. The first task that fails sets the event, so that the other tasks stop before their next attempt, and its
    error is raised.
    """
    stop = threading.Event()

    def run_unless_stopped(task: Callable[[threading.Event], Any]) -> Any:
        try:
            return task(stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, min(threads, len(tasks))), thread_name_prefix="transfer") as pool:
        futures = [pool.submit(run_unless_stopped, task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            for future in futures:
                future.cancel()
    errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
    for error in errors:
        if not isinstance(error, CancelledError):
            raise error
    return [future.result() for future in futures]


def read_file_range(piece: FileRange) -> bytes:
    """Return the bytes of a range of a local file. Raises Unavailable if the file has become shorter."""
    with os_errors_as_compactor_errors("read", piece.path), open(piece.path, "rb") as file:
        file.seek(piece.start)
        data = file.read(piece.length)
    if len(data) != piece.length:
        raise Unavailable(f"{piece.path} became shorter while it was uploaded")
    return data
