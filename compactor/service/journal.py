"""Log lines of a service: one line per event, with machine-readable fields."""

from __future__ import annotations

import logging
from typing import Protocol


class EventLogger(Protocol):
    """Function that writes one line to a service's log.

    level: a level of ``logging``. fields: ``partition``, ``run``, ``segment``, ``phase`` and the like.
    """

    def __call__(self, text: str, *, level: int = logging.INFO, **fields: str) -> None: ...


class ServiceEventLogger:
    """EventLogger that writes lines to a Python logger. The log record's attribute ``fields`` holds the fields that are not empty."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __call__(self, text: str, *, level: int = logging.INFO, **fields: str) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", text, extra={"fields": {name: value for name, value in fields.items() if value}})
