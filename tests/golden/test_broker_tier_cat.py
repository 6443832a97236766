"""What a consumer gets out of tiers that brokers wrote is what the brokers' own consumers got, in both isolation levels."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from compactor.consumer import OFFSET_BEGINNING, ConsumerOptions, MessageLike, Place, TieredConsumer
from compactor.read.ranges import last_values
from compactor.views.checkpoints import read_only_copy
from tests.golden_cases import names
from tests.support.broker_metadata import broker_cli
from tests.support.broker_tiers import ORDERS, BrokerTier, aiven_tier, local_tier

CASES = [*(("kafka-local", name) for name in names("tiered")), *(("aiven", name) for name in names("aiven"))]


def expected(tier: BrokerTier, isolation: str, end: int) -> list[tuple[object, ...]]:
    if (tier.folder / "records.jsonl").exists():
        rows = [row for row in tier.records() if isolation == "read_uncommitted" or row.get("committed", True)]
    else:
        rows = [json.loads(line) for line in (tier.folder / f"{isolation}.jsonl").read_text().splitlines()]
    return [given(row) for row in rows if row["offset"] < end]


def given(row: dict[str, Any]) -> tuple[object, ...]:
    value = row.get("value_sha1") or digest(decoded(row.get("value")))
    return (
        row["offset"],
        row["timestamp"],
        decoded(row["key"]),
        value,
        [(name, decoded(content)) for name, content in row.get("headers", ())],
    )


def got(message: MessageLike) -> tuple[object, ...]:
    assert message.error() is None
    return message.offset(), message.timestamp()[1], message.key(), digest(message.value()), message.headers() or []


def decoded(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def digest(value: bytes | None) -> str | None:
    return None if value is None else hashlib.sha1(value).hexdigest()


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_as_the_brokers_consumers(layout: str, case: str, tmp_path: Path) -> None:
    written = local_tier(case, tmp_path) if layout == "kafka-local" else aiven_tier(case, tmp_path)
    cli = broker_cli(tmp_path / "control of it", written, layout)
    tier = read_only_copy(cli.open())
    end = tier.open_partition_log(ORDERS).refresh().end_offset + 1
    for isolation in ("read_committed", "read_uncommitted"):
        stable = last_values(tier, ORDERS, read_committed=isolation == "read_committed").next_offset
        assert end - 200 < stable <= end
        wanted = expected(written, isolation, stable)
        with TieredConsumer(tier, options=ConsumerOptions(isolation=isolation)) as consumer:
            consumer.assign([Place(*ORDERS, OFFSET_BEGINNING)])
            found: list[MessageLike] = []
            for _ in range(600):
                found += consumer.consume(len(wanted) - len(found), timeout=0.1)
                if len(found) >= len(wanted):
                    break
            assert [got(message) for message in found] == wanted
            assert consumer.poll(0.05) is None
        state = {row[2]: row[3] for row in wanted if row[2] is not None}
        restored = [
            message for block in last_values(tier, ORDERS, read_committed=isolation == "read_committed") for message in block.messages()
        ]
        assert len(restored) == len({message.key() for message in restored})
        assert {message.key(): digest(message.value()) for message in restored} == {k: v for k, v in state.items() if v is not None}
