"""`config check` of a store: what it finds on good ones, and that it notices what it is there to notice."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
from typing_extensions import override

from compactor.adapters.stores import s3_requests
from compactor.adapters.stores.s3 import MultipartUpload, S3Store, read_bucket_deletion_settings
from compactor.errors import AlreadyExists, Refused, StoreError, Unavailable
from compactor.model.finding import Finding
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectInfo
from compactor.storage.probe import MARKER, ConditionalCreateCheck, find_unsafe_concurrent_creates, probe_store
from compactor.storage.settings import RetrySettings
from compactor.storage.wrappers import RequestCounters
from tests.builders import log_of
from tests.support.bucket_cli import BucketCli
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.memory_store import Clock, MemoryStore
from tests.support.s3_server import ROOT, Bucket, S3Server, running_moto

PREFIX = ".tiered-compactor/probe/"
QUICK = RetrySettings(deadline_s=10, base_s=0.001, cap_s=0.02)
DAY_MS = 86_400_000


def now() -> int:
    return int(time.time() * 1000)


def found(bucket: Bucket, **options: Any) -> dict[str, Finding]:
    return {finding.kind: finding for finding in probe_store(bucket.open(retries=QUICK, **options), now)}


def test_a_directory(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "tier"))
    assert probe_store(store, now) == []
    assert [info.key for info in store.list("")] == [PREFIX + MARKER]


@pytest.mark.parametrize("kind", ["moto", pytest.param("versitygw", marks=pytest.mark.slow)])
def test_a_good_bucket_is_raced_once(request: pytest.FixtureRequest, kind: str) -> None:
    bucket: Bucket = request.getfixturevalue("s3_bucket" if kind == "moto" else "versity_bucket")
    first, second = RequestCounters(), RequestCounters()
    findings = found(bucket, counters=first)
    # versitygw without a versioning directory does not know the question.
    assert set(findings) <= ({"versioning-unknown"} if kind == "versitygw" else set())
    assert [info.key for info in bucket.open().list("")] == [PREFIX + MARKER]
    found(bucket, counters=second)
    assert first.usage().requests["put"] > 32 * 8
    assert second.usage().requests["put"] < 15


def test_a_store_without_conditional_puts(s3_proxy: tuple[FaultProxy, Bucket]) -> None:
    proxy, bucket = s3_proxy
    proxy.strip = {"if-none-match"}
    findings = found(bucket)
    assert findings["conditional-puts"].severity == "error"
    assert "an object that existed was created once more" in findings["conditional-puts"].detail
    proxy.strip = set()
    assert found(bucket) == {}, "what went badly is not remembered"


def test_a_store_that_deletes_an_object_when_an_upload_to_its_key_is_aborted(
    s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adobe S3Mock 5.2.0 does, although it honours every condition."""
    store = s3_bucket.open()
    abort = MultipartUpload.abort_upload

    def abort_and_delete(upload: MultipartUpload) -> None:
        abort(upload)
        store.delete([upload._key])

    monkeypatch.setattr(MultipartUpload, "abort_upload", abort_and_delete)
    (finding,) = found(s3_bucket).values()
    assert (finding.severity, finding.kind) == ("error", "multipart-abort")
    assert "the object is gone" in finding.detail
    with pytest.raises(Refused, match="the object is gone"):
        ConditionalCreateCheck(tmp_path).require_conditional_creates(store, PREFIX)


def by_path_segment(answer: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "Contents": sorted(answer.get("Contents", []), key=lambda entry: str(entry["Key"]).split("/"))}


def only_one_page(answer: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "IsTruncated": False}


