"""Notifications of new segment files, and of files staged for deletion, by the operating system (inotify, through watchdog).

So the agent need not wait for its next scan. Only created and renamed files are reported. A broker writes into its files thousands of
times per second, and such writes wake nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from typing_extensions import override

from compactor.service.journal import EventLogger
from compactor.transfer.log_directory import DELETED

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent


@contextmanager
def watch_log_dirs_for_new_segments(log_dirs: Sequence[str], callback: Callable[[], None], log: EventLogger) -> Iterator[None]:
    """Call ``callback`` whenever a segment may have been rolled or staged for deletion, as long as the block runs.

    If notifications are not available (watchdog is not installed, or the system's limit of watches is reached), a line is logged and the
    agent relies on its scans every ``agent.interval_ms``.

    :param log_dirs: the broker's log directories, watched recursively.
    :param log: receives the log line.
    """
    try:
        from watchdog.events import FileCreatedEvent, FileMovedEvent, FileSystemEventHandler
        from watchdog.observers import Observer
    except ImportError:
        log("directories are scanned every agent.interval_ms (pip install 'tiered-compactor[agent]' to be notified of new segments)")
        yield
        return

    class NewSegmentFileEventHandler(FileSystemEventHandler):
        @override
        def on_created(self, event: FileSystemEvent) -> None:
            if str(event.src_path).endswith(".log"):
                callback()

        @override
        def on_moved(self, event: FileSystemEvent) -> None:
            if str(event.dest_path).endswith(f".log{DELETED}"):
                callback()

    observer = Observer()
    try:
        for log_dir in log_dirs:
            observer.schedule(NewSegmentFileEventHandler(), log_dir, recursive=True, event_filter=[FileCreatedEvent, FileMovedEvent])
        observer.start()
    except OSError as error:  # more directories than fs.inotify.max_user_watches, or one that is not there
        log(f"the system cannot report new segments ({error.strerror}): directories are scanned every agent.interval_ms")
        observer.unschedule_all()
        yield
        return
    try:
        yield
    finally:
        observer.stop()
        observer.join(5)
