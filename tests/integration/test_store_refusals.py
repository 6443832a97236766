"""One thing that a store refuses: it is named as the vendor names it, it ends at the partition that needs it, and nothing is lost."""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Callable
from pathlib import Path

import botocore.compat
import pytest

from compactor.errors import CannotCopy
from compactor.storage.port import ComposeSource, FileRange, ObjectRangeToCopy
from compactor.storage.settings import RetrySettings, TransferSettings
from tests.builders import log_of
from tests.integration.test_s3_bad_input import BYSTANDER, VICTIM, Scene
from tests.support.bucket_cli import BucketCli, through
from tests.support.cloud_servers import AnyBucket, CloudBucket
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import Bucket
from tests.support.servers import ON_ALL_SERVERS, ON_ALL_SERVERS_IN_TIME

PART = 5 << 20
QUICK = RetrySettings(deadline_s=5, base_s=0.001, cap_s=0.02)
PERMISSIONS = {
    "s3": {"put": "s3:PutObject", "get": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"},
    "gs": {
        "put": "storage.objects.create",
        "get": "storage.objects.get",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    "az": {"put": "blobs/write", "get": "blobs/read, SAS permission r", "list": "SAS permission l", "delete": "blobs/delete"},
    "hdfs": {
        "put": "w and x on the directory",
        "get": "r on the file",
        "list": "r and x on the directory",
        "delete": "w and x on the directory",
    },
}
"""What each kind of request needs, by scheme."""
FINDINGS = {
    "put": {"cannot-write", "cannot-overwrite"},
    "get": {"cannot-read"},
    "list": {"cannot-list"},
    "delete": {"cannot-delete"},
}


@ON_ALL_SERVERS
def test_config_check_names_the_one_permission_that_is_missing(tmp_path: Path, proxied_bucket: tuple[FaultProxy, AnyBucket]) -> None:
    proxy, bucket = proxied_bucket
    cli = through(tmp_path / "cli", proxied_bucket)
    for request, kinds in FINDINGS.items():
        proxy.faults = [Fault("denied", (request,))]
        answer = cli.ask("config", "check")
        assert answer.code == 5
        found = {problem["kind"]: problem for problem in answer.document["problems"] if problem["severity"] == "error"}
        is_read_back = request == "get" and bucket.url.startswith("hdfs:")  # before it counts as written
        assert found.keys() == (FINDINGS["put"] if is_read_back else kinds), request
        for problem in found.values():
            assert "access denied" in problem["detail"]
        assert PERMISSIONS[bucket.url.partition(":")[0]][request] in found[min(found, key=len)]["hint"]


@pytest.fixture
def scene(tmp_path: Path, proxied_bucket: tuple[FaultProxy, AnyBucket]) -> Scene:
    return Scene(tmp_path, proxied_bucket)


@ON_ALL_SERVERS_IN_TIME
def test_what_is_refused_for_one_partition_ends_at_that_partition(scene: Scene) -> None:
    """Reading, writing and deleting, one after the other, of the victim's objects only."""
    for request in ("get", "put"):
        scene.proxy.faults = [Fault("denied", (request,), match=f"{VICTIM}/.*log$")]
        answer, victim, bystander = scene.run()
        assert (answer.code, victim["status"]) == (5, "quarantined")
        assert bystander["status"] in ("cleaned", "nothing_to_do")
        assert re.search(rf"cannot (read|write) {re.escape(scene.cli.bucket.url)}/{VICTIM}/.*access denied", victim["reason"])
        scene.unharmed()
    scene.calm()
    scene.cli.set(publish={"orphan_age_ms": 0})
    assert scene.run()[1]["status"] in ("cleaned", "resumed")
    scene.proxy.faults = [Fault("denied", ("delete",), match=rf"{VICTIM}/|\?delete")]  # S3 deletes many objects by one request
    retired = scene.cli.ask("retire", "--now", 4 * 10**12, "--force-now")  # a server's clock may be behind
    assert retired.code == 5
    assert not [key for key in retired.document["deleted"] if key.startswith(VICTIM)]
    assert [key for key in retired.document["deleted"] if key.startswith(BYSTANDER)] or scene.cli.bucket.url.startswith("s3:")
    assert re.search("cannot delete .*access denied", retired.stderr)
    scene.calm()
    scene.cli.retire_everything()
    assert scene.view()[1] == scene.before[1]


def test_copies_that_azure_refuses_are_sent_instead(azure_container: CloudBucket, tmp_path: Path) -> None:
    """As the firewall of an account does it, which lets the service not read from itself."""
    with FaultProxy(azure_container.endpoint).running() as proxy:
        store = azure_container.behind(proxy.url).open(transfers=TransferSettings(part_bytes=PART), retries=QUICK)
        store.create("source", b"x" * PART)
        (tmp_path / "local").write_bytes(b"end")
        pieces: list[ComposeSource] = [ObjectRangeToCopy("source", 0, PART, store.head("source").etag), FileRange(tmp_path / "local", 0, 3)]
        proxy.faults = [Fault("denied", ("copy",))]
        with pytest.raises(CannotCopy, match="cannot copy az://.*/source: .*access denied"):
            store.compose("composed", pieces)
        assert (store.server_copy_limits, [info.key for info in store.list("")]) == (None, ["source"])


@pytest.fixture
def versity_cli(versity_bucket: Bucket, tmp_path: Path) -> BucketCli:
    """A tier with a partition that is due, on a server that checks signatures."""
    cli = BucketCli(tmp_path / "cli", versity_bucket)
    log = log_of("a=1 b=1; /; a=2")
    cli.bring(log.write(tmp_path / "log"))
    return cli


def assert_refused_in_one_line(cli: BucketCli, says: str, advises: str) -> None:
    for command in (["topics"], ["run", "--force"], ["verify"]):
        answer = cli.ask(*command)
        assert answer.code == 5, answer
        (line,) = answer.remarks
        assert re.search(says, line), line
        assert advises in line
    checked = cli.ask("config", "check")
    assert checked.code == 5
    assert re.search(says, checked.document["problems"][0]["detail"])


@pytest.mark.slow
@pytest.mark.damages  # nobody signs for this region
def test_another_region_than_the_servers_is_named(versity_cli: BucketCli) -> None:
    objects = versity_cli.objects()
    versity_cli.set(s3={"region": "eu-west-1"})
    assert_refused_in_one_line(versity_cli, r"signed for another region \(us-east-1\)", "Set [s3] region")
    versity_cli.set(s3={"region": "us-east-1"})
    assert versity_cli.objects() == objects
    assert versity_cli.run()["status"] == "cleaned"


@pytest.mark.slow
def test_a_clock_that_is_wrong_is_named(versity_cli: BucketCli) -> None:
    really: Callable[..., dt.datetime] = botocore.compat.get_current_datetime

    def late(*, remove_tzinfo: bool = True) -> dt.datetime:
        return really(remove_tzinfo=remove_tzinfo) - dt.timedelta(minutes=40)

    objects = versity_cli.objects()
    with pytest.MonkeyPatch.context() as patch:
        for module in [module for name, module in sys.modules.items() if name.startswith("botocore")]:
            if hasattr(module, "get_current_datetime"):
                patch.setattr(module, "get_current_datetime", late)
        assert_refused_in_one_line(versity_cli, r"clocks of this machine and of the store differ too much \(here .*, there .*\)", "NTP")
    assert versity_cli.objects() == objects
    assert versity_cli.run()["status"] == "cleaned"
