"""What a bucket can do to a run: refuse, lose, change and hold back objects. The partition waits or is quarantined, readers see nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import LogBuilder, log_of
from tests.support.bucket_cli import Minutes, through
from tests.support.cloud_servers import AnyBucket
from tests.support.deployment import GrowingLog
from tests.support.fault_proxy import BUSY, Fault, FaultProxy
from tests.support.servers import ON_SERVERS_IN_TIME
from tests.support.tier_cli import Answer, latest
from tests.support.waiting import wait_for

pytestmark = ON_SERVERS_IN_TIME

VICTIM, BYSTANDER = "orders-0", "orders-1"


class Scene:
    """A tier with two partitions that are due, behind a proxy; and what readers had before anything went wrong."""

    def __init__(self, tmp_path: Path, proxied: tuple[FaultProxy, AnyBucket]) -> None:
        self.tmp_path = tmp_path
        self.proxy = proxied[0]
        self.cli = through(tmp_path / "cli", proxied)
        self.cli.set(lease={"ttl_ms": 300})
        for number, name in enumerate((VICTIM, BYSTANDER)):
            log = GrowingLog("orders", number, tmp_path / "logs", random.Random(number))
            self.bring(name, log.write_part(segments=2, batches=10))

    def bring(self, name: str, folder: Path) -> None:
        self.cli.named = name
        self.cli.bring(folder)
        self.cli.named = VICTIM
        self.before = self.view()

    def view(self) -> tuple[Any, dict[bytes, bytes]]:
        """What the tier says that it has of the victim, and what a consumer reads of it."""
        topics = [row for row in self.cli.do("topics")["partitions"] if row["partition"] == 0]
        return topics, latest(self.cli.export(self.tmp_path / f"export-{random.getrandbits(60):x}"))

    def sources(self) -> list[str]:
        """Keys of the victim's segments."""
        return sorted(key for key in self.cli.objects() if key.startswith(f"{VICTIM}/") and key.endswith(".log"))

    def once(self, pattern: str, act: Callable[[], object], skip: int = 0) -> None:
        """Something else happens just before a GET of a matching path is answered."""
        seen: list[str] = []

        def before(request: str, path: str) -> None:
            if request == "get" and re.search(pattern, path):
                seen.append(path)
                if len(seen) == skip + 1:
                    act()

        self.proxy.before = before

    def run(self) -> tuple[Answer, dict[str, Any], dict[str, Any]]:
        """One `run` over everything: the answer, the victim's row, the bystander's."""
        answer = self.cli.ask("run", "--force")
        assert answer.document is not None, answer
        victim, bystander = answer.document["partitions"]
        return answer, victim, bystander

    def calm(self) -> None:
        self.proxy.faults = []
        self.proxy.before = lambda request, path: None

    def unharmed(self) -> None:
        """Readers see what they saw, no object of a round is part of the view, and what is left is known."""
        self.calm()
        assert self.view() == self.before
        assert all(problem["severity"] == "note" for problem in self.cli.do("verify", VICTIM)["problems"])

    def recovers(self) -> None:
        """The next run does it, and everything that was left behind goes."""
        self.calm()
        done: list[tuple[int, str]] = []

        def ran() -> bool:
            answer, victim, _ = self.run()
            done.append((answer.code, victim["status"]))
            return bool(
                victim["status"] != "leased"
            )  # by the one that broke off, for as long as a server's whole seconds make of its lease

        wait_for(ran)
        assert done[-1] in {(0, "cleaned"), (0, "resumed")}, done
        topics, records = self.view()
        assert records == self.before[1]
        assert topics[0]["bytes"] < self.before[0][0]["bytes"]
        self.cli.set(publish={"orphan_age_ms": 0})
        self.cli.retire_everything()


@pytest.fixture
def scene(tmp_path: Path, proxied_bucket: tuple[FaultProxy, AnyBucket]) -> Scene:
    return Scene(tmp_path, proxied_bucket)


@pytest.mark.damages
def test_a_bucket_that_does_not_exist(tmp_path: Path, proxied_bucket: tuple[FaultProxy, AnyBucket]) -> None:
    cli = through(tmp_path / "cli", proxied_bucket)
    url = re.sub("/test-[0-9a-f]+/", "/no-such-bucket-at-all/", cli.bucket.url)
    cli.set(tier={"url": url})
    log = log_of("a=1")
    folder = log.write(tmp_path / "log")
    for command in (["topics"], ["plan"], ["run"], ["verify"], ["retire"], ["import", folder, "--topic", "t", "--partition", "0"]):
        answer = cli.ask(*command)
        assert (answer.code, answer.document) == (5, None), answer
        (line,) = answer.remarks
        assert re.search("(the bucket|it) does not exist", line)
        assert "[tier] url" in line
    checked = cli.ask("config", "check")
    assert checked.code == 5
    assert "does not exist" in checked.document["problems"][0]["detail"]


@pytest.mark.parametrize("refusal", ["denied", "expired"])
@pytest.mark.parametrize("when", ["reading", "writing", "publishing"])
def test_credentials_refused_in_mid_run(scene: Scene, refusal: str, when: str) -> None:
    """From one moment on nothing is allowed any more: the round stays as it is, for whoever may go on."""
    pattern = {"reading": f"{VICTIM}/.*log$", "writing": f"{VICTIM}/.*index$", "publishing": "partitions/.*/log/.*5.json$"}[when]

    def before(request: str, path: str) -> None:
        if request == ("get" if when == "reading" else "put") and re.search(pattern, path):
            scene.proxy.faults = [Fault(refusal)]

    scene.proxy.before = before
    answer, victim, bystander = scene.run()
    assert (answer.code, victim["status"], bystander["status"]) == (5, "quarantined", "quarantined")
    assert re.search("access denied" if refusal == "denied" else "expired|credentials are refused", victim["reason"])
    assert "a bug" not in answer.stderr
    scene.unharmed()
    scene.recovers()


