"""Every answer that S3 is known to refuse with, over real HTTP: the class of the error, what it names and what it advises."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from compactor.config.sections import S3Settings
from compactor.config.settings import Settings
from compactor.errors import CompactorError, NotFound, Refused, Unavailable, UsageError
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.storage.settings import RetrySettings
from compactor.storage.wrappers import RequestCounters
from tests.support.canned_s3 import Answer, Canned, answering, failure

ONCE = RetrySettings(deadline_s=0)
QUICK = RetrySettings(deadline_s=20, base_s=0.001, cap_s=0.001)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


def s3(endpoint_url: str, region: str = "") -> Settings:
    return Settings(s3=S3Settings(endpoint_url=endpoint_url, region=region))


@contextmanager
def store_that_says(*answers: Answer, retries: RetrySettings = ONCE) -> Iterator[tuple[ObjectStore, Canned]]:
    with answering(answers) as canned:
        yield (
            open_store("s3://bucket/pre fix", settings=s3(endpoint_url=canned.url, region="eu-west-1"), retries=retries),
            canned,
        )


REFUSALS: list[tuple[Answer, str, str]] = [
    (failure(403, "AccessDenied", "Access Denied"), "access denied", "iam-policy.json"),
    (failure(403, "InvalidAccessKeyId", "unknown key"), "access key is unknown", "AWS_ACCESS_KEY_ID"),
    (failure(403, "SignatureDoesNotMatch", "no match"), "secret key", "AWS_SECRET_ACCESS_KEY"),
    (failure(400, "ExpiredToken", "expired"), "session token has expired", "Log in again"),
    (failure(400, "InvalidToken", "malformed"), "session token is not valid", "Log in again"),
    (failure(404, "NoSuchBucket", "The specified bucket does not exist"), "bucket does not exist", "endpoint_url"),
    (
        failure(301, "PermanentRedirect", "elsewhere", "<Endpoint>x.amazonaws.com</Endpoint>"),
        "answered PermanentRedirect .*another region",
        "[s3] region",
    ),
    (
        failure(400, "AuthorizationHeaderMalformed", "the region 'eu-west-1' is wrong", "<Region>us-west-2</Region>"),
        r"another region \(us-west-2\)",
        "[s3] region",
    ),
    (
        failure(403, "InvalidObjectState", "not valid for the storage class", "<StorageClass>DEEP_ARCHIVE</StorageClass>"),
        "archived (.*)storage class DEEP_ARCHIVE",
        "Restore it",
    ),
    (
        failure(403, "InvalidObjectState", "x", "<StorageClass>INTELLIGENT_TIERING</StorageClass><AccessTier>ARCHIVE_ACCESS</AccessTier>"),
        "storage class INTELLIGENT_TIERING, tier ARCHIVE_ACCESS",
        "Restore it",
    ),
    (failure(403, "AccessDenied", "Bucket is a Requester Pays bucket"), "Requester Pays", "owner's credentials"),
    (failure(400, "KMS.DisabledException", "key is disabled"), "encryption key refuses", "kms:Decrypt"),
    (failure(403, "AccessDenied", "not authorized to perform: kms:GenerateDataKey"), "encryption key refuses", "kms:GenerateDataKey"),
    (failure(400, "KMS.NotFoundException", "no such key"), "encryption key refuses", "kms:Decrypt"),
    (
        failure(403, "RequestTimeTooSkewed", "skewed", "<RequestTime>10:00</RequestTime><ServerTime>12:00</ServerTime>"),
        "clocks .* differ",
        "NTP",
    ),
    (failure(501, "NotImplemented", "a header implies something else"), "does not know this request", "config check"),
    (failure(501, "Unsupported", "not here"), "does not know this request", "config check"),
    (failure(400, "SomethingNew", "of next year"), "SomethingNew .of next year.", "config check"),
    (failure(403, "AccessDenied", "Access Denied"), "access denied", "makes the requester pay"),
    (Answer(404, b"<html>nothing here</html>", {"Content-Type": "text/html"}), "answered 404", "does not speak S3"),
]


@pytest.mark.parametrize(("answer", "says", "advises"), REFUSALS, ids=[f"{number}" for number in range(len(REFUSALS))])
def test_refusals_are_not_tried_again_and_say_what_to_do(answer: Answer, says: str, advises: str, tmp_path: Path) -> None:
    uses: list[Callable[[ObjectStore], object]] = [
        lambda store: store.get("a/key"),
        lambda store: store.create("a/key", b"x"),
        lambda store: store.download("a/key", tmp_path / "out"),
        lambda store: list(store.list("a/key")),
    ]
    for use in uses:
        with store_that_says(answer, retries=QUICK) as (store, canned):
            with pytest.raises(Refused, match=says) as caught:
                use(store)
            assert advises in caught.value.hint
            assert "s3://bucket/pre fix/" in caught.value.message
            assert len(canned.asked) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "answer",
    [
        failure(503, "SlowDown", "Please reduce your request rate"),
        failure(500, "InternalError"),
        failure(400, "RequestTimeout"),
        failure(409, "OperationAborted"),
        failure(409, "ConditionalRequestConflict"),
        failure(400, "BadDigest", "damaged on its way"),
        Answer(502, b"<html>bad gateway</html>"),
        Answer(429, b""),
        Answer(200, b"only a part", {"Content-Type": "text/plain"}, said_length=1000),
        Answer(206, b"0123", {"Content-Range": "bytes 0-9/10", "ETag": '"e"'}),
        Answer(206, b"0123456789", {"Content-Range": "bytes 0-3/4", "ETag": '"e"'}),
        Answer(206, b"0123", {"Content-Range": "bytes 4-7/10", "ETag": '"e"'}),
        Answer(206, b"0123", {"Content-Range": "elephants", "ETag": '"e"'}),
    ],
    ids=lambda answer: f"{answer.status}-{answer.body[-40:]!r}",
)
def test_what_may_get_better_is_tried_again(answer: Answer, tmp_path: Path) -> None:
    good = Answer(206, b"0123456789", {"Content-Range": "bytes 0-9/10", "ETag": '"e"'})
    with store_that_says(answer, answer, answer, good, retries=QUICK) as (store, canned):
        assert store.get("k", 0, 10) == b"0123456789"
        assert len(canned.asked) == 4
    with store_that_says(answer, answer, good, retries=QUICK) as (store, canned):
        assert store.download("k", tmp_path / "out") == 10
        assert (tmp_path / "out").read_bytes() == b"0123456789"
    with store_that_says(answer) as (store, canned), pytest.raises(Unavailable, match="cannot read s3://bucket/pre fix/k"):
        store.download("k", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checksum_that_the_store_sends_is_checked() -> None:
    good = Answer(200, b"hello", {"x-amz-checksum-crc32": "NhCmhg==", "ETag": '"e"'})
    bad = Answer(200, b"hellp", {"x-amz-checksum-crc32": "NhCmhg==", "ETag": '"e"'})
    with store_that_says(bad, good, retries=QUICK) as (store, canned):
        assert store.get("k") == b"hello"
        assert canned.asked[0][2].get("x-amz-checksum-mode") == "ENABLED"
    with store_that_says(bad) as (store, _), pytest.raises(Unavailable, match="checksum"):
        store.get("k")


@pytest.mark.parametrize("body", [b"", b"<ListBucketResult></ListBucketResult>", b"<ListBucketResult><Contents><Key>pre fix/a", b"not xml"])
def test_half_a_listing_is_no_listing(body: bytes) -> None:
    with (
        store_that_says(Answer(200, body, {"Content-Type": "application/xml"})) as (store, _),
        pytest.raises(Unavailable, match="cannot list"),
    ):
        list(store.list(""))


def test_a_listing_without_order_is_refused() -> None:
    entry = "<Contents><Key>pre%20fix/{}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
    said = "<IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>" + entry.format("b") + entry.format("a")
    with (
        store_that_says(Answer(200, f"<ListBucketResult>{said}</ListBucketResult>".encode())) as (store, _),
        pytest.raises(Refused, match="lists 'a' after 'b'"),
    ):
        list(store.list(""))


def test_a_delete_that_fails_for_one_key_fails() -> None:
    half = b"<DeleteResult><Deleted><Key>pre fix/a</Key></Deleted>%b</DeleteResult>"
    denied = half % b"<Error><Key>pre fix/b</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    with (
        store_that_says(Answer(200, denied)) as (store, _),
        pytest.raises(Refused, match="cannot delete s3://bucket/pre fix/b.*access denied"),
    ):
        store.delete(["a", "b"])
    with store_that_says(Answer(200, half % b"")) as (store, _), pytest.raises(Unavailable, match="what became of 1 keys"):
        store.delete(["a", "b"])
    rest = Answer(200, b"<DeleteResult><Deleted><Key>pre fix/b</Key></Deleted></DeleteResult>")
    with store_that_says(Answer(200, half % b""), failure(503, "SlowDown"), rest, retries=QUICK) as (store, canned):
        store.delete(["a", "b"])
        assert len(canned.asked) == 3


def stored(etag: str) -> Answer:
    return Answer(200, b"", {"ETag": f'"{etag}"'})


HELLO_MD5 = "5d41402abc4b2a76b9719d911017c592"


def test_a_store_whose_etags_are_no_digests_is_asked_once_what_it_has() -> None:
    with store_that_says(stored("v1"), Answer(200, b"hello", {"ETag": '"v1"'}), stored("v2")) as (store, canned):
        store.create("a", b"hello")
        store.create("b", b"hello")
        assert [method for method, _, _ in canned.asked] == ["PUT", "GET", "PUT"]


def test_what_a_store_took_damaged_is_removed_and_sent_again() -> None:
    gone = Answer(200, b"<DeleteResult><Deleted><Key>pre fix/a</Key></Deleted></DeleteResult>")
    answers = [stored("0" * 32), Answer(200, b"hellp", {"ETag": '"0"'}), gone, stored(HELLO_MD5)]
    with store_that_says(*answers, retries=QUICK) as (store, canned):
        assert store.create("a", b"hello").etag == HELLO_MD5
        assert [method for method, _, _ in canned.asked] == ["PUT", "GET", "POST", "PUT"]
    with store_that_says(*answers) as (store, canned), pytest.raises(Unavailable, match="arrived damaged"):
        store.create("a", b"hello")


def test_deleting_what_is_absent_is_fine_where_the_server_calls_it_an_error() -> None:
    gone = b"<Error><Key>pre fix/b</Key><Code>NoSuchKey</Code><Message>absent</Message></Error>"
    with store_that_says(Answer(200, b"<DeleteResult><Deleted><Key>pre fix/a</Key></Deleted>%s</DeleteResult>" % gone)) as (store, canned):
        store.delete(["a", "b"])
        assert len(canned.asked) == 1


def test_a_listing_that_never_ends_is_refused() -> None:
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    page = Answer(200, b"<ListBucketResult>%s</ListBucketResult>" % more)
    with store_that_says(page) as (store, canned), pytest.raises(Refused, match="again and again"):
        list(store.list(""))
    assert len(canned.asked) == 2


def test_an_absent_key_and_an_absent_bucket_differ() -> None:
    with store_that_says(Answer(404), failure(404, "NoSuchBucket")) as (store, _), pytest.raises(Refused, match="bucket does not exist"):
        store.head("k")
    listing = Answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
    with store_that_says(Answer(404), listing) as (store, _), pytest.raises(NotFound, match="pre fix/k"):
        store.head("k")


def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with store_that_says(Answer(200), retries=QUICK) as (store, canned):
        with pytest.raises(Refused, match="Unable to locate credentials") as caught:
            store.get("k")
        assert "AWS_PROFILE" in caught.value.hint
        assert not canned.asked


def test_a_profile_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with store_that_says(Answer(200)) as (store, _), pytest.raises(UsageError, match="nobody"):
        store.get("k")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "http://", "not a url"])
def test_an_endpoint_of_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    store = open_store("s3://bucket/p", retries=ONCE)
    with pytest.raises(UsageError, match="endpoint"):
        store.get("k")


def ask_dns(monkeypatch: pytest.MonkeyPatch, code: int, retries: RetrySettings) -> tuple[list[str], CompactorError]:
    """The host names that were asked for, and the error, where the resolver answers with ``code``."""
    asked = []

    def resolve(host: str, *_: object, **__: object) -> NoReturn:
        asked.append(host)
        raise socket.gaierror(code, "no address")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(CompactorError) as caught:
        open_store("s3://bucket/p", settings=s3(endpoint_url="http://nobody.invalid:9000"), retries=retries).get("k")
    return asked, caught.value


def test_a_host_that_nobody_knows_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, error = ask_dns(monkeypatch, socket.EAI_NONAME, RetrySettings(deadline_s=60))
    assert (type(error), asked) == (Refused, ["nobody.invalid"])
    assert "the host name is unknown" in error.message
    assert "endpoint_url" in error.hint


def test_a_dns_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, error = ask_dns(monkeypatch, socket.EAI_AGAIN, RetrySettings(deadline_s=0.3, base_s=0.01, cap_s=0.02))
    assert (type(error), "tried" in error.message, len(asked) > 2) == (Unavailable, True, True)


def test_a_host_that_has_answered_before_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering([Answer(200, b"1", {"ETag": '"e"', "Connection": "close"}, said_length=1)]) as canned:
        quick = RetrySettings(deadline_s=0.3, base_s=0.01, cap_s=0.02)
        store = open_store("s3://bucket", settings=s3(endpoint_url=canned.url.replace("127.0.0.1", "localhost")), retries=quick)
        assert store.get("a") == b"1"

    def unknown(host: str, *_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Unavailable, match="tried"):
        store.get("b")


def test_no_tls_where_tls_was_asked_for_is_said_at_once() -> None:
    with answering([Answer(200)]) as canned:
        endpoint = canned.url.replace("http://", "https://")
        store = open_store("s3://bucket", settings=s3(endpoint_url=endpoint), retries=RetrySettings(deadline_s=60))
        with pytest.raises(Refused, match="(?i)wrong_version_number|wrong version number") as caught:
            store.get("k")
    assert "no TLS" in caught.value.hint


def test_nobody_listens() -> None:
    store = open_store("s3://bucket/p", settings=s3(endpoint_url="http://127.0.0.1:1"), retries=RetrySettings(deadline_s=0.2, base_s=0.01))
    with pytest.raises(Unavailable, match=r"Could not connect.*tried \d+ times") as caught:
        store.get("k")
    assert "endpoint_url" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///x",
        "s3://b",
        "s3://bucket//x",
        "s3://bucket/a/../b",
        "s3://bucket/" + "x/" * 80,
        "http://x",
        "file:relative",
        "file://host/x",
        "",
    ],
)
def test_urls_that_name_no_store(url: str) -> None:
    if url == "s3://bucket//x":
        assert open_store(url).url == "s3://bucket/x"
        return
    with pytest.raises(UsageError):
        open_store(url)


def test_credentials_that_are_refused_in_the_middle() -> None:
    counters = RequestCounters()
    answers = [Answer(200, b"1", {"ETag": '"e"'}), failure(403, "ExpiredToken", "The provided token has expired.")]
    with answering(answers) as canned:
        store = open_store("s3://bucket", settings=s3(endpoint_url=canned.url), retries=QUICK, counters=counters)
        assert store.get("a") == b"1"
        with pytest.raises(CompactorError, match="expired") as caught:
            store.get("b")
        assert caught.value.exit_code == 5
        assert counters.usage().requests == {"get": 2}
