import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.time.Duration;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** RestoreState BOOTSTRAP TOPIC END reads partition 0 up to END (exclusive) and prints seconds, CPU seconds and bytes of keys and values. */
public class RestoreState {
    public static void main(String[] args) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("isolation.level", "read_committed");
        settings.put("enable.auto.commit", "false");
        settings.put("max.poll.records", "5000");
        settings.put("max.partition.fetch.bytes", "16777216");
        long end = Long.parseLong(args[2]);
        long size = 0;
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        TopicPartition partition = new TopicPartition(args[1], 0);
        consumer.assign(List.of(partition));
        consumer.seek(partition, 0);
        OperatingSystemMXBean system = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        long began = System.nanoTime();
        long used = system.getProcessCpuTime();
        while (consumer.position(partition) < end) {
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(500))) {
                if (record.offset() < end) {
                    size += record.key().length + record.value().length;
                }
            }
        }
        System.out.printf("%.3f %.3f %d%n", (System.nanoTime() - began) / 1e9, (system.getProcessCpuTime() - used) / 1e9, size);
        System.exit(0);
    }
}
