"""Compiled code must come from a cache where one can be kept, wherever it is run from, must run where none can, and must never be stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import bloom
from bloom import jit

CALLEE = "from bloom.jit import leaf\nfrom numbers_of import STEP\n\n@leaf\ndef step(x):\n    return x + {} * STEP\n"
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
    (root / "numbers_of.py").write_text("STEP = 1\n")
    (root / "program.py").write_text(PROGRAM)
    return root


READ_ONLY = """
import errno, os, tempfile

def refuse(*args, **kwargs):
    raise OSError(errno.EROFS, "Read-only file system")

os.utime = tempfile.NamedTemporaryFile = tempfile.TemporaryFile = refuse
import program
"""


def start(
    root: Path, home: Path | None = None, archive: Path | None = None, program: str = "import program", **named: str
) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG", "COV"))}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home or root), "TMPDIR": str(root)}
    environment |= {"PYTHONPATH": str(archive)} if archive else {}
    environment |= named
    command = [sys.executable, "-c", program]
    return subprocess.Popen(
        command, env=environment, cwd=home if archive else root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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
    for place in (root / ".cache", root / f"tiered-compactor-{os.getuid()}"):
        place.write_text("a file where a directory is wanted")
    assert said(start(root)) == (20, 0, False)


def test_entries_on_a_disk_that_nobody_writes_are_used(tmp_path: Path) -> None:
    root = installed(tmp_path)
    place = str(tmp_path / "of an image")
    assert said(start(root, NUMBA_CACHE_DIR=place)) == (20, 0, True)
    assert said(start(root, program=READ_ONLY, NUMBA_CACHE_DIR=place)) == (20, 1, True)
    (root / "callee.py").write_text(CALLEE.format(3))
    assert said(start(root, program=READ_ONLY, NUMBA_CACHE_DIR=place)) == (30, 0, True)


def test_torn_cache_files_cost_a_compilation_only(tmp_path: Path) -> None:
    root = installed(tmp_path)
    said(start(root))
    files = list(root.rglob("*.kernel"))
    assert len(files) == 1
    for file in files:
        file.write_bytes(file.read_bytes()[:-40])
    assert said(start(root))[:2] == (20, 0)
    assert said(start(root))[:2] == (20, 1)


def test_a_kernel_takes_in_what_comes_from_the_cache(tmp_path: Path) -> None:
    root = installed(tmp_path)
    (root / "callee.py").write_text(CALLEE.format(2).replace("leaf", "kernel"))
    said(start(root))
    (compiled,) = root.rglob("total.*.kernel")
    compiled.unlink()
    assert said(start(root)) == (20, 0, True)
    assert said(start(root)) == (20, 1, True)


def test_a_kernel_is_compiled_anew_when_only_what_it_calls_has_changed(tmp_path: Path) -> None:
    root = installed(tmp_path)
    assert said(start(root)) == (20, 0, True)
    (root / "callee.py").write_text(CALLEE.format(3))
    assert said(start(root)) == (30, 0, True)


def test_a_kernel_is_compiled_anew_when_a_number_of_another_module_has_changed(tmp_path: Path) -> None:
    root = installed(tmp_path)
    said(start(root))
    (root / "numbers_of.py").write_text("STEP = 5\n")
    assert said(start(root)) == (100, 0, True)


def test_another_checkout_and_an_archive_of_the_same_sources_compile_nothing(tmp_path: Path) -> None:
    home, other = installed(tmp_path), installed(tmp_path / "other")
    said(start(home))
    assert said(start(other, home)) == (20, 1, True)
    archive = Path(shutil.make_archive(str(tmp_path / "sources"), "zip", home))
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(home / ".cache", tmp_path / "elsewhere" / ".cache")
    assert said(start(home, tmp_path / "elsewhere", archive)) == (20, 1, True)


def test_a_place_among_the_temporary_files_that_is_not_ours_alone_is_left(tmp_path: Path) -> None:
    root = installed(tmp_path)
    (root / ".cache").write_text("a file where a directory is wanted")
    shared = root / f"tiered-compactor-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    assert said(start(root)) == (20, 0, False)
    shared.chmod(0o700)
    assert said(start(root)) == (20, 0, True)


def test_the_least_recently_used_entries_go(tmp_path: Path) -> None:
    root = installed(tmp_path)
    place = root / ".cache" / "tiered-compactor" / "kernels"
    place.mkdir(parents=True)
    for number in range(jit.CACHED_ENTRIES + 1):
        old = place / f"gone.{number:05d}.kernel"
        old.touch()
        os.utime(old, (number, number))
    said(start(root))
    left = sorted(path.name for path in place.iterdir())
    assert len([name for name in left if name.startswith("gone")]) == jit.CACHED_ENTRIES - 1
    assert left[0] == "gone.00002.kernel"


def test_a_leaf_answers_python_as_well() -> None:
    assert [int(multiply_high_of(np.uint64(half))) for half in (1 << 63, 1 << 62)] == [5, 2]


@jit.leaf
def multiply_high_of(x: np.uint64) -> np.uint64:
    product: np.uint64 = jit.multiply_high(x, np.uint64(10))
    return product
