"""`clean` gives what Kafka's cleaner gave: logs that a broker wrote for real clients, two rounds each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.judge import agrees
from tests.golden_cases import client_rounds, names
from tests.plain_format import Batch, read_batches


@pytest.mark.parametrize("parameters", ["keep", "drop"])
@pytest.mark.parametrize("name", names("clients"))
def test_clean_agrees_with_kafka_on_clients(name: str, parameters: str, client_cases: Path, tmp_path: Path) -> None:
    for number, each in enumerate(client_rounds(client_cases / name, parameters, tmp_path)):
        agrees(each, tmp_path / f"out{number}")


GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
XERIAL = b"\x82SNAPPY"


def batches(log_dir: Path) -> list[Batch]:
    return [batch for path in sorted(log_dir.glob("*.log")) for batch in read_batches(path.read_bytes())]


def bodies(found: list[Batch], codec: int) -> list[bytes]:
    """Return the compressed records of the batches of one codec."""
    return [batch.raw[61:] for batch in found if batch.codec == codec]


def test_platformatic_writes_epoch_and_sequence_without_a_producer_raw_snappy_and_null_headers(client_cases: Path) -> None:
    found = batches(client_cases / "platformatic" / "in")
    assert {(batch.producer_epoch, batch.base_sequence) for batch in found if batch.producer_id == -1} == {(0, 0)}
    assert any(batch.producer_id >= 0 for batch in found)
    assert {batch.codec for batch in found} == {0, GZIP, SNAPPY, LZ4}
    assert not any(body.startswith(XERIAL) for body in bodies(found, SNAPPY))
    assert any(value is None for batch in found for record in batch.records for _, value in record.headers)


def test_rskafka_writes_block_checksums_large_raw_blocks_and_frames_without_their_size(client_cases: Path) -> None:
    found = batches(client_cases / "rskafka" / "in")
    assert all(body[4] & 0x10 for body in bodies(found, LZ4))
    assert not any(body.startswith(XERIAL) for body in bodies(found, SNAPPY))
    assert max(sum(len(record.value or b"") for record in batch.records) for batch in found if batch.codec == SNAPPY) > 400_000
    assert {body[4] & 0xE0 for body in bodies(found, ZSTD)} == {0}


@pytest.mark.parametrize(("name", "epochs_grow"), [("java-0.11", False), *((name, True) for name in names("clients") if "streams" in name)])
def test_transactions_of_version_2_have_an_epoch_each(name: str, epochs_grow: bool, client_cases: Path) -> None:
    markers = [batch for batch in batches(client_cases / name / "in") if batch.control]
    producers = {(batch.producer_id, batch.producer_epoch) for batch in markers}
    assert len(markers) > 10
    assert len(producers) == (len(markers) if epochs_grow else 3)
