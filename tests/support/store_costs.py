"""How many requests each use of a store takes, measured by a proxy that counts them. docs/stores.md shows COSTS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compactor.storage.port import FileRange, ObjectRangeToCopy, ObjectStore
from compactor.storage.settings import TransferSettings
from tests.support.cloud_servers import AnyBucket
from tests.support.fault_proxy import FaultProxy

PART = 5 << 20
PARTS = TransferSettings(part_bytes=PART, threads=3, list_page=100)
COSTS = {
    "create an object of one part (8 MiB)": {"s3": 1, "gs": 1, "az": 1, "hdfs": 10},
    "create an object of three parts": {"s3": 6, "gs": 5, "az": 5, "hdfs": 15},
    "read an object of one part, or a range": {"s3": 1, "gs": 1, "az": 1, "hdfs": 3},
    "read an object of three parts": {"s3": 3, "gs": 3, "az": 3, "hdfs": 7},
    "properties of an object": {"s3": 1, "gs": 1, "az": 1, "hdfs": 2},
    "list a page of 1000 objects": {"s3": 1, "gs": 1, "az": 1, "hdfs": 2},
    "delete ten objects": {"s3": 1, "gs": 10, "az": 10, "hdfs": 10},
    "compose an object of a copied and a new part": {"s3": 9, "az": 8},
}
"""Requests by use and scheme. The contract suite measures them on every server; repeated requests are not in them."""


def measured(bucket: AnyBucket, folder: Path) -> dict[str, int]:
    """Return the requests of each use in COSTS, as a proxy before a new bucket counts them."""
    (folder / "large").write_bytes(b"x" * (3 * PART))
    (folder / "small").write_bytes(b"y" * 9)
    found = {}
    with FaultProxy(bucket.endpoint).running() as proxy:
        store: ObjectStore = bucket.behind(proxy.url).open(transfers=PARTS)
        for number in range(10):
            store.create(f"ten/{number}", b"x")
        store.create_from_file("source", folder / "large")
        version = store.head("source").etag
        uses: list[Callable[[], object]] = [
            lambda: store.create("small", b"x"),
            lambda: store.create_from_file("large", folder / "large"),
            lambda: store.get("small"),
            lambda: store.download("large", folder / "out"),
            lambda: store.head("small"),
            lambda: list(store.list("")),
            lambda: store.delete([f"ten/{number}" for number in range(10)]),
        ]
        if store.server_copy_limits is not None:
            uses.append(
                lambda: store.compose("composed", [ObjectRangeToCopy("source", 0, PART, version), FileRange(folder / "small", 0, 9)])
            )
        for name, use in zip(COSTS, uses, strict=False):
            before = proxy.seen.requests.total()
            use()
            found[name] = proxy.seen.requests.total() - before
    return found
