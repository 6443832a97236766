"""How a service is, in a few words."""

from __future__ import annotations

from compactor.service.pages.documents import Level, Verdict
from compactor.views.words import plural


def verdict(*, ready: bool, stopping: bool, problem: str, looked: bool, bad: int, at_work: int, due: int) -> Verdict:
    """``looked``: it has looked for work at least once; ``bad``: partitions that need somebody."""
    level, text, detail = _level(ready=ready, stopping=stopping, problem=problem, looked=looked, bad=bad)
    doing = [plural(at_work, "job") + " at work"] if at_work else []
    doing += [plural(due, "partition") + " due"] if due else []
    return Verdict(level=level, text=text, detail=detail or ", ".join(doing) or "Nothing is at work, and nothing is due")


def _level(*, ready: bool, stopping: bool, problem: str, looked: bool, bad: int) -> tuple[Level, str, str]:
    if stopping:
        return "stopping", "Stopping", "What is at work is left for the next start to go on with"
    if problem:
        return "down", "It cannot work", problem
    if not looked or not ready:
        return "starting", "Starting", "The first look at all partitions is under way"
    if bad:
        return "attention", f"{plural(bad, 'partition')} {'needs' if bad == 1 else 'need'} you", ""
    return "ok", "All well", ""
