"""Delays before a service retries a failed partition."""

from __future__ import annotations

RETRY_MS = 60_000
"""Delay after the first failure, in milliseconds."""
MAX_RETRY_MS = 6 * 3_600_000
"""Longest delay. The delay doubles with every failure up to this."""


def backoff_ms(failures: int, first_ms: int = RETRY_MS, max_ms: int = MAX_RETRY_MS) -> int:
    """Return the delay before the next attempt after ``failures`` consecutive failures, in milliseconds: ``first_ms`` after the first
    failure, twice as much after each further one, at most ``max_ms``. 0 if nothing has failed.
    """
    return 0 if failures <= 0 else min(max_ms, first_ms << min(failures - 1, 40))
