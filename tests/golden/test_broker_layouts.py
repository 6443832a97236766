"""The tiers that brokers wrote, read through their layouts: every file of every segment, whole and in ranges."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from compactor.adapters.brokers.aiven.layout import AivenLayout
from compactor.adapters.brokers.aiven.manifest import CustomMetadata, SegmentManifest
from compactor.adapters.brokers.kafka_local import KafkaLocalLayout
from compactor.errors import NotFound, Refused
from compactor.records.batches import parse_batch_headers, read_only_view, verify_crcs_of_batches
from compactor.storage.factory import open_store
from compactor.storage.wrappers import RequestCounters
from compactor.tier.ports import SegmentLayout
from tests.golden_cases import names
from tests.plain_format import read_batches
from tests.support.broker_tiers import ORDERS, BrokerTier, aiven_tier, local_tier
from tests.support.plain_aiven import read_segment


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("brokers")


def local(tier: BrokerTier) -> KafkaLocalLayout:
    return KafkaLocalLayout(open_store(str(tier.objects)), tier.topic)


def aiven(tier: BrokerTier, counters: RequestCounters | None = None) -> AivenLayout:
    return AivenLayout(open_store(str(tier.objects), counters=counters), tier.topic, tier.settings())


def is_a_log(tier: BrokerTier, layout: SegmentLayout) -> list[tuple[int, bytes | None]]:
    """Every segment's log has sound batches that end where metadata says; returns its records' offsets and keys."""
    records = []
    for segment in tier.segments:
        log = layout.read_file(ORDERS, segment, "log")
        data = read_only_view(np.frombuffer(log, np.uint8))
        table = parse_batch_headers(data, segment.id, segment.start_offset - 1)
        verify_crcs_of_batches(data, table, 0, len(table), segment.id)
        assert table.last_offset[-1] == segment.end_offset
        assert table.max_timestamp.max() == segment.max_timestamp_ms
        records += [(record.offset, record.key) for batch in read_batches(log) if not batch.control for record in batch.records]
    return records


def reads_the_same_in_ranges(layout: SegmentLayout, tier: BrokerTier) -> None:
    for segment in tier.segments[:3]:
        for kind, file in layout.segment_files(ORDERS, segment).items():
            whole = layout.read_file(ORDERS, segment, kind)
            assert len(whole) == file.size
            for start, length in ((0, 0), (0, 1), (file.size - 1, 5), (file.size, 1), (file.size + 9, 9), (file.size // 3, file.size // 2)):
                assert layout.read_file(ORDERS, segment, kind, max(0, start), length) == whole[max(0, start) : max(0, start) + length]
        log = layout.read_file(ORDERS, segment, "log")
        edges = [edge + delta for edge in (16_384, 32_768, 65_536) for delta in (-1, 0, 1)]
        for start in edges:
            for end in (*edges, len(log)):
                if start < end:
                    assert layout.read_file(ORDERS, segment, "log", start, end - start) == log[start:end]
        assert layout.read_file(ORDERS, segment, "log", 16_383) == log[16_383:]


@pytest.mark.parametrize("version", names("tiered"))
class TestLocalTieredStorage:
    def test_every_file_is_the_one_on_disk(self, version: str, scratch: Path, tmp_path: Path) -> None:
        tier = local_tier(version, scratch)
        layout, seen = local(tier), set()
        for segment in tier.segments:
            files = layout.segment_files(ORDERS, segment)
            assert files["log"].size == segment.size_bytes
            assert layout.stored_segment_problem(ORDERS, segment) == ""
            for kind in files:
                path = tier.objects / layout.object_name(ORDERS, segment, kind)
                assert path.name.endswith("." + kind.replace("-", "_"))
                assert layout.read_file(ORDERS, segment, kind) == path.read_bytes()
                assert layout.download_file(ORDERS, segment, kind, tmp_path / "file") == files[kind].size
                assert (tmp_path / "file").read_bytes() == path.read_bytes()
                seen.add(path)
        assert len(tier.segments) == 29
        assert seen == {path for path in tier.objects.rglob("*") if path.is_file()}
        assert {(o.segment_id, o.start_offset) for o in layout.list_objects(ORDERS)} == {(s.id, s.start_offset) for s in tier.segments}

    def test_logs_parse_and_ranges_fit(self, version: str, scratch: Path) -> None:
        tier = local_tier(version, scratch)
        assert [offset for offset, _ in is_a_log(tier, local(tier))][-1] <= 3209
        reads_the_same_in_ranges(local(tier), tier)


@pytest.mark.parametrize("case", names("aiven"))
class TestAivensPlugIn:
    def test_every_file_is_what_the_broker_had(self, case: str, scratch: Path, tmp_path: Path) -> None:
        tier = aiven_tier(case, scratch)
        layout, compared = aiven(tier), 0
        keys = {name: Path(file) for name, file in tier.settings().key_pairs.items()}
        on_disk = tier.local_files()
        starts = [segment.start_offset for segment in tier.segments]
        following = dict(pairwise(starts))
        for segment in tier.segments:
            plain = read_segment(tier.objects / layout.object_name(ORDERS, segment, "log").removesuffix(".log"), keys)
            files = layout.segment_files(ORDERS, segment)
            assert {kind: file.size for kind, file in files.items()} == {kind: len(data) for kind, data in plain.items()}
            assert layout.stored_segment_problem(ORDERS, segment) == ""
            for kind, data in plain.items():
                assert layout.read_file(ORDERS, segment, kind) == data
                assert layout.download_file(ORDERS, segment, kind, tmp_path / "file") >= (1 if data else 0)
                assert (tmp_path / "file").read_bytes() == data
                base = following.get(segment.start_offset, -1) if kind == "snapshot" else segment.start_offset
                if about := on_disk.get(base, {}).get(kind):
                    assert hashlib.sha256(data).hexdigest() == about["sha256"]
                    compared += 1
        assert (len(tier.segments), compared) >= (5, 14)

    def test_the_log_is_what_consumers_read(self, case: str, scratch: Path) -> None:
        tier = aiven_tier(case, scratch)
        records = is_a_log(tier, aiven(tier))
        consumed = [record["offset"] for record in tier.records() if record["offset"] <= tier.segments[-1].end_offset]
        assert [offset for offset, _ in records] == consumed
        reads_the_same_in_ranges(aiven(tier), tier)

    def test_a_range_fetches_its_chunks_alone(self, case: str, scratch: Path) -> None:
        tier = aiven_tier(case, scratch)
        counters = RequestCounters()
        layout, segment = aiven(tier, counters), tier.segments[1]
        log = layout.read_file(ORDERS, segment, "log")
        before = counters.usage()
        assert layout.read_file(ORDERS, segment, "log", 16_384 * 2 + 5, 10) == log[16_384 * 2 + 5 :][:10]
        asked = counters.usage().usage_since(before)
        assert asked.requests == {"get": 1}
        assert asked.bytes_read <= 16_384 + 28
        assert layout.read_file(ORDERS, segment, "log", 16_384 - 1, 2) == log[16_384 - 1 :][:2]
        assert counters.usage().usage_since(before).bytes_read <= 3 * (16_384 + 28)

    def test_every_object_is_accounted_for(self, case: str, scratch: Path) -> None:
        tier = aiven_tier(case, scratch)
        listed = list(aiven(tier).list_objects(ORDERS))
        assert sorted(o.key for o in listed) == sorted(str(p.relative_to(tier.objects)) for p in tier.objects.rglob("*") if p.is_file())
        live = {(segment.id, segment.start_offset) for segment in tier.segments}
        orphans = [(o.segment_id, o.kind) for o in listed if (o.segment_id, o.start_offset) not in live]
        unfinished = [segment.id for segment in tier.unfinished]
        assert orphans == [(name, kind) for name in unfinished for kind in ("indexes", "log")]
        assert len(unfinished) == (1 if case == "interrupted" else 0)
        for segment in tier.unfinished:
            with pytest.raises(NotFound, match="Without its manifest nothing of a segment can be read"):
                aiven(tier).read_file(ORDERS, segment, "log")
            assert f"{segment.id}.rsm-manifest. Without its manifest" in aiven(tier).stored_segment_problem(ORDERS, segment)

    def test_manifests_and_custom_metadata_are_written_as_the_plug_in_writes_them(self, case: str, scratch: Path) -> None:
        tier = aiven_tier(case, scratch)
        layout, prefix = aiven(tier), tier.settings().key_prefix
        for segment in tier.segments:
            path = tier.objects / layout.object_name(ORDERS, segment, "log").replace(".log", ".rsm-manifest")
            written = path.read_bytes()
            manifest = SegmentManifest.decode(written)
            index = json.loads(written)["chunkIndex"]
            if index["type"] == "fixed":
                assert manifest.encode() == written
            else:  # the sizes are compressed by another release of zstd
                ours = json.loads(manifest.encode())
                assert list(ours["chunkIndex"]) == list(index)
                ours["chunkIndex"]["transformedChunks"] = index["transformedChunks"]
                assert json.dumps(ours, separators=(",", ":")).encode() == written
                assert SegmentManifest.decode(manifest.encode()) == manifest
            custom = CustomMetadata.decode(segment.custom_metadata)
            assert custom.encode() == segment.custom_metadata
            if tier.settings().custom_metadata_fields:
                stem = path.with_suffix("")
                assert custom.remote_size == sum(stem.with_suffix(s).stat().st_size for s in (".log", ".indexes", ".rsm-manifest"))
                assert (custom.object_prefix, custom.object_key) == (prefix, str(stem.relative_to(tier.objects)).removeprefix(prefix))


def test_objects_are_found_where_custom_metadata_says(scratch: Path) -> None:
    """After the brokers' prefix was changed the plug-in finds manifests under the new one, and the rest where it was."""
    tier = aiven_tier("custom-metadata", scratch)
    moved, segment = tier.folder / "moved", tier.segments[2]
    layout = AivenLayout(open_store(str(tier.objects)), tier.topic, tier.settings())
    before = layout.read_file(ORDERS, segment, "log", 100, 50)
    source = tier.objects / layout.object_name(ORDERS, segment, "log")
    target = moved / "new" / source.relative_to(tier.objects / "some/prefix")
    for path, place in (
        (source.with_suffix(".rsm-manifest"), target.with_suffix(".rsm-manifest")),
        (source, moved / source.relative_to(tier.objects)),
    ):
        place.parent.mkdir(parents=True)
        place.write_bytes(path.read_bytes())
    settings = tier.settings().model_copy(update={"key_prefix": "new/"})
    assert AivenLayout(open_store(str(moved)), tier.topic, settings).read_file(ORDERS, segment, "log", 100, 50) == before


def test_keys_that_are_missing_or_others_are_named(scratch: Path) -> None:
    tier = aiven_tier("all", scratch)
    key2 = tier.settings().key_pairs["key2"]
    first, last = tier.segments[0], tier.segments[-1]

    def layout(**pairs: str) -> AivenLayout:
        settings = tier.settings().model_copy(update={"key_pairs": pairs, "active_key_pair": ""})
        return AivenLayout(open_store(str(tier.objects)), tier.topic, settings)

    assert layout(key2=key2).read_file(ORDERS, last, "index")
    with pytest.raises(
        Refused, match=r"rsm-manifest: it is encrypted for key pair 'key1', whose private key is not configured .there: key2"
    ):
        layout(key2=key2).read_file(ORDERS, first, "index")
    with pytest.raises(Refused, match=r"key_pairs under \[tier.aiven\]"):
        layout().read_file(ORDERS, first, "log", 0, 1)
    with pytest.raises(Refused, match="its data key cannot be unwrapped with .*key2.private.pem, which is configured for key pair 'key1'"):
        layout(key1=key2).read_file(ORDERS, first, "log", 0, 1)
