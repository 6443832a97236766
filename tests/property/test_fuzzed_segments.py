"""A few thousand damaged logs in CI; `python -m tests.fuzz_segments` tries as many as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.depth import a_third

ROOT = Path(__file__).parents[2]


@a_third("seed", [101, 102, 103])
def test_damaged_segments_are_cleaned_right_or_refused(seed: int) -> None:
    """In a process of its own: a crash of the interpreter would be a find, too."""
    fuzz = [sys.executable, "-m", "tests.fuzz_segments", "--count", "750", "--seed", str(seed)]
    done = subprocess.run(fuzz, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
