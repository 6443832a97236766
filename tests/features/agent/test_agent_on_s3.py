"""Agent and consumer on a bucket over HTTP that is busy, breaks off or refuses: tried again after longer and longer pauses, and seen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from compactor.consumer import ConsumerOptions, Place, TieredConsumer
from compactor.errors import Refused
from compactor.features.agent.plan import MAX_UPLOAD_RETRY_MS, UPLOAD_RETRY_MS, UploadFailureReason
from compactor.storage import wrappers as options
from compactor.storage.settings import RetrySettings
from compactor.web.console import RequestRouter
from compactor.web.pages import AgentPages
from tests.plain_format import read_batches
from tests.support.cloud_servers import AnyBucket
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.servers import ON_SERVERS
from tests.support.side_broker import ORDERS, SideScene, metric, settle, stands

pytestmark = [ON_SERVERS, pytest.mark.damages]  # the proxy before the store is gone when the test is over

QUICK = RetrySettings(deadline_s=0.5, base_s=0.001, cap_s=0.01)


@dataclass
class Scene(SideScene):
    """The tier is a bucket behind a proxy."""

    proxy: FaultProxy

    def values(self, end: int) -> list[bytes | None]:
        return [record.value for raw in self.story.written[:end] for batch in read_batches(raw) for record in batch.records]


@pytest.fixture
def scene(proxied_bucket: tuple[FaultProxy, AnyBucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(options, "RetrySettings", lambda: QUICK)
    proxy, bucket = proxied_bucket
    made = Scene.in_folder(tmp_path, proxy=proxy)
    made.tier.cli.set(**bucket.sections())
    return made


def test_a_busy_store_is_asked_again_and_it_shows(scene: Scene) -> None:
    scene.proxy.faults = [
        Fault("slow_down", rate=0.2),
        Fault("internal", rate=0.1),
        Fault("reset", rate=0.1),
        Fault("lost", ("put",), rate=0.1),
    ]
    agent = scene.agent()
    for _ in range(20):
        if stands(settle(agent)) == (8, None):
            break
        scene.tier.hurry()
    assert stands(settle(agent)) == (8, None)
    assert agent.status().ready
    assert metric(agent, "tiered_compactor_repeated_requests_total") >= sum(scene.proxy.seen.faults.values()) / 2 > 0
    assert metric(agent, 'tiered_compactor_waited_seconds_total{reason="store"}') > 0
    scene.proxy.faults = []
    assert scene.tier.held() == scene.story.written[:8]
    assert scene.tier.cli.do("verify")["ok"]


@pytest.mark.parametrize("kind", ["denied", "expired", "slow_down"])
def test_a_bucket_that_takes_nothing(scene: Scene, kind: str) -> None:
    """Named; tried again after five seconds, then ten, and not in between; it goes on by itself."""
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.story.write(scene.replica, 4)
    scene.proxy.faults = [Fault(kind, ("put",))]
    pauses = []
    for failures in range(1, 4):
        watch = settle(agent)
        assert watch is not None
        assert (watch.position, watch.trouble, watch.failures) == (8, UploadFailureReason.STORE, failures)
        pauses.append(watch.retry_at_ms - agent.status().now_ms)
        asked = sum(scene.proxy.seen.requests.values())
        settle(agent)
        assert sum(scene.proxy.seen.requests.values()) == asked
        scene.tier.hurry(pauses[-1] + 1)
    assert [round(pause / UPLOAD_RETRY_MS) for pause in pauses] == [1, 2, 4]
    assert 4 * UPLOAD_RETRY_MS < MAX_UPLOAD_RETRY_MS
    status, _, why, *_ = RequestRouter(AgentPages(agent.status), agent.loop_age_ms, 1000).respond_to_request("/readyz")
    assert status == 503
    said = {"denied": "access denied", "expired": "expired|credentials are refused", "slow_down": "slowdown|answered (429|503)"}
    assert re.search(said[kind], why.decode().lower())  # each store in its own words
    assert metric(agent, 'tiered_compactor_agent_partitions_refused{reason="store"}') == 1
    assert metric(agent, 'tiered_compactor_agent_refusals_total{reason="store"}') == 3
    assert metric(agent, "tiered_compactor_agent_total_lag_segments") == 1
    scene.proxy.faults = []
    assert stands(settle(agent)) == (12, None)
    assert agent.status().ready
    assert metric(agent, 'tiered_compactor_agent_partitions_refused{reason="store"}') == 0
    assert scene.tier.held() == scene.story.written[:12]


def test_a_consumer_on_a_busy_store_has_every_record_once(scene: Scene) -> None:
    assert stands(settle(scene.agent())) == (8, None)
    scene.proxy.faults = [Fault("slow_down", rate=0.3), Fault("cut", ("get",), rate=0.1), Fault("reset", rate=0.1)]
    found: list[bytes | None] = []
    with TieredConsumer(scene.tier.cli.open(), options=ConsumerOptions(refresh_s=0.01)) as consumer:
        consumer.assign([Place(*ORDERS, 0)])
        while len(found) < 8:
            found += [message.value() for message in consumer.consume(3, timeout=1)]
        assert consumer.position([Place(*ORDERS)])[0].offset == 8
    assert found == scene.values(8)


def test_a_consumer_whose_credentials_end_goes_on_where_it_was(scene: Scene) -> None:
    assert stands(settle(scene.agent())) == (8, None)
    with TieredConsumer(scene.tier.cli.open(), options=ConsumerOptions(refresh_s=0.01)) as consumer:
        consumer.assign([Place(*ORDERS, 0)])
        found = [message.value() for message in consumer.consume(8, timeout=30)]
        scene.story.write(scene.replica, 4)
        assert stands(settle(scene.agent())) == (12, None)
        scene.proxy.faults = [Fault("denied", ("get", "list", "head"))]
        with pytest.raises(Refused, match="access denied"):
            consumer.consume(4, timeout=30)
        scene.proxy.faults = []
        while len(found) < 12:
            found += [message.value() for message in consumer.consume(4, timeout=1)]
    assert found == scene.values(12)
