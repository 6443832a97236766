"""Kafka's on-disk formats as numpy arrays over mapped files: batches, records, codecs, indexes, producer snapshots."""
