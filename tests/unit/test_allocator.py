"""Settings of the C library's allocator, observed from outside."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can limit its heaps")

HEAPS = """
import ctypes, threading
from compactor.local import budget as allocator

if {few}:
    assert allocator.limit_malloc_heaps()
together = threading.Barrier(12)
def work():
    together.wait()
    kept = [bytes(10_000) for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
ctypes.CDLL(None).malloc_stats()
"""
GIVEN_BACK = """
from pathlib import Path
from compactor.local import budget as allocator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

kept = [bytearray(100_000) for _ in range(1_000)]
kept = kept[::10]  # what lies between them cannot be cut off at the end of a heap
before = resident()
assert allocator.trim_memory()
print(before - resident())
"""


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("few", [True, False])
def test_threads_share_two_heaps_after_limit_heaps(few: bool) -> None:
    heaps = python(HEAPS.format(few=few)).stderr.count("Arena ")
    assert (heaps <= 2) is few


def test_release_free_memory_returns_empty_pages_to_the_system() -> None:
    assert int(python(GIVEN_BACK).stdout) > 50_000_000
