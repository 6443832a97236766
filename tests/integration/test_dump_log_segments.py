"""Kafka's DumpLogSegments says of our compacted segments and indexes what it says of those of Kafka's cleaner."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from tests.golden_cases import client_rounds, unpack
from tests.support.kafka_jars import TOOLS, BrokerUnavailable, broker_jars


def dump(directory: Path) -> str:
    """Return what the tool prints of all files, their mismatches and holes included."""
    tool = broker_jars(TOOLS).command("org.apache.kafka.tools.DumpLogSegments")
    files = [str(path) for suffix in ("log", "index", "timeindex", "txnindex") for path in sorted(directory.glob(f"*.{suffix}"))]
    command = [*tool, "--deep-iteration", "--files", ",".join(files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return "\n".join(sorted((done.stdout + done.stderr).replace(f"{directory}/", "").splitlines()))


@pytest.mark.parametrize("name", ["java-0.11", "streams-suppress"])
def test_kafkas_tool_says_the_same_of_ours_and_of_kafkas(name: str, tmp_path: Path) -> None:
    [case, *_] = client_rounds(unpack("clients", tmp_path / "golden") / name, "keep", tmp_path)
    clean_log_directory(case.log_dir, tmp_path / "out", OfflineCleanOptions(**case.request()))
    try:
        ours = dump(tmp_path / "out")
    except BrokerUnavailable as error:
        pytest.skip(str(error))
    assert "is followed by" in ours  # holes, which it takes for a mistake
    assert ours == dump(case.expected_dir)
