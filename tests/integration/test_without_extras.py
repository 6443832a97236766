"""Without the extras everything works that does not ask for them; what does ask says which one is missing, in one line."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli

ROOT = Path(__file__).parents[2]

BLOCKED = textwrap.dedent(
    """
    import importlib.abc, json, os, sys

    class Blocker(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {"pyspark", "pyarrow", "py4j", "confluent_kafka", "cryptography", "Crypto", "gssapi"}:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Blocker())
    from compactor.cli.main import entry

    codes = [entry(command) for command in json.loads(sys.argv[1])]
    sys.stdout.flush()
    print("codes", codes, file=sys.stderr)
    """
)


def ask(cli: TierCli, *commands: tuple[object, ...]) -> tuple[list[int], str]:
    """Exit codes and stderr of these commands in a process that cannot import the extras."""
    words = [[str(word) for word in command] for command in commands]
    lines = [[*each, "--config", str(cli.config)] for each in words]
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps(lines)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    said, _, codes = ran.stderr.rpartition("codes ")
    return json.loads(codes), said


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    log = LogBuilder()
    for number in range(6):
        log.put(f"{number % 2}=value", f"{number % 3}=other")
    log.add("/; 9=active")
    folder = tmp_path / "orders-0"
    log.write(folder)
    return folder


def test_the_main_job_needs_none_of_them(tmp_path: Path, log_dir: Path) -> None:
    cli = TierCli(tmp_path / "one")
    codes, said = ask(
        cli,
        ("import", log_dir, "--topic", "orders", "--partition", "0"),
        ("topics",),
        ("plan",),
        ("run", "--force"),
        ("retire",),
        ("verify",),
        ("explain", "orders-0"),
        ("export", "orders-0", tmp_path / "out"),
        ("clean", tmp_path / "out", tmp_path / "cleaned"),
    )
    assert codes == [0] * 9, said


def test_who_asks_for_spark_is_told_what_to_install(tmp_path: Path, log_dir: Path) -> None:
    cli = TierCli(tmp_path / "one")
    ask(cli, ("import", log_dir, "--topic", "orders", "--partition", "0"))
    codes, said = ask(cli, ("recompact",))
    line = "error: Spark needs pyspark, which is not installed. It comes with an extra: pip install 'tiered-compactor[spark]'"
    assert (codes, said.strip()) == ([2], line)
    cli.set(cleaner={"map_engine": "spark"})
    codes, said = ask(cli, ("run", "--force"))
    assert (codes, said.strip()) == ([2], line)


def test_who_asks_for_an_iceberg_table_is_told_what_to_install(tmp_path: Path, log_dir: Path) -> None:
    cli = TierCli(tmp_path / "one")
    ask(cli, ("import", log_dir, "--topic", "orders", "--partition", "0"))
    cli.set(**{"outputs.iceberg.catalog": {"type": "sql"}, "outputs.iceberg.topics.orders": {}})
    codes, said = ask(cli, ("daemon",))
    line = "[outputs.iceberg] needs pyarrow, which is not installed. It comes with an extra: pip install 'tiered-compactor[iceberg]'"
    assert (codes, said.count("\n")) == ([2], 1)
    assert said.strip().endswith(line)


@pytest.mark.damages  # there is no such tier
def test_who_asks_for_kerberos_is_told_what_to_install(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "one", {"tier": {"url": "hdfs://namenode/tier"}, "hdfs": {"kerberos": True}})
    codes, said = ask(cli, ("topics",))
    line = "error: [hdfs] kerberos needs gssapi, which is not installed. It comes with an extra: pip install 'tiered-compactor[kerberos]'"
    assert (codes, said.strip()) == ([2], line)


def test_a_daemon_needs_none_of_them(tmp_path: Path) -> None:
    """Whatever it may come to import is there: every module outside of the rooms that the extras are for."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("bloom", "checkpoint", "compactor")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name not in ("__main__.py", "__init__.py")
        and not {"spark", "iceberg"} & set(path.parts)
        and path.name != "columns.py"  # Arrow, for those that want it
    ]
    code = BLOCKED.partition("from compactor.cli.main")[0] + "import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    ran = subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
