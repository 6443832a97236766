"""Identity of logs: whether a log directory has the log that the tier holds.

1. Topic ids on both sides decide (Kafka 2.8 and later, ``partition.metadata``).
2. Else the seam that a person has adopted.
3. Else records compared with the tier's, of which at least one must be equal.
4. Else the directory that was compared last, which a broker renames when the topic is deleted: a log without new records whose oldest ones
   have expired in the broker has none to compare.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from compactor.access.tier import Tier
from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.control.importing import record_topic_id_adoption
from compactor.control.logs import PartitionLog
from compactor.control.ports import EnvironmentPorts
from compactor.control.records import TopicAdopted
from compactor.control.state import PartitionState
from compactor.errors import BadData
from compactor.model.ids import TopicPartition
from compactor.model.segment import StrictFrozenModel
from compactor.tier.contents import is_topic_id
from compactor.tier.kinds import control_url

PARTITION_METADATA = "partition.metadata"
NO_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""Kafka's zero UUID, for a topic without an id."""


# ---- the decision -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogIdentityEvidence:
    """Ids are empty if unknown.

    adopted: a person has confirmed (`topics adopt`) that the log continues the tier.
    compared: number of equal records or batches; with any difference, the directory was refused before.
    """

    recorded_id: str
    given_id: TopicId
    holds: bool
    adopted: bool = False
    compared: int = 0
    same_directory: bool = False


class LogIdentityVerdict(StrEnum):
    """SAME also for the first log of an empty partition."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


def compare_log_identity(evidence: LogIdentityEvidence) -> LogIdentityVerdict:
    if evidence.recorded_id and evidence.given_id:
        return LogIdentityVerdict.SAME if evidence.recorded_id == evidence.given_id else LogIdentityVerdict.OTHER
    if not evidence.holds and not evidence.recorded_id:
        return LogIdentityVerdict.SAME
    return LogIdentityVerdict.SAME if evidence.adopted or evidence.compared or evidence.same_directory else LogIdentityVerdict.UNKNOWN


def should_record_topic_id(evidence: LogIdentityEvidence) -> bool:
    return bool(
        evidence.holds and evidence.given_id and not evidence.recorded_id and compare_log_identity(evidence) is LogIdentityVerdict.SAME
    )


def _unidentified_log_error(state: PartitionState, topic_id: TopicId, source_name: str, cut_offset: int, *, truncates: bool) -> BadData:
    """If the tier's end is to be cut (``truncates``), a person's confirmation is no evidence."""
    ids = f"it is of topic id {topic_id or 'unknown'}, the tier's of {state.topic_id or 'unknown'}"
    if truncates and not (topic_id and not state.topic_id):
        way_out = f"If it is the same log, give a directory that has records below offset {cut_offset}" + (
            f", or its {PARTITION_METADATA}" if state.topic_id else ""
        )
    else:
        way_out = f"If it is the same log, use `{topic_adoption_command_text(state, topic_id)}`"
    return BadData(
        f"nothing shows that this is the log that the tier has as {state.topic_partition}: {ids}, and no record below offset"
        f" {cut_offset} could be "
        "compared",
        segment=source_name,
        hint=f"{way_out}; else import it under another name, or `topics delete {state.topic_partition}` first",
    )


def topic_adoption_command_text(state: PartitionState, topic_id: TopicId) -> str:
    if topic_id and not state.topic_id:
        return f"topics adopt {state.topic} --topic-id {topic_id}"
    return f"topics adopt {state.topic_partition} --seam {state.end_offset + 1}"


# ---- topic ids and directories ------------------------------------------------------------------------------------------------


def read_topic_id(log_dir: Path) -> TopicId:
    """Topic id in ``partition.metadata``; empty without the file (Kafka before 2.8). Raises BadData if its format is not Kafka's."""
    path = log_dir / PARTITION_METADATA
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return EMPTY_TOPIC_ID
    match = re.fullmatch(r"version: 0\ntopic_id: (\S+)\n?", text)
    if not match or not is_topic_id(match[1]):
        raise BadData("it names no topic id", segment=str(path), hint="Restore it: a broker refuses such a file, too")
    return TopicId("" if match[1] == NO_TOPIC_ID else match[1])


class DirectoryId(StrictFrozenModel):
    """born_ns: creation time, because a file system reuses inode numbers."""

    device: int
    inode: int
    born_ns: int


def identify_directory(path: Path) -> DirectoryId | None:
    """Return None if the system does not record creation times. Raises OSError."""
    born_ns = birth_time_ns(path)
    if born_ns is None:
        return None
    stat = path.stat()
    return DirectoryId(device=stat.st_dev, inode=stat.st_ino, born_ns=born_ns)


_STATX_BTIME = 0x800
_AT_FDCWD = -100


def birth_time_ns(path: Path) -> int | None:
    born = getattr(path.stat(), "st_birthtime", None)
    if born is not None:
        return int(born * 1_000_000_000)
    if not sys.platform.startswith("linux"):
        return None
    buffer = ctypes.create_string_buffer(256)
    try:
        failed = ctypes.CDLL(None).statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, buffer)
    except (OSError, AttributeError):
        return None  # a C library without statx
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if failed or not mask & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 80)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


class MatchedDirectory(StrictFrozenModel):
    """opened_slot: the control record that began the tier's log, which `topics delete` may replace."""

    directory: DirectoryId
    opened_slot: int


