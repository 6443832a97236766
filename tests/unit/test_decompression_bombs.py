"""A few kilobytes that inflate to gigabytes are refused without ever taking the room: measured, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import lz4.frame
import pytest
import zstandard

from compactor.records.encode import NO_PRODUCER, prepend_batch_header
from tests.builders import GZIP, LZ4, SNAPPY, ZSTD, LogBuilder, entry

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
SPACE = 256 << 20
LIMIT = 16 << 20

MEASURE = """
import resource, sys
from pathlib import Path
from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData
sound, bad, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
clean_log_directory(sound, sound.with_name("out"), OfflineCleanOptions(now_ms=1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    clean_log_directory(bad, bad.with_name("never"), OfflineCleanOptions(now_ms=1, max_decompressed_batch_bytes=limit))
except BadData as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error.position, error)
"""


def zeros(codec: int) -> bytes:
    """A gigabyte of zeros, compressed piece by piece."""
    piece = bytes(1 << 24)
    pieces = GIB // len(piece)
    if codec == GZIP:
        packer = zlib.compressobj(9, wbits=31)
        return b"".join([*(packer.compress(piece) for _ in range(pieces)), packer.flush()])
    if codec == ZSTD:
        writer = zstandard.ZstdCompressor().compressobj()
        return b"".join([*(writer.compress(piece) for _ in range(pieces)), writer.flush()])
    if codec == LZ4:
        frame = lz4.frame.LZ4FrameCompressor(block_linked=False)
        return b"".join([frame.begin(), *(frame.compress(piece) for _ in range(pieces)), frame.flush()])
    size, length = GIB, bytearray()
    while size >= 128:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes(length) + bytes([size]) + b"\x00a" + b"\xfe\x01\x00" * 1000  # a raw block that only claims its gigabyte


@pytest.mark.parametrize(
    ("codec", "legacy"), [(GZIP, False), (SNAPPY, False), (LZ4, False), (ZSTD, False), (GZIP, True), (SNAPPY, True), (LZ4, True)]
)
def test_bomb_takes_no_room(tmp_path: Path, codec: int, legacy: bool) -> None:
    sound, bad = LogBuilder(), LogBuilder()
    for log in (sound, bad):
        for number in (GZIP, SNAPPY, LZ4, ZSTD):
            log.put("a=1", "b=2", codec=number)
    position = sum(len(raw) for raw in bad.segments[0][1])
    body = zeros(codec)
    if legacy:
        made = entry(1, bad.next_offset, b"=" + body, timestamp=1, attributes=codec)
    else:
        made = prepend_batch_header(bad.next_offset, 0, 0, codec, 1, 1, NO_PRODUCER, 1, body)
    bad.raw(made, bad.next_offset)
    paths = [str(sound.write(tmp_path / "sound")), str(bad.write(tmp_path / "bad")), str(LIMIT)]
    done = subprocess.run([sys.executable, "-c", MEASURE, *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    kilobytes, where, words = done.stdout.split(maxsplit=2)
    assert int(kilobytes) << 10 < SPACE
    assert int(where) == position
    assert "max_decompressed_batch_bytes" in words
