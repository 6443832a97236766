"""Cleaner offsets by leader epoch, leader-epoch lineage and Kafka's checkpoint files: pure values and functions (KIP-1272, KIP-101)."""