def no_second_page(answer: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    if "ContinuationToken" in params:
        raise Unavailable("the store answered 500")
    return answer


@pytest.mark.parametrize(
    ("change", "detail"), [(by_path_segment, "-list.b' after"), (only_one_page, "after the first one"), (no_second_page, "answered 500")]
)
def test_a_store_that_lists_in_another_order_or_not_all(
    s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, change: Callable[..., dict[str, Any]], detail: str
) -> None:
    list_page = S3Store._list_page
    monkeypatch.setattr(S3Store, "_list_page", lambda self, params: change(list_page(self, params), params))
    (finding,) = found(s3_bucket).values()
    assert (finding.severity, finding.kind) == ("error", "listing")
    assert detail in finding.detail


def test_a_listing_that_ends_early_after_a_key_in_a_folder_is_a_warning(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MinIO of 2026-02-12, where names lie between that of the folder and the folder with its slash."""
    list_page = S3Store._list_page

    def ended(store: S3Store, params: dict[str, Any]) -> dict[str, Any]:
        return list_page(store, params) | ({"IsTruncated": False} if params.get("StartAfter", "").endswith("-list/1") else {})

    monkeypatch.setattr(S3Store, "_list_page", ended)
    (finding,) = found(s3_bucket).values()
    assert (finding.severity, finding.kind) == ("warning", "listing")
    assert "begins after" in finding.detail


class CheckThenSet(MemoryStore):
    """A store that honours conditions of writers that come one after the other."""

    @override
    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        if key in {info.key for info in self.list(key)}:
            raise AlreadyExists(key)
        time.sleep(0.05)
        return self.put(key, data)


def test_a_store_whose_conditional_puts_race() -> None:
    store = CheckThenSet(Clock(now()), RequestCounters())
    (finding,) = find_unsafe_concurrent_creates(store, PREFIX)
    assert (finding.severity, finding.kind) == ("error", "conditional-puts")
    assert "were answered that they succeeded" in finding.detail
    assert list(store.list("")) == []


def test_versions_and_locks_make_deletes_worth_nothing(s3_bucket: Bucket) -> None:
    store = s3_bucket.open()
    assert isinstance(store, S3Store)
    assert read_bucket_deletion_settings(store).does_delete_free_space is True
    client = s3_bucket.server.client()
    client.put_bucket_versioning(Bucket=s3_bucket.name, VersioningConfiguration={"Status": "Enabled"})
    assert read_bucket_deletion_settings(store).does_delete_free_space is False
    assert found(s3_bucket)["versioning"].severity == "warning"
    client.put_bucket_versioning(Bucket=s3_bucket.name, VersioningConfiguration={"Status": "Suspended"})
    assert "Suspended" in found(s3_bucket)["versioning"].detail
    client.create_bucket(Bucket=s3_bucket.name + "-locked", ObjectLockEnabledForBucket=True)
    locked = Bucket(s3_bucket.server, s3_bucket.name + "-locked")
    assert set(found(locked)) == {"versioning", "object-lock"}


def test_archived_objects_and_unfinished_uploads(s3_bucket: Bucket) -> None:
    client = s3_bucket.server.client()
    client.put_object(Bucket=s3_bucket.name, Key=f"{s3_bucket.prefix}/old.log", Body=b"x", StorageClass="DEEP_ARCHIVE")
    client.create_multipart_upload(Bucket=s3_bucket.name, Key=f"{s3_bucket.prefix}/half.log")
    findings = found(s3_bucket)
    # To moto every upload was begun in 2010.
    assert set(findings) == {"archived", "unfinished-uploads"}
    assert "DEEP_ARCHIVE" in findings["archived"].detail
    assert "old.log" in findings["archived"].detail
    later = {finding.kind: finding for finding in probe_store(s3_bucket.open(), lambda: now() + 2 * DAY_MS)}
    assert set(later) == {"archived", "unfinished-uploads", "clock"}
    assert "half.log" in findings["unfinished-uploads"].detail
    assert "behind" in later["clock"].detail


def test_what_is_denied_is_named_all_at_once(s3_proxy: tuple[FaultProxy, Bucket]) -> None:
    proxy, bucket = s3_proxy
    proxy.faults = [Fault("denied", ("get", "delete"))]
    findings = found(bucket)
    assert set(findings) == {"cannot-read", "cannot-delete"}
    assert "s3:GetObject" in findings["cannot-read"].hint
    proxy.faults = [Fault("denied", ("other",))]
    assert set(found(bucket)) == {"versioning-unknown"}
    store = bucket.open()
    assert isinstance(store, S3Store)
    assert read_bucket_deletion_settings(store).does_delete_free_space is None


@pytest.mark.parametrize(("fault", "hint"), [("unknown", "does not answer the question"), ("denied", "Grant s3:GetBucketVersioning")])
def test_a_right_is_asked_for_only_where_one_is_missing(s3_proxy: tuple[FaultProxy, Bucket], fault: str, hint: str) -> None:
    proxy, bucket = s3_proxy
    proxy.faults = [Fault(fault, ("other",))]
    finding = found(bucket)["versioning-unknown"]
    assert "the store answered" in finding.detail
    assert hint in finding.hint


def test_a_missing_bucket_is_said_once(s3_bucket: Bucket) -> None:
    (finding,) = found(Bucket(s3_bucket.server, "no-such-bucket")).values()
    assert "bucket does not exist" in finding.detail


def test_a_store_that_is_down(s3_proxy: tuple[FaultProxy, Bucket]) -> None:
    proxy, bucket = s3_proxy
    proxy.faults = [Fault("slow_down")]
    (finding,) = probe_store(bucket.open(retries=RetrySettings(deadline_s=0.1)), now)
    assert (finding.severity, finding.kind) == ("error", "store")


@pytest.fixture(scope="module")
def enforcing_server() -> Iterator[S3Server]:
    with running_moto() as server:
        yield server


class TestLeastPolicy:
    """conf/iam-policy.json, enforced by a server of its own (by action; moto does not look at resources)."""

    POLICY = json.loads((ROOT / "conf" / "iam-policy.json").read_text())

    def user(self, server: S3Server, without: str) -> S3Server:
        """A user that has the policy less one action, on a server that enforces."""
        statements = [{**statement, "Action": [a for a in statement["Action"] if a != without]} for statement in self.POLICY["Statement"]]
        for statement in statements:
            statement.pop("Condition", None)
            statement["Resource"] = "*"
        iam = boto3.client(
            "iam", endpoint_url=server.endpoint, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
        )
        name = "user-" + (without.partition(":")[2] or "whole")
        iam.create_user(UserName=name)
        document = json.dumps({"Version": "2012-10-17", "Statement": statements})
        iam.put_user_policy(UserName=name, PolicyName="least", PolicyDocument=document)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return S3Server(server.endpoint, key["AccessKeyId"], key["SecretAccessKey"])

    @pytest.mark.parametrize(
        ("without", "expected"),
        [
            ("", set()),
            ("s3:PutObject", {"cannot-write", "cannot-overwrite"}),
            ("s3:GetObject", {"cannot-read"}),
            ("s3:ListBucket", {"cannot-list"}),
            ("s3:DeleteObject", {"cannot-delete"}),
            ("s3:GetBucketVersioning", {"versioning-unknown"}),
        ],
    )
    def test_nothing_less_is_enough(
        self, enforcing_server: S3Server, monkeypatch: pytest.MonkeyPatch, without: str, expected: set[str]
    ) -> None:
        server = enforcing_server
        self.enforce(server, False)
        bucket = server.make_bucket()
        user = self.user(server, without)
        for name, value in user.environment().items():
            monkeypatch.setenv(name, value)
        self.enforce(server, True)
        findings = found(Bucket(user, bucket.name, "PREFIX"))
        assert set(findings) == expected

    def enforce(self, server: S3Server, on: bool) -> None:
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{server.endpoint}/moto-api/reset-auth", b"0" if on else b"inf", headers, method="POST")
        urllib.request.urlopen(request).close()

    def test_every_request_that_the_adapter_sends_has_its_action(self) -> None:
        actions = {
            "GetObject": "s3:GetObject",
            "HeadObject": "s3:GetObject",
            "PutObject": "s3:PutObject",
            "UploadPart": "s3:PutObject",
            "UploadPartCopy": "s3:PutObject",
            "CreateMultipartUpload": "s3:PutObject",
            "CompleteMultipartUpload": "s3:PutObject",
            "AbortMultipartUpload": "s3:AbortMultipartUpload",
            "ListObjectsV2": "s3:ListBucket",
            "ListMultipartUploads": "s3:ListBucketMultipartUploads",
            "DeleteObjects": "s3:DeleteObject",
        }
        asked_by_the_probe = {"s3:GetBucketVersioning", "s3:GetBucketObjectLockConfiguration"}
        assert set(actions) == set(s3_requests.PRICED_OPERATIONS)
        granted = {action for statement in self.POLICY["Statement"] for action in statement["Action"]}
        assert granted == set(actions.values()) | asked_by_the_probe


@pytest.mark.damages  # there is no tier afterwards, nor the server
def test_a_server_that_completes_uploads_over_existing_objects_is_refused(gofakes3_bucket: Bucket, tmp_path: Path) -> None:
    """gofakes3 creates objects of one request only if their key is free, and ignores the condition when an upload is completed."""
    cli = BucketCli(tmp_path / "cli", gofakes3_bucket)
    log = log_of("a=1")
    answer = cli.ask("import", log.write(tmp_path / "orders-0"), "--topic", "orders", "--partition", 0)
    assert (answer.code, cli.objects()) == (StoreError.exit_code, {}), "although so small a log needs no upload in parts"
    assert "an upload in parts wrote over an existing object" in answer.error["message"]
    store = gofakes3_bucket.open()
    store.create("small", b"one", {"by": "one"})
    with pytest.raises(AlreadyExists):
        store.create("small", b"two", {"by": "two"})
    assert dict(store.head("small").metadata) == {"by": "one"}, "this server answers with names in capitals"
    errors = [finding for finding in probe_store(store, store.clock_ms) if finding.severity == "error"]
    assert [finding.kind for finding in errors] == ["conditional-multipart"]
    assert "wrote over an existing object" in errors[0].detail