class MatchedDirectoryStore:
    """One small file per partition in ``state_dir``. If it is lost, records are compared again."""

    def __init__(self, state_dir: Path, control_url: str) -> None:
        self._folder = state_dir / "compared" / sha256(control_url.encode()).hexdigest()[:16]

    def load_matched_directory(self, partition: TopicPartition) -> MatchedDirectory | None:
        try:
            return MatchedDirectory.model_validate_json((self._folder / str(partition)).read_bytes())
        except (OSError, ValueError):
            return None

    def save_matched_directory(self, partition: TopicPartition, matched_directory: MatchedDirectory) -> None:
        """Atomic. A failed write is ignored: it only costs another comparison."""
        if self.load_matched_directory(partition) == matched_directory:
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as file:
                file.write(matched_directory.model_dump_json().encode())
            Path(file.name).replace(self._folder / str(partition))


# ---- in an import -------------------------------------------------------------------------------------------------------------

CountEqualRecords = Callable[[int], int]
"""Compares records below an offset and returns how many are equal; raises BadData if one differs."""


@dataclass
class LogIdentityCheck:
    """Check of one log directory.

    directory: None if it is not a broker's, or cannot be identified.
    read_from_directory: the topic id, which can be read again.
    """

    ports: EnvironmentPorts
    log: PartitionLog
    log_dir: Path
    given_id: TopicId
    directory: DirectoryId | None
    remembered: MatchedDirectoryStore
    read_from_directory: bool
    settled: bool = False

    @property
    def partition_metadata_path(self) -> str:
        return str(self.log_dir / PARTITION_METADATA)

    def require_directory_unchanged(self) -> None:
        """Raise BadData if the directory's topic was deleted and created again."""
        if self.read_from_directory and (read_topic_id(self.log_dir), identify_directory(self.log_dir)) != (self.given_id, self.directory):
            raise BadData(
                "the topic was deleted and created again while its log was imported",
                segment=self.partition_metadata_path,
                hint="Nothing of it was taken. Import again: the new topic's id is compared with the tier's",
            )

    def require_same_log(self, equal_batches: int, count_equal_records: CountEqualRecords, *, cut_offset: int | None = None) -> None:
        """Raise BadData unless the log is known to be the tier's. Record its topic id if the tier has none.


        :param count_equal_records: called if nothing else decides.
        :param cut_offset: where the tier's end is about to be cut. Then only topic ids or records below it identify the log, not a person's
            earlier confirmation.
        """
        if self.settled:
            return
        evidence = self._gather_identity_evidence(equal_batches, truncates=cut_offset is not None)
        if compare_log_identity(evidence) is LogIdentityVerdict.UNKNOWN:
            below = self.log.state.end_offset + 1 if cut_offset is None else cut_offset
            evidence = replace(evidence, compared=count_equal_records(below))
            if compare_log_identity(evidence) is LogIdentityVerdict.UNKNOWN:
                raise _unidentified_log_error(
                    self.log.state, self.given_id, self.partition_metadata_path, below, truncates=cut_offset is not None
                )
        self._settle(evidence)

    def is_same_log(self, equal_batches: int, count_equal_records: CountEqualRecords) -> bool:
        """For a directory without new segments. False: no evidence decides, and its next segment would be refused."""
        if self.settled:
            return True
        evidence = self._gather_identity_evidence(equal_batches)
        if compare_log_identity(evidence) is LogIdentityVerdict.UNKNOWN and self.given_id:
            evidence = replace(evidence, compared=count_equal_records(self.log.state.end_offset + 1))
        if compare_log_identity(evidence) is LogIdentityVerdict.SAME:
            self._settle(evidence)
        return self.settled

    def topic_adoption_needed_note(self) -> str:
        state = self.log.state
        way = topic_adoption_command_text(state, self.given_id)
        name = state.topic_partition
        return f"{name}: no record could be compared with the tier's, so that what comes next is refused until `{way}` is said"

    def remember_matched_directory(self) -> None:
        """Does nothing if topic ids will identify the log the next time."""
        state = self.log.state
        if self.settled and self.directory and state.has_segments and not (state.topic_id and self.given_id):
            self.remembered.save_matched_directory(
                state.topic_partition, MatchedDirectory(directory=self.directory, opened_slot=state.opened_slot)
            )

    def _gather_identity_evidence(self, equal_batches: int, *, truncates: bool = False) -> LogIdentityEvidence:
        state = self.log.state
        last = self.remembered.load_matched_directory(state.topic_partition) if self.directory and not truncates else None
        return LogIdentityEvidence(
            state.topic_id,
            self.given_id,
            holds=state.has_segments,
            adopted=state.adopted_seam == state.end_offset + 1 and not truncates,
            compared=equal_batches,
            same_directory=last is not None and (last.directory, last.opened_slot) == (self.directory, state.opened_slot),
        )

    def _settle(self, evidence: LogIdentityEvidence) -> None:
        self.settled = True
        if should_record_topic_id(evidence):
            why = "its seam was adopted" if evidence.adopted else f"{evidence.compared} records or batches compared equal"
            why = why if evidence.adopted or evidence.compared else "its directory is the one that was compared last"
            record_topic_id_adoption(self.log, TopicAdopted(topic_id=self.given_id, by=self.ports.holder, why=why))


def create_identity_check(tier: Tier, log: PartitionLog, log_dir: Path, topic_id: TopicId | None = None) -> LogIdentityCheck:
    given = read_topic_id(log_dir) if topic_id is None else topic_id
    directory = identify_directory(log_dir) if topic_id is None else None
    remembered = MatchedDirectoryStore(tier.state_dir, control_url(tier.settings))
    return LogIdentityCheck(tier.ports, log, log_dir, given, directory, remembered, topic_id is None)
