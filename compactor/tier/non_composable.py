"""Base class of layouts that upload every log whole and cannot compose logs of copied ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compactor.errors import CannotCopy
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.storage.port import ComposeSource, RangeCopies


class NonComposableLayout:
    """The part of SegmentLayout about composed logs, for objects that bear no digest of ours or are not plain logs."""

    keeps_digests = False

    @property
    def copies(self) -> RangeCopies | None:
        return None

    def version(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        raise _cannot_compose_error()

    def compose(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, log: Sequence[ComposeSource], contents: Mapping[str, Path | bytes]
    ) -> str:
        raise _cannot_compose_error()


def _cannot_compose_error() -> CannotCopy:
    return CannotCopy("this tier's layout cannot compose logs of copied ranges", hint="This is a bug; please report it")
