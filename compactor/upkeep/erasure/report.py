"""The report of an erasure, to be filed: who was asked when, what holds a key, since when it is gone, what has to pass. Pure.

Keys are not in it: a digest under the tier's secret hash key stands for each, so that the report does not tell whom it is about, and
who has the tier can prove it. A signature covers the canonical JSON of everything else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from compactor import __version__
from compactor.errors import BadData, UsageError
from compactor.upkeep.erasure.holders import ANY_KEY, Holder, HolderState, PartitionSurvey, Removal
from compactor.upkeep.erasure.looking import TopicLook
from compactor.views.difference import iso

SCHEMA = "tiered-compactor/erasure/1"
LEAST_SECRET_BYTES = 16


@dataclass(frozen=True)
class Asked:
    """``tier``: what names it. ``digests``: of the keys, in their order."""

    tier: Mapping[str, str]
    topic: str
    at_ms: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class GoneObject:
    """An object that held a key by an earlier report (or at the beginning of this command) and is not there any more."""

    partition: str
    object: str
    key: int
    sha256: str
    run_id: str


def digest_of(key: bytes, secret: bytes) -> str:
    """:param secret: the tier's hash key."""
    return "hmac-sha256:" + hmac.new(secret, b"tiered-compactor erasure\0" + key, hashlib.sha256).hexdigest()


def gone_since(before: Iterable[Holder], now: TopicLook) -> list[GoneObject]:
    """Which of these holders are holders no more, and nowhere to be seen."""
    still = {holder.object for holder in now.holders}
    replaced = {segment: removal for one in now.surveys for segment, removal in one.replaced.items()}
    listed = {key for one in now.surveys for key in one.listed}
    asked = {str(one.name) for one in now.surveys}
    return [
        GoneObject(one.partition, one.object, one.key, one.sha256, one.run_id or _run_of(replaced.get(one.segment)))
        for one in before
        if one.object not in still and one.object not in listed and (one.partition in asked or not one.partition)
    ]


def removals_of(before: Iterable[Holder], now: TopicLook) -> list[tuple[int, Removal]]:
    """The rounds that took from readers what held a key before, as far as their records are still there. By number of the key."""
    replaced = {segment: removal for one in now.surveys for segment, removal in one.replaced.items()}
    return [(one.key, replaced[one.segment]) for one in before if one.segment in replaced and one.key != ANY_KEY]


def _run_of(removal: Removal | None) -> str:
    return removal.run_id if removal is not None else ""


def document(
    asked: Asked, now: TopicLook, gone: Sequence[GoneObject], removals: Sequence[tuple[int, Removal]], done: Sequence[str]
) -> dict[str, Any]:
    """``removals``: rounds that took records of a key from readers, beside those that the look has found. ``done``: for this erasure."""
    known = [*removals, *((key, one) for found in now.surveys for key, some in found.removals.items() for one in some)]
    answers = [_answer(number, now, [one for key, one in known if key == number]) for number in range(len(asked.digests))]
    last = max((one.since for one in answers if one.since is not None), key=lambda one: one.at_ms, default=None)
    return {
        "schema": SCHEMA,
        "erased": all(one.erased for one in answers),
        "topic": asked.topic,
        "tier": dict(asked.tier),
        "at": iso(asked.at_ms),
        "at_ms": asked.at_ms,
        "version": __version__,
        "keys": [
            {"digest": digest, "erased": one.erased, "gone_since": _removal(one.since), "until_ms": one.until_ms}
            for digest, one in zip(asked.digests, answers, strict=True)
        ],
        "gone_since": _removal(last),
        "holders": [_holder(one, asked.digests) for one in now.holders],
        "waits_for": list(dict.fromkeys(one.waits_for for one in now.holders)),
        "gone": [asdict(one) | {"key": _key(one.key, asked.digests)} for one in gone],
        "done": list(done),
        "partitions": [_looked(one) for one in now.surveys],
        "failed": [{"partition": str(name), "reason": error.message} for name, error in now.failed],
        "not_covered": [asdict(one) for one in now.not_covered],
    }


@dataclass(frozen=True)
class KeyAnswer:
    """``since``: the round that took its last record from readers, None where they have one or nothing tells it."""

    erased: bool
    since: Removal | None
    until_ms: int | None


def _answer(number: int, now: TopicLook, removals: Sequence[Removal]) -> KeyAnswer:
    mine = [holder for holder in now.holders if holder.key in (number, ANY_KEY)]
    live = any(holder.state is HolderState.LIVE and holder.certain for holder in mine)
    since = None if live else max(removals, key=lambda one: one.at_ms, default=None)
    until = max((holder.until_ms for holder in mine if holder.until_ms is not None), default=None)
    return KeyAnswer(not mine and not now.failed, since, until)


