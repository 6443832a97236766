"""Which keys, prefixes and metadata every adapter takes: what S3, a directory and the S3-compatible servers all keep unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping

from compactor.errors import Refused

RESERVED = ".object-store"
"""Where a directory store keeps what is not an object (staged files, metadata); no part of a key, and never listed."""

MAX_PART_BYTES = 255
"""What file systems take, and `topic-partition` needs: a topic has up to 249 characters."""

MAX_KEY_BYTES = 900
"""S3 allows 1024 bytes for a whole key; the rest is for the store's own prefix."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_METADATA_KEY = re.compile(r"[a-z0-9][a-z0-9-]*")
_METADATA_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def part_fault(part: str) -> str:
    """Why this cannot stand between two slashes of a key; empty if it can."""
    if not part:
        return "has an empty part"
    if part in (".", "..", RESERVED):
        return f"has a part {part!r}"
    if _CONTROL.search(part):
        return "has a character that XML or a file system cannot carry"
    if len(part.encode()) > MAX_PART_BYTES:
        return f"has a part of more than {MAX_PART_BYTES} bytes"
    return ""


def key_fault(key: str) -> str:
    """Why this cannot be a key; empty if it can."""
    faults = [fault for part in key.split("/") if (fault := part_fault(part))]
    if faults:
        return faults[0]
    return f"is longer than {MAX_KEY_BYTES} bytes" if len(key.encode()) > MAX_KEY_BYTES else ""


def check_key(key: str) -> None:
    """Raises Refused."""
    if fault := key_fault(key):
        raise Refused(f"{key!r} cannot be an object key: it {fault}", hint=f"Keys are parts between '/', each 1 to {MAX_PART_BYTES} bytes")


def check_prefix(prefix: str) -> None:
    """A prefix may end anywhere, also behind a slash; what stands before its last slash follows the rules of a key. Raises Refused."""
    folder, _, last = prefix.rpartition("/")
    fault = (key_fault(folder) if folder or prefix.startswith("/") else "") or (_CONTROL.search(last) and "has a control character")
    if fault:
        raise Refused(f"{prefix!r} cannot be a prefix of object keys: it {fault}")


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Metadata travels as HTTP headers: small names, printable ASCII values, 1.5 kB at most. Raises Refused."""
    checked = dict(metadata or {})
    for name, value in checked.items():
        if not _METADATA_KEY.fullmatch(name) or not _METADATA_VALUE.fullmatch(value):
            raise Refused(
                f"object metadata {name!r}={value!r} cannot travel as an HTTP header", hint="Use a-z, 0-9, '-' and printable ASCII"
            )
    if sum(len(name) + len(value) for name, value in checked.items()) > 1536:
        raise Refused("object metadata is larger than 1.5 kB", hint="S3 keeps 2 kB an object; put more into the object itself")
    return checked


def check_range(start: int, length: int | None) -> None:
    """Raises ValueError: a caller's bug, not a store's answer."""
    if start < 0 or (length is not None and length < 0):
        raise ValueError(f"not a range of bytes: start {start}, length {length}")
