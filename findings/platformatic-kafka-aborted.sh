#!/usr/bin/env bash
# @platformatic/kafka 2.12.1: with read_committed (its default), Consumer.fetch returns aborted records if one producer has aborted two
# transactions in what one fetch returns.
#
# Input: what a broker answers to Fetch: a record and an ABORT marker at offsets 0 and 1, the same again at 2 and 3, a record and a COMMIT marker at
#   4 and 5, all of one producer; aborted_transactions names (producer 7, first offset 0) and (producer 7, first offset 2). A server of 40 lines
#   gives this answer, and those to ApiVersions and Metadata. CRCs are valid.
# Expected: of the data, offset 4 only (markers are filtered later, in MessagesStream).
# Seen: 0 and 4.
# Cause: #filterUncommittedMessages keeps one range [first, last) for each producer id, so that the second transaction replaces the first.
#   A transaction whose ABORT marker lies in the next fetch is not filtered either ("we ignore the range for safety").
# Needs: npm, Node.js 22.19 or newer (with callbacks, as here, 20.20 suffices).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund @platformatic/kafka@2.12.1

cat > fetch.mjs <<'JS'
import { createServer } from 'node:net'
import { Consumer, FetchIsolationLevels, Writer, crc32c } from '@platformatic/kafka'

const TOPIC = 'orders', ID = '00000000-0000-4000-8000-000000000001', PRODUCER = 7n, TRANSACTIONAL = 0x10, CONTROL = 0x20, ABORT = 0, COMMIT = 1

function batch(offset, attributes, key, value) {
  const record = Writer.create().appendInt8(0).appendVarInt64(0n).appendVarInt(0).appendVarIntBytes(key).appendVarIntBytes(value).appendVarInt(0)
  const body = Writer.create().appendInt16(attributes).appendInt32(0).appendInt64(1700000000000n).appendInt64(1700000000000n)
    .appendInt64(PRODUCER).appendInt16(0).appendInt32(attributes & CONTROL ? -1 : offset / 2).appendInt32(1).appendVarInt(record.length).appendFrom(record)
  const rest = Writer.create().appendInt32(0).appendInt8(2).appendUnsignedInt32(crc32c(body.buffer)).appendFrom(body)
  return Writer.create().appendInt64(BigInt(offset)).appendInt32(rest.length).appendFrom(rest).buffer
}
const data = offset => batch(offset, TRANSACTIONAL, Buffer.from('k'), Buffer.from('v'))
const marker = (offset, type) => batch(offset, TRANSACTIONAL | CONTROL, Buffer.from([0, 0, 0, type]), Buffer.alloc(6))
const records = Buffer.concat([data(0), marker(1, ABORT), data(2), marker(3, ABORT), data(4), marker(5, COMMIT)])

const answers = {
  18: w => w.appendInt16(0).appendArray([[1, 12, 12], [3, 12, 12], [18, 0, 3]], (w, api) => api.forEach(n => w.appendInt16(n))).appendInt32(0).appendTaggedFields(),
  3: w => w.appendInt32(0).appendArray([0], (w, id) => w.appendInt32(id).appendString('127.0.0.1').appendInt32(server.address().port).appendString(null))
    .appendString(null).appendInt32(0).appendArray([TOPIC], (w, name) => w.appendInt16(0).appendString(name).appendUUID(ID).appendBoolean(false)
      .appendArray([0], (w, n) => w.appendInt16(0).appendInt32(n).appendInt32(0).appendInt32(0)
        .appendArray([0], (w, id) => w.appendInt32(id), true, false).appendArray([0], (w, id) => w.appendInt32(id), true, false).appendArray([], () => {}, true, false))
      .appendInt32(0)).appendTaggedFields(),
  1: w => w.appendInt32(0).appendInt16(0).appendInt32(0).appendArray([TOPIC], (w, name) => w.appendString(name)
    .appendArray([0], (w, n) => w.appendInt32(n).appendInt16(0).appendInt64(6n).appendInt64(6n).appendInt64(0n)
      .appendArray([0n, 2n], (w, first) => w.appendInt64(PRODUCER).appendInt64(first)).appendInt32(-1).appendUnsignedVarInt(records.length + 1).append(records)))
    .appendTaggedFields()
}

const server = createServer(socket => {
  let pending = Buffer.alloc(0)
  socket.on('data', bytes => {
    pending = Buffer.concat([pending, bytes])
    while (pending.length >= 4 && pending.length >= 4 + pending.readInt32BE(0)) {
      const [key, correlation] = [pending.readInt16BE(4), pending.readInt32BE(8)]
      pending = pending.subarray(4 + pending.readInt32BE(0))
      const answer = answers[key](key === 18 ? Writer.create().appendInt32(correlation) : Writer.create().appendInt32(correlation).appendTaggedFields())
      const size = Buffer.alloc(4)
      size.writeInt32BE(answer.length)
      socket.write(Buffer.concat([size, answer.buffer]))
    }
  })
})
server.listen(0, '127.0.0.1', () => {
  const consumer = new Consumer({ groupId: 'g', clientId: 'c', bootstrapBrokers: [`127.0.0.1:${server.address().port}`], retries: 0 })
  consumer.topics.track(TOPIC)
  const partition = { partition: 0, fetchOffset: 0n, partitionMaxBytes: 1 << 20, currentLeaderEpoch: -1, lastFetchedEpoch: -1 }
  const options = { node: 0, topics: [{ topicId: ID, partitions: [partition] }], isolationLevel: FetchIsolationLevels.READ_COMMITTED }
  consumer.fetch(options, (error, response) => {
    if (error) throw error
    const batches = response.responses[0].partitions[0].records.filter(batch => !(batch.attributes & CONTROL))
    console.log(batches.map(batch => String(batch.firstOffset)).join(' '))
    process.exit(0)
  })
})
JS

seen=$(node fetch.mjs)
echo "@platformatic/kafka 2.12.1, offsets of data that a read_committed fetch returns: $seen (expected: 4)"
[ "$seen" = "0 4" ] || { echo "changed: this was seen before: 0 4"; exit 1; }
