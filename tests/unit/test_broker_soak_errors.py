"""The broker soak judges the ERROR lines of brokers by their cause."""

from __future__ import annotations

from types import SimpleNamespace

from tests.broker_soak.__main__ import errors_of

START = "20:00:52.938 [remote-log-reader-1] ERROR RemoteLogReader - Error occurred while reading the remote data for orders-0"
BUILD = "20:01:52.938 [ReplicaFetcherThread-0-2] ERROR ReplicaFetcherThread - Error building remote log auxiliary state for orders-0"
LOG = f"""{START}
java.lang.IllegalStateException: This instance is in invalid state, initialized: false close: false
\tat org.apache.kafka.server.log.remote.metadata.storage.TopicBasedRemoteLogMetadataManager.ensureInitializedAndNotClosed
{BUILD}
RemoteStorageException: Couldn't build the state from remote store as the previous remote log segment metadata was not found
{BUILD}
org.apache.kafka.server.log.remote.storage.RemoteStorageException: no segment
20:02:52.938 [main] ERROR KafkaServer - something else
20:02:53.000 [main] INFO KafkaServer - fine
"""


def test_brokers_that_lag_behind_the_metadata_are_excused_and_other_errors_are_told_with_their_cause() -> None:
    cluster = SimpleNamespace(nodes={1: SimpleNamespace(text=lambda: LOG)})
    assert errors_of(cluster) == [  # type: ignore[arg-type]
        f"{BUILD}: org.apache.kafka.server.log.remote.storage.RemoteStorageException: no segment",
        "20:02:52.938 [main] ERROR KafkaServer - something else",
    ]
