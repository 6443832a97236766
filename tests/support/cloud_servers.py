"""Emulators of Google Cloud Storage and of Azure Blob Storage and a small HDFS for tests, and buckets on them."""

from __future__ import annotations

import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compactor.config.sections import AzureSettings, GcsSettings, HdfsSettings
from compactor.config.settings import Settings
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.storage.schemes import store_kind
from tests.support.go_tools import Unbuildable, go_tool, npm_tool
from tests.support.kafka_jars import BrokerJars, BrokerUnavailable, maven_jars
from tests.support.s3_server import Bucket, free_port, running, wait_for

HADOOP = "3.5.0"
FAKE_GCS = "v1.56.1"
AZURITE = "3.37.0"
HDFS_ADMIN = "hdfs/localhost@EXAMPLE.COM"
HDFS_USER = "compactor@EXAMPLE.COM"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # in Azurite's documentation


@dataclass(frozen=True)
class CloudBucket:
    """A bucket or container of its own on an emulator, and the settings that reach it. endpoint: of the server."""

    url: str
    endpoint: str
    settings: Settings

    @property
    def section(self) -> str:
        return store_kind(self.url).section

    def sections(self) -> dict[str, dict[str, Any]]:
        """Of a configuration file whose tier lies here."""
        return {"tier": {"url": self.url}, self.section: getattr(self.settings, self.section).model_dump()}

    def open(self, **options: Any) -> ObjectStore:
        return open_store(self.url, settings=self.settings, **options)

    def behind(self, endpoint: str) -> CloudBucket:
        """The same bucket, reached through a proxy."""
        before = getattr(self.settings, self.section)
        address = "webhdfs_url" if self.section == "hdfs" else "endpoint_url"
        there = before.model_validate({**before.model_dump(), address: getattr(before, address).replace(self.endpoint, endpoint)})
        return replace(self, endpoint=endpoint, settings=self.settings.model_copy(update={self.section: there}))


AnyBucket = Bucket | CloudBucket


@contextmanager
def running_fake_gcs(port: int = 0) -> Iterator[str]:
    """The endpoint of an emulator that keeps everything in memory. Raises Unbuildable."""
    binary = go_tool("github.com/fsouza/fake-gcs-server", FAKE_GCS)
    address = f"127.0.0.1:{port or free_port()}"
    host, _, number = address.partition(":")
    command = [str(binary), "-scheme", "http", "-host", host, "-port", number, "-backend", "memory", "-log-level", "error"]
    # Without a host of its own it takes 127.0.0.1 for a bucket's name.
    command += ["-public-host", address, "-external-url", f"http://{address}"]
    with running(command, stdout=subprocess.DEVNULL) as process:
        wait_for(address, process)
        yield f"http://{address}"


