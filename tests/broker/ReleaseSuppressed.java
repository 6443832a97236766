import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HexFormat;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.Suppressed;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.kstream.WindowedSerdes;
import org.apache.kafka.streams.state.Stores;

/**
 * Kafka Streams applications that count keys in windows and hold each count back until its window ends.
 *
 * <p>ReleaseSuppressed SERVERS STATE_DIR TIME APPLICATION... starts each application, which restores what its predecessor had held back from the topic
 * APPLICATION-final-store-changelog, and moves its time beyond the end of all windows by two records at TIME (ms) and later. It prints what the application
 * releases: "APPLICATION TIME KEY VALUE" in the order of releases, key and value in hexadecimal. The topics APPLICATION-in and APPLICATION-out exist.
 */
public class ReleaseSuppressed {
    private static final PrintStream OUT = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), true, StandardCharsets.UTF_8);
    private static final Duration SIZE = Duration.ofSeconds(20);
    private static final byte[] LAST = "last".getBytes(StandardCharsets.UTF_8);

    public static void main(String[] args) throws Exception {
        for (int at = 3; at < args.length; at++) {
            release(args[0], args[1], Long.parseLong(args[2]), args[at]);
        }
        System.exit(0);
    }

    private static void release(String servers, String directory, long time, String application) throws Exception {
        Properties settings = new Properties();
        settings.put("application.id", application);
        settings.put("bootstrap.servers", servers);
        settings.put("state.dir", directory);
        settings.put("processing.guarantee", "exactly_once_v2");
        settings.put("commit.interval.ms", "100");
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(application + "-in", Consumed.with(Serdes.ByteArray(), Serdes.ByteArray()))
            .groupByKey()
            .windowedBy(TimeWindows.ofSizeWithNoGrace(SIZE))
            .count(Materialized.<byte[], Long>as(Stores.inMemoryWindowStore("counts", SIZE, SIZE, false)).withKeySerde(Serdes.ByteArray()).withValueSerde(Serdes.Long()))
            .suppress(Suppressed.untilWindowCloses(Suppressed.BufferConfig.unbounded()).withName("final"))
            .toStream()
            .to(application + "-out", Produced.with(new WindowedSerdes.TimeWindowedSerde<>(Serdes.ByteArray(), SIZE.toMillis()), Serdes.Long()));
        try (KafkaStreams streams = new KafkaStreams(builder.build(), settings)) {
            streams.setUncaughtExceptionHandler(error -> {
                error.printStackTrace();
                System.exit(1);
                return null;
            });
            streams.start();
            try (KafkaProducer<byte[], byte[]> producer =
                    new KafkaProducer<>(client(servers), new ByteArraySerializer(), new ByteArraySerializer())) {
                for (int step = 0; step < 2; step++) {
                    producer.send(new ProducerRecord<>(application + "-in", 0, time + step * 10 * SIZE.toMillis(), LAST, LAST)).get();
                }
            }
            Properties reading = client(servers);
            reading.put("isolation.level", "read_committed");
            try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(reading, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
                TopicPartition where = new TopicPartition(application + "-out", 0);
                consumer.assign(List.of(where));
                consumer.seekToBeginning(List.of(where));
                while (true) {
                    for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                        if (new String(record.key(), StandardCharsets.UTF_8).startsWith("last")) {
                            return;
                        }
                        OUT.println(application + " " + record.timestamp() + " " + hex(record.key()) + " " + hex(record.value()));
                    }
                }
            }
        }
    }

    private static Properties client(String servers) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", servers);
        return settings;
    }

    private static String hex(byte[] bytes) {
        return HexFormat.of().formatHex(bytes);
    }
}
