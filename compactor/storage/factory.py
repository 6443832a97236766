"""Opening a store by its URL, with limits and counters around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Protocol

from compactor.config.settings import LimitSettings, Settings
from compactor.extras import require_extra
from compactor.storage.counting import Counters
from compactor.storage.options import StoreOptions
from compactor.storage.port import ObjectStore
from compactor.storage.retrying import FirstContact
from compactor.storage.schemes import store_kind
from compactor.storage.settings import Retries, Transfers
from compactor.storage.throttled import RateLimits, ThrottledMeter


class Adapter(Protocol):
    """A module of ``compactor.storage`` that opens the stores of one kind (``StoreKind.adapter``)."""

    def open_at(self, url: str, options: StoreOptions) -> ObjectStore:
        """Return the store at a URL of this kind. Makes no request. Raises UsageError if the URL names none."""


def open_store(
    url: str,
    *,
    settings: Settings | None = None,
    limits: LimitSettings | None = None,
    retries: Retries | None = None,
    transfers: Transfers | None = None,
    counters: Counters | None = None,
    contact: FirstContact | None = None,
    records: bool = False,
    before_create: Callable[[ObjectStore], None] = lambda store: None,
) -> ObjectStore:
    """Return the store at a URL (``schemes.KINDS``) or in the directory at a plain path. Makes no request.

    :param settings: say how a server is reached; the defaults if None.
    :param limits: shared by all stores of this process that are opened with equal limits.
    :param counters: where requests and bytes are counted; may be shared by several stores.
    :param contact: with the server; shared by the stores that lie there.
    :param records: whether control records are kept there (``LocalStore``); servers make no difference.
    :param before_create: called with the store before each create on a server (``ConditionCheck``). Directories need no check, because
        exclusive hard links are made by the kernel.
    :raises UsageError: if the URL names no store, or the client library of its kind is not installed.
    """
    kind = store_kind(url)
    if kind.extra:
        require_extra(kind.extra, kind.example)
    adapter: Adapter = import_module(f"compactor.storage.{kind.adapter}")
    options = StoreOptions(
        settings=settings or Settings(),
        meter=ThrottledMeter(counters or Counters(), _rate_limits(limits or LimitSettings())),
        retries=retries,
        transfers=transfers or Transfers(),
        contact=contact or FirstContact(),
        records=records,
        before_create=before_create,
    )
    return adapter.open_at(url, options)


@lru_cache(maxsize=8)
def _rate_limits(limits: LimitSettings) -> RateLimits:
    return RateLimits(limits)
