"""Records without a key: what a topic's policy does with them, how many a round has met, and the error that refuses them.

Brokers refuse such records where they compact a topic themselves (LogValidator, "Compacted topic cannot accept message without key").
Here the topic's own policy is ``delete``, so that nothing stops a producer.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from typing_extensions import override

from compactor.errors import BadData
from compactor.model.base import StrictFrozenModel

KeylessPolicy = Literal["refuse", "drop", "keep"]
"""refuse: no round is made over them; drop: removed, as Kafka's cleaner does; keep: each stays as if it had a key of its own."""


class KeylessRecords(StrictFrozenModel):
    """Number of committed, readable records without a key among those of a dirty range. Control records, data of aborted transactions and
    records below the log start do not count.

    records: number of all such records, with or without a key.
    last_offset: offset of the newest one without a key; -1 if there is none.
    """

    count: int = 0
    records: int = 0
    last_offset: int = -1

    def plus(self, other: KeylessRecords) -> KeylessRecords:
        """Return the counts over both sets of records."""
        return KeylessRecords(
            count=self.count + other.count, records=self.records + other.records, last_offset=max(self.last_offset, other.last_offset)
        )

    @property
    def share(self) -> float:
        """Return the share of the records that have no key, from 0 to 1; 0 if there are no records."""
        return self.count / max(self.records, 1)

    @override
    def __str__(self) -> str:
        return f"{self.count:,} of {self.records:,} records ({100 * self.share:.3g} %)"


class KeylessRecordsRefused(BadData):
    """Raised before a round is planned if its range has records without a key and the topic's setting ``keyless_records`` is ``refuse``.

    keyless: how many there are.
    """

    def __init__(self, topic: str, keyless: KeylessRecords) -> None:
        super().__init__("records without a key")
        self.message = (
            f'{keyless} have no key, up to offset {keyless.last_offset}, and keyless_records is "refuse": '
            f'set it to "keep" or "drop" under [topics.{json.dumps(re.escape(topic))}]'
        )
        self.keyless = keyless


def raise_if_keyless(topic: str, keyless: KeylessRecords) -> None:
    """Raise KeylessRecordsRefused if there are records without a key."""
    if keyless.count:
        raise KeylessRecordsRefused(topic, keyless)
