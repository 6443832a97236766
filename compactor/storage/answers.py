"""Answers of stores that only adapters understand. They never leave an adapter."""

from __future__ import annotations

from compactor.errors import StoreError


class PreconditionFailed(StoreError):
    """Raised if a condition of a request did not hold (HTTP 412). Callers decide what that means for their request."""


class RangeNotSatisfiable(StoreError):
    """Raised if the requested range begins at or after the object's end (HTTP 416)."""


class NoSuchUpload(StoreError):
    """Raised if a multipart upload or one of its parts no longer exists, because it was completed, was aborted or has expired."""
