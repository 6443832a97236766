"""What a store needs to be opened, as small frozen values: they are shipped to executors, clients are not."""

from __future__ import annotations

from pydantic import Field

from compactor.model.base import Value


class S3Settings(Value):
    """Empty means the usual AWS chain (environment, profile, instance role) decides. Credentials always come from that chain."""

    endpoint_url: str = ""
    region: str = ""


class Limits(Value):
    """Per process, across all its threads and stores; 0 = no limit."""

    max_read_bytes_per_s: int = Field(default=0, ge=0)
    max_write_bytes_per_s: int = Field(default=0, ge=0)
    max_requests_per_s: int = Field(default=0, ge=0)


class Retries(Value):
    """Full jitter: before attempt n+1 sleep between 0 and min(cap, base * 2^n) seconds, until ``deadline_s`` after the first attempt.

    A store that answers 503 for a minute is survived as long as the deadline is clearly longer than that.
    """

    deadline_s: float = Field(default=120.0, ge=0)
    base_s: float = Field(default=0.1, gt=0)
    cap_s: float = Field(default=8.0, gt=0)


class Transfers(Value):
    """How large objects travel: parts of ``part_bytes``, ``threads`` at once. S3 wants parts of at least 5 MiB."""

    part_bytes: int = Field(default=8 << 20, ge=5 << 20)
    threads: int = Field(default=4, ge=1)
