"""No exception of a library brings a credential into an error: each is sent through the store, registry, catalog or client raising it."""

from __future__ import annotations

import http.client
import inspect
import pickle
import ssl
import string
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import azure.core.exceptions
import botocore.exceptions
import botocore.httpsession
import google.api_core.exceptions
import google.auth.exceptions
import kafka.errors
import pyiceberg.exceptions
import pytest
import requests
import requests.adapters
import sqlalchemy.exc
import urllib3
from confluent_kafka import KafkaError, KafkaException

from compactor.adapters.brokers.cluster import _open_kafka_python_client
from compactor.adapters.kafka_client import KafkaConnection, create_kafka_client, translate_kafka_error
from compactor.cli.command_parser import as_compactor_error
from compactor.config.sections import AzureSettings, GcsSettings, HdfsSettings, RegistrySettings, S3Settings
from compactor.config.settings import Settings
from compactor.decoding import SchemaRegistry
from compactor.errors import BadData, CompactorError, Unavailable, bug_reason, without_secrets
from compactor.features.iceberg.table import _convert_iceberg_errors
from compactor.storage.factory import open_store
from compactor.storage.settings import RetrySettings

SECRET = "Zm9vYmFy/c2VjcmV0%2B"
ONCE = RetrySettings(deadline_s=0.001, base_s=0.0005, cap_s=0.001, first_answer_s=0.001)
TEXTS = [
    f"HTTPSConnectionPool(host='acc.blob.core.windows.net', port=443): url: /c/k?sv=2024-11-04&sig={SECRET}&se=1 (Caused by",
    f"<urlopen error https://bucket.s3.amazonaws.com/k?X-Amz-Security-Token={SECRET}&X-Amz-Signature={SECRET}>",
    f"http://datanode:9864/webhdfs/v1/k?op=OPEN&delegation={SECRET}&offset=0",
    f"no answer from https://user:{SECRET}@registry.example:8081/schemas/ids/1.",
    f"https://{SECRET.replace('/', '')}@catalog.example/v1/config",
    f"could not connect with 'postgresql+psycopg://compactor:{SECRET}@db/catalog'",
    f"DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={SECRET};EndpointSuffix=core.windows.net",
    f"cannot use sasl.password={SECRET} and ssl.key.password={SECRET}",
    f"Invalid header value b'{SECRET}\\n'",
]
TEXT = " ; ".join(TEXTS)


def classes(module: ModuleType) -> list[type[Exception]]:
    found = {value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Exception)}
    return sorted(found, key=lambda one: one.__name__)


