"""Keys, prefixes and metadata that all stores keep unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping

from compactor.errors import Refused

RESERVED = ".object-store"
"""Folder in which a directory store keeps staged files and metadata. Not allowed as part of a key, and never listed."""

MAX_PART_BYTES = 255
"""Longest part of a key that file systems accept. Enough for `topic-partition`: topic names have up to 249 characters."""

MAX_KEY_BYTES = 900
"""Longest key. S3 allows 1024 bytes; the rest is left for the store's prefix."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_METADATA_NAME = re.compile(r"[a-z][a-z0-9_]*")
_METADATA_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def object_key_component_problem(part: str) -> str:
    if not part:
        return "has an empty part"
    if part in (".", "..", RESERVED):
        return f"has a part {part!r}"
    if _CONTROL.search(part):
        return "has a character that XML or a file system cannot carry"
    if len(part.encode()) > MAX_PART_BYTES:
        return f"has a part of more than {MAX_PART_BYTES} bytes"
    return ""


def object_key_problem(key: str) -> str:
    faults = [fault for part in key.split("/") if (fault := object_key_component_problem(part))]
    if faults:
        return faults[0]
    return f"is longer than {MAX_KEY_BYTES} bytes" if len(key.encode()) > MAX_KEY_BYTES else ""


def check_object_key(key: str) -> None:
    """Raise Refused unless this is a valid key in every kind of store."""
    if fault := object_key_problem(key):
        raise Refused(f"{key!r} cannot be an object key: it {fault}", hint=f"Keys are parts between '/', each 1 to {MAX_PART_BYTES} bytes")


def check_object_key_prefix(prefix: str) -> None:
    """Raise Refused if no valid key can begin with this text."""
    folder, _, last = prefix.rpartition("/")
    fault = (object_key_problem(folder) if folder or prefix.startswith("/") else "") or (
        _CONTROL.search(last) and "has a control character"
    )
    if fault:
        raise Refused(f"{prefix!r} cannot be a prefix of object keys: it {fault}")


def require_storable_object_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Copy the metadata. Raises Refused unless every kind of store accepts it: names of small letters, digits and ``_``, values of
    printable ASCII, at most 1.5 kB in all.
    """
    checked = dict(metadata or {})
    for name, value in checked.items():
        if not _METADATA_NAME.fullmatch(name) or not _METADATA_VALUE.fullmatch(value):
            raise Refused(f"object metadata {name!r}={value!r} is not accepted by all stores", hint="Use a-z, 0-9, '_' and printable ASCII")
    if sum(len(name) + len(value) for name, value in checked.items()) > 1536:
        raise Refused("object metadata is larger than 1.5 kB", hint="S3 keeps 2 kB an object; put more into the object itself")
    return checked


def normalize_metadata_names(metadata: Mapping[str, str]) -> dict[str, str]:
    """Change names to small letters, and ``-`` to ``_``: servers may return capitals, and on S3 ``-`` is written."""
    return {name.lower().replace("-", "_"): value for name, value in metadata.items()}


def check_byte_range(start: int, length: int | None) -> None:
    if start < 0 or (length is not None and length < 0):
        raise ValueError(f"not a range of bytes: start {start}, length {length}")
