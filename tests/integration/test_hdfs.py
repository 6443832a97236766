"""What HDFS needs and no other store does: staged files, times of publication, inodes, snapshots, quotas, rights. On a mini cluster."""

from __future__ import annotations

import random
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from compactor.adapters.stores.hdfs import UNDATED_MS, HdfsClient, HdfsStore, _RequestBody
from compactor.config.sections import HdfsSettings
from compactor.config.settings import Settings
from compactor.errors import AlreadyExists, Refused, StoreError, Unavailable
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.storage.settings import RetrySettings
from compactor.storage.wrappers import RequestCounters
from tests.support.bucket_cli import BucketCli
from tests.support.canned_s3 import Answer, answering
from tests.support.cloud_servers import HDFS_ADMIN, HDFS_USER, CloudBucket
from tests.support.deployment import GrowingLog
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.tier_cli import latest

pytestmark = pytest.mark.slow

QUICK = RetrySettings(deadline_s=0.05, base_s=0.001, cap_s=0.002, first_answer_s=0.05)


class Killed(BaseException):
    """What ends a process here."""


@pytest.fixture
def store(hdfs_directory: CloudBucket) -> HdfsStore:
    store = hdfs_directory.open()
    assert isinstance(store, HdfsStore)
    return store


def ask_namenode(bucket: CloudBucket, operation: str, path: str = "", method: str = "PUT") -> bytes:
    """Send a request of an administrator. path: below the directory of the test."""
    folder = bucket.url.removeprefix("hdfs://namenode").replace(" ", "%20")
    request = urllib.request.Request(f"{bucket.endpoint}/webhdfs/v1{folder}{path}?user.name=root&op={operation}", method=method)
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


def as_user(bucket: CloudBucket, user: str) -> ObjectStore:
    settings = Settings(hdfs=HdfsSettings(webhdfs_url=bucket.endpoint, user=user))
    return open_store(bucket.url, settings=settings, retries=QUICK)


def files(store: HdfsStore, folder: str = "") -> dict[str, int]:
    """Modification times as the namenode holds them."""
    return {entry.name: entry.modified_ms for entry in store._client.list_folder(folder) if not entry.name.endswith("/")}


def killed_before_dating(store: HdfsStore, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: HdfsClient, key: str, inode: int) -> int:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(HdfsClient, "_set_publication_time", die)
        with pytest.raises(Killed):
            store.create(key, b"x", {"by": "one"})


