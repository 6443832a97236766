"""Compiled code must come from a cache where one can be kept, must run where none can, and must never be stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import bloom

CALLEE = "from bloom.jit import leaf\n\n@leaf\ndef step(x):\n    return x + {}\n"
PROGRAM = """
from bloom.jit import kernel
from callee import step

@kernel
def total(n):
    x = 0
    for _ in range(n):
        x = step(x)
    return x

print(total(10), sum(total.stats.cache_hits.values()), total.stats.cache_path is not None)
"""


def installed(tmp_path: Path) -> Path:
    """The package without any cache, and a program that uses it, under a path with spaces."""
    root = tmp_path / "a place with spaces"
    shutil.copytree(Path(bloom.__file__).parent, root / "bloom", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "callee.py").write_text(CALLEE.format(2))
    (root / "program.py").write_text(PROGRAM)
    return root


def start(root: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG", "COV"))}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(root)}
    command = [sys.executable, "-c", "import program"]
    return subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> tuple[int, int, bool]:
    """Result, cache hits, and whether a cache is kept at all."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    total, hits, kept = out.split()
    return int(total), int(hits), kept == "True"


def test_two_first_processes_at_once_and_then_a_warm_one(tmp_path: Path) -> None:
    root = installed(tmp_path)
    for process in [start(root), start(root)]:
        assert said(process)[0] == 20
    assert said(start(root)) == (20, 1, True)


def test_nowhere_to_keep_a_cache(tmp_path: Path) -> None:
    root = installed(tmp_path)
    for place in (root / "__pycache__", root / "bloom" / "__pycache__", root / ".cache"):
        place.write_text("a file where a directory is wanted")
    assert said(start(root)) == (20, 0, False)


def test_torn_cache_files_cost_a_compilation_only(tmp_path: Path) -> None:
    root = installed(tmp_path)
    said(start(root))
    files = [*root.rglob("*.nbi"), *root.rglob("*.nbc")]
    assert len(files) >= 2
    for file in files:
        file.write_bytes(file.read_bytes()[: 40 if file.suffix == ".nbc" else 0])
    assert said(start(root))[:2] == (20, 0)
    assert said(start(root))[:2] == (20, 1)


def test_a_kernel_is_compiled_anew_when_only_what_it_calls_has_changed(tmp_path: Path) -> None:
    root = installed(tmp_path)
    assert said(start(root)) == (20, 0, True)
    (root / "callee.py").write_text(CALLEE.format(3))
    assert said(start(root)) == (30, 0, True)
