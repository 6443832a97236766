"""Errors that users can meet, ordered by what to do next, with their exit codes.

CompactorError        1   a bug
+-- UsageError        2
+-- BadData           3   Kafka would refuse the bytes, too; the partition is quarantined
+-- Fenced, Leased    4
+-- StoreError        5   object store, broker or network
|   +-- NotFound, AlreadyExists, Unavailable (try again), Refused (it will not get better by itself)
|   +-- CannotCopy, CopyDiffers (there is another way)
+-- OutOfBudget       6
"""

from __future__ import annotations

import re
from enum import StrEnum

from typing_extensions import override

ExitCode = int
"""0 for success, else that of the error class, or 1 for a bug."""

_USER_PART = (
    r"\b(?!abfss?:|wasbs?:)([a-z][a-z0-9+.-]*://)"  # before the @ of abfss:// stands a container
    r"(?:[^\s/?#'\"<>@]*@|[^\s/?#'\"<>@:\[]*:(?!\d*(?:[/?#\s'\"]|$))[^\s'\"<>@]*@)"  # a password may contain a slash; a port is none
)
_QUERY = r"\?[^\s'\"<>?=&]+=[^\s'\"<>]*"
_NAMED = r"\b(sig|[\w.-]*(?:signature|delegation|password|secret|token|accountkey|credential))=(?!\.\.\.)[^\s'\"<>&;,]+"
_HEADER = r"(header value:? |authorization:? )b?(['\"]).*\2"
_SECRETS = (
    (re.compile(_USER_PART, re.IGNORECASE), r"\1"),
    # Signatures of Azure and S3 and delegation tokens of HDFS, also in a URL without scheme and host.
    (re.compile(_QUERY), "?..."),
    (re.compile(_NAMED, re.IGNORECASE), r"\1=..."),
    # HTTP libraries repeat a header that cannot be sent.
    (re.compile(_HEADER, re.IGNORECASE | re.DOTALL), r"\1..."),
)


def without_secrets(text: str) -> str:
    """Remove credentials from a text: user parts and queries of URLs, tokens, headers. Every error text passes through here, because errors
    are logged, recorded and shown.
    """
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def bug_reason(error: BaseException) -> str:
    return without_secrets(f"a bug: {type(error).__name__}: {error}")


class BlockedCause(StrEnum):
    """Causes for which no round cleans a partition until a person acts. FAILING: this process fails and retries."""

    SETTINGS = "settings"
    BUDGET = "budget"
    TRANSACTION = "transaction"
    TIMESTAMPS = "timestamps"
    KEYLESS = "keyless"
    DAMAGE = "damage"
    RIGHTS = "rights"
    BROKERS = "brokers"
    LOCATION = "location"
    FAILING = "failing"


class CompactorError(Exception):
    """Base of all errors: what happened and where (``message``), and what to do next (``hint``).

    blocks_by: why each further attempt will fail until a person acts; FAILING if trying again may help.
    """

    exit_code = 1
    blocks_by = BlockedCause.FAILING

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = without_secrets(message)
        self.hint = without_secrets(hint)
        super().__init__(self.message)

    @override
    def __str__(self) -> str:
        return f"{self.message}{'' if self.message.endswith('?') else '.'} {self.hint}" if self.hint else self.message

    @override
    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not survive pickling by themselves; Spark and process pools pickle them.
        return (_rebuild_pickled_error, (type(self), self.__dict__))


def _rebuild_pickled_error(kind: type[CompactorError], state: dict[str, object]) -> CompactorError:
    error = kind.__new__(kind)
    error.__dict__.update(state)
    error.args = (state.get("message", ""),)
    return error


class UsageError(CompactorError):
    """Raised if the command line, the configuration or a request is not valid."""

    exit_code = 2


class BadData(CompactorError):
    """Raised if data is damaged or contradicts its recorded metadata, so that it cannot be cleaned.

    is_other_content: the bytes are intact, but differ from the content known for the same offsets.
    is_compacted: a log cleaner has removed records that the tier needs.
    :param position: byte position of the batch in the segment, -1 if unknown.
    :param offset: base offset of the batch, -1 if unknown.
    """

    exit_code = 3
    blocks_by = BlockedCause.DAMAGE
    is_other_content = False
    is_compacted = False

    def __init__(self, cause: str, *, segment: str = "", position: int = -1, offset: int = -1, hint: str = "") -> None:
        where = segment or "segment"
        if position >= 0:
            where += f", position {position}"
        if offset >= 0:
            where += f", offset {offset}"
        super().__init__(f"bad data in {where}: {cause}", hint=hint)
        self.cause = without_secrets(cause)
        self.segment = segment
        self.position = position
        self.offset = offset


class Fenced(CompactorError):
    """Raised if another compactor has taken over the partition. This process has changed nothing since."""

    exit_code = 4


class Leased(Fenced):
    """Raised if another compactor leads the partition and is alive."""


class StoreError(CompactorError):
    """Raised if the object store, a broker or the network fails."""

    exit_code = 5


class NotFound(StoreError):
    """Raised if an object does not exist in the store."""


class AlreadyExists(StoreError):
    """Raised if an object was not created because its key is taken."""


class Unavailable(StoreError):
    """Raised if the store or broker fails temporarily. The request may have taken effect; trying again may help."""


class Refused(StoreError):
    """Raised if the store or broker refuses a request (credentials, permissions, a missing bucket, a wrong region, an archived object).
    Trying again does not help.
    """

    def __init__(self, message: str, *, hint: str = "", cause: BlockedCause = BlockedCause.RIGHTS) -> None:
        super().__init__(message, hint=hint)
        self.blocks_by = cause


class CannotCopy(StoreError):
    """Raised if the store does not copy ranges: the data has to be downloaded and uploaded."""


class CopyDiffers(StoreError):
    """Raised if a server-side copy, which has been removed, differs from its source."""


class OutOfBudget(CompactorError):
    """Raised if the disk or memory budget is too small, or the disk is full."""

    exit_code = 6
    blocks_by = BlockedCause.BUDGET


def gravest_exit_code(codes: list[ExitCode]) -> ExitCode:
    """First of 1, 2, 6, 5, 3 and 4 that is among ``codes``, else 0."""
    for code in (1, 2, 6, 5, 3, 4):
        if code in codes:
            return code
    return 0
