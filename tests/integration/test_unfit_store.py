"""A store that ignores conditional requests is refused before the first record, by every command that would write one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from compactor.errors import StoreError
from compactor.storage.schemes import store_kind
from compactor.web.console import RequestRouter
from compactor.web.pages import AgentPages
from tests.builders import log_of
from tests.support.bucket_cli import BucketCli, through
from tests.support.cloud_servers import AnyBucket
from tests.support.fault_proxy import CONDITIONS, FaultProxy
from tests.support.servers import ON_SERVERS_THAT_SIGN_NOTHING
from tests.support.side_broker import SideScene, settle

pytestmark = ON_SERVERS_THAT_SIGN_NOTHING


@pytest.fixture
def proxy(proxied_bucket: tuple[FaultProxy, AnyBucket]) -> FaultProxy:
    return proxied_bucket[0]


@pytest.fixture
def cli(tmp_path: Path, proxied_bucket: tuple[FaultProxy, AnyBucket]) -> BucketCli:
    return through(tmp_path / "cli", proxied_bucket)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    made = log_of("a=1 b=2; /; a=3")
    return made.write(tmp_path / "orders-0")


def forget(cli: BucketCli) -> None:
    """The next process is another machine's."""
    shutil.rmtree(cli.folder / "state")


def creates(proxy: FaultProxy) -> int:
    return sum(not CONDITIONS.isdisjoint(headers) for _, headers in proxy.headers)


def test_import_is_refused_and_nothing_is_written(cli: BucketCli, proxy: FaultProxy, log: Path) -> None:
    proxy.strip = CONDITIONS
    for _ in range(2):  # what went badly is not remembered
        answer = cli.ask("import", log, "--topic", "orders", "--partition", 0)
        assert answer.code == StoreError.exit_code
        assert f"{cli.bucket.url}/.tiered-compactor ignores conditional requests" in answer.error["message"]
        assert "Two compactors would lead at once" in answer.error["hint"]
        assert cli.objects() == {}
    proxy.strip = set()
    cli.bring(log)


def test_a_round_is_refused_where_the_store_is_another_one_now(cli: BucketCli, proxy: FaultProxy, log: Path) -> None:
    """As after a copy of the bucket, with all that lies in it."""
    cli.bring(log)
    cli.do("config", "check")
    before = cli.objects()
    forget(cli)
    proxy.strip = CONDITIONS
    answer = cli.ask("run", "--force")
    assert answer.code == StoreError.exit_code
    assert "ignores conditional requests" in str(answer)
    assert cli.objects() == before
    proxy.strip = set()
    assert cli.run()["status"] == "cleaned"


@pytest.mark.damages
def test_the_agent_is_refused(tmp_path: Path, proxy: FaultProxy, proxied_bucket: tuple[FaultProxy, AnyBucket], cli: BucketCli) -> None:
    scene = SideScene.in_folder(tmp_path / "side")
    scene.tier.cli.set(**proxied_bucket[1].sections())
    proxy.strip = CONDITIONS
    agent = scene.agent()
    settle(agent)
    status, _, why, *_ = RequestRouter(AgentPages(agent.status), agent.loop_age_ms, 1000).respond_to_request("/readyz")
    assert status == 503
    assert "ignores conditional requests" in why.decode()
    assert cli.objects() == {}


def test_a_store_that_passed_is_remembered_on_this_machine_for_its_place(cli: BucketCli, proxy: FaultProxy, log: Path) -> None:
    cli.bring(log)
    (marker,) = (cli.folder / "state" / "stores").iterdir()
    bucket = re.findall("test-[0-9a-f]+", cli.bucket.url)[0]
    assert bucket in marker.read_text()
    counts = []
    for number, state in enumerate(("kept", "kept", "damaged", "gone")):
        if state == "damaged":
            marker.write_text(marker.read_text().replace(bucket, "another"))
        if state == "gone":
            forget(cli)
        before = creates(proxy)
        cli.do("pause", f"topic-{number}")
        counts.append(creates(proxy) - before)
    tried = 3 if store_kind(cli.bucket.url).can.multipart else 2
    assert [count - counts[1] for count in counts[1:]] == [0, tried, tried], "the first one may have to make a folder"
