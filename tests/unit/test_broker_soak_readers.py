"""The broker soak excuses a consumer out of range only where brokers raise the log start, and only below it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.broker_soak.cluster import AGING, RISKY
from tests.broker_soak.readers import EPOCHS_LOST, START_ROSE, Findings, Pass, ReadFailed, read_and_judge
from tests.broker_soak.traffic import WrittenPartition

LOG_START = 50
FIRST_KNOWN_EPOCH = 70
"""On broker 2, of which a replica's earlier leader epochs are lost."""
OUT_OF_RANGE = "OffsetOutOfRangeException"


@dataclass
class OneAnswer:
    """A client that answers every read the same. ``tiered_end`` and ``first_offset`` are the brokers' answers."""

    answer: Pass | ReadFailed
    name: str = "Java, read_committed"
    is_committed: bool = True

    def read(self, topic: str, partition: int) -> Pass:
        if isinstance(self.answer, ReadFailed):
            raise self.answer
        return self.answer

    def close(self) -> None: ...

    def tiered_end(self, written: WrittenPartition) -> int:
        return 1 << 62

    def first_offset(self, written: WrittenPartition) -> int:
        return LOG_START

    def first_known_epoch(self, written: WrittenPartition, broker: int) -> int:
        return FIRST_KNOWN_EPOCH if broker == 2 else -1


def findings_of(topic: str, answer: Pass | ReadFailed) -> Findings:
    findings, client = Findings(), OneAnswer(answer)
    read_and_judge(client, WrittenPartition(topic, 0), findings, client)
    return findings


@pytest.mark.parametrize("topic", [AGING, RISKY])
def test_position_below_a_raised_log_start_is_no_failure(topic: str) -> None:
    findings = findings_of(topic, ReadFailed(OUT_OF_RANGE, "out of range", LOG_START - 1))
    findings.judge_out_of_range([])
    assert not findings.errors


@pytest.mark.parametrize(("topic", "position"), [(RISKY, LOG_START), (AGING, LOG_START), (RISKY, -1), ("orders", LOG_START - 1)])
def test_other_positions_out_of_range_are_failures(topic: str, position: int) -> None:
    findings = findings_of(topic, ReadFailed(OUT_OF_RANGE, "out of range", position))
    findings.judge_out_of_range([])
    assert findings.errors == {f"Java: {OUT_OF_RANGE}": 1}


JAVA, LIBRDKAFKA = "leader=Optional[127.0.0.1:18037 (id: {} rack: null)], epoch=20}} is out of range", "Offset out of range (broker {})"


@pytest.mark.parametrize("text", [JAVA, LIBRDKAFKA])
@pytest.mark.parametrize(
    ("topic", "broker", "position", "is_excused"),
    [
        (RISKY, 2, FIRST_KNOWN_EPOCH - 1, True),
        (RISKY, 2, FIRST_KNOWN_EPOCH, False),
        (RISKY, 1, FIRST_KNOWN_EPOCH - 1, False),
        ("orders", 2, FIRST_KNOWN_EPOCH - 1, False),
    ],
)
def test_offset_whose_epoch_the_leader_has_lost_is_excused(text: str, topic: str, broker: int, position: int, *, is_excused: bool) -> None:
    findings = findings_of(topic, ReadFailed(OUT_OF_RANGE, text.format(broker), position))
    findings.judge_out_of_range([])
    assert findings.passes[EPOCHS_LOST] == is_excused
    assert bool(findings.errors) != is_excused


@pytest.mark.parametrize(("topic", "errors"), [("orders", {START_ROSE: 1}), (RISKY, {}), (AGING, {})])
def test_log_start_that_rises_by_itself_is_told(topic: str, errors: dict[str, int]) -> None:
    assert findings_of(topic, Pass(LOG_START, LOG_START, ())).errors == errors
