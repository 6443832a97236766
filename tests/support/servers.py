"""Fixtures: ``kafka`` (Kafka's own cleaner and readers), ``s3_server`` (moto behind a lock), ``versity_server`` (a real one).

Per test a bucket on one of these servers, or a proxy before it.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conformance.kafka import Kafka, Unavailable
from tests.support.cloud_servers import (
    AnyBucket,
    CloudBucket,
    new_azure_container,
    new_gcs_bucket,
    new_hdfs_directory,
    running_azurite,
    running_fake_gcs,
    running_hdfs,
    running_kerberos_hdfs,
)
from tests.support.fault_proxy import FaultProxy
from tests.support.go_tools import Unbuildable
from tests.support.s3_server import (
    Bucket,
    S3Server,
    running_gofakes3,
    running_ministack,
    running_moto,
    running_s3proxy,
    running_versitygw,
    versitygw_binary,
)

BUCKETS = {
    "moto": "s3_bucket",
    "versitygw": "versity_bucket",
    "S3Proxy": "s3proxy_bucket",
    "MiniStack": "ministack_bucket",
    "fake-gcs-server": "gcs_bucket",
    "Azurite": "azure_container",
    "HDFS": "hdfs_directory",
}
"""Fixture of a new bucket, by the name of its server."""


def _on(quick: Sequence[str], slow: Sequence[str], fixture: str = "proxied_bucket") -> pytest.MarkDecorator:
    return pytest.mark.parametrize(fixture, [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)], indirect=True)


ON_SERVERS = _on(["moto", "fake-gcs-server", "Azurite"], ["versitygw"])
"""For tests that take ``proxied_bucket``: servers of each kind of store whose objects take one request."""
ON_ALL_SERVERS = _on(["moto", "fake-gcs-server", "Azurite"], ["versitygw", "HDFS"])
"""The same with HDFS, where creating an object takes eight requests."""
ON_ALL_BUCKETS = _on(["moto", "fake-gcs-server", "Azurite"], ["versitygw", "HDFS"], "new_bucket")
"""The same for tests that take ``new_bucket``."""
ON_SERVERS_THAT_SIGN_NOTHING = _on(["moto", "fake-gcs-server"], ["HDFS"])
"""For tests that take ``proxied_bucket`` and drop conditions of requests: versitygw and Azurite check signatures over them."""
ON_SERVERS_IN_TIME = _on(["moto"], ["versitygw", "fake-gcs-server", "Azurite"])
"""For modules of many tests that take ``proxied_bucket``: all but one server are left to ``make nightly``."""
ON_ALL_SERVERS_IN_TIME = _on(["fake-gcs-server"], ["moto", "versitygw", "Azurite", "HDFS"])
"""For one long test that takes ``proxied_bucket``."""


def missing(why: Exception) -> NoReturn:
    """Skip the test whose server cannot be had. In CI that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI has to run the tests with this server: {why}", pytrace=False)
    pytest.skip(str(why))


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    try:
        running = Kafka()
    except Unavailable as error:
        missing(error)
    with running:
        yield running


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with running_moto() as server:
        yield server


@contextmanager
def must_start() -> Iterator[None]:
    """Skips the test, or fails it in CI, if the server that is started here cannot be had."""
    try:
        yield
    except Unbuildable as why:
        missing(why)


@pytest.fixture(scope="session")
def versity_server() -> Iterator[S3Server]:
    with (
        must_start(),
        tempfile.TemporaryDirectory(prefix="versitygw-") as directory,
        running_versitygw(versitygw_binary(), Path(directory)) as server,
    ):
        yield server


@pytest.fixture(scope="session")
def s3proxy_server() -> Iterator[S3Server]:
    with must_start(), tempfile.TemporaryDirectory(prefix="s3proxy-") as folder, running_s3proxy(Path(folder)) as server:
        yield server


@pytest.fixture(scope="session")
def ministack_server() -> Iterator[S3Server]:
    with must_start(), running_ministack() as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[str]:
    """The endpoint of fake-gcs-server."""
    with must_start(), running_fake_gcs() as endpoint:
        yield endpoint


@pytest.fixture
def gcs_bucket(fake_gcs: str) -> CloudBucket:
    """A new bucket on fake-gcs-server."""
    return new_gcs_bucket(fake_gcs)


