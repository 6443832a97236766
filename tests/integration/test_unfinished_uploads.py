"""Uploads that killed processes have left: `verify` names the old ones, `retire` frees them, and those at work are left alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from compactor.adapters.stores.s3 import MultipartUpload, S3Store
from compactor.config.settings import Settings
from compactor.storage.factory import open_store
from compactor.storage.keys import RESERVED
from compactor.storage.settings import TransferSettings
from tests.builders import log_of
from tests.support.bucket_cli import BucketCli
from tests.support.s3_server import Bucket
from tests.support.tier_cli import TierCli

HOUR = 3_600_000


def bring(cli: TierCli, tmp_path: Path) -> None:
    log = log_of("a=1 b=2")
    cli.bring(log.write(tmp_path / "orders-0"))


def notes(cli: TierCli) -> list[Any]:
    found = cli.do("verify")
    assert found["ok"]
    return [problem for problem in found["problems"] if problem["kind"] == "unfinished"]


def test_staged_files_of_a_directory(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "one")
    bring(cli, tmp_path)
    folder = cli.tier / RESERVED / "tmp"
    (folder / "1-old").write_bytes(b"half of a segment")
    (folder / "2-young").write_bytes(b"at work")
    two_hours_ago = time.time() - 7_200
    os.utime(folder / "1-old", (two_hours_ago, two_hours_ago))
    assert notes(cli) == []
    cli.do("retire")
    assert sorted(path.name for path in folder.iterdir()) == ["1-old", "2-young"]  # orphan_age_ms is a day
    cli.set(publish={"orphan_age_ms": HOUR})
    (note,) = notes(cli)
    assert note["object"].endswith(f"{RESERVED}/tmp/1-old")
    assert cli.do("retire", "--dry-run")["swept"] == [note["object"]]
    assert cli.do("retire")["swept"] == [note["object"]]
    assert [path.name for path in folder.iterdir()] == ["2-young"]
    cli.set(publish={"orphan_age_ms": 0})
    assert cli.do("retire")["swept"] == []  # an hour at least
    assert [path.name for path in folder.iterdir()] == ["2-young"]


def test_uploads_to_a_bucket(tmp_path: Path, s3_bucket: Bucket) -> None:
    """moto says of every upload that it is of 2010."""
    cli = BucketCli(tmp_path / "cli", s3_bucket)
    bring(cli, tmp_path)
    store = open_store(s3_bucket.url, settings=Settings(s3=s3_bucket.settings))
    assert isinstance(store, S3Store)
    MultipartUpload(store.requests, TransferSettings(), "orders-0/half", {})
    client = s3_bucket.server.client()
    client.create_multipart_upload(Bucket=s3_bucket.name, Key=f"{s3_bucket.prefix}s of others/half")
    (note,) = notes(cli)
    assert note["object"] == f"{s3_bucket.url}/orders-0/half"
    assert cli.do("retire")["swept"] == [note["object"]]
    assert notes(cli) == []
    (left,) = client.list_multipart_uploads(Bucket=s3_bucket.name)["Uploads"]
    assert left["Key"] == f"{s3_bucket.prefix}s of others/half"


def test_uploads_of_others_below_the_same_prefix_are_left_alone(tmp_path: Path, s3_bucket: Bucket) -> None:
    """Also such as look like a partition's that the tier does not hold."""
    cli = BucketCli(tmp_path / "cli", s3_bucket)
    bring(cli, tmp_path)
    client, root = s3_bucket.server.client(), s3_bucket.prefix
    control = f"{root}/.tiered-compactor"
    own = [f"{root}/orders-0/half", f"{control}/partitions/orders-0/scratch/half", f"{root}/.tiered-compactor/probe/half"]
    others = [f"{root}/half", f"{root}/backup/half", f"{root}/payments-0/half", f"{root}/backup/orders-0/half", f"{control}/half"]
    for key in [*own, *others]:
        client.create_multipart_upload(Bucket=s3_bucket.name, Key=key)
    assert sorted(cli.do("retire")["swept"]) == sorted(f"s3://{s3_bucket.name}/{key}" for key in own)
    left = client.list_multipart_uploads(Bucket=s3_bucket.name)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == sorted(others)


def test_a_tier_that_is_a_whole_bucket_frees_nothing_in_it_but_control_objects(tmp_path: Path, s3_bucket: Bucket) -> None:
    cli = BucketCli(tmp_path / "cli", s3_bucket, tier={"url": f"s3://{s3_bucket.name}"})
    bring(cli, tmp_path)
    client, own = s3_bucket.server.client(), ".tiered-compactor/partitions/orders-0/scratch/half"
    others = ["backup/half", "payments-0/half"]
    for key in [own, *others]:
        client.create_multipart_upload(Bucket=s3_bucket.name, Key=key)
    assert cli.do("retire")["swept"] == [f"s3://{s3_bucket.name}/{own}"]
    left = client.list_multipart_uploads(Bucket=s3_bucket.name)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == others
