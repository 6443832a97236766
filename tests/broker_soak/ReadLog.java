import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HexFormat;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Kafka's own consumer, as a program that answers lines.
 *
 * <p>ReadLog BOOTSTRAP ISOLATION reads "TOPIC PARTITION" lines and reads that partition from its first offset to its end. It prints "start OFFSET END",
 * for each record "record OFFSET KEY VALUE SERIAL" in hexadecimal ("-": null), and then "end POSITION", or "error CLASS MESSAGE".
 */
public class ReadLog {
    private static final long STALLED_MS = 240_000;
    private static final PrintStream OUT = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), false, StandardCharsets.UTF_8);

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("isolation.level", args[1]);
        settings.put("auto.offset.reset", "none");
        settings.put("enable.auto.commit", "false");
        settings.put("reconnect.backoff.max.ms", "1000");
        settings.put("metadata.max.age.ms", "3000");
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        for (String order = orders.readLine(); order != null; order = orders.readLine()) {
            String[] words = order.split(" ");
            try {
                read(consumer, new TopicPartition(words[0], Integer.parseInt(words[1])));
            } catch (RuntimeException error) {
                OUT.println("error " + error.getClass().getSimpleName() + " " + String.valueOf(error.getMessage()).replace('\n', ' '));
            }
            OUT.flush();
        }
        System.exit(0);
    }

    private static void read(KafkaConsumer<byte[], byte[]> consumer, TopicPartition partition) {
        consumer.assign(List.of(partition));
        long start = consumer.beginningOffsets(List.of(partition)).get(partition);
        long end = consumer.endOffsets(List.of(partition)).get(partition);
        OUT.println("start " + start + " " + end);
        consumer.seek(partition, start);
        long last = start;
        long until = System.currentTimeMillis() + STALLED_MS;
        while (last < end) {
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(500))) {
                if (record.offset() < end) {
                    Header serial = record.headers().lastHeader("serial");
                    OUT.println("record " + record.offset() + " " + hex(record.key()) + " " + hex(record.value()) + " " + hex(serial == null ? null : serial.value()));
                }
            }
            long now = consumer.position(partition);
            if (now > last) {
                until = System.currentTimeMillis() + STALLED_MS;
                last = now;
            } else if (System.currentTimeMillis() > until) {
                OUT.println("error Stalled at " + last + " of " + end);
                return;
            }
        }
        OUT.println("end " + end);
    }

    private static String hex(byte[] value) {
        return value == null ? "-" : "x" + HexFormat.of().formatHex(value);
    }
}
