import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.LogTruncationException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Consumers that stay attached to partition 0 of a topic, from offset 0 on.
 *
 * <p>Attached BOOTSTRAP RESET TOPIC ... prints, with the number of the consumer, "NUMBER record OFFSET VALUE" and "NUMBER error CLASS OFFSET", where the offset is
 * that at which a log diverges, or -1. An error that comes again is not repeated.
 */
public class Attached {
    private static final PrintStream OUT = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);

    public static void main(String[] args) {
        for (int at = 0; at + 2 < args.length; at += 3) {
            int number = at / 3;
            Properties settings = new Properties();
            settings.put("bootstrap.servers", args[at]);
            settings.put("auto.offset.reset", args[at + 1]);
            settings.put("enable.auto.commit", "false");
            settings.put("reconnect.backoff.max.ms", "1000");
            settings.put("metadata.max.age.ms", "1000");
            TopicPartition partition = new TopicPartition(args[at + 2], 0);
            new Thread(() -> read(number, settings, partition)).start();
        }
    }

    private static void read(int number, Properties settings, TopicPartition partition) {
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        consumer.assign(List.of(partition));
        consumer.seek(partition, 0);
        String last = "";
        while (true) {
            try {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                    OUT.println(number + " record " + record.offset() + " " + new String(record.value(), StandardCharsets.UTF_8));
                }
            } catch (RuntimeException error) {
                long diverged = error instanceof LogTruncationException cut ? cut.divergentOffsets().get(partition).offset() : -1;
                String line = number + " error " + error.getClass().getSimpleName() + " " + diverged;
                if (!line.equals(last)) {
                    OUT.println(line);
                }
                last = line;
            }
        }
    }
}
