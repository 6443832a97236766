#!/usr/bin/env bash
# kafka-python 1.4.7 and kafka-python-ng 2.2.3: consumers hand transaction markers to the application as records.
#
# Input: what a broker returns for one committed transaction, namely a batch with one record (key "k", value "v") at offset 0 and its COMMIT
#   marker, a control batch, at offset 1. Batches are built with the library's own builder; CRCs are valid.
# Expected: one record. KIP-98: "these control messages [...] are not exposed to the application".
# Seen: two records. The second one has the key 00 00 00 01 (version 0, type COMMIT), which nobody wrote.
# Cause: Fetcher._unpack_message_set does not ask DefaultRecordBatch.is_control_batch. kafka-python 2.1 and newer do.
# Needs: Python 3.8 to 3.11 as python3 (1.4.7 does not import on newer ones).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/consume.py" <<'PY'
import struct

from kafka.consumer.fetcher import Fetcher
from kafka.consumer.subscription_state import SubscriptionState
from kafka.metrics import Metrics
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords
from kafka.record.util import calc_crc32c
from kafka.structs import TopicPartition

CONTROL = 0x20


def batch(offset, key, value, attributes=0):
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=True, producer_id=7, producer_epoch=0, base_sequence=-1 if attributes else 0, batch_size=1 << 14
    )
    builder.append(0, 1_700_000_000_000, key, value, [])
    data = bytearray(builder.build())
    struct.pack_into(">q", data, 0, offset)
    struct.pack_into(">h", data, 21, struct.unpack_from(">h", data, 21)[0] | attributes)
    struct.pack_into(">I", data, 17, calc_crc32c(bytes(data[21:])))
    return bytes(data)


class Client:
    cluster = None


where = TopicPartition("orders", 0)
subscriptions = SubscriptionState()
subscriptions.assign_from_user([where])
records = MemoryRecords(batch(0, b"k", b"v") + batch(1, struct.pack(">hh", 0, 1), struct.pack(">hi", 0, 0), CONTROL))
fetcher = Fetcher(Client(), subscriptions, Metrics())
for record in fetcher._unpack_message_set(where, records):
    print(record.offset, record.key.hex(), record.value.hex())
PY

expected=$'0 6b 76\n1 00000001 000000000000'
for package in kafka-python==1.4.7 kafka-python-ng==2.2.3; do
  python3 -m venv "$folder/$package"
  "$folder/$package/bin/pip" install --quiet --disable-pip-version-check "$package"
  seen=$("$folder/$package/bin/python" "$folder/consume.py")
  printf '%s\n%s\n' "$package: offset, key, value of each record" "$seen"
  [ "$seen" = "$expected" ] || { echo "changed: this was seen before:"; echo "$expected"; exit 1; }
done
