"""What brokers had tiered, as log directories: imported and exported it reads as their consumers read it, and compacted the same."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.golden_cases import names, unpack
from tests.support.tier_cli import TierCli, batches_of, latest, visible

PLAIN = ("plain", "plain-kafka-3.9.2", "custom-metadata", "interrupted")
"""The captures of Aiven's plug-in whose .log objects are neither compressed nor encrypted."""


@pytest.mark.parametrize("version", names("tiered"))
def test_a_tier_of_local_tiered_storage(version: str, tmp_path: Path) -> None:
    case = unpack("tiered", tmp_path) / version
    log_dir = as_log_directory(next((case / "tier").iterdir()), tmp_path / "log")
    committed = [read(record) for record in lines(case / "read_committed.jsonl")]
    uncommitted = [read(record) for record in lines(case / "read_uncommitted.jsonl")]
    reads_the_same(log_dir, committed, uncommitted, tmp_path)


@pytest.mark.parametrize("name", [name for name in names("aiven") if name in PLAIN])
def test_a_tier_of_aivens_plug_in(name: str, tmp_path: Path) -> None:
    case = unpack("aiven", tmp_path) / name
    logs = {path for path in (case / "objects").rglob("*.log") if path.with_suffix(".rsm-manifest").exists()}
    log_dir = tmp_path / "log"
    log_dir.mkdir()
    for path in logs:
        shutil.copy(path, log_dir / f"{path.name[:20]}.log")
    records = lines(case / "records.jsonl")
    end = max(batch.last_offset for batch in batches_of(log_dir))
    records = [record for record in records if record["offset"] <= end]
    committed = [read(record) for record in records if record.get("committed", True)]
    reads_the_same(log_dir, committed, [read(record) for record in records], tmp_path)


def reads_the_same(log_dir: Path, committed: list[Any], uncommitted: list[Any], scratch: Path) -> None:
    assert len(uncommitted) > len(committed) > 500
    cli = TierCli(scratch / "tier", {"cleaner": {"segment_bytes": 200_000, "keyless_records": "drop"}})
    cli.bring(log_dir)
    exported = cli.export(scratch / "exported")
    everything = [r for batch in batches_of(exported) if not batch.control for r in batch.records]
    assert [seen((r.offset, r.timestamp, r.key, r.value, r.headers)) for r in everything] == uncommitted
    # A broker tells its consumers of aborted transactions from the index alone; some of the captured ones had lost entries.
    told = [seen(record) for record in visible(exported)]
    assert told == [seen(record) for record in visible(exported, by_index=True)]
    # What is not decided at the tier's end its consumers could read because the broker's local log went on.
    assert told == committed[: len(told)]
    assert len(committed) - len(told) < 30

    row = cli.run()
    assert row["status"] == "cleaned"
    after = cli.export(scratch / "after")
    assert row["records_kept"] < row["records_read"]
    assert latest(after) == latest(exported)
    kept = visible(after)
    assert kept == visible(after, by_index=True)
    assert {seen(record) for record in kept} <= set(committed)
    assert {record[2]: record[0] for record in kept} == {record[2]: record[0] for record in visible(exported) if record[2] is not None}
    assert cli.do("verify")["ok"]


def as_log_directory(tier: Path, target: Path) -> Path:
    """``<base>-<uuid>.<suffix>`` -> a broker's names; a remote segment's snapshot is the one at its end."""
    target.mkdir()
    bases = sorted({int(path.name[:20]) for path in tier.iterdir()})
    after = dict(pairwise(bases))
    for path in tier.iterdir():
        base, suffix = int(path.name[:20]), path.suffix
        if suffix == ".leader_epoch_checkpoint":
            if base == bases[-1]:
                shutil.copy2(path, target / "leader-epoch-checkpoint")
        elif suffix != ".snapshot":
            shutil.copy2(path, target / f"{base:020}{suffix}")
        elif base in after:
            shutil.copy2(path, target / f"{after[base]:020}.snapshot")
    return target


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(record: dict[str, Any]) -> tuple[object, ...]:
    """Offset, timestamp, key, SHA-1 of the value, headers."""
    value = record.get("value_sha1") or digest(decoded(record.get("value")))
    headers = tuple((name, decoded(content)) for name, content in record.get("headers", ()))
    return record["offset"], record["timestamp"], decoded(record["key"]), value, headers


def seen(record: tuple[int, int, bytes | None, bytes | None, tuple[tuple[bytes, bytes | None], ...]]) -> tuple[object, ...]:
    offset, timestamp, key, value, headers = record
    return offset, timestamp, key, digest(value), tuple((name.decode(), content) for name, content in headers)


def decoded(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def digest(value: bytes | None) -> str | None:
    return None if value is None else hashlib.sha1(value).hexdigest()
