"""Lines on stderr: remarks of commands and log lines of services, as text or as one JSON object per line."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

FIRST = ("partition",)
"""Fields that are written before the text in lines for people."""


@dataclass(frozen=True)
class StderrLineFormat:
    """Format of lines on stderr.

    as_json: whether each line is a JSON object with ``time``, ``level``, ``message`` and further fields, instead of plain text.
    stamped: whether plain text lines begin with time and level.
    """

    as_json: bool = False
    stamped: bool = False

    def format_stderr_line(self, text: str, level: int, fields: Mapping[str, str], now: time.struct_time) -> str:
        """Return a line in this format.

        :param level: a level of ``logging``.
        :param fields: further values. Text lines have ``partition`` before the text and the others after it, as ``name=value``.
        :param now: time of the line in UTC.
        """
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", now)
        if self.as_json:
            return json.dumps({"time": stamp, "level": logging.getLevelName(level).lower(), "message": text, **fields}, ensure_ascii=False)
        parts = [stamp, f"{logging.getLevelName(level):<7}"] if self.stamped else []
        parts += [f"{fields[name]}:" for name in FIRST if name in fields]
        return " ".join([*parts, text, *(f"{name}={value}" for name, value in fields.items() if name not in FIRST)])


class StderrNotePrinter(Protocol):
    """Type of ``Output.print_note``: writes one line to stderr."""

    def __call__(
        self, text: str, level: int = logging.INFO, fields: Mapping[str, str] | None = None, *, transient: bool = False
    ) -> None: ...


class StderrNoteLogHandler(logging.Handler):
    """Logging handler that writes the program's own log records as lines on stderr, until it is closed.

    By default only records from level WARNING on are written. Records of libraries are never written, because some libraries log every
    header of every request.

    :param note: returns the function that writes a line. Called for each line, because the output changes once the arguments are parsed.
    """

    def __init__(self, note: Callable[[], StderrNotePrinter]) -> None:
        """Attach the handler to the program's logger. ``note`` returns the function that writes a line."""
        super().__init__()
        self._note = note
        self._logger = logging.getLogger("compactor")
        self._before = self._logger.level
        self._logger.addHandler(self)
        self.set_minimum_log_level(logging.WARNING)

    def set_minimum_log_level(self, level: int) -> None:
        """Write records of this level and above from now on."""
        self._logger.setLevel(level)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Write one log record."""
        transient = getattr(record, "transient", False)
        self._note()(record.getMessage(), record.levelno, getattr(record, "fields", {}), transient=transient)

    @override
    def close(self) -> None:
        """Detach the handler from the program's logger, and restore the level that the logger had before."""
        self._logger.setLevel(self._before)
        self._logger.removeHandler(self)
        super().close()
