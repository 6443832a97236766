"""Every way to an account of Azure: keys, connection strings, signatures, managed and workload identities; on Azurite, tokens by TLS.

Azurite checks of a token who issued it, for whom and until when, not its signature. The endpoint that issues tokens is one of these tests.
"""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typing_extensions import override

from compactor.config.sections import AzureSettings
from compactor.config.settings import Settings
from compactor.errors import Refused
from compactor.storage.factory import open_store
from compactor.storage.port import FileRange, ObjectRangeToCopy, ObjectStore
from compactor.storage.probe import probe_store
from compactor.storage.settings import RetrySettings, TransferSettings
from tests.support.cloud_servers import ACCOUNT, KEY, CloudBucket, new_azure_container, running_azurite

VARIABLES = (
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_ID", "AZURE_TENANT_ID"),
    *("AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_AUTHORITY_HOST", "IDENTITY_ENDPOINT", "IDENTITY_HEADER"),
)
PART = 5 << 20
PARTS = TransferSettings(part_bytes=PART)
QUICK = RetrySettings(deadline_s=1, first_answer_s=3)


def signature(container: str, permissions: str = "racwdl", hours: int = 1) -> str:
    """Return a shared access signature for a container, as it is handed to programs. hours: from now on that it holds."""
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    until = dt.datetime.now(dt.UTC) + dt.timedelta(hours=hours)
    allowed = ContainerSasPermissions.from_string(permissions)
    return str(generate_container_sas(ACCOUNT, container, account_key=KEY, permission=allowed, expiry=until))


WAYS: dict[str, Callable[[str, str], tuple[str, str]]] = {
    "key": lambda endpoint, container: ("AZURE_STORAGE_KEY", KEY),
    "signature": lambda endpoint, container: ("AZURE_STORAGE_SAS_TOKEN", f"?{signature(container)}"),
    "connection string with a key": lambda endpoint, container: (
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}/{ACCOUNT};",
    ),
    "connection string with a signature": lambda endpoint, container: (
        "AZURE_STORAGE_CONNECTION_STRING",
        f"BlobEndpoint={endpoint}/{ACCOUNT};SharedAccessSignature={signature(container)}",
    ),
}
"""Variable and value, from endpoint and container."""


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def container_of(bucket: CloudBucket) -> str:
    return bucket.url.split("/")[3]


def use_everything(store: ObjectStore, folder: Path) -> None:
    """Create, copy, read, list and delete."""
    (folder / "large").write_bytes(b"x" * (2 * PART + 1))
    store.create_from_file("large", folder / "large")
    store.compose("composed", [ObjectRangeToCopy("large", 1, PART, store.head("large").etag), FileRange(folder / "large", 0, 3)])
    assert store.get("composed", PART - 1) == b"x" * 4
    assert [info.key for info in store.list("")] == ["composed", "large"]
    store.delete(["composed", "large"])
    assert [finding for finding in probe_store(store, lambda: int(time.time() * 1000)) if finding.severity == "error"] == []


@pytest.mark.parametrize("by", ["variable", "file"])
@pytest.mark.parametrize("way", WAYS)
def test_an_account_is_reached_by(azure_container: CloudBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, by: str) -> None:
    name, value = WAYS[way](azure_container.endpoint, container_of(azure_container))
    endpoint = "" if way.startswith("connection") else f"{azure_container.endpoint}/{ACCOUNT}"
    settings = AzureSettings(endpoint_url=endpoint)
    if by == "file":
        (tmp_path / "credentials").write_text(f"{value}\n")
        settings = settings.model_copy(update={"credentials_file": str(tmp_path / "credentials")})
    else:
        monkeypatch.setenv(name, value)
    use_everything(open_store(azure_container.url, settings=Settings(azure=settings), transfers=PARTS), tmp_path)


@pytest.mark.parametrize(
    ("value", "says", "advises"),
    [
        (lambda container: base64.b64encode(b"another key").decode(), "credentials are refused|access denied", "AZURE_STORAGE_KEY"),
        (lambda container: signature(container, hours=-1), "credentials are refused|access denied", "clock"),
        (lambda container: signature(container, permissions="rl"), "access denied", "racwdl"),
    ],
)
def test_credentials_that_do_not_do_name_what_to_change(
    azure_container: CloudBucket, tmp_path: Path, value: Callable[[str], str], says: str, advises: str
) -> None:
    (tmp_path / "credentials").write_text(value(container_of(azure_container)))
    settings = AzureSettings(endpoint_url=f"{azure_container.endpoint}/{ACCOUNT}", credentials_file=str(tmp_path / "credentials"))
    store = open_store(azure_container.url, settings=Settings(azure=settings), retries=QUICK)
    with pytest.raises(Refused, match=says) as caught:
        store.create("k", b"x")
    assert advises in caught.value.hint


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + dt.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return paths


@pytest.fixture(scope="module")
def tls_azurite(certificate: tuple[Path, Path]) -> Iterator[str]:
    certificate_file, key_file = certificate
    with running_azurite("--oauth", "basic", "--cert", str(certificate_file), "--key", str(key_file)) as endpoint:
        yield endpoint.replace("http:", "https:")


@pytest.mark.parametrize("kind", ["managed", "workload"])
def test_identities_reach_the_account_without_a_secret(
    tls_azurite: str, certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate[0]))
    bucket = new_azure_container(tls_azurite, tmp_path)
    with issuing_tokens(certificate) as (issuer, asked):
        if kind == "managed":
            monkeypatch.setenv("IDENTITY_ENDPOINT", f"{issuer}/token")
            monkeypatch.setenv("IDENTITY_HEADER", "header")
        else:
            (tmp_path / "projected").write_text("of the cluster")
            for name, value in {
                "AZURE_AUTHORITY_HOST": issuer,
                "AZURE_TENANT_ID": "00000000-0000-0000-0000-000000000001",
                "AZURE_CLIENT_ID": "00000000-0000-0000-0000-000000000002",
                "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "projected"),
            }.items():
                monkeypatch.setenv(name, value)
        settings = AzureSettings(endpoint_url=f"{tls_azurite}/{ACCOUNT}")
        store = open_store(bucket.url, settings=Settings(azure=settings), transfers=PARTS)
        store.create("k", b"x")
        assert store.get("k") == b"x"
        assert [info.key for info in store.list("")] == ["k"]
        store.delete(["k"])
    assert asked[0].startswith("GET /token?" if kind == "managed" else "POST /00000000-0000-0000-0000-000000000001/oauth2")


@contextmanager
def issuing_tokens(certificate: tuple[Path, Path]) -> Iterator[tuple[str, list[str]]]:
    """An endpoint of tokens for storage: as a virtual machine has one, and as Microsoft Entra is one. Its URL, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append(f"{self.command} {self.path} {body.decode()}")
            answer = json.dumps(
                {"access_token": token(), "expires_in": 3600, "expires_on": int(time.time()) + 3600, "token_type": "Bearer"}
            )
            self.send_response_only(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        do_GET = do_POST  # noqa: N815

        @override
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def token() -> str:
    """Return a token for Azure Storage, with a signature that nobody checks."""
    now = int(time.time())
    claims = {"aud": "https://storage.azure.com", "iss": "https://sts.windows.net/tenant/", "iat": now, "nbf": now - 60, "exp": now + 3600}
    parts = [{"alg": "RS256", "typ": "JWT"}, claims]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*encoded, "c2ln"])
