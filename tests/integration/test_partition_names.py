"""Partitions, topics and expressions as users name them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.deployment import Deployment, GrowingLog


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """orders-0 and orders-1, and orders.eu-0, whose name the expression ``orders.eu`` also matches."""
    folder = tmp_path_factory.mktemp("tier")
    made = Deployment(folder, {"cleaner": {"segment_bytes": 16_384}})
    for seed, (topic, partition) in enumerate((("orders", 0), ("orders", 1), ("orders.eu", 0), ("orders-eu", 0))):
        log = GrowingLog(topic, partition, folder, random.Random(seed))
        made.do("import", log.write_part(), "--topic", topic, "--partition", partition)
    return made


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("orders",), ["orders-0", "orders-1"]),
        (("orders-1", "orders"), ["orders-1", "orders-0"]),
        (("orders.eu",), ["orders.eu-0"]),
        (("orders-eu",), ["orders-eu-0"]),
        (("orders.*",), ["orders-0", "orders-1", "orders-eu-0", "orders.eu-0"]),
        ((".*-1",), ["orders-1"]),
    ],
)
def test_plan_takes_partitions_topics_and_expressions(deployment: Deployment, words: tuple[str, ...], names: list[str]) -> None:
    found = deployment.do("plan", *words)["partitions"]
    assert [f"{row['topic']}-{row['partition']}" for row in found] == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "order-0"), "the tier holds no partition order-0. Did you mean orders-0?"),
        (("wake", "ordrs"), "the tier holds no partition ordrs. Did you mean orders?"),
        (("runs", "list", "payments"), "the tier holds no partition payments. `topics` lists what it holds"),
        (("verify", "("), "the tier holds no partition (."),
        (("export", "orders", "out"), "orders has 2 partitions, and one is needed. Name one of orders-0, orders-1"),
    ],
)
def test_a_name_that_matches_nothing_is_refused_with_the_nearest_one(deployment: Deployment, words: tuple[str, ...], message: str) -> None:
    deployment.refused(*words, code=2, says=message)


def test_segments_list_shows_the_partitions_of_a_topic(deployment: Deployment) -> None:
    found = deployment.do("segments", "list", "orders")["segments"]
    assert {(segment["topic"], segment["partition"]) for segment in found} == {("orders", 0), ("orders", 1)}


def test_undo_of_a_partition_names_the_command_for_its_latest_round(deployment: Deployment, tmp_path: Path) -> None:
    assert "no round of orders-eu can be undone" in deployment.ask("undo", "orders-eu").stderr
    deployment.do("run", "--force", "orders-1")
    (run,) = deployment.do("runs", "list", "orders")["runs"]
    deployment.refused("undo", "orders", code=2, says=f"tiered-compactor undo {run['run_id']}")
    assert deployment.do("undo", run["run_id"])["status"] == "reverted"
