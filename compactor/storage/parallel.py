"""Large objects in parts: tasks that run in parallel, and the files they read and write."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import Any

from compactor.errors import Unavailable
from compactor.storage.os_errors import file_errors
from compactor.storage.port import FileRange


def write_all(descriptor: int, data: bytes, at: int) -> int:
    """Write all bytes at a position of an open file and return their number."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
    return len(data)


def in_parallel(threads: int, tasks: list[Callable[[threading.Event], Any]]) -> list[Any]:
    """Return the results of the tasks in order. The first error stops the others, at their next attempt, and is raised.

    The thread that fails sets the event itself, because the others would send requests until a waiting caller is awake.
    """
    stop = threading.Event()

    def run(task: Callable[[threading.Event], Any]) -> Any:
        try:
            return task(stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, min(threads, len(tasks))), thread_name_prefix="transfer") as pool:
        futures = [pool.submit(run, task) for task in tasks]
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


def file_bytes(piece: FileRange) -> bytes:
    """Return the bytes of a range of a local file. Raises Unavailable if the file has become shorter."""
    with file_errors("read", piece.path), open(piece.path, "rb") as file:
        file.seek(piece.start)
        data = file.read(piece.length)
    if len(data) != piece.length:
        raise Unavailable(f"{piece.path} became shorter while it was uploaded")
    return data
