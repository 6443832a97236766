"""Answers of stores that only adapters understand. They never leave an adapter."""

from __future__ import annotations

from compactor.errors import StoreError


class PreconditionFailed(StoreError):
    """A condition of a request did not hold (HTTP 412). What that means depends on the request."""


class OutOfRange(StoreError):
    """The requested range begins at or after the object's end (HTTP 416)."""


class NoSuchUpload(StoreError):
    """An upload in parts, or one of its parts, is gone: completed, aborted or expired."""
