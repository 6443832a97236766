package conformance;

import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;

import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.UnifiedLog;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.FileTime;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.TreeSet;

/**
 * A random log, as a replica would hold it: batches by Kafka's builders, segments, indexes and snapshots by its log layer.
 * Seed, profile and number of parts decide every byte (with the same codec libraries).
 */
final class Generator {
    private static final long BEGIN = 1_700_000_000_000L;
    private static final long HOUR = 3_600_000L;

    /** How likely what is. Weights of the kinds of batches; `rounds`: the log has been cleaned before. */
    record Profile(int plain, int idempotent, int transactional, int legacy, int keyless, int gaps, int other,
                   boolean appendTime, boolean compressed, boolean rounds, int mostRecords, int segments) {
        static Profile of(String name) {
            return switch (name) {
                case "plain" -> new Profile(6, 2, 0, 0, 0, 0, 0, false, true, false, 40, 8);
                case "txn" -> new Profile(1, 2, 12, 0, 0, 0, 1, false, true, false, 8, 9);
                case "gaps" -> new Profile(3, 1, 3, 0, 0, 3, 1, false, true, true, 12, 8);
                case "legacy" -> new Profile(2, 1, 0, 8, 1, 0, 0, false, true, false, 10, 8);
                case "keyless" -> new Profile(3, 1, 1, 0, 5, 0, 0, false, true, false, 12, 8);
                case "logappend" -> new Profile(4, 1, 2, 1, 1, 0, 0, true, true, false, 20, 8);
                case "tiny" -> new Profile(4, 1, 2, 1, 1, 1, 1, false, false, false, 1, 30);
                case "mixed" -> new Profile(3, 2, 4, 2, 2, 2, 1, true, true, true, 12, 9);
                case "growing" -> new Profile(3, 2, 4, 1, 1, 1, 1, true, true, false, 10, 3);
                case "growing-plain" -> new Profile(3, 2, 5, 0, 1, 2, 1, false, false, false, 8, 3);
                default -> throw new IllegalArgumentException("no profile " + name);
            };
        }
    }

    private final Random random;
    private final Profile profile;
    private final Batches batches;
    private final long start;
    private final int indexInterval;
    private final long retention;
    private final UnifiedLog log;
    private final List<Long> bases = new ArrayList<>();

    private Generator(long seed, String name, Path dir) throws IOException {
        this.random = new Random(seed * 1_000_003L + name.hashCode());
        this.profile = Profile.of(name);
        this.start = random.nextInt(3) > 0 ? 0 : random.nextBoolean() ? random.nextInt(10_000) : 6_000_000_000L + random.nextInt(100);
        this.indexInterval = pick(1, 200, 1024, 4096);
        this.retention = pick(0L, 1000L, HOUR, 24 * HOUR);
        this.batches = new Batches(random, profile, BEGIN);
        this.log = Logs.open(dir, Logs.config(Map.of("index.interval.bytes", indexInterval)), start, start);
    }

    static ObjectNode generate(long seed, String profile, int parts, Path target) throws Exception {
        Path root = Files.createTempDirectory("conformance");
        try {
            Generator generator = new Generator(seed, profile, Files.createDirectory(root.resolve("conformance-0")));
            try {
                return generator.write(parts, target);
            } finally {
                generator.log.closeQuietly();
            }
        } finally {
            Logs.delete(root);
        }
    }

    @SafeVarargs
    private <T> T pick(T... choices) {
        return choices[random.nextInt(choices.length)];
    }

    private ObjectNode write(int parts, Path target) throws Exception {
        ObjectNode answer = Server.JSON.createObjectNode();
        ArrayNode ends = answer.putArray("parts");
        long dirty = start;
        if (parts == 1 && profile.rounds)
            for (int round = random.nextInt(4); round > 0; round--)
                dirty = liveThroughRound(dirty);
        for (int part = 0; part < parts; part++) {
            fill(1 + random.nextInt(profile.segments));
            if (part == parts - 1 && random.nextInt(4) > 0)
                batches.endTransactions(log.logEndOffset(), random).forEach(this::append);
            log.roll();
            ends.addObject().put("end", log.logEndOffset()).put("stable", log.lastStableOffset());
        }
        answer.set("request", draw(dirty));
        log.flush(true);
        boolean snapshots = random.nextBoolean();
        log.close();
        copyOut(target, snapshots);
        return answer;
    }

    private void fill(int segments) throws IOException {
        for (int segment = 0; segment < segments; segment++) {
            for (int left = 1 + random.nextInt(profile.mostRecords == 1 ? 6 : 12); left > 0; left--) {
                batches.pass(random.nextInt(3000));
                batches.next(log.logEndOffset(), random).forEach(this::append);
            }
            if (segment < segments - 1)
                log.roll();
        }
    }

    private void append(MemoryRecords records) {
        log.appendAsFollower(records, Integer.MAX_VALUE);
        try {
            log.updateHighWatermark(log.logEndOffset());
        } catch (IOException e) {
            throw new IllegalStateException(e);
        }
    }

