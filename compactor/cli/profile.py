"""Option ``--profile``: the cost of each stage of a command's work."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

from compactor.cli.output import Table, format_size
from compactor.profiling import StageCost, StageCostRecorder, record_stage_costs_during_block


class CommandProfile:
    """Recorder of what a command's work costs in CPU time, wall-clock time and bytes: by stage, outside the stages, and in total.

    Records only if ``--profile`` was given.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._asked: bool = args.profile
        self._costs: dict[str, StageCost] = {}

    @contextmanager
    def record_stage_costs_during_block(self) -> Iterator[None]:
        """Record the costs of all threads while the block runs. Does nothing without ``--profile``."""
        if not self._asked:
            yield
            return
        recorder = StageCostRecorder(time.thread_time, time.perf_counter)
        cpu, wall = time.process_time(), time.perf_counter()
        with record_stage_costs_during_block(recorder):
            yield
        total = StageCost(time.process_time() - cpu, time.perf_counter() - wall)
        staged = sum(cost.cpu for cost in recorder.costs.values())
        self._costs = {
            **{str(stage): cost for stage, cost in recorder.costs.items()},
            "other": StageCost(max(0.0, total.cpu - staged)),
            "total": total,
        }

    def stage_costs_document(self) -> list[dict[str, object]] | None:
        """Return the costs of each stage for JSON output; None without ``--profile``, an empty list if no costs were recorded."""
        rows = self._costs.items()
        reported = [{"stage": name, "cpu": round(cost.cpu, 6), "seconds": round(cost.wall, 6), "bytes": cost.bytes} for name, cost in rows]
        return reported if self._asked else None

    def stage_cost_tables(self) -> list[Table]:
        """Return a list with one table of the stages that cost anything; an empty list without ``--profile``."""
        rows = [
            (name, f"{cost.cpu:.3f}", f"{cost.wall:.3f}" if cost.wall else None, format_size(cost.bytes) if cost.bytes else None)
            for name, cost in self._costs.items()
            if cost != StageCost()
        ]
        return [Table("what it cost", ("stage", "CPU s", "seconds", "bytes"), rows)] if self._costs else []
