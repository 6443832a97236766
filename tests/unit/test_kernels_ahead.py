"""Kernels that are compiled before a log needs them, by two processes; what a small `run` loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compactor.cleaner import ahead, warm
from compactor.cli import warming
from compactor.records.build import Row, batch

ROOT = Path(__file__).parents[2]
CALLED = """
from bloom import jit
from compactor.cleaner import ahead, warm

lines, call = set(), jit._Kernel._compile_for_args

def noted(kernel, *args):
    lines.add(ahead.line_of(kernel, map(kernel.typeof_pyval, args)))
    return call(kernel, *args)

jit._Kernel._compile_for_args = noted
warm.warm_up()
print(*sorted(lines), sep="\\n")
"""
NOT_FOR_A_SMALL_RUN = (
    "boto3", "botocore", "compactor.cleaner.warm", "compactor.storage.s3", "compactor.tier.layouts.aiven.layout", "confluent_kafka",
    "cryptography", "jinja2", "prometheus_client", "pyarrow", "pyspark", "watchdog",
)  # fmt: skip


def test_every_kernel_that_a_log_calls_is_named() -> None:
    ran = subprocess.run([sys.executable, "-c", CALLED], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert sorted((ahead.IN_STEP + ahead.BESIDE).split("\n")[1:-1]) == sorted([*ran.stdout.splitlines(), ""]), "see compactor.cleaner.ahead"


def test_compiled_ahead_is_compiled() -> None:
    warming.compile_all(load=False)
    assert ahead.all_cached(ahead.IN_STEP + ahead.BESIDE)
    assert not ahead.all_cached("compactor.records.indexes _entries i4 3*i8: i8")


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import time; time.sleep(600)", "raise KeyboardInterrupt"])
def test_a_second_process_that_fails_or_hangs_does_no_harm(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(ahead, "all_cached", lambda lines: False)
    monkeypatch.setattr(ahead, "compile_kernels", compiled.append)
    monkeypatch.setattr(warm, "warm_up", lambda: compiled.append("the rest"))
    monkeypatch.setattr(warming, "_PROGRAM", program)
    monkeypatch.setattr(warming, "_PATIENCE_SECONDS", 0.2)
    warming.compile_all(load=False)
    assert compiled == [ahead.IN_STEP, "the rest"]


def test_a_second_process_that_cannot_begin_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(ahead, "all_cached", lambda lines: False)
    monkeypatch.setattr(ahead, "compile_kernels", compiled.append)
    monkeypatch.setattr(warm, "warm_up", lambda: compiled.append("the rest"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    warming.compile_all(load=False)
    assert compiled == [ahead.IN_STEP, "the rest"]


def run_by_itself(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Ends with the names of all modules on stderr."""
    program = (
        f"import sys; from compactor.cli.main import entry; assert entry({list(arguments)!r}) == 0; print(*sys.modules, file=sys.stderr)"
    )
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)


def test_a_small_run_loads_what_it_needs(tmp_path: Path) -> None:
    log, config = tmp_path / "orders-0", tmp_path / "tier.toml"
    log.mkdir()
    for base in (0, 100):
        rows = [Row(base + i, 1, b"key-%d" % (i % 7), b"value") for i in range(100)]
        (log / f"{base:020d}.log").write_bytes(batch(rows))
    config.write_text(f'[tier]\nurl = "{(tmp_path / "tier").as_uri()}"\nstate_dir = "{tmp_path / "state"}"\n')
    run_by_itself("import", str(log), "--topic", "orders", "--partition", "0", "--config", str(config))
    ran = run_by_itself("run", "--output", "json", "--config", str(config))
    assert '"status": "cleaned"' in ran.stdout
    assert sorted(set(NOT_FOR_A_SMALL_RUN) & set(ran.stderr.split())) == []
