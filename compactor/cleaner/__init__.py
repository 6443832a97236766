"""The two passes of Kafka's cleaner, with exactly its results: grouping, transactions, offset maps, retention, rewriting.

    sources -> fold (transactions, producers) -> pass 1: survivors per record -> pass 2: groups written anew

Reference: org.apache.kafka.storage.internals.log.Cleaner of Kafka 4.4.0. Deviations: docs/compatibility.md.
"""
