"""Kernels that are compiled before a log needs them, by one process at a time; the modules that a small `run` imports."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from compactor.cleaner import precompile
from compactor.cli.serving import load_kernels
from compactor.kernels import jit
from compactor.kernels.jit import COMPLETE
from compactor.records.encode import RecordToEncode, encode_batch
from tests.support.deployment import Deployment, GrowingLog

ROOT = Path(__file__).parents[2]
ROUTINES = """
import sys
from compactor.cleaner.precompile import precompile_kernels
from compactor.kernels.jit import routines_on_disk

precompile_kernels()
print("numba" in sys.modules, len(routines_on_disk()) > 40)
print(*[name for name, routines in routines_on_disk().items() if len(routines) > 1])
"""
NOT_FOR_A_SMALL_RUN = (
    "boto3", "botocore", "compactor.cleaner.precompile", "compactor.adapters.stores.s3", "compactor.adapters.brokers.admin",
    "compactor.adapters.brokers.aiven.layout", "confluent_kafka", "cryptography", "jinja2",
    "numba", "prometheus_client", "pyarrow", "pyspark", "watchdog",
)  # fmt: skip


def test_a_process_after_the_first_loads_no_compiler_and_each_kernel_for_one_kind_of_arguments() -> None:
    precompile.precompile_kernels()
    ran = subprocess.run([sys.executable, "-c", ROUTINES], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split("\n") == ["False True", "", ""]


def test_precompilation_reports_each_kernel_of_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that is compiled here stands for all; what it calls is a part of it."""

    @numba.njit  # type: ignore[untyped-decorator]
    def callee(x: int) -> int:
        return x + 1

    @numba.njit  # type: ignore[untyped-decorator]
    def caller(x: int) -> int:
        return callee(x) + 1  # type: ignore[no-any-return]

    reported: list[tuple[str, int]] = []
    monkeypatch.setattr(precompile, "kernel_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(precompile, "_clean_small_log", lambda: (caller(1), callee(1.5), caller(2)))
    precompile.precompile_kernels(lambda name, done: reported.append((name, done)))
    assert reported == [("caller", 0), ("callee", 1)]


def test_precompilation_removes_what_a_stopped_machine_left_and_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    torn = tmp_path / "records_0" / "rows._parse.nbi"
    torn.parent.mkdir()
    torn.touch()
    monkeypatch.setattr(precompile, "kernel_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(precompile, "_clean_small_log", lambda: found.append(torn.exists()))
    precompile.precompile_kernels()
    assert (found, (tmp_path / COMPLETE).exists()) == ([False], True)
    torn.parent.mkdir()
    torn.touch()
    precompile.precompile_kernels()
    assert found == [False, True]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_service_leaves_compilation_to_a_child_process_and_does_without_if_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    here, programs = list[bool](), list[str]()

    def run(command: list[str], *, check: bool) -> None:
        programs.append(command[-1])
        if is_compiled:
            (tmp_path / COMPLETE).touch()

    monkeypatch.setattr(precompile, "kernel_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(jit, "kernel_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(precompile, "_clean_small_log", lambda: here.append((tmp_path / COMPLETE).exists()))
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", run)
        for _ in range(2):
            load_kernels()
    assert here == [is_compiled, True]
    assert len(programs) == 1, "nothing is left to compile at the second start"
    subprocess.run([sys.executable, "-c", programs[0]], cwd=ROOT, check=True)


def run_by_itself(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Ends with the names of all modules on stderr."""
    program = (
        f"import sys; from compactor.cli.main import entry; assert entry({list(arguments)!r}) == 0; print(*sys.modules, file=sys.stderr)"
    )
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        ("config show", {"numpy", "boto3", "confluent_kafka", "compactor.access.tier"}),
        ("topics", {"numpy", "numba", "boto3", "confluent_kafka"}),
        ("audit list", {"numpy", "numba", "boto3", "confluent_kafka"}),
        ("runs list", {"numba", "boto3", "confluent_kafka"}),
    ],
)
def test_a_command_that_only_reads_loads_what_it_needs(tmp_path: Path, words: str, unneeded: set[str]) -> None:
    made = Deployment(tmp_path)
    made.bring(GrowingLog("orders", 0, tmp_path, random.Random(4)).write_part(1))
    ran = run_by_itself(*words.split(), "--config", str(made.config))
    assert unneeded & set(ran.stderr.split()) == set()


def test_a_small_run_loads_what_it_needs(tmp_path: Path) -> None:
    log, config = tmp_path / "orders-0", tmp_path / "tier.toml"
    log.mkdir()
    for base in (0, 100):
        rows = [RecordToEncode(base + i, 1, b"key-%d" % (i % 7), b"value") for i in range(100)]
        (log / f"{base:020d}.log").write_bytes(encode_batch(rows))
    config.write_text(f'[tier]\nurl = "{(tmp_path / "tier").as_uri()}"\nstate_dir = "{tmp_path / "state"}"\n')
    run_by_itself("import", str(log), "--topic", "orders", "--partition", "0", "--config", str(config))
    ran = run_by_itself("run", "--output", "json", "--config", str(config))
    assert '"status": "cleaned"' in ran.stdout
    assert sorted(set(NOT_FOR_A_SMALL_RUN) & set(ran.stderr.split())) == []
