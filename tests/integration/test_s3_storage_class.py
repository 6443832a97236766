"""The storage class of new objects, small ones and such as travel in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.storage.settings import TransferSettings
from tests.builders import log_of
from tests.support.bucket_cli import BucketCli
from tests.support.s3_server import Bucket


@pytest.mark.parametrize("wanted", ["", "STANDARD_IA"])
def test_new_objects_have_the_storage_class_that_is_set(wanted: str, s3_bucket: Bucket, tmp_path: Path) -> None:
    store = s3_bucket.open(transfers=TransferSettings(part_bytes=5 << 20, storage_class=wanted))
    (tmp_path / "large").write_bytes(bytes(6 << 20))
    store.create("small", b"x", {"sha256": "abc"})
    store.create_from_file("large", tmp_path / "large")
    store.put("hint", b"x")
    listed = s3_bucket.server.client().list_objects_v2(Bucket=s3_bucket.name)["Contents"]
    classes = {entry["Key"].rpartition("/")[2]: entry["StorageClass"] for entry in listed}
    assert classes == {"small": wanted or "STANDARD", "large": wanted or "STANDARD", "hint": "STANDARD"}
    assert store.get("large", 0, 3) == bytes(3)


def test_segments_have_the_class_of_the_settings_and_control_records_do_not(s3_bucket: Bucket, tmp_path: Path) -> None:
    cli = BucketCli(tmp_path / "cli", s3_bucket)
    cli.set(s3={**s3_bucket.sections()["s3"], "storage_class": "GLACIER_IR"})
    log = log_of("a=1; /; a=2")
    cli.bring(log.write(tmp_path / "orders-0"))
    cli.do("run", "--force")
    listed = s3_bucket.server.client().list_objects_v2(Bucket=s3_bucket.name)["Contents"]
    classes = {(entry["Key"].endswith(".log"), entry["StorageClass"]) for entry in listed if "/.tiered-compactor/" not in entry["Key"]}
    assert (True, "GLACIER_IR") in classes
    assert {one for one in classes if one[0]} == {(True, "GLACIER_IR")}
    assert {entry["StorageClass"] for entry in listed if "/.tiered-compactor/" in entry["Key"]} == {"STANDARD"}
    (note,) = [problem for problem in cli.ask("config", "check").document["problems"] if problem["kind"] == "storage-class"]
    assert "at least 90 days" in note["detail"]
