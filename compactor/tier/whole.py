"""Layouts that write every object whole: what they have of the ways to put a log together of ranges of others, which is nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from compactor.errors import CannotCopy
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.storage.port import Piece


class WrittenWhole:
    """Of a SegmentLayout whose objects cannot be put together of copies, as they have no digest of ours or are no plain logs."""

    @property
    def keeps_digests(self) -> bool:
        return False

    @property
    def copies(self) -> None:
        return None

    def version(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> NoReturn:
        raise _nothing_to_copy()

    def compose(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, log: Sequence[Piece], contents: Mapping[str, Path | bytes]
    ) -> NoReturn:
        raise _nothing_to_copy()


def _nothing_to_copy() -> CannotCopy:
    return CannotCopy("in this tier's layout no log is put together of ranges of others", hint="This is a bug; please report it")
