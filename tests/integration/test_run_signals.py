"""How `run` ends when it is told to: the lease is given back, and the next run goes on."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deployment import Deployment, GrowingLog


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(600)  # a busy machine may have to compile first
@pytest.mark.parametrize(("sent", "code", "said"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")])
def test_a_run_that_is_told_to_end_gives_its_lease_back(
    tmp_path: Path, sent: signal.Signals, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}})
    log = GrowingLog("orders", 0, tmp_path, random.Random(1))
    deployment.do("import", log.write_part(32), "--topic", "orders", "--partition", 0)
    monkeypatch.setenv("TIERED_COMPACTOR__LIMITS__MAX_REQUESTS_PER_S", "6")  # it alone is slow
    running = deployment.start("run", "--force")
    monkeypatch.undo()
    try:
        until = time.monotonic() + 240
        while deployment.do("checkpoints", "show", log.name)["open_run"] is None:
            assert running.poll() is None, running.said()
            assert time.monotonic() < until, "it announced nothing"
            time.sleep(0.1)
        running.send_signal(sent)
        assert running.wait(60) == code, running.said()
    finally:
        running.put_down()
    assert running.said().splitlines()[-1] == said
    found = deployment.do("checkpoints", "show", log.name)
    assert found["lease"] is None
    assert found["open_run"] is not None
    (row,) = deployment.do("run")["partitions"]
    assert row["status"] == "resumed"
