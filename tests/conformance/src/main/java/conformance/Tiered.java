package conformance;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;

import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.server.log.remote.metadata.storage.RemoteLogMetadataCache;
import org.apache.kafka.server.log.remote.metadata.storage.RemoteLogMetadataTopicPartitioner;
import org.apache.kafka.server.log.remote.metadata.storage.serialization.RemoteLogMetadataSerde;
import org.apache.kafka.server.log.remote.storage.RemoteLogManager;
import org.apache.kafka.server.log.remote.storage.RemoteLogMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadataUpdate;
import org.apache.kafka.server.log.remote.storage.RemoteResourceNotFoundException;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.Base64;
import java.util.Iterator;
import java.util.List;
import java.util.NavigableMap;
import java.util.Optional;
import java.util.TreeMap;

/** One user partition's records of `__remote_log_metadata`, through Kafka's own decoder and into its own cache. */
final class Tiered {
    private Tiered() { }

    /** `errors`: record's index to what it threw; such a record stops a broker's consumer, here the next one follows. */
    static ObjectNode fold(JsonNode question) throws Exception {
        ObjectNode answer = Server.JSON.createObjectNode();
        ObjectNode errors = answer.putObject("errors");
        ArrayNode written = answer.putArray("written");
        RemoteLogMetadataSerde serde = new RemoteLogMetadataSerde();
        RemoteLogMetadataCache cache = new RemoteLogMetadataCache();
        int index = 0;
        for (JsonNode event : question.get("events")) {
            try {
                RemoteLogMetadata record = serde.deserialize(Base64.getDecoder().decode(event.asText()));
                written.add(Base64.getEncoder().encodeToString(serde.serialize(record)));
                apply(cache, record);
            } catch (Throwable failure) {
                errors.put(Integer.toString(index), failure.getClass().getSimpleName() + ": " + failure.getMessage());
            }
            index++;
        }
        long first = question.get("first").asLong();
        long last = question.get("last").asLong();
        ObjectNode epochs = answer.putObject("epochs");
        for (JsonNode epoch : question.get("epochs"))
            epochs.set(epoch.asText(), ofEpoch(cache, epoch.asInt(), first, last));
        ArrayNode all = answer.putArray("all");
        Iterator<RemoteLogSegmentMetadata> segments = segments(cache, "listAllRemoteLogSegments");
        while (segments.hasNext())
            all.add(described(segments.next()));
        ArrayNode within = answer.putArray("within");
        for (JsonNode lineage : question.get("lineages"))
            within.add(valid(cache, lineage, question.get("log_end").asLong()));
        return answer;
    }

    static int partition(JsonNode question) {
        TopicPartition name = new TopicPartition("any", question.get("partition").asInt());
        return new RemoteLogMetadataTopicPartitioner(question.get("partitions").asInt())
            .metadataPartition(new TopicIdPartition(Uuid.fromString(question.get("topic_id").asText()), name));
    }

    private static void apply(RemoteLogMetadataCache cache, RemoteLogMetadata record) throws Throwable {
        if (record instanceof RemoteLogSegmentMetadata) {
            call(cache, "addCopyInProgressSegment", List.of(RemoteLogSegmentMetadata.class), record);
        } else if (record instanceof RemoteLogSegmentMetadataUpdate) {
            try {
                call(cache, "updateRemoteLogSegmentMetadata", List.of(RemoteLogSegmentMetadataUpdate.class), record);
            } catch (RemoteResourceNotFoundException unknown) {
                // RemotePartitionMetadataStore warns and goes on
            }
        }
    }

