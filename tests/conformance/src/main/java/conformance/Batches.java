package conformance;

import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.message.LeaderChangeMessage;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.DefaultRecordBatch;
import org.apache.kafka.common.record.internal.EndTransactionMarker;
import org.apache.kafka.common.record.internal.LegacyRecord;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.RecordBatch;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.zip.CRC32C;

/** The batches of a random log, one step of its writers after the other. */
final class Batches {
    private static final String PLACEHOLDER = "~to be damaged~";
    private static final byte[][] BAD_UTF8 = {
        {(byte) 0xff}, {(byte) 0xed, (byte) 0xa0, (byte) 0x80}, {(byte) 0xe2, (byte) 0x82}, {(byte) 0xc0, (byte) 0x80},
        {(byte) 0xf0, (byte) 0x9f, (byte) 0x98}, {(byte) 0xf4, (byte) 0x90, (byte) 0x80, (byte) 0x80}, {(byte) 0xed, (byte) 0xb0},
        {(byte) 0xe0, (byte) 0x80, (byte) 0xaf}, {(byte) 0xf5, (byte) 0x80}, {(byte) 0x80}};
    private static final String TEXT = "the order of the events is kept and the latest value of each key survives ";

    private static final class Producer {
        final long id;
        final boolean epochPerTransaction;
        final boolean alwaysSequenceZero;
        short epoch;
        int sequence;
        boolean open;

        Producer(long id, Random random) {
            this.id = id;
            this.epochPerTransaction = random.nextInt(3) == 0;
            this.alwaysSequenceZero = random.nextInt(6) == 0;
            this.epoch = (short) random.nextInt(3);
        }

        void bump() {
            epoch++;
            sequence = 0;
        }
    }

    private final Random random;
    private final Generator.Profile profile;
    private final List<Producer> idempotent = new ArrayList<>();
    private final List<Producer> transactional = new ArrayList<>();
    private final int keys;
    private final double skew;
    private final double tombstones;
    private final int valueLength;
    private final Compression codec;
    private long now;
    private int leaderEpoch;
    private boolean appendTime;

    Batches(Random random, Generator.Profile profile, long now) {
        this.random = random;
        this.profile = profile;
        this.now = now;
        this.keys = 2 + random.nextInt(pick(4, 20, 150));
        this.skew = pick(1.0, 2.0, 4.0);
        this.tombstones = pick(0.0, 0.05, 0.2, 0.5);
        this.valueLength = pick(3, 20, 60, 60, 400);
        this.codec = anyCodec();
        this.leaderEpoch = random.nextInt(3);
        this.appendTime = profile.appendTime() && random.nextBoolean();
        for (int i = 1 + random.nextInt(3); i > 0; i--)
            idempotent.add(new Producer(100 + i, random));
        for (int i = 1 + random.nextInt(4); i > 0; i--)
            transactional.add(new Producer(9000 + 11L * i, random));
    }

    @SafeVarargs
    private <T> T pick(T... choices) {
        return choices[random.nextInt(choices.length)];
    }

    long now() {
        return now;
    }

    void pass(long ms) {
        now += ms;
    }

    /** What one of the writers does next: a batch, a marker, now and then both. */
    List<MemoryRecords> next(long offset, Random dice) {
        if (dice.nextInt(30) == 0)
            leaderEpoch += 1 + dice.nextInt(2);
        if (profile.appendTime() && dice.nextInt(12) == 0)
            appendTime = !appendTime;
        int[] weights = {profile.plain(), profile.idempotent(), profile.transactional(), profile.legacy(), profile.keyless(),
            profile.gaps(), profile.other()};
        int draw = dice.nextInt(Arrays.stream(weights).sum());
        int kind = 0;
        while (draw >= weights[kind])
            draw -= weights[kind++];
        return switch (kind) {
            case 1 -> List.of(byProducer(offset, pick(idempotent.toArray(new Producer[0])), false));
            case 2 -> transaction(offset, pick(transactional.toArray(new Producer[0])));
            case 3 -> List.of(legacy(offset));
            case 4 -> List.of(keyless(offset));
            case 5 -> List.of(behindGap(offset));
            case 6 -> List.of(other(offset));
            default -> List.of(plain(offset, false));
        };
    }

    List<MemoryRecords> endTransactions(long offset, Random dice) {
        List<MemoryRecords> markers = new ArrayList<>();
        for (Producer producer : transactional)
            if (producer.open)
                markers.add(marker(offset + markers.size(), producer, dice.nextBoolean()));
        return markers;
    }

