"""Control objects that somebody else loses, and finds again; what the tier-wide log and this machine remember of a log meanwhile.

Lost is what every process has been told of: below the lower bound (``PartitionChanged.slot``) that it read before it began. Then nobody
may take what is left for the whole. Boundaries are not lost: nothing says how many there were.
"""

from __future__ import annotations

import re
from typing import Any

from compactor.control.control_log import StateIdentity
from compactor.control.logs import CatalogLog, PartitionLog, open_catalog, open_partition_log, record_control_log_lengths
from compactor.control.ports import EnvironmentPorts
from compactor.control.state import PartitionState
from compactor.errors import StoreError
from tests.simulation.oracle import Oracle
from tests.simulation.world import TTL_MS, World

REMEMBERED = 0.8
TELLS = 0.6


class Losses:
    """Of one partition, as all processes of a schedule share it."""

    def __init__(self, world: World, oracle: Oracle) -> None:
        self.world = world
        self.oracle = oracle
        self.lost = 0
        self.over = False
        self._missing: dict[str, Any] = {}
        self._heard: dict[str, int] = {}
        self._catalogs: dict[str, CatalogLog] = {}
        self._kept: dict[str, list[tuple[PartitionState, StateIdentity]]] = {}
        self._object = re.compile(rf"partitions/{oracle.name}/(log|snapshot)/(\d{{20}})\.json")

    def joins(self, process: str) -> None:
        self._heard.setdefault(process, 0)

    def opened(self, ports: EnvironmentPorts, process: str, holder: str) -> PartitionLog:
        """Its log, begun from what its host remembers, of whatever age."""
        self._catalogs[process] = open_catalog(ports)
        log = open_partition_log(ports, self.oracle.name)
        kept = self._kept.get(holder)
        if kept and self.world.hazards.random() < REMEMBERED:
            log.continue_from_cached_state(*self.world.hazards.choice(kept))
        return log

    def hear(self, process: str, log: PartitionLog) -> None:
        """Every command folds the tier-wide log first."""
        log.floor = self._heard[process] = self._catalogs[process].refresh().reached.get(log.name, 0)

    def tell(self, process: str, holder: str, log: PartitionLog) -> None:
        """After what it has done; a process may die before it comes to this."""
        mark = log.state_identity()
        if mark is not None:
            self._kept.setdefault(holder, []).append((log.state, StateIdentity.model_validate_json(mark.model_dump_json())))
        if self.world.hazards.random() < TELLS:
            try:
                record_control_log_lengths(self._catalogs[process], [log])
            except StoreError:
                pass

    def lose(self) -> None:
        """One object of the log, or its last snapshot; found again after a while."""
        objects, lowest = self.world.control.objects, min(self._heard.values(), default=0)
        found = [key for key in sorted(objects) if (match := self._object.fullmatch(key)) and int(match[2]) <= lowest]
        if self.over or not found:
            return
        key = self.world.hazards.choice(found)
        self._missing[key] = objects.pop(key)
        self.lost += 1
        self.world.note(f"lost: {key}")
        self.world.push(self.world.now_ms + self.world.hazards.choice((TTL_MS, 4 * TTL_MS)), self.restore)

    def restore(self) -> None:
        """What is missing is put back, where nobody has put anything since."""
        for key, stored in self._missing.items():
            self.world.note(f"restored: {key}")
            self.world.control.objects.setdefault(key, stored)
        self._missing.clear()

    def end(self) -> None:
        """Nothing is lost any more."""
        self.over = True
        self.restore()
