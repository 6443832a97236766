"""What Google Cloud Storage, Azure and HDFS answer, and what is said of it: prepared answers, because no emulator gives them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from compactor.adapters.stores.azure import AccountCredentials, choose_credentials
from compactor.config.sections import AzureSettings, GcsSettings, HdfsSettings
from compactor.config.settings import Settings
from compactor.errors import Refused, Unavailable, UsageError
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.storage.settings import RetrySettings
from compactor.storage.wrappers import FirstAnswerTracker
from tests.support.canned_s3 import Answer, answering, failure
from tests.support.cloud_servers import ACCOUNT, KEY

QUICK = RetrySettings(deadline_s=0.05, base_s=0.001, cap_s=0.002, first_answer_s=0.05)
CRC = 'Provided CRC32C "AAAAAA==" doesn\'t match calculated CRC32C "2HvlZg==".'
KEPT = "Object 'tier/k' is subject to bucket's retention policy or object retention and cannot be deleted or overwritten until 2027"
WRONG_ACCOUNT = "AccountName=another;AccountKey=" + KEY


def google(status: int, message: str) -> Answer:
    return Answer(status, json.dumps({"error": {"code": status, "message": message}}).encode(), {"Content-Type": "application/json"})


def azure(status: int, code: str) -> Answer:
    return failure(status, code, code, headers={"x-ms-error-code": code})


def hadoop(status: int, exception: str, message: str = "why") -> Answer:
    body = {
        "RemoteException": {"exception": exception, "javaClassName": f"org.apache.hadoop.{exception}", "message": f"{message}\n\tat a.b"}
    }
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/json"})


REFUSALS: list[tuple[str, Answer, str, str]] = [
    ("gs", google(401, "Invalid Credentials"), "credentials are refused", "GOOGLE_APPLICATION_CREDENTIALS"),
    ("gs", google(401, "Invalid Credentials"), "credentials are refused", "clock"),
    ("gs", google(403, "x@y does not have storage.objects.create access"), "storage.objects.create.*access denied", "objectUser"),
    ("gs", google(403, KEPT), "retention policy", "without holds and retention policies"),
    ("gs", google(403, "Object is under active Event-Based hold"), "hold", "without holds and retention policies"),
    ("gs", google(403, "The billing account for the owning project is disabled"), "billing", "billing"),
    ("gs", google(404, "The specified bucket does not exist."), "does not exist", "[tier] url"),
    ("az", azure(403, "AuthenticationFailed"), "credentials are refused", "clock"),
    ("az", azure(401, "NoAuthenticationInformation"), "credentials are refused", "AZURE_STORAGE_KEY"),
    ("az", azure(403, "AuthorizationPermissionMismatch"), "access denied", "Storage Blob Data Contributor"),
    ("az", azure(403, "AuthorizationFailure"), "access denied", "network rules"),
    ("az", azure(403, "KeyBasedAuthenticationNotPermitted"), "allows no keys", "managed or workload identity"),
    ("az", azure(403, "AccountIsDisabled"), "AccountIsDisabled", "account"),
    ("az", azure(404, "ContainerNotFound"), "does not exist", "[tier] url"),
    ("az", azure(409, "BlobImmutableDueToPolicy"), "a hold or a policy keeps it", "without holds"),
    ("az", azure(409, "BlobArchived"), "offline access tier", "lifecycle rule"),
    ("az", azure(409, "SnapshotsPresent"), "it has snapshots", "Delete the snapshots"),
    ("az", azure(412, "LeaseIdMissing"), "holds a lease", "Break the lease"),
    ("az", azure(409, "PublicAccessNotPermitted"), "PublicAccessNotPermitted", "config check"),
    ("hdfs", Answer(401, b"<html>Authentication required</html>"), "credentials are refused", "kerberos = true"),
    ("hdfs", Answer(404, b"It looks like you are making an HTTP request to a Hadoop IPC port."), "is not WebHDFS", "not its RPC port"),
    ("hdfs", hadoop(403, "AccessControlException"), "AccessControlException: why.*access denied", "the rights rwx"),
    ("hdfs", hadoop(403, "NSQuotaExceededException"), "NSQuotaExceededException", "Raise the quota"),
    ("hdfs", hadoop(400, "InvalidPathException"), "InvalidPathException", "config check"),
]
PASSING: list[tuple[str, Answer]] = [
    ("gs", google(429, "rateLimitExceeded")),
    ("gs", google(503, "backendError")),
    ("gs", google(408, "Request timeout")),
    ("gs", google(410, "Gone")),
    ("gs", google(400, CRC)),
    ("gs", Answer(200, b"only a part", {"Content-Type": "text/plain"}, said_length=1000)),
    ("az", azure(503, "ServerBusy")),
    ("az", azure(500, "OperationTimedOut")),
    ("az", azure(429, "TooManyRequests")),
    ("az", azure(400, "Md5Mismatch")),
    ("az", azure(409, "ContainerBeingDeleted")),
    ("hdfs", hadoop(403, "StandbyException")),
    ("hdfs", hadoop(403, "SafeModeException")),
    ("hdfs", hadoop(403, "RetriableException")),
    ("hdfs", hadoop(403, "IOException", "could only be written to 0 of the 1 minReplication nodes")),
    ("hdfs", hadoop(500, "RuntimeException")),
    ("hdfs", Answer(503, b"<html>busy</html>")),
    ("hdfs", Answer(200, b"<html>a page of a proxy</html>")),
    ("az", Answer(206, b"0123", {"Content-Range": "bytes 0-9/10", "ETag": "e"}, said_length=10)),
]


def open_store_at(folder: Path, scheme: str, url: str, contact: FirstAnswerTracker | None = None) -> ObjectStore:
    (folder / "key").write_text(KEY)
    account = AzureSettings(endpoint_url=f"{url}/{ACCOUNT}", credentials_file=str(folder / "key"))
    settings = Settings(gcs=GcsSettings(endpoint_url=url), azure=account, hdfs=HdfsSettings(webhdfs_url=url))
    places = {"gs": "gs://bucket/tier", "az": f"az://{ACCOUNT}/container/tier", "hdfs": "hdfs://namenode/tier"}
    return open_store(places[scheme], settings=settings, retries=QUICK, contact=contact)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[str, str], ObjectStore]:
    return partial(open_store_at, tmp_path)


@pytest.mark.parametrize(("scheme", "answer", "says", "advises"), REFUSALS, ids=[f"{number}" for number in range(len(REFUSALS))])
def test_refusals_are_not_tried_again_and_say_what_to_do(
    opened: Callable[[str, str], ObjectStore], scheme: str, answer: Answer, says: str, advises: str
) -> None:
    for use in (lambda store: store.create("k", b"x"), lambda store: list(store.list(""))):
        with answering([answer]) as canned:
            with pytest.raises(Refused, match=says) as caught:
                use(opened(scheme, canned.url))
            assert advises in caught.value.hint
            assert f"{scheme}://" in caught.value.message
            assert len(canned.asked) == (2 if scheme == "hdfs" and canned.asked[0][0] == "PUT" else 1), "a staged file is deleted"


@pytest.mark.parametrize(("scheme", "answer"), PASSING, ids=[f"{number}" for number in range(len(PASSING))])
def test_what_may_pass_is_tried_again(opened: Callable[[str, str], ObjectStore], scheme: str, answer: Answer) -> None:
    with answering([answer]) as canned:
        with pytest.raises(Unavailable, match="tried"):
            opened(scheme, canned.url).get("k")
        assert len(canned.asked) > 1


@pytest.mark.parametrize(
    ("scheme", "answer"), [("gs", google(503, "backendError")), ("az", azure(503, "ServerBusy")), ("hdfs", hadoop(403, "StandbyException"))]
)
def test_a_refusal_to_serve_counts_as_the_stores_first_answer(tmp_path: Path, scheme: str, answer: Answer) -> None:
    """Otherwise a busy store would be taken for a wrong address, and given up after ten seconds."""
    contact = FirstAnswerTracker()
    with answering([answer]) as canned, pytest.raises(Unavailable):
        open_store_at(tmp_path, scheme, canned.url, contact).get("k")
    assert contact.answered


class TestAccessToAzure:
    ENDPOINT = f"https://{ACCOUNT}.blob.core.windows.net"

    @pytest.mark.parametrize(
        ("name", "text", "expected"),
        [
            ("AZURE_STORAGE_KEY", KEY, AccountCredentials(ENDPOINT, key=KEY)),
            ("AZURE_STORAGE_SAS_TOKEN", "?sv=2026&sig=abc", AccountCredentials(ENDPOINT, sas="sv=2026&sig=abc")),
            ("AZURE_STORAGE_CONNECTION_STRING", f"AccountName={ACCOUNT};AccountKey={KEY}", AccountCredentials(ENDPOINT, key=KEY)),
            (
                "AZURE_STORAGE_CONNECTION_STRING",
                "BlobEndpoint=https://private/;SharedAccessSignature=?sig=abc",
                AccountCredentials("https://private", sas="sig=abc"),
            ),
            (
                "AZURE_STORAGE_CONNECTION_STRING",
                f"AccountName={ACCOUNT};AccountKey={KEY};EndpointSuffix=core.usgovcloudapi.net",
                AccountCredentials(f"https://{ACCOUNT}.blob.core.usgovcloudapi.net", key=KEY),
            ),
        ],
    )
    def test_is_by_the_variables_of_azures_tools_or_by_a_file(
        self, tmp_path: Path, name: str, text: str, expected: AccountCredentials
    ) -> None:
        assert choose_credentials(ACCOUNT, AzureSettings(), {name: text}) == expected
        (tmp_path / "credentials").write_text(f"{text}\n")
        assert choose_credentials(ACCOUNT, AzureSettings(credentials_file=str(tmp_path / "credentials")), {}) == expected

    @pytest.mark.parametrize(
        ("text", "says"), [(WRONG_ACCOUNT, "of the account 'another'"), ("nonsense!", "holds no credentials"), ("", "cannot be used|holds")]
    )
    def test_is_refused_for_credentials_that_cannot_be_right(self, tmp_path: Path, text: str, says: str) -> None:
        (tmp_path / "credentials").write_text(text)
        with pytest.raises(UsageError, match=says):
            choose_credentials(ACCOUNT, AzureSettings(credentials_file=str(tmp_path / "credentials")), {})

    def test_names_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"\[azure\] credentials_file cannot be used"):
            choose_credentials(ACCOUNT, AzureSettings(credentials_file=str(tmp_path / "absent")), {})