def made(kind: type[Exception]) -> Exception:
    """An exception of a library with the text in it, however its class is made."""
    if issubclass(kind, botocore.exceptions.ClientError):
        return kind({"Error": {"Code": "SlowDown", "Message": TEXT}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "GetObject")
    if issubclass(kind, botocore.exceptions.BotoCoreError):
        fields = {name for _, name, _, _ in string.Formatter().parse(getattr(kind, "fmt", "")) if name}
        with suppress(TypeError):
            return kind(**(dict.fromkeys(fields, TEXT) | {"error": OSError(TEXT)}))
    for arguments in ((TEXT,), (None, TEXT), (None, "/k", TEXT), (TEXT, None, None), (TEXT, TEXT), (TEXT, TEXT, TEXT), ()):
        try:
            error = kind(*arguments)
            str(error)
        except Exception:  # noqa: BLE001 - it is made in another way
            continue
        if not arguments:
            error.args = (TEXT,)
        return error
    silent = type(kind.__name__, (kind,), {"__init__": lambda self: None, "__str__": lambda self: TEXT})  # it is made of numbers
    told: Exception = silent()
    return told


NETWORK = [*classes(requests.exceptions), *classes(urllib3.exceptions), *classes(http.client), OSError, ssl.SSLError, ValueError, EOFError]
RAISED: dict[str, list[type[Exception]]] = {
    "s3": [*classes(botocore.exceptions), *NETWORK],
    "gs": [*classes(google.auth.exceptions), *classes(google.api_core.exceptions), *NETWORK],
    "az": [*classes(azure.core.exceptions), *NETWORK],
    "hdfs": NETWORK,
}
URLS = {"s3": "s3://bucket/tier", "gs": "gs://bucket/tier", "az": "az://acc/container/tier", "hdfs": "hdfs://namenode/tier"}


def reported(action: Callable[[], object]) -> str:
    """What a command says of the exception that this raises; empty if it is an answer, such as that of a range beyond the end."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return str(as_compactor_error(error))
    return ""


def is_told(text: str) -> bool:
    return any(part in text for part in (SECRET, SECRET.replace("/", ""), *SECRET.split("/")))


@pytest.mark.parametrize("scheme", RAISED)
def test_no_exception_of_a_stores_library_tells_a_secret(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "sas").write_text("sv=2024-11-04&sp=racwdl&sig=" + SECRET)
    settings = Settings(
        s3=S3Settings(endpoint_url="http://127.0.0.1:1", region="us-east-1"),
        gcs=GcsSettings(endpoint_url="http://127.0.0.1:1"),
        azure=AzureSettings(endpoint_url="http://127.0.0.1:1/acc", credentials_file=str(tmp_path / "sas")),
        hdfs=HdfsSettings(webhdfs_url="http://127.0.0.1:1"),
    )
    raised: list[Exception] = []

    def send(*_: object, **__: object) -> None:
        raise raised[-1]

    monkeypatch.setattr(botocore.httpsession.URLLib3Session, "send", send)
    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    store = open_store(URLS[scheme], settings=settings, retries=ONCE)
    told, silent = [], 0
    for kind in RAISED[scheme]:
        raised.append(made(kind))
        text = reported(lambda: store.get("k"))
        silent += not text
        if is_told(text):
            told.append((kind, text))
    assert told == []
    assert silent < 3
    assert len(raised) > 30


def test_what_is_sent_through_does_hold_the_secret() -> None:
    assert all(is_told(text) for text in TEXTS)
    kinds = {kind for kinds in (*RAISED.values(), iceberg_classes()) for kind in kinds}
    silent = {kind.__name__ for kind in kinds if not is_told(str(made(kind)))}
    assert len(silent) < len(kinds) / 5, silent  # those whose text is fixed


def test_no_exception_of_the_registrys_library_tells_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in classes(urllib3.exceptions):
        error = made(kind)

        def request(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(urllib3.PoolManager, "request", request)
        registry = SchemaRegistry(RegistrySettings(url=f"http://user:{SECRET}@127.0.0.1:1"))
        assert not is_told(reported(lambda: registry.schema(1))), kind  # noqa: B023 - called at once


def iceberg_classes() -> list[type[Exception]]:
    return [*classes(pyiceberg.exceptions), *classes(sqlalchemy.exc), *NETWORK, PermissionError]


def test_no_exception_of_a_catalog_tells_a_secret() -> None:
    def fail(error: Exception) -> None:
        with _convert_iceberg_errors("db.orders"):
            raise error

    assert [kind for kind in iceberg_classes() if is_told(reported(lambda kind=kind: fail(made(kind))))] == []  # type: ignore[misc]


def test_no_exception_of_a_kafka_client_tells_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> None:
        raise error

    error: Exception
    for error in (KafkaException(KafkaError(KafkaError._INVALID_ARG, TEXT)), ValueError(TEXT), TypeError(TEXT)):
        assert not is_told(reported(lambda error=error: create_kafka_client(lambda: fail(error))))  # type: ignore[misc]
    codes = [value for name, value in vars(KafkaError).items() if name.isupper() and isinstance(value, int)]
    assert len(codes) > 100
    for code in codes:
        assert not is_told(str(translate_kafka_error(KafkaError(code, TEXT), "127.0.0.1:1", "topics")))
    for kind in classes(kafka.errors):
        error = made(kind)
        monkeypatch.setattr("kafka.KafkaAdminClient", lambda error=error, **_: fail(error))

        def connect() -> None:
            with _open_kafka_python_client(KafkaConnection("127.0.0.1:1")):
                pass

        assert not is_told(reported(connect))


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_of_the_secret_is_left_and_what_helps_is(text: str) -> None:
    shown = without_secrets(text)
    assert not is_told(shown)
    assert without_secrets(shown) == shown
    for word in (
        "acc.blob.core.windows.net",
        "/c/k",
        "bucket.s3.amazonaws.com/k",
        "datanode:9864/webhdfs/v1/k",
        "registry.example:8081/schemas",
    ):
        assert (word in text) == (word in shown)


@pytest.mark.parametrize(
    "text",
    [
        "cannot read s3://bucket/path@v1/orders-0/x.log: no such object. Is the store running, and is [s3] endpoint_url right? Try again",
        "cannot list hdfs://namenode:8020/tiers/a@b",
        "cannot write abfss://container@account.dfs.core.windows.net/tier",
        "http://[::1]:8080/a@b does not answer",
        "x@y.iam.gserviceaccount.com does not have storage.objects.create access",
        "What listens at [s3] endpoint_url speaks no TLS: write http://, or name the port that does",
        "kafka-configs --alter --topic orders --add-config cleanup.policy=delete,retention.ms=-1",
        "pattern 'a?b' matches nothing; key_entropy=3, credentials_file=/etc/keys",
        "design=new, signal=15, tokens=3",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_every_way_into_an_error_is_closed() -> None:
    error: CompactorError = Unavailable(TEXT, hint=TEXT)
    bad = BadData(TEXT, segment="x.log", hint=TEXT)
    for text in (str(error), error.message, error.hint, repr(error), str(bad), bad.cause, str(pickle.loads(pickle.dumps(error)))):
        assert not is_told(text)
    assert not is_told(bug_reason(RuntimeError(TEXT)))
