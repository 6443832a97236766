"""The life of a tier on each kind of store: agent, daemon, consumer, undo, a round by hand, retire, verify."""

from __future__ import annotations

import signal
from pathlib import Path

from compactor.consumer import OFFSET_BEGINNING, ConsumerOptions, Place, TieredConsumer
from tests.support.cloud_servers import AnyBucket
from tests.support.deployment import Deployment
from tests.support.servers import ON_ALL_BUCKETS
from tests.support.side_broker import SideScene, settle, stands
from tests.support.tier_cli import contents, latest
from tests.support.waiting import wait_for

SEALED = 28


def clean_with_daemon(cli: Deployment) -> None:
    """Run a daemon until the partition is clean, and end it."""
    daemon = cli.start("daemon")

    def is_clean() -> bool:
        assert daemon.poll() is None, daemon.said()
        found = cli.do("checkpoints", "show", "orders-0")
        return bool(found["first_dirty_offset"] == SEALED)

    try:
        wait_for(is_clean)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(30) == 0, daemon.said()
    finally:
        daemon.put_down()


def read_with_consumer(cli: Deployment) -> dict[bytes, bytes]:
    """Return the newest value of each key, as a consumer reads them."""
    read: dict[bytes, bytes] = {}
    with TieredConsumer(cli.open(), options=ConsumerOptions(refresh_s=0.01)) as consumer:
        consumer.assign([Place("orders", 0, OFFSET_BEGINNING)])
        while consumer.position([Place("orders", 0)])[0].offset < SEALED:
            for message in consumer.consume(1000, timeout=1):
                key, value = message.key(), message.value()
                assert key is not None
                assert value is not None
                read[key] = value
    return read


@ON_ALL_BUCKETS
def test_an_agent_fills_a_tier_that_a_daemon_cleans_and_whose_round_is_undone(new_bucket: AnyBucket, tmp_path: Path) -> None:
    scene = SideScene.in_folder(tmp_path)
    cli = scene.tier.cli
    cli.set(**new_bucket.sections(), publish={"undo_window_ms": 3_600_000}, daemon={"interval_ms": 200, "listen": "127.0.0.1:0"})
    scene.story.write(scene.replica, 20)
    assert stands(settle(scene.agent())) == (SEALED, None)
    uploaded = cli.export(tmp_path / "uploaded")

    clean_with_daemon(cli)
    assert len(contents(cli.export(tmp_path / "cleaned"))) < len(contents(uploaded))
    assert read_with_consumer(cli) == latest(uploaded)

    assert cli.do("retire")["deleted"] == [], "undo needs what was replaced"
    cli.do("undo", cli.do("runs", "list")["runs"][0]["run_id"])
    assert contents(cli.export(tmp_path / "undone")) == contents(uploaded)

    assert cli.run()["status"] == "cleaned"
    assert read_with_consumer(cli) == latest(uploaded)
    assert cli.do("retire", "--now", 4 * 10**12, "--force-now")["deleted"]
    assert cli.do("verify") == {"ok": True, "problems": []}
