"""Upload of one segment of a log directory into the tier (for ``transfer.intake``): its files and its sidecar."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bloom.sidecar import Sidecar
from checkpoint.lineage import Lineage
from compactor.access.tier import Tier
from compactor.cleaner.passes.sidecar_builder import build_sidecar
from compactor.cleaner.passes.worker_threads import WorkerThreads
from compactor.errors import OutOfBudget
from compactor.local.spool import spool_folder_of_this_process
from compactor.model.ids import TopicPartition
from compactor.model.policy import CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.balance import BalanceDigestKey
from compactor.storage.schemes import innermost_existing_folder_of_store
from compactor.tier.sidecars import SidecarStore
from compactor.transfer.log_directory import SegmentToImport, prepare_segment_upload, require_file_unchanged


@dataclass(frozen=True)
class SegmentUploadSettings:
    """Settings that the uploads of one import share.

    threads: number of threads that build the sidecar of one segment.
    advance: called from threads with the size of each uploaded segment.
    sidecars: where sidecars are stored; None if none are wanted.
    """

    tier: Tier
    partition: TopicPartition
    policy: CleanerPolicy
    threads: int
    sidecars: SidecarStore | None
    advance: Callable[[int], None]


@dataclass(frozen=True)
class SegmentUpload:
    """A segment of a log directory that an import adds to the tier (implements ``intake.IncomingSegment``).

    lineage: leader epochs of the log, as far as they are known.
    identity_check: raises BadData if the directory's topic was recreated.
    """

    how: SegmentUploadSettings
    member: SegmentToImport
    lineage: Lineage
    identity_check: Callable[[], None]

    @property
    def content_identity(self) -> str:
        return f"{self.member.start} {self.member.end} {self.member.checked.sha256}"

    def upload_under_id(self, segment_id: str) -> RemoteLogSegmentMetadata | None:
        how = self.how
        with tempfile.TemporaryDirectory(prefix="import-", dir=spool_folder_of_this_process(how.tier.state_dir)) as scratch:
            key = BalanceDigestKey(how.tier.identity.hash_key())
            metadata, paths = prepare_segment_upload(self.member, segment_id, self.lineage, how.policy, key, Path(scratch))
            if how.tier.ports.layout.upload_segment(how.partition, metadata, paths):
                return None
        if how.sidecars is not None:
            how.sidecars.add_sidecar_if_absent(self._build_sidecar(metadata.id, how.sidecars.hash_key))
        how.advance(metadata.size_bytes)
        return metadata

    def _build_sidecar(self, segment_id: str, hash_key: bytes) -> Sidecar:
        builder = self.member.checked.builder
        if builder is not None and builder.hash_key == hash_key:
            return builder.build_sidecar(segment_id)
        # Another process has created the tier meanwhile, so the builder hashed the keys with another hash key.
        with WorkerThreads(self.how.threads) as workers:
            return build_sidecar(
                segment_id,
                self.member.source,
                None,
                hash_key,
                self.how.policy.max_decompressed_batch_bytes,
                workers,
                counts_distinct_keys=True,
            )

    def check_source_unchanged(self) -> None:
        require_file_unchanged(self.member)
        self.identity_check()


def require_free_space(url: str, needed_bytes: int) -> None:
    """Raise OutOfBudget if the tier is a directory on a disk that has no space for ``needed_bytes``, so that the import fails before it
    writes anything.
    """
    disk = innermost_existing_folder_of_store(url)
    if disk is None:
        return
    free = shutil.disk_usage(disk).free
    if free < needed_bytes:
        raise OutOfBudget(
            f"this import needs {needed_bytes} bytes, and the disk of {disk} has {free} left",
            hint="Free space, or move the tier to a larger disk",
        )
