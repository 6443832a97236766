"""Sections of the settings that say how stores and registries on servers are reached."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from compactor.config.units import parse_duration_or_size_if_text
from compactor.model.base import StrictFrozenModel
from compactor.storage.schemes import NO_CREDENTIALS, StorePrices

MAX_MS = 2**63 - 1

Milliseconds = Annotated[int, Field(ge=0, le=MAX_MS)]


class SettingsSection(StrictFrozenModel):
    """Base class of the sections of the settings.

    Values must have exactly the declared types, except that durations and sizes may be texts such as ``10m``.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _parse_durations_and_sizes(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {key: parse_duration_or_size_if_text(key, value) for key, value in values.items()}


class SegmentReplacementCosts(NamedTuple):
    """Costs of replacing segments in a store, from which an automatic dirty ratio is computed.

    prices: what the store charges for requests and storage.
    replaced_ms: time in milliseconds for which replaced segments stay in the store before they are deleted.
    """

    prices: StorePrices
    replaced_ms: int


def _validate_endpoint_url(url: str) -> str:
    if url and not re.match(r"https?://[^/]", url):
        raise ValueError("write http:// or https://, host and port, for example http://127.0.0.1:9000")
    if "@" in url.partition("://")[2].partition("/")[0]:  # messages and `config show` show URLs
        raise ValueError(NO_CREDENTIALS)
    return url


MINIMUM_DAYS = {"STANDARD_IA": 30, "ONEZONE_IA": 30, "GLACIER_IR": 90}
"""Storage classes of S3 that bill an object for at least so many days, also if it is deleted earlier."""


def validate_storage_class(name: str) -> str:
    """Return the name of a storage class. Raises ValueError for an archive class, whose objects must be restored before reading."""
    if name in ("GLACIER", "DEEP_ARCHIVE"):
        raise ValueError("objects of that class must be restored before they can be read")
    return name


class S3Settings(SettingsSection):
    """[s3]: how S3 is reached. Credentials come from the usual AWS chain (environment, ~/.aws, instance role), never from the
    configuration.
    """

    endpoint_url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    region: str = ""
    first_answer_ms: Milliseconds = 8_000
    storage_class: Annotated[str, AfterValidator(validate_storage_class)] = ""


class GcsSettings(SettingsSection):
    """[gcs]: how Google Cloud Storage is reached.

    Credentials are a file or the default ones (environment, gcloud, service account of the machine).
    """

    endpoint_url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    credentials_file: str = ""


class AzureSettings(SettingsSection):
    """[azure]: how Azure Blob Storage is reached. Credentials are a file, the variables of Azure's own tools, or the default ones
    (environment, workload identity,
    managed identity).
    """

    endpoint_url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    credentials_file: str = ""


class HdfsSettings(SettingsSection):
    """[hdfs]: how HDFS is reached, by the WebHDFS of its namenode. Tickets of Kerberos come from the usual cache or client keytab."""

    webhdfs_url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    user: str = ""
    kerberos: bool = False


class RegistrySettings(SettingsSection):
    """[registry]: how the schema registry with the schemas of keys and values is reached."""

    url: Annotated[str, AfterValidator(_validate_endpoint_url)] = ""
    credentials_file: str = ""
