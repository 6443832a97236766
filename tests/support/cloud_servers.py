"""Emulators of Google Cloud Storage and of Azure Blob Storage for tests, and buckets on them."""

from __future__ import annotations

import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from compactor.config.settings import Settings
from compactor.config.store_sections import Gcs
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from tests.support.go_tools import go_tool
from tests.support.s3_server import free_port, running, wait_for

FAKE_GCS = "v1.56.1"


@dataclass(frozen=True)
class CloudBucket:
    """A bucket or container of its own on an emulator, and the settings that reach it. endpoint: of the server."""

    url: str
    endpoint: str
    settings: Settings

    def open(self, **options: Any) -> ObjectStore:
        return open_store(self.url, settings=self.settings, **options)


@dataclass(frozen=True)
class GcsBucket(CloudBucket):
    def behind(self, endpoint: str) -> GcsBucket:
        """The same bucket, reached through a proxy."""
        return replace(self, endpoint=endpoint, settings=Settings(gcs=Gcs(endpoint_url=endpoint)))


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


def new_gcs_bucket(endpoint: str) -> GcsBucket:
    name = f"test-{uuid.uuid4().hex[:16]}"
    body = f'{{"name": "{name}"}}'.encode()
    made = urllib.request.Request(f"{endpoint}/storage/v1/b", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(made).close()
    return GcsBucket(f"gs://{name}/tier of tests", endpoint, Settings(gcs=Gcs(endpoint_url=endpoint)))
