"""Keys and values decoded by a schema registry, as JSON and as text: `cat`, `explain --key` and the data source."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastavro import schemaless_writer
from fastavro.schema import parse_schema
from pyspark.sql.types import StructField, StructType

from compactor.config.settings import load_settings
from compactor.decoding import KeyAndValueDecoder
from compactor.errors import BadData, UsageError
from compactor.features.spark.datasource import ALL_COLUMN_TYPES, SPARK_TYPES, KafkaTieredBatchReader, parse_read_options
from tests.builders import LogBuilder
from tests.support.kafka_jars import BrokerUnavailable
from tests.support.schema_registry import TestRegistry, running_registry
from tests.support.tier_cli import TierCli

CITY = {"type": "record", "name": "City", "namespace": "org.example", "fields": [{"name": "name", "type": "string"}]}
CUSTOMER = {
    "type": "record",
    "name": "Customer",
    "namespace": "org.example",
    "fields": [
        {"name": "name", "type": ["null", "string"]},
        {"name": "since", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "balance", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "photo", "type": "bytes"},
        {"name": "city", "type": "org.example.City"},
    ],
}
KEY = {"type": "record", "name": "Key", "namespace": "org.example", "fields": [{"name": "id", "type": "long"}]}
SINCE = dt.datetime(2026, 1, 31, 12, 0, 0, 5000, dt.UTC)
SHOWN = {"name": "Ann", "since": "2026-01-31T12:00:00.005000Z", "balance": "12.50", "photo": "/w==", "city": {"name": "Oslo"}}


@pytest.fixture(scope="module")
def registry() -> Iterator[TestRegistry]:
    try:
        with running_registry() as found:
            yield found
    except BrokerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to run the tests with a schema registry: {error}", pytrace=False)
        pytest.skip(str(error))


def framed(schema_id: int, schema: Any, value: object, *named: Any) -> bytes:
    """Return a value in the wire format, written by fastavro alone."""
    types: dict[str, Any] = {}
    for each in named:
        parse_schema(each, types)
    stream = io.BytesIO()
    schemaless_writer(stream, parse_schema(schema, types), value)
    return b"\0" + schema_id.to_bytes(4, "big") + stream.getvalue()


@pytest.fixture
def cli(registry: TestRegistry, tmp_path: Path) -> TierCli:
    """A tier with an Avro record, a record whose schema nobody has, JSON Schema, protobuf, and text."""
    registry.register("city", CITY)
    customer = registry.register("orders-value", CUSTOMER, references=[{"name": "org.example.City", "subject": "city", "version": 1}])
    key = registry.register("orders-key", KEY)
    by_json = registry.register("notes-value", {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}, "JSON")
    proto = registry.register("protos-value", 'syntax = "proto3"; message A { int32 a = 1; }', "PROTOBUF")
    value = {"name": "Ann", "since": SINCE, "balance": decimal.Decimal("12.50"), "photo": b"\xff", "city": {"name": "Oslo"}}
    avro = framed(customer, CUSTOMER, value, CITY)
    log = LogBuilder()
    log.put(framed(key, KEY, {"id": 5}) + b"=" + avro, b"a=" + avro[:-1], b"b=" + avro + b"!", b"c=\0\0\xff\xff\xff\xff")
    log.put(
        b"d=\0" + by_json.to_bytes(4, "big") + b'{"n":1}', b"e=\0" + proto.to_bytes(4, "big") + b"\0\x08\x01", 'f={"n": 2}', "g=plain", "h"
    )
    cli = TierCli(tmp_path, {"registry": {"url": registry.url}})
    cli.bring(log.write(tmp_path / "log"))
    return cli


def lines(cli: TierCli, *arguments: object) -> list[dict[str, Any]]:
    answer = cli.ask("cat", "orders-0", *arguments, output="table")
    assert answer.code == 0, answer.stderr
    return [json.loads(line) for line in answer.document.splitlines()]


def test_cat_decodes_by_the_registry_and_says_what_it_cannot_decode(cli: TierCli) -> None:
    found = lines(cli)
    assert found[0]["key"] == {"id": 5}
    assert found[0]["value"] == SHOWN
    assert found[0]["time"] == "1970-01-01T00:00:01.000Z"
    assert all("value" not in line and "value_base64" in line for line in found[1:4])
    assert "not valid by schema" in found[1]["value_error"]
    assert "1 bytes follow the value" in found[2]["value_error"]
    assert "value_error" not in found[3]
    assert found[4]["value"] == {"n": 1}
    assert "PROTOBUF" in found[5]["value_error"]
    assert [line["value"] for line in found[6:]] == ['{"n": 2}', "plain", None]
    (unknown,) = lines(cli, "--value-format", "avro", "--from", 3, "--to", 3)
    assert unknown["value_error"] == f"the schema registry has no schema {0xFFFFFF}"
    assert lines(cli, "--value-format", "json", "--from", 6, "--to", 6)[0]["value"] == {"n": 2}
    assert lines(cli, "--value-format", "json", "--from", 7, "--to", 7)[0]["value_error"].startswith("not JSON")
    assert lines(cli, "--value-format", "bytes", "--from", 7, "--to", 7)[0]["value_base64"] == base64.b64encode(b"plain").decode()


def test_the_table_of_cat_shows_decoded_records_in_a_line_each(cli: TierCli) -> None:
    shown = cli.ask("cat", "orders-0", "--format", "table", output="table").document.splitlines()
    assert shown[0].split() == ["offset", "time", "key", "value"]
    assert '{"id":5}' in shown[1]
    assert json.dumps(SHOWN, separators=(",", ":")) in shown[1]
    assert len(shown) == 10


def test_a_key_is_named_by_its_avro_value(cli: TierCli, registry: TestRegistry) -> None:
    assert [line["offset"] for line in lines(cli, "--key", 'avro:{"id": 5}')] == [0]
    explained = cli.do("explain", "orders-0", "--key", 'avro:{"id": 5}')
    assert explained["answer"].startswith('The key {"id":5} by schema ')
    refused = cli.ask("explain", "orders-0", "--key", 'avro:{"id": "five"}')
    assert (refused.code, "matches none of the Avro schemas" in refused.error["message"]) == (2, True)


def test_a_key_that_two_schemas_encode_must_name_one(registry: TestRegistry) -> None:
    first = registry.register("pairs-key", {"type": "string"})
    second = registry.register("pairs-key", {"type": "enum", "name": "Letter", "symbols": ["a"]})
    decoder = KeyAndValueDecoder(load_settings(None, {"TIERED_COMPACTOR__REGISTRY__URL": registry.url}))
    with pytest.raises(UsageError, match="2 schemas that encode this key") as refused:
        decoder.encode_avro_key("pairs", 'avro:"a"')
    assert f"avro@{second}" in refused.value.hint
    assert decoder.encode_avro_key("pairs", f'avro@{first}:"a"') == framed(first, "string", "a")


def test_the_data_source_has_text_columns(cli: TierCli) -> None:
    def read(**options: str) -> list[tuple[str | None, ...]]:
        request = parse_read_options({"config": str(cli.config), "topic": "orders", "columns": "keyText,valueText", **options})
        schema = StructType([StructField(name, SPARK_TYPES[ALL_COLUMN_TYPES[name]]) for name in request.columns])
        reader = KafkaTieredBatchReader(request, schema)
        batches = [batch for split in reader.partitions() for batch in reader.read(split)]
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]

    with pytest.raises(BadData, match="the value cannot be decoded: not valid by schema"):
        read()
    found = read(onDecodingError="null")
    assert found[0] == ('{"id":5}', json.dumps(SHOWN, separators=(",", ":")))
    assert found[1:4] == [("a", None), ("b", None), ("c", None)]
    assert found[6:] == [("f", '{"n": 2}'), ("g", "plain"), ("h", None)]


def test_a_registry_that_does_not_answer_is_named(cli: TierCli) -> None:
    cli.set(registry={"url": "http://127.0.0.1:9"})
    cli.refused("cat", "orders-0", code=5, says="the schema registry at http://127.0.0.1:9 does not answer")
