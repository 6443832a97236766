package conformance;

import org.apache.kafka.common.record.internal.FileRecords;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.server.util.Scheduler;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

import java.io.File;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Delayed;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.stream.Stream;

/** Kafka's log layer without a broker around it. */
final class Logs {
    private Logs() { }

    /** Never moves: nothing expires, nothing is rolled for its age. */
    static final Time STANDSTILL = new Time() {
        @Override
        public long milliseconds() {
            return 0;
        }

        @Override
        public long nanoseconds() {
            return 0;
        }

        @Override
        public void sleep(long ms) { }
    };

    /** What would happen later happens now; what would happen again and again does not happen. */
    private static final class Immediately implements Scheduler {
        private static final class Over extends CompletableFuture<Void> implements ScheduledFuture<Void> {
            Over() {
                complete(null);
            }

            @Override
            public Void get(long timeout, TimeUnit unit) throws TimeoutException {
                return null;
            }

            @Override
            public long getDelay(TimeUnit unit) {
                return 0;
            }

            @Override
            public int compareTo(Delayed other) {
                return 0;
            }
        }

        @Override
        public void startup() { }

        @Override
        public void shutdown() { }

        @Override
        public void resizeThreadPool(int size) { }

        @Override
        public ScheduledFuture<?> schedule(String name, Runnable task, long delayMs, long periodMs) {
            if (periodMs < 0)
                task.run();
            return new Over();
        }
    }

    static LogConfig config(Map<String, ?> given) {
        Map<String, String> all = new HashMap<>();
        all.put("cleanup.policy", "delete");
        all.put("retention.ms", "-1");
        all.put("segment.ms", String.valueOf(Long.MAX_VALUE));
        all.put("message.timestamp.after.max.ms", String.valueOf(Long.MAX_VALUE));
        all.put("file.delete.delay.ms", "0");
        given.forEach((name, value) -> all.put(name, String.valueOf(value)));
        return new LogConfig(all);
    }

    /** An unclean start whose recovery point is `recovered`: segments below it are taken as they are, producers are replayed. */
    static UnifiedLog open(Path dir, LogConfig config, long start, long recovered) throws IOException {
        return UnifiedLog.create(dir.toFile(), config, start, recovered, new Immediately(), new BrokerTopicStats(), STANDSTILL, 300_000,
            new ProducerStateManagerConfig(Integer.MAX_VALUE, false), 600_000, new LogDirFailureChannel(1), false, Optional.empty());
    }

    static String name(long offset, String suffix) {
        return String.format("%020d%s", offset, suffix);
    }

    /** Base offset -> size of every segment file. */
    static TreeMap<Long, Long> segments(Path dir) throws IOException {
        TreeMap<Long, Long> found = new TreeMap<>();
        for (File file : list(dir))
            if (file.getName().matches("\\d{20}\\.log"))
                found.put(Long.parseLong(file.getName().substring(0, 20)), file.length());
        return found;
    }

    /** The offset after the last batch of the log, or after the base of an empty last segment. */
    static long end(Path dir, long lastBase) throws IOException {
        long end = lastBase + 1;
        try (FileRecords records = FileRecords.open(dir.resolve(name(lastBase, ".log")).toFile(), false)) {
            for (RecordBatch batch : records.batches())
                end = Math.max(end, batch.nextOffset());
        }
        return end;
    }

    static List<File> list(Path dir) {
        File[] files = dir.toFile().listFiles();
        if (files == null)
            throw new IllegalArgumentException("no directory " + dir);
        return List.of(files);
    }

    /** Log files, indexes, snapshots and the leader epochs, with their modification times. */
    static void copyLog(Path from, Path to) throws IOException {
        for (File file : list(from))
            if (file.getName().matches("\\d{20}\\.(log|index|timeindex|txnindex|snapshot)|leader-epoch-checkpoint"))
                Files.copy(file.toPath(), to.resolve(file.getName()), StandardCopyOption.COPY_ATTRIBUTES);
    }

    static void delete(Path root) throws IOException {
        if (!Files.exists(root))
            return;
        try (Stream<Path> paths = Files.walk(root)) {
            for (Path path : paths.sorted(Comparator.reverseOrder()).toList())
                Files.delete(path);
        }
    }
}
