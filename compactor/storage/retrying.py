"""Trying again: the one place that decides how often, how long and after which pause.

Adapters call it around each single request (not around an upload of a thousand parts), so a store that fails one request in
ten still takes large objects. Only Unavailable is tried again; every other error is an answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from compactor.errors import Unavailable
from compactor.storage.settings import Retries

T = TypeVar("T")


@dataclass(frozen=True)
class Retrier:
    """Full jitter (settings.Retries); clock, sleep and the random fraction are injected for tests."""

    policy: Retries = field(default_factory=Retries)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    fraction: Callable[[], float] = random.random

    def call(self, attempt: Callable[[int], T]) -> T:
        """``attempt`` gets 0, 1, 2, ...: above 0 an earlier one may have had its effect. Raises its last Unavailable.

        The deadline counts from the first failure: an attempt that [limits] made wait for minutes is not the store's fault.
        """
        began = failed = self.clock()
        number = 0
        while True:
            try:
                return attempt(number)
            except Unavailable as error:
                ceiling = min(self.policy.cap_s, self.policy.base_s * 2.0 ** min(number, 32))
                pause = ceiling * self.fraction()
                now = self.clock()
                failed = failed if number else now
                if now - failed + pause > self.policy.deadline_s:
                    message = f"{error.message} (tried {number + 1} times in {now - began:.1f} s)" if number else error.message
                    raise Unavailable(message, hint=error.hint) from error
            self.sleep(pause)
            number += 1
