"""A compactor whose credentials cannot delete segments, beside a `retire` that may, on a server that enforces conf/iam-policy*.json."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from compactor.errors import UsageError
from tests.integration.test_daemon_process import FAST, Service, wait_for
from tests.support.deployment import Deployment
from tests.support.go_tools import Unbuildable
from tests.support.s3_server import ROOT, Bucket, S3Server, running_versitygw, versitygw_binary

COMPACTOR, RETIRER = "compactor", "retirer"
POLICIES = {COMPACTOR: "iam-policy-compactor.json", RETIRER: "iam-policy.json"}
OWN = ".tiered-compactor/"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """versitygw with two users who may do only what a bucket's policy allows."""
    try:
        binary = versitygw_binary()
    except Unbuildable as why:
        pytest.skip(str(why))
    with tempfile.TemporaryDirectory(prefix="versitygw-") as folder:
        (Path(folder) / "users").mkdir()
        (Path(folder) / "data").mkdir()
        with running_versitygw(binary, Path(folder) / "data", "--iam-dir", str(Path(folder) / "users")) as started:
            login = ["--access", started.access_key, "--secret", started.secret_key, "--endpoint-url", started.endpoint]
            for name in POLICIES:
                user = ["create-user", "--access", name, "--secret", secret_of(name), "--role", "user"]
                subprocess.run([str(binary), "admin", *login, *user], check=True, capture_output=True)
            yield started


def secret_of(name: str) -> str:
    return f"secret of {name}"


def as_user(server: S3Server, name: str) -> S3Server:
    return S3Server(server.endpoint, name, secret_of(name), server.region)


def statements(name: str, bucket: Bucket) -> list[dict[str, Any]]:
    """The user's policy file for this bucket, as statements of a bucket policy."""
    text = (ROOT / "conf" / POLICIES[name]).read_text().replace("BUCKET", bucket.name).replace("PREFIX", bucket.prefix)
    found: list[dict[str, Any]] = json.loads(text)["Statement"]
    return [{**one, "Principal": {"AWS": [name]}} | {"Sid": f"{name}{one['Sid']}"} for one in found]


@pytest.fixture
def bucket(server: S3Server) -> Bucket:
    made = server.make_bucket()
    # versitygw knows no conditions in policies
    allowed = [{key: value for key, value in one.items() if key != "Condition"} for name in POLICIES for one in statements(name, made)]
    server.client().put_bucket_policy(Bucket=made.name, Policy=json.dumps({"Version": "2012-10-17", "Statement": allowed}))
    return made


@pytest.fixture
def service(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    sections = {**FAST, "publish": {**FAST["publish"], "retire": False}}
    made = Service(Deployment(tmp_path / "compactor", sections | bucket.sections()))
    act_as(COMPACTOR, bucket, monkeypatch)
    yield made
    for process in made.running:
        process.put_down()


def act_as(name: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in as_user(bucket.server, name).environment().items():
        monkeypatch.setenv(variable, value)


def segments(bucket: Bucket) -> Sequence[str]:
    return [info.key for info in bucket.open().list("") if not info.key.startswith(OWN) and info.key.endswith(".log")]


def test_a_compactor_that_cannot_delete_segments_runs_on_and_another_process_retires(
    service: Service, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.deployment.do("config", "check")["ok"]
    log = service.log(0)
    raw = segments(bucket)
    daemon = service.start()
    wait_for(lambda: service.is_clean(log))
    service.bring(log)
    wait_for(lambda: service.is_clean(log))
    wait_for(lambda: set(raw) <= set(service.deployment.do("retire", "--dry-run")["deleted"]))
    wait_for(lambda: daemon.metric("tiered_compactor_retire_overdue_seconds") > 0)
    assert daemon.process.said().count("this process deletes no segments (retire = false under [publish])") == 1
    assert not [line for line in daemon.process.said().splitlines() if "error" in line.lower()]
    assert daemon.get("readyz")[0] == 200
    assert set(raw) < set(segments(bucket))

    refused = service.deployment.ask("retire")
    assert (refused.code, "retire under [publish] is false" in refused.error["message"]) == (UsageError.exit_code, True)
    with pytest.raises(ClientError, match="AccessDenied"):
        as_user(bucket.server, COMPACTOR).client().delete_object(Bucket=bucket.name, Key=f"{bucket.prefix}/{raw[0]}")

    act_as(RETIRER, bucket, monkeypatch)
    apart = Deployment(tmp_path / "retirer", {**FAST, **bucket.sections()})
    deleted = apart.do("retire")["deleted"]
    assert set(raw) <= {key for key in deleted if key.endswith(".log")}
    assert not set(raw).intersection(segments(bucket))
    act_as(COMPACTOR, bucket, monkeypatch)
    service.bring(log)
    wait_for(lambda: service.is_clean(log))
    assert apart.do("verify")["ok"]
