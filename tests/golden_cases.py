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
    """The cases of one archive below ``target``; unpacked once, so do not write into them."""
    folder = target / kind
    if not folder.exists():
        with tarfile.open(GOLDEN / f"{kind}.tar.xz") as archive:
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
    """Both rounds of one set (``keep`` or ``drop``); the second one's input is what Kafka made in the first."""
    params, expected = _json(case / "params.json")[parameters], _json(case / "expected.json")[parameters]
    log_dir = _copy(case / "in", scratch / "in", params[0]["mtimes"])
    first = Round(log_dir, params[0], case / "expected" / parameters / "round1", expected[0])
    if first.refused:
        return [first]
    second = params[1] | {"mtimes": {str(base): time for base, time in first.mtimes_after().items()}}
    copied = _copy(first.expected_dir, scratch / "in2", second["mtimes"])
    return [first, Round(copied, second, case / "expected" / parameters / "round2", expected[1])]


def _copy(source: Path, target: Path, mtimes: dict[str, int]) -> Path:
    shutil.copytree(source, target)
    for base, time in mtimes.items():
        for path in target.glob(f"{int(base):020}.*"):
            os.utime(path, ns=(time * 1_000_000, time * 1_000_000))
    return target


@cache
def _json(path: Path) -> Any:
    return json.loads(path.read_text())