    private List<MemoryRecords> transaction(long offset, Producer producer) {
        if (producer.open && random.nextInt(3) == 0)
            return List.of(marker(offset, producer, random.nextInt(5) > 1));
        if (random.nextInt(25) == 0) {  // a second instance takes over: what was open is aborted under its epoch
            producer.bump();
            if (producer.open)
                return List.of(marker(offset, producer, false));
        }
        producer.open = true;
        return List.of(byProducer(offset, producer, true));
    }

    private MemoryRecords marker(long offset, Producer producer, boolean commit) {
        if (producer.epochPerTransaction)
            producer.bump();
        producer.open = false;
        now += random.nextInt(50);
        return stamped(MemoryRecords.withEndTransactionMarker(offset, now, leaderEpoch, producer.id, producer.epoch,
            new EndTransactionMarker(commit ? ControlRecordType.COMMIT : ControlRecordType.ABORT, random.nextInt(3))));
    }

    private MemoryRecords byProducer(long offset, Producer producer, boolean inTransaction) {
        if (!inTransaction && random.nextInt(20) == 0)
            producer.bump();
        int first = producer.alwaysSequenceZero ? 0 : producer.sequence;
        MemoryRecords records = batch(offset, anyOrNone(), producer.id, producer.epoch, first, inTransaction, false);
        producer.sequence += (int) (records.batches().iterator().next().lastOffset() - offset + 1);
        return records;
    }

    private MemoryRecords plain(long offset, boolean skips) {
        boolean sequenceZero = random.nextInt(8) == 0;  // what some clients write without a producer id
        return batch(offset, anyOrNone(), RecordBatch.NO_PRODUCER_ID, RecordBatch.NO_PRODUCER_EPOCH, sequenceZero ? 0 : -1, false, skips);
    }

    private MemoryRecords behindGap(long offset) {
        long gap = random.nextInt(25) == 0 ? (1L << 31) - 2 + random.nextInt(4) : random.nextInt(pick(3, 300));
        return plain(offset + gap, random.nextBoolean());
    }

    private MemoryRecords keyless(long offset) {
        MemoryRecordsBuilder builder = builder(offset, anyOrNone(), -1, (short) -1, -1, false);
        for (int i = 1 + random.nextInt(Math.min(4, profile.mostRecords())); i > 0; i--)
            builder.append(now + random.nextInt(9), pick(null, null, new byte[0], key()), pick(value(), value(), new byte[0]), new Header[0]);
        return stamped(builder.build());
    }

    /** A leader's announcement, or a header without records such as cleaners leave behind. */
    private MemoryRecords other(long offset) {
        if (random.nextInt(3) > 0)
            return MemoryRecords.withLeaderChangeMessage(offset, now, leaderEpoch, ByteBuffer.allocate(512),
                new LeaderChangeMessage().setLeaderId(1));
        ByteBuffer buffer = ByteBuffer.allocate(DefaultRecordBatch.RECORD_BATCH_OVERHEAD);
        DefaultRecordBatch.writeEmptyHeader(buffer, (byte) 2, -1, (short) -1, -1, offset, offset + random.nextInt(4), leaderEpoch,
            TimestampType.CREATE_TIME, now, false, false);
        buffer.flip();
        return MemoryRecords.readableRecords(buffer);
    }

    private MemoryRecordsBuilder builder(long offset, Compression codec, long id, short epoch, int sequence, boolean inTransaction) {
        return MemoryRecords.builder(ByteBuffer.allocate(512), (byte) 2, codec, TimestampType.CREATE_TIME, offset, RecordBatch.NO_TIMESTAMP,
            id, epoch, sequence, inTransaction, leaderEpoch);
    }

    private MemoryRecords batch(long offset, Compression codec, long id, short epoch, int sequence, boolean inTransaction, boolean skips) {
        MemoryRecordsBuilder builder = builder(offset, codec, id, epoch, sequence, inTransaction);
        boolean timeless = random.nextInt(50) == 0;
        boolean damaged = codec == Compression.NONE && random.nextInt(12) == 0;
        int count = 1 + random.nextInt(profile.mostRecords());
        long at = offset;
        for (int i = 0; i < count; i++) {
            Header[] headers = damaged ? new Header[] {new RecordHeader(PLACEHOLDER, null)} : random.nextInt(6) == 0 ? headers() : new Header[0];
            builder.appendWithOffset(at, timeless ? -1 : now + random.nextInt(2000) - 1000, key(), value(), headers);
            at += skips ? 1 + random.nextInt(4) : 1;
        }
        MemoryRecords records = stamped(builder.build());
        if (damaged)
            damage(records.buffer());
        return records;
    }

