"""Every error a user can meet, sorted by what to do next; the exit code says the same to a script.

CompactorError (1: a bug)
+-- UsageError        2   the command line or the configuration is wrong
+-- BadData           3   bytes that Kafka would refuse too; the partition is quarantined
+-- Fenced            4   another compactor has taken over; this process changed nothing since
|   +-- Leased        4   another compactor holds the lease and is alive
+-- StoreError        5   object store, broker or network
|   +-- NotFound, AlreadyExists, Unavailable (try again), Refused (it will not get better by itself), CannotCopy (there is another way)
+-- OutOfBudget       6   disk or memory budget too small, or the disk is full
"""

from __future__ import annotations


class CompactorError(Exception):
    """What happened, where, and what to do next (``hint``), in words for a person."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not survive pickling by themselves; Spark and process pools pickle them.
        return (_rebuild, (type(self), self.__dict__))


def _rebuild(kind: type[CompactorError], state: dict[str, object]) -> CompactorError:
    error = kind.__new__(kind)
    error.__dict__.update(state)
    error.args = (state.get("message", ""),)
    return error


class UsageError(CompactorError):
    exit_code = 2


class BadData(CompactorError):
    """Bytes that cannot be cleaned.

    :param segment: file or object name.
    :param position: byte position of the batch in the segment, -1 where unknown.
    :param offset: base offset of the batch, -1 where unknown.
    """

    exit_code = 3

    def __init__(self, cause: str, *, segment: str = "", position: int = -1, offset: int = -1, hint: str = "") -> None:
        where = segment or "segment"
        if position >= 0:
            where += f", position {position}"
        if offset >= 0:
            where += f", offset {offset}"
        super().__init__(f"bad data in {where}: {cause}", hint=hint)
        self.cause = cause
        self.segment = segment
        self.position = position
        self.offset = offset


class Fenced(CompactorError):
    exit_code = 4


class Leased(Fenced):
    pass


class StoreError(CompactorError):
    exit_code = 5


class NotFound(StoreError):
    pass


class AlreadyExists(StoreError):
    pass


class Unavailable(StoreError):
    """The request may or may not have had its effect; trying again may help."""


class Refused(StoreError):
    """Credentials, permissions, a missing bucket, a wrong region, an archived object: trying again does not help."""


class CannotCopy(StoreError):
    """The store does not copy ranges of objects: what was to be copied has to be fetched and sent."""


class CopyDiffers(Unavailable):
    """What a store has copied is not what it must be: its source is damaged, or it copies something else. There is no such object."""


class OutOfBudget(CompactorError):
    exit_code = 6


def gravest(codes: list[int]) -> int:
    """The exit code of a command over several partitions: the gravest of 1, 6, 5, 3, 4, 0 (2 counts like 1)."""
    for code in (1, 2, 6, 5, 3, 4):
        if code in codes:
            return code
    return 0
