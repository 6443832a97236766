"""Findings of `config check` about a store, for people and scripts."""

from __future__ import annotations

from typing import Literal

from compactor.model.base import StrictFrozenModel

FindingKindAndDetail = tuple[str, str]
"""Kind and detail of a StoreFinding."""


class StoreFinding(StrictFrozenModel):
    """Result of a check of the store.

    severity: error (do not use this store), warning (works with restrictions) or note. kind: one word for scripts.
    """

    severity: Literal["error", "warning", "note"]
    kind: str
    detail: str
    hint: str = ""

    @staticmethod
    def error(finding_kind: str, detail: str, hint: str) -> StoreFinding:
        """Return a finding with severity "error": the store must not be used."""
        return StoreFinding(severity="error", kind=finding_kind, detail=detail, hint=hint)

    @staticmethod
    def warning(finding_kind: str, detail: str, hint: str) -> StoreFinding:
        """Return a finding with severity "warning": the store works with restrictions."""
        return StoreFinding(severity="warning", kind=finding_kind, detail=detail, hint=hint)

    @staticmethod
    def note(finding_kind: str, detail: str, hint: str) -> StoreFinding:
        """Return a finding with severity "note": the store works, and people should know the detail."""
        return StoreFinding(severity="note", kind=finding_kind, detail=detail, hint=hint)
