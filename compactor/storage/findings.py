"""What a look at a store finds, for people and for scripts."""

from __future__ import annotations

from typing import Literal

from compactor.model.base import Value


class StoreFinding(Value):
    """``error``: do not run on this store. ``warning``: it works, but not as one may expect. ``note``: good to know."""

    severity: Literal["error", "warning", "note"]
    kind: str
    detail: str
    hint: str = ""

    @staticmethod
    def error(kind: str, detail: str, hint: str) -> StoreFinding:
        return StoreFinding(severity="error", kind=kind, detail=detail, hint=hint)

    @staticmethod
    def warning(kind: str, detail: str, hint: str) -> StoreFinding:
        return StoreFinding(severity="warning", kind=kind, detail=detail, hint=hint)

    @staticmethod
    def note(kind: str, detail: str, hint: str) -> StoreFinding:
        return StoreFinding(severity="note", kind=kind, detail=detail, hint=hint)
