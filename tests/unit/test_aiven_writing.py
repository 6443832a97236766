"""Segments written for Aiven's plug-in: read back by a reader that shares nothing with the writer, written again after crashes, refused."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from Crypto.PublicKey import RSA
from typing_extensions import override

from compactor.adapters.brokers.aiven.layout import AivenLayout
from compactor.adapters.brokers.aiven.manifest import CustomMetadata
from compactor.config.settings import AivenSettings
from compactor.constants import TopicId
from compactor.errors import BadData, NotFound, Refused, UsageError
from compactor.model.ids import TopicPartition
from compactor.storage.factory import open_store
from compactor.storage.local import LocalStore
from compactor.storage.port import ObjectInfo
from compactor.storage.wrappers import RequestCounters
from compactor.tier.contents import TopicIdLookup
from tests.support.plain_aiven import data_key, read_segment
from tests.support.segments import files_of, segment_of

NAME = TopicPartition("orders", 1)
IDS = TopicIdLookup({"orders": TopicId("R0AHqObxTZmsN-zsxr_0TQ")})
MAIN = "orders-R0AHqObxTZmsN-zsxr_0TQ/1/00000000000000000100-lZ6vvmajTWKDBUTV6SQAtQ"


@pytest.fixture(scope="session")
def key_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, files = tmp_path_factory.mktemp("keys"), {}
    for name in ("old", "new"):
        files[name] = str(folder / f"{name}.pem")
        Path(files[name]).write_bytes(RSA.generate(2048).export_key("PEM", pkcs=8))
    return files


def layout_on(root: Path, settings: AivenSettings) -> AivenLayout:
    return AivenLayout(open_store(str(root)), IDS, settings)


def settings_of(kind: str, key_files: dict[str, str], chunk_size: int = 16_384) -> AivenSettings:
    encrypted = {"key_pairs": key_files, "active_key_pair": "new"} if "encrypted" in kind else {}
    custom = {"custom_metadata_fields": ("REMOTE_SIZE", "OBJECT_PREFIX", "OBJECT_KEY")} if "custom" in kind else {}
    compression = "zstd" if "zstd" in kind else "none"
    prefix = "some/prefix-" if "prefix" in kind else ""
    return AivenSettings(chunk_size=chunk_size, compression=compression, key_prefix=prefix, **encrypted, **custom)  # type: ignore[arg-type]


def as_files(files: Mapping[str, bytes], folder: Path) -> dict[str, Path | bytes]:
    """Like a round: what is large lies in a file."""
    folder.mkdir(exist_ok=True)
    (folder / "out.log").write_bytes(files["log"])
    return {**files, "log": folder / "out.log"}


KINDS = ("plain", "zstd", "encrypted", "zstd encrypted", "plain prefix custom", "zstd encrypted prefix custom")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_bytes", [23, 16_384, 16_385, 150_000])
def test_what_is_written_is_read_by_another_reader(kind: str, log_bytes: int, key_files: dict[str, str], tmp_path: Path) -> None:
    settings, files = settings_of(kind, key_files), files_of(log_bytes, transactions=log_bytes > 23)
    layout = layout_on(tmp_path / "tier", settings)
    contents = as_files(files, tmp_path / "spool")
    segment = segment_of(files)
    segment = segment.model_copy(update={"custom_metadata": layout.custom_metadata(NAME, segment, contents)})
    assert layout.upload_segment(NAME, segment, contents) == ""
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["out.log"]

    main = tmp_path / "tier" / f"{settings.key_prefix}{MAIN}"
    assert read_segment(main, {name: Path(file) for name, file in key_files.items()}) == files
    assert layout.stored_segment_problem(NAME, segment) == ""
    assert {k: layout.read_file(NAME, segment, k) for k in layout.segment_files(NAME, segment.model_copy(update={"files": {}}))} == files
    written = sorted(path.name for path in main.parent.iterdir())
    assert written == [f"{main.name}.{suffix}" for suffix in ("indexes", "log", "rsm-manifest")]
    custom = CustomMetadata.decode(segment.custom_metadata)
    if "custom" in kind:
        assert custom.remote_size == sum(path.stat().st_size for path in main.parent.iterdir())
        assert (custom.object_prefix, custom.object_key) == (settings.key_prefix, MAIN)
    else:
        assert segment.custom_metadata == ""
    if "zstd" in kind and log_bytes == 150_000:
        assert main.with_name(f"{main.name}.log").stat().st_size < log_bytes // 2


@pytest.mark.parametrize("kind", KINDS)
def test_writing_again_is_done_already(kind: str, key_files: dict[str, str], tmp_path: Path) -> None:
    """Also by another process, and with objects that an earlier attempt left behind: the same bytes (I7)."""
    files = files_of()
    layout = layout_on(tmp_path / "tier", settings_of(kind, key_files))
    assert layout.upload_segment(NAME, segment_of(files), files) == ""
    first = {path: path.read_bytes() for path in (tmp_path / "tier").rglob("*") if path.is_file()}
    for missing in (".rsm-manifest", ".indexes"):
        next(path for path in first if path.name.endswith(missing)).unlink()
        again = layout_on(tmp_path / "tier", settings_of(kind, key_files))
        assert again.upload_segment(NAME, segment_of(files), as_files(files, tmp_path / "spool")) == ""
        assert {path: path.read_bytes() for path in (tmp_path / "tier").rglob("*") if path.is_file()} == first


def test_a_whole_segment_in_other_bytes_counts_as_done_and_other_content_does_not(key_files: dict[str, str], tmp_path: Path) -> None:
    files, segment = files_of(), segment_of(files_of())
    plain, packed = (layout_on(tmp_path / "tier", settings_of(kind, key_files)) for kind in ("plain", "zstd encrypted"))
    assert packed.upload_segment(NAME, segment, files) == ""
    with pytest.raises(Refused, match="rsm-manifest: it is encrypted for key pair 'new', whose private key is not configured"):
        plain.upload_segment(NAME, segment, files)
    reader = layout_on(tmp_path / "tier", AivenSettings(key_pairs=key_files))
    assert reader.upload_segment(NAME, segment, files) == ""
    for kind in ("log", "index", "txnindex"):
        other = {**files, kind: files[kind][:-1] + b"!"}
        assert packed.upload_segment(NAME, segment_of(other), other) == f"{MAIN}.log exists already with other content"


def test_what_an_attempt_with_other_settings_left_unfinished_is_named(key_files: dict[str, str], tmp_path: Path) -> None:
    files, segment = files_of(), segment_of(files_of())
    assert layout_on(tmp_path / "tier", settings_of("zstd", key_files)).upload_segment(NAME, segment, files) == ""
    (tmp_path / "tier" / f"{MAIN}.rsm-manifest").unlink()
    before = (tmp_path / "tier" / f"{MAIN}.log").read_bytes()
    encrypted = layout_on(tmp_path / "tier", settings_of("encrypted", key_files))
    assert encrypted.upload_segment(NAME, segment, files) == f"{MAIN}.log exists already with other content"
    assert (tmp_path / "tier" / f"{MAIN}.log").read_bytes() == before
    encrypted.delete_segments(NAME, [segment])
    assert encrypted.upload_segment(NAME, segment, files) == ""


class _Recording(LocalStore):
    created: list[str]

    @override
    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        self.created.append(key)
        return super().create(key, data, metadata)


def test_the_manifest_comes_last(tmp_path: Path) -> None:
    store = _Recording(tmp_path / "tier")
    store.created = []
    files = files_of()
    assert AivenLayout(store, IDS, AivenSettings()).upload_segment(NAME, segment_of(files), files) == ""
    assert store.created == [f"{MAIN}.{suffix}" for suffix in ("log", "indexes", "rsm-manifest")]


def test_each_segment_and_each_content_has_a_data_key_of_its_own(key_files: dict[str, str], tmp_path: Path) -> None:
    """And under one key no initialization vector comes twice."""
    files = files_of()
    one_chunk_longer = {**files, "log": files["log"] + b"+"}
    other_index = {**files, "index": files["index"][:-1] + b"!"}
    variants = [
        (files, segment_of(files), 16_384),
        (files, segment_of(files, id="adh9f8BMS4anaUnD8KWfWg"), 16_384),
        (files, segment_of(files), 8192),
        (one_chunk_longer, segment_of(one_chunk_longer), 16_384),
        (other_index, segment_of(other_index), 16_384),
    ]
    keys, wrapped = set(), set()
    for number, (content, segment, chunk_size) in enumerate(variants):
        root = tmp_path / str(number)
        layout = layout_on(root, settings_of("encrypted", key_files, chunk_size))
        assert layout.upload_segment(NAME, segment, content) == ""
        main = root / layout.object_name(NAME, segment, "log").removesuffix(".log")
        manifest = json.loads(main.with_name(main.name + ".rsm-manifest").read_bytes())
        assert manifest["encryption"]["dataKey"].startswith("new:")
        wrapped.add(manifest["encryption"]["dataKey"])
        keys.add(data_key(manifest["encryption"], {"new": Path(key_files["new"])}))
        log, indexes = (main.with_name(main.name + suffix).read_bytes() for suffix in (".log", ".indexes"))
        vectors = [log[at : at + 12] for at in range(0, len(log), chunk_size + 28)]
        vectors += [indexes[span["position"] :][:12] for span in manifest["segmentIndexes"].values() if span and span["size"]]
        assert len(set(vectors)) == len(vectors) >= 13
    assert len({key for key, _ in keys}) == len({aad for _, aad in keys}) == len(wrapped) == len(variants)


def test_the_manifest_says_what_the_plug_in_would_say(tmp_path: Path) -> None:
    files = files_of(40_000, transactions=False)
    layout = layout_on(tmp_path, AivenSettings(chunk_size=16_384))
    assert layout.upload_segment(NAME, segment_of(files), files) == ""
    assert (tmp_path / f"{MAIN}.rsm-manifest").read_text() == (
        '{"version":"1","chunkIndex":{"type":"fixed","originalChunkSize":16384,"originalFileSize":40000,"transformedChunkSize":16384,'
        '"finalTransformedChunkSize":7232},"segmentIndexes":{"offset":{"position":0,"size":80},"timestamp":{"position":80,"size":0},'
        '"producerSnapshot":{"position":80,"size":56},"leaderEpoch":{"position":136,"size":8},"transaction":null},"compression":false,'
        '"remoteLogSegmentMetadata":{"remoteLogSegmentId":{"topicIdPartition":{"topicId":"R0AHqObxTZmsN-zsxr_0TQ","topicPartition":'
        '{"topic":"orders","partition":1}},"id":"lZ6vvmajTWKDBUTV6SQAtQ"},"startOffset":100,"endOffset":2000,'
        '"maxTimestampMs":1700000000000,"brokerId":2000000000,"eventTimestampMs":1700000000500,'
        '"segmentLeaderEpochs":{"0":100,"3":900},"txnIdxEmpty":true}}'
    )


@pytest.mark.parametrize(("attributes", "compressed"), [(0, True), (4, False), (8, True)])
@pytest.mark.parametrize("magic", [1, 2])
def test_the_heuristic_looks_at_the_first_batch(attributes: int, compressed: bool, magic: int, tmp_path: Path) -> None:
    files = files_of()
    head = bytearray(files["log"][:23])
    head[16], head[17 if magic == 1 else 22] = magic, attributes
    files["log"] = bytes(head) + files["log"][23:]
    assert layout_on(tmp_path, AivenSettings(compression="heuristic")).upload_segment(NAME, segment_of(files), files) == ""
    assert json.loads((tmp_path / f"{MAIN}.rsm-manifest").read_bytes())["compression"] is compressed


def test_segments_that_brokers_could_not_use_are_refused(tmp_path: Path) -> None:
    files = files_of()
    layout = layout_on(tmp_path, AivenSettings())
    for kind in ("index", "timeindex", "snapshot", "leader-epoch-checkpoint"):
        less = {name: data for name, data in files.items() if name != kind}
        with pytest.raises(BadData, match=f"{MAIN}.log: the segment has no {kind}, without which brokers cannot use it"):
            layout.upload_segment(NAME, segment_of(less), less)
    empty = {**files, "log": b""}
    with pytest.raises(BadData, match="a log without a byte cannot be tiered"):
        layout.upload_segment(NAME, segment_of(empty), empty)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("kind", ["plain", "zstd encrypted custom"])
def test_damage_is_found_and_named(kind: str, key_files: dict[str, str], tmp_path: Path) -> None:
    files = files_of()
    settings = settings_of(kind, key_files)

    def fresh() -> AivenLayout:
        return layout_on(tmp_path, settings)

    segment = segment_of(files)
    segment = segment.model_copy(update={"custom_metadata": fresh().custom_metadata(NAME, segment, files)})
    assert fresh().upload_segment(NAME, segment, files) == ""
    log, indexes = tmp_path / f"{MAIN}.log", tmp_path / f"{MAIN}.indexes"
    for path, read in ((log, "log"), (indexes, "txnindex")):
        whole = path.read_bytes()
        for damaged, cause in (
            (whole[:-1], f"bytes, its manifest says {len(whole)}"),
            (whole + b"+", f"bytes, its manifest says {len(whole)}"),
            (whole[:-1] + bytes([whole[-1] ^ 1]), "" if kind == "plain" else "encrypted under the manifest's data key"),
        ):
            path.write_bytes(damaged)
            assert path.name in fresh().stored_segment_problem(NAME, segment)
            if cause:
                with pytest.raises(BadData, match=f"{path.name}.*{cause}"):
                    fresh().read_file(NAME, segment, read)
                with pytest.raises(BadData, match=cause):
                    fresh().download_file(NAME, segment, read, tmp_path / "file")
                assert not (tmp_path / "file").exists()
        path.unlink()
        with pytest.raises(NotFound, match=path.name):
            fresh().read_file(NAME, segment, read)
        assert path.name in fresh().stored_segment_problem(NAME, segment)
        path.write_bytes(whole)
    assert fresh().stored_segment_problem(NAME, segment) == ""
    other = CustomMetadata(remote_size=1).encode()
    assert "its custom metadata says 1" in fresh().stored_segment_problem(NAME, segment.model_copy(update={"custom_metadata": other}))


def test_other_segments_manifests_and_other_versions_are_refused(tmp_path: Path) -> None:
    files = files_of()
    assert layout_on(tmp_path, AivenSettings()).upload_segment(NAME, segment_of(files), files) == ""
    path = tmp_path / f"{MAIN}.rsm-manifest"
    text = path.read_text()
    end = segment_of(files).end_offset
    for before, after, cause in (
        ('"version":"1"', '"version":"2"', "layout version '2'; this program knows version 1"),
        ('"version":"1",', "", "layout version None"),
        ('"startOffset":100', '"startOffset":101', "another segment's: startOffset is 101, not 100"),
        (f'"endOffset":{end}', f'"endOffset":{end - 1}', f"another segment's: endOffset is {end - 1}, not {end}"),
        ('"id":"lZ6v', '"id":"mZ6v', "another segment's: remoteLogSegmentId.id is 'mZ6v"),
        ('"compression":false', '"compression":0', "compression is neither true nor false"),
        ('"compression":false,', "", "the manifest lacks compression"),
        ('"compression":false', '"compression":false,"more":1', "the manifest has an unknown field 'more'"),
        ('"type":"fixed"', '"type":"fixed","more":1', "chunkIndex has an unknown field 'more'"),
        ('"transaction":{', '"transactions":{', "segmentIndexes lacks transaction"),
        ('"type":"fixed"', '"type":"other"', "of an unknown type 'other'"),
        (text[100:], "", "it is not JSON"),
    ):
        assert before in text
        path.write_text(text.replace(before, after))
        with pytest.raises(BadData, match=f"{path.name}: .*{cause}"):
            layout_on(tmp_path, AivenSettings()).read_file(NAME, segment_of(files), "index")
    for before, after in (
        ('"version":"1"', '"version":1'),
        (text[text.index(',"remoteLog') : -1], ""),
        ('"brokerId"', '"lineage":[{}],"brokerId"'),
    ):
        path.write_text(text.replace(before, after))
        assert layout_on(tmp_path, AivenSettings()).read_file(NAME, segment_of(files), "log") == files["log"]


def test_a_segment_that_ends_where_the_next_one_takes_over_is_read(tmp_path: Path) -> None:
    """Replicas roll at different offsets: after a leader moved, brokers read the earlier leader's segment up to the later one's start."""
    files = files_of()
    whole = segment_of(files)
    assert layout_on(tmp_path, AivenSettings()).upload_segment(NAME, whole, files) == ""
    read = whole.model_copy(update={"end_offset": whole.end_offset - 1})
    assert layout_on(tmp_path, AivenSettings()).read_file(NAME, read, "log") == files["log"]


def test_key_files_that_are_none_are_named(key_files: dict[str, str], tmp_path: Path) -> None:
    files = files_of()
    (tmp_path / "public.pem").write_bytes(RSA.import_key(Path(key_files["new"]).read_bytes()).public_key().export_key())
    (tmp_path / "text.pem").write_text("not a key")
    for file, cause in (
        ("absent.pem", "the private key of key pair 'k' cannot be read from .*absent.pem: No such file"),
        ("public.pem", "public.pem, for key pair 'k', is a public key; the private one is needed"),
        ("text.pem", "text.pem, for key pair 'k', is not a private key"),
    ):
        settings = AivenSettings(key_pairs={"k": str(tmp_path / file)}, active_key_pair="k")
        with pytest.raises(UsageError, match=cause):
            layout_on(tmp_path / "tier", settings).upload_segment(NAME, segment_of(files), files)
    with pytest.raises(UsageError, match="no object can have the key_prefix 'a//b'"):
        layout_on(tmp_path, AivenSettings(key_prefix="a//b"))
    with pytest.raises(UsageError, match="no id is known of topic other"):
        layout_on(tmp_path, AivenSettings()).object_name(TopicPartition("other", 0), segment_of(files), "log")


def test_strangers_are_listed_as_such_and_neighbours_are_not(tmp_path: Path) -> None:
    files = files_of()
    layout = layout_on(tmp_path, AivenSettings())
    assert layout.upload_segment(NAME, segment_of(files), files) == ""
    folder = tmp_path / Path(MAIN).parent
    strangers = [
        "0000000000000000010-lZ6vvmajTWKDBUTV6SQAtQ.log",  # 19 digits
        "\N{ARABIC-INDIC DIGIT ZERO}" * 20 + "-lZ6vvmajTWKDBUTV6SQAtQ.log",
        "00000000000000000100-lZ6vvmajTWKDBUTV6SQAtR.log",  # bits left over
        "00000000000000000100-lZ6vvmajTWKDBUTV6SQAtQ.index",
        "00000000000000000100-lZ6vvmajTWKDBUTV6SQAtQ",
        "99999999999999999999-lZ6vvmajTWKDBUTV6SQAtQ.log",
        "a note",
    ]
    for name in strangers:
        (folder / name).write_bytes(b"?")
    for neighbour in (folder.parent / "10", folder.parent / "11", tmp_path / "orders-AAAAAAAAAAAAAAAAAAAAAg" / "1"):
        neighbour.mkdir(parents=True)
        (neighbour / f"{Path(MAIN).name}.log").write_bytes(b"?")
    listed = list(layout.list_objects(NAME))
    assert sorted(Path(o.key).name for o in listed if not o.segment_id) == sorted(strangers)
    assert [(o.start_offset, o.kind, o.segment_id) for o in listed if o.segment_id] == [
        (100, kind, "lZ6vvmajTWKDBUTV6SQAtQ") for kind in ("indexes", "log", "rsm-manifest")
    ]
    layout.delete_segments(NAME, [segment_of(files)])
    assert [o.segment_id for o in layout.list_objects(NAME)] == [""] * len(strangers)


@pytest.mark.parametrize("chunk_size", [100, 5000, 1 << 20])
@pytest.mark.parametrize("kind", ["plain", "zstd", "encrypted", "zstd encrypted"])
def test_the_room_that_is_asked_for_suffices(kind: str, chunk_size: int, key_files: dict[str, str], tmp_path: Path) -> None:
    """Also for a log that cannot be compressed."""
    files = {**files_of(), "log": random.Random(1).randbytes(200_000)}
    layout = layout_on(tmp_path, settings_of(kind, key_files, chunk_size))
    assert layout.upload_segment(NAME, segment_of(files), files) == ""
    staged = 0 if kind == "plain" else (tmp_path / f"{MAIN}.log").stat().st_size
    assert staged <= layout.upload_scratch_disk_bytes(200_000)
    assert layout.upload_scratch_disk_bytes(200_000) == 0 if kind == "plain" else staged > 190_000


def test_an_unpacked_log_is_not_staged(tmp_path: Path) -> None:
    """And it is read once: from the spool, into the store."""
    counters = RequestCounters()
    files = files_of()
    layout = AivenLayout(open_store(str(tmp_path / "tier"), counters=counters), IDS, AivenSettings())
    contents = as_files(files, tmp_path / "spool")
    (tmp_path / "spool").chmod(0o555)
    try:
        assert layout.upload_segment(NAME, segment_of(files), contents) == ""
    finally:
        (tmp_path / "spool").chmod(0o755)
    assert counters.usage().requests == {"put": 3}
