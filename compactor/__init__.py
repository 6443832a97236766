"""Log compaction for Apache Kafka's tiered storage, outside the broker."""

__version__ = "0.1.0"
__commit__ = ""
"""Commit of which a release was built (``make release`` writes it). Empty in a checkout."""
