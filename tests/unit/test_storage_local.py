"""What only a directory can meet: crashes, links, full disks, copies, strangers' files."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given, strategies as st

from compactor.adapters.stores.s3 import OldObjectVersionStore
from compactor.errors import AlreadyExists, CompactorError, CopyDiffers, NotFound, OutOfBudget, Refused, Unavailable
from compactor.records.batches import memory_map_file
from compactor.service import InterruptibleStore
from compactor.storage.factory import open_store
from compactor.storage.keys import RESERVED, object_key_problem
from compactor.storage.local import RESERVE_BYTES, LocalStore, file_system_type
from compactor.storage.port import ComposeSource, FileLease, FileRange, ObjectRangeToCopy
from compactor.storage.schemes import directory_of_store_url
from compactor.storage.wrappers import ForwardingStore, RequestCounters


def keys(store: LocalStore, prefix: str = "", after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, after)]


def staged(root: Path) -> list[str]:
    return sorted(os.listdir(root / RESERVED / "tmp"))


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "path"),
        [
            ("file:///var/lib/tier", "/var/lib/tier"),
            ("file:///var/a%20b/%C3%BC", "/var/a b/ü"),
            ("file:///var/a b/ü", "/var/a b/ü"),
            ("file://localhost/x", "/x"),
            ("file:///100%25/x#1?", "/100%/x#1?"),
            ("/plain/a b", "/plain/a b"),
            ("relative/x", "relative/x"),
        ],
    )
    def test_paths(self, url: str, path: str) -> None:
        assert directory_of_store_url(url) == Path(path)

    def test_a_store_s_url_opens_it_again(self, tmp_path: Path) -> None:
        store = open_store(str(tmp_path / "a b%20c" / "ü#?"))
        store.create("k", b"x")
        assert open_store(store.url).get("k") == b"x"


class TestBeforeTheFirstWrite:
    def test_reading_makes_nothing(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "absent")
        assert keys(store) == []
        with pytest.raises(NotFound):
            store.get("k")
        store.delete(["k"])
        assert not (tmp_path / "absent").exists()

    def test_a_file_in_place_of_the_root(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(Refused, match="cannot write"):
            LocalStore(tmp_path / "file").create("k", b"")


class TestCrash:
    def test_a_writer_that_is_killed_leaves_no_object_and_is_swept(self, tmp_path: Path) -> None:
        program = """
            import os, signal, sys
            from pathlib import Path
            from compactor.storage.local import LocalStore

            class Dying:
                def record_request(self, kind): pass
                def record_bytes_read(self, size): pass
                def record_bytes_written(self, size):
                    if self.left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    self.left -= 1
                left = 2

            LocalStore(Path(sys.argv[1]), Dying()).create_from_file("dir/large", Path(sys.argv[2]), {"a": "b"})
        """
        (tmp_path / "in").write_bytes(bytes(5 << 20))
        root = tmp_path / "tier"
        ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(root), str(tmp_path / "in")], check=False)
        assert ended.returncode == -signal.SIGKILL
        store = LocalStore(root)
        assert keys(store) == []
        assert len(staged(root)) == 1
        store.create("young", b"")
        assert len(staged(root)) == 1, "somebody may still be writing it"
        left = root / RESERVED / "tmp" / staged(root)[0]
        os.utime(left, ns=(left.stat().st_mtime_ns - 3_601 * 10**9,) * 2)
        LocalStore(root).create("dir/large", b"anew")
        assert staged(root) == []
        assert store.get("dir/large") == b"anew"

    def test_a_staged_file_that_was_swept_fails_its_writer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = LocalStore(tmp_path / "tier")
        link = os.link

        def swept_before(source: Path, target: Path) -> None:
            os.unlink(source)
            link(source, target)

        monkeypatch.setattr(os, "link", swept_before)
        with pytest.raises(Unavailable):
            store.create("k", b"x")
        assert keys(store) == []

    def test_a_link_whose_answer_was_lost_is_our_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As NFS does: the server linked, the answer was lost, the client asks again and is told EEXIST."""
        store = LocalStore(tmp_path / "tier")
        link = os.link

        def twice(source: Path, target: Path) -> None:
            link(source, target)
            link(source, target)

        monkeypatch.setattr(os, "link", twice)
        store.create("k", b"x", {"by": "me"})
        monkeypatch.setattr(os, "link", link)
        assert store.get("k") == b"x"
        assert dict(store.head("k").metadata) == {"by": "me"}
        with pytest.raises(AlreadyExists):
            store.create("k", b"x")


