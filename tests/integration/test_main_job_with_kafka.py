"""What `export` writes is opened by a real Kafka, as after a clean shutdown and as after a crash, and read by its consumers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.kafka import Kafka
from tests.golden_cases import client_rounds, unpack
from tests.support.tier_cli import TierCli


@pytest.mark.parametrize("profile", ["plain", "txn", "legacy", "mixed"])
def test_kafka_reads_exports_of_generated_logs(kafka: Kafka, profile: str, tmp_path: Path) -> None:
    request = kafka.generate(7, profile, tmp_path / "log")["request"]
    cleaner = {name: request[name] for name in ("segment_bytes", "delete_retention_ms") if request.get(name) is not None}
    cleaner["keyless_records"] = "drop"  # as Kafka does
    reads_exports(kafka, tmp_path / "log", TierCli(tmp_path / "tier", {"cleaner": cleaner}), request["now_ms"])


@pytest.mark.parametrize("name", ["cdc-java", "consumer-offsets", "odd-records", "txn-interleaved"])
def test_kafka_reads_exports_of_client_logs(kafka: Kafka, name: str, tmp_path: Path) -> None:
    case = client_rounds(unpack("clients", tmp_path) / name, "keep", tmp_path)[0]
    reads_exports(kafka, case.log_dir, TierCli(tmp_path / "tier", {"cleaner": {"keyless_records": "drop"}}), case.params["now"])


def reads_exports(kafka: Kafka, log_dir: Path, cli: TierCli, now: int) -> None:
    original = kafka.read(log_dir)
    cli.bring(log_dir)
    before = cli.export(cli.folder / "before")
    for recover in (False, True):
        answer = kafka.read(before, recover=recover)
        for what in ("log_end_offset", "last_stable_offset", "read_committed", "read_uncommitted"):
            assert answer[what] == original[what], what
    row = cli.run("--now", now)
    assert row["status"] == "cleaned"
    after = cli.export(cli.folder / "after")
    for recover in (False, True):
        answer = kafka.read(after, recover=recover)
        assert answer["log_end_offset"] == original["log_end_offset"]
        assert answer["last_stable_offset"] == original["last_stable_offset"]
        assert latest(answer) == latest(original)
        written = {record[0]: record for record in original["read_committed"]}
        for record in answer["read_committed"]:
            expected = written[record[0]]
            # Entries of magic 0 inside a wrapper of magic 1 get the wrapper's time, from Kafka's cleaner too.
            assert record == expected or (expected[1] == -1 and [record[0], -1, *record[2:]] == expected)
        assert answer["producers"] == original["producers"]


def latest(answer: dict[str, Any]) -> dict[str, str]:
    view: dict[str, str] = {}
    for _, _, key, value, _ in answer["read_committed"]:
        if key is not None and value is not None:
            view[key] = value
        elif key is not None:
            view.pop(key, None)
    return view
