"""What `config check` finds where deleted objects are kept: prepared answers, because the emulators know few of these settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compactor.adapters.stores.cloud import CloudStore
from compactor.config.sections import AzureSettings, GcsSettings
from compactor.config.settings import Settings
from compactor.storage.factory import open_store
from tests.support.canned_s3 import Answer, answering, failure
from tests.support.cloud_servers import ACCOUNT, KEY

XML = {"Content-Type": "application/xml"}
MODIFIED = "Tue, 24 Nov 2026 00:00:00 GMT"


def gcs_store(url: str) -> CloudStore:
    store = open_store("gs://bucket/tier", settings=Settings(gcs=GcsSettings(endpoint_url=url)))
    assert isinstance(store, CloudStore)
    return store


@pytest.mark.parametrize(
    ("bucket", "kinds", "says"),
    [
        ({}, [], ""),
        ({"softDeletePolicy": {"retentionDurationSeconds": "0"}}, [], ""),
        ({"versioning": {"enabled": True}}, ["versioning"], "keeps versions"),
        ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, ["soft-delete"], "for 604800 seconds"),
        ({"retentionPolicy": {"retentionPeriod": "3600"}}, ["retention"], "3600 seconds"),
        ({"defaultEventBasedHold": True}, ["holds"], "event-based hold"),
        ({"versioning": {"enabled": True}, "defaultEventBasedHold": True}, ["versioning", "holds"], "keeps versions"),
    ],
)
def test_a_bucket_of_google_that_keeps_deleted_objects_is_found(bucket: dict[str, Any], kinds: list[str], says: str) -> None:
    answer = Answer(200, json.dumps({"name": "bucket", **bucket}).encode(), {"Content-Type": "application/json"})
    with answering([answer]) as canned:
        found = gcs_store(canned.url).inspect_store_settings(0)
        assert [finding.kind for finding in found] == kinds
        assert {finding.severity for finding in found} <= {"warning"}
        assert says in "".join(finding.detail for finding in found)
        assert gcs_store(canned.url).does_delete_free_space() is (not kinds)


NO_QUESTION = "this server does not answer the question"


@pytest.mark.parametrize(("status", "hint"), [(403, "Grant storage.buckets.get"), (400, NO_QUESTION), (501, NO_QUESTION)])
def test_a_bucket_of_google_that_does_not_tell_promises_nothing(status: int, hint: str) -> None:
    text = json.dumps({"error": {"code": status, "message": "no"}}).encode()
    with answering([Answer(status, text, {"Content-Type": "application/json"})]) as canned:
        store = gcs_store(canned.url)
        [finding] = store.inspect_store_settings(0)
        assert (finding.severity, finding.kind, hint in finding.hint) == ("note", "versioning-unknown", True)
        assert "cannot ask for the settings" in finding.detail
        assert store.does_delete_free_space() is None


def service(days: int) -> Answer:
    policy = f"<Enabled>true</Enabled><Days>{days}</Days>" if days else "<Enabled>false</Enabled>"
    text = f"<StorageServiceProperties><DeleteRetentionPolicy>{policy}</DeleteRetentionPolicy></StorageServiceProperties>"
    return Answer(200, text.encode(), XML)


def listing(*names: str) -> Answer:
    about = f"<Last-Modified>{MODIFIED}</Last-Modified><Etag>0x1</Etag><Content-Length>1</Content-Length><BlobType>BlockBlob</BlobType>"
    blobs = "".join(f"<Blob><Name>{name}</Name><Properties>{about}</Properties></Blob>" for name in names)
    return Answer(200, f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>".encode(), XML)


def headers(**more: str) -> Answer:
    known = {"ETag": '"0x1"', "Last-Modified": MODIFIED, "x-ms-blob-type": "BlockBlob"}
    return Answer(200, b"", {**known, **{name.replace("_", "-"): value for name, value in more.items()}})


VERSIONED = headers(x_ms_version_id="2026-11-24T00:00:00.0000000Z")
NO_POLICY = headers(x_ms_has_immutability_policy="false", x_ms_has_legal_hold="false")


@pytest.mark.parametrize(
    ("answers", "kinds", "frees_space"),
    [
        ([service(0), listing("tier/k"), headers(), NO_POLICY], [], True),
        ([service(7), listing("tier/k"), headers(), NO_POLICY], ["soft-delete"], False),
        ([service(0), listing("tier/k"), VERSIONED, NO_POLICY], ["versioning"], False),
        ([service(0), listing("tier/k"), headers(), headers(x_ms_has_immutability_policy="true")], ["retention"], False),
        ([service(0), listing("tier/k"), headers(), headers(x_ms_has_legal_hold="true")], ["holds"], False),
        ([service(0), listing(), NO_POLICY], ["versioning-unknown"], None),
        ([service(0), listing("tier/k"), headers(), failure(403, "AuthorizationFailure", "no")], ["versioning-unknown"], None),
        (
            [failure(403, "AuthorizationPermissionMismatch", "no"), listing("tier/k"), headers(), NO_POLICY],
            ["versioning-unknown"],
            None,
        ),
    ],
)
def test_a_container_of_azure_that_keeps_deleted_objects_is_found(
    tmp_path: Path, answers: list[Answer], kinds: list[str], frees_space: bool | None
) -> None:
    (tmp_path / "key").write_text(KEY)
    for ask in ("inspect_store_settings", "does_delete_free_space"):
        with answering(answers) as canned:
            settings = AzureSettings(endpoint_url=f"{canned.url}/{ACCOUNT}", credentials_file=str(tmp_path / "key"))
            store = open_store(f"az://{ACCOUNT}/container/tier", settings=Settings(azure=settings))
            assert isinstance(store, CloudStore)
            if ask == "inspect_store_settings":
                assert [finding.kind for finding in store.inspect_store_settings(0)] == kinds
            else:
                assert store.does_delete_free_space() is frees_space


@pytest.mark.parametrize(
    ("answers", "detail", "hint"),
    [
        ([failure(403, "AuthorizationFailure", "no"), listing("tier/k"), headers(), NO_POLICY], "access denied", "Grant Microsoft.Storage"),
        ([failure(400, "InvalidQuery", "no"), listing("tier/k"), headers(), NO_POLICY], "cannot ask for the settings", NO_QUESTION),
        ([failure(501, "NotImplemented", "no"), listing("tier/k"), headers(), NO_POLICY], "does not know this request", NO_QUESTION),
        ([service(0), listing(), NO_POLICY], "there is no object yet", NO_QUESTION),
    ],
)
def test_a_right_is_asked_for_only_where_one_is_missing(tmp_path: Path, answers: list[Answer], detail: str, hint: str) -> None:
    (tmp_path / "key").write_text(KEY)
    with answering(answers) as canned:
        settings = AzureSettings(endpoint_url=f"{canned.url}/{ACCOUNT}", credentials_file=str(tmp_path / "key"))
        store = open_store(f"az://{ACCOUNT}/container/tier", settings=Settings(azure=settings))
        assert isinstance(store, CloudStore)
        [finding] = store.inspect_store_settings(0)
        assert (detail in finding.detail, hint in finding.hint) == (True, True), finding
