"""What a service tells while it works: a line for each step, with what it is about as fields."""

from __future__ import annotations

import logging
from typing import Protocol


class Tell(Protocol):
    """Takes a line. ``level``: as in logging; ``fields``: ``partition``, ``run``, ``segment``, ``phase`` and the like, for machines."""

    def __call__(self, text: str, *, level: int = logging.INFO, **fields: str) -> None: ...


class Journal:
    """Lines as records of logging; ``record.fields`` has what a line is about. Who prints them, and from which level on, is set there."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __call__(self, text: str, *, level: int = logging.INFO, **fields: str) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", text, extra={"fields": {name: value for name, value in fields.items() if value}})