    /** A round of Kafka's cleaner over what there is, the way a broker does it: the active segment stays. */
    private long liveThroughRound(long dirty) throws Exception {
        fill(1 + random.nextInt(4));
        log.roll();
        if (random.nextBoolean())
            batches.next(log.logEndOffset(), random).forEach(this::append);
        batches.pass(pick(0L, retention / 2, retention, retention + 1, 2 * retention + 1));
        LogToClean toClean = new LogToClean(log, random.nextInt(4) == 0 ? start : dirty, log.lastStableOffset(), false);
        if (toClean.firstUncleanableOffset() <= toClean.firstDirtyOffset())
            return dirty;
        log.updateConfig(Logs.config(Map.of("index.interval.bytes", indexInterval, "delete.retention.ms", retention,
            "internal.segment.bytes", pick(1 << 30, 4000, 1000))));
        long keys = random.nextInt(3) == 0 ? 1 + random.nextInt(30) : 100_000;
        try {
            return Math.max(dirty, Cleaning.cleaner(keys).doClean(toClean, batches.now()).getKey());
        } catch (IllegalStateException emptiedLegacyBatch) {
            return dirty;
        } finally {
            log.updateConfig(Logs.config(Map.of("index.interval.bytes", indexInterval)));
        }
    }

    private ObjectNode draw(long dirty) throws IOException {
        List<Long> offsets = new ArrayList<>();
        TreeSet<Long> horizons = new TreeSet<>();
        long bytes = 0;
        long indexBytes = 0;
        for (LogSegment segment : log.logSegments()) {
            if (segment.baseOffset() == log.logEndOffset())
                continue;
            bases.add(segment.baseOffset());
            bytes += segment.size();
            indexBytes = Math.max(indexBytes, Math.max(segment.offsetIndex().sizeInBytes(), segment.timeIndex().sizeInBytes()));
            for (RecordBatch batch : segment.log().batches()) {
                offsets.add(batch.lastOffset());
                batch.deleteHorizonMs().ifPresent(horizons::add);
            }
        }
        ObjectNode request = Server.JSON.createObjectNode();
        long upper = upper();
        request.put("first_uncleanable_offset", upper);
        request.put("first_dirty_offset", firstDirty(dirty, upper, offsets));
        long after = batches.now() + pick(0L, 1L, retention, 10 * HOUR, 100 * HOUR);
        long now = !horizons.isEmpty() && random.nextInt(3) == 0 ? horizons.first() + random.nextInt(3) - 1 : after;
        request.put("now_ms", now);
        long retentionMs = random.nextInt(4) > 0 ? retention : pick(0L, HOUR, HOUR * bases.size());
        request.put("delete_retention_ms", retentionMs);
        long each = bytes / bases.size();
        request.put("segment_bytes", pick(1 << 30, 1 << 30, (int) Math.max(100, each), (int) Math.max(100, 3 * each), (int) bytes));
        int most = random.nextInt(5) > 0 ? 10_485_760 : (int) Math.max(64, pick(1, 2, 4) * indexBytes + 24);
        request.put("segment_index_bytes", most);
        request.put("index_interval_bytes", pick(indexInterval, indexInterval, 1, 4096));
        if (random.nextInt(3) == 0)
            request.put("map_entries", 1 + random.nextInt(pick(4, 20, 60)));
        if (random.nextInt(5) == 0)
            request.put("high_watermark", random.nextBoolean() ? log.logEndOffset() + 1 + random.nextInt(3)
                : offsets.get(random.nextInt(offsets.size())) + 1);
        return request;
    }

    /** At most the segment that holds the last stable offset: what a broker would never clean is no test. */
    private long upper() {
        long upper = log.logEndOffset();
        if (random.nextInt(3) == 0)
            upper = bases.get(random.nextInt(bases.size())) + random.nextInt(2);
        long stable = Math.min(log.lastStableOffset(), upper);
        if (stable == log.logEndOffset())
            return stable;
        long floor = start;
        for (long base : bases)
            if (base <= stable)
                floor = base;
        return floor > start ? floor : log.logEndOffset();
    }

    private long firstDirty(long dirty, long upper, List<Long> offsets) {
        long first = switch (random.nextInt(5)) {
            case 0 -> start;
            case 1 -> bases.get(random.nextInt(bases.size()));
            case 2 -> offsets.isEmpty() ? start : offsets.get(random.nextInt(offsets.size())) + random.nextInt(2);
            default -> dirty;
        };
        return first < upper && first >= start ? first : start;
    }

    private void copyOut(Path target, boolean snapshots) throws IOException {
        Files.createDirectories(target);
        Path dir = log.dir().toPath();
        Logs.copyLog(dir, target);
        long end = log.logEndOffset();
        for (String suffix : new String[] {".log", ".index", ".timeindex", ".txnindex"})
            Files.deleteIfExists(target.resolve(Logs.name(end, suffix)));
        if (!snapshots)
            for (var file : Logs.list(target))
                if (file.getName().endsWith(".snapshot"))
                    Files.delete(file.toPath());
        long mtime = BEGIN + random.nextInt(100);
        for (long base : bases) {
            mtime += pick(0L, 1L, 1000L, HOUR, HOUR, 24 * HOUR);
            for (String suffix : new String[] {".log", ".index", ".timeindex", ".txnindex"}) {
                Path file = target.resolve(Logs.name(base, suffix));
                if (Files.exists(file))
                    Files.setLastModifiedTime(file, FileTime.fromMillis(mtime));
            }
        }
    }
}
