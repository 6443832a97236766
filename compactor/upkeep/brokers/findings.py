"""Kinds of problems in a broker-managed tier, each with its consequence for consumers and the recommended action."""

from __future__ import annotations

from dataclasses import dataclass

from compactor.model.ids import TopicPartition

_RESTORE_HINT = "Restore the object from the store's versions or a backup, or let retention pass over it"


@dataclass(frozen=True)
class FindingMeaning:
    """Severity, consequence and recommended action of one kind of finding.

    severity: error (consumers get fewer or other records than were written), warning (it costs, or becomes an error) or note.
    """

    severity: str
    means: str
    todo: str


FINDING_KINDS = {
    "missing": FindingMeaning("error", "a fetch from these offsets fails until retention passes them", _RESTORE_HINT),
    "size": FindingMeaning("error", "a fetch from these offsets fails, or ends early", _RESTORE_HINT),
    "object": FindingMeaning("error", "a fetch from these offsets fails: the plug-in cannot read it", _RESTORE_HINT),
    "log": FindingMeaning("error", "consumers stop at a corrupt batch", _RESTORE_HINT),
    "metadata": FindingMeaning(
        "error", "brokers look for offsets and times where they are not", "Report it: this was not written by a stock broker"
    ),
    "epochs": FindingMeaning(
        "error", "a fetch by leader epoch goes to the wrong segment, or finds none", "Report it; do not delete the segment"
    ),
    "gap": FindingMeaning(
        "error", "a consumer that asks for these offsets is reset (OFFSET_OUT_OF_RANGE)", "Restore what is missing, or tell consumers"
    ),
    "index": FindingMeaning(
        "error", "a fetch begins at the wrong place, or reads far too much", _RESTORE_HINT + "; it can be rebuilt from the log"
    ),
    "timeindex": FindingMeaning("error", "a search by time finds the wrong offset", _RESTORE_HINT + "; it can be rebuilt from the log"),
    "txnindex": FindingMeaning(
        "error",
        "read_committed consumers are given records of aborted transactions",
        "Read it with this program, which goes by the control records, or compact the partition: a round writes the index anew",
    ),
    "snapshot": FindingMeaning(
        "error", "a broker that rebuilds its state from it fails, or forgets producers", _RESTORE_HINT + "; it can be rebuilt from the log"
    ),
    "leader-epoch-checkpoint": FindingMeaning(
        "error", "a broker that rebuilds its state from it takes another lineage, and reads other segments", _RESTORE_HINT
    ),
    "unread": FindingMeaning(
        "warning", "nobody: another segment stands in its place, and it is paid for", "Brokers delete it with their retention"
    ),
    "stuck-copy": FindingMeaning(
        "warning",
        "nobody: its upload was begun and never finished, and brokers do not take it up again",
        "It goes when the topic does. See `orphans` for objects that nothing names",
    ),
    "stuck-delete": FindingMeaning("warning", "nobody: its deletion was begun long ago", "Look at the logs of the partition's leader"),
    "orphan": FindingMeaning(
        "warning", "nobody: no metadata names it, and it is paid for", "`orphans find` lists such objects, `orphans purge` deletes them"
    ),
    "stranger": FindingMeaning("note", "nobody: it is no object of a segment", "Nothing, unless nobody knows it"),
    "unfinished": FindingMeaning(
        "warning", "nobody: an upload was begun and never finished, and its parts are paid for", "Set a lifecycle rule that aborts them"
    ),
    "dropped-record": FindingMeaning(
        "note", "brokers drop a record of the metadata topic, with an ERROR line at each start", "Nothing can be done about it"
    ),
    "uploads-unknown": FindingMeaning(
        "note", "unfinished uploads cannot be listed with these credentials", "Allow s3:ListBucketMultipartUploads"
    ),
    "unreadable-metadata": FindingMeaning(
        "error", "brokers stop reading the metadata topic there, too", "Ask whoever wrote it; see docs/broker-tiers.md"
    ),
}


@dataclass(frozen=True)
class BrokerFinding:
    """A problem found in a partition of a broker-managed tier.

    kind: a key of KINDS.
    object: key or name of the object concerned.
    detail: what was found there.
    """

    severity: str
    kind: str
    topic: str
    partition: int
    object: str
    detail: str
    means: str
    todo: str


def broker_finding(kind: str, name: TopicPartition, where: str, detail: str) -> BrokerFinding:
    """Return a finding with the severity, consequence and action of its kind.

    :param where: key or name of the object concerned.
    """
    about = FINDING_KINDS[kind]
    return BrokerFinding(about.severity, kind, name.topic, name.partition, where, detail, about.means, about.todo)
