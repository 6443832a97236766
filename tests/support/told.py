"""What a service tells, kept for a test."""

from __future__ import annotations

import logging


class Told(list[str]):
    """Given to a service as its ``tell``; partitions stand before their lines."""

    def __call__(self, text: str, *, level: int = logging.INFO, **fields: str) -> None:
        self.append(f"{fields['partition']}: {text}" if "partition" in fields else text)
