"""Price tables of object stores, each with its date. Traffic inside a region is free and not counted."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from typing_extensions import override

from compactor.errors import UsageError
from compactor.storage.schemes import DIRECTORY, StorePrices, store_kind


@dataclass(frozen=True)
class PriceTable(StorePrices):
    """Prices of requests and storage in one object store, in USD, with their date. Its ``str`` is one line for people."""

    def document(self) -> dict[str, Any]:
        """Return the table for JSON output."""
        return asdict(self)

    @override
    def __str__(self) -> str:
        return f"{self.of}, {self.as_of}: {self.stored_gib_month_usd:g} USD a GiB and month"


NO_PRICES = PriceTable(**asdict(DIRECTORY.prices))
"""Prices of a store that costs nothing."""


def price_table_of_tier(tier_url: str, price_file: Path | None = None) -> PriceTable:
    """Return the price table of a tier: from ``price_file`` (TOML with the fields of PriceTable), or that of its kind of store.

    :raises UsageError: if the file cannot be read or a field is missing, unknown or invalid.
    """
    if price_file is None:
        return PriceTable(**asdict(store_kind(tier_url).prices))
    try:
        given = tomllib.loads(price_file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{price_file} cannot be read: {error}") from error
    numbers = [field.name for field in fields(PriceTable) if field.name not in ("as_of", "of")]
    wrong = [name for name in numbers if not isinstance(given.get(name), (int, float)) or given[name] < 0]
    strange = given.keys() - {"as_of", "of", *numbers}
    if wrong or strange or not given.get("as_of"):
        message = (
            f"{', '.join(wrong)} must be numbers" if wrong else f"unknown: {', '.join(sorted(strange))}" if strange else "as_of is missing"
        )
        raise UsageError(f"{price_file} is not a valid price table: {message}", hint=f"It has as_of, of, {', '.join(numbers)}")
    return PriceTable(str(given["as_of"]), str(given.get("of", price_file.name)), **{name: float(given[name]) for name in numbers})
