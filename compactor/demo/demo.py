"""The demo: compaction of a generated topic in seven steps: make, import, plan, run, verify, export, check."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import Settings, load_settings
from compactor.consumer.messages import iterate_byte_strings
from compactor.consumer.ranges import read_record_blocks
from compactor.demo.data import CustomersTable, DemoTopicSettings, write_demo_topic
from compactor.errors import Refused, UsageError
from compactor.model.ids import TopicPartition
from compactor.round.compaction import RoundReport, RoundStageCallback
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.storage.probe import probe_store
from compactor.storage.schemes import store_kind
from compactor.transfer.export import export_partition
from compactor.transfer.import_ import import_directory
from compactor.transfer.import_options import ImportProgressCallbacks, ImportReport
from compactor.upkeep.segment_check import SegmentProblem
from compactor.upkeep.verify_tier import verify_partition
from compactor.views.forecast import RoundForecast, forecast_next_round

NAME = TopicPartition("customers", 0)
FIRST_LINE = "# Written by `tiered-compactor demo`, which deletes what it finds beside it when it is run here again.\n"

OnCount = Callable[[int], None]


ValueByKey = dict[bytes, bytes | None]
"""Last committed value of each key; None if the key was deleted."""


@dataclass(frozen=True)
class DemoTopicSize:
    """Number of records, bytes and segments of the topic in the tier. Records include transaction markers."""

    records: int
    bytes: int
    segments: int


@dataclass(frozen=True)
class DemoComparison:
    """The tier before and after the round, and each key's last value as written and as found in the tier.

    differences: a line for each key whose last value in the tier is not the one that was written; empty if the demo succeeded.
    """

    before: DemoTopicSize
    after: DemoTopicSize
    written: ValueByKey
    found: ValueByKey
    differences: list[str]


def count_keys_with_value(values: ValueByKey) -> int:
    """Return the number of keys whose last record has a value, that is, which are not deleted."""
    return sum(value is not None for value in values.values())


def describe_last_value_differences(written_values: ValueByKey, values_in_tier: ValueByKey) -> list[str]:
    """Return a line for each key whose last value in the tier is not the one that was written; an empty list if there is none.

    Deleted keys are equal whether the tier has a tombstone or no record of them.
    """
    return [
        f"{key!r} has another last value"
        for key in sorted(written_values.keys() | values_in_tier.keys())
        if written_values.get(key) != values_in_tier.get(key)
    ]


def _require_fit_store(store: ObjectStore) -> None:
    """Try a store as `config check` does. Raises Refused with the first error that is found."""
    for finding in probe_store(store, lambda: int(time.time() * 1000)):
        if finding.severity == "error":
            raise Refused(finding.detail, hint=finding.hint)


class Demo:
    """One run of the demo in a folder.

    :param folder: may be absent or empty, or hold an earlier demo, which is deleted.
    :param now_ms: time of the last record, and of the round, in milliseconds.
    :param tier_url: where the tier is created, empty for inside the folder. The demo refuses a URL at which a tier
        exists, and leaves its own tier there.
    :param settings: settings from which the access to the store at ``tier_url`` is taken.
    :raises UsageError: if the folder or the URL is in use.
    :raises Refused: if the store at ``tier_url`` is not fit for a tier. It is tried before the topic is generated.
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
        self._delete_earlier_demo_from_folder()
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

    def _delete_earlier_demo_from_folder(self) -> None:
        """Delete an earlier demo in the folder, and create the folder if it does not exist. Raises UsageError if the folder holds anything
        else.
        """
        if self.folder.is_dir() and any(self.folder.iterdir()):
            if not self.config.exists() or not self.config.read_text(encoding="utf-8", errors="replace").startswith(FIRST_LINE):
                raise UsageError(f"{self.folder} is not empty and not of an earlier demo", hint="Name an empty or a new directory")
            for name in ("kafka-log", "tier", "state", "exported"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {self.folder}: {error.strerror}", hint="Name another directory") from error

    def write_generated_topic_as_log_directory(self, on_records: OnCount) -> None:
        """Generate the demo's topic and write it as a Kafka log directory. ``on_records``: receives the number of records of each batch."""
        for count in write_demo_topic(self.log_dir, self.shape, self._table):
            on_records(count)

    def import_topic(self, progress: ImportProgressCallbacks) -> ImportReport:
        """Import the log directory into the tier."""
        report = import_directory(self._tier, self.log_dir, NAME, self._cleaner.cleaner_policy(), progress)
        self._before = self._topic_size_in_tier()
        return report

    def forecast_round(self) -> RoundForecast:
        """Return the forecast of a round of compaction: what it will clean and save."""
        return forecast_next_round(self._tier, NAME, self.now_ms)

    def compact_topic_in_one_round(self, on_stage: RoundStageCallback) -> RoundReport:
        """Compact the topic in one round."""
        return compact(self._tier, NAME, self.now_ms, on_stage=on_stage)

    def verify_tier(self, on_bytes: OnCount) -> list[SegmentProblem]:
        """Verify the tier's segments, and return the errors, without notes."""
        found = verify_partition(self._tier, NAME, on_bytes)
        return [problem for problem in found if problem.severity == "error"]

    def export_topic_as_log_directory(self, on_bytes: OnCount) -> None:
        """Export the compacted topic from the tier as a Kafka log directory."""
        export_partition(self._tier, NAME, self.exported, on_bytes)

    def compare_last_values_with_written_ones(self) -> DemoComparison:
        """Read the tier as a consumer does and compare the last value of each key with the last one that was written."""
        found: ValueByKey = {}
        for block in read_record_blocks(self._tier, NAME):
            found |= {
                key: value
                for key, value in zip(iterate_byte_strings(block.keys), iterate_byte_strings(block.values), strict=True)
                if key is not None
            }
        return DemoComparison(
            self._before, self._topic_size_in_tier(), self._table.latest, found, describe_last_value_differences(self._table.latest, found)
        )

    def _topic_size_in_tier(self) -> DemoTopicSize:
        """Return the present number of segments, records and bytes of the topic in the tier."""
        state = self._tier.open_control_log_of_partition(NAME).refresh()
        return DemoTopicSize(sum(segment.records for segment in state.live), state.bytes, len(state.live))


def _format_toml(sections: dict[str, dict[str, str]]) -> str:
    """Return the text of a TOML file with these sections, below a comment by which a later demo recognizes the file."""
    lines = [FIRST_LINE]
    for name, keys in sections.items():
        lines += [f"[{name}]\n", *(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in keys.items())]
    return "".join(lines)
