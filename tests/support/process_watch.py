"""What a process uses: resident memory, open handles, threads, as Linux tells it."""

from __future__ import annotations

from pathlib import Path


def usage(pid: int | None = None) -> dict[str, float]:
    """Of a process, of this one by default; empty where it no longer exists. ``MB``: resident."""
    about = Path("/proc") / ("self" if pid is None else str(pid))
    try:
        status = dict(line.split(":", 1) for line in (about / "status").read_text().splitlines() if ":" in line)
        handles = sum(1 for _ in (about / "fd").iterdir())
        return {"MB": int(status["VmRSS"].split()[0]) / 1024, "handles": handles, "threads": int(status["Threads"])}
    except (OSError, KeyError):
        return {}
