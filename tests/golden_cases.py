"""The golden data, unpacked: see tests/golden/README.md."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
OPTIONS = (
    "first_dirty_offset",
    "first_uncleanable_offset",
    "delete_retention_ms",
    "segment_bytes",
    "segment_index_bytes",
    "index_interval_bytes",
    "map_entries",
    "high_watermark",
)


def names(kind: str) -> list[str]:
    """``kind``: cleaner, clients, tiered or aiven."""
    found: list[str] = json.loads((GOLDEN / "cases.json").read_text())[kind]
    return found


def unpack(kind: str, target: Path) -> Path:
    """The cases of one kind below ``target``; unpacked once, so do not write into them."""
    folder = target / kind
    if not folder.exists():
        for path in GOLDEN.glob(f"{kind}*.tar.xz"):
            with tarfile.open(path) as archive:
                archive.extractall(target, filter="data")
    return folder


@dataclass(frozen=True)
class Round:
    """One round of Kafka's cleaner: a log directory (a copy, with its modification times set), and what came out."""

    log_dir: Path
    params: dict[str, Any]
    expected_dir: Path
    expected: dict[str, Any]

    @property
    def refused(self) -> bool:
        return "error" in self.expected

    def request(self) -> dict[str, Any]:
        """The fields of OfflineCleanOptions."""
        given = {name: self.params[name] for name in OPTIONS if name in self.params}
        return {"now_ms": self.params["now"], **given}

    def mtimes_after(self) -> dict[int, int]:
        """Output base -> modification time: that of the last input that went into it."""
        times = {int(base): time for base, time in self.params["mtimes"].items()}
        outputs = sorted(int(path.stem) for path in self.expected_dir.glob("*.log"))
        following = [*outputs[1:], self.expected["next_dirty_offset"]]
        return {base: times[max(b for b in times if base <= b < end)] for base, end in zip(outputs, following, strict=True)}


def cleaner_round(case: Path, scratch: Path) -> Round:
    log_dir = _copy(case / "in", scratch / "in", _json(case / "params.json")["mtimes"])
    return Round(log_dir, _json(case / "params.json"), case / "expected", _json(case / "expected.json"))


def client_rounds(case: Path, parameters: str, scratch: Path) -> list[Round]:
    """All rounds of one set (``keep`` or ``drop``); the input of each but the first is what Kafka made in the one before."""
    rounds: list[Round] = []
    both = zip(_json(case / "params.json")[parameters], _json(case / "expected.json")[parameters], strict=False)  # none after a refusal
    for number, (params, expected) in enumerate(both, start=1):
        mtimes = {str(base): time for base, time in rounds[-1].mtimes_after().items()} if rounds else params["mtimes"]
        source = rounds[-1].expected_dir if rounds else case / "in"
        log_dir = _copy(source, scratch / ("in" if number == 1 else f"in{number}"), mtimes)
        rounds.append(Round(log_dir, params | {"mtimes": mtimes}, case / "expected" / parameters / f"round{number}", expected))
    return rounds


def _copy(source: Path, target: Path, mtimes: dict[str, int]) -> Path:
    shutil.copytree(source, target)
    for base, time in mtimes.items():
        for path in target.glob(f"{int(base):020}.*"):
            os.utime(path, ns=(time * 1_000_000, time * 1_000_000))
    return target


@cache
def _json(path: Path) -> Any:
    return json.loads(path.read_text())
