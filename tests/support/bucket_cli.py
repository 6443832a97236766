"""The command line on a tier in a bucket, and time that passes by itself while a store is asked again and again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compactor.storage import options
from compactor.storage.retrying import FirstContact, Retrier
from compactor.storage.settings import Retries
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_server import Bucket
from tests.support.tier_cli import Answer, TierCli


class BucketCli(TierCli):
    """``direct`` reaches the bucket where ``bucket`` goes through a proxy."""

    def __init__(self, folder: Path, bucket: Bucket, direct: str = "", **sections: dict[str, Any]) -> None:
        self.bucket = bucket.behind(direct or bucket.server.endpoint)
        endpoint = {"endpoint_url": bucket.server.endpoint, "region": bucket.server.region}
        super().__init__(folder, {"tier": {"url": bucket.url}, "s3": endpoint, **sections})

    def verified(self) -> Answer:
        """Without the proxy, whatever that is up to."""
        server = self.bucket.server
        self.settings["s3"] = self.settings["s3"] | {"endpoint_url": server.endpoint}
        return super().verified()

    def objects(self) -> dict[str, bytes]:
        """Everything below the tier, by key."""
        client, root = self.bucket.server.client(), f"{self.bucket.prefix}/"
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket.name, Prefix=root)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {key[len(root) :]: client.get_object(Bucket=self.bucket.name, Key=key)["Body"].read() for key in keys}

    def put(self, key: str, data: bytes) -> None:
        """What no part of the service would do: an object is written over."""
        self.bucket.server.client().put_object(Bucket=self.bucket.name, Key=f"{self.bucket.prefix}/{key}", Body=data)

    def remove(self, key: str) -> None:
        self.bucket.server.client().delete_object(Bucket=self.bucket.name, Key=f"{self.bucket.prefix}/{key}")


def through(folder: Path, proxied: tuple[FaultProxy, Bucket]) -> BucketCli:
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

        def retrier(policy: Retries, contact: FirstContact | None = None) -> Retrier:
            return Retrier(policy, clock=lambda: self.seconds, sleep=self.pause, contact=contact or FirstContact())

        monkeypatch.setattr(options, "Retrier", retrier)

    def pause(self, seconds: float) -> None:
        self.seconds += seconds
        if self.seconds >= self.until:
            self.then()


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> Minutes:
    return Minutes(monkeypatch)


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without long pauses."""
    policy = Retries(deadline_s=60, base_s=0.002, cap_s=0.05)
    monkeypatch.setattr(options, "Retrier", lambda *_, **__: Retrier(policy))
