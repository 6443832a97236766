"""Client of a schema registry: schemas by id and by subject, as Confluent's registry and those that speak its API serve them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import urllib3

from compactor.config.store_sections import RegistrySettings
from compactor.errors import NotFound, Refused, StoreError, Unavailable, UsageError

TIMEOUT_S: Final = 5.0
"""Seconds after which a request that is not answered has failed. It is sent three times."""


JsonDocument = Any


@dataclass(frozen=True)
class RegisteredSchema:
    """A schema of the registry.

    kind: ``AVRO``, ``JSON`` or ``PROTOBUF``.
    references: texts of the schemas whose types this schema uses, directly or indirectly; each comes after the texts that it uses itself.
    """

    schema_id: int
    kind: str
    text: str
    references: tuple[str, ...] = ()


class SchemaRegistry:
    """Client that reads schemas from the schema registry. Each schema is requested once per process, because the schema of an id never
    changes.
    """

    def __init__(self, settings: RegistrySettings) -> None:
        """Create a client of the registry that ``settings`` name. Raises UsageError if the file with the credentials cannot be read."""
        self._url = settings.url.rstrip("/")
        # Requests are few, and no socket is left open that nobody closes.
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json", "Connection": "close"}
        if settings.credentials_file:
            headers |= urllib3.make_headers(basic_auth=_read_credentials_file(settings.credentials_file))
        self._pool = urllib3.PoolManager(headers=headers, timeout=TIMEOUT_S, retries=urllib3.Retry(2, redirect=3, raise_on_redirect=False))
        self.schema = lru_cache(maxsize=10_000)(self._fetch_schema)

    def _fetch_schema(self, schema_id: int) -> RegisteredSchema | None:
        """Return the schema with this id, or None if the registry has none. Raises StoreError if the registry cannot be queried."""
        try:
            return self._parse_schema_document(schema_id, self._request_json(f"/schemas/ids/{schema_id}"))
        except NotFound:
            return None

    def fetch_schema_ids_of_subject(self, subject: str) -> list[int]:
        """Return the ids of all versions of a subject, such as ``orders-key``; an empty list if there is no such subject."""
        place = f"/subjects/{quote(subject, safe='')}/versions"
        try:
            return list(dict.fromkeys(self._request_json(f"{place}/{version}")["id"] for version in self._request_json(place)))
        except NotFound:
            return []

    def _parse_schema_document(self, schema_id: int, document: JsonDocument) -> RegisteredSchema:
        """Return the schema that a JSON document of the registry describes. Schemas to which it refers are fetched from the registry."""
        references: dict[str, None] = {}
        for each in document.get("references") or ():
            found = self._request_json(f"/subjects/{quote(each['subject'], safe='')}/versions/{each['version']}")
            schema = self._parse_schema_document(found["id"], found)
            references |= dict.fromkeys((*schema.references, schema.text))
        return RegisteredSchema(schema_id, document.get("schemaType") or "AVRO", document["schema"], tuple(references))

    def _request_json(self, path: str) -> JsonDocument:
        """Request a path of the registry, and return the JSON document.

        :raises NotFound: if the registry does not have the path.
        :raises Refused: if the credentials are refused.
        :raises Unavailable: if the registry does not answer.
        :raises StoreError: if the answer has another status or is not JSON.
        """
        try:
            answer = self._pool.request("GET", self._url + path)
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise Unavailable(f"the schema registry at {self._url} does not answer: {reason}", hint="See url under [registry]") from None
        if answer.status == 404:
            raise NotFound(f"the schema registry at {self._url} has no {path}")
        if answer.status in (401, 403):
            raise Refused(f"the schema registry at {self._url} refuses: {answer.status}", hint="See credentials_file under [registry]")
        if answer.status != 200:
            raise StoreError(f"the schema registry at {self._url} answers {path} with status {answer.status}")
        try:
            return json.loads(answer.data)
        except ValueError:
            raise StoreError(f"what answers at {self._url} is not a schema registry", hint="See url under [registry]") from None


def _read_credentials_file(credentials_file: str) -> str:
    """Return the content of a credentials file: one line ``USER:PASSWORD``. Raises UsageError if the file cannot be read or contains
    anything else.
    """
    try:
        text = Path(credentials_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"[registry] credentials_file {credentials_file} cannot be read: {error.strerror}") from error
    if ":" not in text or "\n" in text:
        raise UsageError(f"[registry] credentials_file {credentials_file} must hold one line", hint="Write USER:PASSWORD")
    return text
