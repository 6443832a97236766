"""The main job in seven steps on data of its own: make, import, plan, run, verify, export, check. `demo` says what they are about."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compactor.bootstrap import Tier, open_tier
from compactor.config import S3, load
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.round.compaction import OnStage, RoundReport
from compactor.service.demo_check import View, differences, read_view
from compactor.service.demo_data import Shape, write_topic
from compactor.transfer.export import export_partition
from compactor.transfer.import_ import ImportProgress, ImportReport, import_directory
from compactor.upkeep.verify_tier import Problem, verify_partition
from compactor.views.forecast import Forecast, forecast

NAME = TopicPartition("customers", 0)
FIRST_LINE = "# Written by `tiered-compactor demo`, which deletes what it finds beside it when it is run here again.\n"

OnCount = Callable[[int], None]


@dataclass(frozen=True)
class Comparison:
    """The topic as the broker wrote it, and as it is exported now. ``differences``: keys whose latest value is not the same."""

    before: View
    after: View
    segments_before: int
    segments_after: int
    differences: list[str]


class Demo:
    """One run in ``folder``, which is new, empty, or that of an earlier demo. Raises UsageError for any other.

    ``tier_url``: where the tier is made, if not in the folder; there must be none yet, and it stays.
    """

    def __init__(self, folder: Path, now_ms: int, tier_url: str = "", s3: S3 | None = None) -> None:
        self.folder = folder.absolute()
        self.now_ms = now_ms
        self.shape = Shape(now_ms)
        self.config = self.folder / "tiered-compactor.toml"
        self.log_dir = self.folder / "kafka-log" / str(NAME)
        self.exported = self.folder / "exported" / str(NAME)
        self._clear()
        self.tier_place = tier_url or str(self.folder / "tier")
        tier = {"url": tier_url or (self.folder / "tier").as_uri(), "state_dir": str(self.folder / "state")}
        self.config.write_text(_as_toml({"tier": tier, "s3": s3.model_dump() if s3 else {}}), encoding="utf-8")
        # Without the environment: a demo must not meet somebody's real tier.
        self._tier: Tier = open_tier(load(str(self.config), {}))
        if tier_url and self._tier.catalog.refresh().tier_id:
            raise UsageError(f"there is a tier at {tier_url} already", hint="Name a prefix that nothing uses yet")
        self._cleaner = self._tier.cleaner_for(NAME.topic)

    def _clear(self) -> None:
        if self.folder.is_dir() and any(self.folder.iterdir()):
            if not self.config.exists() or not self.config.read_text(encoding="utf-8", errors="replace").startswith(FIRST_LINE):
                raise UsageError(f"{self.folder} is not empty and not of an earlier demo", hint="Name an empty or a new directory")
            for name in ("kafka-log", "tier", "state", "exported"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {self.folder}: {error.strerror}", hint="Name another directory") from error

    def make(self, on_records: OnCount) -> None:
        for count in write_topic(self.log_dir, self.shape):
            on_records(count)

    def import_topic(self, progress: ImportProgress) -> ImportReport:
        return import_directory(self._tier, self.log_dir, NAME, self._cleaner.policy(), progress)

    def plan(self) -> Forecast:
        return forecast(self._tier, NAME, self.now_ms)

    def run(self, on_stage: OnStage) -> RoundReport:
        return self._tier.compact(NAME, self.now_ms, on_stage=on_stage)

    def verify(self, on_bytes: OnCount) -> list[Problem]:
        """What is wrong; notes are left out."""
        found = verify_partition(self._tier, NAME, on_bytes)
        return [problem for problem in found if problem.severity == "error"]

    def export(self, on_bytes: OnCount) -> None:
        export_partition(self._tier, NAME, self.exported, on_bytes)

    def check(self) -> Comparison:
        """Reads both directories back with the demo's own reader."""
        before, after = read_view(self.log_dir), read_view(self.exported)
        return Comparison(before, after, _segments(self.log_dir), _segments(self.exported), differences(before, after))


def _as_toml(sections: dict[str, dict[str, str]]) -> str:
    lines = [FIRST_LINE]
    for name, keys in sections.items():
        lines += [f"[{name}]\n", *(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in keys.items())]
    return "".join(lines)


def _segments(folder: Path) -> int:
    return len(list(folder.glob("*.log")))