@pytest.fixture(scope="session")
def azurite() -> Iterator[str]:
    """The endpoint of Azurite."""
    with must_start(), running_azurite() as endpoint:
        yield endpoint


@pytest.fixture
def azure_container(azurite: str, tmp_path_factory: pytest.TempPathFactory) -> CloudBucket:
    """A new container on Azurite."""
    return new_azure_container(azurite, tmp_path_factory.mktemp("azure"))


@pytest.fixture(scope="session")
def hdfs() -> Iterator[str]:
    """The address of a namenode's WebHDFS."""
    with must_start(), tempfile.TemporaryDirectory(prefix="hdfs-") as directory, running_hdfs(Path(directory)) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def kerberos_hdfs() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a WebHDFS that wants Kerberos, and the environment in which tickets can be had."""
    if importlib.util.find_spec("gssapi") is None:
        missing(Unbuildable("the extra kerberos is not installed: Debian: apt install gcc libkrb5-dev python3-dev; then make setup"))
    with must_start(), tempfile.TemporaryDirectory(prefix="kerberos-") as directory, running_kerberos_hdfs(Path(directory)) as running:
        yield running


@pytest.fixture
def hdfs_directory(hdfs: str) -> CloudBucket:
    """A new directory in a mini cluster of HDFS."""
    return new_hdfs_directory(hdfs)


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket on moto; the environment holds its credentials."""
    return _new_bucket(s3_server, monkeypatch)


@pytest.fixture
def versity_bucket(versity_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket on versitygw; the environment holds its credentials."""
    return _new_bucket(versity_server, monkeypatch)


@pytest.fixture
def gofakes3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket on a server that ignores conditions of multipart uploads; the environment holds its credentials."""
    with must_start(), running_gofakes3() as server:
        yield _new_bucket(server, monkeypatch)


@pytest.fixture
def s3proxy_bucket(s3proxy_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket on S3Proxy; the environment holds its credentials."""
    return _new_bucket(s3proxy_server, monkeypatch)


@pytest.fixture
def ministack_bucket(ministack_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket on MiniStack; the environment holds its credentials."""
    return _new_bucket(ministack_server, monkeypatch)


@pytest.fixture
def s3_proxy(s3_bucket: Bucket) -> Iterator[tuple[FaultProxy, Bucket]]:
    """A proxy without faults before moto, and the new bucket as it is reached through it."""
    with FaultProxy(s3_bucket.server.endpoint).running() as proxy:
        yield proxy, s3_bucket.behind(proxy.url)


@pytest.fixture
def versity_proxy(versity_bucket: Bucket) -> Iterator[tuple[FaultProxy, Bucket]]:
    with FaultProxy(versity_bucket.server.endpoint).running() as proxy:
        yield proxy, versity_bucket.behind(proxy.url)


@pytest.fixture(params=["moto", pytest.param("versitygw", marks=pytest.mark.slow)])
def proxied(request: pytest.FixtureRequest) -> tuple[FaultProxy, Bucket]:
    """A proxy without faults before moto, and before versitygw, with a new bucket."""
    found: tuple[FaultProxy, Bucket] = request.getfixturevalue("s3_proxy" if request.param == "moto" else "versity_proxy")
    return found


@pytest.fixture
def proxy(proxied: tuple[FaultProxy, Bucket]) -> FaultProxy:
    return proxied[0]


@pytest.fixture
def bucket(proxied: tuple[FaultProxy, Bucket]) -> Bucket:
    return proxied[1]


@pytest.fixture
def new_bucket(request: pytest.FixtureRequest) -> AnyBucket:
    """A new bucket on the server that the test's parameter names."""
    bucket: AnyBucket = request.getfixturevalue(BUCKETS[request.param])
    return bucket


@pytest.fixture
def proxied_bucket(request: pytest.FixtureRequest) -> Iterator[tuple[FaultProxy, AnyBucket]]:
    """A proxy without faults before the server that the test's parameter names, and a new bucket as it is reached through it."""
    bucket: AnyBucket = request.getfixturevalue(BUCKETS[request.param])
    with FaultProxy(bucket.endpoint).running() as proxy:
        yield proxy, bucket.behind(proxy.url)


def _new_bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    return server.make_bucket()