def new_gcs_bucket(endpoint: str) -> CloudBucket:
    name = f"test-{uuid.uuid4().hex[:16]}"
    body = f'{{"name": "{name}"}}'.encode()
    made = urllib.request.Request(f"{endpoint}/storage/v1/b", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(made).close()
    return CloudBucket(f"gs://{name}/tier of tests", endpoint, Settings(gcs=GcsSettings(endpoint_url=endpoint)))


@contextmanager
def running_azurite(*options: str, port: int = 0) -> Iterator[str]:
    """The endpoint of an emulator of Azure Blob Storage that keeps everything in memory. options: more of its own. Raises Unbuildable."""
    binary = npm_tool("azurite", AZURITE).with_name("azurite-blob")
    number = port or free_port()
    command = [str(binary), "--blobHost", "127.0.0.1", "--blobPort", str(number), "--silent", "--inMemoryPersistence"]
    command += ["--extentMemoryLimit", "2000", "--skipApiVersionCheck", "--disableTelemetry", *options]
    with running(command, stdout=subprocess.DEVNULL) as process:
        wait_for(f"127.0.0.1:{number}", process)
        yield f"http://127.0.0.1:{number}"


def new_azure_container(endpoint: str, folder: Path) -> CloudBucket:
    """folder: where the file with the account's key is written."""
    from azure.core.credentials import AzureNamedKeyCredential
    from azure.storage.blob import BlobServiceClient

    name = f"test-{uuid.uuid4().hex[:16]}"
    with BlobServiceClient(f"{endpoint}/{ACCOUNT}", AzureNamedKeyCredential(ACCOUNT, KEY)) as service:
        service.create_container(name).close()
    key_file = folder / "azure.key"
    key_file.write_text(KEY)
    settings = Settings(azure=AzureSettings(endpoint_url=f"{endpoint}/{ACCOUNT}", credentials_file=str(key_file)))
    return CloudBucket(f"az://{ACCOUNT}/{name}/tier of tests", endpoint, settings)


@contextmanager
def running_hdfs(folder: Path, *properties: str, jvm_flags: Sequence[str] = ()) -> Iterator[str]:
    """The WebHDFS of a namenode with one datanode, in one JVM. folder: for their data; properties: NAME=VALUE. Raises Unbuildable."""
    jars = _hadoop_jars()
    port, details = free_port(), folder / "details.json"
    command = jars.command("org.apache.hadoop.test.MiniDFSClusterManager", f"-Dtest.build.data={folder}", *jvm_flags, heap_mb=384)
    command += ["-format", "-datanodes", "1", "-httpport", str(port), "-writeDetails", str(details)]
    for name in properties:
        command += ["-D", name]
    with running(command, stdout=subprocess.DEVNULL) as process:
        wait_for(f"127.0.0.1:{port}", process, 60)
        for _ in range(600):
            if details.exists():
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"


@dataclass(frozen=True)
class Namenodes:
    """Two namenodes, both standbys at first. endpoint: the WebHDFS of the first one; rpc: what is not its web server."""

    endpoint: str
    rpc: str
    process: subprocess.Popen[str]

    def turn(self, state: str) -> None:
        """Put the first one into a state: active, standby, safe (mode), or writable again."""
        pipes = self.process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        pipes.stdin.write(f"{state}\n")
        pipes.stdin.flush()
        assert pipes.stdout.readline() == f"{state}\n"


@contextmanager
def running_namenodes(folder: Path) -> Iterator[Namenodes]:
    """HDFS with two namenodes and a datanode, in one JVM. folder: for their data. Raises Unbuildable."""
    program = Path(__file__).with_name("Namenodes.java")
    command = [*_hadoop_jars().command(str(program), heap_mb=384), str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            web, rpc = process.stdout.readline().split()
            yield Namenodes(f"http://127.0.0.1:{web}", f"http://127.0.0.1:{rpc}", process)
        finally:
            process.kill()


@contextmanager
def running_kerberos_hdfs(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The WebHDFS of a cluster that wants Kerberos, and the environment in which tickets can be had. Raises Unbuildable.

    Apache Kerby is the KDC. The keytab has the principals HDFS_ADMIN and HDFS_USER.
    """
    jars, port, keytab = _hadoop_jars(), free_port(), folder / "keytab"
    (folder / "kdc").mkdir()
    (folder / "kdc.properties").write_text(
        f"org.name=EXAMPLE\norg.domain=COM\nkdc.bind.address=localhost\nkdc.port={port}\ninstance=Kdc\ntransport=TCP\n"
        "max.ticket.lifetime=86400000\nmax.renewable.lifetime=604800000\ndebug=false\n"
    )
    names = [name.partition("@")[0] for name in (HDFS_ADMIN, HDFS_USER, "HTTP/localhost")]
    command = jars.command("org.apache.hadoop.minikdc.MiniKdc")
    with running([*command, str(folder / "kdc"), str(folder / "kdc.properties"), str(keytab), *names], stdout=subprocess.DEVNULL) as kdc:
        wait_for(f"localhost:{port}", kdc, 60)
        for _ in range(100):
            if keytab.exists() and keytab.stat().st_size:
                break
            time.sleep(0.1)
        configuration = folder / "kdc" / "krb5.conf"
        server = {"kerberos.principal": HDFS_ADMIN, "keytab.file": keytab}
        web = {"type": "kerberos", "kerberos.principal": "HTTP/localhost@EXAMPLE.COM", "kerberos.keytab": keytab}
        properties = {
            "hadoop.security.authentication": "kerberos",
            "hadoop.http.filter.initializers": "org.apache.hadoop.hdfs.web.AuthFilterInitializer",
            **{f"hadoop.http.authentication.{name}": value for name, value in web.items()},
            **{f"dfs.web.authentication.{name}": value for name, value in web.items()},
            **{f"dfs.{node}.{name}": value for node in ("namenode", "datanode") for name, value in server.items()},
            "dfs.block.access.token.enable": "true",
            "dfs.data.transfer.protection": "authentication",
            "ignore.secure.ports.for.testing": "true",
        }
        pairs = [f"{name}={value}" for name, value in properties.items()]
        with running_hdfs(folder / "hdfs", *pairs, jvm_flags=[f"-Djava.security.krb5.conf={configuration}"]) as endpoint:
            tickets = {"KRB5_CONFIG": str(configuration), "KRB5_CLIENT_KTNAME": str(keytab), "KRB5CCNAME": f"DIR:{folder / 'tickets'}"}
            yield endpoint.replace("127.0.0.1", "localhost"), tickets


def _hadoop_jars() -> BrokerJars:
    try:
        return maven_jars(f"hdfs-{HADOOP}", Path(__file__).with_name("hdfs.xml"))
    except BrokerUnavailable as why:
        raise Unbuildable(str(why)) from why


def new_hdfs_directory(endpoint: str) -> CloudBucket:
    settings = Settings(hdfs=HdfsSettings(webhdfs_url=endpoint, user="root"))
    return CloudBucket(f"hdfs://namenode/test-{uuid.uuid4().hex[:16]}/tier of tests", endpoint, settings)
