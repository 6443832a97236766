"""Finding of a check: what `verify`, `doctor`, `config check` and the probe of a store report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from compactor.model.ids import TopicPartition

CLUSTER = TopicPartition("", -1)
"""Place of findings about no topic."""


@dataclass(frozen=True)
class Finding:
    """Something that a check found, and what to do about it.

    severity: error (data is or will be lost, or it does not work), warning (it costs, or becomes an error) or note.
    kind: one word for scripts.
    object: name of the object, run, setting, broker, topic, permission or URL; empty if there is none.
    where: partition -1 for a whole topic.
    means: what follows if nothing is done.
    bytes, usd_month: stored bytes concerned and their price; 0 if unknown.
    """

    severity: str
    kind: str
    object: str
    detail: str
    hint: str = ""
    where: TopicPartition = CLUSTER
    means: str = ""
    bytes: int = 0
    usd_month: float = 0.0

    def document(self, fields: Iterable[str]) -> dict[str, Any]:
        """JSON fields of a command, by its own names."""
        names = {"topic": self.where.topic, "partition": self.where.partition, "todo": self.hint}
        return {name: names[name] if name in names else getattr(self, name) for name in fields}
