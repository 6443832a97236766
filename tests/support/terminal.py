"""A pseudo-terminal of a given width, and what a program has written on it."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
from collections.abc import Callable
from typing import IO


def on_terminal(columns: int, write: Callable[[IO[str]], None]) -> str:
    """Return what ``write`` writes to a terminal of this width, with colours as escape sequences."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    read: list[bytes] = []

    def collect() -> None:
        try:
            while part := os.read(master, 65536):
                read.append(part)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=collect)
    reader.start()
    with open(slave, "w", encoding="utf-8") as terminal:
        write(terminal)
    reader.join()
    os.close(master)
    return b"".join(read).decode().replace("\r\n", "\n")


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
