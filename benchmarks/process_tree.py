"""CPU time of a process and of all below it: Spark's JVM and its Python workers."""

from __future__ import annotations

import os
from pathlib import Path


def below(root: int, *, ended: bool = True) -> dict[int, int]:
    """Clock ticks of a process and of all below it. ``ended``: with those of processes that have ended and were waited for."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            children.setdefault(int(words[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(int(word) for word in words[11 : 15 if ended else 13])
    found, waiting = {}, [root]
    while waiting:
        pid = waiting.pop()
        found[pid] = ticks.get(pid, 0)
        waiting += children.get(pid, [])
    return found


def cpu_seconds() -> float:
    return sum(below(os.getpid()).values()) / os.sysconf("SC_CLK_TCK")
