"""The archive of the JVM's classes: made on demand, used by the next Spark, and harmless where it does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tier_cli import TierCli

ROOT = Path(__file__).parents[3]
MAPPED = """
import sys
from pathlib import Path
from pyspark import SparkContext
from compactor.config.settings import load_settings
from compactor.features.spark.session import start_cluster

with start_cluster(load_settings(sys.argv[1], {})) as started:
    maps = Path(f"/proc/{SparkContext._gateway.proc.pid}/maps").read_text()
    print(started.cluster.task_slots, "spark-classes" in maps)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tier.toml"
    url, state = (tmp_path / "tier").as_uri(), tmp_path / "a state"
    path.write_text(f'[tier]\nurl = "{url}"\nstate_dir = "{state}"\n[spark]\nmaster = "local[1]"\n')
    return path


def run(*words: str) -> str:
    ran = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux which files the JVM has mapped")
def test_the_next_spark_maps_the_archive_and_a_damaged_one_is_ignored(config: Path) -> None:
    assert run("-c", MAPPED, str(config)) == "1 False\n"
    made = json.loads(run("-m", "compactor", "recompact", "--class-archive", "--config", str(config), "--output", "json"))["class_archive"]
    archive = Path(made["path"])
    assert (archive.parent, archive.stat().st_size) == (config.parent / "a state" / "spark", made["bytes"])
    assert [path.name for path in archive.parent.glob("spark-classes*")] == [archive.name]
    assert run("-c", MAPPED, str(config)) == "1 True\n"
    for content in (bytes(5_000_000), bytes(made["bytes"])):
        archive.unlink()  # a JVM that ends just now has mapped it
        archive.write_bytes(content)
        assert run("-c", MAPPED, str(config)) == "1 False\n"


@pytest.mark.quick
def test_the_archive_is_for_a_spark_on_this_machine(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "tier", {"spark": {"master": "spark://elsewhere:7077"}})
    refused = cli.ask("recompact", "--class-archive")
    assert refused.code == 2, refused
    assert "a Spark that this program starts on this machine" in refused.stderr
