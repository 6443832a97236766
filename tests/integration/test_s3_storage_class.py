"""The storage class of new objects, small ones and such as travel in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.storage.settings import Transfers
from tests.support.s3_server import Bucket


@pytest.mark.parametrize("wanted", ["", "STANDARD_IA"])
def test_new_objects_have_the_storage_class_that_is_set(wanted: str, s3_bucket: Bucket, tmp_path: Path) -> None:
    store = s3_bucket.open(transfers=Transfers(part_bytes=5 << 20, storage_class=wanted))
    (tmp_path / "large").write_bytes(bytes(6 << 20))
    store.create("small", b"x", {"sha256": "abc"})
    store.create_from_file("large", tmp_path / "large")
    store.put("hint", b"x")
    listed = s3_bucket.server.client().list_objects_v2(Bucket=s3_bucket.name)["Contents"]
    classes = {entry["Key"].rpartition("/")[2]: entry["StorageClass"] for entry in listed}
    assert classes == {"small": wanted or "STANDARD", "large": wanted or "STANDARD", "hint": "STANDARD"}
    assert store.get("large", 0, 3) == bytes(3)
