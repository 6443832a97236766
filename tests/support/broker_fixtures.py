"""Fixtures with real brokers. A test that asks for one is marked ``broker``; those of one cluster run in one worker, which owns it.

``broker``            one broker of 4.4.0 for all tests of a run: use a topic of your own, do not restart it
``broker_admin``      a ClusterAdmin for it
``told``              a TopicStory on it, tiered, for all tests of a run: read it, leave it as it is
``new_cluster``       ``new_cluster(version="4.4.0", brokers=1, users=..., settings=...)``: a cluster that the test may stop and break

A test that gets ``broker`` by ``request.getfixturevalue`` marks itself ``broker``.

Without Java and Maven they are skipped; with CI=true in the environment that is a failure. Those marked ``slow_broker`` (older
brokers, long ones) run only where a marker expression names that marker: ``make nightly`` (tests/support/selection.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.kafka_jars import DISTRIBUTION, BrokerUnavailable

if TYPE_CHECKING:  # every run of pytest loads this module; the clients cost half a second
    from tests.support.kafka_admin import ClusterAdmin
    from tests.support.kafka_story import TopicStory

VERSION = "4.4.0"


def started(version: str, directory: Path, **options: Any) -> KafkaCluster:
    """Skips, or fails in CI, where there is no broker to be had."""
    version = os.environ.get(DISTRIBUTION) or version
    try:
        prepare(version)
    except BrokerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to run the tests with a real broker: {error}", pytrace=False)
        pytest.skip(str(error))
    return KafkaCluster(version, directory, **options)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with started(VERSION, tmp_path_factory.mktemp("broker") / "shared cluster") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def broker_admin(broker: KafkaCluster) -> Iterator[ClusterAdmin]:
    from tests.support.kafka_admin import ClusterAdmin

    with ClusterAdmin(broker) as admin:
        yield admin


@pytest.fixture(scope="session")
def told(broker: KafkaCluster, broker_admin: ClusterAdmin) -> TopicStory:
    from tests.support.kafka_story import TopicStory

    story = TopicStory(broker, broker_admin, "told").create().tell(chapters=2)
    story.tiered()
    return story


@pytest.fixture
def new_cluster(tmp_path: Path) -> Iterator[Callable[..., KafkaCluster]]:
    with ExitStack() as stack:

        def make(version: str = VERSION, **options: Any) -> KafkaCluster:
            made = len(list(tmp_path.glob("cluster *")))
            return stack.enter_context(started(version, tmp_path / f"cluster {made}", **options))

        yield make
