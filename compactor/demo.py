"""The demo: compaction of a generated topic in seven steps."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import Settings, load_settings
from compactor.constants import LeaderEpoch, Offset
from compactor.errors import Refused, UsageError
from compactor.features.imports.import_ import ImportProgressCallbacks, ImportReport, import_directory
from compactor.model.finding import Finding
from compactor.model.ids import TopicPartition
from compactor.read.ranges import read_record_blocks
from compactor.read.records import iterate_byte_strings
from compactor.records.codecs import GZIP, LZ4, NONE, SNAPPY, ZSTD
from compactor.records.encode import ProducerFields, RecordToEncode, encode_batch, encode_txn_marker
from compactor.round.compaction import RoundReport, RoundStageCallback
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.storage.probe import probe_store
from compactor.storage.schemes import store_kind
from compactor.upkeep.export import export_partition
from compactor.upkeep.verify import verify_partition
from compactor.views.forecast import RoundForecast, forecast_next_round

# The topic, as a change-capture connector writes it: inserts, updates of keys with skewed popularity, tombstones, headers, all five
# codecs, three leader epochs, one idempotent and one transactional producer.

CONNECTOR = 4001
IMPORTER = 4002
"""Producer ids of the change-capture connector, and of a job that changes many customers in one transaction."""

_CODECS = (NONE, GZIP, SNAPPY, LZ4, ZSTD)
_SKEW = 0.9
_DELETES = 0.02
_HISTORY_MS = 7 * 86_400_000
_CITIES = (b"Lisbon", b"Oslo", b"Turin", b"Graz", b"Nantes", b"Gdansk", b"Leeds", b"Zagreb")
_PLANS = (b"free", b"basic", b"plus", b"business")


@dataclass(frozen=True)
class DemoTopicSettings:
    """Size of the generated topic. The same settings, ``seed`` included, give the same bytes.

    now_ms: time of the last record.
    transactions: one of them is aborted.
    """

    now_ms: int
    records: int = 300_000
    keys: int = 30_000
    batch_records: int = 120
    segment_bytes: int = 4 << 20
    transactions: int = 24
    seed: int = 1272


@dataclass
class _LogDirectoryWriter:
    """Writes segments as a broker does."""

    folder: Path
    segment_bytes: int
    next_offset: int = 0
    leader_epoch: int = 0
    epochs: list[EpochEntry] = field(default_factory=list)
    _base: int = 0
    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def append_batch(self, data: bytes, record_count: int, segment_file_mtime_ms: int) -> None:
        if self._size + len(data) > self.segment_bytes:
            self.roll_segment(segment_file_mtime_ms)
        self._parts.append(data)
        self._size += len(data)
        self.next_offset += record_count

    def begin_leader_epoch(self, epoch: int) -> None:
        self.leader_epoch = epoch
        self.epochs.append(EpochEntry(LeaderEpoch(epoch), Offset(self.next_offset)))

    def roll_segment(self, segment_file_mtime_ms: int) -> None:
        if self._parts:
            path = self.folder / f"{self._base:020d}.log"
            path.write_bytes(b"".join(self._parts))
            os.utime(path, ns=(segment_file_mtime_ms * 1_000_000,) * 2)
        self._base, self._parts, self._size = self.next_offset, [], 0


def write_demo_topic(folder: Path, settings: DemoTopicSettings, customers: CustomersTable) -> Iterator[int]:
    """Write a Kafka log directory, which must not exist yet. Yield the number of records of each batch."""
    folder.mkdir(parents=True)
    log = _LogDirectoryWriter(folder, settings.segment_bytes)
    batches = -(-settings.records // settings.batch_records)
    transactions = {(2 * n + 1) * batches // (2 * settings.transactions): n for n in range(settings.transactions)}
    elections = {0: 0, batches // 3: 1, 3 * batches // 4: 3}
    sequence = {CONNECTOR: 0, IMPORTER: 0}
    for number in range(batches):
        now = settings.now_ms - _HISTORY_MS + (number + 1) * (_HISTORY_MS // batches)
        codec = _CODECS[number * len(_CODECS) // batches]
        if number in elections:
            log.begin_leader_epoch(elections[number])
        count = min(settings.batch_records, settings.records - number * settings.batch_records)
        whose = [(CONNECTOR, count)]
        if number in transactions:
            # The importer's transaction begins before this batch and ends after it.
            third = count // 3
            whose = [(IMPORTER, third), (CONNECTOR, count - 2 * third), (IMPORTER, third)]
        for producer, some in whose:
            rows = customers.change_rows(
                some, log.next_offset, now, aborted=producer == IMPORTER and _is_aborted(settings, transactions[number])
            )
            header = ProducerFields(producer, 0, sequence[producer], producer == IMPORTER)
            log.append_batch(encode_batch(rows, codec=codec, producer=header, leader_epoch=log.leader_epoch), some, now)
            sequence[producer] += some
        if number in transactions:
            commit = not _is_aborted(settings, transactions[number])
            log.append_batch(encode_txn_marker(log.next_offset, now, IMPORTER, 0, is_commit=commit, leader_epoch=log.leader_epoch), 1, now)
        yield count
    log.roll_segment(settings.now_ms)
    (folder / "leader-epoch-checkpoint").write_text(format_leader_epoch_checkpoint(tuple(log.epochs)), encoding="utf-8")


def _is_aborted(settings: DemoTopicSettings, transaction_number: int) -> bool:
    return transaction_number == settings.transactions // 2


class CustomersTable:
    """The table whose changes the topic holds. latest: key -> last committed value, None if the key was deleted."""

    def __init__(self, settings: DemoTopicSettings) -> None:
        self._random = np.random.default_rng(settings.seed)
        weights = np.cumsum(np.arange(1, settings.keys + 1, dtype=np.float64) ** -_SKEW)
        self._popularity = weights / weights[-1]
        self._id_of_rank = self._random.permutation(settings.keys) + 10_000
        self.latest: dict[bytes, bytes | None] = {}
        self._versions: dict[int, int] = {}
        self._lsn = 1 << 32

    def change_rows(self, count: int, offset: int, timestamp: int, *, aborted: bool) -> list[RecordToEncode]:
        ids = self._id_of_rank[np.searchsorted(self._popularity, self._random.random(count))].tolist()
        lots = self._random.random(count).tolist()
        versions = dict(self._versions) if aborted else self._versions
        rows = [self._change_row(versions, key, lot, offset + i, timestamp + i) for i, (key, lot) in enumerate(zip(ids, lots, strict=True))]
        if not aborted:
            self.latest |= {row.key: row.value for row in rows if row.key is not None}
        return rows

    def _change_row(
        self, change_count_by_key: dict[int, int], key: int, random_fraction: float, offset: int, timestamp: int
    ) -> RecordToEncode:
        """random_fraction: from 0 to 1. Below ``_DELETES``, the change deletes the row, if it exists."""
        self._lsn += 64 + key % 512
        name = b'{"id":%d}' % key
        headers = (("connector", b"shop-db"), ("lsn", b"%d" % self._lsn))
        version = change_count_by_key.get(key, 0)
        if version and random_fraction < _DELETES:
            del change_count_by_key[key]
            return RecordToEncode(offset, timestamp, name, None, headers)
        change_count_by_key[key] = version + 1
        return RecordToEncode(offset, timestamp, name, _customer_row_json(key, version, random_fraction, timestamp, self._lsn), headers)


def _customer_row_json(key: int, version: int, random_fraction: float, timestamp: int, lsn: int) -> bytes:
    """:param version: number of earlier changes of the row.
    :param lsn: position of the change in the source database's log.
    """
    return (
        b'{"op":"%s","ts_ms":%d,"source":{"db":"shop","table":"customers","lsn":%d},"after":{"id":%d,"name":"Customer %d",'
        b'"email":"c%d@example.org","city":"%s","plan":"%s","balance_cents":%d,"session":"%016x","version":%d}}'
    ) % (
        b"u" if version else b"c",
        timestamp,
        lsn,
        key,
        key,
        key,
        _CITIES[key % len(_CITIES)],
        _PLANS[(key + version) % len(_PLANS)],
        int(random_fraction * 1_000_000),
        int(random_fraction * (1 << 60)),
        version + 1,
    )


NAME = TopicPartition("customers", 0)
FIRST_LINE = "# Written by `tiered-compactor demo`, which deletes what it finds beside it when it is run here again.\n"

OnCount = Callable[[int], None]


ValueByKey = dict[bytes, bytes | None]
"""Last committed value of each key; None if the key was deleted."""


@dataclass(frozen=True)
class DemoTopicSize:
    records: int
    bytes: int
    segments: int


@dataclass(frozen=True)
class DemoComparison:
    before: DemoTopicSize
    after: DemoTopicSize
    written: ValueByKey
    found: ValueByKey
    differences: list[str]


def count_keys_with_value(values: ValueByKey) -> int:
    return sum(value is not None for value in values.values())


def value_differences(written_values: ValueByKey, values_in_tier: ValueByKey) -> list[str]:
    """Line for each key whose last value in the tier differs. A deleted key may have a tombstone or no record."""
    return [
        f"{key!r} has another last value"
        for key in sorted(written_values.keys() | values_in_tier.keys())
        if written_values.get(key) != values_in_tier.get(key)
    ]


def _require_fit_store(store: ObjectStore) -> None:
    for finding in probe_store(store, lambda: int(time.time() * 1000)):
        if finding.severity == "error":
            raise Refused(finding.detail, hint=finding.hint)


class Demo:
    """One run of the demo in a folder.

    :param folder: may be absent or empty, or hold an earlier demo, which is deleted.
    :param now_ms: time of the last record, and of the round.
    :param tier_url: where the tier is created and stays, empty for inside the folder.
    :raises UsageError: if the folder or the URL is in use.
    :raises Refused: if the store at ``tier_url`` is not fit for a tier.
    """

    def __init__(self, folder: Path, now_ms: int, tier_url: str = "", settings: Settings | None = None) -> None:
        self.folder = folder.absolute()
        self.now_ms = now_ms
        self.shape = DemoTopicSettings(now_ms)
        self._table = CustomersTable(self.shape)
        self._before = DemoTopicSize(0, 0, 0)
        self.config = self.folder / "tiered-compactor.toml"
        self.log_dir = self.folder / "kafka-log" / str(NAME)
        self.exported = self.folder / "exported" / str(NAME)
        self._clear_folder()
        self.tier_place = tier_url or str(self.folder / "tier")
        tier = {"url": tier_url or (self.folder / "tier").as_uri(), "state_dir": str(self.folder / "state")}
        section = store_kind(self.tier_place).section
        reached = {section: settings.settings_of_section(section).model_dump()} if settings and section else {}
        self.config.write_text(_format_toml({"tier": tier, **reached}), encoding="utf-8")
        # The environment is ignored, so that the demo never touches a real tier.
        own_settings = load_settings(str(self.config), {})
        self._tier: Tier = open_tier(own_settings)
        if tier_url and self._tier.catalog.refresh().tier_id:
            raise UsageError(f"there is a tier at {tier_url} already", hint="Name a prefix that nothing uses yet")
        if tier_url:
            _require_fit_store(open_store(tier_url, settings=own_settings, limits=own_settings.limits))
        self._cleaner = self._tier.cleaner_settings_for_topic(NAME.topic)

    def _clear_folder(self) -> None:
        if self.folder.is_dir() and any(self.folder.iterdir()):
            if not self.config.exists() or not self.config.read_text(encoding="utf-8", errors="replace").startswith(FIRST_LINE):
                raise UsageError(f"{self.folder} is not empty and not of an earlier demo", hint="Name an empty or a new directory")
            for name in ("kafka-log", "tier", "state", "exported"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {self.folder}: {error.strerror}", hint="Name another directory") from error

    def write_topic(self, on_records: OnCount) -> None:
        for count in write_demo_topic(self.log_dir, self.shape, self._table):
            on_records(count)

    def import_topic(self, progress: ImportProgressCallbacks) -> ImportReport:
        report = import_directory(self._tier, self.log_dir, NAME, self._cleaner.cleaner_policy(), progress)
        self._before = self._topic_size()
        return report

    def forecast_round(self) -> RoundForecast:
        return forecast_next_round(self._tier, NAME, self.now_ms)

    def compact_topic(self, on_stage: RoundStageCallback) -> RoundReport:
        return compact(self._tier, NAME, self.now_ms, on_stage=on_stage)

    def verify_tier(self, on_bytes: OnCount) -> list[Finding]:
        found = verify_partition(self._tier, NAME, on_bytes)
        return [problem for problem in found if problem.severity == "error"]

    def export_topic(self, on_bytes: OnCount) -> None:
        export_partition(self._tier, NAME, self.exported, on_bytes)

    def compare_values(self) -> DemoComparison:
        found: ValueByKey = {}
        for block in read_record_blocks(self._tier, NAME):
            found |= {
                key: value
                for key, value in zip(iterate_byte_strings(block.keys), iterate_byte_strings(block.values), strict=True)
                if key is not None
            }
        return DemoComparison(self._before, self._topic_size(), self._table.latest, found, value_differences(self._table.latest, found))

    def _topic_size(self) -> DemoTopicSize:
        state = self._tier.open_partition_log(NAME).refresh()
        return DemoTopicSize(sum(segment.records for segment in state.live), state.bytes, len(state.live))


def _format_toml(sections: dict[str, dict[str, str]]) -> str:
    lines = [FIRST_LINE]
    for name, keys in sections.items():
        lines += [f"[{name}]\n", *(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in keys.items())]
    return "".join(lines)