def _looked(one: PartitionSurvey) -> dict[str, Any]:
    read = {"segments_read": one.segments, "ruled_out_by_filters": one.filtered, "bytes_read": one.bytes}
    return {"partition": str(one.name), "slot": one.slot} | read


def _removal(one: Removal | None) -> dict[str, Any] | None:
    return None if one is None else {"partition": one.partition, "run_id": one.run_id, "at_ms": one.at_ms, "at": iso(one.at_ms)}


def _key(number: int, digests: Sequence[str]) -> str | None:
    return None if number == ANY_KEY else digests[number]


def _holder(one: Holder, digests: Sequence[str]) -> dict[str, Any]:
    return {
        "partition": one.partition,
        "object": one.object,
        "state": one.state.value,
        "key": _key(one.key, digests),
        "certain": one.certain,
        "what": one.what,
        "until": None if one.until_ms is None else iso(one.until_ms),
        "until_ms": one.until_ms,
        "waits_for": one.waits_for,
        "segment": one.segment,
        "records": one.records,
        "first_offset": one.first_offset if one.certain else None,
        "last_offset": one.last_offset if one.certain else None,
        "bytes": one.bytes,
        "sha256": one.sha256,
        "run_id": one.run_id,
    }


# --- earlier reports ---


def holders_of(report: Mapping[str, Any], digests: Sequence[str]) -> list[Holder]:
    """What an earlier report names, with its keys numbered as they are asked for now; others are left out. Raises BadData."""
    if report.get("schema") != SCHEMA:
        raise BadData("it is no report of an erasure, or of another version", segment="the earlier report")
    numbers: dict[str | None, int] = {digest: number for number, digest in enumerate(digests)} | {None: ANY_KEY}
    return [
        Holder(
            one["partition"], one["object"], HolderState(one["state"]), numbers[one["key"]], one["what"], one["waits_for"],
            segment=one["segment"], records=one["records"], sha256=one["sha256"], run_id=one["run_id"],
        )
        for one in report["holders"]
        if one["key"] in numbers
    ]  # fmt: skip


# --- signatures ---


def canonical(report: Mapping[str, Any]) -> bytes:
    """What is signed: the report without its signature, keys sorted, no blanks, UTF-8."""
    rest = {name: value for name, value in report.items() if name != "signature"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def signed(report: Mapping[str, Any], secret: bytes) -> dict[str, Any]:
    """:param secret: an Ed25519 private key (PEM), or anything else of 16 bytes or more, for HMAC-SHA256. Raises UsageError."""
    if secret.startswith(b"-----BEGIN"):
        key = _ed25519(secret, private=True)
        public = key.public_key().public_bytes_raw().hex()
        made = {"algorithm": "ed25519", "public_key": public, "value": key.sign(canonical(report)).hex()}
    else:
        made = {"algorithm": "hmac-sha256", "value": _hmac(report, secret)}
    return dict(report) | {"signature": made}


def signature_problem(report: Mapping[str, Any], secret: bytes) -> str:
    """Why the report's signature does not hold under this key, or nothing. Raises UsageError for a key that is none."""
    made = report.get("signature")
    if not isinstance(made, dict):
        return "it is not signed"
    value = str(made.get("value", ""))
    if made.get("algorithm") == "hmac-sha256":
        return "" if hmac.compare_digest(value, _hmac(report, secret)) else "its signature does not match"
    if made.get("algorithm") != "ed25519":
        return f"its signature is of an unknown kind, {made.get('algorithm')}"
    from cryptography.exceptions import InvalidSignature

    try:
        _ed25519(secret, private=False).verify(bytes.fromhex(value), canonical(report))
    except (InvalidSignature, ValueError):
        return "its signature does not match"
    return ""


def _hmac(report: Mapping[str, Any], secret: bytes) -> str:
    if len(secret.strip()) < LEAST_SECRET_BYTES:
        raise UsageError(f"the secret has less than {LEAST_SECRET_BYTES} bytes", hint="`head -c 32 /dev/urandom > FILE` makes one")
    return hmac.new(secret, canonical(report), hashlib.sha256).hexdigest()


def _ed25519(data: bytes, *, private: bool) -> Any:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    try:
        if b"PRIVATE KEY" in data:
            key: Any = serialization.load_pem_private_key(data, password=None)
            found: Any = key if private else key.public_key()
        else:
            found = serialization.load_pem_public_key(data)
    except (ValueError, TypeError) as error:
        raise UsageError(f"the key cannot be read: {error}", hint="`openssl genpkey -algorithm ed25519` makes one") from error
    if not isinstance(found, Ed25519PrivateKey if private else Ed25519PublicKey):
        raise UsageError("it is no Ed25519 key", hint="`openssl genpkey -algorithm ed25519` makes one")
    return found
