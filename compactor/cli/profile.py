"""``--profile``: what each stage of a command's work cost."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

from compactor.cli import frame
from compactor.cli.output import Table, size
from compactor.stages import Recorder, StageCost, recorded_by


def add_argument(parser: frame.Parser) -> None:
    parser.add_argument("--profile", action="store_true", help="say what each stage of the work cost: CPU seconds, seconds, bytes")


class Profile:
    """Costs by stage, in their order, then of what belongs to no stage, and of everything: known once the work is done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._asked: bool = args.profile
        self._costs: dict[str, StageCost] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What all threads do while the block runs, where ``--profile`` asks."""
        if not self._asked:
            yield
            return
        recorder = Recorder(time.thread_time, time.perf_counter)
        cpu, wall = time.process_time(), time.perf_counter()
        with recorded_by(recorder):
            yield
        total = StageCost(time.process_time() - cpu, time.perf_counter() - wall)
        staged = sum(cost.cpu for cost in recorder.costs.values())
        self._costs = {
            **{str(stage): cost for stage, cost in recorder.costs.items()},
            "other": StageCost(max(0.0, total.cpu - staged)),
            "total": total,
        }

    def document(self) -> list[dict[str, object]] | None:
        """None where nobody asked; empty where there was nothing to do."""
        rows = self._costs.items()
        told = [{"stage": name, "cpu": round(cost.cpu, 6), "seconds": round(cost.wall, 6), "bytes": cost.bytes} for name, cost in rows]
        return told if self._asked else None

    def tables(self) -> list[Table]:
        """Of stages that took part."""
        rows = [
            (name, f"{cost.cpu:.3f}", f"{cost.wall:.3f}" if cost.wall else None, size(cost.bytes) if cost.bytes else None)
            for name, cost in self._costs.items()
            if cost != StageCost()
        ]
        return [Table("what it cost", ("stage", "CPU s", "seconds", "bytes"), rows)] if self._costs else []
