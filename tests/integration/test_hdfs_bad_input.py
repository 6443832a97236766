"""What goes wrong in a cluster of HDFS: a standby, safe mode, quotas, rights, an address that is not WebHDFS. On real namenodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

from compactor.adapters.stores.hdfs import HdfsStore
from tests.builders import log_of
from tests.integration.test_s3_bad_input import VICTIM, Scene
from tests.support.bucket_cli import BucketCli, Minutes, through
from tests.support.cloud_servers import CloudBucket, Namenodes, new_hdfs_directory, running_namenodes
from tests.support.fault_proxy import FaultProxy
from tests.support.servers import must_start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namenodes]:
    with must_start(), running_namenodes(tmp_path_factory.mktemp("namenodes")) as running:
        yield running


@pytest.fixture
def namenodes(running: Namenodes) -> Iterator[Namenodes]:
    """The first of the namenodes is active, before a test and after it."""
    running.turn("active")
    yield running
    running.turn("active")
    running.turn("writable")


@pytest.fixture
def proxied(namenodes: Namenodes) -> Iterator[tuple[FaultProxy, CloudBucket]]:
    with FaultProxy(namenodes.endpoint).running() as proxy:
        yield proxy, new_hdfs_directory(namenodes.endpoint).behind(proxy.url)


@pytest.fixture
def scene(tmp_path: Path, proxied: tuple[FaultProxy, CloudBucket]) -> Scene:
    return Scene(tmp_path, proxied)


def ask(bucket: CloudBucket, operation: str, path: str = "") -> None:
    """Make a request of an administrator. path: below the directory of the test."""
    folder = quote(bucket.url.removeprefix("hdfs://namenode") + path)
    with urlopen(Request(f"{bucket.endpoint}/webhdfs/v1{folder}?user.name=root&op={operation}", method="PUT")) as answer:
        answer.read()


def assert_one_line(cli: BucketCli, says: str, advises: str) -> None:
    """Every command ends with one line that says it, and `config check` finds it."""
    for command in (["topics"], ["run"], ["verify"], ["retire"]):
        answer = cli.ask(*command)
        (line,) = answer.remarks
        assert answer.code == 5, answer
        assert re.search(f"{re.escape(cli.bucket.url)}.*{says}", line), line
        assert advises in line
    checked = cli.ask("config", "check")
    assert checked.code == 5
    assert re.search(says, checked.document["problems"][0]["detail"])
    assert advises in checked.document["problems"][0]["hint"]


def test_a_standby_is_named_and_nothing_is_lost(scene: Scene, namenodes: Namenodes, minutes: Minutes) -> None:
    namenodes.turn("standby")
    assert_one_line(scene.cli, "StandbyException: Operation category READ is not supported in state standby", "name the active namenode")
    namenodes.turn("active")
    scene.unharmed()


def test_a_standby_that_becomes_active_is_waited_for(scene: Scene, namenodes: Namenodes, minutes: Minutes) -> None:
    """As in a failover, in the middle of a round."""

    def fail_over(request: str, place: str) -> None:
        if request == "put" and re.search(f"{VICTIM}/.*log$", place):
            scene.calm()
            namenodes.turn("standby")

    minutes.until, minutes.then = 20.0, lambda: namenodes.turn("active")
    scene.proxy.before = fail_over
    answer, victim, bystander = scene.run()
    assert (answer.code, victim["status"], bystander["status"]) == (0, "cleaned", "cleaned")
    assert 20 <= minutes.seconds < 60
    assert scene.view()[1] == scene.before[1]


def test_safe_mode_holds_writers_back_and_readers_go_on(scene: Scene, namenodes: Namenodes, minutes: Minutes) -> None:
    namenodes.turn("safe")
    assert scene.view() == scene.before
    answer = scene.cli.ask("run", "--force")
    assert answer.code == 5
    said = f"{answer.stderr} {answer.document}"
    assert "SafeModeException: " in said
    assert "Name node is in safe mode" in said
    assert "dfsadmin -safemode get" in said
    assert "dfsadmin -safemode get" in scene.cli.ask("config", "check").document["problems"][0]["hint"]
    namenodes.turn("writable")
    scene.unharmed()
    scene.recovers()


@pytest.mark.damages  # nobody can reach a tier there
def test_the_rpc_port_is_no_webhdfs(tmp_path: Path, namenodes: Namenodes, proxied: tuple[FaultProxy, CloudBucket]) -> None:
    cli = through(tmp_path / "cli", proxied)
    cli.set(hdfs={"webhdfs_url": namenodes.rpc})
    assert_one_line(cli, "what answers there is not WebHDFS", "not its RPC port")
    log = log_of("a=1")
    cli.refused("import", log.write(tmp_path / "log"), "--topic", "orders", "--partition", 0, code=5, says="not its RPC port")


QUOTA = "SETQUOTA&storagespacequota=9223372036854775807&namespacequota="
TROUBLES: dict[str, tuple[str, str, str, str]] = {
    "quota": (f"{QUOTA}2", f"{QUOTA}1000000", "NSQuotaExceededException", "Raise the quota"),
    "rights": ("SETPERMISSION&permission=555", "SETPERMISSION&permission=755", "AccessControlException.*access denied", "the rights rwx"),
}
"""What an administrator does to one partition's directory, how that is undone, what is said and advised."""


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_in_one_directory_ends_at_its_partition(scene: Scene, trouble: str) -> None:
    done, undone, says, advises = TROUBLES[trouble]
    ask(scene.cli.bucket, "SETOWNER&owner=compactor")
    for path in ("/orders-0", "/orders-1", "/.tiered-compactor", "/.object-store"):
        own_tree(scene.cli.bucket, path)
    scene.cli.set(hdfs={"user": "compactor"})
    ask(scene.cli.bucket, done, f"/{VICTIM}")
    answer, victim, bystander = scene.run()
    assert (answer.code, victim["status"], bystander["status"]) == (5, "quarantined", "cleaned")
    assert re.search(rf"cannot write {re.escape(scene.cli.bucket.url)}/{VICTIM}/.*{says}", victim["reason"])
    assert advises in answer.stderr
    scene.unharmed()
    ask(scene.cli.bucket, undone, f"/{VICTIM}")
    scene.recovers()


def own_tree(bucket: CloudBucket, path: str) -> None:
    """Give a directory and all below it to the user of the test."""
    store = bucket.open()
    assert isinstance(store, HdfsStore)
    ask(bucket, "SETOWNER&owner=compactor", path)
    for entry in store._client.list_folder(f"{path.removeprefix('/')}/"):
        if entry.name.endswith("/"):
            own_tree(bucket, f"/{entry.name.rstrip('/')}")
        else:
            ask(bucket, "SETOWNER&owner=compactor", f"/{entry.name}")
