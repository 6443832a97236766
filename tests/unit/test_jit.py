"""Machine code comes from a cache wherever one can be written, kernels run where none can, and a cached kernel is never stale."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import compactor
from compactor.kernels import jit
from compactor.kernels.memory import varint_size_bytes

ROOT = Path(__file__).parents[2]
CALLEE = """
from compactor.kernels.jit import inline_kernel
from compactor.model.numbers import STEP

@inline_kernel
def step(x):
    return x + {} * STEP
"""
PROGRAM = """
from compactor.kernels.jit import kernel
from compactor.cleaner.callee import step

@kernel
def total(n):
    x = 0
    for _ in range(n):
        x = step(x)
    return x

result, stats = total(10), total.dispatcher.stats
print(result, sum(stats.cache_hits.values()), stats.cache_path is not None)
"""


def installed(tmp_path: Path) -> Path:
    """Return a folder, whose path has spaces, with what compiles kernels, without a cache, and with a program that has one kernel."""
    root = tmp_path / "a place with spaces"
    package = Path(compactor.__file__).parent
    shutil.copytree(package / "kernels", root / "compactor" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__", "profiling"):
        shutil.copy(package / f"{name}.py", root / "compactor")
    for folder, name, text in (("cleaner", "callee", CALLEE.format(2)), ("model", "numbers", "STEP = 1\n"), ("round", "program", PROGRAM)):
        (root / "compactor" / folder).mkdir()
        (root / "compactor" / folder / f"{name}.py").write_text(text)
    return root


READ_ONLY = """
import errno, tempfile
really = tempfile.TemporaryFile

def refuse(*args, **kwargs):
    if {place!r} in str(kwargs["dir"]):
        raise OSError(errno.EROFS, "Read-only file system")
    return really(*args, **kwargs)

tempfile.TemporaryFile = refuse
import compactor.round.program
"""


def start(root: Path, program: str = "import compactor.round.program", **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG", "COV", "PYTHONPATH"))}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(root), "TMPDIR": str(root), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result_of(process: subprocess.Popen[str]) -> tuple[int, int, bool]:
    """Return the kernel's result, the cache hits, and whether there is a cache."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    total, hits, cached = out.split()
    return int(total), int(hits), cached == "True"


def test_two_first_processes_at_once_leave_a_cache_for_the_third(tmp_path: Path) -> None:
    root = installed(tmp_path)
    for process in [start(root), start(root)]:
        assert result_of(process)[0] == 20
    assert result_of(start(root)) == (20, 1, True)
    assert list((root / ".cache" / "tiered-compactor").glob("kernels-*/*/*.nbc"))


def test_two_installations_of_one_version_have_a_folder_each(tmp_path: Path) -> None:
    """In a folder that another installation completed, numba would find none of its own machine code."""
    for root in (installed(tmp_path / "one"), installed(tmp_path / "two")):
        assert result_of(start(root, XDG_CACHE_HOME=str(tmp_path / "cache"))) == (20, 0, True)
    assert len(list((tmp_path / "cache" / "tiered-compactor").glob("kernels-*"))) == 2


def test_a_kernel_runs_where_no_cache_can_be_written(tmp_path: Path) -> None:
    root = installed(tmp_path)
    assert result_of(start(root, READ_ONLY.format(place=""))) == (20, 0, False)
    assert not list(tmp_path.rglob("*.nbc"))


def test_a_read_only_cache_of_an_image_is_used(tmp_path: Path) -> None:
    root, image = installed(tmp_path), str(tmp_path / "image")
    assert result_of(start(root, NUMBA_CACHE_DIR=image)) == (20, 0, True)
    assert result_of(start(root, READ_ONLY.format(place=image), NUMBA_CACHE_DIR=image)) == (20, 1, True)
    (root / "compactor" / "cleaner" / "callee.py").write_text(CALLEE.format(3))
    assert result_of(start(root, READ_ONLY.format(place=image), NUMBA_CACHE_DIR=image)) == (30, 0, True)


