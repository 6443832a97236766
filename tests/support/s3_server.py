"""An S3 server for tests: how to start each kind, and buckets on it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compactor.config.sections import S3Settings
from compactor.config.settings import Settings
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from tests.support.go_tools import Unbuildable, go_tool, pip_packages
from tests.support.kafka_jars import BrokerUnavailable, maven_jars
from tests.support.leftovers import guard

ROOT = Path(__file__).parents[2]
VERSITYGW = "v1.8.0"
GOFAKES3 = "v1.2.0"
S3PROXY = "4.1.0"
MINISTACK = "1.5.33"


@dataclass(frozen=True)
class S3Server:
    endpoint: str
    access_key: str = "test-access"
    secret_key: str = "test-secret"
    region: str = "us-east-1"

    def environment(self) -> dict[str, str]:
        """What the usual AWS chain reads; nothing of the machine's own configuration gets in."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}),
        )

    def make_bucket(self) -> Bucket:
        name = f"test-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=name)
        return Bucket(self, name)


@dataclass(frozen=True)
class Bucket:
    server: S3Server
    name: str
    prefix: str = "tier of tests"

    @property
    def url(self) -> str:
        return f"s3://{self.name}/{self.prefix}"

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    @property
    def settings(self) -> S3Settings:
        return S3Settings(endpoint_url=self.server.endpoint, region=self.server.region)

    def sections(self) -> dict[str, dict[str, Any]]:
        """Of a configuration file whose tier lies here."""
        return {"tier": {"url": self.url}, "s3": {"endpoint_url": self.server.endpoint, "region": self.server.region}}

    def behind(self, endpoint: str) -> Bucket:
        """The same bucket, reached through a proxy."""
        return Bucket(S3Server(endpoint, self.server.access_key, self.server.secret_key, self.server.region), self.name, self.prefix)

    def open(self, **options: Any) -> ObjectStore:
        return open_store(self.url, settings=Settings(s3=self.settings), **options)


@contextmanager
def running_moto(port: int = 0) -> Iterator[S3Server]:
    command = [sys.executable, "-m", "tests.support.moto_server", "--port", str(port)]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        line = process.stdout.readline().decode()
        if "http://" not in line:
            raise RuntimeError(f"moto did not start: {line!r}")
        yield S3Server(line.split()[-1])


@contextmanager
def running_versitygw(binary: Path, directory: Path, *options: str) -> Iterator[S3Server]:
    """A real server over a directory whose file system knows extended attributes."""
    server = S3Server(f"http://127.0.0.1:{free_port()}")
    address = server.endpoint.removeprefix("http://")
    command = [str(binary), "--access", server.access_key, "--secret", server.secret_key, "--region", server.region]
    command += ["--port", address, "--quiet", "--keep-alive", *options, "posix", str(directory)]
    with running(command, stdout=subprocess.DEVNULL) as process:
        wait_for(address, process)
        yield server


@contextmanager
def running_s3proxy(folder: Path) -> Iterator[S3Server]:
    """S3Proxy, a gateway in Java, over a directory. Raises Unbuildable."""
    try:
        jars = maven_jars(f"s3proxy-{S3PROXY}", Path(__file__).with_name("s3proxy.xml"))
    except BrokerUnavailable as why:
        raise Unbuildable(str(why)) from why
    server = S3Server(f"http://127.0.0.1:{free_port()}")
    settings = {
        "s3proxy.endpoint": server.endpoint,
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": server.access_key,
        "s3proxy.credential": server.secret_key,
        "jclouds.provider": "transient-nio2",
    }
    (folder / "properties").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    quiet = folder / "logback.xml"
    quiet.write_text('<configuration><root level="OFF"/></configuration>')
    command = jars.command("org.gaul.s3proxy.Main", f"-Dlogback.configurationFile={quiet}", heap_mb=384)
    with running([*command, "--properties", str(folder / "properties")], stdout=subprocess.DEVNULL) as process:
        wait_for(server.endpoint.removeprefix("http://"), process, 60)
        yield server


@contextmanager
def running_ministack() -> Iterator[S3Server]:
    """MiniStack, which emulates many services of AWS, S3 among them, in memory. Raises Unbuildable."""
    packages, port = pip_packages("ministack", [f"ministack=={MINISTACK}"]), free_port()
    own = {"PYTHONPATH": str(packages), "GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "LOG_LEVEL": "ERROR"}
    with running([sys.executable, "-m", "ministack"], stdout=subprocess.DEVNULL, **own) as process:
        wait_for(f"127.0.0.1:{port}", process)
        yield S3Server(f"http://127.0.0.1:{port}")


def versitygw_binary() -> Path:
    """Raises Unbuildable."""
    return go_tool("github.com/versity/versitygw/cmd/versitygw", VERSITYGW)


@contextmanager
def running_gofakes3() -> Iterator[S3Server]:
    """A server in memory that knows conditions of PutObject, but none of CompleteMultipartUpload. Raises Unbuildable."""
    binary = go_tool("github.com/johannesboyne/gofakes3/cmd/gofakes3", GOFAKES3)
    server = S3Server(f"http://127.0.0.1:{free_port()}")
    address = server.endpoint.removeprefix("http://")
    with running([str(binary), "-host", address, "-backend", "memory", "-quiet"], stdout=subprocess.DEVNULL) as process:
        wait_for(address, process)
        yield server


@contextmanager
def running(command: list[str], stdout: int, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    guard()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(address: str, process: subprocess.Popen[Any], seconds: int = 15) -> None:
    host, _, port = address.partition(":")
    for _ in range(20 * seconds):
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with code {process.returncode}")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"nothing listens on {address}")
