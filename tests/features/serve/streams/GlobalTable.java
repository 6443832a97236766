import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.ReadOnlyKeyValueStore;
import org.apache.kafka.streams.state.Stores;

/**
 * A Kafka Streams application whose only state is a GlobalKTable.
 *
 * <p>GlobalTable TOPIC STATE_DIR NAME=VALUE... (settings of Streams) prints "running" once the table is restored. For each line that it reads it prints the
 * table: for each entry "entry KEY VALUE" in hexadecimal, then "end STATE".
 */
public class GlobalTable {
    private static final PrintStream OUT = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), false, StandardCharsets.UTF_8);

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("application.id", "table");
        settings.put("state.dir", args[1]);
        for (int at = 2; at < args.length; at++) {
            String[] pair = args[at].split("=", 2);
            settings.put(pair[0], pair[1]);
        }
        StreamsBuilder builder = new StreamsBuilder();
        builder.globalTable(
            args[0],
            Consumed.with(Serdes.Bytes(), Serdes.Bytes()),
            Materialized.<Bytes, Bytes>as(Stores.inMemoryKeyValueStore("table")).withKeySerde(Serdes.Bytes()).withValueSerde(Serdes.Bytes()));
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.start();
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        OUT.println(streams.state() == KafkaStreams.State.RUNNING ? "running" : "ended");
        OUT.flush();
        while (orders.readLine() != null) {
            ReadOnlyKeyValueStore<Bytes, Bytes> table = streams.store(StoreQueryParameters.fromNameAndType("table", QueryableStoreTypes.keyValueStore()));
            try (KeyValueIterator<Bytes, Bytes> entries = table.all()) {
                entries.forEachRemaining(entry -> OUT.println("entry " + hex(entry.key) + " " + hex(entry.value)));
            }
            OUT.println("end " + streams.state());
            OUT.flush();
        }
        System.exit(0);
    }

    private static String hex(Bytes value) {
        return HexFormat.of().formatHex(value.get());
    }
}
