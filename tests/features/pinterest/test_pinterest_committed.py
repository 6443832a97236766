"""read_committed on a tier of Pinterest's layout, which knows of no transaction but by its batches; and what `explain` may say there."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from compactor.access.tier import Tier
from compactor.consumer import ConsumerOptions, Place, TieredConsumer
from compactor.model.ids import TopicPartition
from compactor.read.ranges import read_record_blocks
from compactor.read.reading import last_stable_offset
from tests.features.pinterest.test_pinterest_tier import Upstream
from tests.plain_format import Batch
from tests.support.tier_cli import batches_of

ORDERS = TopicPartition("orders", 0)


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path)


def opened(upstream: Upstream) -> Tier:
    return upstream.cli.open()


def read(tier: Tier, *, committed: bool = True) -> list[int]:
    """Offsets of everything there is."""
    return [message.offset() for block in read_record_blocks(tier, ORDERS, read_committed=committed) for message in block.messages()]


def stable(tier: Tier) -> int:
    return last_stable_offset(tier, tier.open_partition_log(ORDERS).refresh())


def truth(batches: list[Batch]) -> tuple[list[int], int]:
    """The same in plain Python: (offsets of committed records below the first open transaction, that offset)."""
    began: dict[int, int] = {}
    pending: dict[int, list[int]] = {}
    committed: list[int] = []
    for batch in batches:
        offsets = [record.offset for record in batch.records]
        if batch.control:
            began.pop(batch.producer_id, None)
            ended = pending.pop(batch.producer_id, [])
            committed += ended if batch.records[0].key == b"\x00\x00\x00\x01" else []
        elif batch.transactional:
            began.setdefault(batch.producer_id, offsets[0])
            pending.setdefault(batch.producer_id, []).extend(offsets)
        else:
            committed += offsets
    bound = min(began.values(), default=batches[-1].last_offset + 1)
    return sorted(offset for offset in committed if offset < bound), bound


def test_it_ends_at_the_first_open_transaction_and_goes_on_once_it_is_decided(upstream: Upstream, tmp_path: Path) -> None:
    upstream.segment("a=1", "b=1")
    upstream.log.put("t=1", pid=7, txn=True)
    upstream.segment("c=1")
    upstream.segment("d=1")
    upstream.upload()
    tier = opened(upstream)
    assert (read(tier), stable(tier)) == ([0, 1], 2)
    assert read(tier, committed=False) == [0, 1, 2, 3, 4]
    exported = upstream.cli.do("export", "orders-0", tmp_path / "for a fresh cluster", "--leader-epoch-zero")
    assert (exported["end_offset"], len(exported["open_transactions"])) == (4, 1)
    upstream.log.abort(7)
    upstream.log.roll()
    upstream.upload()
    assert (read(tier), stable(tier)) == ([0, 1, 3, 4], 6)
    assert read(opened(upstream)) == [0, 1, 3, 4]


def test_a_consumer_waits_there(upstream: Upstream) -> None:
    upstream.segment("a=1", "b=1")
    upstream.log.put("t=1", pid=7, txn=True)
    upstream.segment("c=1")
    upstream.upload()
    found: list[int | None] = []
    with TieredConsumer(opened(upstream), options=ConsumerOptions(refresh_s=0.01, threads=1)) as consumer:
        consumer.assign([Place(*ORDERS, 0)])
        while len(found) < 2:
            found += [message.offset() for message in consumer.consume(1, timeout=30)]
        assert consumer.position([Place(*ORDERS)])[0].offset == 2
        upstream.log.commit(7)
        upstream.log.roll()
        upstream.upload()
        while len(found) < 4:
            found += [message.offset() for message in consumer.consume(1, timeout=30)]
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(6))
def test_random_transactions_as_a_plain_reader_has_them(upstream: Upstream, seed: int) -> None:
    """After each upload, by a reader that remembers what it has seen and by a fresh one."""
    dice = random.Random(seed)
    upstream.index_interval_bytes = 4096  # of an index of two entries the consumer's search does not end
    tier = opened(upstream)
    within: set[int] = set()
    for _ in range(5):
        for _ in range(dice.randint(1, 3)):
            for _ in range(dice.randint(1, 5)):
                producer = dice.choice((7, 8, 9))
                if dice.random() < 0.4:
                    upstream.log.put("plain=1")
                elif producer in within and dice.random() < 0.5:
                    upstream.log.end(producer, commit=dice.random() < 0.5)
                    within.discard(producer)
                else:
                    upstream.log.put("t=1", "t=2", pid=producer, txn=True)
                    within.add(producer)
            upstream.log.roll()
        upstream.upload()
        expected = truth(list(batches_of(upstream.folder / "log")))
        assert (stable(tier), stable(opened(upstream))) == (expected[1], expected[1])
        assert read(tier) == expected[0]


def test_batches_are_read_once_for_it(upstream: Upstream) -> None:
    upstream.log.put("t=1", pid=7, txn=True)
    upstream.log.roll()
    upstream.segment("a=1")
    upstream.upload()
    tier = opened(upstream)

    def asked() -> int:
        before = tier.counters.usage().requests.get("get", 0)
        assert stable(tier) == 0
        return tier.counters.usage().requests.get("get", 0) - before

    first, again = asked(), asked()
    assert again < first
    upstream.segment("b=1")
    upstream.upload()
    assert again < asked() <= again + 3  # the new segment, where it ends, and its index
    assert asked() == again


def test_a_transaction_that_nobody_can_end_any_more_holds_nobody_up(upstream: Upstream) -> None:
    """Its marker is in a hole, say: as in a round, what is older than producer_id_expiration_ms is abandoned."""
    upstream.log.put("t=1", pid=7, txn=True)
    upstream.log.roll()
    upstream.segment("a=1")
    folder = upstream.upload()
    for path in folder.iterdir():
        at = 1_000_000 + (50_000 if path.name > f"{0:020d}.timeindex" else 0)
        os.utime(path, (at, at))
    assert stable(opened(upstream)) == 0
    upstream.cli.set(cleaner={"producer_id_expiration_ms": 10_000_000})
    assert (stable(opened(upstream)), read(opened(upstream))) == (2, [0, 1])


def test_explain_promises_no_round(upstream: Upstream) -> None:
    upstream.segment("a=1", "b=1")
    upstream.segment("a=2", "b")
    upstream.log.put("a=3", pid=7, txn=True)
    upstream.log.abort(7)
    upstream.log.roll()
    upstream.upload()
    answers = [upstream.cli.do("explain", "orders-0", *asked) for asked in ([], ["--key", "a"], ["--key", "b"], ["--offset", "0"])]
    assert answers[0]["answer"] == "Nothing cleans it here: a tier of layout pinterest is only read."
    assert [fact["kind"] for fact in answers[0]["facts"]] == ["offsets", "only_read"]
    assert [fact["kind"] for fact in answers[1]["facts"]] == ["aborted", "latest", "superseded"]
    assert [fact["kind"] for fact in answers[2]["facts"]] == ["latest", "superseded"]
    said = " ".join([answer["answer"] for answer in answers] + [fact["text"] for answer in answers[1:] for fact in answer["facts"]])
    assert "next round" not in said
    assert "no round removes it here" in said
    assert "run" not in said.replace("truncated", "")
    plan = upstream.cli.ask("plan", output="table")
    assert "is only read" in plan.document + plan.stderr