class TestTimeOfPublication:
    def test_counts_from_the_rename_however_long_ago_the_file_was_staged(self, hdfs_directory: CloudBucket) -> None:
        with FaultProxy(hdfs_directory.endpoint).running() as proxy:
            store = hdfs_directory.behind(proxy.url).open()
            published: list[int] = []

            def stall(request: str, place: str) -> None:
                if place.endswith("a/slot") and request == "put":
                    time.sleep(3)
                    published.append(store.clock_ms())

            proxy.before = stall
            made = store.create("a/slot", b"x")
        assert len(published) == 2, "the first rename finds no folder"
        assert made.modified_ms >= published[1]
        assert {store.head("a/slot").modified_ms, next(store.list("")).modified_ms} == {made.modified_ms}

    def test_is_beyond_all_grace_until_a_reader_dates_what_a_crash_has_left(
        self, store: HdfsStore, hdfs_directory: CloudBucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in ("head", "list"):
            killed_before_dating(store, key, monkeypatch)
        ask_namenode(hdfs_directory, "SETPERMISSION&permission=755")
        assert all(modified_ms > UNDATED_MS for modified_ms in files(store).values())
        assert as_user(hdfs_directory, "reader").head("head").modified_ms > UNDATED_MS, "a reader may not write, and nothing is due for it"
        before = store.clock_ms()
        assert before <= store.head("head").modified_ms <= store.clock_ms() + 1000
        assert all(before <= info.modified_ms <= store.clock_ms() + 1000 for info in store.list(""))
        assert all(before <= modified_ms < UNDATED_MS for modified_ms in files(store).values())

    def test_of_a_later_object_is_not_touched_by_one_who_is_late(self, store: HdfsStore, monkeypatch: pytest.MonkeyPatch) -> None:
        killed_before_dating(store, "k", monkeypatch)
        late = next(entry for entry in store._client.list_folder("") if entry.name == "k")
        store.delete(["k"])
        made = store.create("k", b"another")
        with pytest.raises(StoreError):
            store._client._set_publication_time("k", late.inode)
        assert store.head("k").modified_ms == made.modified_ms


def test_an_answer_that_was_lost_after_the_rename_is_one_s_own_success(hdfs_directory: CloudBucket) -> None:
    with FaultProxy(hdfs_directory.endpoint).running() as proxy:
        store = hdfs_directory.behind(proxy.url).open(retries=RetrySettings(deadline_s=30, base_s=0.001, cap_s=0.02))
        store.create("a/first", b"x")
        proxy.faults = [Fault("lost", ("put",), match="a/k$", times=1)]
        assert dict(store.create("a/k", b"mine", {"by": "me"}).metadata) == {"by": "me"}
        assert proxy.seen.faults == {"lost": 1}
        with pytest.raises(AlreadyExists):
            store.create("a/k", b"mine", {"by": "me"})
        assert (store.get("a/k"), list(store.unfinished_uploads(""))) == (b"mine", [])


def test_a_file_that_arrives_cut_off_is_never_published(hdfs_directory: CloudBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = hdfs_directory.open(retries=QUICK)
    assert isinstance(store, HdfsStore)
    real = HdfsClient._request_with_redirect

    def cut(*words: object, body: object = None, **parameters: object) -> object:
        return real(*words, body=_RequestBody([b"half"], 4) if body else None, **parameters)  # type: ignore[arg-type]

    monkeypatch.setattr(HdfsClient, "_request_with_redirect", cut)
    with pytest.raises(Unavailable, match="4 bytes of 8 arrived"):
        store.create("k", b"complete")
    assert (list(store.list("")), list(store.unfinished_uploads(""))) == ([], [])


def test_bytes_that_arrive_damaged_are_sent_again(hdfs_directory: CloudBucket, tmp_path: Path) -> None:
    """WebHDFS takes no checksum with them, and HDFS keeps checksums of whatever arrives."""
    data = random.Random(3).randbytes(17 << 20)
    (tmp_path / "large").write_bytes(data)
    with FaultProxy(hdfs_directory.endpoint).running() as proxy:
        store = hdfs_directory.behind(proxy.url).open(retries=RetrySettings(deadline_s=60, base_s=0.001, cap_s=0.02))
        proxy.faults = [Fault("flip_sent", ("put",), match="staged/", times=2)]
        store.create("small", b"a control record")
        assert proxy.seen.faults == {"flip_sent": 2}
        proxy.faults = [Fault("flip_sent", ("put",), match="staged/", times=2)]
        store.create_from_file("large", tmp_path / "large")
        assert proxy.seen.faults == {"flip_sent": 4}
        assert (store.get("small"), store.get("large")) == (b"a control record", data)
        assert list(store.unfinished_uploads("")) == []


def test_retire_sweeps_what_a_crash_left_staged(hdfs_directory: CloudBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = BucketCli(tmp_path / "cli", hdfs_directory, publish={"grace_ms": 0, "orphan_age_ms": 0})
    cli.bring(GrowingLog("orders", 0, tmp_path / "logs", random.Random(1)).write_part(segments=2, batches=5))

    def die(self: HdfsClient, name: str, key: str, option: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(HdfsClient, "_rename_staged_file", die)
        patch.setattr(HdfsClient, "_delete_staged_file", lambda self, name: None)
        with pytest.raises(Killed):
            cli.store.create("orders-0/left", b"x")
    (left,) = cli.store.unfinished_uploads("")
    assert left.begun_ms <= cli.store.clock_ms() + 1000
    two_hours_ago = UNDATED_MS + left.begun_ms - 7_200_000
    ask_namenode(hdfs_directory, f"SETTIMES&modificationtime={two_hours_ago}", f"/{left.key}")
    assert cli.do("retire")["swept"] == [f"{hdfs_directory.url}/{left.key}"]
    assert list(cli.store.unfinished_uploads("")) == []
    assert cli.do("verify") == {"ok": True, "problems": []}


class TestKerberos:
    """Against a namenode that wants it, and Apache Kerby as KDC. Everything else about HDFS is tested without it."""

    @pytest.fixture
    def endpoint(self, kerberos_hdfs: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> str:
        endpoint, environment = kerberos_hdfs
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        Path(environment["KRB5CCNAME"].removeprefix("DIR:")).mkdir(exist_ok=True)
        return endpoint

    def bucket(self, endpoint: str, principal: str, folder: str) -> CloudBucket:
        settings = Settings(hdfs=HdfsSettings(webhdfs_url=endpoint, user=principal, kerberos=True))
        return CloudBucket(f"hdfs://namenode/{folder}", endpoint, settings)

    @pytest.mark.damages  # tickets are had within the test only
    def test_a_tier_is_imported_cleaned_retired_and_checked(self, endpoint: str, tmp_path: Path) -> None:
        cli = BucketCli(tmp_path / "cli", self.bucket(endpoint, HDFS_ADMIN, "kerberos/tier"), publish={"grace_ms": 0})
        cli.bring(GrowingLog("orders", 0, tmp_path / "logs", random.Random(1)).write_part(segments=2, batches=5))
        before = latest(cli.export(tmp_path / "before"))
        assert cli.run()["status"] == "cleaned"
        assert cli.retire_everything()
        assert latest(cli.export(tmp_path / "after")) == before
        data = random.Random(2).randbytes(11 << 20)
        (tmp_path / "large").write_bytes(data)
        cli.store.create_from_file("large", tmp_path / "large")
        cli.store.download("large", tmp_path / "read")
        assert (tmp_path / "read").read_bytes() == data
        cli.store.delete(["large"])

    def test_a_ticket_is_asked_for_once_and_not_for_each_request(self, endpoint: str) -> None:
        counters = RequestCounters()
        store = self.bucket(endpoint, HDFS_ADMIN, "kerberos/once").open(counters=counters)
        for _ in range(5):
            assert list(store.list("")) == []
        assert counters.usage().requests == {"list": 6}

    def test_what_is_missing_is_named(self, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def refusal(bucket: CloudBucket) -> Refused:
            with pytest.raises(Refused) as caught:
                bucket.open(retries=QUICK).create("k", b"x")
            return caught.value

        plain = CloudBucket("hdfs://namenode/tier", endpoint, Settings(hdfs=HdfsSettings(webhdfs_url=endpoint)))
        assert "set [hdfs] kerberos = true" in refusal(plain).hint
        assert "rights rwx" in refusal(self.bucket(endpoint, HDFS_USER, "kerberos")).hint
        stranger = refusal(self.bucket(endpoint, "stranger@EXAMPLE.COM", "kerberos"))
        assert "Kerberos gives no ticket for HTTP/localhost" in stranger.message
        assert "KRB5_CLIENT_KTNAME" in stranger.hint
        monkeypatch.delenv("KRB5_CLIENT_KTNAME")
        monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "no tickets"))
        assert "KRB5_CLIENT_KTNAME" in refusal(self.bucket(endpoint, "", "kerberos")).hint

    def test_a_kdc_that_does_not_answer_is_asked_again(self, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            kdc = f"127.0.0.1:{nobody.getsockname()[1]}"
            silent = f"[libdefaults]\ndefault_realm = EXAMPLE.COM\n[realms]\nEXAMPLE.COM = {{\nkdc = {kdc}\n}}\n"
            (tmp_path / "krb5.conf").write_text(silent)
            monkeypatch.setenv("KRB5_CONFIG", str(tmp_path / "krb5.conf"))
            monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "no tickets"))
            with pytest.raises(Unavailable, match="contact any KDC"):
                self.bucket(endpoint, HDFS_USER, "kerberos").open(retries=QUICK).get("k")


def test_a_directory_with_snapshots_promises_no_saving(store: HdfsStore, hdfs_directory: CloudBucket) -> None:
    store.create("k", b"x")
    assert (store.inspect_store_settings(0), store.does_delete_free_space()) == ([], True)
    ask_namenode(hdfs_directory, "ALLOWSNAPSHOT")
    assert store.does_delete_free_space(), "there is none yet"
    ask_namenode(hdfs_directory, "CREATESNAPSHOT")
    (finding,) = store.inspect_store_settings(0)
    assert (finding.severity, finding.kind, store.does_delete_free_space()) == ("warning", "snapshots", False)


def test_a_quota_and_missing_rights_say_what_to_change(store: HdfsStore, hdfs_directory: CloudBucket) -> None:
    store.create("k", b"x")
    refused = as_user(hdfs_directory, "stranger")
    for use in (lambda: refused.create("new", b"x"), lambda: refused.delete(["k"])):
        with pytest.raises(Refused, match="access denied") as caught:
            use()
        assert "the rights rwx on the directory" in caught.value.hint
    ask_namenode(hdfs_directory, "SETQUOTA&namespacequota=3&storagespacequota=9223372036854775807")
    with pytest.raises(Refused, match="QuotaExceeded") as caught:
        store.create("new", b"x")
    assert "Raise the quota" in caught.value.hint


def test_datanodes_that_cannot_be_reached_are_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        node = f"127.0.0.1:{held.getsockname()[1]}"
        with answering([Answer(307, b"", {"Location": f"http://{node}/webhdfs/v1/k?op=CREATE"})]) as canned:
            store = open_store("hdfs://namenode/tier", settings=Settings(hdfs=HdfsSettings(webhdfs_url=canned.url)), retries=QUICK)
            with pytest.raises(Unavailable, match=node.replace(":", ".*")) as caught:
                store.create("k", b"x")
    assert "must reach the datanodes" in caught.value.hint
