"""Custom metadata of the plug-in in RemoteLogSegmentMetadata: tagged fields as in Kafka's protocol (SegmentCustomMetadataSerde).

``remote_size``: total bytes of the three objects, as a zigzag varlong. ``object_prefix``, ``object_key``: compact strings, prefix and key
without suffix under which ``.log`` and ``.indexes`` were uploaded; they take precedence over the configuration. The manifest's key is
always derived from the configuration. Fields with other tags are preserved.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

from compactor.tier.layouts.aiven.chunk_index import InvalidAivenDataError

_REMOTE_SIZE, _OBJECT_PREFIX, _OBJECT_KEY = range(3)
PositionAfterVarint = int


@dataclass(frozen=True)
class CustomMetadata:
    """Custom metadata that Aiven's plug-in records for a segment. Absent fields are None.

    unknown: tags and bytes of the fields that this program does not know.
    """

    remote_size: int | None = None
    object_prefix: str | None = None
    object_key: str | None = None
    unknown: tuple[tuple[int, bytes], ...] = field(default=())

    def encode(self) -> str:
        """Encode the custom metadata as base64, or as an empty string if there are no fields."""
        fields = dict(self.unknown)
        if self.remote_size is not None:
            fields[_REMOTE_SIZE] = _encode_uvarint(self.remote_size << 1 if self.remote_size >= 0 else (-self.remote_size << 1) - 1)
        for tag, text in ((_OBJECT_PREFIX, self.object_prefix), (_OBJECT_KEY, self.object_key)):
            if text is not None:
                fields[tag] = _encode_uvarint(len(text.encode()) + 1) + text.encode()
        if not fields:
            return ""
        parts = (_encode_uvarint(tag) + _encode_uvarint(len(data)) + data for tag, data in sorted(fields.items()))
        return base64.b64encode(_encode_uvarint(len(fields)) + b"".join(parts)).decode()

    @staticmethod
    def decode(encoded_metadata: str) -> CustomMetadata:
        """Decode custom metadata from base64. Raises InvalidAivenDataError if the bytes are corrupt."""
        if not encoded_metadata:
            return CustomMetadata()
        try:
            data = base64.b64decode(encoded_metadata, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidAivenDataError("the custom metadata is not base64") from None
        fields: dict[int, bytes] = {}
        count, at = _decode_uvarint(data, 0)
        last = -1
        for _ in range(count):
            tag, at = _decode_uvarint(data, at)
            size, at = _decode_uvarint(data, at)
            if tag <= last or at + size > len(data):
                raise InvalidAivenDataError("the custom metadata is cut off or out of order")
            fields[tag], at, last = data[at : at + size], at + size, tag
        if at != len(data):
            raise InvalidAivenDataError("the custom metadata continues after its last field")
        known = (_REMOTE_SIZE, _OBJECT_PREFIX, _OBJECT_KEY)
        return CustomMetadata(
            _decode_varlong(fields[_REMOTE_SIZE]) if _REMOTE_SIZE in fields else None,
            _decode_string(fields[_OBJECT_PREFIX]) if _OBJECT_PREFIX in fields else None,
            _decode_string(fields[_OBJECT_KEY]) if _OBJECT_KEY in fields else None,
            tuple((tag, data) for tag, data in fields.items() if tag not in known),
        )


def _encode_uvarint(value: int) -> bytes:
    """Encode an unsigned varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _decode_uvarint(data: bytes, position: int) -> tuple[int, PositionAfterVarint]:
    """Decode an unsigned varint at position ``position``, and return it with the position of the next byte."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte, position = data[position], position + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise InvalidAivenDataError("the custom metadata is cut off")


def _decode_varlong(data: bytes) -> int:
    """Decode a zigzag varlong."""
    value, at = _decode_uvarint(data, 0)
    if at != len(data):
        raise InvalidAivenDataError("the custom metadata's remote size is not one number")
    return value >> 1 ^ -(value & 1)


def _decode_string(data: bytes) -> str:
    """Decode a compact string."""
    length, at = _decode_uvarint(data, 0)
    try:
        text = data[at:].decode()
    except UnicodeDecodeError:
        raise InvalidAivenDataError("the custom metadata holds no text where a key is due") from None
    if length - 1 != len(data) - at:
        raise InvalidAivenDataError("the custom metadata holds a text of another length than it says")
    return text
