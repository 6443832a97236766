"""What every service tells of itself at one moment, whatever it watches: health and pages of all of them are made of it."""

from __future__ import annotations

from dataclasses import dataclass

from compactor.storage.counting import Usage


@dataclass(frozen=True)
class ServiceStatus:
    """Milliseconds. ``ready``: the last look went well; ``problem``: why not. ``scan_ms``: of the last look, 0 before the first;
    ``interval_ms``: between two."""

    holder: str
    tier: str
    now_ms: int
    started_ms: int
    scans: int
    scan_ms: int
    interval_ms: int
    ready: bool
    stopping: bool
    problem: str
    usage: Usage
