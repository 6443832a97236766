"""Options with which an adapter opens a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from compactor.config.settings import Settings
from compactor.storage.counting import STORE, RequestMeter
from compactor.storage.port import ObjectStore
from compactor.storage.retrying import FirstAnswerTracker, Retrier
from compactor.storage.settings import RetrySettings, TransferSettings


@dataclass(frozen=True)
class StoreOptions:
    """Arguments of ``factory.open_store``, as the module for each kind of store receives them.

    retries: None for the module's own default.
    records: whether control records are stored in this store.
    """

    settings: Settings
    meter: RequestMeter
    retries: RetrySettings | None
    transfers: TransferSettings
    contact: FirstAnswerTracker
    records: bool
    before_create: Callable[[ObjectStore], None]

    def create_retrier(self, max_wait_for_first_answer_s: float) -> Retrier:
        """Return the retrier for requests to a server.

        :param max_wait_for_first_answer_s: longest wait for the server's first answer to this process, in seconds.
        """
        policy = (self.retries or RetrySettings()).model_copy(update={"first_answer_s": max_wait_for_first_answer_s})

        def sleep(seconds: float) -> None:
            time.sleep(seconds)
            self.meter.record_request_delay(STORE, seconds)

        return Retrier(policy, sleep=sleep, contact=self.contact)
