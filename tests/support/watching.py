"""How much disk a program uses while it runs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Self


class Watch:
    """Looks at a directory without a pause: the most that ever lay in it, in blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most = 0
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            self.most = max(self.most, used(self.folder))
            self.looks += 1
            time.sleep(0.0002)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def used(folder: Path) -> int:
    """Bytes that the files of a directory occupy, those just deleted left out."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(f"{path}/{name}").st_blocks * 512
            except FileNotFoundError:
                continue
    return total
