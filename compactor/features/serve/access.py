"""Access to the endpoint: TLS, users with their passwords and topics (SASL PLAIN)."""

from __future__ import annotations

import hmac
import ipaddress
import re
import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

from kafka.protocol import metadata, sasl

from compactor.config.settings import ServeSettings
from compactor.errors import UsageError
from compactor.features.serve.protocol import ErrorCode, Request


@dataclass(frozen=True)
class User:
    """topics: whole regular expressions; None for all topics."""

    name: str
    password: str = ""
    topics: tuple[str, ...] | None = None

    def may_read(self, topic: str) -> bool:
        return self.topics is None or any(re.fullmatch(pattern, topic) for pattern in self.topics)


ANYONE: Final = User("anonymous")
"""Whoever connects to an endpoint without users, which listens on a loopback address only."""


def load_users(file: str) -> Mapping[str, User]:
    """TOML file of users, by name: ``[alice]`` with ``password`` and ``topics = ["orders-.*"]``.

    Raises UsageError if the file cannot be read or is not valid. Its text never repeats what the file holds.
    """
    path = Path(file)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the file of users {path} cannot be read: {error.strerror}", hint="See users_file under [serve]") from error
    except ValueError:
        raise UsageError(f"the file of users {path} is not valid TOML", hint='Write [alice], password = "..." and topics = [...]') from None
    if path.stat().st_mode & 0o004:
        raise UsageError(f"everybody may read the file of users {path}", hint=f"chmod o-r {path}")
    users = {}
    for name, table in document.items():
        topics = table.get("topics") if isinstance(table, dict) else None
        password = table.get("password") if isinstance(table, dict) else None
        is_valid = isinstance(password, str) and isinstance(topics, list) and all(isinstance(one, str) for one in topics)
        if not is_valid or not password or topics is None or table.keys() - {"password", "topics"}:
            raise UsageError(f"{path}: [{name}] needs a password and topics", hint='topics = ["orders-.*"], [".*"] for all')
        for pattern in topics:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"{path}: a topic of [{name}] is not a regular expression: {error}") from error
        users[name] = User(name, password, tuple(topics))
    if not users:
        raise UsageError(f"the file of users {path} names nobody")
    return users


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """Raises UsageError if certificate or key cannot be used."""
    if not settings.tls_certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"the certificate {settings.tls_certificate} and its key cannot be used: {error.strerror or type(error).__name__}",
            hint="Set tls_certificate and tls_key under [serve] to files in PEM format",
        ) from error
    return context


def require_safe_listener(settings: ServeSettings, host: str) -> None:
    """Raise UsageError if other machines could connect without TLS and a password."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_local = False
    if not is_local and not (settings.tls_certificate and settings.users_file):
        raise UsageError(
            f"`serve` does not listen on {host} without TLS and users: everybody there could read every topic",
            hint="Set tls_certificate, tls_key and users_file under [serve], or listen on 127.0.0.1",
        )


class Stage(Enum):
    NEW = auto()
    MECHANISM_CHOSEN = auto()
    AUTHENTICATED = auto()
    REFUSED = auto()
    """The connection ends: guessing passwords costs a connection, and a pause, for each."""


ALLOWED: Final[Mapping[Stage, frozenset[int] | None]] = {
    Stage.NEW: frozenset({metadata.ApiVersionsRequest.API_KEY, sasl.SaslHandshakeRequest.API_KEY}),
    Stage.MECHANISM_CHOSEN: frozenset({sasl.SaslAuthenticateRequest.API_KEY}),
    Stage.AUTHENTICATED: None,
    Stage.REFUSED: frozenset(),
}
"""Request types that a connection may send at each stage; None for all."""


class Login:
    """users: None if everybody may read, as on a loopback address."""

    def __init__(self, users: Mapping[str, User] | None) -> None:
        self._users = users
        self.user = ANYONE
        self.stage = Stage.AUTHENTICATED if users is None else Stage.NEW

    def may_send(self, key: int) -> bool:
        """Return whether a request of a type may be sent now."""
        allowed = ALLOWED[self.stage]
        return allowed is None or key in allowed

    def answer(self, request: Request) -> Any | None:
        """Response to a SASL request; None for others."""
        if request.key == sasl.SaslHandshakeRequest.API_KEY:
            is_plain = request.body.mechanism == "PLAIN" and self._users is not None
            if is_plain and self.stage is Stage.NEW:
                self.stage = Stage.MECHANISM_CHOSEN
            code = ErrorCode.NONE if is_plain else ErrorCode.UNSUPPORTED_SASL_MECHANISM
            return sasl.SaslHandshakeResponse(error_code=code, mechanisms=["PLAIN"] if self._users is not None else [])
        if request.key != sasl.SaslAuthenticateRequest.API_KEY:
            return None
        code, why = ErrorCode.NONE, None
        if self.stage is not Stage.MECHANISM_CHOSEN:
            code, why = ErrorCode.ILLEGAL_SASL_STATE, "there was no handshake before"
        elif (user := self._find_user(bytes(request.body.auth_bytes))) is not None:
            self.user, self.stage = user, Stage.AUTHENTICATED
        else:
            code, why, self.stage = ErrorCode.SASL_AUTHENTICATION_FAILED, "no such user, or another password", Stage.REFUSED
        return sasl.SaslAuthenticateResponse(error_code=code, error_message=why, auth_bytes=b"", session_lifetime_ms=0)

    def _find_user(self, token: bytes) -> User | None:
        """By name and password of a PLAIN token (RFC 4616)."""
        parts = token.split(b"\0")
        if self._users is None or len(parts) != 3:
            return None
        authorization, name, password = parts
        user = self._users.get(name.decode("utf-8", "replace"))
        # Compare also for a name that nobody has: the answer must take as long.
        same = hmac.compare_digest(password, user.password.encode() if user is not None else b"-")
        return user if user is not None and same and authorization in (b"", name) else None
