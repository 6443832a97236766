"""What can be wrong with a tier that brokers write: each kind with what it means for consumers, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from compactor.model.ids import TopicPartition

_RESTORE = "Restore the object from the store's versions or a backup, or let retention pass over it"


@dataclass(frozen=True)
class Kind:
    """``severity``: error (consumers get less, or other, than was written), warning (it costs, or becomes one), note."""

    severity: str
    means: str
    todo: str


KINDS = {
    "missing": Kind("error", "a fetch from these offsets fails until retention passes them", _RESTORE),
    "size": Kind("error", "a fetch from these offsets fails, or ends early", _RESTORE),
    "object": Kind("error", "a fetch from these offsets fails: the plug-in cannot read it", _RESTORE),
    "log": Kind("error", "consumers stop at a corrupt batch", _RESTORE),
    "metadata": Kind("error", "brokers look for offsets and times where they are not", "Report it: this was not written by a stock broker"),
    "epochs": Kind("error", "a fetch by leader epoch goes to the wrong segment, or finds none", "Report it; do not delete the segment"),
    "gap": Kind(
        "error", "a consumer that asks for these offsets is reset (OFFSET_OUT_OF_RANGE)", "Restore what is missing, or tell consumers"
    ),
    "index": Kind("error", "a fetch begins at the wrong place, or reads far too much", _RESTORE + "; it can be rebuilt from the log"),
    "timeindex": Kind("error", "a search by time finds the wrong offset", _RESTORE + "; it can be rebuilt from the log"),
    "txnindex": Kind(
        "error",
        "read_committed consumers are given records of aborted transactions",
        "Read it with this program, which goes by the control records, or compact the partition: a round writes the index anew",
    ),
    "snapshot": Kind(
        "error", "a broker that rebuilds its state from it fails, or forgets producers", _RESTORE + "; it can be rebuilt from the log"
    ),
    "leader-epoch-checkpoint": Kind(
        "error", "a broker that rebuilds its state from it takes another lineage, and reads other segments", _RESTORE
    ),
    "unread": Kind("warning", "nobody: another segment stands in its place, and it is paid for", "Brokers delete it with their retention"),
    "stuck-copy": Kind(
        "warning",
        "nobody: its upload was begun and never finished, and brokers do not take it up again",
        "It goes when the topic does. See `orphans` for objects that nothing names",
    ),
    "stuck-delete": Kind("warning", "nobody: its deletion was begun long ago", "Look at the logs of the partition's leader"),
    "orphan": Kind(
        "warning", "nobody: no metadata names it, and it is paid for", "`orphans find` lists such objects, `orphans purge` deletes them"
    ),
    "stranger": Kind("note", "nobody: it is no object of a segment", "Nothing, unless nobody knows it"),
    "unfinished": Kind(
        "warning", "nobody: an upload was begun and never finished, and its parts are paid for", "Set a lifecycle rule that aborts them"
    ),
    "dropped-record": Kind(
        "note", "brokers drop a record of the metadata topic, with an ERROR line at each start", "Nothing can be done about it"
    ),
    "uploads-unknown": Kind("note", "unfinished uploads cannot be listed with these credentials", "Allow s3:ListBucketMultipartUploads"),
    "unreadable-metadata": Kind(
        "error", "brokers stop reading the metadata topic there, too", "Ask whoever wrote it; see docs/broker-tiers.md"
    ),
}


@dataclass(frozen=True)
class BrokerFinding:
    """``kind`` is a key of KINDS; ``object``: where it is; ``detail``: what was found there."""

    severity: str
    kind: str
    topic: str
    partition: int
    object: str
    detail: str
    means: str
    todo: str


def finding(kind: str, name: TopicPartition, where: str, detail: str) -> BrokerFinding:
    about = KINDS[kind]
    return BrokerFinding(about.severity, kind, name.topic, name.partition, where, detail, about.means, about.todo)
