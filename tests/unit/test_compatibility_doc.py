"""docs/compatibility.md says what is proven where: it must stay true."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
TESTS = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path.name != Path(__file__).name}

LOG_CLEANER_TEST = re.findall(
    r"\w+",
    """
testRemoveMetricsOnClose testMetricsActiveAfterReconfiguration testCleanSegments testCleanSegmentsWithConcurrentSegmentDeletion
testSizeTrimmedForPreallocatedAndCompactedTopic testDuplicateCheckAfterCleaning testMultiPassSegmentCleaningWithAbortedTransactions
testBasicTransactionAwareCleaning testCleanWithTransactionsSpanningSegments testCommitMarkerRemoval testDeletedBatchesWithNoMessagesRead
testCommitMarkerRetentionWithEmptyBatch testCleanEmptyControlBatch testCommittedTransactionSpanningSegments
testAbortedTransactionSpanningSegments testAbortMarkerRemoval testEmptyBatchRemovalWithSequenceReuse testAbortMarkerRetentionWithEmptyBatch
testLargeMessage testMessageLargerThanMaxMessageSize testMessageLargerThanMaxMessageSizeWithCorruptHeader
testCorruptMessageSizeLargerThanBytesAvailable testCleaningWithDeletes testLogCleanerStats testLogCleanerRetainsProducerLastSequence
testLogCleanerRetainsLastSequenceEvenIfTransactionAborted testCleaningWithKeysConflictingWithTxnMarkerKeys testPartialSegmentClean
testCleaningWithUncleanableSection testLogToClean testLogToCleanWithUncleanableSection testCleaningWithUnkeyedMessages
testCleanSegmentsWithAbort testCleanSegmentsRetainingLastEmptyBatch testSegmentGrouping
testSegmentGroupingWithSparseOffsetsAndEmptySegments testSegmentGroupingWithSparseOffsets testSegmentGroupingFollowingLoadOfZeroIndex
testBuildOffsetMap testSegmentWithOffsetOverflow testRecoveryAfterCrash testBuildOffsetMapFakeLarge testBuildPartialOffsetMap
testCleanCorruptMessageSet testClientHandlingOfCorruptMessageSet testCleanTombstone testCleaningBeyondMissingOffsets testMaxCleanTimeSecs
testReconfigureLogCleanerIoMaxBytesPerSecond
""",
)


def test_every_behaviour_is_tested_or_explained() -> None:
    assert len(LOG_CLEANER_TEST) == 49
    ours = {
        name for path, text in TESTS.items() if path.name.startswith("test_log_cleaner_") for name in re.findall(r"\btest[A-Z]\w+", text)
    }
    explained = set(re.findall(r"\btest[A-Z]\w+", DOCUMENT.split("| Kafka's test | why not |")[1]))
    assert sorted(set(LOG_CLEANER_TEST) - ours - explained) == []
    assert sorted(ours & explained) == []


def test_named_tests_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT))
    assert named
    defined = {name for text in TESTS.values() for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}
    assert sorted(named - defined) == []


def test_named_files_exist() -> None:
    for path in re.findall(r"`(tests/[\w/.*]+)`", DOCUMENT):
        assert list(ROOT.glob(path)), path
