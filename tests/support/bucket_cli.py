"""The command line on a tier, in a directory or in a bucket, and time that passes by itself while a store is asked again and again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from compactor.storage import wrappers as options
from compactor.storage.settings import RetrySettings
from compactor.storage.wrappers import FirstAnswerTracker, Retrier
from tests.support.cloud_servers import AnyBucket
from tests.support.fault_proxy import FaultProxy
from tests.support.tier_cli import Answer, TierCli


class BucketCli(TierCli):
    """``direct`` reaches the bucket where ``bucket`` goes through a proxy."""

    def __init__(self, folder: Path, bucket: AnyBucket, direct: str = "", **sections: dict[str, Any]) -> None:
        self.bucket: Any = bucket.behind(direct or bucket.endpoint)
        self.store = self.bucket.open()
        super().__init__(folder, {**bucket.sections(), **sections})

    @override
    def verified(self) -> Answer:
        """Without the proxy, whatever that is up to."""
        self.settings.update({name: values for name, values in self.bucket.sections().items() if name != "tier"})
        return super().verified()

    def objects(self) -> dict[str, bytes]:
        """Everything below the tier, by key."""
        return {info.key: self.store.get(info.key) for info in self.store.list("")}

    def put(self, key: str, data: bytes) -> None:
        """What no part of the service would do: an object is written over."""
        self.store.put(key, data)

    def remove(self, key: str) -> None:
        self.store.delete([key])


def through(folder: Path, proxied: tuple[FaultProxy, AnyBucket]) -> BucketCli:
    """A tier whose commands go through the proxy."""
    proxy, bucket = proxied
    host, port = proxy.upstream
    return BucketCli(folder, bucket, f"http://{host}:{port}", publish={"grace_ms": 0})


class Minutes:
    """A clock that only retries move: every pause is over at once, and counts. ``then`` happens after ``until`` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.until = float("inf")
        self.then: Callable[[], None] = lambda: None

        def retrier(policy: RetrySettings, sleep: object = None, contact: FirstAnswerTracker | None = None) -> Retrier:
            return Retrier(policy, clock=lambda: self.seconds, sleep=self.pause, contact=contact or FirstAnswerTracker())

        monkeypatch.setattr(options, "Retrier", retrier)

    def pause(self, seconds: float) -> None:
        self.seconds += seconds
        if self.seconds >= self.until:
            self.then()


@pytest.fixture
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> TierCli:
    """The command line on a tier of its own in a directory, with the ``SETTINGS`` of the test's module."""
    return TierCli(tmp_path / "a tier", dict(getattr(request.module, "SETTINGS", {})))


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> Minutes:
    return Minutes(monkeypatch)


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without long pauses."""
    policy = RetrySettings(deadline_s=60, base_s=0.002, cap_s=0.05)
    monkeypatch.setattr(options, "Retrier", lambda *_, contact, **__: Retrier(policy, contact=contact))