    /** LogAppendTime as a leader sets it, in place; the deltas stay. */
    private MemoryRecords stamped(MemoryRecords records) {
        if (appendTime)
            records.batches().forEach(batch -> batch.setMaxTimestamp(TimestampType.LOG_APPEND_TIME, now));
        return records;
    }

    /** Builders write no header names that are not UTF-8, other clients do. */
    private void damage(ByteBuffer buffer) {
        byte[] all = new byte[buffer.remaining()];
        buffer.duplicate().get(all);
        byte[] wanted = PLACEHOLDER.getBytes(StandardCharsets.UTF_8);
        for (int at = 0; at + wanted.length <= all.length; at++) {
            if (!Arrays.equals(all, at, at + wanted.length, wanted, 0, wanted.length))
                continue;
            for (int next = at; next < at + wanted.length; ) {
                byte[] bad = random.nextInt(3) == 0 ? new byte[] {'x'} : pick(BAD_UTF8);
                for (int i = 0; i < bad.length && next < at + wanted.length; i++)
                    buffer.put(buffer.position() + next++, bad[i]);
            }
        }
        CRC32C crc = new CRC32C();
        ByteBuffer checked = buffer.duplicate();
        checked.position(buffer.position() + 21);
        crc.update(checked);
        buffer.putInt(buffer.position() + 17, (int) crc.getValue());
    }

    // ---- magic 0 and 1 ------------------------------------------------------------------------------------------------------

    private MemoryRecords legacy(long offset) {
        byte magic = (byte) random.nextInt(2);
        Compression codec = anyOrNone();
        while (codec.type().name.equals("zstd"))
            codec = anyCodec();
        TimestampType type = magic == 1 && (appendTime || random.nextInt(5) == 0) ? TimestampType.LOG_APPEND_TIME : TimestampType.CREATE_TIME;
        boolean oldInside = magic == 1 && codec != Compression.NONE && random.nextInt(8) == 0;  // KAFKA-4298
        MemoryRecordsBuilder builder = MemoryRecords.builder(ByteBuffer.allocate(512), magic, codec, type, offset,
            type == TimestampType.LOG_APPEND_TIME ? now : RecordBatch.NO_TIMESTAMP);
        long at = offset;
        for (int i = 1 + random.nextInt(profile.mostRecords()); i > 0; i--) {
            byte[] key = random.nextInt(15) == 0 ? null : key();
            if (oldInside)
                builder.appendUncheckedWithOffset(at, LegacyRecord.create((byte) 0, RecordBatch.NO_TIMESTAMP, key, value()));
            else
                builder.appendWithOffset(at, magic == 0 ? -1 : now + random.nextInt(2000) - 1000, key, value());
            at += random.nextInt(6) == 0 && codec != Compression.NONE ? 2 : 1;
        }
        return builder.build();
    }

    // ---- content ------------------------------------------------------------------------------------------------------------

    private Compression anyOrNone() {
        if (!profile.compressed() || random.nextInt(3) == 0)
            return Compression.NONE;
        return random.nextBoolean() ? codec : anyCodec();
    }

    private Compression anyCodec() {
        return switch (random.nextInt(6)) {
            case 0 -> Compression.gzip().build();
            case 1 -> Compression.gzip().level(9).build();
            case 2 -> Compression.snappy().build();
            case 3 -> Compression.lz4().build();
            case 4 -> Compression.lz4().level(12).build();
            default -> Compression.zstd().level(1 + random.nextInt(6)).build();
        };
    }

    private byte[] key() {
        int number = (int) (keys * Math.pow(random.nextDouble(), skew));
        if (number % 5 == 4) {
            byte[] binary = new byte[1 + number % 40];
            new Random(number).nextBytes(binary);
            return binary;
        }
        return ("k" + number).getBytes(StandardCharsets.UTF_8);
    }

    private byte[] value() {
        if (random.nextDouble() < tombstones)
            return null;
        int length = random.nextInt(1500) == 0 ? 400_000 : random.nextInt(valueLength + 1);
        byte[] value = new byte[length];
        if (random.nextInt(4) == 0)
            random.nextBytes(value);
        else
            for (int i = 0; i < length; i++)
                value[i] = (byte) TEXT.charAt((i + length) % TEXT.length());
        return value;
    }

    private Header[] headers() {
        Header[] headers = new Header[1 + random.nextInt(3)];
        for (int i = 0; i < headers.length; i++)
            headers[i] = new RecordHeader(pick("", "h", "h", "Stra\u00dfe", "\u65e5\u672c", "\ud83d\ude80"),
                random.nextInt(4) == 0 ? null : Arrays.copyOf(TEXT.getBytes(StandardCharsets.UTF_8), random.nextInt(30)));
        return headers;
    }
}
