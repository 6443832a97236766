"""What daemons use and what the tier holds, sampled; and whether it stays level."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.support.process_watch import usage

MEMORY_SLACK = 1.15
"""Allowed growth of the resident memory, as a factor."""
HANDLES_SLACK = 8
"""Handles: connections come and go with what is at work."""


@dataclass
class Samples:
    """``rows``: one each few seconds, ``at`` in seconds since the beginning; a figure that was not to be had is not in its row."""

    rows: list[dict[str, float]] = field(default_factory=list)

    def add(self, at: float, pids: dict[str, int], more: dict[str, float]) -> None:
        row = {"at": round(at, 1), **more}
        for name, pid in pids.items():
            row |= {f"{name} {what}": round(value, 1) for what, value in usage(pid).items()}
        self.rows.append(row)

    def of(self, name: str) -> list[tuple[float, float]]:
        return [(row["at"], row[name]) for row in self.rows if name in row]

    def growth(self, name: str) -> tuple[float, float]:
        """The median of the second quarter (everything is warm by then) and of the last one."""
        values = [value for _, value in self.of(name)]
        quarter = max(1, len(values) // 4)
        return median(values[quarter : 2 * quarter] or values), median(values[-quarter:])


def not_level(samples: Samples, machine: str) -> list[str]:
    """What of a process that was never restarted has grown."""
    wrong = []
    for what, factor, slack in (("MB", MEMORY_SLACK, 0), ("handles", 1.0, HANDLES_SLACK)):
        then, now = samples.growth(f"{machine} {what}")
        if now > then * factor + slack:
            wrong.append(f"{what} of {machine}: {then:.0f} in the second quarter of the time, {now:.0f} in the last")
    return wrong


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
