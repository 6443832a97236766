import java.util.Collections;
import java.util.Iterator;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.server.log.remote.storage.RemoteLogMetadataManager;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadataUpdate;
import org.apache.kafka.server.log.remote.storage.RemotePartitionDeleteMetadata;

/** A metadata manager that keeps nothing and does not know __remote_log_metadata. */
public class OtherMetadataManager implements RemoteLogMetadataManager {
    private static final CompletableFuture<Void> DONE = CompletableFuture.completedFuture(null);

    @Override public void configure(Map<String, ?> configs) { }

    @Override public CompletableFuture<Void> addRemoteLogSegmentMetadata(RemoteLogSegmentMetadata metadata) { return DONE; }

    @Override public CompletableFuture<Void> updateRemoteLogSegmentMetadata(RemoteLogSegmentMetadataUpdate update) { return DONE; }

    @Override public Optional<RemoteLogSegmentMetadata> remoteLogSegmentMetadata(TopicIdPartition partition, int epoch, long offset) {
        return Optional.empty();
    }

    @Override public Optional<Long> highestOffsetForEpoch(TopicIdPartition partition, int epoch) { return Optional.empty(); }

    @Override public CompletableFuture<Void> putRemotePartitionDeleteMetadata(RemotePartitionDeleteMetadata metadata) { return DONE; }

    @Override public Iterator<RemoteLogSegmentMetadata> listRemoteLogSegments(TopicIdPartition partition) {
        return Collections.emptyIterator();
    }

    @Override public Iterator<RemoteLogSegmentMetadata> listRemoteLogSegments(TopicIdPartition partition, int epoch) {
        return Collections.emptyIterator();
    }

    @Override public void onPartitionLeadershipChanges(Set<TopicIdPartition> leaders, Set<TopicIdPartition> followers) { }

    @Override public void onStopPartitions(Set<TopicIdPartition> partitions) { }

    @Override public long remoteLogSize(TopicIdPartition partition, int epoch) { return 0; }

    @Override public void close() { }
}
