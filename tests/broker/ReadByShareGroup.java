import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** Reads a topic by a share group (KIP-932) until it has so many records: BOOTSTRAP TOPIC MODE COUNT ISOLATION GROUP. Prints offsets. */
public class ReadByShareGroup {
    public static void main(String[] words) throws Exception {
        String group = words[5];
        try (Admin admin = Admin.create(Map.<String, Object>of("bootstrap.servers", words[0]))) {
            ConfigResource resource = new ConfigResource(ConfigResource.Type.GROUP, group);
            admin.incrementalAlterConfigs(Map.of(resource, List.of(
                new AlterConfigOp(new ConfigEntry("share.auto.offset.reset", "earliest"), AlterConfigOp.OpType.SET),
                new AlterConfigOp(new ConfigEntry("share.isolation.level", words[4]), AlterConfigOp.OpType.SET)))).all().get();
        }
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("group.id", group);
        settings.put("share.acquire.mode", words[2]);
        settings.put("max.poll.records", "10");
        int wanted = Integer.parseInt(words[3]), found = 0;
        try (var consumer = new KafkaShareConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(List.of(words[1]));
            long until = System.currentTimeMillis() + 120_000;
            while (found < wanted && System.currentTimeMillis() < until) {
                var records = consumer.poll(Duration.ofMillis(500));
                for (var record : records) {
                    System.out.println(record.offset());
                    found++;
                }
            }
        }
    }
}
