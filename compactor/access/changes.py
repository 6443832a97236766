"""Notes about folded control logs: change hints and lower bounds for other processes, copies in local state for this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from compactor.control.logs import CatalogLog, PartitionLog, publish_hints, record_inspections, record_lower_bounds
from compactor.control.ports import Ports
from compactor.control.records import RetireInspection
from compactor.errors import StoreError
from compactor.local.cache import LocalState
from compactor.model.ids import TopicPartition


@dataclass(frozen=True)
class ChangeNotes:
    """Change hints and lower bounds in the catalog, and folded logs in local state.

    hints: whether the catalog names partitions and their changes. If not, the brokers' metadata do, and only lower bounds are noted.
    """

    ports: Ports
    catalog: CatalogLog
    local: LocalState | None
    hints: bool

    def hint(self, name: TopicPartition) -> int:
        """Return the latest hint about a partition in the catalog as last folded. Asked before the partition's log is read."""
        return self.catalog.state.partitions.get(str(name), 0)

    def keep(self, log: PartitionLog, hint: int) -> None:
        """Keep a folded log in local state. hint: the hint about it from before it was read."""
        mark = log.mark() if self.local and self.local.bound else None
        if mark and self.local:
            self.local.keep(log.state, mark, hint, self.ports.clock_ms())

    def publish(self, logs: Sequence[PartitionLog]) -> None:
        """Tell other processes in one record that these logs have changed, and that none may end below the slot it has reached."""
        if self.hints:
            publish_hints(self.catalog, {log.state.name: log.reached() for log in logs})
        else:
            self.publish_slots(logs)

    def publish_slots(self, logs: Sequence[PartitionLog]) -> None:
        """Record in one record that folded logs may not end below the slots they have reached.

        A store that fails is ignored: the next command records them.
        """
        with suppress(StoreError):
            record_lower_bounds(self.catalog, logs)

    def publish_inspections(self, inspections: Mapping[str, RetireInspection]) -> None:
        """Record for which partitions nothing is to be retired, and until when. Lost if the store fails."""
        with suppress(StoreError):
            record_inspections(self.catalog, inspections)
