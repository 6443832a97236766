"""A consumer that continues where the tier ends, at brokers that have compacted what follows: deletes may be missing, and it is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from typing_extensions import override

from compactor.access.tier import Tier
from compactor.consumer import ConsumerOptions, TieredConsumer
from compactor.features.consumer.group import FetchResult
from compactor.features.consumer.sources import Mode
from compactor.read.records import Place
from tests.builders import LogBuilder, log_of
from tests.features.consumer.test_consumer import import_log
from tests.support.plain_broker import PlainBroker
from tests.support.spark_tier import NAME, Twins
from tests.support.tier_cli import batches_of

pytestmark = [pytest.mark.usefixtures("unsynced"), pytest.mark.quick]


@dataclass
class CompactingBroker(PlainBroker):
    """A broker whose client reports the offset that is missing; ``reports`` counts how often."""

    missing: int = -1
    reports: int = 0

    @override
    def fetch_messages(self, limit: int, timeout_s: float) -> FetchResult:
        found = super().fetch_messages(limit, timeout_s)
        if not found.messages or self.missing < 0:
            return found
        self.reports += 1
        return FetchResult(found.messages, compacted={self.name: self.missing})


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    """It holds ``k0=v1``; the tombstone at offset 2 came later."""
    made = Twins(tmp_path / "twins").local
    log = log_of("k0=v1 a=1")
    import_log(made, log.write(tmp_path / "before"))
    return made


@pytest.fixture
def broker(tmp_path: Path) -> CompactingBroker:
    log = LogBuilder()
    log.put("a=1", offsets=(1,))
    log.add("+1; b=1 c=1")
    return CompactingBroker(NAME, list(batches_of(log.write(tmp_path / "cleaned"))), missing=2)


def read(tier: Tier, broker: PlainBroker, mode: Mode, reset: Literal["earliest", "error"], first: int = 0) -> tuple[list[str], int]:
    """What comes, in words, and the position."""
    options = ConsumerOptions(mode=mode, offset_reset=reset, refresh_s=0.001)
    with TieredConsumer(tier, broker, options) as consumer:
        consumer.assign([Place(*NAME, first)])
        found = [message for _ in range(40) for message in consumer.consume(10, timeout=0.01)]
        (place,) = consumer.position([Place(*NAME)])
    words = []
    for message in found:
        error = message.error()
        words.append(f"{message.offset()}: {error.name()}" if error else f"{message.offset()}: {(message.key() or b'').decode()}")
    return words, place.offset


def test_it_is_told_and_reads_on(tier: Tier, broker: CompactingBroker) -> None:
    assert read(tier, broker, "remote_preferred", "earliest") == (["0: k0", "1: a", "2: OFFSET_OUT_OF_RANGE", "3: b", "4: c"], 5)


def test_with_error_the_position_stays(tier: Tier, broker: CompactingBroker) -> None:
    assert read(tier, broker, "remote_preferred", "error") == (["0: k0", "1: a", "2: OFFSET_OUT_OF_RANGE"], 2)
    assert broker.reports > 1, "it is asked again, and told once"


def test_what_the_broker_has_by_itself_is_as_in_kafka(tier: Tier, broker: CompactingBroker) -> None:
    broker.start = 1
    assert read(tier, broker, "kafka_preferred", "error", first=1) == (["1: a", "3: b", "4: c"], 5)
    assert read(tier, broker, "kafka_only", "error", first=1) == (["1: a", "3: b", "4: c"], 5)


def test_a_position_after_the_tiers_end_was_not_read_from_the_tier(tier: Tier, broker: CompactingBroker) -> None:
    assert read(tier, broker, "remote_preferred", "error", first=3) == (["3: b", "4: c"], 5)
