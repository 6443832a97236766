"""What stands on stderr: remarks of commands, and the lines that services log; for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

FIRST = ("partition",)
"""Fields that stand before the text, where it is for people."""


@dataclass(frozen=True)
class LineFormat:
    """``as_json``: ``time``, ``level``, ``message`` and the fields; ``stamped``: with time and level for people, too."""

    as_json: bool = False
    stamped: bool = False

    def line(self, text: str, level: int, fields: Mapping[str, str], now: time.struct_time) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", now)
        if self.as_json:
            return json.dumps({"time": stamp, "level": logging.getLevelName(level).lower(), "message": text, **fields}, ensure_ascii=False)
        parts = [stamp, f"{logging.getLevelName(level):<7}"] if self.stamped else []
        parts += [f"{fields[name]}:" for name in FIRST if name in fields]
        return " ".join([*parts, text, *(f"{name}={value}" for name, value in fields.items() if name not in FIRST)])


class Note(Protocol):
    """Output.note."""

    def __call__(self, text: str, level: int = logging.INFO, fields: Mapping[str, str] | None = None) -> None: ...


class Remarks(logging.Handler):
    """What the program's own loggers say becomes remarks, until ``close``: warnings, and more where somebody asks for it.

    Loggers of libraries are not heard: some of them tell every header of every request.
    """

    def __init__(self, note: Callable[[], Note]) -> None:
        """``note``: asked at each line, as the output may change once the arguments are known."""
        super().__init__()
        self._note = note
        self._logger = logging.getLogger("compactor")
        self._before = self._logger.level
        self._logger.addHandler(self)
        self.hear(logging.WARNING)

    def hear(self, level: int) -> None:
        """From this level on."""
        self._logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self._note()(record.getMessage(), record.levelno, getattr(record, "fields", {}))

    def close(self) -> None:
        self._logger.setLevel(self._before)
        self._logger.removeHandler(self)
        super().close()
