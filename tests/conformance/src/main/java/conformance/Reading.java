package conformance;

import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;

import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.message.FetchResponseData.AbortedTransaction;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.server.storage.log.FetchIsolation;
import org.apache.kafka.storage.internals.log.FetchDataInfo;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.UnifiedLog;

import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Base64;
import java.util.Comparator;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.PriorityQueue;
import java.util.Set;
import java.util.TreeMap;

/** Opens a directory as a broker would, checks everything that it checks, and reads it as a consumer would. */
final class Reading {
    private static final int FETCH_BYTES = 1 << 20;

    private Reading() { }

    /** `recover`: as after a crash, so that every segment is read, checked (CRCs too) and indexed anew. */
    static ObjectNode read(Path logDir, boolean recover) throws Exception {
        Path root = Files.createTempDirectory("conformance");
        try {
            Path dir = Files.createDirectory(root.resolve("conformance-0"));
            Logs.copyLog(logDir, dir);
            return open(dir, recover);
        } finally {
            Logs.delete(root);
        }
    }

    private static ObjectNode open(Path dir, boolean recover) throws Exception {
        TreeMap<Long, Long> sizes = Logs.segments(dir);
        if (sizes.isEmpty())
            throw new IllegalArgumentException("no segments in " + dir);
        long start = sizes.firstKey();
        long end = Logs.end(dir, sizes.lastKey());
        try (UnifiedLog log = Logs.open(dir, Logs.config(Map.of()), start, recover ? start : end)) {
            log.updateHighWatermark(log.logEndOffset());
            ObjectNode answer = Server.JSON.createObjectNode();
            answer.put("log_start_offset", log.logStartOffset());
            answer.put("log_end_offset", log.logEndOffset());
            answer.put("last_stable_offset", log.lastStableOffset());
            answer.put("latest_epoch", log.latestEpoch().orElse(-1));
            ArrayNode segments = answer.putArray("segments");
            for (LogSegment segment : log.logSegments()) {
                if (sizes.containsKey(segment.baseOffset()) && segment.size() != sizes.get(segment.baseOffset()))
                    throw new IllegalStateException("Kafka cut segment " + segment.baseOffset() + " from " + sizes.get(segment.baseOffset())
                        + " to " + segment.size() + " bytes");
                segment.sanityCheck(false);
                segment.offsetIndex().sanityCheck();
                segment.timeIndex().sanityCheck();
                for (RecordBatch batch : segment.log().batches())
                    batch.ensureValid();
                segments.addArray().add(segment.baseOffset()).add(segment.size());
            }
            ArrayNode producers = answer.putArray("producers");
            log.lastRecordsOfActiveProducers().forEach((id, last) ->
                producers.addArray().add(id).add(last.producerEpoch()).add(last.lastDataOffset().orElse(-1)));
            consume(log, FetchIsolation.HIGH_WATERMARK, answer.putArray("read_uncommitted"));
            consume(log, FetchIsolation.TXN_COMMITTED, answer.putArray("read_committed"));
            return answer;
        }
    }

    /** The fetch loop of a consumer: what is aborted it learns from the fetch answers and the markers. */
    private static void consume(UnifiedLog log, FetchIsolation isolation, ArrayNode out) throws Exception {
        long position = log.logStartOffset();
        while (position < log.logEndOffset()) {
            FetchDataInfo fetched = log.read(position, FETCH_BYTES, isolation, true);
            PriorityQueue<AbortedTransaction> aborted = new PriorityQueue<>(Comparator.comparingLong(AbortedTransaction::firstOffset));
            aborted.addAll(fetched.abortedTransactions.orElse(List.of()));
            Set<Long> aborting = new HashSet<>();
            long next = position;
            for (RecordBatch batch : fetched.records.batches()) {
                if (isolation == FetchIsolation.TXN_COMMITTED && batch.hasProducerId()) {
                    while (!aborted.isEmpty() && aborted.peek().firstOffset() <= batch.lastOffset())
                        aborting.add(aborted.poll().producerId());
                    if (endsAborted(batch))
                        aborting.remove(batch.producerId());
                }
                boolean skip = batch.isControlBatch() || batch.isTransactional() && aborting.contains(batch.producerId());
                if (!skip)
                    for (Record record : batch)
                        if (record.offset() >= position)
                            describe(record, out.addArray());
                next = batch.nextOffset();
            }
            if (next == position)
                return;
            position = next;
        }
    }

    private static boolean endsAborted(RecordBatch batch) {
        if (!batch.isControlBatch() || !batch.iterator().hasNext())
            return false;
        return ControlRecordType.parse(batch.iterator().next().key()) == ControlRecordType.ABORT;
    }

    private static void describe(Record record, ArrayNode out) {
        out.add(record.offset()).add(record.timestamp()).add(base64(record.key())).add(base64(record.value()));
        ArrayNode headers = out.addArray();
        for (Header header : record.headers())
            headers.addArray().add(header.key()).add(header.value() == null ? null : Base64.getEncoder().encodeToString(header.value()));
    }

    private static String base64(ByteBuffer data) {
        return data == null ? null : new String(Base64.getEncoder().encode(data.duplicate()).array());
    }
}
