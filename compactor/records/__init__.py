"""Kafka's on-disk formats as numpy arrays over mapped files: record batches, records, codecs, indexes, producer snapshots, message formats
v0 and v1.
"""
