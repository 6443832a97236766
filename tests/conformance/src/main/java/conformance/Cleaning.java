package conformance;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import com.sun.management.OperatingSystemMXBean;

import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.SimpleRecord;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.CleanerStats;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.utils.Throttler;

import java.io.File;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.FileTime;
import java.util.Map;
import java.util.TreeMap;

/** One round of Kafka's own cleaner over a directory of sealed segments. */
final class Cleaning {
    private static final double LOAD_FACTOR = 0.9;
    private static final int BYTES_PER_KEY = 24;
    private static final long AMPLE_KEYS = 200_000;
    private static final int BUFFER = 256 * 1024;
    private static final int MAX_MESSAGE = 1_048_588;
    private static final OperatingSystemMXBean PROCESS = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

    /** What the cleaner threw: the partition would be uncleanable. */
    static final class Refused extends Exception {
        Refused(Throwable cause) {
            super(cause);
        }
    }

    private Cleaning() { }

    static LogConfig config(JsonNode p) {
        return Logs.config(Map.of(
            "cleanup.policy", "compact",
            "delete.retention.ms", p.path("delete_retention_ms").asLong(86_400_000L),
            "internal.segment.bytes", p.path("segment_bytes").asInt(1 << 30),
            "segment.index.bytes", p.path("segment_index_bytes").asInt(10_485_760),
            "index.interval.bytes", p.path("index_interval_bytes").asInt(4096)));
    }

    static Cleaner cleaner(long keys) throws Exception {
        return new Cleaner(0, map(keys), BUFFER, MAX_MESSAGE, LOAD_FACTOR,
            new Throttler(Double.MAX_VALUE, 300, "conformance", "bytes", Time.SYSTEM), Time.SYSTEM, partition -> { });
    }

    /** A map that takes exactly so many keys at Kafka's load factor. */
    private static SkimpyOffsetMap map(long keys) throws Exception {
        for (long slots = keys; slots <= keys * 2 + 2; slots++)
            if ((int) (slots * LOAD_FACTOR) == keys && slots * LOAD_FACTOR > 1)
                return new SkimpyOffsetMap(Math.toIntExact(slots * BYTES_PER_KEY), "MD5");
        throw new IllegalArgumentException("no map takes exactly " + keys + " keys");
    }

    /**
     * Opens a copy of the directory with an empty active segment behind it, cleans, and copies out what stands in the place of the
     * cleaned segments. `ignore_dirty_index`: the map pass starts at the head of the segment that holds the first dirty offset,
     * whatever its index says.
     */
    static ObjectNode clean(Path logDir, Path outDir, JsonNode p) throws Exception {
        Path root = Files.createTempDirectory("conformance");
        try {
            Path dir = Files.createDirectory(root.resolve("conformance-0"));
            Logs.copyLog(logDir, dir);
            return clean(logDir, dir, outDir, p);
        } finally {
            Logs.delete(root);
        }
    }

    private static ObjectNode clean(Path logDir, Path dir, Path outDir, JsonNode p) throws Exception {
        TreeMap<Long, Long> sizes = Logs.segments(dir);
        TreeMap<Long, Long> times = new TreeMap<>();
        for (long base : sizes.keySet())
            times.put(base, Files.getLastModifiedTime(logDir.resolve(Logs.name(base, ".log"))).toMillis());
        long start = sizes.firstKey();
        long end = Math.max(Logs.end(dir, sizes.lastKey()), p.path("first_uncleanable_offset").asLong(0));
        Files.createFile(dir.resolve(Logs.name(end, ".log")));
        Files.createFile(dir.resolve(Logs.name(end, ".index")));
        UnifiedLog log = Logs.open(dir, config(p), start, end);
        try {
            for (LogSegment segment : log.logSegments())
                if (segment.baseOffset() < end && segment.size() != sizes.get(segment.baseOffset()))
                    throw new IllegalStateException("segment " + segment.baseOffset() + " was cut when the log was loaded");
            long highWatermark = p.path("high_watermark").asLong(end);
            if (highWatermark > end)
                log.appendAsFollower(MemoryRecords.withRecords(highWatermark - 1, Compression.NONE, 0,
                    new SimpleRecord(0L, new byte[] {1}, new byte[] {1})), 0);
            log.updateHighWatermark(highWatermark);
            for (LogSegment segment : log.logSegments())
                if (times.containsKey(segment.baseOffset()))
                    segment.setLastModified(times.get(segment.baseOffset()));
            long firstDirty = p.path("first_dirty_offset").asLong(start);
            if (p.path("ignore_dirty_index").asBoolean())
                for (LogSegment segment : log.logSegments(firstDirty, firstDirty + 1))
                    if (segment.baseOffset() < end)
                        segment.offsetIndex().truncate();
            return round(log, firstDirty, p, end, dir, outDir);
        } finally {
            log.closeQuietly();
        }
    }

    private static ObjectNode round(UnifiedLog log, long firstDirty, JsonNode p, long end, Path dir, Path outDir) throws Exception {
        LogToClean toClean = new LogToClean(log, firstDirty, p.path("first_uncleanable_offset").asLong(end), false);
        Map.Entry<Long, CleanerStats> result;
        Cleaner cleaner = cleaner(p.path("map_entries").asLong(AMPLE_KEYS));
        long began = System.nanoTime();
        long cpu = PROCESS.getProcessCpuTime();
        try {
            result = cleaner.doClean(toClean, p.get("now_ms").asLong());
        } catch (Throwable refusal) {
            throw new Refused(refusal);
        }
        cpu = PROCESS.getProcessCpuTime() - cpu;
        long elapsed = System.nanoTime() - began;
        long next = result.getKey();
        ObjectNode answer = Server.JSON.createObjectNode();
        answer.put("next_dirty_offset", next);
        answer.put("records_read", result.getValue().messagesRead());
        answer.put("records_kept", result.getValue().messagesWritten());
        answer.put("seconds", elapsed / 1e9);
        answer.put("cpu_seconds", cpu / 1e9);
        ArrayNode segments = answer.putArray("segments");
        TreeMap<Long, Long> times = new TreeMap<>();
        for (LogSegment segment : log.logSegments(0, next)) {
            segments.addArray().add(segment.baseOffset()).add(segment.size());
            times.put(segment.baseOffset(), segment.lastModified());
        }
        log.flush(true);
        log.close();
        copyOut(dir, outDir, times);
        return answer;
    }

    private static void copyOut(Path dir, Path outDir, TreeMap<Long, Long> times) throws IOException {
        Files.createDirectories(outDir);
        for (long base : times.keySet()) {
            for (String suffix : new String[] {".log", ".index", ".timeindex", ".txnindex"}) {
                File from = dir.resolve(Logs.name(base, suffix)).toFile();
                if (from.exists()) {
                    Path to = Files.copy(from.toPath(), outDir.resolve(from.getName()));
                    Files.setLastModifiedTime(to, FileTime.fromMillis(times.get(base)));
                }
            }
        }
    }
}