def test_an_object_that_disappears_between_listing_and_reading(scene: Scene) -> None:
    lost = scene.sources()[1]
    content = scene.cli.objects()[lost]
    scene.once(f"{VICTIM}/.*log$", lambda: scene.cli.remove(lost))
    answer, victim, bystander = scene.run()
    assert (answer.code, victim["status"], bystander["status"]) == (3, "quarantined", "cleaned"), "the others go on"
    assert lost.split("/")[1] in victim["reason"]
    assert "quarantined" in answer.stderr
    scene.calm()
    assert not scene.cli.ask("verify", VICTIM).document["ok"]
    scene.cli.put(lost, content)
    scene.unharmed()
    scene.recovers()


@pytest.mark.parametrize("change", ["shrinks", "grows", "changes"])
def test_an_object_that_is_not_what_it_was(scene: Scene, change: str) -> None:
    key = scene.sources()[0]
    content = scene.cli.objects()[key]
    other = {"shrinks": content[:-100], "grows": content + b"more", "changes": content[:-1] + bytes([content[-1] ^ 1])}[change]
    scene.once(f"{VICTIM}/.*log$", lambda: scene.cli.put(key, other))
    answer, victim, bystander = scene.run()
    assert (answer.code, victim["status"], bystander["status"]) == (3, "quarantined", "cleaned")
    assert victim["segment"] == key
    assert ("digest" if change == "changes" else "bytes, recorded are") in victim["reason"]
    scene.calm()
    scene.cli.put(key, content)
    scene.unharmed()
    scene.recovers()


def test_an_etag_that_changes_while_a_large_object_is_read(scene: Scene, tmp_path: Path) -> None:
    """Its parts are fetched side by side: parts of two versions are not one object."""
    log = LogBuilder(next_offset=scene.before[0][0]["end_offset"] + 1, time=1_700_000_000_000)
    for number in range(10):
        log.put(f"large={'x' * 1_000_000}{number}")
    scene.bring(VICTIM, log.write(tmp_path / "large"))
    key = scene.sources()[-1]
    content = scene.cli.objects()[key]
    assert len(content) > 8 << 20
    scene.once(re.escape(key.split("/")[1]), lambda: scene.cli.put(key, content[:-1] + b"!"), skip=1)
    answer, victim, bystander = scene.run()
    assert (victim["status"], bystander["status"]) == ("quarantined", "cleaned")
    if scene.cli.bucket.url.startswith("gs:"):  # fake-gcs-server reads whatever generation there is: the digest notices
        assert (answer.code, "digest" in victim["reason"]) == (3, True)
    else:
        assert (answer.code, "changed while it was read" in victim["reason"]) == (5, True)
    scene.calm()
    scene.cli.put(key, content)
    scene.unharmed()
    scene.recovers()


@pytest.mark.parametrize(("fault", "code", "word"), [("cut", 5, "tried"), ("short", 5, "tried"), ("flip", 3, "digest")])
def test_a_body_that_is_wrong_whenever_it_is_read(scene: Scene, minutes: Minutes, fault: str, code: int, word: str) -> None:
    """One that ends early is asked for again, for its minute; one that differs from its digest is damaged."""
    scene.proxy.faults = [Fault(fault, ("get",), match=f"{VICTIM}/.*log$")]
    answer, victim, bystander = scene.run()
    assert (answer.code, victim["status"], bystander["status"]) == (code, "quarantined", "cleaned")
    assert word in victim["reason"]
    assert (minutes.seconds > 60) == (fault != "flip")
    scene.unharmed()
    scene.recovers()


def test_bytes_that_arrive_damaged_are_never_published(scene: Scene, brisk: None) -> None:
    """The server takes them without a word, as some do."""
    scene.proxy.faults = [Fault("flip_sent", ("put",), rate=0.3)]
    answer, victim, bystander = scene.run()
    assert (answer.code, victim["status"], bystander["status"]) == (0, "cleaned", "cleaned")
    assert scene.proxy.seen.faults["flip_sent"] > 3
    scene.calm()
    assert scene.view()[1] == scene.before[1]
    scene.cli.retire_everything()


@pytest.mark.parametrize("when", ["always", "publishing"])
def test_503_for_a_minute(scene: Scene, minutes: Minutes, when: str) -> None:
    minutes.until, minutes.then = 60.0, scene.calm
    scene.proxy.faults = [Fault("slow_down", match="" if when == "always" else "partitions/.*/log/.*5.json")]
    answer, victim, bystander = scene.run()
    assert (answer.code, victim["status"], bystander["status"]) == (0, "cleaned", "cleaned")
    assert 60 <= minutes.seconds < 120
    assert scene.proxy.seen.faults["slow_down"] > 3


def test_503_for_an_hour(scene: Scene, minutes: Minutes) -> None:
    """In the middle of a round: it is left as it is, with the reason, and the next run takes it up."""

    def before(request: str, path: str) -> None:
        if request == "put" and re.search(f"{VICTIM}/.*log$", path):
            scene.proxy.faults = [Fault("slow_down")]

    scene.proxy.before = before
    answer, victim, bystander = scene.run()
    assert (answer.code, victim["status"], bystander["status"]) == (5, "quarantined", "quarantined")
    assert re.search(BUSY, victim["reason"])
    scene.unharmed()
    scene.recovers()
