import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.pinterest.kafka.tieredstorage.common.discovery.s3.S3StorageServiceEndpoint;
import com.pinterest.kafka.tieredstorage.common.metrics.MetricsConfiguration;
import com.pinterest.kafka.tieredstorage.consumer.S3Consumer;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Collections;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.services.s3.S3AsyncClient;
import software.amazon.awssdk.services.s3.S3Client;
import software.amazon.nio.spi.s3.S3ClientStore;

/**
 * Reads one partition through S3Consumer, once from each of the given positions up to the given end.
 *
 * <p>ReadPartition BUCKET PREFIX CLUSTER BITS TOPIC PARTITION END POSITION... prints "from POSITION", then "OFFSET KEY VALUE" in base64 ("-": null),
 * then "end NEXT" or "stalled NEXT". A PREFIX that ends in ".json" is the pointer to where the current generation lies.
 */
public class ReadPartition {
    private static final int EMPTY_POLLS = 5;

    public static void main(String[] args) throws Exception {
        reachLocally(args[0]);
        TopicPartition partition = new TopicPartition(args[4], Integer.parseInt(args[5]));
        long end = Long.parseLong(args[6]);
        for (int at = 7; at < args.length; at++) {
            read(endpoint(args[0], args[1]).setKafkaCluster(args[2]).setPrefixEntropyNumBits(Integer.parseInt(args[3])), partition, end, Long.parseLong(args[at]));
        }
        System.exit(0); // the clients' threads are not daemons
    }

    /**
     * The file system that logs are read through asks Amazon itself, by a fixed address, where a bucket lies. All other clients follow
     * AWS_ENDPOINT_URL_S3; so do these two, which it would have made from the answer.
     */
    private static void reachLocally(String bucket) throws ReflectiveOperationException {
        known("bucketToClientMap").put(bucket, S3Client.builder().region(Region.US_EAST_1).build());
        known("bucketToAsyncClientMap").put(bucket, S3AsyncClient.builder().region(Region.US_EAST_1).build());
    }

    @SuppressWarnings("unchecked")
    private static Map<String, Object> known(String field) throws ReflectiveOperationException {
        Field clients = S3ClientStore.class.getDeclaredField(field);
        clients.setAccessible(true);
        return (Map<String, Object>) clients.get(S3ClientStore.getInstance());
    }

    private static S3StorageServiceEndpoint.Builder endpoint(String bucket, String prefix) {
        if (!prefix.endsWith(".json")) {
            return new S3StorageServiceEndpoint.Builder().setBucket(bucket).setBasePrefix(prefix);
        }
        return new S3StorageServiceEndpoint.Builder() {
            @Override
            public S3StorageServiceEndpoint.Builder setTopicPartition(TopicPartition partition) {
                JsonObject current = pointer(bucket, prefix);
                setBucket(current.get("bucket").getAsString());
                setBasePrefix(current.get("basePrefix").getAsString());
                return super.setTopicPartition(partition);
            }
        }.setBucket(bucket).setBasePrefix("unknown");
    }

    private static JsonObject pointer(String bucket, String key) {
        try (S3Client client = S3Client.builder().region(Region.US_EAST_1).build()) {
            String text = new String(client.getObjectAsBytes(r -> r.bucket(bucket).key(key)).asByteArray(), StandardCharsets.UTF_8);
            return new JsonParser().parse(text).getAsJsonObject();
        }
    }

    private static void read(S3StorageServiceEndpoint.Builder endpoint, TopicPartition partition, long end, long position) throws Exception {
        Properties properties = new Properties();
        properties.setProperty("bootstrap.servers", "127.0.0.1:1");
        properties.setProperty("key.deserializer", ByteArrayDeserializer.class.getName());
        properties.setProperty("value.deserializer", ByteArrayDeserializer.class.getName());
        MetricsConfiguration metrics = MetricsConfiguration.getMetricsConfiguration(properties);
        S3Consumer<byte[], byte[]> consumer =
            new S3Consumer<>("judge", properties, metrics, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        Set<TopicPartition> partitions = Collections.singleton(partition);
        consumer.addLocation(partition.topic(), endpoint);
        consumer.assign(partitions);
        Map<TopicPartition, Long> positions = new HashMap<>();
        positions.put(partition, position);
        consumer.setPositions(positions);
        System.out.println("from " + position);
        long next = position;
        int empty = 0;
        while (next < end && empty < EMPTY_POLLS) {
            ConsumerRecords<byte[], byte[]> polled = consumer.poll(3, partitions);
            empty = polled.isEmpty() ? empty + 1 : 0;
            for (ConsumerRecord<byte[], byte[]> record : polled) {
                System.out.println(record.offset() + " " + text(record.key()) + " " + text(record.value()));
                next = record.offset() + 1;
            }
        }
        System.out.println((next < end ? "stalled " : "end ") + next);
        consumer.close();
    }

    private static String text(byte[] bytes) {
        return bytes == null ? "-" : "=" + Base64.getEncoder().encodeToString(bytes);
    }
}
