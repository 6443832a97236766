"""Base class of all stored values."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

ReasonOrEmpty = str
"""Text for people that states why; empty if there is no reason."""


class StrictFrozenModel(BaseModel):
    """Base class of frozen values that refuse unknown fields. A record of a future version is therefore refused as a whole instead of being
    read without its new fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
