"""What a store bills: prices with their date, so that nobody takes them for today's. Traffic inside a region is free and left out."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from compactor.errors import UsageError

GIB = 2**30
CONTROL_WRITES = 5
"""Records of a round: leadership taken and given back, plan, publication with history, hint; one receipt a group comes on top."""
OBJECTS = 5
"""Of a segment: log, three indexes, sidecar."""


@dataclass(frozen=True)
class PriceTable:
    """``as_of``: the month that they are of, ``of``: what they are prices of. USD: a request, and a GiB a month."""

    as_of: str
    of: str
    read_request_usd: float
    write_request_usd: float
    stored_gib_month_usd: float

    def stored_usd_month(self, size: int) -> float:
        return round(size / GIB * self.stored_gib_month_usd, 6)

    def requests_usd(self, reads: int, writes: int) -> float:
        return round(reads * self.read_request_usd + writes * self.write_request_usd, 6)

    def round_usd(self, sources: int, outputs: int) -> float:
        """About what a round's requests have cost: logs are read by both passes, each new object is written and read back."""
        objects = outputs * OBJECTS
        return self.requests_usd(2 * sources + objects, objects + outputs + CONTROL_WRITES)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.of}, {self.as_of}: {self.stored_gib_month_usd:g} USD a GiB and month"


S3_STANDARD = PriceTable("2026-11", "S3 Standard in us-east-1", 0.4e-6, 5e-6, 0.023)
DIRECTORY = PriceTable("", "a directory", 0.0, 0.0, 0.0)


def prices_for(url: str, file: Path | None = None) -> PriceTable:
    """Those of ``file`` (TOML, the fields of PriceTable), else S3's for a bucket, and none for a directory. Raises UsageError."""
    if file is None:
        return S3_STANDARD if url.startswith("s3:") else DIRECTORY
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    numbers = [field.name for field in fields(PriceTable) if field.name not in ("as_of", "of")]
    wrong = [name for name in numbers if not isinstance(given.get(name), (int, float)) or given[name] < 0]
    strange = given.keys() - {"as_of", "of", *numbers}
    if wrong or strange or not given.get("as_of"):
        said = (
            f"{', '.join(wrong)} must be numbers" if wrong else f"unknown: {', '.join(sorted(strange))}" if strange else "as_of is missing"
        )
        raise UsageError(f"{file} is no table of prices: {said}", hint=f"It has as_of, of, {', '.join(numbers)}")
    return PriceTable(str(given["as_of"]), str(given.get("of", file.name)), **{name: float(given[name]) for name in numbers})
