"""Machine code of kernels runs without numba, gives numba's results, and is left to numba wherever it does not match."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import compactor
from compactor.kernels.machine_code import FILE_NAME, ArrayKind, Routine

KERNELS = """
from typing import NamedTuple
import numpy as np
import numpy.typing as npt
from compactor.kernels.jit import kernel
from compactor.kernels.memory import load_u64

class Columns(NamedTuple):
    first: npt.NDArray[np.int64]
    flags: npt.NDArray[np.bool_]

    def __len__(self):
        return len(self.first)

@kernel
def add(columns, numbers, scale, is_negative):
    total = np.int64(0)
    for i in range(columns.first.size):
        if columns.flags[i]:
            total += columns.first[i] * numbers[1, i] * scale
    return (-total if is_negative else total), columns.first.size, total > 5

@kernel
def fill(target, value):
    target[:] = value

@kernel
def word(data, mask):
    return load_u64(data, 1) | mask

@kernel
def double(numbers):
    return numbers * 2
"""
PROGRAM = """
import sys
import numpy as np
from compactor.kernels import jit
from compactor.round.kernels import Columns, add, double, fill, word

def results(dtype=np.int64):
    target, data = np.zeros(2, np.int64), np.frombuffer(bytes(range(1, 10)), np.uint8)
    columns = Columns(np.arange(3, dtype=dtype), np.array([True, False, True]))
    fill(target, -7)
    return add(columns, np.ones((2, 3), np.int64), 4, True), target.tolist(), word(data, np.uint64(1 << 63)), {rest}
"""
WANTED = "((-8, 3, True), [-7, -7], 9874149905445159682, {rest})"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some kernels, their machine code, and the program that calls them."""
    root, package = tmp_path_factory.mktemp("installed"), Path(compactor.__file__).parent
    shutil.copytree(package / "kernels", root / "compactor" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__", "profiling"):
        shutil.copy(package / f"{name}.py", root / "compactor")
    (root / "compactor" / "round").mkdir()
    (root / "compactor" / "round" / "kernels.py").write_text(KERNELS)
    run(root, "print(results()); jit.export_compiled_kernels(jit.kernel_cache_folder())", rest="double(np.arange(2)).tolist()")
    return root


def run(root: Path, statements: str, *, rest: str = "0", **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG", "COV", "PYTHONPATH"))}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(root), "TMPDIR": str(root), **variables}
    program = PROGRAM.replace("{rest}", rest) + statements
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def machine_code(root: Path) -> Path:
    (found,) = (root / ".cache" / "tiered-compactor").glob(f"kernels-*/{FILE_NAME}")
    return found


def test_machine_code_gives_the_results_of_numba_without_numba(installed: Path) -> None:
    assert run(installed, "print(results(), 'numba' in sys.modules)") == WANTED.replace("{rest}", "0") + " False"


def test_a_kernel_that_makes_arrays_is_left_to_numba(installed: Path) -> None:
    about = json.loads(machine_code(installed).read_bytes().partition(b"\n")[0])
    assert {each["kernel"].rpartition(".")[2] for each in about["routines"]} == {"add", "fill", "word"}
    assert run(installed, "print(double(np.arange(2)).tolist(), 'numba' in sys.modules)") == "[0, 2] True"


def test_arguments_of_other_types_are_left_to_numba(installed: Path) -> None:
    assert run(installed, "print(results(np.int32), 'numba' in sys.modules)") == WANTED.replace("{rest}", "0") + " True"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data.partition(b"\n")[0],
        lambda data: b"",
        lambda data: data.replace(b'"digest": "', b'"digest": "0', 1),
        lambda data: b"[]\n" + data.partition(b"\n")[2],
    ],
    ids=["cut off", "another byte", "no code", "empty", "of another version", "no table"],
)
def test_a_file_that_is_damaged_or_of_another_version_is_not_linked(installed: Path, tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    root = tmp_path / "installed"
    shutil.copytree(installed, root)
    path = machine_code(root)
    path.write_bytes(damage(path.read_bytes()))
    folder = f"import pathlib; jit.kernel_cache_folder = lambda: pathlib.Path({str(path.parent)!r});"
    assert run(root, f"{folder} print(results(), 'numba' in sys.modules)") == WANTED.replace("{rest}", "0") + " True"


@pytest.mark.parametrize("module", ["llvmlite", "numpy"])
def test_another_version_of_a_library_means_numba(installed: Path, module: str) -> None:
    other = f"import {module}; {module}.__version__ += '.post1'; print(results(), 'numba' in sys.modules)"
    assert run(installed, other) == WANTED.replace("{rest}", "0") + " True"


def test_a_setting_of_numba_that_changes_code_means_numba(installed: Path) -> None:
    ran = run(installed, "print(results(), 'numba' in sys.modules)", NUMBA_BOUNDSCHECK="1")
    assert ran == WANTED.replace("{rest}", "0") + " True"


def test_only_arguments_of_the_compiled_kinds_are_passed() -> None:
    written, read = ArrayKind(np.dtype(np.int64), 1, is_written=True), ArrayKind(np.dtype(np.uint8), 1, is_written=False)
    routine = Routine("f", (written, read, "int64", "uint64", "bool"), None, is_result_tuple=False, entry=None)
    target, data = np.zeros(4, np.int64), np.zeros(4, np.uint8)
    sealed = np.zeros(4, np.int64)
    sealed.flags.writeable = False
    fitting = (target, data, 1, np.uint64(1), True)
    assert routine.pack_arguments(fitting) is not None
    frozen = data.copy()
    frozen.flags.writeable = False
    assert routine.pack_arguments((target, frozen, np.int64(-1), np.uint64(1), np.True_)) is not None
    for place, value in (
        (0, sealed), (0, target[::2]), (0, target.astype(np.int32)), (0, target.reshape(2, 2)), (0, [1]), (1, target),
        (2, np.uint64(1)), (2, 2**63), (2, True), (2, 1.0), (3, 1), (4, 1),
    ):  # fmt: skip
        assert routine.pack_arguments((*fitting[:place], value, *fitting[place + 1 :])) is None
    assert routine.pack_arguments(fitting[:4]) is None
