"""Status that every service has, whatever its work is. Health and pages are made from it."""

from __future__ import annotations

from dataclasses import dataclass

from compactor.storage.counting import StoreUsage


@dataclass(frozen=True)
class ServiceStatus:
    """Status of a service at one moment. Times are in milliseconds.

    scans: number of scans so far. scan_ms: time of the latest scan, 0 before the first. interval_ms: time between two scans.
    ready: whether the latest scan was complete and nothing is wrong. False before the first scan, and when the service is stopping.
    problem: what is wrong, or an empty string.
    """

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
    usage: StoreUsage
