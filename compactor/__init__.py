"""Log compaction for Apache Kafka's tiered storage, outside the broker."""

__version__ = "0.1.0"