class TestErrors:
    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (errno.ENOSPC, OutOfBudget),
            (errno.EDQUOT, OutOfBudget),
            (errno.EACCES, Refused),
            (errno.EPERM, Refused),
            (errno.EROFS, Refused),
            (errno.EXDEV, Refused),
            (errno.EIO, Unavailable),
            (errno.ESTALE, Unavailable),
            (errno.EMFILE, Unavailable),
        ],
    )
    @pytest.mark.parametrize("call", ["fsync", "link"])
    def test_what_the_system_refuses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[CompactorError], call: str
    ) -> None:
        store = LocalStore(tmp_path / "tier")
        store.create("d/before", b"x")

        def refuse(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, call, refuse)
        with pytest.raises(kind, match=os.strerror(code)) as caught:
            store.create("d/k", b"x", {"a": "b"} if call == "link" else None)
        assert str(tmp_path / "tier" / "d" / "k") in caught.value.message
        assert caught.value.hint
        monkeypatch.undo()
        assert staged(tmp_path / "tier") == []
        assert keys(store) == ["d/before"]

    def test_a_disk_that_is_really_full(self, tmp_path: Path) -> None:
        """A tmpfs of 200 kB in a mount namespace of its own, where the machine allows one."""
        script = f"""
            set -e
            mkdir -p "$1" && mount -t tmpfs -o size=200k tmpfs "$1"
            exec "{sys.executable}" - "$1" <<'END'
            import sys
            from pathlib import Path
            from compactor.errors import OutOfBudget
            from compactor.storage.local import LocalStore
            from compactor.storage.port import ObjectRangeToCopy
            root = Path(sys.argv[1])
            store = LocalStore(root / "tier")
            store.create("half", bytes(120 << 10))
            etag = store.head("half").etag
            attempts = (
                lambda: store.create("large", bytes(1 << 20)),
                lambda: store.compose("large", [ObjectRangeToCopy("half", 0, 120 << 10, etag)]),
                lambda: store.download("half", root / "copy"),
            )
            for attempt in attempts:
                try:
                    attempt()
                except OutOfBudget as error:
                    assert ("large" in error.message or "copy" in error.message) and error.exit_code == 6, error
                else:
                    raise SystemExit("it fitted")
            assert sorted(path.name for path in root.iterdir()) == ["tier"]
            assert [info.key for info in store.list("")] == ["half"]
            END
        """
        command = ["unshare", "--mount", "--map-root-user", "sh", "-c", textwrap.dedent(script), "sh", str(tmp_path / "full")]
        try:
            allowed = subprocess.run(["unshare", "--mount", "--map-root-user", "true"], check=False, capture_output=True)
        except FileNotFoundError:
            pytest.skip("no unshare on this machine")
        if allowed.returncode:
            pytest.skip("this machine allows no mount namespace")
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_an_object_in_the_way_of_a_directory_and_the_reverse(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.create("x", b"")
        store.create("d/y", b"")
        for write in (store.create, store.put):
            with pytest.raises(Refused, match="cannot write"):
                write("x/z", b"")
        with pytest.raises(Refused):
            store.create("d", b"")
        with pytest.raises(Refused):
            store.put("d", b"")
        for key in ("x/z", "d"):
            with pytest.raises(NotFound):
                store.get(key)
            with pytest.raises(NotFound):
                store.head(key)
        store.delete(["x/z", "d"])
        assert keys(store) == ["d/y", "x"]

    def test_a_source_that_is_absent(self, tmp_path: Path) -> None:
        with pytest.raises(Unavailable, match="nowhere"):
            LocalStore(tmp_path / "tier").create_from_file("k", tmp_path / "nowhere")
        assert keys(LocalStore(tmp_path / "tier")) == []


class TestCompose:
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        store = LocalStore(tmp_path / "tier", self.counters)
        store.create("source", bytes(range(256)) * 10_000)
        return store

    @pytest.fixture(autouse=True)
    def _counters(self) -> None:
        self.counters = RequestCounters()

    def pieces(self, store: LocalStore, tmp_path: Path) -> list[ComposeSource]:
        (tmp_path / "local").write_bytes(b"0123456789")
        etag = store.head("source").etag
        return [
            ObjectRangeToCopy("source", 3, 2_000_000, etag),
            FileRange(tmp_path / "local", 2, 5),
            ObjectRangeToCopy("source", 7, 9, etag),
        ]

    EXPECTED = (bytes(range(256)) * 10_000)[3:2_000_003] + b"23456" + bytes(range(7, 16))

    @pytest.mark.parametrize("is_known", [True, False])
    def test_copied_bytes_are_read_back_and_not_written(self, store: LocalStore, tmp_path: Path, is_known: bool) -> None:
        """If the CRC-32C of a range is not known, the source is read too."""
        pieces = self.pieces(store, tmp_path)
        if is_known:
            pieces = [replace(one, crc32c=self.crc_of(one)) if isinstance(one, ObjectRangeToCopy) else one for one in pieces]
        before = self.counters.usage()
        store.compose("k", pieces)
        used = self.counters.usage().usage_since(before)
        read = 2_000_009 if is_known else 2 * 2_000_009
        assert (used.requests, used.bytes_read, used.bytes_written) == ({"put": 1, "copy": 2}, read, 5)
        assert store.get("k") == self.EXPECTED

    def crc_of(self, piece: ObjectRangeToCopy) -> int:
        return int(google_crc32c.value((bytes(range(256)) * 10_000)[piece.start : piece.start + piece.length]))

    @pytest.mark.parametrize("is_known", [True, False])
    @pytest.mark.parametrize("zeros", [1, 4_096, 2_000_000])
    def test_a_file_system_that_copies_zeros_makes_no_object(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zeros: int, is_known: bool
    ) -> None:
        """As OpenZFS 2.1.4 to 2.2.1 did with blocks that it had not written yet."""
        real = os.copy_file_range

        def zeroed(source: int, target: int, count: int, at: int, to: int) -> int:
            done = real(source, target, count, at, to)
            if count > 9:
                os.pwrite(target, bytes(zeros), to + done - zeros)
            return done

        pieces = self.pieces(store, tmp_path)
        if is_known:
            pieces = [replace(one, crc32c=self.crc_of(one)) if isinstance(one, ObjectRangeToCopy) else one for one in pieces]
        monkeypatch.setattr(os, "copy_file_range", zeroed)
        with pytest.raises(CopyDiffers, match="source: the store has copied other bytes"):
            store.compose("k", pieces)
        assert (keys(store), staged(tmp_path / "tier")) == (["source"], [])

    @pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM])
    @pytest.mark.parametrize("first", [0, 1, 1_500_000])
    def test_where_the_system_does_not_copy_bytes_are_read_and_written(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, first: int
    ) -> None:
        """Not at all, or no further than ``first``."""
        real, left = os.copy_file_range, [first]

        def refuse(source: int, target: int, count: int, at: int, to: int) -> int:
            if not left[0]:
                raise OSError(code, os.strerror(code))
            done = real(source, target, min(count, left[0]), at, to)
            left[0] -= done
            return done

        monkeypatch.setattr(os, "copy_file_range", refuse)
        pieces, before = self.pieces(store, tmp_path), self.counters.usage()
        store.compose("k", pieces)
        used = self.counters.usage().usage_since(before)
        assert (used.bytes_read - 2 * 2_000_009, used.bytes_written) == (2_000_009 - first, 2_000_014 - first)
        assert store.get("k") == self.EXPECTED

    def test_a_system_that_copies_nothing_or_knows_no_such_call(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
        store.compose("k", self.pieces(store, tmp_path))
        monkeypatch.delattr(os, "copy_file_range")
        store.compose("l", self.pieces(store, tmp_path))
        assert store.get("k") == store.get("l") == self.EXPECTED

    @pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, OutOfBudget), (errno.EDQUOT, OutOfBudget), (errno.EIO, Unavailable)])
    def test_what_the_system_refuses(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[CompactorError]
    ) -> None:
        def refuse(*_: int) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "copy_file_range", refuse)
        with pytest.raises(kind, match=os.strerror(code)):
            store.compose("k", self.pieces(store, tmp_path))
        assert (keys(store), staged(tmp_path / "tier")) == (["source"], [])

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_source_that_is_written_to_around_its_copy(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
    ) -> None:
        """If afterwards, the version before the copy is the right one, and only the second look at it tells."""
        real = os.copy_file_range

        def stranger(*arguments: int) -> int:
            done = real(*arguments) if when == "after" else 0
            with open(tmp_path / "tier" / "source", "ab") as file:
                file.write(b"more")
            return done or real(*arguments)

        pieces = self.pieces(store, tmp_path)
        monkeypatch.setattr(os, "copy_file_range", stranger)
        with pytest.raises(Unavailable, match="not the version that was to be copied"):
            store.compose("k", pieces if when == "before" else pieces[:2])
        assert (keys(store), staged(tmp_path / "tier")) == (["source"], [])

    def test_a_source_that_is_replaced_while_it_is_copied_is_the_old_one(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who has opened it reads on in what was deleted: one version, and the one that was meant."""
        real, pieces = os.copy_file_range, self.pieces(store, tmp_path)[:2]

        def replaced(*arguments: int) -> int:
            store.put("source", b"anew")
            return real(*arguments)

        monkeypatch.setattr(os, "copy_file_range", replaced)
        store.compose("k", pieces)
        assert store.get("k") == self.EXPECTED[:-9]

    def test_a_local_file_that_is_too_short_or_absent(self, store: LocalStore, tmp_path: Path) -> None:
        pieces = self.pieces(store, tmp_path)
        (tmp_path / "local").write_bytes(b"0123")
        with pytest.raises(Unavailable, match="ends before the range"):
            store.compose("k", pieces)
        (tmp_path / "local").unlink()
        with pytest.raises(Unavailable, match="local"):
            store.compose("k", pieces)
        assert (keys(store), staged(tmp_path / "tier")) == (["source"], [])


class TestLend:
    """Files that are read in place. Leases are the system's: a file system without them copies."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        store = LocalStore(tmp_path / "tier")
        store.create("k", b"content", {"by": "me"})
        return store

    @pytest.fixture
    def lease(self, store: LocalStore, tmp_path: Path) -> Iterator[FileLease]:
        lease = store.lend("k", tmp_path / "lent")
        if lease is None:
            pytest.skip("the file system knows no leases")
        yield lease
        lease.close()

    @pytest.mark.usefixtures("lease")
    def test_it_is_the_object_also_after_that_was_deleted(self, store: LocalStore, tmp_path: Path) -> None:
        store.delete(["k"])
        assert (tmp_path / "lent").read_bytes() == b"content"
        assert bytes(memory_map_file(tmp_path / "lent")) == b"content"
        (tmp_path / "lent").unlink()
        assert staged(tmp_path / "tier") == []

    def test_a_writer_waits_and_the_reader_learns_of_it(self, lease: FileLease, tmp_path: Path) -> None:
        lease.require_unbroken()
        with (tmp_path / "tier" / "k").open("rb"):
            lease.require_unbroken()
        with pytest.raises(BlockingIOError):
            os.open(tmp_path / "tier" / "k", os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
        assert (tmp_path / "lent").read_bytes() == b"content"
        with pytest.raises(Unavailable, match="another program has opened .*/tier/k for writing while it was read"):
            lease.require_unbroken()
        lease.close()
        os.truncate(tmp_path / "tier" / "k", 3)

    def test_what_somebody_writes_to_is_not_lent(self, store: LocalStore, tmp_path: Path) -> None:
        with (tmp_path / "tier" / "k").open("ab"):
            assert store.lend("k", tmp_path / "lent") is None
        assert not (tmp_path / "lent").is_symlink()

    def test_where_the_system_has_no_leases_nothing_is_lent(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*arguments: object) -> None:
            raise OSError(errno.EINVAL, "no leases")

        monkeypatch.setattr(fcntl, "fcntl", refused)
        assert store.lend("k", tmp_path / "lent") is None
        assert not (tmp_path / "lent").is_symlink()

    @pytest.mark.parametrize("kind", ["fuse.gcsfuse", "nfs4", ""])
    def test_where_another_machine_may_write_nothing_is_lent(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        monkeypatch.setattr("compactor.storage.local.file_system_type", lambda path: kind)
        assert store.lend("k", tmp_path / "lent") is None
        assert not (tmp_path / "lent").is_symlink()

    def test_the_innermost_mount_says_which_file_system_it_is(self) -> None:
        assert (file_system_type(Path("/proc/self/fd")), file_system_type(Path("/sys"))) == ("proc", "sysfs")

    @pytest.mark.usefixtures("lease")
    def test_an_object_that_is_absent(self, store: LocalStore, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            store.lend("absent", tmp_path / "other")


class TestLinkedFiles:
    def test_a_file_that_may_be_linked_becomes_the_object(self, tmp_path: Path) -> None:
        (tmp_path / "made").write_bytes(b"content")
        store = LocalStore(tmp_path / "tier")
        store.create_from_file("dir/k", tmp_path / "made", {"by": "me"}, may_link=True)
        assert os.path.samefile(tmp_path / "made", tmp_path / "tier" / "dir" / "k")
        (tmp_path / "made").unlink()
        assert (store.get("dir/k"), dict(store.head("dir/k").metadata), staged(tmp_path / "tier")) == (b"content", {"by": "me"}, [])

    def test_any_other_file_is_copied(self, tmp_path: Path) -> None:
        (tmp_path / "a broker's").write_bytes(b"content")
        store = LocalStore(tmp_path / "tier")
        store.create_from_file("k", tmp_path / "a broker's")
        assert (tmp_path / "a broker's").stat().st_nlink == 1
        assert store.get("k") == b"content"

    def test_from_another_file_system_it_is_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "made").write_bytes(b"content")
        link = os.link

        def within_the_tier(source: Path, target: Path) -> None:
            if tmp_path / "tier" not in Path(source).parents:
                raise OSError(errno.EXDEV, "another file system")
            link(source, target)

        monkeypatch.setattr(os, "link", within_the_tier)
        store = LocalStore(tmp_path / "tier")
        store.create_from_file("k", tmp_path / "made", {"by": "me"}, may_link=True)
        assert ((tmp_path / "made").stat().st_nlink, store.get("k")) == (1, b"content")

    def test_an_existing_object_stays_and_so_does_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "made").write_bytes(b"content")
        store = LocalStore(tmp_path / "tier")
        store.create("k", b"first")
        with pytest.raises(AlreadyExists):
            store.create_from_file("k", tmp_path / "made", may_link=True)
        assert (store.get("k"), (tmp_path / "made").read_bytes(), staged(tmp_path / "tier")) == (b"first", b"content", [])

    def test_it_is_as_old_as_a_copy_would_be(self, tmp_path: Path) -> None:
        (tmp_path / "made").write_bytes(b"content")
        os.utime(tmp_path / "made", ns=(0, 0))
        store = LocalStore(tmp_path / "tier")
        before = store.clock_ms()
        assert store.create_from_file("k", tmp_path / "made", may_link=True).modified_ms >= before - 1000


class TestLinks:
    def test_no_key_leads_out(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_bytes(b"secret")
        store = LocalStore(tmp_path / "tier")
        store.create("in/k", b"x")
        (tmp_path / "tier" / "door").symlink_to(outside)
        (tmp_path / "tier" / "in" / "file").symlink_to(outside / "secret")
        uses: list[Callable[[], object]] = [
            lambda: store.get("door/secret"),
            lambda: store.head("door/secret"),
            lambda: store.create("door/new", b""),
            lambda: store.put("door/secret", b""),
            lambda: store.delete(["door/secret"]),
            lambda: store.download("door/secret", tmp_path / "out"),
            lambda: list(store.list("door/")),
            lambda: store.get("in/file"),
        ]
        for use in uses:
            with pytest.raises(Refused, match="symbolic link"):
                use()
        with pytest.raises(NotFound):
            store.head("in/file")
        with pytest.raises(AlreadyExists):
            store.create("in/file", b"")
        store.delete(["in/file"])
        assert keys(store) == ["in/k"]
        assert sorted(os.listdir(outside)) == ["secret"]

    def test_the_root_itself_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        store = LocalStore(tmp_path / "link")
        store.create("a/b", b"x")
        assert LocalStore(tmp_path / "real").get("a/b") == b"x"

    def test_a_pipe_is_no_object(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        store = LocalStore(tmp_path)
        assert keys(store) == []
        with pytest.raises(NotFound):
            store.get("pipe")


class TestMetadata:
    def test_it_survives_a_copy_that_keeps_times(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "tier")
        made = store.create("a/k", b"x", {"sha256": "abc"})
        subprocess.run(["cp", "-a", tmp_path / "tier", tmp_path / "copy"], check=True)
        copied = LocalStore(tmp_path / "copy").head("a/k")
        assert (dict(copied.metadata), copied.modified_ms) == ({"sha256": "abc"}, made.modified_ms)

    def test_the_loser_s_metadata_never_shows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The loser has written its metadata when the winner links: both wrote for the same key."""
        store = LocalStore(tmp_path)
        link = os.link

        def beaten(source: Path, target: Path) -> None:
            monkeypatch.setattr(os, "link", link)
            LocalStore(tmp_path).create("k", b"winner")
            link(source, target)

        monkeypatch.setattr(os, "link", beaten)
        with pytest.raises(AlreadyExists):
            store.create("k", b"loser", {"by": "loser"})
        assert dict(store.head("k").metadata) == {}
        assert os.listdir(tmp_path / RESERVED) == ["tmp"]

    def test_a_winner_that_is_deleted_at_once_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A control record that a snapshot replaces between the loser's link and its next look."""
        store = LocalStore(tmp_path)
        link = os.link

        def beaten(source: Path, target: Path) -> None:
            monkeypatch.setattr(os, "link", link)
            store.create("k", b"winner")
            try:
                link(source, target)
            finally:
                store.delete(["k"])

        monkeypatch.setattr(os, "link", beaten)
        with pytest.raises(AlreadyExists):
            store.create("k", b"loser")

    def test_an_object_that_is_deleted_as_soon_as_it_is_there_was_created(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = LocalStore(tmp_path)
        link = os.link

        def deleted(source: Path, target: Path) -> None:
            link(source, target)
            store.delete(["k"])

        monkeypatch.setattr(os, "link", deleted)
        assert store.create("k", b"x").size == 1
        assert keys(store) == []

    def test_metadata_that_cannot_be_read_is_not_taken_for_none(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.create("k", b"x", {"a": "b"})
        (companion,) = (name for name in os.listdir(tmp_path / RESERVED) if name != "tmp")
        (tmp_path / RESERVED / companion).write_bytes(b"{")
        with pytest.raises(Unavailable, match="metadata"):
            store.head("k")

    @pytest.mark.parametrize("key", ["k", "k" * 200, "k" * 255])
    def test_it_leaves_with_its_object(self, tmp_path: Path, key: str) -> None:
        store = LocalStore(tmp_path)
        store.create(key, b"x", {"a": "b"})
        store.delete([key])
        assert os.listdir(tmp_path / RESERVED) == ["tmp"]


def test_strangers_files_are_listed_only_if_their_names_can_be_keys(tmp_path: Path) -> None:
    (tmp_path / "00000000000000000000.log").write_bytes(b"x")
    (tmp_path / "a\nb").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_bytes(b"")
    store = LocalStore(tmp_path)
    store.create("nested/k", b"")
    LocalStore(tmp_path / "nested").create("deeper", b"", {"a": "b"})
    assert keys(store) == ["00000000000000000000.log", "nested/deeper", "nested/k"]
    assert dict(store.head("nested/deeper").metadata) == {"a": "b"}


parts = st.text(st.sampled_from("ab-./0é\U0001f600\ufb03 "), min_size=1, max_size=3)


@given(st.lists(parts, max_size=12), parts | st.just(""), parts | st.just(""))
def test_a_listing_is_the_sorted_keys(tmp_path_factory: pytest.TempPathFactory, names: list[str], prefix: str, after: str) -> None:
    root = tmp_path_factory.mktemp("tier")
    made = set()
    for name in names:
        path = root / name
        if object_key_problem(name) or path.exists() or any(parent.is_file() for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        made.add(name)
    if object_key_problem(prefix + "x"):
        return
    expected = sorted((key for key in made if key.startswith(prefix) and key.encode() > after.encode()), key=lambda key: key.encode())
    assert keys(LocalStore(root), prefix, after) == expected


class TestRecords:
    """A store of control records, in a directory."""

    def test_a_record_is_as_old_as_its_place_not_as_its_staging(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its writer was stopped between the two, for longer than any grace."""
        link = os.link

        def late(staged: Path, target: Path) -> None:
            os.utime(staged, (1, 1))
            link(staged, target)

        monkeypatch.setattr(os, "link", late)
        records, data = LocalStore(tmp_path / "a", holds_control_records=True), LocalStore(tmp_path / "b")
        for store in (records, data):
            store.create("slot", b"{}")
        now_ms = records.clock_ms()
        assert abs(now_ms - records.head("slot").modified_ms) < 60_000
        assert [info.modified_ms for info in records.list("")] == [records.head("slot").modified_ms]
        assert data.head("slot").modified_ms == 1_000

    def test_the_reserve_is_no_object(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path, holds_control_records=True)
        store.create("slot", b"{}")
        assert [info.key for info in store.list("")] == ["slot"]
        (reserve,) = tmp_path.rglob("reserve")
        assert reserve.stat().st_size == RESERVE_BYTES
        assert not list((LocalStore(tmp_path / "data"), tmp_path / "data")[1].rglob("reserve"))

    def test_a_full_disk_takes_records_from_the_reserve_and_data_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        records, data = LocalStore(tmp_path / "a", holds_control_records=True), LocalStore(tmp_path / "b")
        records.create("slot", b"{}")
        (reserve,) = tmp_path.rglob("reserve")
        full, link = reserve.stat().st_size, os.link

        def no_room(staged: Path, target: Path) -> None:
            if reserve.stat().st_size == full:
                raise OSError(errno.ENOSPC, "No space left on device", str(staged))
            link(staged, target)

        monkeypatch.setattr(os, "link", no_room)
        with pytest.raises(OutOfBudget):
            data.create("segment", b"data")
        records.create("slot2", b"{}")
        assert records.get("slot2") == b"{}"
        assert reserve.stat().st_size == full, "made whole again"


def test_a_store_that_downloads_in_its_own_way_lends_in_its_own_way() -> None:
    """A wrapper that inherits ``lend`` would hand out what the store below it has under the key."""
    waiting, seen = [ForwardingStore], set[type[ForwardingStore]]()
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("compactor.") and kind.download is not ForwardingStore.download:
            assert kind.lend is not ForwardingStore.lend, kind
            seen.add(kind)
    assert seen >= {InterruptibleStore, OldObjectVersionStore}
