"""What every written-down value has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """Frozen, strict about unknown fields: a record of a future version is refused, never half understood."""

    model_config = ConfigDict(frozen=True, extra="forbid")
