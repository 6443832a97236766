"""How deep random tests go: quick in ``make test``, everything in ``make check`` and where pytest is started by hand.

The profile ``quick`` (``--hypothesis-profile quick``) divides every number of examples by ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings


def examples(count: int, **options: Any) -> settings:
    """Return settings with ``count`` examples; in the profile ``quick`` a tenth of them, at least ten."""
    quick = settings.get_current_profile_name() == "quick"
    return settings(max_examples=min(count, max(10, count // 10)) if quick else count, **options)


def seeds(quick: int, count: int) -> pytest.MarkDecorator:
    """Parametrize ``seeds`` with the first seeds, for ``make test``, and with the others up to ``count``, for ``make check``."""
    rest = pytest.param(range(quick, count), marks=pytest.mark.check, id=f"{quick} to {count}")
    return pytest.mark.parametrize("seeds", [pytest.param(range(quick), id=f"0 to {quick}"), rest])


def a_third(name: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize ``name`` with the values, of which every third one runs in ``make test`` and the others in ``make check``."""
    marked = [pytest.param(value, marks=[pytest.mark.check] if place % 3 else []) for place, value in enumerate(values)]
    return pytest.mark.parametrize(name, marked)