    private static ObjectNode ofEpoch(RemoteLogMetadataCache cache, int epoch, long first, long last) throws Exception {
        ObjectNode answer = Server.JSON.createObjectNode();
        ArrayNode lookups = answer.putArray("lookups");
        for (long offset = first; offset <= last; offset++) {
            Optional<?> found = (Optional<?>) quietly(cache, "remoteLogSegmentMetadata", List.of(int.class, long.class), epoch, offset);
            lookups.add(found.map(segment -> id((RemoteLogSegmentMetadata) segment)).orElse(""));
        }
        Optional<?> highest = (Optional<?>) quietly(cache, "highestOffsetForEpoch", List.of(int.class), epoch);
        highest.ifPresent(offset -> answer.put("highest", (Long) offset));
        ArrayNode listed = answer.putArray("list");
        try {
            Iterator<RemoteLogSegmentMetadata> segments = segments(cache, "listRemoteLogSegments", epoch);
            while (segments.hasNext())
                listed.add(id(segments.next()));
        } catch (RemoteResourceNotFoundException lost) {
            answer.put("lost", true);
        }
        return answer;
    }

    private static ArrayNode valid(RemoteLogMetadataCache cache, JsonNode lineage, long logEnd) throws Exception {
        NavigableMap<Integer, Long> epochs = new TreeMap<>();
        lineage.forEach(entry -> epochs.put(entry.get(0).asInt(), entry.get(1).asLong()));
        Method filter = open(RemoteLogManager.class, "buildFilteredLeaderEpochMap", NavigableMap.class);
        Method within = open(RemoteLogManager.class, "isRemoteSegmentWithinLeaderEpochs", RemoteLogSegmentMetadata.class, long.class,
            NavigableMap.class);
        ArrayNode answer = Server.JSON.createArrayNode();
        Iterator<RemoteLogSegmentMetadata> segments = segments(cache, "listAllRemoteLogSegments");
        while (segments.hasNext()) {
            RemoteLogSegmentMetadata segment = segments.next();
            if ((Boolean) within.invoke(null, segment, logEnd, filter.invoke(null, epochs)))
                answer.add(id(segment));
        }
        return answer;
    }

    private static ObjectNode described(RemoteLogSegmentMetadata segment) {
        ObjectNode answer = Server.JSON.createObjectNode();
        answer.put("id", id(segment)).put("state", segment.state().name()).put("start", segment.startOffset()).put("end", segment.endOffset());
        answer.put("broker", segment.brokerId()).put("event_ms", segment.eventTimestampMs()).put("max_timestamp_ms", segment.maxTimestampMs());
        answer.put("size", segment.segmentSizeInBytes()).put("txn_index_empty", segment.isTxnIdxEmpty());
        segment.customMetadata().ifPresent(custom -> answer.put("custom", Base64.getEncoder().encodeToString(custom.value())));
        return answer;
    }

    private static String id(RemoteLogSegmentMetadata segment) {
        return segment.remoteLogSegmentId().id().toString();
    }

    @SuppressWarnings("unchecked")
    private static Iterator<RemoteLogSegmentMetadata> segments(RemoteLogMetadataCache cache, String method, Object... arguments)
        throws Exception {
        List<Class<?>> types = arguments.length == 0 ? List.of() : List.of(int.class);
        return (Iterator<RemoteLogSegmentMetadata>) quietly(cache, method, types, arguments);
    }

    private static Object quietly(Object on, String name, List<Class<?>> types, Object... arguments) throws Exception {
        try {
            return call(on, name, types, arguments);
        } catch (Exception failure) {
            throw failure;
        } catch (Throwable error) {
            throw new IllegalStateException(error);
        }
    }

    /** Most of the cache's methods are for its own package. */
    private static Object call(Object on, String name, List<Class<?>> types, Object... arguments) throws Throwable {
        try {
            return open(RemoteLogMetadataCache.class, name, types.toArray(new Class<?>[0])).invoke(on, arguments);
        } catch (InvocationTargetException thrown) {
            throw thrown.getCause();
        }
    }

    private static Method open(Class<?> owner, String name, Class<?>... types) throws NoSuchMethodException {
        Method method = owner.getDeclaredMethod(name, types);
        method.setAccessible(true);
        return method;
    }
}