def test_a_kernel_is_compiled_again_after_a_change_of_what_it_calls_or_of_a_constant_elsewhere(tmp_path: Path) -> None:
    root = installed(tmp_path)
    assert result_of(start(root)) == (20, 0, True)
    (root / "compactor" / "cleaner" / "callee.py").write_text(CALLEE.format(3))
    assert result_of(start(root)) == (30, 0, True)
    (root / "compactor" / "model" / "numbers.py").write_text("STEP = 5\n")
    assert result_of(start(root)) == (150, 0, True)


def test_a_kernel_is_compiled_for_each_processor(tmp_path: Path) -> None:
    root = installed(tmp_path)
    result_of(start(root))
    assert result_of(start(root, NUMBA_CPU_NAME="generic")) == (20, 0, True)
    assert len(list((root / ".cache" / "tiered-compactor").glob("kernels-*"))) == 2


def test_a_kernel_from_an_archive_runs_without_a_cache(tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "sources"), "zip", installed(tmp_path))
    assert result_of(start(tmp_path, PYTHONPATH=archive)) == (20, 0, False)


def test_a_folder_for_temporary_files_that_belongs_to_another_user_is_not_used(tmp_path: Path) -> None:
    root = installed(tmp_path)
    (root / ".cache").write_text("a file where a directory is wanted")
    assert result_of(start(root)) == (20, 0, True)
    stranger = "import os; mine = os.getuid(); os.getuid = lambda: mine + 1; import compactor.round.program"
    assert result_of(start(root, stranger)) == (20, 0, False)


def test_a_kernel_is_not_cached_beside_its_source(tmp_path: Path) -> None:
    """numba does so where the folder has become unusable, and would miss changes in other files."""
    root = installed(tmp_path)
    lost = "from compactor.kernels.jit import kernel_cache_folder as get; folder = get(); folder.rmdir(); folder.touch()"
    assert result_of(start(root, f"{lost}; import compactor.round.program")) == (20, 0, False)


def test_the_least_recently_used_caches_of_other_versions_are_deleted(tmp_path: Path) -> None:
    root = installed(tmp_path)
    place = root / ".cache" / "tiered-compactor"
    for number in range(jit.KEPT_FOLDERS + 1):
        old = place / f"kernels-old{number:02d}"
        old.mkdir(parents=True)
        os.utime(old, (number, number))
    result_of(start(root))
    left = sorted(path.name for path in place.glob("*old*"))
    assert (len(left), left[0]) == (jit.KEPT_FOLDERS, "kernels-old01")


def test_a_leaf_runs_as_python_outside_kernels() -> None:
    assert [varint_size_bytes(value) for value in (0, 63, 64, -65)] == [1, 1, 2, 2]


def test_the_digest_covers_all_that_kernels_are_compiled_from() -> None:
    covered = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in jit.kernel_source_files()}
    product = [path for folder in ("bloom", "checkpoint", "compactor") for path in (ROOT / folder).rglob("*.py")]
    modules = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): ast.parse(path.read_text()) for path in product}
    with_kernels = {name for name, tree in modules.items() if any(map(is_compiled, ast.walk(tree)))}
    assert len(with_kernels) > 20
    assert with_kernels <= covered
    sources = {(name, source) for name in covered for source in sources_of_constants(modules[name], set(modules))}
    assert {(name, source) for name, source in sources if source not in covered} == set()


def is_compiled(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(isinstance(each, ast.Name) and each.id in ("kernel", "inline_kernel", "intrinsic") for each in decorators)


def sources_of_constants(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yield the modules of the project that a module imports constants, and names in its kernels, from."""
    used = {each.id for node in ast.walk(tree) if is_compiled(node) for each in ast.walk(node) if isinstance(each, ast.Name)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module in modules
            and any(each.name.isupper() or each.name in used for each in node.names)
        ):
            yield node.module
