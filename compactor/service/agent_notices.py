"""Being told by the system that a log directory has a new file, instead of waiting for the next look: inotify, by watchdog.

Only what is created or renamed is told; a broker writes into its files thousands of times a second, and nobody hears of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compactor.service.journal import Tell

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent


@contextmanager
def noticed(log_dirs: Sequence[str], wake: Callable[[], None], tell: Tell) -> Iterator[None]:
    """While the block runs, ``wake`` is called when a segment may have been rolled; where that cannot be had, it is told."""
    try:
        from watchdog.events import FileCreatedEvent, FileSystemEventHandler
        from watchdog.observers import Observer
    except ImportError:
        tell("directories are looked at every agent.interval_ms (pip install 'tiered-compactor[agent]' for notices of new segments)")
        yield
        return

    class NewSegments(FileSystemEventHandler):
        def on_created(self, event: FileSystemEvent) -> None:
            if str(event.src_path).endswith(".log"):
                wake()

    observer = Observer()
    try:
        for log_dir in log_dirs:
            observer.schedule(NewSegments(), log_dir, recursive=True, event_filter=[FileCreatedEvent])
        observer.start()
    except OSError as error:  # more directories than fs.inotify.max_user_watches, or one that is not there
        tell(f"the system does not tell of new segments ({error.strerror}): directories are looked at every agent.interval_ms")
        observer.unschedule_all()
        yield
        return
    try:
        yield
    finally:
        observer.stop()
        observer.join(5)
