"""Settings for retries and transfers, small and frozen because they are sent to executors."""

from __future__ import annotations

from pydantic import Field

from compactor.model.segment import StrictFrozenModel


class RetrySettings(StrictFrozenModel):
    """Retries after random delays: before attempt n+1 sleep between 0 and min(cap_s, base_s * 2^n) seconds (full jitter).

    deadline_s: the last attempt begins at most this long after the first failure.
    first_answer_s: longest wait for a store that has never answered this process, for all requests together.
    """

    deadline_s: float = Field(default=120.0, ge=0)
    base_s: float = Field(default=0.1, gt=0)
    cap_s: float = Field(default=8.0, gt=0)
    first_answer_s: float = Field(default=60.0, ge=0)


class TransferSettings(StrictFrozenModel):
    """Transfer of large objects: in parts of ``part_bytes`` (S3 wants at least 5 MiB), with ``threads`` requests at a time.

    :param list_page: keys per LIST request.
    :param storage_class: of new objects on S3; empty for the bucket's default.
    """

    part_bytes: int = Field(default=8 << 20, ge=5 << 20)
    threads: int = Field(default=4, ge=1)
    list_page: int = Field(default=1000, ge=1, le=1000)
    storage_class: str = ""

    @property
    def s3_create_request_parameters(self) -> dict[str, str]:
        return {"StorageClass": self.storage_class} if self.storage_class else {}
