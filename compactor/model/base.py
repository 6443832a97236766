"""Base class of all stored values."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

ReasonOrEmpty = str
"""Text for people that states why; empty if there is no reason."""


class StrictFrozenModel(BaseModel):
    """Frozen value that refuses unknown fields, so that a record of a future version is refused instead of being half understood."""

    model_config = ConfigDict(frozen=True, extra="forbid")
