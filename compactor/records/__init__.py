"""Kafka's bytes: batches, records, codecs, indexes, legacy formats; numpy rows over mapped files, numba kernels."""
